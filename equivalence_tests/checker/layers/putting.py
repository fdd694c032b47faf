"""Put right how a layer is wired: the sum that should be there, in the place of what is given or taken."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equivalence_tests.checker.engine.leaving_out import GIVES, LeftOut, Repair, Spot, Without
from equivalence_tests.checker.engine.vocabulary import ADDS
from equivalence_tests.checker.engine.watching import ModuleCall, Operation
from equivalence_tests.checker.layers.whole_steps import Follower
from equivalence_tests.checker.layers.whole_values import Terms, events_in, summed
from equivalence_tests.checker.parts.kinds import is_torchs
from equivalence_tests.checker.reach.tracing import tensors_of

Tap = tuple[Operation | ModuleCall, int]  # the number of a tensor that is taken there; GIVES for what is given


@dataclass(frozen=True)
class Putting:
    """Finds in a run that was followed where a sum belongs."""

    follower: Follower
    watch: Callable[[], Without]  # runs the same again, and notes where everything stands

    @cached_property
    def watched(self) -> Without:
        """The other run."""
        return self.watch()

    @cached_property
    def parts(self) -> list[ModuleCall]:
        """The calls of parts."""
        return [*events_in(self.follower.recorder, self.follower.module, self.follower.kinds)]

    @cached_property
    def between(self) -> list[Operation]:
        """The operations between the parts."""
        inside = {index for call in self.parts for index in range(call.first, call.end)}
        return [one for one in self.follower.recorder.operations if one.index not in inside]

    def given(self, have: Terms, want: Terms) -> tuple[Repair, ...]:
        """Put a sum in the place of another: where it is first added up, or last passed on, or wherever it is taken."""
        made = [one for one in self.between if one.outputs and self._terms(one.outputs[0].tensor) == have]
        own = [one for one in made if not is_torchs(self.follower.module.get_submodule(one.place))]  # as a dropout is
        own = [*{id(one.outputs[0].tensor): one for one in own}.values()]  # the last that wrote into each tensor
        sums = [one for one in own if one.name in ADDS]
        for one in sums or own[::-1]:
            if handed := self._handed(one, have, want):
                return handed
            taken = [(one, number) for number, x in enumerate(_taken(one)) if self._terms(x) == have]
            for tap in ((one, GIVES), *taken):  # what is moved lies as other tensors do before that
                sources = self._sources(want, _tensor(tap).shape, one.index + (tap not in taken), tap)
                if sources:
                    return self._repair(tap, sources)
        return self._put(have, want, [*(one for one in self.between if one not in made), *self.parts])

    def _handed(self, one: Operation, have: Terms, want: Terms) -> tuple[Repair, ...]:
        """Hand over another tensor to the sub-module that adds up a sum, so that the sum is another one."""
        calls = [call for call in self.follower.recorder.calls if call.path and call.path == one.place]
        for call in (call for call in calls if call.first <= one.index < call.end):
            for number, x in enumerate(_taken(call)):
                wanted = summed(want, summed(have, self._terms(x), -1), -1)
                sources = self._sources(wanted, x.shape, call.first) if self._terms(x) else ()
                if sources:
                    return self._repair((call, number), sources)
        return ()

    def taken(self, label: str, have: Terms, want: Terms) -> tuple[Repair, ...]:
        """Put a sum in the place of another that a part takes."""
        own = ((label, 1.0),)
        calls = [call for call in self.parts if own in map(self._terms, call.outputs)]
        made = [one for one in self.between if own in [self._terms(slot.tensor) for slot in one.outputs]]
        return self._put(have, want, calls[:1] or made[:1])

    def _put(self, have: Terms, want: Terms, takers: Sequence[Operation | ModuleCall]) -> tuple[Repair, ...]:
        """Put a sum in the place of another wherever some take it; nothing where it is not there for all."""
        found = [
            self._repair((one, number), self._sources(want, x.shape, _start(one), (one, number)))
            for one in takers
            for number, x in enumerate(_taken(one))
            if self._terms(x) == have
        ]
        return tuple(itertools.chain(*found)) if all(found) else ()

    def _terms(self, x: Tensor) -> Terms:
        value = self.follower.values.get(id(x))
        return () if value is None else value.terms

    def _terms_of(self, tap: Tap) -> Terms:
        """What is tapped: what a sum is written into was the rest of it before."""
        one, number = tap
        terms, written = self._terms(_tensor(tap)), isinstance(one, Operation) and one.inplace and number == 0
        return summed(terms, self._terms(_taken(one)[1]), -1) if written and len(_taken(one)) == 2 else terms

    def _sources(self, want: Terms, shape: torch.Size, end: int, own: Tap | None = None) -> tuple[Tap, ...]:
        """One tensor, or two that are added, of those before an operation; what is replaced may be one of them."""
        taps = [*self._before(end), *([] if own is None else [own])]
        found = {self._terms_of(tap): tap for tap in taps if _tensor(tap).shape == shape}
        if want in found:
            return (found[want],)
        pairs = ((tap, found.get(summed(want, terms, -1))) for terms, tap in found.items() if terms)
        return next(((one, other) for one, other in pairs if other is not None), ())

    def _before(self, end: int) -> Iterator[Tap]:
        """List what is given and taken before an operation, what parts take last."""
        before = [one for one in self.follower.recorder.operations[:end] if one.outputs]
        yield from ((one, GIVES) for one in before)
        takers: list[Operation | ModuleCall] = [*before, *(call for call in self.parts if call.first < end)]
        for taker in takers:
            yield from ((taker, number) for number, _ in enumerate(_taken(taker)))

    def _repair(self, instead_of: Tap, sources: Sequence[Tap]) -> tuple[Repair, ...]:
        """Put the sum of some tensors in the place of another; nothing where it is not known where one stands."""
        (place, of), *spots = [self._spot(tap) for tap in (instead_of, *sources)]
        known = [(at, number) for at, number in spots if at is not None]
        if place is None or not known or len(known) < len(spots):
            return ()
        operation = self.follower.recorder.operations[_start(instead_of[0])]
        return (Repair((LeftOut(place, *known[0], tuple(known[1:]), of),), operation, operation.outputs[0]),)

    def _spot(self, tap: Tap) -> Spot:
        one, number = tap
        if isinstance(one, Operation):
            return self.watched.places[one.index], number
        return self.watched.called.get((one.first, self.follower.module.get_submodule(one.path))), number


def _taken(one: Operation | ModuleCall) -> list[Tensor]:
    """The tensors that an operation takes, or a sub-module under no name."""
    return [slot.tensor for slot in one.inputs] if isinstance(one, Operation) else [*tensors_of(one.args)]


def _tensor(tap: Tap) -> Tensor:
    one, number = tap
    if number == GIVES and isinstance(one, Operation):
        return one.outputs[0].tensor
    return _taken(one)[number]


def _start(one: Operation | ModuleCall) -> int:
    """The index of an operation, or of the first inside a sub-module."""
    return one.index if isinstance(one, Operation) else one.first
