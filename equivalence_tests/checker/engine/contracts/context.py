"""From the product of weights and values to what is merged: nothing changes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.anchors import Attention
from equivalence_tests.checker.engine.codes import known, sources_in
from equivalence_tests.checker.engine.contracts.departure import Departure, constant_ratio, near
from equivalence_tests.checker.engine.watching import Operation, Recorder

__all__ = ["context_departures", "is_tiled", "values_by_name"]


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


def context_departures(attention: Attention) -> Iterator[Departure]:
    """Name the first operation that changes what was averaged.

    Args:
        attention: Read so far.
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
            mine = known(codes) & torch.isin(codes, names)
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


def _like(operation: Operation) -> bool:
    return bool(operation.inputs) and operation.inputs[0].value.shape == operation.outputs[0].value.shape


def _as_it_was(recorder: Recorder, operation: Operation) -> Tensor:
    return operation.inputs[0].value
