"""From one stage to the next nothing changes: what a weight, a norm or an average gave is what the next one takes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import sources_in, squares_by, token_of
from equivalence_tests.checker.engine.contracts.changing import (
    changed_on_the_way,
    has_twin,
    is_strange,
    strange_operations,
    way_to,
)
from equivalence_tests.checker.engine.contracts.departure import Departure, as_it_was, changed_by
from equivalence_tests.checker.engine.names import Attention
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.same import SINGLE, near
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS
from equivalence_tests.checker.engine.watching import Slot, tensors_of

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
