"""Build somebody's class as the code that uses it does: construct what constructs it, and take it out of that."""

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from equivalence_tests.checker.reach.importing import definitions_beside
from equivalence_tests.checker.reach.proposing import nodes_of, parameters_of, parsed
from equivalence_tests.checker.reach.syntax import assigned_in
from equivalence_tests.checker.reporting.lines import source_of

MOST_CALLERS, SEVERAL = 3, 3


@functools.lru_cache(maxsize=64)
def asks_for_parts(target: Any) -> bool:
    """Whether a constructor wants its layers, or several parts, handed over: it keeps them, and calls what it kept."""
    required = {p.name for p in parameters_of(target) if p.default is p.empty}
    nodes = nodes_of(target)
    kept = {ast.unparse(own) for node in nodes for own, x in assigned_in(node) if getattr(x, "id", "") in required}
    called = {ast.unparse(x.func) for x in nodes if isinstance(x, ast.Call)}
    gone_through = {ast.unparse(x.iter) for x in nodes if isinstance(x, ast.For | ast.comprehension)}
    return bool(kept & gone_through) or len(kept & called) >= SEVERAL


def taken_from_callers(target: type, construct: Callable[[Any], Any]) -> Iterator[nn.Module]:
    """Give the first instance in what each function or class makes that constructs this one.

    ``construct`` calls a class or a factory, and gives None where it finds no way to.
    """
    for whole in made_by_callers(target, construct):
        yield from itertools.islice((m for m in whole.modules() if _is_of(target, type(m))), 1)


def made_by_callers(target: type, construct: Callable[[Any], Any]) -> Iterator[nn.Module]:
    """Give the modules that the functions and classes make that construct this one."""
    wholes = map(construct, itertools.islice(_callers(target), MOST_CALLERS))
    yield from (whole for whole in wholes if isinstance(whole, nn.Module))


def _is_of(target: type, kind: type) -> bool:
    """Whether a class is this one; a file beside that imports it has one of its own, of the same source."""
    return kind is target or (kind.__name__ == target.__name__ and source_of(kind) == source_of(target))


def _callers(target: type) -> Iterator[Any]:
    """List what constructs a class, in its own file or in one beside it."""
    beside = definitions_beside(target, lambda text: f"{target.__name__}(" in text)
    own = vars(sys.modules[target.__module__]) if target.__module__ in sys.modules else {}
    for held in itertools.chain([own], beside):
        written = [x for x in held.values() if inspect.isfunction(x) or isinstance(x, type)]
        yield from (x for x in written if x is not target and _constructs(x, target.__name__))


def _constructs(caller: Any, name: str) -> bool:
    calls = (node.func for node in parsed(source_of(caller)) if isinstance(node, ast.Call))
    return any(getattr(called, "id", getattr(called, "attr", "")) == name for called in calls)
