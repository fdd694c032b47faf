"""What the text of a file says: its functions, and what an assignment assigns to what."""

import ast
import functools
import linecache
import sys
from collections.abc import Collection, Iterator, Sequence

from equivalence_tests.checker.reporting.lines import is_users


@functools.lru_cache(maxsize=64)
def nodes_in(path: str) -> list[ast.AST]:
    """List what a file says."""
    return list(ast.walk(ast.parse("".join(linecache.getlines(path)))))


def spans(node: ast.stmt, line: int) -> bool:
    """Whether a statement stands in a line, its decorators left aside."""
    return node.lineno <= line <= (node.end_lineno or 0)


def function_at(path: str, name: str, line: int) -> ast.FunctionDef | None:
    """Find the function of this name that a line stands in."""
    functions = (x for x in nodes_in(path) if isinstance(x, ast.FunctionDef))
    return next((x for x in functions if x.name == name and spans(x, line)), None)


def assigned_in(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Give what an assignment assigns to, each with its value; nothing for another statement."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(getattr(target, "elts", ()), getattr(node.value, "elts", ()), strict=False)
        yield from pairs if several else [(target, node.value)]


def file_of(kind: type) -> str:
    """Give the file of the user's that a class is written in; "" where it is none of theirs."""
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", None))
    return file if is_users(file) and file.endswith(".py") else ""


def setting(kind: type, name: str) -> Iterator[tuple[ast.FunctionDef, int, ast.expr]]:
    """Give the methods of a class itself that set an attribute, each with the line and with what it is set to."""
    classes = (x for x in nodes_in(file_of(kind)) if isinstance(x, ast.ClassDef) and x.name == kind.__name__)
    for method in (x for one in classes for x in one.body if isinstance(x, ast.FunctionDef)):
        pairs = (pair for node in ast.walk(method) for pair in assigned_in(node))
        targets = ((x, value) for target, value in pairs for x in ast.walk(target) if isinstance(x, ast.Attribute))
        stored = ((x, value) for x, value in targets if x.attr == name and isinstance(x.ctx, ast.Store))
        yield from ((method, x.lineno, value) for x, value in stored)


def handed_back(path: str, called: str, arguments: Sequence[str], holders: Collection[str]) -> int | None:
    """Give the line of a file that hands what a function, or an object of a class, returns to its next call as it is.

    That is the line of `y, past = attention(x, past)`, if `past` is one of the ``holders``.
    """
    pairs = [(target, made) for node in nodes_in(path) for target, made in assigned_in(node)]
    calls = [(target, made) for target, made in pairs if isinstance(made, ast.Call)]
    names = {called} | {ast.unparse(target) for target, made in calls if ast.unparse(made.func) == called}
    for target, call in calls:
        given = dict(zip(arguments, call.args, strict=False)) | {one.arg: one.value for one in call.keywords}
        handed = {ast.unparse(given[name]) for name in holders if name in given}
        if ast.unparse(call.func) in names and handed & {ast.unparse(x) for x in ast.walk(target)}:
            return call.lineno
    return None
