"""Somebody's attention with one mistake, made in memory: the file stays, and every line keeps its number."""

import ast
import contextlib
import copy
import functools
import gc
import linecache
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.wild.checking import Attention
from equivalence_tests.wild.operators import Change, Operator, changes_of

__all__ = ["Mutant", "broken", "mutants_of"]

# Files of the libraries whose lines are no part of any attention.
_AROUND = (
    "generic", "deprecation", "hub_kernels", "output_capturing", "import_utils", "logging", "doc", "modeling_utils",
    "configuration_utils", "cache_utils", "constants", "outputs", "deprecation_utils",
)  # fmt: skip


def _nowhere(node: ast.expr) -> Iterator[ast.expr]:
    return iter(())


_SCALE = Operator("change scale in the constructor", _nowhere, r"scale")


@dataclass(frozen=True)
class Mutant:
    """One mistake in the code of an attention.

    Args:
        operator: The kind of mistake.
        places: The lines that may be blamed, each with its file: those of the changed statement, and the first that
            uses what an operation that is gone would have given, or what the constructor worked out.
        before: The expression.
        after: What stands there now.
        function: The function whose code changes; None where an attribute does.
        code: Its code with the mistake.
        attribute: The attribute that changes, with its value.
    """

    operator: Operator
    places: frozenset[tuple[str, int]]
    before: str
    after: str
    function: Any = None
    code: CodeType | None = None
    attribute: tuple[str, float] | None = None


def mutants_of(attention: Attention, seed: int, most: int) -> Iterator[Mutant]:
    """Give mutants that change the output of an attention's call, drawn by the seed, kinds of mistakes in turn.

    Args:
        attention: The attention, with the call that was seen.
        seed: Of the draw.
        most: How many at most.
    """
    ran = _executed(attention)
    right = _output(attention)
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    apart = _roles_are_separate(attention)
    for mutant in (*_of_code(attention, ran), *_of_attributes(attention, ran)):
        if mutant.operator.name == "swap roles" and not apart:
            continue  # the rows of a packed matrix in another order: as right as before
        by_kind[mutant.operator.name].append(mutant)
    draw = random.Random(f"{seed} {attention.key}")
    for mutants in by_kind.values():
        draw.shuffle(mutants)
    kinds = sorted(by_kind)
    draw.shuffle(kinds)
    given = 0
    while given < most and kinds:
        for kind in list(kinds):
            found = next((one for one in _taken(by_kind[kind]) if _changes(attention, one, right)), None)
            if found is None:
                kinds.remove(kind)
                continue
            yield found
            given += 1
            if given == most:
                return


def _roles_are_separate(attention: Attention) -> bool:
    """Whether queries, keys and values have parameters of their own, going by names."""
    names = " ".join(name for name, _ in attention.module.named_parameters()).lower()
    return all(re.search(rf"\b(to_|w_?|proj_)?{role}", names) for role in ("(q_|q\\b|query)", "(k_|k\\b|key)"))


def _taken(mutants: list[Mutant]) -> Iterator[Mutant]:
    while mutants:
        yield mutants.pop()


@contextlib.contextmanager
def broken(attention: Attention, mutant: Mutant) -> Iterator[None]:
    """Put a mistake in, for a while."""
    if mutant.function is not None:
        whole = mutant.function.__code__
        mutant.function.__code__ = mutant.code
        try:
            yield
        finally:
            mutant.function.__code__ = whole
    elif mutant.attribute is not None:
        name, value = mutant.attribute
        right = getattr(attention.module, name)
        setattr(attention.module, name, value)
        try:
            yield
        finally:
            setattr(attention.module, name, right)


def _executed(attention: Attention) -> dict[CodeType, set[int]]:
    """Run the call and give the lines of the library's own code that ran."""
    ran: dict[CodeType, set[int]] = defaultdict(set)

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if attention.library not in path.parts or path.stem in _AROUND or frame.f_code.co_name.startswith("<"):
            return None
        return functools.partial(line, ran[frame.f_code])

    def line(lines: set[int], frame: FrameType, event: str, argument: Any) -> Any:
        lines.add(frame.f_lineno)
        return functools.partial(line, lines)

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        _output(attention)
    finally:
        sys.settrace(before)
    return ran


def _of_code(attention: Attention, ran: dict[CodeType, set[int]]) -> Iterator[Mutant]:
    for code, lines in ran.items():
        functions = [found for found in gc.get_referrers(code) if isinstance(found, FunctionType)]
        tree = _tree_of(code)
        if not functions or tree is None or _is_another_part(attention, code):
            continue
        for change in changes_of(tree, frozenset(lines)):
            compiled = _compiled(change.function, code)
            if compiled is not None:
                places = _blamed(change, code, lines)
                yield Mutant(change.operator, places, change.before, change.after, functions[0], compiled)


def _is_another_part(attention: Attention, code: CodeType) -> bool:
    """Whether code belongs to a module inside that is no part of the formula: a feed-forward, a convolution."""
    owner = code.co_qualname.rpartition(".")[0]
    inside = {type(module).__qualname__ for module in attention.module.modules() if module is not attention.module}
    others = {name for name in inside if not re.search(r"norm|rot|rope|attention|attn", name, re.IGNORECASE)}
    return owner in others and owner not in {one.__qualname__ for one in type(attention.module).__mro__}


@functools.cache
def _parsed(path: str) -> dict[tuple[str, int], ast.FunctionDef]:
    tree = ast.parse("".join(linecache.getlines(path)))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name, first] = node
    return found


def _tree_of(code: CodeType) -> ast.FunctionDef | None:
    tree = _parsed(code.co_filename).get((code.co_name, code.co_firstlineno))
    plain = copy.copy(tree)
    if plain is not None:
        plain.decorator_list = []
    return plain


def _compiled(function: ast.FunctionDef, original: CodeType) -> CodeType | None:
    """Compile a function inside one that has the variables which it takes from around it."""
    names = [ast.arg(name) for name in original.co_freevars]
    arguments = ast.arguments([], names, None, [], [], None, [])
    outer = ast.FunctionDef("around", arguments, [function], [], None, None, lineno=1, col_offset=0)
    module = ast.fix_missing_locations(ast.Module([outer], []))
    whole = compile(module, original.co_filename, "exec", dont_inherit=True)
    found = [code for code in _codes(whole) if code.co_name == original.co_name]
    code = found[0]
    if code.co_freevars != original.co_freevars:
        return None
    return code.replace(co_qualname=original.co_qualname)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _blamed(change: Change, code: CodeType, lines: set[int]) -> frozenset[tuple[str, int]]:
    blamed = set(range(change.lines[0], change.lines[1] + 1))
    if change.operator.removes and change.target:
        later = (number for number in sorted(lines) if number > change.lines[1])
        users = [number for number in later if change.target in linecache.getline(code.co_filename, number)]
        blamed |= set(users[:1])
    return frozenset((code.co_filename, number) for number in blamed)


def _of_attributes(attention: Attention, ran: dict[CodeType, set[int]]) -> Iterator[Mutant]:
    """A scale that the constructor worked out wrongly shows where it is handed on, and where it is multiplied."""
    for name, value in vars(attention.module).items():
        if not (isinstance(value, float) and "scal" in name and value not in (0.0, 1.0)):
            continue
        uses = re.compile(rf"\.{name}\b|[*/] *(self\.)?{name}\b|scale={name}\b")
        users = frozenset(
            (code.co_filename, n) for code, lines in ran.items() for n in _of_statements(code, lines, uses)
        )
        for other in (value * value, 1.0) if users else ():
            yield Mutant(_SCALE, users, f"self.{name} = {value}", f"{other}", attribute=(name, other))


def _of_statements(code: CodeType, lines: set[int], uses: re.Pattern[str]) -> Iterator[int]:
    """All lines of the statements that ran and have such a line."""
    tree = _tree_of(code)
    for statement in ast.walk(tree) if tree is not None else ():
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, ast.AnnAssign)):
            whole = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            if lines.intersection(whole) and any(uses.search(linecache.getline(code.co_filename, n)) for n in whole):
                yield from whole


def _output(attention: Attention) -> list[Tensor]:
    call = attention.call.copied()
    torch.manual_seed(0)
    with torch.no_grad():
        given = attention.module(*call.args, **call.kwargs)
    return [tensor.clone() for tensor in _tensors(given)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _changes(attention: Attention, mutant: Mutant, right: list[Tensor]) -> bool:
    """Whether the first output is another one, and finite."""
    try:
        with broken(attention, mutant):
            wrong = _output(attention)
    except Exception:  # a mistake that cannot run is found by running
        return False
    if not right or not wrong or right[0].shape != wrong[0].shape or not wrong[0].isfinite().all():
        return False
    return bool((right[0] - wrong[0]).abs().max() > 1e-5 * right[0].abs().max())
