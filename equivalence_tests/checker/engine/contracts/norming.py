"""Norms that are written out: whatever their gain, each token comes out as large as the others."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import squares_by, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.names import Attention, Source
from equivalence_tests.checker.engine.ran import forward_lines
from equivalence_tests.checker.engine.vocabulary import words
from equivalence_tests.checker.engine.watching import Operation

__all__ = ["norm_departures"]

FOLDS = words("mean var var_mean norm sum vector_norm")
SLACK = 0.05  # what an epsilon below the root may do


def norm_departures(attention: Attention, module: nn.Module | None) -> Iterator[Departure]:
    """Name each norm of the user's own that leaves tokens of different sizes.

    Args:
        attention: Of the call.
        module: Holds the norms.
    """
    kinds = {type(part) for part in (module.modules() if module is not None else ()) if part is not module}
    lines = forward_lines(kind for kind in kinds if "norm" in kind.__name__.lower())
    for source in attention.run.names.sources.values():
        operation = source.operation
        if operation is not None and operation.name == "normalize" and _sizes_differ(source.slot.value, source.codes):
            yield Departure("norm_leaves_different_sizes", "norm", operation)
        if source.kind != "gain" or operation is None or not operation.frames or operation.frames[0][:2] not in lines:
            continue
        taken = _normalised(attention, operation, source)
        if taken is not None and _sizes_differ(taken, source.codes):
            yield Departure("norm_leaves_different_sizes", "norm", _guilty(attention, operation, taken))


def _normalised(attention: Attention, operation: Operation, source: Source) -> Tensor | None:
    """What the gain multiplies."""
    taken = (slot.value for slot, _ in attention.run.names.taken(operation))
    return next((value for value in taken if value.shape == source.codes.shape), None)


def _sizes_differ(value: Tensor, codes: Tensor) -> bool:
    token = token_of(codes)
    if bool((token == token[..., :1]).all()):  # each row of features by itself, and so each head
        token = torch.arange(token[..., 0].numel()).view(*token.shape[:-1], 1).expand(token.shape)
    sizes = squares_by(token, value)
    return float(sizes.max() - sizes.min()) > SLACK * float(sizes.max())


def _guilty(attention: Attention, gain: Operation, taken: Tensor) -> Operation:
    """The fold over another axis than the last; else what made the tensor that the gain multiplies; else the gain."""
    mine = [op for op in attention.run.operations[: gain.index] if op.frames and op.frames[0][2] == gain.frames[0][2]]
    near_by = [op for op in mine[-12:] if op.frames[0][0] == gain.frames[0][0]]
    for operation in near_by:
        axis = operation.argument(1, "dim", -1)
        if operation.name in FOLDS and axis not in (-1, (-1,), [-1], operation.inputs[0].value.dim() - 1):
            return operation
    made = [
        op
        for op in near_by
        if op.name.strip("_") in ("mul", "div", "truediv") and op.outputs[0].value.shape == taken.shape
    ]
    return made[-1] if made else gain
