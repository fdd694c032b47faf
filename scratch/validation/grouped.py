"""What grouped-query attention is built with and called with."""

from typing import Any

import torch
from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentValueError,
    autocast_is_on,
    check_bool,
    check_positive,
    check_positive_number,
    check_tensor,
    shape,
)
from scratch.validation.masks import check_window

__all__ = [
    "check_flex_has_gradient",
    "check_grouped_inputs",
    "check_grouped_options",
    "check_grouped_sizes",
    "check_ranks_divide",
]


def check_grouped_sizes(embed_dim: int, num_heads: int, num_key_heads: int | None, head_dim: int | None) -> None:
    """Check the sizes that grouped-query attention is built with."""
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    check_positive(embed_dim=embed_dim, num_heads=num_heads, num_key_heads=num_key_heads)
    if num_heads % num_key_heads:
        raise ArgumentValueError(
            f"num_heads must be divisible by num_key_heads, got num_heads={num_heads} and num_key_heads={num_key_heads}"
        )
    if head_dim is not None:
        check_positive(head_dim=head_dim)
    elif embed_dim % num_heads:
        raise ArgumentValueError(
            f"embed_dim must be divisible by num_heads unless head_dim is given, got embed_dim={embed_dim} and "
            f"num_heads={num_heads}"
        )


def check_grouped_options(
    head_dim: int, window: int | None, soft_cap: float | None, scale: float | None, rotary: Any
) -> None:
    """Check the options of grouped-query attention."""
    if window is not None:
        check_window(window)
    for name, value in (("soft_cap", soft_cap), ("scale", scale)):
        if value is not None:
            check_positive_number(name, value)
    if rotary is not None and not hasattr(rotary, "head_dim"):
        raise ArgumentTypeError(f"rotary must be a RotaryEmbedding, got {type(rotary).__name__}")
    if rotary is not None and rotary.head_dim != head_dim:
        raise ArgumentValueError(f"rotary must have the head_dim of the attention, {head_dim}, got {rotary.head_dim}")


def check_grouped_inputs(attention: Any, x: Tensor, may_attend: Tensor | None, cache: Any) -> None:
    """Check the call of grouped-query attention."""
    check_tensor("x", x)
    if x.dim() != 3 or x.size(-1) != attention.embed_dim:
        raise ArgumentValueError(
            f"x must have shape (batch, len, embed_dim) with embed_dim = {attention.embed_dim}, got {shape(x)}"
        )
    if x.dtype != attention.q_proj.weight.dtype and not autocast_is_on(x.device):
        raise ArgumentTypeError(f"x must have the dtype of the weights, {attention.q_proj.weight.dtype}, got {x.dtype}")
    if cache is not None and not hasattr(cache, "length"):
        raise ArgumentTypeError(f"cache must be a KeyValueCache, got {type(cache).__name__}")
    if may_attend is None:
        return
    check_bool("may_attend", may_attend)
    key_len = x.size(1) + (0 if cache is None else cache.length)
    expected = (x.size(0), attention.num_heads, x.size(1), key_len)
    aligned = zip(reversed(may_attend.shape), reversed(expected), strict=False)
    if may_attend.dim() > 4 or any(size not in (1, wanted) for size, wanted in aligned):
        raise ArgumentValueError(
            f"may_attend must be broadcastable to (batch, num_heads, len, key_len) = {expected}, got "
            f"{shape(may_attend)}"
        )


def check_flex_has_gradient(attention: Any, x: Tensor) -> None:
    """Refuse a gradient that torch's flex attention, the way to soft caps, does not have on the CPU."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in attention.parameters()))
    if attention.soft_cap is not None and x.device.type == "cpu" and wanted:
        raise ArgumentValueError(
            f"soft_cap={attention.soft_cap} cannot be trained on the CPU with torch, whose flex attention has no "
            f"backward pass there; use scratch.GroupedQueryAttention, torch.no_grad() or a CUDA device"
        )


def check_ranks_divide(path: str, units: int, num_ranks: int) -> None:
    """Require that each process gets as many whole heads or hidden units as every other."""
    if units % num_ranks:
        raise ArgumentValueError(
            f"num_ranks must divide the heads or hidden units that are cut, got num_ranks={num_ranks} for the {units} "
            f"of {path}"
        )
