"""From one stage to the next nothing changes: what a weight, a norm or an average gave is what the next one takes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import feature_of, sources_in, squares_by, token_of
from equivalence_tests.checker.engine.contracts.changing import (
    USUAL,
    VIEWS,
    adds_two,
    changed_on_the_way,
    has_twin,
    is_strange,
    shuffling,
    strange_operations,
    way_to,
)
from equivalence_tests.checker.engine.contracts.departure import Departure, as_it_was, changed_by
from equivalence_tests.checker.engine.names import Attention, Source
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.same import SINGLE, near
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS
from equivalence_tests.checker.engine.watching import Operation, Slot, tensors_of

EXCHANGES = ("roll", "flip", "fliplr", "flipud", "rot90")


def input_departures(attention: Attention) -> Iterator[Departure]:
    """Name what no known model does to the input of a projection, in the module that holds the attention."""
    numbers = [number for part in attention.parts for codes, _ in part.sides.values() for number in sources_in(codes)]
    made = [(s.kind, s.operation) for s in attention.run.names.made_of(numbers, beyond=True)]
    weighing = [operation for kind, operation in made if kind == "projection" and operation is not None]
    found = {bent: None for op in weighing for bent in strange_operations(attention.run, op.inputs[0], op.index, True)}
    for bent in found:
        if bent.place == attention.first.place and not has_twin(attention, bent):
            yield changed_by(bent, "input", "input")


def context_departures(attention: Attention, padding: Tensor) -> Iterator[Departure]:
    """Name the first operation that changes what was averaged.

    Args:
        attention: Read so far.
        padding: Tokens that are padding: what comes out for them may be anything.
    """
    if attention.names is None or attention.tiled:
        return
    arrived, numbers = attention.end_slot, attention.context_sources
    way = way_to(attention.run, numbers, arrived, attention.end.index + 1)  # what else is made of it changes nothing
    departure = changed_on_the_way(attention, numbers, arrived.value, attention.names, "context", padding, way)
    if departure is not None:
        operation = departure.operation
        if operation is not None and operation.inputs[0].value.shape == operation.outputs[0].value.shape:
            departure.patches = {operation.index: as_it_was}
        yield departure


def turned_back(attention: Attention) -> Departure | bool:
    """Say whether what is averaged is turned on its way, each token by itself; else name what bends it."""
    run, slot = attention.run, attention.parts[0].contexts[0].operation.outputs[0]
    start = attention.parts[0].contexts[0].operation.index
    generator = torch.Generator().manual_seed(4)
    one, two = (torch.randn(slot.value.shape, generator=generator, dtype=torch.float64) for _ in range(2))

    def given(x: Tensor, asked: Slot, until: int) -> Tensor | None:
        found = replayed(run.recorder, {slot.key: x.to(slot.value.dtype)}, start, asked, until)
        return None if found is None else found.double()

    for operation, _, _ in run.names.carrying(attention.context_sources, start, attention.end.index + 1):
        parts = [given(x, operation.outputs[0], operation.index) for x in (one, two, one + two)]
        first, second, both = (torch.zeros(()) if part is None else part for part in parts)
        if not near(both, first + second, SINGLE):
            return changed_by(operation, "context", "context")
    end = given(one, attention.end_slot, attention.end.index)
    if end is None or attention.names is None:
        return False
    codes = attention.parts[0].contexts[0].codes
    if near(end.reshape(-1)[attention.names.reshape(-1).argsort()], one.reshape(-1)[codes.reshape(-1).argsort()]):
        return False
    return near(squares_by(token_of(attention.names), end), squares_by(token_of(codes), one), SINGLE)


def later_departures(attention: Attention) -> Iterator[Departure]:
    """Hold what each weight, norm or sum behind an attention takes against what the one before it gave."""
    later, place = _later(attention), attention.first.place
    for source in later.values():
        for taken in later.values():
            taker = taken.operation if source.number in taken.parents else None
            if taker is not None and taker.place.startswith(place):
                found = _held(attention, source, taker)
                yield from (one for one in found if one.facts.get("function") not in USUAL)  # of a feed-forward


def side_departures(attention: Attention) -> Iterator[Departure]:
    """Name what no known model does beside an attention or behind it, in its module; a factor behind all matrices."""
    run = attention.run
    merging = {operation for operation, _, _ in run.names.carrying(attention.context_sources)}
    inside = run.live(context.operation.outputs[0].tensor for context in run.names.contexts)
    first = list(tensors_of(run.output))[:1]  # maps that come back beside it are judged by themselves
    rest = [run.operations[index] for index in sorted(run.live(first) - inside)]
    last = max((operation.index for operation in rest if operation.name in CONTRACTIONS), default=attention.last.index)
    for operation in rest:
        own = operation.place == attention.first.place and operation not in merging
        numbers = operation.outputs[0].value.is_floating_point()
        strange = own and numbers and is_strange(operation, factors=operation.index > last)
        if strange and not has_twin(attention, operation):
            yield changed_by(operation, "output", "output")


def exchanged_departures(attention: Attention) -> Iterator[Departure]:
    """Name what rolls or flips the averaged values for good, where no weight tells by its columns that it does."""
    yield from _moved(attention, attention.context_sources, attention.last.index, attention.end.index + 1)


def met_departures(attention: Attention) -> Iterator[Departure]:
    """Name a sum behind an attention that adds tokens to others, and a view that puts tokens where features go."""
    names, numbers, end = attention.run.names, {*attention.context_sources, *_later(attention)}, attention.last.index
    for operation in attention.run.operations[end + 1 :]:
        taken, given = [codes for _, codes in names.taken(operation)], names.after[operation.index][:1]
        if not any(numbers.intersection(sources_in(codes)) for codes in taken):
            continue
        if len(taken) == 2 and adds_two(operation) and _meet_others(*taken):
            moved = shuffling(attention.run, numbers, end, operation.index)
            if moved is None:
                yield Departure("output_tokens_moved", "output", operation)
            elif not has_twin(attention, moved):
                yield changed_by(moved, "output", "output")
        elif operation.name in VIEWS and given and given[0] is not None and _mixed(taken[0], given[0]):
            yield Departure("output_tokens_moved", "output", operation)
            return  # what meets it then follows from it


def _meet_others(one: Tensor, other: Tensor) -> bool:
    """Whether the same tokens of two sources lie in another order."""
    if one.shape != other.shape or not set(sources_in(one)).isdisjoint(sources_in(other)):
        return False
    tokens = [token_of(codes).reshape(-1) for codes in (one, other)]
    return not torch.equal(*tokens) and torch.equal(*(own.sort().values for own in tokens))


def _mixed(taken: Tensor, given: Tensor) -> bool:
    """Whether tokens with their features last become features with their tokens last, in name only."""
    width, feature = taken.size(-1), feature_of(given)
    if given.dim() < 3 or given.size(-1) == width or given.shape[1:].count(width) != 1 or width in taken.shape[1:-1]:
        return False
    if not bool((feature_of(taken) == feature_of(taken)[..., :1, :]).all()):
        return False
    axis = given.shape.index(width, 1)
    rows = feature.movedim(axis, -1).reshape(-1, width)
    return len(given) == len(taken) and not bool((rows == rows[:1]).all())


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
        if source.number in sources_in(codes):
            changed = changed_on_the_way(attention, [source.number], slot.value, codes)
            start = source.operation.index if source.operation is not None else -1
            yield from [changed] if changed else _moved(attention, [source.number], start, taker.index)


def _moved(attention: Attention, numbers: list[int], start: int, until: int) -> Iterator[Departure]:
    moved = shuffling(attention.run, numbers, start, until)
    if moved is None or moved.name not in EXCHANGES or has_twin(attention, moved):
        return
    again = shuffling(attention.run, numbers, moved.index, until)
    if again is None or again.name != moved.name:
        yield changed_by(moved, "output", "output")
