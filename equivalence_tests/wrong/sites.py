"""Where an edit can be made: the expressions that gave a tensor in a run, each with its shape."""

import ast
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.wrong.sources import Right

__all__ = ["Site", "Span", "replaced", "sites_of", "span_of"]

Span = tuple[int, int, int, int]
PROBE = "_seen_by_the_judge"


@dataclass(frozen=True)
class Site:
    """An expression that gave a tensor.

    Args:
        span: First line and column, last line and column.
        function: First line of the function that it stands in.
        shape: Of the tensor.
        of: "numbers" or "truths".
    """

    span: Span
    function: int
    shape: tuple[int, ...]
    of: str


def span_of(node: ast.expr) -> Span:
    """Say where an expression stands."""
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def sites_of(right: Right, folder: Path) -> list[Site]:
    """Run every call of a right attention and list the expressions that gave a tensor.

    Args:
        right: The attention.
        folder: Where files may be written.
    """
    probes = _Probes()
    tree = ast.fix_missing_locations(probes.visit(ast.parse(right.text)))
    code = ast.unparse(tree)
    _, module = right.imported(code, folder, "probed")
    found: dict[int, Site] = {}

    def probe(index: int, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in (torch.float64, torch.float32, torch.bool):
            span, function = probes.places[index]
            of = "truths" if value.dtype == torch.bool else "numbers"
            found[index] = Site(span, function, tuple(value.shape), of)
        return value

    vars(module)[PROBE] = probe
    made = right.built(module)
    with torch.no_grad():
        for given in right.drawn(0, right.lengths[0]):
            right.run(made, given)
    return [found[index] for index in sorted(found)]


class _Probes(ast.NodeTransformer):
    """Hands every expression of every function but a constructor to the probe."""

    def __init__(self) -> None:
        self.places: list[tuple[Span, int]] = []
        self.function = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if node.name != "__init__":
            before, self.function = self.function, node.lineno
            node.body = [self.visit(statement) for statement in node.body]
            self.function = before
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        node.args = [self.visit(one) for one in node.args]
        node.keywords = [self.visit(one) for one in node.keywords]
        return self._probed(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.value = self.visit(node.value) if node.value is not None and self.function else node.value
        return node

    def _expression(self, node: ast.AST) -> ast.AST:
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.expr)
        return self._probed(visited) if isinstance(getattr(visited, "ctx", ast.Load()), ast.Load) else visited

    visit_BinOp = visit_UnaryOp = visit_Compare = visit_Name = visit_Attribute = visit_Subscript = visit_IfExp = (  # noqa: N815
        _expression
    )

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        return node

    def _probed(self, node: ast.expr) -> ast.expr:
        if not self.function:
            return node
        self.places.append((span_of(node), self.function))
        return ast.Call(ast.Name(PROBE, ast.Load()), [ast.Constant(len(self.places) - 1), node], [])


def replaced(statement: ast.stmt, span: Span, kind: type[ast.expr], other: ast.expr) -> ast.AST:
    """Copy a statement with another expression in the place of one of this kind."""

    class Replacing(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            if type(node) is kind and span_of(node) == span:
                return other
            return self.generic_visit(node)

    return ast.fix_missing_locations(Replacing().visit(copy.deepcopy(statement)))
