"""What ``scaled_dot_product_attention`` is called with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentUnsupportedTypeError,
    ArgumentValueError,
    autocast_dtype,
    check_dropout,
    check_tensor,
    quiet_while_tracing,
    shape,
)

__all__ = [
    "check_head_dim_and_key_len",
    "check_scaled_dot_product_attention",
    "is_causal_bias",
    "lower_right_sizes",
]


@quiet_while_tracing
def check_scaled_dot_product_attention(
    inputs: tuple[Tensor, Tensor, Tensor],
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Check the call of ``scaled_dot_product_attention``: its (query, key, value), and what goes with them."""
    query, key, value = inputs
    _check_sdpa_kinds(query, key, value)
    leading = _check_sdpa_shapes(query, key, value, enable_gqa)
    check_dropout("dropout_p", dropout_p)
    if attn_mask is None:
        return
    is_bias = is_causal_bias(attn_mask)
    if is_causal and is_bias:
        raise ArgumentValueError("attn_mask is already causal: CausalBias should not be used with causal=True")
    if is_causal:
        raise ArgumentValueError(
            "attn_mask and is_causal=True exclude each other: give one of the two "
            "(_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True)"
        )
    if not is_bias:
        _check_sdpa_mask(query, key, attn_mask, leading)
    elif (sizes := lower_right_sizes(attn_mask)) is not None:
        _check_sdpa_mask(query, key, torch.empty(sizes, dtype=torch.bool, device="meta"), leading)


def is_causal_bias(attn_mask: object) -> bool:
    """Return whether a mask is a causal bias of ``torch.nn.attention.bias``."""
    if attn_mask is None or type(attn_mask) is Tensor:
        return False
    from torch.nn.attention.bias import CausalBias  # it takes two seconds to import: whoever has one has done so

    return isinstance(attn_mask, CausalBias)


def lower_right_sizes(causal_bias: Any) -> tuple[int, int] | None:
    """Return the sizes of a causal bias through the lower right corner; None if it runs through the upper left one.

    torch takes a square one for upper left, whatever the lengths are.
    """
    sizes = causal_bias.seq_len_q, causal_bias.seq_len_kv
    return sizes if causal_bias.variant.name == "LOWER_RIGHT" and sizes[0] != sizes[1] else None


def _check_sdpa_kinds(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.is_nested:
            raise ArgumentTypeError(f"{name} must not be a nested tensor: pad it and pass attn_mask")
        if x.dim() < 2:
            raise ArgumentValueError(f"{name} must be at least 2-D (len, head_dim), got shape {shape(x)}")
        if not x.is_floating_point():
            raise ArgumentUnsupportedTypeError(f"{name} must be floating, got {x.dtype}")
        if x.dtype != query.dtype and autocast_dtype(x) != autocast_dtype(query):
            raise ArgumentTypeError(
                f"query, key and value must have the same dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
            )
        if x.device.type != query.device.type:
            raise ArgumentValueError(
                f"query, key and value must be on the same device, got {query.device}, {key.device} and {value.device}"
            )


def check_head_dim_and_key_len(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Require that queries can be compared with keys, and that each key has its value."""
    if key.size(-1) != query.size(-1):
        raise ArgumentValueError(
            f"key must have the head_dim of query, {query.size(-1)}, got {key.size(-1)} from shape {shape(key)}"
        )
    if value.size(-2) != key.size(-2):
        raise ArgumentValueError(
            f"value must have the key_len of key, {key.size(-2)}, got {value.size(-2)} from shape {shape(value)}"
        )


def _check_sdpa_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Check the shapes and give the leading dimensions of the scores."""
    check_head_dim_and_key_len(query, key, value)
    skip = 3 if enable_gqa else 2  # the numbers of grouped heads need not be equal
    scores_leading = _check_leading("key", key, query.shape[:-skip], skip)
    _check_leading("value", value, scores_leading, skip)
    if enable_gqa:
        _check_groups(query, key, value)
    return (*scores_leading, *query.shape[-skip:-2])


def _check_groups(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Require that the heads of key and value divide those of query; torch divides by them even where they are none."""
    if min(query.dim(), key.dim(), value.dim()) > 2 and query.size(-3) == key.size(-3) == value.size(-3):
        return
    for name, x in (("key", key), ("value", value)):
        if query.dim() < 3 or x.dim() < 3 or x.size(-3) == 0 or query.size(-3) % x.size(-3):
            raise ArgumentValueError(
                f"the heads of {name} must divide the heads of query (Number of heads in key and value must divide the "
                f"number of heads in query), got shapes {shape(x)} and {shape(query)}"
            )


def _check_leading(name: str, x: Tensor, leading: Sequence[int], skip: int) -> tuple[int, ...]:
    merged = _broadcast(x.shape[:-skip], leading)
    if merged is None:
        raise ArgumentValueError(
            f"{name} must have the leading dimensions of query, {shape(leading)}, or 1 in their place, "
            f"got shape {shape(x)}"
        )
    return merged


def _check_sdpa_mask(query: Tensor, key: Tensor, attn_mask: Tensor, leading: Sequence[int]) -> None:
    if autocast_dtype(attn_mask) not in (torch.bool, torch.float32, autocast_dtype(query)):
        raise ArgumentTypeError(
            f"attn_mask must be bool (True = may look), float32 or of query's dtype {query.dtype}, got "
            f"{attn_mask.dtype}; turn 0/1 masks into bool with attn_mask.bool()"
        )
    expected = (*leading, query.size(-2), key.size(-2))
    if _broadcast(attn_mask.shape, expected) != expected:
        raise ArgumentValueError(
            f"attn_mask must be broadcastable to (..., query_len, key_len) = {expected}, got {shape(attn_mask)}"
        )


def _broadcast(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """Broadcast two shapes; None if they do not fit (torch.broadcast_shapes raises, and is not traced)."""
    if first == second:
        return tuple(first)
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    extra = len(longer) - len(shorter)
    if any(m != n and m != 1 and n != 1 for m, n in zip(longer[extra:], shorter, strict=True)):
        return None
    return (*longer[:extra], *(n if m != n and m == 1 else m for m, n in zip(longer[extra:], shorter, strict=True)))
