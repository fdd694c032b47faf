"""Run somebody's code without one of its expressions, or with two of its queries, keys and values exchanged.

What an expression was made of, or a sum of such, takes its place.
"""

import ast
import itertools
import linecache
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.running import Examination
from equivalence_tests.checker.engine.vocabulary import words
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot, storage_of
from equivalence_tests.checker.reach.arguments import ROLES
from equivalence_tests.checker.reach.tracing import flattened, tensors_in
from equivalence_tests.checker.reporting.lines import is_users

CUTS = words("getitem narrow index_select")  # what is cut off on both sides of a product is left out together
DEEP = 6  # operations that one expression is made of
GIVES = -1  # in the place of the number of a tensor that an operation takes: what it gives
Spot = tuple["Place | None", int]  # an operation, or the call of a sub-module, and the number of a tensor that it takes


@dataclass(frozen=True)
class Place:
    """Where an operation stands in the user's code, in whatever call it runs."""

    code: CodeType
    instruction: int  # its offset in the code
    number: int  # of the operation among those that one execution of this instruction runs
    calls: bool = False  # whether the call of a sub-module is meant; ``number`` then counts such calls

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
    """What takes the place of an operation's result, or of what it takes: a tensor that an operation before takes.

    The call of a sub-module stands for an operation too: of its arguments those that have no name are tensors it takes.
    """

    place: Place
    taking: Place  # of the operation that takes the tensor; the same, or one that runs before
    position: int  # of the tensor among those that it takes; ``GIVES`` for its result
    beside: tuple[tuple[Place, int], ...] = ()  # the same of what is added to the tensor
    of: int = GIVES  # which of the tensors that the operation takes it stands for; ``GIVES`` for its result

    @property
    def sources(self) -> tuple[tuple[Place, int], ...]:
        """The tensors that are added, each by an operation and its number there."""
        return (self.taking, self.position), *self.beside


@dataclass(frozen=True)
class Repair:
    """An expression that may be left out."""

    left_out: tuple[LeftOut, ...]  # what is left out for it, in every call of the function that it stands in
    operation: Operation  # its last one
    instead: Slot  # takes the place of its result
    idle: frozenset[Place] = frozenset()  # where the operations stand whose results nothing takes then
    parts: tuple[Operation, ...] = ()  # those operations, and the last
    own: tuple[str, ...] = ()  # the names of parameters, buffers and arguments that nothing else takes
    mistake: str = ""  # what it is a mistake not to leave out; "" for an expression that torch's formula does not have
    certain: bool = False  # whether names say that it is a mistake, so that nothing can be said for it

    @property
    def written(self) -> tuple[str, str]:
        """The expression, or else its last operation, and what takes its place; "" where that is not known."""
        one = self.left_out[0]
        instead = operand_in(one.place.text, one.position) if one.taking == one.place else ""
        return one.place.text or self.operation.name, instead

    def keeps_operand_of(self, operation: Operation) -> bool:
        """Whether what takes the place of an operation's result is one of its own operands."""
        return self.operation is operation and self.left_out[0].taking == self.left_out[0].place

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function without the expression."""
        return Without(left_out=self.left_out, idle=self.idle).run(function, *args, **kwargs)


class Without(Recorder):
    """Runs code without some of its expressions; without none of them, it notes where operations stand.

    Operations at ``idle`` places run unseen, as nothing takes their results.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]] = (), left_out: Collection[LeftOut] = (), idle: Collection[Place] = ()
    ) -> None:
        super().__init__(named)
        self.left_out: dict[Spot, list[LeftOut]] = {}
        for one in left_out:
            self.left_out.setdefault((one.place, one.of), []).append(one)
        self.idle = idle
        self.places: list[Place | None] = []  # of each operation
        self.called: dict[tuple[int, nn.Module], Place | None] = {}  # by the first operation inside, and the module
        self.holders: list[nn.Module | None] = []  # whose method runs it
        self._taken: dict[Spot, Tensor | None] = {x: None for one in left_out for x in one.sources}  # the last one last
        spots = (*self._taken, *self.left_out)
        self._calls = not left_out or any(place is not None and place.calls for place, _ in spots)
        self._last: dict[bool, tuple[FrameType, int, int]] = {}
        self._adding = False

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function."""
        with self, register_module_forward_pre_hook(self._entered) if self._calls else nullcontext():
            return function(*args, **kwargs)

    def _entered(self, module: nn.Module, args: Any) -> Any:
        """Note where a sub-module is called, or give it what takes the place of its arguments."""
        place, _ = self._here(calls=True)
        if not self.left_out:
            self.called[len(self.operations), module] = place
            return None
        flat, spec = tree_flatten(args)
        return tree_unflatten(flat, spec) if self._exchange(place, flat) else None

    def record(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, or give what takes its place."""
        if self._adding:
            return func(*args, **kwargs)
        place, holder = self._here()
        if not self.left_out:
            self.places.append(place)
            self.holders.append(holder)
            return super().record(func, name, args, kwargs)
        flat, spec = flattened(args, kwargs)
        exchanged = self._exchange(place, flat)
        instead = None if (place, GIVES) in self._taken else self._instead_of(place, GIVES)
        if instead is not None:
            return instead
        args, kwargs = tree_unflatten(flat, spec) if exchanged else (args, kwargs)
        with torch._C.DisableTorchFunction() if place in self.idle else nullcontext():
            result = func(*args, **kwargs)
        self._note(place, GIVES, result)
        instead = self._instead_of(place, GIVES)
        return result if instead is None else instead

    def _exchange(self, place: Place | None, flat: list[Any]) -> bool:
        """Put what takes the place of tensors that an operation or a sub-module takes among its arguments, if any."""
        exchanged = False
        for number, at in enumerate([at for at, x in enumerate(flat) if isinstance(x, Tensor)]):
            self._note(place, number, flat[at])
            instead = self._instead_of(place, number)
            if instead is not None:
                flat[at], exchanged = instead, True
        return exchanged

    def _note(self, place: Place | None, number: int, x: Any) -> None:
        """Keep what an operation takes or gives, if it is wanted elsewhere."""
        if (place, number) in self._taken and isinstance(x, Tensor):
            del self._taken[place, number]
            self._taken[place, number] = x

    def _instead_of(self, place: Place | None, number: int) -> Tensor | None:
        """Give what takes the place of what an operation takes or gives; None if nothing does.

        What is called several times may have one for each: it is the one that is made of what came last.
        """
        some = [] if place is None else self.left_out.get((place, number), [])
        ready = [one for one in some if all(self._taken[x] is not None for x in one.sources)]
        if not ready:
            return None
        order = {spot: at for at, spot in enumerate(self._taken)}
        last = max(ready, key=lambda one: max((order[x] for x in one.sources if x[0] != one.place), default=0))
        first, *others = [x for spot in last.sources if (x := self._taken[spot]) is not None]
        with mock.patch.object(self, "_adding", True):
            return sum(others, first)

    def _here(self, calls: bool = False) -> tuple[Place | None, nn.Module | None]:
        """Say where an operation, or the call of a sub-module, stands, and which module runs it."""
        holder, last = None, self._last.pop(calls, None)
        frame: FrameType | None = sys._getframe(1)  # walk_stack looks up the line of every frame
        while frame is not None and frame.f_code is not Without.run.__code__:
            own = frame.f_locals.get("self") if holder is None and not self.left_out else None
            holder = own if isinstance(own, nn.Module) else holder
            if is_users(frame.f_code.co_filename):
                same = last is not None and last[0] is frame and last[1] == frame.f_lasti
                number = last[2] + 1 if last is not None and same else 0
                self._last[calls] = frame, frame.f_lasti, number
                return Place(frame.f_code, frame.f_lasti, number, calls), holder
            frame = frame.f_back
        return None, holder

    def repairs(self, output: Any) -> Iterator[Repair]:
        """List the expressions that may be left out of what has run: the last that ran first, the smallest first."""
        graph, outputs, seen = Graph(self.operations), list(tensors_in((output,))), set[tuple[LeftOut, ...]]()
        live = graph.live(outputs)
        yield from self._read_elsewhere()
        for operation in reversed(self.operations):
            single = len(operation.outputs) == 1 and operation.outputs[0].value.is_floating_point()
            if operation.index in live and single:
                for found in self._of_one(operation, graph):
                    if found.left_out not in seen:
                        seen.add(found.left_out)
                        yield self._with_parts(found, outputs, live)

    def _read_elsewhere(self) -> Iterator[Repair]:
        """What is written into caches, in the place of as much that is read from them."""
        written, fresh = dict[int, Operation](), set[int]()  # memory that this run makes is no cache
        pairs = list[tuple[Operation, Operation]]()
        for one in self.operations:
            held = storage_of(one.inputs[0].tensor) if one.inputs else 0
            fresh |= {storage_of(x.tensor) for x in one.outputs} - {storage_of(x.tensor) for x in one.inputs}
            if one.inplace and len(one.inputs) == 2 and held not in fresh:
                written[held] = one
            elif one.name == "getitem" and held in written:
                pairs += [(one, written[held])] * (written[held].inputs[1].value.shape == one.outputs[0].value.shape)
        places = [(self.places[read.index], self.places[wrote.index]) for read, wrote in pairs]
        every = tuple(LeftOut(read, wrote, 1) for read, wrote in places if read is not None and wrote is not None)
        if every:
            yield Repair(every, pairs[0][1], pairs[0][1].inputs[1], mistake="cache_read_elsewhere")

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
        instead, kept = {x.place: x for x in repair.left_out}, set[int]()
        needed, taken = {id(x) for x in outputs}, set[int]()  # tensors, and the memory that others take
        written = {storage_of(x) for x in outputs}
        for operation in reversed(self.operations):
            writes = operation.inplace and storage_of(operation.outputs[0].tensor) in written
            if writes or any(x.key in needed for x in operation.outputs):
                one = instead.get(self.places[operation.index])  # type: ignore[arg-type]
                inputs = operation.inputs if one is None else self._instead(operation, one)
                memory = {storage_of(x.tensor) for x in inputs}
                kept |= {operation.index} if one is None else set()
                needed, written = needed | {x.key for x in inputs}, written | memory
                taken |= memory if one is None else set()
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


# ---------------------------------------------------------------------------------------------- in one another's place
@dataclass(frozen=True)
class Exchange(Repair):
    """Two operands that are swapped, each in the place of the other."""

    # What operations take instead: the number of the one that gave it, by theirs and that of the tensor among theirs.
    taking: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function with the exchange."""
        with _Exchanging(self.taking):
            return function(*args, **kwargs)


class _Exchanging(Recorder):
    """Hands to some operations what others gave."""

    def __init__(self, taking: Mapping[tuple[int, int], int]) -> None:
        super().__init__(())
        self.taking = taking

    def record(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, spec = flattened(args, kwargs)
        for number, at in enumerate([at for at, x in enumerate(flat) if isinstance(x, Tensor)]):
            other = self.taking.get((len(self.operations), number))
            flat[at] = flat[at] if other is None else self.operations[other].outputs[0].tensor
        args, kwargs = tree_unflatten(flat, spec)
        return super().record(func, name, args, kwargs)


def exchanges(found: Examination) -> Iterator[Exchange]:
    """Exchange the operands that are swapped as soon as both are there, or as late as possible."""
    for departure in (one for one in found.departures[0] if one.mistake.roles and one.operation is not None):
        ways = [list(_given_as(role, found)) for role in ROLES if role in departure.name]
        pairs = [pair for pair in itertools.product(*ways) if len(pair) == 2 and _may_be_exchanged(found, *pair)]
        for pair in dict.fromkeys([*pairs[:1], *pairs[-1:]]):
            yield _exchange(found, departure, *pair)


def _given_as(role: str, found: Examination) -> Iterator[Operation]:
    """What gives an operand, from what it is made of to the product that takes it."""
    codes, until = found.judgements[0].attention.parts[0].sides[role]
    made = found.run.names.made_of(sources_in(codes))
    numbers = {source.operation.index for source in made if source.operation is not None}
    carried = found.run.names.carrying([source.number for source in made], before=until.index)
    numbers |= {operation.index for operation, _, _ in carried}
    yield from (found.run.operations[number] for number in sorted(numbers))


def _may_be_exchanged(found: Examination, one: Operation, other: Operation) -> bool:
    """Whether both give one tensor of one shape, and both are there before either is taken."""
    shapes = [[x.value.shape for x in made.outputs] for made in (one, other)]
    takers = [user.index for made in (one, other) for user in _takers(found, made)]
    later = bool(takers) and min(takers) > max(one.index, other.index)
    return one is not other and len(shapes[0]) == 1 and shapes[0] == shapes[1] and later


def _takers(found: Examination, made: Operation) -> list[Operation]:
    return [user for user in found.run.graph.users(made.outputs[0]) if user.index > made.index]


def _exchange(found: Examination, departure: Departure, one: Operation, other: Operation) -> Exchange:
    assert departure.operation is not None  # only such are exchanged
    taking = {
        (user.index, number): instead.index
        for made, instead in ((one, other), (other, one))
        for user in _takers(found, made)
        for number, slot in enumerate(user.inputs)
        if slot.key == made.outputs[0].key
    }
    slot = other.outputs[0]
    return Exchange((), departure.operation, slot, mistake=departure.name, certain=True, taking=taking)
