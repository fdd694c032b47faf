"""What files say of masks: what their calls pass, what they make of padding, and how many axes they assert."""

import ast
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from equivalence_tests.checker.reach.importing import FILES
from equivalence_tests.checker.reach.proposing import parameters_of, parsed
from equivalence_tests.checker.reach.state import ask
from equivalence_tests.checker.reach.syntax import assigned_in, file_of, nodes_in
from equivalence_tests.checker.reporting.lines import Frames, source_of

AXES = re.compile(r"\b\w*mask\w*\.(ndim\b|dim\(\))|\blen\(\w*mask\w*\.(shape|size\(\))\)")
OF_PADDING = {
    "look": re.compile(r".*\barange\(.* < .*|.* > .*\barange\(.*|.* != .*pad\w*|(?!.*mask).* != 0"),
    "block": re.compile(r".*\barange\(.* >= .*|.* <= .*\barange\(.*|.* == .*pad\w*|(?!.*mask).* == 0"),
}
TURNED = r"(~|not ).*\b{0}\b.*|.*\b{0}\b.* (==|!=|\^) .*|[0-9.]+ - .*\b{0}\b.*|.*(logical_not|\b{0}\.logical_not)\(.*"
Assigned = tuple[ast.expr, ast.expr]  # a target, and what is assigned to it
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


def made_of_padding(function: Callable[..., Any], parameter: str) -> dict[str, list[str]]:
    """Give what files make of lengths or ids under the name of a padding mask, by what a one has to mean in it.

    Real tokens may be looked at ("look"), padding may not ("block"). Nothing comes back where something else is done
    with such a mask on its way to the class.
    """
    found: dict[str, list[str]] = {"look": [], "block": []}
    using = _that_use(type(function)) if "pad" in parameter else {}
    calls = [node for nodes in using.values() for node in nodes if isinstance(node, ast.Call)]
    given = {ast.unparse(x.value).split(".")[0] for call in calls for x in call.keywords if x.arg == parameter}
    every = (x for nodes in using.values() for x in nodes if isinstance(x, ast.expr))
    turned = any(re.fullmatch(TURNED.format(parameter), ast.unparse(x)) for x in every)
    for file, nodes in using.items() if not turned and given <= {parameter, "None"} else ():
        functions = {x.name: x for x in nodes if isinstance(x, ast.FunctionDef)}
        made = (x for node in nodes for own, x in assigned_in(node) if ast.unparse(own) == parameter)
        for value, meaning in ((x, _of_padding(x, functions, ())) for x in made):
            found.get(meaning, []).append(f"{file}: {parameter} = {ast.unparse(value)}")
    return found


def call_that_passes(function: Callable[..., Any], parameter: str) -> str:
    """Give a call, as of the layers in a loop, that passes what has a parameter's name in its place; "" for none."""
    taken = [p.name for p in parameters_of(function)]
    place = taken.index(parameter) if parameter in taken else len(taken)
    calls = (x for nodes in _that_use(type(function)).values() for x in nodes if isinstance(x, ast.Call))
    calls = (x for x in calls if isinstance(x.func, ast.Name | ast.Subscript))
    passing = (x for x in calls if [ast.unparse(one) for one in x.args[place : place + 1]] == [parameter])
    return next(map(ast.unparse, passing), "")


def _that_use(kind: type) -> dict[str, list[ast.AST]]:
    """Give all that the file of a class, and those beside and above that import it, say besides the class itself."""
    own, file = source_of(kind), Path(file_of(kind))
    beside = itertools.chain(*(folder.glob("*.py") for folder in ((file.parent, file.parent.parent) if own else ())))
    texts = {one: one.read_bytes().decode(errors="replace") for one in itertools.islice(beside, FILES)}
    imports = re.compile(rf"^\s*(from|import)\b.*\b{re.escape(file.stem)}\b", re.MULTILINE)
    return {one.name: parsed(x.replace(own, "")) for one, x in texts.items() if one == file or imports.search(x)}


def _of_padding(value: ast.expr, functions: Mapping[str, ast.FunctionDef], before: Sequence[Assigned]) -> str:
    """Say what a one means in a comparison of places with lengths, or of ids with that of padding; else ""."""
    text = ast.unparse(value)
    match value:
        case ast.Name():
            places = [place for place, (own, _) in enumerate(before) if ast.unparse(own) == text]
            return _of_padding(before[places[-1]][1], functions, before[: places[-1]]) if places else ""
        case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in LAID_OUT:
            return _of_padding(inner, functions, before)
        case ast.Call() if not before and (maker := functions.get(ast.unparse(value.func).split(".")[-1])):
            given = [x.value for x in ast.walk(maker) if isinstance(x, ast.Return) and x.value]
            pairs = [pair for node in ast.walk(maker) for pair in assigned_in(node)]
            return _of_padding(given[0], functions, pairs) if len(given) == 1 else ""
    for own in (own for own, x in before if isinstance(own, ast.Name) and "arange(" in ast.unparse(x)):
        text = re.sub(rf"\b{own.id}\b", "arange()", text)
    plain = isinstance(value, ast.Compare) and len(value.ops) == 1
    return next((meaning for meaning, said in OF_PADDING.items() if plain and said.fullmatch(text)), "")


def asserted_axes(kind: type, axes: int) -> Frames:
    """Give the line in which a class asserts how many axes a mask has, where it lets so many through and no more."""
    file = file_of(kind)
    classes = (x for x in (nodes_in(file) if file else ()) if isinstance(x, ast.ClassDef) and x.name == kind.__name__)
    for method in (x for one in classes for x in one.body if isinstance(x, ast.FunctionDef)):
        for test in (x.test for x in ast.walk(method) if isinstance(x, ast.Assert)):
            if _is_true_of(test, axes) and not _is_true_of(test, axes + 1):
                return ((file, test.lineno, method.name),)
    return ()


def _is_true_of(test: ast.expr, axes: int) -> bool:
    """Whether a condition on the number of a mask's axes alone is true of so many."""
    text, count = AXES.subn(str(axes), ast.unparse(test))
    return count > 0 and bool(ask(lambda: eval(text, {"__builtins__": {}}, defaultdict(object))).value)
