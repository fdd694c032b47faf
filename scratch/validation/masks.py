"""What the builders of masks are given."""

import torch
from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentValueError,
    check_dim,
    check_integer,
    check_not_negative,
    check_tensor,
    check_whole,
)

__all__ = [
    "check_lengths",
    "check_score_bias",
    "check_square_subsequent_mask",
    "check_window",
]


def check_window(window: int) -> None:
    """Require a window that holds at least the query's own place."""
    check_whole(window=window)
    if window < 1:
        raise ArgumentValueError(f"window must be at least 1 (the query's own place), got {window}")


def check_lengths(lengths: Tensor, max_len: int | None) -> None:
    """Require one length for each sample."""
    check_integer("lengths", lengths)
    check_dim("lengths", lengths, 1)
    check_not_negative(max_len=max_len)


def check_score_bias(score_bias: Tensor) -> None:
    """Require a float mask that holds only 0 and -inf."""
    check_tensor("score_bias", score_bias)
    if not score_bias.is_floating_point():
        raise ArgumentTypeError(f"score_bias must be floating, got {score_bias.dtype}")
    strange = score_bias[(score_bias != 0) & (score_bias != float("-inf"))]
    if strange.numel():
        raise ArgumentValueError(
            f"score_bias must hold only 0 (may look) and -inf (may not) to be read as a mask, got {strange[0].item()}"
        )


def check_square_subsequent_mask(size: int, dtype: torch.dtype | None) -> None:
    """Check the arguments of ``generate_square_subsequent_mask``."""
    check_not_negative(sz=size)
    if dtype is not None and not dtype.is_floating_point and dtype != torch.bool:
        raise ArgumentTypeError(f"dtype must be floating, or bool for True = may not look, got {dtype}")
