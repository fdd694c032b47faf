"""What layers and stacks of them are built with and called with."""

from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from scratch.validation.attention import (
    DECODER_CROSS,
    DECODER_SELF,
    ENCODER_LAYER,
    MaskArguments,
    Names,
    check_attention_inputs,
)
from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentValueError,
    check_mask_dtype,
    check_tensor,
    check_whole,
    quiet_while_tracing,
    shape,
)

__all__ = [
    "check_activation",
    "check_cache_batch",
    "check_cache_layers",
    "check_decoder_layer_inputs",
    "check_encoder_layer_inputs",
    "check_has_layers",
    "check_num_layers",
    "check_stack_input",
    "check_takes_bias",
    "check_transformer_inputs",
]


# The modules whose ``forward`` takes what torch.nn's attention takes.
TORCHS_FORWARD = ("scratch.attention", "builtin.attention", nn.MultiheadAttention.__module__)


def check_activation(activation: str | Callable[[Tensor], Tensor]) -> None:
    """Require "relu", "gelu" or a function."""
    if isinstance(activation, str) and activation not in ("relu", "gelu"):
        raise ArgumentValueError(f'activation should be relu/gelu, as "relu", "gelu" or a function, not {activation!r}')
    if not callable(activation) and not isinstance(activation, str):
        raise ArgumentTypeError(f'activation must be "relu", "gelu" or a function, got {type(activation).__name__}')


def check_encoder_layer_inputs(
    layer: Any, src: Tensor, src_mask: Tensor | None, src_key_padding_mask: Tensor | None, is_causal: bool
) -> None:
    """Check the call of an encoder layer, ours or torch.nn's."""
    _check_sublayer(layer.self_attn, src, src, (src_mask, src_key_padding_mask, is_causal), ENCODER_LAYER)
    check_takes_bias("src", src, src_mask, src_key_padding_mask)


def check_decoder_layer_inputs(
    layer: Any, tgt: Tensor, memory: Tensor, own: MaskArguments, cross: MaskArguments, cache: Any = None
) -> None:
    """Check the call of a decoder layer, ours or torch.nn's; the masks come as (attn_mask, padding, is_causal)."""
    own_cache, cross_cache = (None, None) if cache is None else (cache.self_attn, cache.multihead_attn)
    _check_sublayer(layer.self_attn, tgt, tgt, own, DECODER_SELF, own_cache)
    _check_sublayer(layer.multihead_attn, tgt, memory, cross, DECODER_CROSS, cross_cache)


def _check_sublayer(
    attention: Any, query: Tensor, memory: Tensor, given: MaskArguments, names: Names, cache: Any = None
) -> None:
    """Check what a layer hands to an attention; one with a ``forward`` of its own judges for itself what fits."""
    if getattr(attention.forward, "__module__", None) in TORCHS_FORWARD:
        check_attention_inputs(attention, (query, memory, memory), given, cache=cache, names=names)
        return
    check_tensor(names.key, memory)  # the query is the memory too, or was one in the self-attention
    for name, mask in ((names.attn_mask, given[0]), (names.key_padding_mask, given[1])):
        if mask is not None:
            check_mask_dtype(name, mask)


def check_stack_input(
    name: str, x: Tensor, attn_mask: Tensor | None, mask_name: str, key_padding_mask: Tensor | None
) -> None:
    """Check what a stack of layers looks at itself: the rank of its input and the dtypes of its masks."""
    _check_sequence(name, x)
    for given_name, given in ((mask_name, attn_mask), (f"{name}_key_padding_mask", key_padding_mask)):
        if given is not None:
            check_mask_dtype(given_name, given)


def check_takes_bias(name: str, x: Tensor, *masks: Tensor | None) -> None:
    """Require floating tokens beside bool masks, which become biases of their dtype."""
    if not x.is_floating_point() and any(mask is not None and mask.dtype == torch.bool for mask in masks):
        raise ArgumentTypeError(f"{name} must be floating beside a bool mask, which becomes a bias, got {x.dtype}")


def _check_sequence(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.is_nested:
        raise ArgumentTypeError(f"{name} must not be a nested tensor: pad it and pass {name}_key_padding_mask")
    if x.dim() not in (2, 3):
        raise ArgumentValueError(
            f"{name} must be 2-D (len, d_model) or 3-D with a batch, got {x.dim()}-D of shape {shape(x)}"
        )


@quiet_while_tracing
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


class EmptyStackError(ArgumentValueError, IndexError):
    """A stack has no layers, or fewer; torch.nn's own ends in an IndexError when it is called."""


def check_num_layers(num_layers: int) -> None:
    """Require a number of layers; as in torch.nn, a stack without any can be built, beside one that is used."""
    check_whole(num_layers=num_layers)
    if num_layers < 0:
        raise EmptyStackError(f"num_layers must not be negative, got {num_layers}")


def check_has_layers(layers: Sized) -> None:
    """Require that a stack which is called has a layer: the first one says which axis is the batch."""
    if len(layers) == 0:
        raise EmptyStackError(
            "num_layers must be greater than 0 in a stack that is called, got num_layers=0 (index 0 is out of range)"
        )


def check_cache_batch(expected: int, batch: int) -> None:
    """Require that a cache is extended by the batch it was begun with."""
    if batch != expected:
        raise ArgumentValueError(f"cache holds a batch of {expected}, got a batch of {batch}: begin a new cache for it")


def check_cache_layers(cache: Sequence[Any], num_layers: int) -> None:
    """Require one cache for each decoder layer."""
    if not isinstance(cache, Sequence):
        raise ArgumentTypeError(f"cache must be a list with one entry for each layer, got {type(cache).__name__}")
    if len(cache) != num_layers:
        raise ArgumentValueError(f"cache must have one entry for each of {num_layers} layers, got {len(cache)}")
