"""From what a weight, a norm or a sum made of the averaged values to the next of these: nothing changes on the way."""

from collections.abc import Iterator

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.changing import (
    USUAL,
    changed_output,
    has_twin,
    shuffling,
    strange_operations,
)
from equivalence_tests.checker.engine.contracts.departure import SINGLE, Departure, changed_by, near
from equivalence_tests.checker.engine.names import Attention, Source, values_at
from equivalence_tests.checker.engine.watching import Operation

__all__ = ["exchanged_departures", "later_departures"]

EXCHANGES = ("roll", "flip", "fliplr", "flipud", "rot90")


def later_departures(attention: Attention) -> Iterator[Departure]:
    """Hold what each weight, norm or sum behind an attention takes against what the one before it gave.

    Args:
        attention: All products of which have been read.
    """
    later, place = _later(attention), attention.first.place
    for source in later.values():
        yield from _beside(attention, source, set(attention.context_sources).union(later))
        for taken in later.values():
            taker = taken.operation if source.number in taken.parents else None
            if taker is not None and taker.place.startswith(place):
                found = _held(attention, source, taker)
                yield from (one for one in found if one.facts.get("function") not in USUAL)  # of a feed-forward


def _beside(attention: Attention, source: Source, own: set[int]) -> Iterator[Departure]:
    """What no known model does to a summand or a factor that meets the averaged values, in their own module."""
    meeting = source.operation if source.kind in ("added", "gated") else None
    for slot, codes in attention.run.names.taken(meeting) if meeting is not None else ():
        for operation in strange_operations(attention.run, slot, meeting.index) if meeting is not None else ():
            here = operation.place == attention.first.place and own.isdisjoint(sources_in(codes))
            if here and not has_twin(attention, operation):
                yield changed_by(operation, "output", "summand" if source.kind == "added" else "factor")


def exchanged_departures(attention: Attention) -> Iterator[Departure]:
    """Name what rolls or flips the averaged values for good, where no weight tells by its columns that it does.

    Args:
        attention: All products of which have been read.
    """
    yield from _moved(attention, attention.context_sources, attention.last.index, attention.end.index + 1)


def _later(attention: Attention) -> dict[int, Source]:
    """What was made of the averaged values, by number, as far as a second projection: another layer's."""
    numbers = set(attention.context_sources)
    found: dict[int, Source] = {}
    projected = set[int]()
    for source in attention.run.names.sources.values():
        behind = source.kind == "projection" and projected.intersection(source.parents)
        if not numbers.union(found).intersection(source.parents) or source.kind == "score" or behind:
            continue
        found[source.number] = source
        if source.kind == "projection" or projected.intersection(source.parents):
            projected.add(source.number)
    return found


def _held(attention: Attention, source: Source, taker: Operation) -> Iterator[Departure]:
    for slot, codes in attention.run.names.taken(taker):
        if source.number not in sources_in(codes):
            continue
        want = values_at([source], codes)
        mine = ~want.isnan()
        if not near(slot.value.double()[mine], want[mine], SINGLE):
            yield changed_output(attention, source)
        else:
            start = source.operation.index if source.operation is not None else -1
            yield from _moved(attention, [source.number], start, taker.index)


def _moved(attention: Attention, numbers: list[int], start: int, until: int) -> Iterator[Departure]:
    moved = shuffling(attention.run, numbers, start, until)
    if moved is None or moved.name not in EXCHANGES or has_twin(attention, moved):
        return
    again = shuffling(attention.run, numbers, moved.index, until)
    if again is None or again.name != moved.name:
        yield changed_by(moved, "output", "output")
