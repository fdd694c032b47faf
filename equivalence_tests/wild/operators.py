"""Realistic mistakes, as changes of one place in the syntax tree of somebody's function."""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["OPERATORS", "Change", "Operator", "changes_of"]

Rewrite = Callable[[ast.expr], Iterator[ast.expr]]


@dataclass(frozen=True)
class Operator:
    """One kind of mistake.

    Args:
        name: What is done.
        rewrite: Gives what may stand for an expression; nothing where the mistake cannot be made there.
        named: What the checker may call it, as a regular expression for the names of findings.
        removes: Whether an operation is gone, so that only what uses its value can be pointed at.
    """

    name: str
    rewrite: Rewrite
    named: str
    removes: bool = False


@dataclass(frozen=True)
class Change:
    """One place where an operator applies.

    Args:
        operator: The kind of mistake.
        function: The whole function, changed.
        lines: The first and the last line of the statement that was changed.
        before: The expression.
        after: What stands there now.
        target: What the statement assigns to; "" where it assigns nothing.
    """

    operator: Operator
    function: ast.FunctionDef
    lines: tuple[int, int]
    before: str
    after: str
    target: str


def changes_of(function: ast.FunctionDef, executed: frozenset[int]) -> Iterator[Change]:
    r"""Give every change of a function in the lines that ran.

    Args:
        function: Its syntax tree, with the line numbers of its file.
        executed: Numbers of the lines that ran.

    >>> tree = ast.parse("def f(q, k, scale):\n    return (q @ k.transpose(1, 2) * scale).softmax(dim=-1)").body[0]
    >>> for change in changes_of(tree, frozenset({2})):
    ...     if change.operator.name in ("drop scale", "another axis of the softmax"):
    ...         print(change.after)
    (q @ k.transpose(1, 2) * scale).softmax(dim=-2)
    q @ k.transpose(1, 2)
    """
    for statement in ast.walk(function):
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, ast.AnnAssign)):
            lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            if statement.value is not None and executed.intersection(lines):
                yield from _changes_in(function, statement)


def _changes_in(function: ast.FunctionDef, statement: ast.stmt) -> Iterator[Change]:
    lines = (statement.lineno, statement.end_lineno or statement.lineno)
    for node in ast.walk(statement.value):  # type: ignore[attr-defined]  # has one: see changes_of
        if not isinstance(node, ast.expr):
            continue
        for operator in OPERATORS:
            for other in operator.rewrite(node):
                changed = _replaced(function, node, other)
                yield Change(operator, changed, lines, ast.unparse(node), ast.unparse(other), _target(statement))
    if isinstance(statement, ast.Assign):
        for operator in FOREIGN:
            for other in operator.rewrite(statement.value):
                changed = _replaced(function, statement.value, other)
                before = ast.unparse(statement.value)
                yield Change(operator, changed, lines, before, ast.unparse(other), _target(statement))


def _target(statement: ast.stmt) -> str:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return ", ".join(ast.unparse(target) for target in targets if target is not None)


def _replaced(function: ast.FunctionDef, node: ast.expr, other: ast.expr) -> ast.FunctionDef:
    # Identity finds the place, so the tree itself is changed, copied and put back.
    places = [
        (parent, name, index)
        for parent in ast.walk(function)
        for name, value in ast.iter_fields(parent)
        for index, item in (enumerate(value) if isinstance(value, list) else [(None, value)])
        if item is node
    ]
    (parent, name, index) = places[0]
    _put(parent, name, index, ast.copy_location(other, node))
    changed = copy.deepcopy(function)
    _put(parent, name, index, node)
    return ast.fix_missing_locations(changed)


def _put(parent: ast.AST, name: str, index: int | None, node: ast.expr) -> None:
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def _says(node: ast.AST, *words: str) -> bool:
    text = ast.unparse(node).lower()
    return any(word in text for word in words)


def _method(node: ast.expr) -> str:
    """The name of what is called: "transpose" of x.transpose(1, 2) and of torch.transpose(x, 1, 2)."""
    if isinstance(node, ast.Call):
        return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return ""


def _scales(node: ast.expr) -> bool:
    return _says(node, "scal", "sqrt", "** -0.5", "**-0.5") and not _says(
        node, "softmax", "matmul", "@", "attn_", "lora"
    )


def _drop_scale(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)) and _scales(node.right):
        yield node.left


def _change_scale(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)) and _scales(node.right):
        yield ast.BinOp(node.left, node.op, ast.BinOp(node.right, ast.Mult(), node.right))
    if isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg in ("scale", "scaling") and not isinstance(keyword.value, ast.Constant):
                other = copy.copy(node)
                twice = ast.BinOp(keyword.value, ast.Mult(), ast.Constant(2.0))
                other.keywords = [*node.keywords]
                other.keywords[index] = ast.keyword(keyword.arg, twice)
                yield other


def _swap_roles(node: ast.expr) -> Iterator[ast.expr]:
    """The arguments of an attention function in another order, or one projection for the other."""
    if isinstance(node, ast.Call):
        named = [ast.unparse(argument).lower() for argument in node.args]
        queries = [i for i, text in enumerate(named) if text.startswith("q")]
        keys = [i for i, text in enumerate(named) if text.startswith("k")]
        values = [i for i, text in enumerate(named) if text.startswith("v")]
        for one, two in ((queries, keys), (keys, values)):
            if len(one) == 1 and len(two) == 1:
                other = copy.copy(node)
                other.args = [*node.args]
                other.args[one[0]], other.args[two[0]] = node.args[two[0]], node.args[one[0]]
                yield other
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        swaps = {"q_proj": "k_proj", "k_proj": "v_proj", "to_q": "to_k", "to_k": "to_v", "query": "key", "key": "value"}
        if node.func.attr in swaps and ast.unparse(node.func.value) in ("self", "attn"):
            other = copy.copy(node)
            other.func = ast.Attribute(node.func.value, swaps[node.func.attr], ast.Load())
            yield other


def _softmax_axis(node: ast.expr) -> Iterator[ast.expr]:
    if _method(node) == "softmax":
        assert isinstance(node, ast.Call)
        for index, keyword in enumerate(node.keywords):
            if keyword.arg == "dim":
                other = copy.copy(node)
                other.keywords = [*node.keywords]
                other.keywords[index] = ast.keyword("dim", ast.UnaryOp(ast.USub(), ast.Constant(2)))
                yield other
        if node.args and ast.unparse(node.args[-1]) == "-1":
            other = copy.copy(node)
            other.args = [*node.args[:-1], ast.UnaryOp(ast.USub(), ast.Constant(2))]
            yield other


def _no_transpose(node: ast.expr) -> Iterator[ast.expr]:
    """Heads split by a view in the order in which they should stand, without the transpose behind it."""
    if _method(node) == "transpose" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        axes = [ast.unparse(argument) for argument in node.args]
        inner = node.func.value
        if axes == ["1", "2"] and _method(inner) in ("view", "reshape"):
            shape = ast.Attribute(node, "shape", ast.Load())
            yield ast.Call(ast.Attribute(inner, "reshape", ast.Load()), [shape], [])


def _merge_without_transpose(node: ast.expr) -> Iterator[ast.expr]:
    if (
        _method(node) in ("contiguous", "transpose")
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
    ):
        inner = node if _method(node) == "transpose" else node.func.value
        if _method(inner) == "transpose" and isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            source = inner.func.value
            if [ast.unparse(x) for x in inner.args] == ["1", "2"] and isinstance(source, ast.Name):
                shape = ast.Attribute(node, "shape", ast.Load())
                yield ast.Call(ast.Attribute(source, "reshape", ast.Load()), [shape], [])


def _masks(node: ast.expr) -> bool:
    return _says(node, "mask") and not _says(node, "softmax", "matmul", "@")


def _drop_mask(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _masks(node.right):
        yield node.left
    if _method(node) == "masked_fill" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield node.func.value
    if isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg in ("attn_mask", "attention_mask") and not isinstance(keyword.value, ast.Constant):
                other = copy.copy(node)
                other.keywords = [*node.keywords]
                other.keywords[index] = ast.keyword(keyword.arg, ast.Constant(None))
                yield other


def _wrong_mask(node: ast.expr) -> Iterator[ast.expr]:
    """A mask with the other sign, or moved by one key."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _masks(node.right):
        yield ast.BinOp(node.left, ast.Sub(), node.right)
        yield ast.BinOp(node.left, ast.Add(), _rolled(node.right))
    if _method(node) == "masked_fill" and isinstance(node, ast.Call) and node.args:
        for mask in (ast.UnaryOp(ast.Invert(), node.args[0]), _rolled(node.args[0])):
            other = copy.copy(node)
            other.args = [mask, *node.args[1:]]
            yield other
    if isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg == "attn_mask" and not isinstance(keyword.value, ast.Constant):
                other = copy.copy(node)
                other.keywords = [*node.keywords]
                other.keywords[index] = ast.keyword(keyword.arg, _rolled(keyword.value))
                yield other
            if keyword.arg == "is_causal":
                other = copy.copy(node)
                other.keywords = [*node.keywords]
                other.keywords[index] = ast.keyword(keyword.arg, ast.UnaryOp(ast.Not(), keyword.value))
                yield other


def _rolled(node: ast.expr) -> ast.expr:
    minus_one = ast.UnaryOp(ast.USub(), ast.Constant(1))
    return ast.Call(ast.Attribute(node, "roll", ast.Load()), [ast.Constant(1), minus_one], [])


def _drop_residual(node: ast.expr) -> Iterator[ast.expr]:
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and _says(node.right, "residual", "shortcut", "bias")
    ):
        yield node.left
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _says(node.left, "residual", "shortcut"):
        yield node.right


def _off_by_one(node: ast.expr) -> Iterator[ast.expr]:
    """A cache that loses a step, or is concatenated in the wrong order."""
    if _method(node) in ("cat", "concat") and isinstance(node, ast.Call) and node.args and _says(node, "past", "cache"):
        pieces = node.args[0]
        if isinstance(pieces, (ast.List, ast.Tuple)) and len(pieces.elts) == 2:
            other = copy.copy(node)
            other.args = [type(pieces)([*reversed(pieces.elts)], ast.Load()), *node.args[1:]]
            yield other


def _wrong_groups(node: ast.expr) -> Iterator[ast.expr]:
    """Key heads repeated as a b a b where a a b b is meant."""
    method = _method(node)
    if method == "repeat_interleave" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        times = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "repeats"), None)
        if times is not None and ast.unparse(node.func.value) not in ("torch",):
            one = ast.Constant(1)
            yield ast.Call(ast.Attribute(node.func.value, "repeat", ast.Load()), [one, times, one, one], [])
    if method == "repeat_kv" and isinstance(node, ast.Call) and len(node.args) == 2:
        one = ast.Constant(1)
        yield ast.Call(ast.Attribute(node.args[0], "repeat", ast.Load()), [one, node.args[1], one, one], [])


def _rotation(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and _says(node.right, "sin") and _says(node.left, "cos"):
        yield ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
        yield node.left
    if _method(node) in ("cat", "stack") and isinstance(node, ast.Call) and node.args:
        pieces = node.args[0]
        if (
            isinstance(pieces, (ast.Tuple, ast.List))
            and len(pieces.elts) == 2
            and ast.unparse(pieces.elts[0]).startswith("-")
        ):
            other_call = copy.copy(node)
            other_call.args = [type(pieces)([*reversed(pieces.elts)], ast.Load()), *node.args[1:]]
            yield other_call


def _norm_axis(node: ast.expr) -> Iterator[ast.expr]:
    if _method(node) in ("mean", "normalize", "var", "norm") and isinstance(node, ast.Call):
        for index, argument in enumerate(node.args):
            if ast.unparse(argument) == "-1":
                other = copy.copy(node)
                other.args = [*node.args]
                other.args[index] = ast.UnaryOp(ast.USub(), ast.Constant(2))
                yield other
        for index, keyword in enumerate(node.keywords):
            if keyword.arg == "dim" and ast.unparse(keyword.value) == "-1":
                other = copy.copy(node)
                other.keywords = [*node.keywords]
                other.keywords[index] = ast.keyword("dim", ast.UnaryOp(ast.USub(), ast.Constant(2)))
                yield other


def _drop_norm(node: ast.expr) -> Iterator[ast.expr]:
    if _method(node) in ("q_norm", "k_norm", "norm_q", "norm_k", "q_layernorm", "k_layernorm") and isinstance(
        node, ast.Call
    ):
        yield node.args[0]


def _appended(method: str, *arguments: float, **keywords: float) -> Rewrite:
    def rewrite(node: ast.expr) -> Iterator[ast.expr]:
        if isinstance(node, (ast.Call, ast.BinOp)) and not _says(
            node, "mask", "shape", "size(", "split", "chunk", "unbind"
        ):
            given: list[ast.expr] = [_number(argument) for argument in arguments]
            named = [ast.keyword(name, _number(value)) for name, value in keywords.items()]
            yield ast.Call(ast.Attribute(node, method, ast.Load()), given, named)

    return rewrite


def _number(value: float) -> ast.expr:
    return ast.UnaryOp(ast.USub(), ast.Constant(-value)) if value < 0 else ast.Constant(value)


# A norm that is written out has a scale of its own.
OPERATORS = (
    Operator("drop scale", _drop_scale, r"scale|norm", removes=True),
    Operator("change scale", _change_scale, r"scale|norm"),
    Operator("swap roles", _swap_roles, r"swap|wrong|exchang|role|_for_|as_|not_|project"),
    Operator("another axis of the softmax", _softmax_axis, r"softmax"),
    Operator("split without transpose", _no_transpose, r"split|transpose|layout|mix"),
    Operator("merge without transpose", _merge_without_transpose, r"merge|transpose|layout|mix"),
    Operator("drop mask", _drop_mask, r"mask|causal|future|padding", removes=True),
    Operator("wrong mask", _wrong_mask, r"mask|causal|future|padding|shift"),
    Operator("drop residual or bias", _drop_residual, r"residual|bias", removes=True),
    Operator("cache the wrong way round", _off_by_one, r"cache|order|past"),
    Operator("groups in another order", _wrong_groups, r"group|head|repeat|tile"),
    Operator("rotation", _rotation, r"rot|angle|position|changed_by"),
    Operator("axis of a norm", _norm_axis, r"norm|changed_by"),
    Operator("drop norm", _drop_norm, r"norm", removes=True),
)
FOREIGN = (
    Operator("roll", _appended("roll", 1, 1), r"roll|order|shift|mix"),
    Operator("clamp", _appended("clamp", min=-0.2, max=0.2), r"clamp"),
    Operator("abs", _appended("abs"), r"abs"),
    Operator("mul", _appended("mul", 1.3), r"mul|scale|times|factor"),
    Operator("flip", _appended("flip", -1), r"flip|order|mix|rever"),
)
