"""From the product of weights and values to what is merged: nothing changes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import known, looked_up, squares_by, token_of
from equivalence_tests.checker.engine.contracts.departure import SINGLE, Departure, changed_by, near
from equivalence_tests.checker.engine.names import Attention
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot

__all__ = ["context_departures", "turned_back", "values_by_name"]


def values_by_name(attention: Attention) -> tuple[Tensor, Tensor]:
    """Names and numbers of everything that the products of weights and values gave."""
    contexts = [context for part in attention.parts for context in part.contexts if context.source is not None]
    values = [context.operation.outputs[0].value.double().reshape(-1) for context in contexts]
    return torch.cat([context.codes.reshape(-1) for context in contexts]), torch.cat(values)


def context_departures(attention: Attention, padding: Tensor) -> Iterator[Departure]:
    """Name the first operation that changes what was averaged.

    Args:
        attention: Read so far.
        padding: Tokens that are padding: what comes out for them may be anything.
    """
    numbers = attention.context_sources
    if not numbers or attention.tiled:
        return
    names, values = values_by_name(attention)
    for operation, codes, value in attention.run.names.carrying(numbers, attention.last.index, attention.end.index + 1):
        mine = torch.isin(codes, names[known(names)]) & ~torch.isin(token_of(codes), padding)
        have, want = value.double()[mine], looked_up(codes[mine], names, values)
        if not near(have.nan_to_num(0.0), want.nan_to_num(0.0), 1e-3 if value.dtype != torch.float64 else 1e-6):
            departure = changed_by(operation, "context", "context")
            departure.show(have, want)
            departure.patches = {operation.index: _as_it_was} if _like(operation) else {}
            yield departure
            return


def turned_back(attention: Attention) -> Departure | bool:
    """Say whether what is averaged is turned on its way, each token by itself; else name what bends it.

    Args:
        attention: Whose values are turned by their positions, as its keys are.
    """
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


def _like(operation: Operation) -> bool:
    return bool(operation.inputs) and operation.inputs[0].value.shape == operation.outputs[0].value.shape


def _as_it_was(recorder: Recorder, operation: Operation) -> Tensor:
    return operation.inputs[0].value
