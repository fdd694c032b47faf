"""What rotary position embeddings are built with and called with."""

import math
from typing import Any

from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentValueError,
    check_integer,
    check_number,
    check_positive,
    check_positive_number,
    check_tensor,
    check_whole,
    shape,
)

__all__ = [
    "check_llama3",
    "check_pairing_conversion",
    "check_rotary_factor",
    "check_rotary_inputs",
    "check_rotary_sizes",
    "check_yarn",
]


def check_rotary_sizes(head_dim: int, base: float) -> None:
    """Require pairs of features, and a base that makes the later ones slower."""
    _check_pairs(head_dim)
    check_number(base=base)
    if not 1 < base < math.inf:
        raise ArgumentValueError(f"base must be greater than 1 and finite, got {base}")


def check_rotary_factor(factor: float) -> None:
    """Require a factor that makes texts longer."""
    check_number(factor=factor)
    if not 1 <= factor < math.inf:
        raise ArgumentValueError(f"factor must be at least 1 and finite, got {factor}")


def check_yarn(scaling: Any) -> None:
    """Check what ``YaRNScaling`` is built with."""
    check_rotary_factor(scaling.factor)
    check_positive(original_max_len=scaling.original_max_len)
    _check_between_zero_and("beta_slow", scaling.beta_slow, "beta_fast", scaling.beta_fast)
    if scaling.attention_factor is not None:
        check_positive_number("attention_factor", scaling.attention_factor)


def check_llama3(scaling: Any) -> None:
    """Check what ``Llama3Scaling`` is built with."""
    check_rotary_factor(scaling.factor)
    check_positive(original_max_len=scaling.original_max_len)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    _check_between_zero_and("low_freq_factor", low, "high_freq_factor", high)


def check_pairing_conversion(weight: Tensor, head_dim: int) -> None:
    """Require the rows of whole heads."""
    check_tensor("weight", weight)
    _check_pairs(head_dim)
    if weight.dim() == 0 or weight.size(0) % head_dim:
        raise ArgumentValueError(
            f"weight must have shape (num_heads * head_dim, ...) with head_dim = {head_dim}, got {shape(weight)}"
        )


def check_rotary_inputs(x: Tensor, positions: Tensor | None, head_dim: int) -> None:
    """Require that queries or keys have pairs of features, and positions that fit their tokens."""
    check_tensor("x", x)
    if not x.is_floating_point():
        raise ArgumentTypeError(f"x must be floating, got {x.dtype}")
    if x.dim() < 2 or x.size(-1) != head_dim:
        raise ArgumentValueError(f"x must have shape (..., len, head_dim) with head_dim = {head_dim}, got {shape(x)}")
    if positions is None:
        return
    check_integer("positions", positions)
    tokens = tuple(x.shape[:-1])
    aligned = zip(reversed(positions.shape), reversed(tokens), strict=False)
    if positions.dim() > len(tokens) or any(size not in (1, expected) for size, expected in aligned):
        raise ArgumentValueError(f"positions must be broadcastable to (..., len) = {tokens}, got {shape(positions)}")


def _check_pairs(head_dim: int) -> None:
    check_whole(head_dim=head_dim)
    if head_dim < 2 or head_dim % 2:
        raise ArgumentValueError(f"head_dim must be even and at least 2 (features turn in pairs), got {head_dim}")


def _check_between_zero_and(name: str, value: float, bound_name: str, bound: float) -> None:
    check_number(**{name: value, bound_name: bound})
    if not 0 < value < bound < math.inf:
        raise ArgumentValueError(
            f"{name} must be greater than 0 and less than {bound_name}, got {name}={value} and {bound_name}={bound}"
        )
