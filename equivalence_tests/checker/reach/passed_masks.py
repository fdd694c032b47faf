"""What the calls in a file pass as a mask: a triangle of ones, which is the past or the future."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from equivalence_tests.checker.reach.proposing import parameters_of, parsed
from equivalence_tests.checker.reach.syntax import assigned_in
from equivalence_tests.checker.reporting.lines import source_of

LAID_OUT = ("bool", "view", "reshape", "unsqueeze", "expand", "repeat", "to", "type", "type_as", "contiguous", "int")
ONES = re.compile(r"^(torch\.)?tri[lu]\(\w+\.(new_)?ones\(|^\w+\.(new_)?ones\([^()]*\)\.tri[lu]\(")


def triangles_passed(function: Callable[..., Any], parameter: str) -> dict[str, list[str]]:
    """Give what a file passes as a mask where that is a triangle of ones, by what a one has to mean in it.

    Ones on and below the diagonal may be looked at ("look"), ones above it may not ("block").
    """
    owner: Any = function if inspect.isroutine(function) else type(function)
    taken = [p.name for p in parameters_of(function)]
    place = taken.index(parameter) if parameter in taken else len(taken)
    nodes = parsed(source_of(inspect.getmodule(owner)))
    made = [(own, x) for node in nodes for own, x in assigned_in(node) if isinstance(x, ast.Call)]
    names = {
        ast.unparse(own) for own, x in made if getattr(x.func, "id", getattr(x.func, "attr", "")) == owner.__name__
    }
    found: dict[str, list[str]] = {"look": [], "block": []}
    for caller in (node for node in nodes if isinstance(node, ast.FunctionDef)):
        calls = [*_calls_of(caller, {owner.__name__, *names})]
        inside = ast.walk(caller) if calls else ()
        assigned = {ast.unparse(own): value for node in inside for own, value in assigned_in(node)}
        for call in calls:
            given = [x.value for x in call.keywords if x.arg == parameter] or call.args[place : place + 1]
            for meaning in filter(None, (_triangle(x, assigned) for x in given)):
                passed = ast.unparse(assigned.get(ast.unparse(given[0]), given[0]))
                found[meaning].append(f"{ast.unparse(call)} passes {passed}")
    return found


def _calls_of(caller: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    calls = (node for node in ast.walk(caller) if isinstance(node, ast.Call))
    yield from (call for call in calls if ast.unparse(call.func) in names)


def _triangle(value: ast.expr, assigned: Mapping[str, ast.expr]) -> str:
    """Say what a one means in a triangle; "" where it is none, or anything else is done with it."""
    if isinstance(value, ast.Name):
        return _triangle(assigned[value.id], {}) if value.id in assigned else ""
    if isinstance(value, ast.Subscript):
        return _triangle(value.value, assigned)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return ""
    if value.func.attr in LAID_OUT:
        return _triangle(value.func.value, assigned)
    if ONES.search(ast.unparse(value)) is None:
        return ""
    first = int(ast.unparse(value.func.value) == "torch")  # its own argument is the ones
    given = [*value.args[first:], *(one.value for one in value.keywords if one.arg == "diagonal")]
    return {"tril": "look", "triu": "block" * ([*map(ast.unparse, given)] == ["1"])}.get(value.func.attr, "")
