"""The conditions in the user's code: what each was in the calls that were compared, and what it never was."""

import ast
import dis
import functools
import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from equivalence_tests.checker.reach.proposing import code_of, parameters_of
from equivalence_tests.checker.reach.syntax import nodes_in
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import Frames, is_users

# What depends on the machine, on torch's version or on who is looking.
ASIDE = re.compile(
    r"hasattr|is_available|is_(scripting|tracing|compiling|cuda)|version|device|requires_grad|is_grad_enabled"
    r"|checkpoint|verbose|debug|profil"
)
# Parts that a constructor makes or leaves out together, tables of angles and both halves of a cache.
TOGETHER = re.compile(r"(self\.\w+|\w*(cos|sin|cache|past)\w*) is (not )?None")
SAYS = re.compile(r"^(print|warnings?\.|log(ger|ging)?\.)")
DROPS = re.compile(r"drop_?(out|path|block|connect)|stochastic_?depth", re.IGNORECASE)
ASKED = re.compile(r"(\w+) = \(?hasattr\(")  # what keeps whether torch has something
PACKAGES = "site-packages"
MOST_LISTED = 6  # of the conditions that a verdict says nothing about
NOT_RUN = "no compared call took this branch"


@dataclass(frozen=True, order=True)
class Condition:
    """A condition, as it is written."""

    line: int
    text: str
    names: frozenset[str]  # of the variables in it
    is_plain: bool  # whether it only compares variables with constants
    names_strings: bool  # whether it compares something with strings

    @property
    def words(self) -> set[str]:
        """The names in it, those of attributes too."""
        return {*re.findall(r"\w+", self.text)}

    def asks_for(self, required: Collection[str]) -> bool:
        """Whether it asks only if a required argument is None."""
        return self.text.endswith((" is None", " is not None")) and self.is_left_to(required)

    def is_left_to(self, arguments: Collection[str]) -> bool:
        """Whether it asks only what these arguments are."""
        return self.is_plain and self.names.issubset(arguments)

    def is_fixed_in(self, target: Any) -> bool:
        """Whether it asks only what an instance holds, or what stands in a class."""
        of_self = self.names == {"self"} and "training" not in self.words
        return of_self and (not isinstance(target, type) or self.words - {"self"} <= {*dir(target)})


class Branches:
    """What the conditions of the user's code were in some calls."""

    def __init__(self) -> None:
        self.values: dict[CodeType, dict[Condition, set[bool]]] = {}

    def forget(self) -> None:
        """Forget the calls of another target."""
        self.values.clear()

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Give a function that notes in each call what the conditions of the user's code are."""

        def called(*args: Any, **kwargs: Any) -> Any:
            before = sys.gettrace()
            sys._getframe().f_trace_opcodes = True  # from Python 3.12 on, settrace looks whether any frame wants them
            sys.settrace(self._enter)
            try:
                return function(*args, **kwargs)
            finally:
                sys.settrace(before)

        return called

    def _enter(self, frame: FrameType, _: str, __: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        jumps = _jumps(code) if is_users(code.co_filename) else {}
        if not jumps:
            return None
        values, last = self.values.setdefault(code, {}), -1

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            if event == "opcode":
                if last in jumps and jumps.get(frame.f_lasti) is not jumps[last]:
                    test, target, jumps_if = jumps[last]
                    values.setdefault(test, set()).add((frame.f_lasti == target) == jumps_if)
                last = frame.f_lasti
            return step

        frame.f_trace = step  # in Python 3.13, only a frame that is traced already can ask for its opcodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def add(self, other: "Branches") -> None:
        """Add the values of other calls."""
        for code, values in other.values.items():
            own = self.values.setdefault(code, {})
            for test, some in values.items():
                own.setdefault(test, set()).update(some)

    def decided_by(self, name: str) -> Frames:
        """Give the line of a condition that an attribute or argument decides; () where none was met."""
        named = re.compile(rf"\b{name}\b")
        met = ((code, test) for code, values in self.values.items() for test in values if named.search(test.text))
        return next((((code.co_filename, test.line, code.co_name),) for code, test in met), ())

    def never(self, target: Any, listed: Collection[str] = ()) -> Iterator[Exercise]:
        """List what conditions never were in the code that ran for a target, beside what has been listed already.

        What an instance holds is as it is, and so is what stands in its class; what a function asks of its arguments is
        up to those that call it. Of functions in other files only methods count: what they are for is elsewhere.
        """
        _, own = code_of(target)
        ran = ((code, values) for code, values in self.values.items() if own is None or _is_of(code, own))
        left = [one for code, values in ran for one in _left(code, code is own, values, target, listed)]
        yield from left[:MOST_LISTED]
        if (more := len(left) - MOST_LISTED) > 0:
            yield Exercise(f"{more} more condition{'s' * (more > 1)}", False, NOT_RUN)


def _is_of(code: CodeType, own: CodeType) -> bool:
    """Whether a function stands in the file of another, or is a method of the same package or folder."""
    method = code.co_varnames[:1] == ("self",) and (PACKAGES in code.co_filename) == (PACKAGES in own.co_filename)
    return (method or code.co_filename == own.co_filename) and not DROPS.search(code.co_qualname)


def _left(
    code: CodeType, entered: bool, values: dict[Condition, set[bool]], target: Any, listed: Collection[str]
) -> Iterator[Exercise]:
    """List what the conditions of one function never were, but for what cannot be otherwise."""
    arguments = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {"self"}
    required = {p.name for p in parameters_of(getattr(target, "forward", target)) if p.default is p.empty}
    aside = {*listed, *_asked_of_torch(code.co_filename)}
    for one, value in ((one, False in some) for one, some in values.items() if len(some) == 1):
        left = one.asks_for(required) if entered else one.is_left_to(arguments)
        known = left or one.is_fixed_in(target) or (one.names_strings and not value)  # no other string is known
        if not known and one.words.isdisjoint(aside):
            yield Exercise(f"line {one.line} where `{one.text}` is {str(value).lower()}", False, NOT_RUN)


@functools.lru_cache(maxsize=256)
def _jumps(code: CodeType) -> dict[int, tuple[Condition, int, bool]]:
    """Find the jumps of a function by their offsets: the condition, where it leads, and whether it jumps if true."""
    found, before, extended = dict[int, tuple[Condition, int, bool]](), None, 0
    tests = _tests(code.co_filename)
    for one in dis.get_instructions(code):
        if "JUMP" in one.opname and "_IF_" in one.opname:
            test = next((x for x in tests if before is not None and _holds(x, before.positions)), None)
            if test is not None:
                jump = _written(test), one.argval, _jumps_if(one.opname, test)
                found |= dict.fromkeys((one.offset, extended or one.offset), jump)  # a far one is traced at its prefix
        elif one.opname not in ("TO_BOOL", "COPY", "EXTENDED_ARG", "CACHE"):
            before = one
        extended = one.offset if one.opname == "EXTENDED_ARG" else 0
    return found


def _written(test: ast.expr) -> Condition:
    nodes = [*ast.walk(test)]
    names = frozenset(x.id for x in nodes if isinstance(x, ast.Name))
    is_plain = not any(isinstance(x, ast.Call | ast.Attribute | ast.Subscript) for x in nodes)
    strings = any(isinstance(x, ast.Constant) and isinstance(x.value, str) for x in nodes)
    return Condition(test.lineno, ast.unparse(test), names, is_plain, strings and isinstance(test, ast.Compare))


def _jumps_if(name: str, test: ast.expr) -> bool:
    """Whether an instruction jumps where a condition is true; those of None take ``x`` and not ``x is None``."""
    if name.endswith("NONE"):
        negated = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
        return name.endswith("_IF_NONE") != negated
    return not name.endswith(("_FALSE", "_FALSE_OR_POP"))


def _holds(test: ast.expr, at: Any) -> bool:
    """Whether an instruction computes a condition, or a part of it."""
    start, end = (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)
    first, last = (test.lineno, test.col_offset), (test.end_lineno, test.end_col_offset)
    return None not in (*start, *end) and first <= start and end <= last


@functools.lru_cache(maxsize=64)
def _tests(path: str) -> list[ast.expr]:
    """List the conditions in a file that decide on what is computed."""
    chosen = (x for x in nodes_in(path) if isinstance(x, ast.IfExp) or (isinstance(x, ast.If) and not _only_says(x)))
    every = [leaf for one in chosen if "drop" not in ast.unparse(one.test) for leaf in _leaves(one.test)]
    return [one for one in every if not ASIDE.search(ast.unparse(one))]


@functools.lru_cache(maxsize=64)
def _asked_of_torch(path: str) -> set[str]:
    """Name what a file keeps of whether torch has something: on this machine it is as it is."""
    return {name for line in linecache.getlines(path) for name in ASKED.findall(line)}


def _leaves(test: ast.expr) -> list[ast.expr]:
    """List the conditions that one is made of."""
    match test:
        case ast.BoolOp(values=values):
            made_together = all(map(TOGETHER.fullmatch, map(ast.unparse, values)))
            return [leaf for one in (values[:1] if made_together else values) for leaf in _leaves(one)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _leaves(operand)
    return [test]


def _only_says(node: ast.If) -> bool:
    """Whether one way only refuses, or prints."""
    bodies = [body for body in (node.body, node.orelse) if body]
    return any(isinstance(body[-1], ast.Raise) or all(map(_says, body)) for body in bodies)


def _says(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr | ast.Pass) and SAYS.search(ast.unparse(node)) is not None


RAN = Branches()  # in the calls that were compared, or had a verdict of their own
