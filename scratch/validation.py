"""The doors: every check of an argument and every error text, once, for both packages.

A value or shape that does not fit is a ValueError, a dtype that does not fit a TypeError. Both are also a RuntimeError
and an AssertionError, the types that torch.nn raises, so that existing ``except`` clauses keep working.
"""

import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

__all__ = ["ArgumentTypeError", "ArgumentValueError"]


class ArgumentValueError(ValueError, RuntimeError, AssertionError):
    """An argument has a shape or a value that does not fit."""


class ArgumentTypeError(TypeError, RuntimeError, AssertionError):
    """An argument has a dtype or a kind that does not fit."""


MaskArguments = tuple[Tensor | None, Tensor | None, bool]


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
RECORDED_ARGUMENTS = (*ATTENTION, "need_weights")


def shape(x: Tensor | Sequence[int]) -> str:
    """Write a shape as a tuple: (2, 3)."""
    return str(tuple(x.shape if isinstance(x, Tensor) else x))


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Ask that a value is one of a few."""
    if value not in choices:
        raise ArgumentValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_bool(name: str, x: Tensor) -> None:
    """Ask for a bool tensor."""
    check_tensor(name, x)
    if x.dtype != torch.bool:
        raise ArgumentTypeError(f"{name} must be a bool tensor (True = may look), got {x.dtype}")


def check_integer(name: str, x: Tensor) -> None:
    """Ask for a tensor of integers."""
    check_tensor(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ArgumentTypeError(f"{name} must hold integers, got {x.dtype}")


def check_dim(name: str, x: Tensor, dim: int) -> None:
    """Ask for a number of dimensions."""
    if x.dim() != dim:
        raise ArgumentValueError(f"{name} must be {dim}-D, got {x.dim()}-D of shape {shape(x)}")


def check_tensor(name: str, x: object) -> None:
    """Ask for a tensor."""
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor, got {type(x).__name__}")


def check_mask_dtype(name: str, mask: Tensor) -> None:
    """Ask for a bool or floating mask."""
    check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ArgumentTypeError(
            f"{name} must be bool or floating (only bool and floating types of {name} are supported), "
            f"got {mask.dtype}; turn 0/1 masks into bool with {name}.bool()"
        )


def check_dropout(name: str, probability: float) -> None:
    """Ask for a probability."""
    if not 0.0 <= probability <= 1.0:
        raise ArgumentValueError(f"dropout probability has to be between 0 and 1, but got {name}={probability}")


def check_whole(**sizes: object) -> None:
    """Ask for whole numbers."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer | torch.SymInt):
            raise ArgumentTypeError(f"{name} must be a whole number, got {size!r}")


def check_not_negative(**sizes: int | None) -> None:
    """Ask that sizes which are given are whole numbers and not negative."""
    check_whole(**{name: size for name, size in sizes.items() if size is not None})
    for name, size in sizes.items():
        if size is not None and size < 0:
            raise ArgumentValueError(f"{name} must not be negative, got {size}")


def check_window(window: int) -> None:
    """Ask for a window that holds at least the query's own place."""
    check_whole(window=window)
    if window < 1:
        raise ArgumentValueError(f"window must be at least 1 (the query's own place), got {window}")


def check_lengths(lengths: Tensor, max_len: int | None) -> None:
    """Ask for one length for each sample."""
    check_integer("lengths", lengths)
    check_dim("lengths", lengths, 1)
    check_not_negative(max_len=max_len)


def check_floating(name: str, dtype: torch.dtype) -> None:
    """Ask for a floating dtype, which has -inf."""
    if not dtype.is_floating_point:
        raise ArgumentTypeError(f"{name} must be a floating dtype, got {dtype}")


def check_score_bias(score_bias: Tensor) -> None:
    """Ask for a float mask that holds only 0 and -inf."""
    check_tensor("score_bias", score_bias)
    if not score_bias.is_floating_point():
        raise ArgumentTypeError(f"score_bias must be floating, got {score_bias.dtype}")
    strange = score_bias[(score_bias != 0) & (score_bias != float("-inf"))]
    if strange.numel():
        raise ArgumentValueError(
            f"score_bias must hold only 0 (may look) and -inf (may not) to be read as a mask, got {strange[0].item()}"
        )


def check_positive(**sizes: int) -> None:
    """Ask for whole numbers of at least 1."""
    check_whole(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentValueError(f"{name} must be greater than 0, got {name}={size}")


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


def check_attention_inputs(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    need_weights: bool = False,
    *,
    cache: Any = None,
    names: Names = ATTENTION,
) -> None:
    """Check the call of a multi-head attention, ours or torch.nn's."""
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
    if not floats or _autocast_is_on(query.device):
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


def _autocast_is_on(device: torch.device) -> bool:
    # torch.is_autocast_enabled raises for device types that have no autocast, such as meta.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def check_projection_dtypes(attention: Any, query: Tensor, key: Tensor, value: Tensor, names: Names) -> None:
    """Ask that the inputs have the dtype of the weights they are multiplied with."""
    if _autocast_is_on(query.device):
        return
    weight = attention.q_proj_weight if attention.in_proj_weight is None else attention.in_proj_weight
    for name, x in zip(names, (query, key, value), strict=False):
        if x.dtype != weight.dtype:
            raise ArgumentTypeError(
                f"{name} must have the dtype of the weights, {weight.dtype}, got {x.dtype} "
                f"(mat1 and mat2 must have the same dtype)"
            )


def check_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Check the call of ``scaled_dot_product_attention``."""
    _check_sdpa_kinds(query, key, value)
    leading = _check_sdpa_shapes(query, key, value, enable_gqa)
    check_dropout("dropout_p", dropout_p)
    if attn_mask is None:
        return
    if is_causal and isinstance(attn_mask, CausalBias):
        raise ArgumentValueError("attn_mask is already causal: CausalBias should not be used with causal=True")
    if is_causal:
        raise ArgumentValueError(
            "attn_mask and is_causal=True exclude each other: give one of the two "
            "(_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True)"
        )
    if not isinstance(attn_mask, CausalBias):
        _check_sdpa_mask(query, key, attn_mask, leading)


def _check_sdpa_kinds(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.is_nested:
            raise ArgumentTypeError(f"{name} must not be a nested tensor: pad it and pass attn_mask")
        if x.dim() < 2:
            raise ArgumentValueError(f"{name} must be at least 2-D (len, head_dim), got shape {shape(x)}")
        if not x.is_floating_point():
            raise ArgumentTypeError(f"{name} must be floating, got {x.dtype}")
        if x.dtype != query.dtype:
            raise ArgumentTypeError(
                f"query, key and value must have the same dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
            )
        if x.device.type != query.device.type:
            raise ArgumentValueError(
                f"query, key and value must be on the same device, got {query.device}, {key.device} and {value.device}"
            )


def _check_sdpa_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Check the shapes and give the leading dimensions of the scores."""
    if key.size(-1) != query.size(-1):
        raise ArgumentValueError(
            f"key must have the head_dim of query, {query.size(-1)}, got {key.size(-1)} from shape {shape(key)}"
        )
    if value.size(-2) != key.size(-2):
        raise ArgumentValueError(
            f"value must have the key_len of key, {key.size(-2)}, got {value.size(-2)} from shape {shape(value)}"
        )
    skip = 3 if enable_gqa else 2  # the numbers of grouped heads need not be equal
    scores_leading = _check_leading("key", key, query.shape[:-skip], skip)
    _check_leading("value", value, scores_leading, skip)
    if enable_gqa:
        _check_groups(query, key, value)
    return (*scores_leading, *query.shape[-skip:-2])


def _check_groups(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Ask that the heads of key and value divide those of query; torch divides by them even where they are none."""
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
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise ArgumentTypeError(
            f"attn_mask must be bool (True = may look), float32 or of query's dtype {query.dtype}, got "
            f"{attn_mask.dtype}; turn 0/1 masks into bool with attn_mask.bool()"
        )
    expected = (*leading, query.size(-2), key.size(-2))
    if len(attn_mask.shape) > len(expected) or _broadcast(attn_mask.shape, expected) != expected:
        raise ArgumentValueError(
            f"attn_mask must be broadcastable to (..., query_len, key_len) = {expected}, got {shape(attn_mask)}"
        )


def _broadcast(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """Broadcast two shapes; None if they do not fit (torch.broadcast_shapes raises, and is not traced)."""
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    extra = len(longer) - len(shorter)
    if any(m != n and m != 1 and n != 1 for m, n in zip(longer[extra:], shorter, strict=True)):
        return None
    return (*longer[:extra], *(n if m != n and m == 1 else m for m, n in zip(longer[extra:], shorter, strict=True)))


def check_activation(activation: str | Callable[[Tensor], Tensor]) -> None:
    """Ask for "relu", "gelu" or a function."""
    if isinstance(activation, str) and activation not in ("relu", "gelu"):
        raise ArgumentValueError(f'activation should be relu/gelu, as "relu", "gelu" or a function, not {activation!r}')
    if not callable(activation) and not isinstance(activation, str):
        raise ArgumentTypeError(f'activation must be "relu", "gelu" or a function, got {type(activation).__name__}')


def check_encoder_layer_inputs(
    layer: Any, src: Tensor, src_mask: Tensor | None, src_key_padding_mask: Tensor | None, is_causal: bool
) -> None:
    """Check the call of an encoder layer, ours or torch.nn's."""
    check_attention_inputs(
        layer.self_attn, src, src, src, src_key_padding_mask, src_mask, is_causal, names=ENCODER_LAYER
    )


def check_decoder_layer_inputs(
    layer: Any, tgt: Tensor, memory: Tensor, own: MaskArguments, cross: MaskArguments, cache: Any = None
) -> None:
    """Check the call of a decoder layer, ours or torch.nn's; the masks come as (attn_mask, padding, is_causal)."""
    own_cache, cross_cache = (None, None) if cache is None else (cache.self_attn, cache.multihead_attn)
    mask, padding, is_causal = own
    check_attention_inputs(
        layer.self_attn, tgt, tgt, tgt, padding, mask, is_causal, cache=own_cache, names=DECODER_SELF
    )
    mask, padding, is_causal = cross
    check_attention_inputs(
        layer.multihead_attn,
        tgt,
        memory,
        memory,
        padding,
        mask,
        is_causal,
        cache=cross_cache,
        names=DECODER_CROSS,
    )


def check_stack_input(
    name: str, x: Tensor, attn_mask: Tensor | None, mask_name: str, key_padding_mask: Tensor | None
) -> None:
    """Check what a stack of layers looks at itself: the rank of its input and the dtypes of its masks."""
    _check_sequence(name, x)
    for given_name, given in ((mask_name, attn_mask), (f"{name}_key_padding_mask", key_padding_mask)):
        if given is not None:
            check_mask_dtype(given_name, given)


def _check_sequence(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.is_nested:
        raise ArgumentTypeError(f"{name} must not be a nested tensor: pad it and pass {name}_key_padding_mask")
    if x.dim() not in (2, 3):
        raise ArgumentValueError(
            f"{name} must be 2-D (len, d_model) or 3-D with a batch, got {x.dim()}-D of shape {shape(x)}"
        )


def check_square_subsequent_mask(size: int, dtype: torch.dtype | None) -> None:
    """Check the arguments of ``generate_square_subsequent_mask``."""
    check_not_negative(sz=size)
    if dtype is not None and not dtype.is_floating_point and dtype != torch.bool:
        raise ArgumentTypeError(f"dtype must be floating, or bool for True = may not look, got {dtype}")


def check_transformer_inputs(model: Any, src: Tensor, tgt: Tensor) -> None:
    """Check that source and target of an encoder-decoder fit together and fit d_model."""
    for name, x in (("src", src), ("tgt", tgt)):
        _check_sequence(name, x)
    batch_dim = 0 if model.batch_first else 1
    if src.dim() == 3 and (tgt.dim() != 3 or src.size(batch_dim) != tgt.size(batch_dim)):
        raise ArgumentValueError(
            f"src and tgt must have the same batch size (the batch number of src and tgt must be equal), got shapes "
            f"{shape(src)} and {shape(tgt)} with batch_first={model.batch_first}"
        )
    for name, x in (("src", src), ("tgt", tgt)):
        if x.size(-1) != model.d_model:
            raise ArgumentValueError(
                f"{name} must have d_model = {model.d_model} features (the feature number of src and tgt must be equal "
                f"to d_model), got shape {shape(x)}"
            )


def check_module(name: str, x: object) -> None:
    """Ask for a module."""
    if not isinstance(x, nn.Module):
        raise ArgumentTypeError(f"{name} must be a torch.nn.Module, got {type(x).__name__}")


def check_attention(name: str, x: object, kinds: tuple[type, ...]) -> None:
    """Ask for a multi-head attention, of one of the classes that we can read."""
    if not isinstance(x, kinds):
        raise ArgumentTypeError(f"{name} must be {AN_ATTENTION}, got {type(x).__name__}")


def check_recordable(model: nn.Module, attentions: Mapping[str, nn.Module]) -> None:
    """Ask for a model with attention modules whose calls can be seen and read; they come by their paths."""
    for path, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled and not set(attentions.values()).isdisjoint(module.modules()):
            raise ArgumentValueError(
                f"model must not be compiled, because compiled code may pass by the hooks: record the model that was "
                f"given to torch.compile, which has the same parameters; got a compiled {type(module).__name__} at "
                f"path {path!r}"
            )
    if not attentions:
        raise ArgumentValueError(f"model must be or hold {AN_ATTENTION}, got {type(model).__name__} with none")
    for path, module in attentions.items():
        found = inspect.signature(module.forward).parameters
        missing = [name for name in RECORDED_ARGUMENTS if name not in found]
        if missing:
            raise ArgumentTypeError(
                f"model must hold attention modules whose forward takes {', '.join(RECORDED_ARGUMENTS)}, got "
                f"{type(module).__name__} at path {path!r} without {', '.join(missing)}"
            )


def check_map_recorded(path: str, calls: Mapping[str, Sequence[Tensor]]) -> None:
    """Ask for the path of an attention module that was called; a KeyError, as of every mapping."""
    if path not in calls:
        raise KeyError(f"path must be that of an attention module, one of {', '.join(map(repr, calls))}; got {path!r}")
    if not calls[path]:
        raise KeyError(f"path must be that of an attention module that was called while recording; {path!r} was not")


def check_num_layers(num_layers: int) -> None:
    """Ask for at least one layer: torch.nn builds an empty stack too, which no call gets through."""
    check_positive(num_layers=num_layers)


def check_positional_encoding(max_len: int, d_model: int, layout: str, base: float) -> None:
    """Check what a table of positional encodings is built with."""
    check_not_negative(max_len=max_len)
    check_positive(d_model=d_model)
    check_choice("layout", layout, ("interleaved", "concatenated"))
    if not base > 0:
        raise ArgumentValueError(f"base must be greater than 0, got {base}")


def check_positions(x: Tensor, offset: int, d_model: int, max_len: int) -> None:
    """Ask that tokens have the width and lie within the positions of the table."""
    check_tensor("x", x)
    if x.dim() not in (2, 3) or x.size(-1) != d_model:
        raise ArgumentValueError(
            f"x must have shape (batch, len, d_model) or (len, d_model) with d_model = {d_model}, got shape {shape(x)}"
        )
    check_not_negative(offset=offset)
    if offset + x.size(-2) > max_len:
        raise ArgumentValueError(
            f"x must end within max_len = {max_len} positions, got {x.size(-2)} tokens from position {offset} on; "
            f"build the model with a greater max_len"
        )


def check_cache_batch(expected: int, batch: int) -> None:
    """Ask that a cache is extended by the batch it was begun with."""
    if batch != expected:
        raise ArgumentValueError(f"cache holds a batch of {expected}, got a batch of {batch}: begin a new cache for it")


def check_cache_layers(cache: Sequence[Any], num_layers: int) -> None:
    """Ask for one cache for each decoder layer."""
    if len(cache) != num_layers:
        raise ArgumentValueError(f"cache must have one entry for each of {num_layers} layers, got {len(cache)}")


def check_decoding(end_id: int, pad_id: int, max_len: int) -> None:
    """Check what every way of decoding needs."""
    check_positive(max_len=max_len)
    if end_id == pad_id:
        raise ArgumentValueError(f"end_id must differ from pad_id, which is never chosen, got {end_id} for both")


def check_beams(beam_size: int, length_penalty: float) -> None:
    """Check what beam search needs."""
    check_positive(beam_size=beam_size)
    if not 0 <= length_penalty < float("inf"):
        raise ArgumentValueError(
            f"length_penalty must be finite and not negative (0 = long hypotheses are not favoured), "
            f"got {length_penalty}"
        )


def check_vocabularies(src_vocab_size: int, tgt_vocab_size: int, pad_id: int, start_id: int, end_id: int) -> None:
    """Ask that the special tokens are in the vocabularies, and that padding is no other token."""
    check_whole(pad_id=pad_id, start_id=start_id, end_id=end_id)
    check_positive(src_vocab_size=src_vocab_size, tgt_vocab_size=tgt_vocab_size)
    sizes = {"src_vocab_size": src_vocab_size, "tgt_vocab_size": tgt_vocab_size}
    for name, token_id in (("pad_id", pad_id), ("start_id", start_id), ("end_id", end_id)):
        for size_name, size in sizes.items():
            if not 0 <= token_id < size and (name == "pad_id" or size_name == "tgt_vocab_size"):
                raise ArgumentValueError(f"{name} must be in 0 ... {size_name} - 1 = {size - 1}, got {token_id}")
    if pad_id in (start_id, end_id):
        raise ArgumentValueError(
            f"pad_id must differ from start_id and end_id, because padding is never looked at, got pad_id={pad_id}, "
            f"start_id={start_id} and end_id={end_id}"
        )


def check_token_ids(name: str, token_ids: Tensor, embedding: Any, max_len: int) -> None:
    """Check token ids without reading them: kind, rank, length and device."""
    check_tensor(name, token_ids)
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(f"{name} must hold token ids as int64 or int32, got {token_ids.dtype}")
    if token_ids.dim() != 2:
        raise ArgumentValueError(
            f"{name} must have shape (batch, len), got {token_ids.dim()}-D of shape {shape(token_ids)}"
        )
    if token_ids.numel() == 0:
        raise ArgumentValueError(
            f"{name} must hold at least one row and one token in each, got shape {shape(token_ids)}: torch.nn's "
            f"padding masks cannot be empty"
        )
    if token_ids.size(1) > max_len:
        raise ArgumentValueError(
            f"{name} must hold at most max_len = {max_len} tokens in a row, the positions that the model was built "
            f"with, got shape {shape(token_ids)}"
        )
    if token_ids.device != embedding.weight.device:
        raise ArgumentValueError(
            f"{name} must be on the device of the parameters, {embedding.weight.device}, got {token_ids.device}"
        )


def check_ids_in_vocabulary(name: str, token_ids: Tensor, size_name: str, vocab_size: int) -> None:
    """Ask that every token id is in the vocabulary. This reads them, and so waits for the device."""
    outside = ((token_ids < 0) | (token_ids >= vocab_size)).nonzero()
    if len(outside):
        row, column = outside[0].tolist()
        raise ArgumentValueError(
            f"{name} must hold ids in 0 ... {size_name} - 1 = {vocab_size - 1}, got {int(token_ids[row, column])} "
            f"at [{row}, {column}]"
        )


def check_source(model: Any, src_ids: Tensor) -> None:
    """Check what a token-level model encodes."""
    check_token_ids("src_ids", src_ids, model.src_embedding, model.positional_encoding.max_len)


def check_source_and_target(model: Any, src_ids: Tensor, tgt_ids: Tensor) -> None:
    """Check the call of a token-level model."""
    check_source(model, src_ids)
    check_token_ids("tgt_ids", tgt_ids, model.tgt_embedding, model.positional_encoding.max_len)
    if src_ids.size(0) != tgt_ids.size(0):
        raise ArgumentValueError(
            f"src_ids and tgt_ids must have the same batch size, got shapes {shape(src_ids)} and {shape(tgt_ids)}"
        )


def check_decode(model: Any, tgt_ids: Tensor, memory: Tensor, src_ids: Tensor, cache: Any) -> None:
    """Check what a token-level model decodes."""
    check_source_and_target(model, src_ids, tgt_ids)
    expected = (*src_ids.shape, model.transformer.d_model)
    if memory.shape != expected:
        raise ArgumentValueError(
            f"memory must have shape (batch, src_len, d_model) = {expected}, as src_ids has it, got {shape(memory)}"
        )
    if cache is None:
        return
    check_cache_layers(cache, model.transformer.decoder.num_layers)
    if tgt_ids.size(1) <= cache[0].length:
        raise ArgumentValueError(
            f"tgt_ids must hold the whole target so far, the {cache[0].length} tokens of the cache and new ones after "
            f"them, got shape {shape(tgt_ids)}"
        )


def check_generate(model: Any, src_ids: Tensor, max_len: int, beam_size: int, length_penalty: float) -> None:
    """Check what a token-level model generates from. This reads the ids, and so waits for the device."""
    check_source(model, src_ids)
    check_ids_in_vocabulary("src_ids", src_ids, "src_vocab_size", model.src_embedding.num_embeddings)
    check_decoding(model.end_id, model.pad_id, max_len)
    check_beams(beam_size, length_penalty)
    if max_len > model.positional_encoding.max_len:
        raise ArgumentValueError(
            f"max_len must not exceed the {model.positional_encoding.max_len} positions that the model was built with, "
            f"got {max_len}"
        )


def read_text(path: Path) -> str:
    """Read a text file, or say why that cannot be done."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ArgumentValueError(f"{path} must be text in UTF-8, got other bytes on line {line}") from error
    except OSError as error:
        raise ArgumentValueError(f"{path} must be a file that can be read, got: {error.strerror}") from error


def check_pair(path: Path, number: int, line: str) -> tuple[str, str]:
    """Ask for a source and a target sentence with one tab between."""
    columns = [column.strip() for column in line.split("\t")]
    if len(columns) != 2:
        raise ArgumentValueError(
            f"{path}, line {number}: must be a source and a target sentence with one tab between, "
            f"got {len(columns) - 1} tabs in {line!r}"
        )
    for name, sentence in zip(("source", "target"), columns, strict=True):
        if not sentence:
            raise ArgumentValueError(f"{path}, line {number}: the {name} sentence must not be empty, got {line!r}")
    return columns[0], columns[1]


def check_pairs(pairs: Sequence[tuple[str, str]], name: str) -> None:
    """Ask for at least one pair of sentences."""
    if not pairs:
        raise ArgumentValueError(f"{name} must hold at least one pair of sentences, got none")


def check_words(words: Sequence[str], known: Sequence[str], near: Callable[[str], list[str]]) -> None:
    """Ask for a sentence of known words."""
    if not words:
        raise ArgumentValueError("sentence must hold at least one word, got an empty one")
    for word in words:
        if word not in known:
            close = near(word)
            hint = f"nearest: {', '.join(close)}" if close else f"known: {', '.join(known[:20])}"
            more = f" and {len(known) - 20} more" if not close and len(known) > 20 else ""
            raise ArgumentValueError(f"sentence must hold words of the vocabulary only, got {word!r}; {hint}{more}")


def check_training_settings(settings: Any) -> None:
    """Check how a model is to be trained."""
    check_choice("optimizer", settings.optimizer, ("sgd", "adam"))
    check_choice("loss", settings.loss, ("cross_entropy", "kl"))
    check_positive(num_epochs=settings.num_epochs, batch_size=settings.batch_size)
    if not 0 <= settings.seed < 2**32:
        raise ArgumentValueError(f"seed must be in 0 ... 2**32 - 1, got {settings.seed}")
    if not settings.learning_rate > 0:
        raise ArgumentValueError(f"learning_rate must be greater than 0, got {settings.learning_rate}")
    for name in ("momentum", "label_smoothing"):
        value = getattr(settings, name)
        if not 0 <= value < 1:
            raise ArgumentValueError(f"{name} must be in 0 ... 1, without 1, got {value}")
    if settings.label_smoothing and settings.loss != "kl":
        raise ArgumentValueError(
            f"label_smoothing needs loss='kl', got label_smoothing={settings.label_smoothing} and "
            f"loss={settings.loss!r}"
        )


def check_writable(path: Path) -> None:
    """Ask for a file name in a folder that exists and can be written to."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ArgumentValueError(f"{path} must be in a folder that exists, got no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentValueError(f"{path} must be a file that can be written, got a folder or no permission")


def read_checkpoint(path: Path, expected_format: str, device: torch.device | str | None) -> dict[str, Any]:
    """Load a checkpoint, or say why it is none."""
    if not path.is_file():
        raise ArgumentValueError(f"{path} must be a checkpoint, got no such file; write one with the command train")
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises what its reader, zipfile or pickle come upon
        raise ArgumentValueError(f"{path} must be a whole checkpoint, got a file that torch.load refuses") from error
    found = saved.get("format") if isinstance(saved, dict) else None
    if found != expected_format:
        raise ArgumentValueError(f"{path} must be a checkpoint of format {expected_format!r}, got {found!r}")
    return saved


def check_alone(option: str, others: Sequence[str]) -> None:
    """Ask that an option which reads everything from a checkpoint comes without options that say otherwise."""
    if others:
        raise ArgumentValueError(
            f"--{option} takes from the checkpoint what {', '.join(f'--{x}' for x in others)} would say: leave one of "
            f"the two out, got both"
        )


def check_path_part(part: str, paths: Sequence[str]) -> None:
    """Ask for a part of the path of at least one attention."""
    if not any(part in path for path in paths):
        raise ArgumentValueError(f"--only must be in the path of an attention, one of {', '.join(paths)}; got {part!r}")


def check_maps_to_draw(maps: Mapping[str, Tensor]) -> None:
    """Ask for at least one attention map."""
    if not maps:
        raise ArgumentValueError("maps must hold at least one attention map, got none")


def check_picture_path(path: Path) -> None:
    """Ask for a PNG or SVG file that can be written."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ArgumentValueError(f"{path} must end in .png or .svg, got {path.suffix or 'no suffix'!r}")
    check_writable(path)


def import_matplotlib_figure() -> Any:
    """Import what draws, or say how to install it."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ArgumentValueError(
            "plots need matplotlib, which is not installed: pip install 'attention-side-by-side[plot]'"
        ) from error


def check_device(name: str) -> torch.device:
    """Ask for a device that this machine has."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentValueError(f"device must be one that torch can use here, such as cpu, got {name!r}") from error
    return device
