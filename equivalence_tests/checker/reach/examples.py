"""The call that stands beside a class in its own file: how its author builds it, and what they hand over.

No script is run: only the assignments that such a call is made of, where they make sizes, tensors and instances.
"""

import ast
import builtins
import doctest
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.tracing import tensors_in

PACKAGES = ("torch", "numpy", "math", "random")
BUILT_IN = ("range", "len", "int", "float", "bool", "list", "tuple", "dict", "max", "min", "sum", "slice")
OUTSIDE = {"load", "save", "open", "download", "read", "write", "from_pretrained", "urlopen", "system", "run"}
LARGEST = 2**21  # entries of all tensors of a call
Names = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A call that stands in a file.

    Args:
        function: The instance that is called there, or the function.
        args: What it is called with.
        kwargs: What it is called with by name.
        line: Where it stands, as it is written.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Names
    line: str


def examples_of(target: Any) -> Iterator[Example]:
    """Find the calls of a class or a function in its own file and docstrings.

    Yields:
        Those that are made of sizes, tensors and what the file defines, with all that they are made of.
    """
    module = sys.modules.get(getattr(target, "__module__", ""))
    if module is None:
        return
    for statements in _blocks(module, target):
        for place, statement in enumerate(statements):
            for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
                example = attempt(partial(_evaluated, call, statements[:place], dict(vars(module)), target))
                if example is not None:
                    yield example


def _blocks(module: ModuleType, target: Any) -> Iterator[list[ast.stmt]]:
    """What runs in a row: the file itself, a function without arguments, such as a test, and a docstring."""
    tree = attempt(lambda: ast.parse(inspect.getsource(module)))
    body = tree.body if tree is not None else []
    yield list(_flat(body))
    for function in (x for x in body if isinstance(x, ast.FunctionDef) and not ast.unparse(x.args)):
        yield list(_flat(function.body))
    for text in (target.__doc__, getattr(getattr(target, "forward", None), "__doc__", None)):
        shown = doctest.DocTestParser().get_examples(text or "")
        parsed = attempt(partial(ast.parse, "".join(one.source for one in shown)))
        yield list(_flat(parsed.body if parsed is not None else []))


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.With | ast.Try):
            yield from _flat(statement.body)
        elif not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement


def _evaluated(call: ast.Call, before: list[ast.stmt], names: Names, target: Any) -> Example | None:
    """Make what a call is made of; None where that does more than to make it, or the call is of something else."""
    made = _made_of(call, before)
    own = target.__name__
    if own not in _names((*made, call)) or not all(_makes(node, names) for node in (*made, call)):
        return None
    exec(compile(ast.fix_missing_locations(ast.Module(made, [])), "<example>", "exec"), names)
    function = _value(call.func, names)
    if function is not target and type(function) is not target:
        return None
    args = tuple(_value(node, names) for node in call.args)
    kwargs = {node.arg: _value(node.value, names) for node in call.keywords if node.arg}
    entries = sum(x.numel() for x in tensors_in((args, kwargs)))
    return Example(function, args, kwargs, ast.unparse(call)) if 0 < entries <= LARGEST else None


def _made_of(call: ast.Call, before: list[ast.stmt]) -> list[ast.stmt]:
    """The assignments that it rests on, in their order."""
    needed, made = _names((call,)), list[ast.stmt]()
    for statement in reversed(before):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if needed & _names(node for node in targets if node is not None):
            made.insert(0, statement)
            needed |= _names((statement,))
    return made


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for one in nodes for node in ast.walk(one) if isinstance(node, ast.Name)}


def _makes(statement: ast.AST, names: Names) -> bool:
    """Whether it calls nothing but what makes numbers and tensors, and what the file itself defines."""
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return isinstance(statement, ast.Assign | ast.AnnAssign | ast.Call) and all(_is_known(f, names) for f in calls)


def _is_known(function: ast.expr, names: Names) -> bool:
    path = ast.unparse(function).split(".")
    found = names.get(path[0])
    if not OUTSIDE.isdisjoint(path) or not _is_near(found, names):
        return False
    if isinstance(found, ModuleType) or len(path) > 1:  # a function of a package, or a method of what was made there
        return True
    if found is None:
        return path[0] in BUILT_IN or path[0] not in vars(builtins)
    inside = getattr(getattr(found, "__init__", found), "__code__", None) or getattr(found, "__code__", None)
    return inside is None or OUTSIDE.isdisjoint(inside.co_names)


def _is_near(found: Any, names: Names) -> bool:
    """Whether something belongs to the file or to a package of numbers; what else is imported may do anything."""
    if found is None:
        return True  # made in the lines above
    named = isinstance(found, type | FunctionType | BuiltinFunctionType)
    owner = found.__name__ if isinstance(found, ModuleType) else (found if named else type(found)).__module__
    return owner in (None, names["__name__"], "builtins") or owner.partition(".")[0] in PACKAGES  # torch's C says none


def _value(node: ast.expr, names: Names) -> Any:
    return eval(compile(ast.Expression(node), "<example>", "eval"), names)
