"""Run somebody's code without one of its expressions: what that was made of takes its place."""

import ast
import itertools
import linecache
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.vocabulary import words
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot, storage_of
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.lines import is_users

CUTS = words("getitem narrow index_select")  # what is cut off on both sides of a product is left out together
DEEP = 6  # operations that one expression is made of


@dataclass(frozen=True)
class Place:
    """Where an operation stands in the user's code, in whatever call it runs.

    Args:
        code: The function.
        instruction: The offset of the instruction that runs it.
        number: Of the operation among those that one execution of this instruction runs.
    """

    code: CodeType
    instruction: int
    number: int

    @property
    def text(self) -> str:
        """The expression, as it is written; "" where the source is not known."""
        first, last, start, end = list(self.code.co_positions())[self.instruction // 2]
        if first is None or last is None or start is None or end is None:
            return ""
        lines = [linecache.getline(self.code.co_filename, n).encode() for n in range(first, last + 1)]
        lines[-1] = lines[-1][:end]
        return " ".join(b"".join([lines[0][start:], *lines[1:]]).decode().split())


@dataclass(frozen=True)
class LeftOut:
    """What takes the place of an operation's result: a tensor that this or an earlier operation takes.

    Args:
        place: Of the operation that does not run.
        taking: Of the operation that takes the tensor; the same, or one that runs before.
        position: Of the tensor among those that it takes.
    """

    place: Place
    taking: Place
    position: int


@dataclass(frozen=True)
class Repair:
    """An expression that may be left out.

    Args:
        left_out: What is left out for it, in every call of the function that it stands in.
        operation: The last operation of it.
        instead: What takes the place of its result.
        idle: Where the operations stand whose results nothing takes then.
        parts: These operations, and the last.
        own: The names of parameters, buffers and arguments that nothing else takes.
    """

    left_out: tuple[LeftOut, ...]
    operation: Operation
    instead: Slot
    idle: frozenset[Place] = frozenset()
    parts: tuple[Operation, ...] = ()
    own: tuple[str, ...] = ()

    @property
    def written(self) -> tuple[str, str]:
        """The expression, or else its last operation, and what takes its place; "" where that is not known."""
        one = self.left_out[0]
        return one.place.text or self.operation.name, operand_in(
            one.place.text, one.position
        ) if one.taking == one.place else ""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function without the expression."""
        return Without(left_out=self.left_out, idle=self.idle).run(function, *args, **kwargs)


class Without(Recorder):
    """Runs code without some of its expressions; without none of them, it notes where operations stand.

    Args:
        named: Tensors that are known by a name.
        left_out: What does not run.
        idle: Where operations stand that run unseen, as nothing takes their results.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]] = (),
        left_out: Collection[LeftOut] = (),
        idle: Collection[Place] = (),
    ) -> None:
        super().__init__(named)
        self.left_out, self.idle = {one.place: one for one in left_out}, idle
        self.places: list[Place | None] = []  # of each operation
        self.holders: list[nn.Module | None] = []  # whose method runs it
        self._taken: dict[tuple[Place | None, int], Tensor | None] = {(x.taking, x.position): None for x in left_out}
        self._last: tuple[FrameType, int, int] | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function."""
        with self:
            return function(*args, **kwargs)

    def record(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, or give what takes its place."""
        place, holder = self._here()
        if not self.left_out:
            self.places.append(place)
            self.holders.append(holder)
            return super().record(func, name, args, kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._taken |= {(place, at): x for at, x in enumerate(given) if (place, at) in self._taken}
        one = None if place is None else self.left_out.get(place)
        instead = None if one is None else self._taken[one.taking, one.position]
        if instead is not None:
            return instead
        if place not in self.idle:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)

    def _here(self) -> tuple[Place | None, nn.Module | None]:
        """Say where an operation stands, and which module runs it."""
        holder = None
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            if frame.f_code is Without.run.__code__:
                break
            own = frame.f_locals.get("self")
            holder = own if holder is None and isinstance(own, nn.Module) else holder
            if is_users(frame.f_code.co_filename):
                same = self._last is not None and (self._last[0] is frame, self._last[1]) == (True, frame.f_lasti)
                number = self._last[2] + 1 if same and self._last is not None else 0
                self._last = frame, frame.f_lasti, number
                return Place(frame.f_code, frame.f_lasti, number), holder
        self._last = None
        return None, holder

    def repairs(self, output: Any) -> Iterator[Repair]:
        """List the expressions that may be left out of what has run: the last that ran first, the smallest first."""
        graph, outputs, seen = Graph(self.operations), list(tensors_in((output,))), set[tuple[LeftOut, ...]]()
        live = graph.live(outputs)
        for operation in reversed(self.operations):
            single = len(operation.outputs) == 1 and operation.outputs[0].value.is_floating_point()
            if operation.index in live and single:
                for found in self._of_one(operation, graph):
                    if found.left_out not in seen:
                        seen.add(found.left_out)
                        yield self._with_parts(found, outputs, live)

    def _of_one(self, operation: Operation, graph: Graph) -> Iterator[Repair]:
        """What an operation takes, or an earlier one of its line takes, in the place of what it gives."""
        place, shape, line = self.places[operation.index], operation.outputs[0].value.shape, _line(operation)
        of_line = [operation]
        for taking in itertools.islice(of_line, DEEP):  # which grows meanwhile
            at = self.places[taking.index]
            for position, slot in enumerate(taking.inputs):
                made = graph.maker(slot, taking.index)
                of_line += [made] if made is not None and _line(made) == line and not operation.inplace else []
                fits = slot.value.shape == shape and slot.value.is_floating_point()
                if fits and place is not None and at is not None:
                    yield Repair((LeftOut(place, at, position),), operation, slot)
        if operation.name in CUTS:
            cut = (self.places[one.index] for one in self.operations if one.name in CUTS and _line(one) == line)
            every = tuple(LeftOut(x, x, 0) for x in dict.fromkeys(cut) if x is not None)
            yield Repair(every, operation, operation.inputs[0])

    def _with_parts(self, repair: Repair, outputs: list[Tensor], live: set[int]) -> Repair:
        """Add on which operations the outputs depend only through what is left out."""
        instead, needed, kept = {x.place: x for x in repair.left_out}, {storage_of(x) for x in outputs}, set[int]()
        taken = set[int]()
        for operation in reversed(self.operations):
            if any(storage_of(x.tensor) in needed for x in operation.outputs):
                one = instead.get(self.places[operation.index])  # type: ignore[arg-type]
                inputs = operation.inputs if one is None else self._instead(operation, one)
                kept |= {operation.index} if one is None else set()
                needed |= {storage_of(x.tensor) for x in inputs}
                taken |= {storage_of(x.tensor) for x in inputs} if one is None else set()
        parts = tuple(one for one in self.operations if one.index in live - kept)
        still = {self.places[index] for index in kept} | {*instead}
        idle = {self.places[one.index] for one in parts} - still
        used = {storage_of(slot.tensor) for one in parts for slot in one.inputs} - taken
        used -= {storage_of(repair.instead.tensor)}
        own = tuple(name for name, slot in zip(self.names, self.given, strict=True) if storage_of(slot.tensor) in used)
        return replace(repair, idle=frozenset(x for x in idle if x is not None), parts=parts, own=own)

    def _instead(self, operation: Operation, one: LeftOut) -> list[Slot]:
        """The tensor that takes the place of a result: what the last such operation before took there."""
        before = (x for x in self.operations[operation.index :: -1] if self.places[x.index] == one.taking)
        return [x.inputs[one.position] for x in before][:1]


def operand_in(expression: str, position: int) -> str:
    """Give one of the tensors that an expression takes, as it is written there; "" where that is not known.

    >>> operand_in("2 * merged", 0), operand_in("x[..., :-1]", 0), operand_in("torch.roll(k @ w, 1)", 0)
    ('merged', 'x', 'k @ w')
    >>> operand_in("self.mix(x)", 0), operand_in("(x  # tokens )", 0)
    ('x', '')
    """
    try:
        written = ast.parse(expression or "...", mode="eval").body
    except SyntaxError:  # a comment ends one of its lines
        return ""
    match written:
        case ast.BinOp(left=left, right=right):
            taken = [x for x in (left, right) if not isinstance(x, ast.Constant)]
        case ast.Subscript(value=value):
            taken = [value]
        case ast.Call(func=ast.Attribute(value=value), args=args):
            taken = args if isinstance(value, ast.Name) and value.id in ("torch", "F", "self") else [value, *args]
        case _:
            taken = []
    return (ast.get_source_segment(expression, taken[position]) or "") if position < len(taken) else ""


def _line(operation: Operation) -> tuple[str, int]:
    """The user's line that runs an operation; its own number where none does."""
    return operation.frames[0][:2] if operation.frames else ("", operation.index)
