"""What an attention is built with and called with."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentValueError,
    autocast_is_on,
    check_dropout,
    check_mask_dtype,
    check_not_negative,
    check_positive,
    check_tensor,
    check_whole,
    quiet_while_tracing,
    shape,
)

__all__ = [
    "AN_ATTENTION",
    "ATTENTION",
    "DECODER_CROSS",
    "DECODER_SELF",
    "ENCODER_LAYER",
    "MaskArguments",
    "Names",
    "check_attention",
    "check_attention_inputs",
    "check_attention_sizes",
    "check_no_cache",
    "check_no_head_dims",
    "check_projection_dtypes",
]


MaskArguments = tuple[Tensor | None, Tensor | None, bool]  # attn_mask, key_padding_mask and is_causal


class Names(NamedTuple):
    """What the caller of a layer calls the arguments of the attention inside."""

    query: str = "query"
    key: str = "key"
    value: str = "value"
    attn_mask: str = "attn_mask"
    key_padding_mask: str = "key_padding_mask"
    is_causal: str = "is_causal"


ATTENTION = Names()


ENCODER_LAYER = Names("src", "src", "src", "src_mask", "src_key_padding_mask", "is_causal")


DECODER_SELF = Names("tgt", "tgt", "tgt", "tgt_mask", "tgt_key_padding_mask", "tgt_is_causal")


DECODER_CROSS = Names("tgt", "memory", "memory", "memory_mask", "memory_key_padding_mask", "memory_is_causal")


AN_ATTENTION = "a MultiheadAttention of scratch, builtin or torch.nn"


def check_attention_sizes(
    embed_dim: int,
    num_heads: int,
    kdim: int | None,
    vdim: int | None,
    qk_head_dim: int | None,
    v_head_dim: int | None,
) -> None:
    """Check the sizes that a multi-head attention is built with."""
    check_whole(embed_dim=embed_dim, num_heads=num_heads)
    if embed_dim <= 0 or num_heads <= 0:
        raise ArgumentValueError(
            f"embed_dim and num_heads must be greater than 0, got embed_dim={embed_dim} and num_heads={num_heads}"
        )
    check_not_negative(kdim=kdim, vdim=vdim)
    given = {"qk_head_dim": qk_head_dim, "v_head_dim": v_head_dim}
    check_positive(**{name: size for name, size in given.items() if size is not None})
    if embed_dim % num_heads and (qk_head_dim is None or v_head_dim is None):
        raise ArgumentValueError(
            f"embed_dim must be divisible by num_heads, got embed_dim={embed_dim} and num_heads={num_heads} "
            f"({embed_dim} = {num_heads} * {embed_dim // num_heads} + {embed_dim % num_heads}); layers call "
            f"them d_model and nhead"
        )


def check_no_head_dims(qk_head_dim: int | None, v_head_dim: int | None) -> None:
    """Refuse the head sizes that torch.nn cannot express."""
    for name, size in (("qk_head_dim", qk_head_dim), ("v_head_dim", v_head_dim)):
        if size is not None:
            raise ArgumentValueError(
                f"{name}={size} cannot be expressed by torch.nn.MultiheadAttention, whose heads are always "
                f"embed_dim / num_heads wide; use scratch.MultiheadAttention"
            )


def check_no_cache(cache: object) -> None:
    """Refuse the key/value cache that torch.nn does not have."""
    if cache is not None:
        raise ArgumentValueError(
            "cache cannot be used with torch.nn: its attention projects all keys and values at every call; "
            "use the scratch package, or decode by recomputation"
        )


@quiet_while_tracing
def check_attention_inputs(
    attention: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    given: MaskArguments,
    need_weights: bool = False,
    *,
    cache: Any = None,
    names: Names = ATTENTION,
) -> None:
    """Check the call of a multi-head attention, ours or torch.nn's: its (query, key, value) and its masks."""
    (query, key, value), (attn_mask, key_padding_mask, is_causal) = inputs, given
    _check_ranks(query, key, value, key_padding_mask, attn_mask, names)
    _check_mask_kinds(key_padding_mask, attn_mask, is_causal, names)
    time_dim = 1 if attention.batch_first and query.dim() == 3 else 0
    _check_widths(attention, query, key, value, names)
    _check_lengths_and_batch(query, key, value, time_dim, names)
    key_len = key.size(time_dim) if cache is None else cache.extended_len(key.size(time_dim))
    batch = query.size(1 - time_dim) if query.dim() == 3 else None
    _check_padding_shape(key_padding_mask, batch, key_len, names)
    replaced = is_causal and key_padding_mask is None and not need_weights and cache is None
    # Without a batch torch.nn looks at the shape of a 3-D mask even where it replaces it.
    if attn_mask is not None and (not replaced or (batch is None and attn_mask.dim() == 3)):
        _check_mask_shape(attn_mask, batch, attention.num_heads, query.size(time_dim), key_len, names)
    _check_mask_precision(key_padding_mask, None if replaced else attn_mask, query, need_weights, names)
    check_projection_dtypes(attention, query, key, value, names)
    if attention.training:  # torch.nn looks only when it drops
        check_dropout("dropout", attention.dropout)


def _check_ranks(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, attn_mask: Tensor | None, names: Names
) -> None:
    for name, x in zip(names, (query, key, value), strict=False):
        check_tensor(name, x)
        if x.is_nested:
            raise ArgumentTypeError(f"{name} must not be a nested tensor: pad it and pass {names.key_padding_mask}")
    for name, mask in ((names.key_padding_mask, padding), (names.attn_mask, attn_mask)):
        if mask is not None:
            check_tensor(name, mask)
    if query.dim() not in (2, 3):
        raise ArgumentValueError(
            f"{names.query} must be 2-D (len, features) or 3-D with a batch, got shape {shape(query)}: "
            f"query should be unbatched 2D or batched 3D tensor but received {query.dim()}-D query tensor"
        )
    batched, dim = query.dim() == 3, query.dim()
    prefix = f"For {'batched (3-D)' if batched else 'unbatched (2-D)'} `{names.query}`, expected "
    if key.dim() != dim or value.dim() != dim:
        raise ArgumentValueError(
            f"{prefix}`{names.key}` and `{names.value}` to be {dim}-D but found {key.dim()}-D and {value.dim()}-D "
            f"tensors respectively"
        )
    if padding is not None and padding.dim() != dim - 1:
        raise ArgumentValueError(
            f"{prefix}`{names.key_padding_mask}` to be `None` or {dim - 1}-D but found {padding.dim()}-D tensor instead"
        )
    if attn_mask is not None and attn_mask.dim() not in (2, 3):
        raise ArgumentValueError(
            f"{prefix}`{names.attn_mask}` to be `None`, 2-D or 3-D but found {attn_mask.dim()}-D tensor instead"
        )


def _check_mask_kinds(padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool, names: Names) -> None:
    if padding is not None:
        check_mask_dtype(names.key_padding_mask, padding)
    if attn_mask is not None:
        check_mask_dtype(names.attn_mask, attn_mask)
    if is_causal and attn_mask is None:
        raise ArgumentValueError(
            f"{names.is_causal}=True needs {names.attn_mask} (Need attn_mask if specifying the is_causal hint): it is "
            f"a promise about the mask, not a mask; pass a causal {names.attn_mask} too, got None"
        )


def _check_widths(attention: Any, query: Tensor, key: Tensor, value: Tensor, names: Names) -> None:
    widths = (("embed_dim", attention.embed_dim), ("kdim", attention.kdim), ("vdim", attention.vdim))
    for name, x, (size_name, size) in zip(names, (query, key, value), widths, strict=False):
        if x.size(-1) != size:
            raise ArgumentValueError(
                f"{name} must have {size_name} = {size} features (was expecting embedding dimension of {size}, "
                f"but got {x.size(-1)}), got shape {shape(x)}"
            )


def _check_lengths_and_batch(query: Tensor, key: Tensor, value: Tensor, time_dim: int, names: Names) -> None:
    if key.shape[:-1] != value.shape[:-1]:
        raise ArgumentValueError(
            f"{names.key} and {names.value} must agree in length and batch, got shapes {shape(key)} and {shape(value)}"
        )
    if query.dim() == 3 and query.size(1 - time_dim) != key.size(1 - time_dim):
        layout = "(batch, len, features)" if time_dim else "(len, batch, features), as batch_first=False reads it"
        raise ArgumentValueError(
            f"{names.query} and {names.key} must have the same batch size, got {query.size(1 - time_dim)} and "
            f"{key.size(1 - time_dim)} from shapes {shape(query)} and {shape(key)} read as {layout}"
        )


def _check_padding_shape(padding: Tensor | None, batch: int | None, key_len: int, names: Names) -> None:
    if padding is None:
        return
    words, expected = ("(key_len,)", (key_len,)) if batch is None else ("(batch, key_len)", (batch, key_len))
    if padding.shape != expected:
        raise ArgumentValueError(f"{names.key_padding_mask} must have shape {words} = {expected}, got {shape(padding)}")


def _check_mask_shape(
    attn_mask: Tensor, batch: int | None, num_heads: int, query_len: int, key_len: int, names: Names
) -> None:
    flat = (query_len, key_len)
    full = (num_heads * (1 if batch is None else batch), *flat)
    if attn_mask.shape != flat and attn_mask.shape != full:
        first = "num_heads" if batch is None else "batch * num_heads"
        raise ArgumentValueError(
            f"{names.attn_mask} must have shape (query_len, key_len) = {flat} or ({first}, query_len, key_len) = "
            f"{full}, got {shape(attn_mask)} "
            f"(Expected `attn_mask` shape to be {full if attn_mask.dim() == 3 else flat})"
        )


def _check_mask_precision(
    padding: Tensor | None, attn_mask: Tensor | None, query: Tensor, need_weights: bool, names: Names
) -> None:
    """A float mask is added to the scores; torch's kernels add only what has (or may be cast to) their dtype."""
    floats = [x for x in (padding, attn_mask) if x is not None and x.is_floating_point()]
    if not floats or autocast_is_on(query.device):
        return
    both_float = len(floats) == sum(x is not None for x in (padding, attn_mask))
    found = floats[0].dtype if both_float else query.dtype
    for x in floats:
        found = torch.promote_types(found, x.dtype)
    allowed = (query.dtype,) if need_weights else (query.dtype, torch.float32)
    if found not in allowed:
        name = names.attn_mask if floats[-1] is attn_mask else names.key_padding_mask
        raise ArgumentTypeError(
            f"{name} must be bool or have the dtype of {names.query}, {query.dtype}, got {found}: a float mask is "
            f"added to the scores"
        )


def check_projection_dtypes(attention: Any, query: Tensor, key: Tensor, value: Tensor, names: Names) -> None:
    """Require that the inputs have the dtype of the weights they are multiplied with."""
    if autocast_is_on(query.device):
        return
    weight = attention.in_proj_weight
    weight = attention.q_proj_weight if weight is None else weight
    for name, x in zip(names, (query, key, value), strict=False):
        if x.dtype != weight.dtype:
            raise ArgumentTypeError(
                f"{name} must have the dtype of the weights, {weight.dtype}, got {x.dtype} "
                f"(mat1 and mat2 must have the same dtype)"
            )


def check_attention(name: str, x: object, kinds: tuple[type, ...]) -> None:
    """Require a multi-head attention, of one of the classes that we can read."""
    if not isinstance(x, kinds):
        raise ArgumentTypeError(f"{name} must be {AN_ATTENTION}, got {type(x).__name__}")
