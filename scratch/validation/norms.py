"""What the normalisation by the root mean square is given."""

from collections.abc import Sequence

from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentUnsupportedTypeError,
    ArgumentValueError,
    check_not_negative,
    check_tensor,
    check_whole,
    shape,
)

__all__ = ["check_normalized_shape", "check_rms_norm"]


def check_normalized_shape(normalized_shape: int | Sequence[int]) -> None:
    """Require a size, or for several."""
    sizes = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
    for size in sizes:
        check_not_negative(normalized_shape=size)


def check_rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> None:
    """Check the call of ``rms_norm``."""
    check_tensor("input", x)
    if not isinstance(normalized_shape, Sequence):
        raise ArgumentTypeError(f"normalized_shape must be a list or tuple of sizes, got {normalized_shape!r}")
    expected = tuple(normalized_shape)
    if not expected:
        raise ArgumentValueError("normalized_shape must hold at least one size, got ()")
    check_whole(**{f"normalized_shape[{i}]": size for i, size in enumerate(expected)})
    if not x.is_floating_point():
        raise ArgumentUnsupportedTypeError(f"input must be floating, got {x.dtype}")
    if x.shape[-len(expected) :] != expected:
        raise ArgumentValueError(
            f"input must have shape (..., *normalized_shape) = (..., {_inside(expected)}), got {shape(x)}"
        )
    if weight is not None:
        check_tensor("weight", weight)
    if weight is not None and weight.shape != expected:
        raise ArgumentValueError(f"weight must have shape normalized_shape = {expected}, got {shape(weight)}")


def _inside(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
