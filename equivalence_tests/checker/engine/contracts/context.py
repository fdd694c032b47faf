"""From the product of weights and values to what is merged: nothing changes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.anchors import Attention
from equivalence_tests.checker.engine.codes import known, sources_in, token_of
from equivalence_tests.checker.engine.contracts.departure import SINGLE, Departure, constant_ratio, near
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot

__all__ = ["context_departures", "is_tiled", "turned_back", "values_by_name"]


def is_tiled(attention: Attention) -> bool:
    """Whether several parts add up to the weights of one query: tiles, or keys of two kinds."""
    seen: set[int] = set()
    for part in attention.parts:
        rows = {int(x) for x in part.rows.unique()}
        if rows & seen:
            return True
        seen |= rows
    return False


def values_by_name(attention: Attention) -> tuple[Tensor, Tensor]:
    """Names and numbers of everything that the products of weights and values gave."""
    names, values = [], []
    for part in attention.parts:
        for context in part.contexts:
            if context.source is not None:
                names.append(context.codes.reshape(-1))
                values.append(context.operation.outputs[0].value.double().reshape(-1))
    flat, order = torch.cat(names).sort()
    return flat, torch.cat(values)[order]


def context_departures(attention: Attention, padding: Tensor) -> Iterator[Departure]:
    """Name the first operation that changes what was averaged.

    Args:
        attention: Read so far.
        padding: Tokens that are padding: what comes out for them may be anything.
    """
    numbers = set(attention.context_sources)
    if not numbers or is_tiled(attention):
        return
    names, values = values_by_name(attention)
    last = max(context.operation.index for part in attention.parts for context in part.contexts)
    for operation, after in zip(attention.run.operations, attention.run.names.after, strict=True):
        if operation.index <= last or operation.index > attention.end.index:
            continue
        for slot, codes in zip(operation.outputs, after, strict=False):
            if codes is None or codes.is_complex() or not set(sources_in(codes)) & numbers:
                continue
            mine = known(codes) & torch.isin(codes, names) & ~torch.isin(token_of(codes), padding)
            want = values[torch.searchsorted(names, codes[mine].contiguous()).clamp_max(len(names) - 1)]
            have = slot.value.double()[mine]
            if near(have.nan_to_num(0.0), want.nan_to_num(0.0), 1e-3 if slot.value.dtype != torch.float64 else 1e-6):
                continue
            function = operation.name.strip("_")
            ratio = constant_ratio(have, want)
            facts = {"function": function, "what": "context", "factor": ratio}
            departure = Departure(f"changed_by_{function}", "context", operation, facts)
            differing = (have - want).abs().argsort(descending=True)[:4].sort().values
            departure.have, departure.want = tuple(have[differing].tolist()), tuple(want[differing].tolist())
            departure.quantity = f"context after {function}"
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

    for source in attention.context_sources:
        for operation, _, _ in run.names.carrying(source, attention.end.index):
            out = operation.outputs[0]
            parts = [given(x, out, operation.index) for x in (one, two, one + two)] if operation.index > start else []
            if any(part is None for part in parts) or not parts or out.value.is_complex():
                continue
            first, second, both = (part for part in parts if part is not None)
            if not near(both, first + second, SINGLE):
                function = operation.name.strip("_")
                facts = {"function": function, "what": "context", "factor": None}
                return Departure(f"changed_by_{function}", "context", operation, facts)
    end = given(one, attention.end_slot, attention.end.index)
    if end is None or attention.names is None:
        return False
    codes = attention.parts[0].contexts[0].codes
    if near(end.reshape(-1)[attention.names.reshape(-1).argsort()], one.reshape(-1)[codes.reshape(-1).argsort()]):
        return False
    return near(_squares(attention.names, end), _squares(codes, one), SINGLE)


def _squares(codes: Tensor, values: Tensor) -> Tensor:
    """The sum of squares of each token."""
    _, place = token_of(codes).reshape(-1).unique(return_inverse=True)
    sums = torch.zeros(int(place.max()) + 1, dtype=torch.float64)
    return sums.index_add_(0, place, values.reshape(-1).double() ** 2)


def _like(operation: Operation) -> bool:
    return bool(operation.inputs) and operation.inputs[0].value.shape == operation.outputs[0].value.shape


def _as_it_was(recorder: Recorder, operation: Operation) -> Tensor:
    return operation.inputs[0].value
