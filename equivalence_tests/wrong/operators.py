"""Random edits of right code, each a change of one expression that gives a tensor."""

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from equivalence_tests.wrong.sites import Site

__all__ = ["OPERATORS", "Operator", "Place", "Rewritten", "wraps"]


@dataclass(frozen=True)
class Place:
    """An expression with what an operator may use around it.

    Args:
        node: The expression.
        site: What it gave.
        others: Names of tensors of the same shape that are bound before it.
        parts: Names of the modules that the class calls.
        sizes: How the constructor writes each size; empty where no parameter can be added.
    """

    node: ast.expr
    site: Site
    others: tuple[str, ...]
    parts: tuple[str, ...]
    sizes: Mapping[int, str]


@dataclass(frozen=True)
class Rewritten:
    """What stands for an expression now.

    Args:
        node: The expression.
        added: What the constructor assigns to ``self.added``; "" for nothing.
        wraps: Whether the old expression is an operand, so that the edit may be a line of its own.
    """

    node: ast.expr
    added: str = ""
    wraps: bool = False


Rewrite = Callable[[Place], Iterator[Rewritten]]


@dataclass(frozen=True)
class Operator:
    """One kind of edit."""

    name: str
    rewrite: Rewrite


def wraps(name: str, *templates: str, dims: int = 1, of: str = "numbers", added: str = "") -> Operator:
    """Make an operator of templates.

    Args:
        name: Of the operator.
        templates: Expressions of E, the old one; O stands for another tensor of that shape, M for a module.
        dims: How many axes the tensor must have.
        of: "numbers" or "truths".
        added: What the constructor assigns to ``self.added``, with LAST for the size of the last axis.
    """

    def rewrite(place: Place) -> Iterator[Rewritten]:
        shape = place.site.shape
        if place.site.of != of or len(shape) < dims:
            return
        last = place.sizes.get(shape[-1], "") if shape else ""
        if added and (not place.sizes or ("LAST" in added and not last)):
            return
        for template in templates:
            for node in _filled(template, place):
                yield Rewritten(node, added.replace("LAST", last), wraps=True)

    return Operator(name, rewrite)


def _filled(template: str, place: Place) -> Iterator[ast.expr]:
    tree = ast.parse(template, mode="eval").body
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for other in place.others if "O" in names else ("",):
        for part in place.parts if "M" in names else ("",):
            yield _Filling(place.node, other, part).visit(_evaluated_once(copy.deepcopy(tree), place.node))


def _evaluated_once(tree: ast.expr, node: ast.expr) -> ast.expr:
    """Keep what is computed in a variable where it stands twice: a second product would be a second attention."""
    uses = [one for one in ast.walk(tree) if isinstance(one, ast.Name) and one.id == "E"]
    if len(uses) > 1 and not isinstance(node, ast.Name):
        first = min(uses, key=lambda one: one.col_offset)
        for use in uses:
            use.id = "kept"
        first.id = "KEPT"
    return tree


class _Filling(ast.NodeTransformer):
    def __init__(self, node: ast.expr, other: str, part: str) -> None:
        self.node, self.other, self.part = node, other, part

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "E":
            return copy.deepcopy(self.node)
        if node.id == "KEPT":
            return ast.NamedExpr(ast.Name("kept", ast.Store()), copy.deepcopy(self.node))
        if node.id == "O":
            return ast.Name(self.other, ast.Load())
        return ast.Attribute(ast.Name("self", ast.Load()), self.part, ast.Load()) if node.id == "M" else node


def _is_no_tensor(node: ast.expr) -> bool:
    """Whether it is torch, self, super(), or what any of them holds: self.norm of ``self.norm.forward(x)``."""
    inner = node.value if isinstance(node, ast.Attribute) else node.func if isinstance(node, ast.Call) else node
    return isinstance(inner, ast.Name) and inner.id in ("torch", "F", "math", "self", "nn", "super")


def _operand(node: ast.expr) -> ast.expr | None:
    """The tensor that a call works on: x of x.softmax(-1), F.softmax(x, -1) and self.part(x)."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and not _is_no_tensor(node.func.value):
        return node.func.value
    return node.args[0] if node.args and not isinstance(node.args[0], ast.Starred) else None


def _with_operand(node: ast.Call, operand: ast.expr) -> ast.expr:
    other = copy.deepcopy(node)
    if _operand(node) is not (node.args[0] if node.args else None):
        assert isinstance(other.func, ast.Attribute)
        other.func.value = operand
    else:
        other.args[0] = operand
    return other


def _drop_call(place: Place) -> Iterator[Rewritten]:
    found = _operand(place.node)
    if found is not None:
        yield Rewritten(found)


def _drop_operand(place: Place) -> Iterator[Rewritten]:
    if isinstance(place.node, ast.BinOp):
        yield Rewritten(place.node.left)
        yield Rewritten(place.node.right)


def _drop_index(place: Place) -> Iterator[Rewritten]:
    if isinstance(place.node, ast.Subscript):
        yield Rewritten(place.node.value)


def _twice(place: Place) -> Iterator[Rewritten]:
    if isinstance(place.node, ast.Call) and _operand(place.node) is not None:
        yield Rewritten(_with_operand(place.node, copy.deepcopy(place.node)))


def _around_call(template: str) -> Rewrite:
    def rewrite(place: Place) -> Iterator[Rewritten]:
        found = _operand(place.node)
        if found is not None and place.site.of == "numbers":
            tree = ast.parse(template, mode="eval").body
            filled = _Filling(place.node, "", "").visit(tree)
            yield Rewritten(_put_operand(filled, found))

    return rewrite


def _put_operand(tree: ast.expr, found: ast.expr) -> ast.expr:
    class Putting(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return copy.deepcopy(found) if node.id == "A" else node

    filled: ast.expr = Putting().visit(tree)
    return filled


def _exchange_operands(place: Place) -> Iterator[Rewritten]:
    if isinstance(place.node, ast.BinOp):
        yield Rewritten(ast.BinOp(place.node.right, place.node.op, place.node.left))


def _another_operation(place: Place) -> Iterator[Rewritten]:
    others: dict[type[ast.operator], type[ast.operator]] = {
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Div,
        ast.Div: ast.Mult,
    }
    if isinstance(place.node, ast.BinOp) and type(place.node.op) in others:
        yield Rewritten(ast.BinOp(place.node.left, others[type(place.node.op)](), place.node.right))


def _exchange_arguments(place: Place) -> Iterator[Rewritten]:
    if isinstance(place.node, ast.Call) and len(place.node.args) > 1:
        for index in range(len(place.node.args) - 1):
            other = copy.deepcopy(place.node)
            other.args[index : index + 2] = reversed(other.args[index : index + 2])
            yield Rewritten(other)


def _another_name(place: Place) -> Iterator[Rewritten]:
    if isinstance(place.node, ast.Name):
        for other in place.others:
            yield Rewritten(ast.Name(other, ast.Load()))


def _another_part(place: Place) -> Iterator[Rewritten]:
    node = place.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in place.parts:
        for part in place.parts:
            if part != node.func.attr:
                other = copy.deepcopy(node)
                assert isinstance(other.func, ast.Attribute)
                other.func.attr = part
                yield Rewritten(other)


def _another_constant(place: Place) -> Iterator[Rewritten]:
    """An axis, an offset or a factor: a constant of this operation, and not of those inside it."""
    for index, constant in enumerate(_constants(place.node)):
        value = constant.value
        assert isinstance(value, int | float)
        for new in (not value,) if isinstance(value, bool) else (value + 1, value - 1, -value):
            other = copy.deepcopy(place.node)
            _constants(other)[index].value = new
            yield Rewritten(other)


def _constants(node: ast.expr) -> list[ast.Constant]:
    near: list[ast.AST] = [node]
    if isinstance(node, ast.Call):
        near = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.BinOp):
        near = [node.left, node.right]
    elif isinstance(node, ast.Subscript):
        near = list(ast.walk(node.slice))
    near += [one.operand for one in near if isinstance(one, ast.UnaryOp)]
    near += [item for one in near if isinstance(one, ast.Tuple) for item in one.elts]
    return [one for one in near if isinstance(one, ast.Constant) and isinstance(one.value, int | float)]


def _summed_over_less(left: str, right: str) -> Rewrite:
    """A part of the axis that a product sums over is left out on both sides."""

    def rewrite(place: Place) -> Iterator[Rewritten]:
        node = place.node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            sides = (f"E{left}", node.left), (f"E{right}", node.right)
            made = [_Filling(side, "", "").visit(ast.parse(text, mode="eval").body) for text, side in sides]
            yield Rewritten(ast.BinOp(made[0], ast.MatMult(), made[1]))
        if isinstance(node, ast.Call) and len(node.args) >= 3 and "scaled_dot_product" in ast.unparse(node.func):
            other = copy.deepcopy(node)
            for index in (1, 2):
                text = ast.parse(f"E{right}", mode="eval").body
                other.args[index] = _Filling(node.args[index], "", "").visit(text)
            yield Rewritten(other)

    return rewrite


def _minus_right(place: Place) -> Iterator[Rewritten]:
    if isinstance(place.node, ast.BinOp) and isinstance(place.node.op, ast.MatMult):
        yield Rewritten(ast.BinOp(place.node, ast.Sub(), place.node.right))
        yield Rewritten(ast.BinOp(place.node, ast.Add(), place.node.right))


OPERATORS = (
    Operator("drop: a call", _drop_call),
    Operator("drop: an operand", _drop_operand),
    Operator("drop: an index", _drop_index),
    wraps("drop: all of it", "torch.zeros_like(E)", "torch.ones_like(E)"),
    Operator("duplicate: a call", _twice),
    Operator("duplicate: add the operand of a product", _minus_right),
    Operator("duplicate: add what a call took", _around_call("E + A")),
    Operator("duplicate: subtract what a call took", _around_call("E - A")),
    wraps("duplicate: one token for its neighbour", "torch.cat([E[:, :1], E[:, :-1]], 1)", dims=3),
    wraps("duplicate: the first head for all", "E[:, :1].expand_as(E)", dims=4),
    Operator("slice: last of a sum", _summed_over_less("[..., :-1]", "[..., :-1, :]")),
    Operator("slice: first of a sum", _summed_over_less("[..., 1:]", "[..., 1:, :]")),
    Operator("slice: every second of a sum", _summed_over_less("[..., ::2]", "[..., ::2, :]")),
    wraps("slice: last channel zeroed", "F.pad(E[..., :-1], (0, 1))", dims=2),
    wraps("slice: first channel zeroed", "F.pad(E[..., 1:], (1, 0))", dims=2),
    wraps("slice: last row zeroed", "F.pad(E[..., :-1, :], (0, 0, 0, 1))", dims=2),
    wraps("slice: half of the channels", "E.index_fill(-1, torch.arange(E.size(-1) // 2), 0.0)", dims=2),
    wraps("scale: by a number", "E * 2", "E * 0.5", "E * 1.01", "-E"),
    wraps("scale: by the root of the width", "E * E.size(-1) ** 0.5", "E / E.size(-1) ** 0.5", dims=2),
    wraps("scale: by the number of rows", "E / E.size(-2)", "E / E.size(-2) ** 0.5", dims=2),
    wraps("scale: by a temperature of its own", "E / E.std()", "E / E.abs().amax()"),
    wraps("scale: by a parameter", "E * self.added", added="nn.Parameter(torch.tensor(1.3))"),
    wraps("scale: channels by a parameter", "E * self.added", added="nn.Parameter(torch.rand(LAST))"),
    wraps("add: a number", "E + 1", "E + 0.1", "E - 1"),
    wraps("add: another tensor", "E + O", "E - O", "E + 0.1 * O"),
    wraps("add: its mean", "E + E.mean(-1, keepdim=True)", "E + E.mean(-2, keepdim=True)", dims=2),
    wraps("add: itself, moved", "E + E.flip(-1)", "E + E.roll(1, -2)", dims=2),
    wraps("add: its square", "E + 0.1 * E**2"),
    wraps("add: positions", "E + torch.arange(E.size(-2))[:, None] * 0.1", dims=2),
    wraps("add: a parameter", "E + self.added", added="nn.Parameter(torch.randn(LAST))"),
    wraps("add: a projection of itself", "E + self.added(E)", added="nn.Linear(LAST, LAST, bias=False)"),
    wraps("add: a projection of another", "E + self.added(O)", added="nn.Linear(LAST, LAST)"),
    wraps("gate: by itself", "E * E.sigmoid()", "E * E.tanh()", "F.gelu(E)"),
    wraps("gate: by another tensor", "E * O.sigmoid()", "E * O", "E * O.relu()"),
    wraps("gate: by its mean", "E * E.mean(-1, keepdim=True).sigmoid()", dims=2),
    wraps("gate: by a parameter", "E * self.added.sigmoid()", added="nn.Parameter(torch.randn(LAST))"),
    wraps("gate: by a projection", "E * self.added(E).sigmoid()", added="nn.Linear(LAST, LAST)"),
    wraps("normalise: layer", "F.layer_norm(E, E.shape[-1:])", dims=2),
    wraps("normalise: length", "F.normalize(E, dim=-1)", "F.normalize(E, dim=-2)", dims=2),
    wraps("normalise: centre", "E - E.mean(-1, keepdim=True)", "E - E.mean(-2, keepdim=True)", dims=2),
    wraps("normalise: by the sum", "E / E.sum(-1, keepdim=True)", "E / E.sum(-2, keepdim=True)", dims=2),
    wraps("normalise: softmax", "E.softmax(-1)", "E.softmax(-2)", dims=2),
    wraps("normalise: square and by the sum", "E**2 / (E**2).sum(-1, keepdim=True)", dims=2),
    wraps("normalise: by a layer of its own", "self.added(E)", added="nn.LayerNorm(LAST)"),
    wraps("transpose: square", "E.mT", dims=2),
    wraps("transpose: by a view", "E.mT.reshape(E.shape)", "E.transpose(1, 2).reshape(E.shape)", dims=3),
    wraps("roll: along the last axis", "E.roll(1, -1)", dims=1),
    wraps("roll: along rows", "E.roll(1, -2)", dims=2),
    wraps("roll: along heads or tokens", "E.roll(1, 1)", dims=3),
    wraps("roll: over the batch", "E.roll(1, 0)", dims=2),
    Operator("reuse: another tensor", _another_name),
    Operator("reuse: another projection", _another_part),
    wraps("reuse: a projection once more", "M(E)"),
    wraps("reuse: the weight of a projection", "E @ M.weight", "E + M.bias", dims=2),
    wraps("permute: flip an axis", "E.flip(-1)", "E.flip(-2)", dims=2),
    wraps("permute: flip heads or tokens", "E.flip(1)", dims=3),
    wraps("permute: exchange halves", "torch.cat(E.chunk(2, -1)[::-1], -1)", dims=2),
    wraps("permute: sum up", "E.cumsum(-1)", "E.cumsum(-2)", dims=2),
    Operator("permute: exchange operands", _exchange_operands),
    Operator("permute: exchange arguments", _exchange_arguments),
    Operator("permute: another constant", _another_constant),
    Operator("permute: another operation", _another_operation),
    wraps("clamp: to a range", "E.clamp(-0.5, 0.5)", "E.clamp(-3, 3)", "E.clamp(min=0)", "E.clamp(max=0.2)"),
    wraps("clamp: smoothly", "E.tanh()", "5 * (E / 5).tanh()"),
    wraps("clamp: no sign", "E.abs()", "E.sign() * E**2"),
    wraps("detach: part of it again", "E + 0.1 * E.detach()", "E.detach().clone().mul_(1.1)"),
    wraps("detach: rounded", "E.detach().to(torch.bfloat16).to(E)", "(E * 8).round() / 8"),
    wraps("mask: inverted", "~E", of="truths"),
    wraps("mask: moved", "E.roll(1, -1)", "E.flip(-1)", of="truths"),
    wraps("mask: nothing or all", "torch.zeros_like(E)", of="truths"),
    wraps("mask: transposed", "E.mT", dims=2, of="truths"),
)
