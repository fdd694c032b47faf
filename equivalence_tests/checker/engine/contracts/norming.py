"""Norms that are written by hand: before the gain, every token must have the same size."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import squares_by, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.names import Attention, Run
from equivalence_tests.checker.engine.vocabulary import MULTIPLIES, words
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.reporting.lines import Frames

FOLDS = words("mean var var_mean norm sum vector_norm")
SLACK = 0.05  # by so much an epsilon under the root may make sizes differ


def norm_departures(attention: Attention, module: nn.Module | None) -> Iterator[Departure]:
    """Name each norm of the user's own that leaves tokens of different sizes."""
    run, seen = attention.run, set[Frames]()
    modules = module.named_modules() if module is not None else ()
    norms = {path for path, part in modules if path and _is_a_norm(part)}
    made = (source.operation for source in run.names.sources.values() if source.kind == "gain")
    gains = {operation.index for operation in made if operation is not None}
    for operation in (operation for operation in run.operations if operation.frames):
        taken = _normalised(run, operation, norms, gains)
        if taken is not None and operation.frames[:1] not in seen and _sizes_differ(*taken):
            seen.add(operation.frames[:1])
            guilty = operation if operation.name == "normalize" else _guilty(attention, operation, taken[0])
            yield Departure("norm_leaves_different_sizes", "norm", guilty)


def _normalised(run: Run, operation: Operation, norms: set[str], gains: set[int]) -> tuple[Tensor, Tensor] | None:
    """Give what a norm made, before the gain, and its names, if this is the norm's last operation; None if not."""
    codes = run.names.after[operation.index][0] if operation.outputs else None
    if codes is None or codes.is_complex() or not (operation.name == "normalize" or operation.place in norms):
        return None
    slot, own = operation.outputs[0], f"{operation.place}."
    if operation.index in gains:
        later = [user for user in run.graph.users(slot) if user.place == operation.place and user.name in MULTIPLIES]
        behind = [one.outputs[0].value / slot.value for one in later[:1]]  # weight * x, and then what x is divided by
        taken = (x.value for x, _ in run.names.taken(operation) if x.value.shape == codes.shape)
        return next(((x * behind[0] if behind else x, codes) for x in taken), None)
    names = run.recorder.named(run.recorder.origins_of(slot.tensor))
    learnt = any(name.partition(":")[2].startswith(own) for name in names)
    last = not any(user.place == operation.place for user in run.graph.users(slot)[-1:])
    return (slot.value, codes) if operation.name == "normalize" or (last and not learnt) else None


def _is_a_norm(part: nn.Module) -> bool:
    """Whether it is called a norm and is not torch's: BatchNorm takes its mean over the samples."""
    return "norm" in type(part).__name__.lower() and not type(part).__module__.startswith("torch.")


def _sizes_differ(value: Tensor, codes: Tensor) -> bool:
    token = token_of(codes)
    if token.size(-1) > 1 and bool((token == token[..., :1]).all()):  # each row of features by itself, so each head
        token = torch.arange(token[..., 0].numel()).view(*token.shape[:-1], 1).expand(token.shape)
    sizes = squares_by(token, value)
    sizes = sizes[sizes > 0]  # a token of zeros, such as padding, stays zero
    return bool(len(sizes)) and float(sizes.max() - sizes.min()) > SLACK * float(sizes.max())


def _guilty(attention: Attention, gain: Operation, taken: Tensor) -> Operation:
    """The mean over an axis other than the last; else what made the tensor that the gain multiplies; else the gain."""
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
