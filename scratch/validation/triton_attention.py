"""What ``triton_attention`` is given."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentUnsupportedError,
    ArgumentValueError,
    check_tensor,
    check_whole,
    shape,
)
from scratch.validation.sdpa import check_head_dim_and_key_len

__all__ = ["check_differentiable_twice", "check_triton_attention"]


def check_triton_attention(q: Tensor, k: Tensor, v: Tensor, reach: Sequence[int | None], *, interpreted: bool) -> None:
    """Check the call of ``triton_attention``."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if not 2 <= x.dim() <= 4 or 0 in x.shape:
            raise ArgumentValueError(f"{name} must have 2 to 4 dimensions and none of size 0, got shape {shape(x)}")
        if not x.is_floating_point() or x.dtype != q.dtype:
            raise ArgumentTypeError(f"{name} must be floating and of the dtype of q, {q.dtype}, got {x.dtype}")
        if not x.is_cuda and not interpreted:
            raise ArgumentUnsupportedError(
                f"{name} must be on a CUDA device, or Triton's interpreter must run the kernel (TRITON_INTERPRET=1 "
                f"before Triton is imported), got {x.device}"
            )
    check_head_dim_and_key_len(q, k, v)
    _check_heads(q, k, v)
    _check_reach(reach)


def _check_reach(reach: Sequence[int | None]) -> None:
    if len(reach) != 2:
        raise ArgumentValueError(f"reach must be (first, last), whole numbers or None, got {reach}")
    first, last = reach
    check_whole(**{f"reach[{i}]": x for i, x in enumerate(reach) if x is not None})
    if first is not None and last is not None and first > last:
        raise ArgumentValueError(f"reach must not end before it begins, got {reach}")


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    heads = {x.size(-3) for x in (k, v) if x.dim() > 2} - {1}
    of_queries = q.size(-3) if q.dim() > 2 else 1
    if len(heads) > 1 or (of_queries > 1 and any(of_queries % count for count in heads)):
        raise ArgumentValueError(
            f"the heads of k and v must be equal and divide those of q, {of_queries}, got shapes {shape(k)} and "
            f"{shape(v)}"
        )


def check_differentiable_twice(score_bias: Callable[..., Any] | None) -> None:
    """Refuse to go back to the textbook where the bias is a function of Triton, which torch cannot call."""
    if score_bias is not None:
        raise ArgumentUnsupportedError(
            "score_bias must be None where gradients are differentiated again (create_graph=True), which the textbook "
            f"computes, got {score_bias}"
        )
