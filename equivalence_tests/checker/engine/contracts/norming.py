"""Norms that are written out: whatever their gain, each token comes out as large as the others."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import squares_by, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.names import Attention, Source
from equivalence_tests.checker.engine.ran import forward_lines
from equivalence_tests.checker.engine.vocabulary import MULTIPLIES, words
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.reporting.lines import Frames

FOLDS = words("mean var var_mean norm sum vector_norm")
SLACK = 0.05  # what an epsilon below the root may do


def norm_departures(attention: Attention, module: nn.Module | None) -> Iterator[Departure]:
    """Name each norm of the user's own that leaves tokens of different sizes."""
    seen: set[Frames] = set()
    kinds = {type(part) for part in (module.modules() if module is not None else ()) if part is not module}
    lines = forward_lines(kind for kind in kinds if "norm" in kind.__name__.lower())
    for operation in (*_uneven(attention, lines), *_uneven_without_gains(attention, module)):
        if operation.frames[:1] not in seen:
            seen.add(operation.frames[:1])
            yield Departure("norm_leaves_different_sizes", "norm", operation)


def _uneven(attention: Attention, lines: set[tuple[str, int]]) -> Iterator[Operation]:
    """What leaves tokens of different sizes, for each norm that does."""
    for source in attention.run.names.sources.values():
        operation = source.operation
        if operation is not None and operation.name == "normalize" and _sizes_differ(source.slot.value, source.codes):
            yield operation
        if source.kind != "gain" or operation is None or not operation.frames or operation.frames[0][:2] not in lines:
            continue
        taken = _normalised(attention, operation, source)
        if taken is not None and _sizes_differ(taken, source.codes):
            yield _guilty(attention, operation, taken)


def _uneven_without_gains(attention: Attention, module: nn.Module | None) -> Iterator[Operation]:
    """What norms give and no tensor of theirs takes part in, where it leaves tokens of different sizes."""
    run, parts = attention.run, module.named_modules() if module is not None else ()
    norms = {path for path, part in parts if path and _is_a_norm(part)}
    for operation in run.operations:
        slot = operation.outputs[0] if operation.place in norms and operation.frames and operation.outputs else None
        codes = run.names.after[operation.index][0] if slot is not None else None
        if slot is None or codes is None or codes.is_complex():
            continue
        if any(user.place == operation.place for user in run.graph.users(slot)[-1:]):
            continue
        made_of = run.recorder.named(run.recorder.origins_of(slot.tensor))
        own = any(name.partition(":")[2].startswith(f"{operation.place}.") for name in made_of)
        if not own and _sizes_differ(slot.value, codes):
            yield _guilty(attention, operation, slot.value)


def _is_a_norm(part: nn.Module) -> bool:
    """Whether it is called a norm and is none of torch's, one of which folds the samples."""
    return "norm" in type(part).__name__.lower() and not type(part).__module__.startswith("torch.")


def _normalised(attention: Attention, operation: Operation, source: Source) -> Tensor | None:
    """What the gain multiplies."""
    taken = (slot.value for slot, _ in attention.run.names.taken(operation))
    return next((value for value in taken if value.shape == source.codes.shape), None)


def _sizes_differ(value: Tensor, codes: Tensor) -> bool:
    token = token_of(codes)
    if bool((token == token[..., :1]).all()):  # each row of features by itself, and so each head
        token = torch.arange(token[..., 0].numel()).view(*token.shape[:-1], 1).expand(token.shape)
    sizes = squares_by(token, value)
    sizes = sizes[sizes > 0]  # what is zero, as padding without a bias, cannot be made larger
    return bool(len(sizes)) and float(sizes.max() - sizes.min()) > SLACK * float(sizes.max())


def _guilty(attention: Attention, gain: Operation, taken: Tensor) -> Operation:
    """The fold over another axis than the last; else what made the tensor that the gain multiplies; else the gain."""
    near_by = [op for op in attention.run.operations[max(gain.index - 12, 0) : gain.index] if _in_its_norm(op, gain)]
    for operation in near_by:
        axis = operation.argument(1, "dim", -1)
        if operation.name in FOLDS and axis not in (-1, (-1,), [-1], operation.inputs[0].value.dim() - 1):
            return operation
    made = [op for op in near_by if op.name in MULTIPLIES and op.outputs[0].value.shape == taken.shape]
    return made[-1] if made else gain


def _in_its_norm(operation: Operation, gain: Operation) -> bool:
    """Whether an operation runs in the function in which the gain is multiplied, or in one that it calls."""
    path, _, function = gain.frames[0]
    inner = operation.frames[: len(operation.frames) - len(gain.frames) + 1]
    same = bool(inner) and inner[-1][::2] == (path, function)
    return same and operation.frames[len(inner) :] == gain.frames[1:]
