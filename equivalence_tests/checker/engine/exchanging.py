"""Run code with two of its queries, keys and values in one another's place, where names say that they are swapped."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.leaving_out import Repair
from equivalence_tests.checker.engine.running import Examination
from equivalence_tests.checker.engine.watching import Operation, Recorder
from equivalence_tests.checker.reach.arguments import ROLES
from equivalence_tests.checker.reach.tracing import flattened


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
