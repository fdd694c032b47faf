"""A right attention with one edit: the text of a file, as somebody would have typed it."""

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equivalence_tests.wrong.operators import Operator, Place, Rewritten
from equivalence_tests.wrong.sites import Site, Span, replaced, span_of
from equivalence_tests.wrong.sources import Right

__all__ = ["Editable", "Version", "diff_of"]

Simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)


@dataclass(frozen=True)
class Version:
    """A right attention with one edit.

    Args:
        right: What was edited.
        operator: The name of the edit.
        text: The whole source.
        lines: Numbers of the lines that were edited.
        adds: Whether it has a parameter or a module that the right one does not have.
    """

    right: Right
    operator: str
    text: str
    lines: tuple[int, ...]
    adds: bool = False

    @property
    def diff(self) -> str:
        """The edit, line by line."""
        return diff_of(self.right.text, self.text)


def diff_of(before: str, after: str) -> str:
    r"""Give the lines that differ.

    >>> diff_of("a\nb\n", "a\nc\n")
    '-b\n+c'
    """
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


class Editable:
    """The text of a right attention, and where edits go.

    Args:
        right: The attention.
        sites: Of ``sites_of``.
    """

    def __init__(self, right: Right, sites: Sequence[Site]) -> None:
        self.right, self.sites = right, sites
        self.lines = right.text.splitlines()
        self.tree = ast.parse(right.text)
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.own = self._own(right.target)
        self.expressions = self._expressions()
        self.parts = tuple(sorted({part for node in self.own for part in _called(node)}))

    def versions(self, operator: Operator, draw: random.Random) -> Iterator[Version]:
        """Give every version that an operator makes of it, each once, in a drawn order."""
        seen = {self.right.text}
        for site in draw.sample(list(self.sites), len(self.sites)):
            for place, statement in self._places(site):
                found = list(operator.rewrite(place))
                for rewritten in draw.sample(found, len(found)):
                    version = self._version(operator.name, statement, place, rewritten, draw)
                    if version is not None and version.text not in seen:
                        seen.add(version.text)
                        yield version

    def _own(self, name: str) -> list[ast.ClassDef]:
        """A class and its bases, itself first."""
        node = self.classes.get(name)
        if node is None:
            return []
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return [node, *(found for base in bases for found in self._own(base))]

    def _places(self, site: Site) -> Iterator[tuple[Place, ast.stmt]]:
        """Give an expression as a place, with the statement that it stands in."""
        for node, statement in self.expressions.get(site.span, []):
            parts, sizes = (self.parts, self.right.sizes) if self._is_own(statement) else ((), {})
            yield Place(node, site, self._others(site, node), parts, sizes), statement

    def _expressions(self) -> dict[Span, list[tuple[ast.expr, ast.stmt]]]:
        found: dict[Span, list[tuple[ast.expr, ast.stmt]]] = defaultdict(list)
        for statement in ast.walk(self.tree):
            if isinstance(statement, Simple) and self._stands_alone(statement):
                for node in ast.walk(statement):
                    if isinstance(node, ast.expr) and _is_loaded(node):
                        found[span_of(node)].append((node, statement))
        return found

    def _stands_alone(self, statement: ast.stmt) -> bool:
        first, last = self.lines[statement.lineno - 1], self.lines[(statement.end_lineno or 0) - 1]
        return not first[: statement.col_offset].strip() and len(last.encode()) == statement.end_col_offset

    def _is_own(self, statement: ast.stmt) -> bool:
        return any(node.lineno <= statement.lineno <= (node.end_lineno or 0) for node in self.own)

    def _others(self, site: Site, node: ast.expr) -> tuple[str, ...]:
        names = set()
        for other in self.sites:
            same = (other.function, other.shape, other.of) == (site.function, site.shape, site.of)
            if (same and other.span[:2] <= site.span[:2]) or (same and other.span[0] == site.span[0]):
                text = self.lines[other.span[0] - 1].encode()[other.span[1] : other.span[3]].decode()
                names |= {text} if text.isidentifier() and other.span[0] == other.span[2] else set()
        return tuple(sorted(names - {ast.unparse(node)}))

    def _version(
        self, name: str, statement: ast.stmt, place: Place, rewritten: Rewritten, draw: random.Random
    ) -> Version | None:
        """Put an edit in: in its place, or on a line of its own before the statement."""
        indent = " " * statement.col_offset
        if rewritten.wraps and isinstance(place.node, ast.Name) and draw.random() < 0.5:
            new = [f"{indent}{place.node.id} = {ast.unparse(rewritten.node)}"]
            after = self.lines[statement.lineno - 1 : statement.end_lineno]
        else:
            changed = replaced(statement, place.site.span, type(place.node), rewritten.node)
            new, after = [indent + ast.unparse(changed)], []
        lines = [*self.lines]
        lines[statement.lineno - 1 : statement.end_lineno] = new + after
        first = statement.lineno
        if rewritten.added:
            where = self._constructor()
            if where is None:
                return None
            lines.insert(where.end_lineno or 0, " " * where.col_offset + f"self.added = {rewritten.added}")
            first += where.lineno < statement.lineno
        edited = tuple(range(first, first + sum(one.count("\n") + 1 for one in new)))
        return Version(self.right, name, "\n".join(lines) + "\n", edited, bool(rewritten.added))

    def _constructor(self) -> ast.stmt | None:
        """The statement that calls the constructor of the base, behind which a parameter can be added."""
        for node in self.own:
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    return next((one for one in function.body if "super().__init__" in ast.unparse(one)), None)
        return None


def _is_loaded(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


def _called(node: ast.ClassDef) -> Iterator[str]:
    """Names of what a class calls as a module of its own: self.name(...)."""
    methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = call.func.value
            if isinstance(owner, ast.Name) and owner.id == "self" and call.func.attr not in methods:
                yield call.func.attr
