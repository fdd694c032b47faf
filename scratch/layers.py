"""The encoder and the decoder layer: attention and feed-forward, each with a residual connection and LayerNorm."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scratch import masks, validation
from scratch.attention import AttentionCache, MultiheadAttention

__all__ = ["DecoderLayerCache", "TransformerDecoderLayer", "TransformerEncoderLayer", "activation_function"]


class DecoderLayerCache(Protocol):
    """What the two attentions of one decoder layer remember between calls; see ``scratch.caches``."""

    @property
    def self_attn(self) -> AttentionCache:
        """What the self-attention remembers: the target tokens so far."""

    @property
    def multihead_attn(self) -> AttentionCache:
        """What the attention to the memory remembers."""


def activation_function(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Look up "relu" or "gelu", and return any function as it is.

    Args:
        activation: A name or a function.

    Returns:
        The function.

    Raises:
        ValueError: For any other name (also a RuntimeError).
        TypeError: If it is neither a name nor callable.

    In torch.nn: the ``activation`` argument of both layers.

    >>> activation_function("relu")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    validation.check_activation(activation)
    if isinstance(activation, str):
        return F.relu if activation == "relu" else F.gelu
    return activation


def given(**extensions: Any) -> dict[str, Any]:
    """Leave out extensions that are None: blocks and attentions written for torch.nn do not accept them.

    >>> given(cache=None)
    {}
    """
    return {name: x for name, x in extensions.items() if x is not None}


def _relu_or_gelu(activation: Callable[[Tensor], Tensor]) -> int:
    if activation is F.relu or isinstance(activation, nn.ReLU):
        return 1
    return 2 if activation is F.gelu or isinstance(activation, nn.GELU) else 0


class TransformerEncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each with a residual connection and LayerNorm.

    post-norm: x = LayerNorm(x + SelfAttention(x)); x = LayerNorm(x + FFN(x))

    pre-norm (norm_first): x = x + SelfAttention(LayerNorm(x)); x = x + FFN(LayerNorm(x))

    FFN(x) = activation(x W_1 + b_1) W_2 + b_2

    Args:
        d_model: Width of input and output.
        nhead: Number of heads; divides d_model unless both head sizes are given.
        dim_feedforward: Width of the hidden layer of the feed-forward network.
        dropout: Dropout probability for attention weights, hidden units and the output of each sub-layer.
        activation: "relu", "gelu" or a function.
        layer_norm_eps: Epsilon of the LayerNorms.
        batch_first: Input and output are (batch, len, d_model) instead of (len, batch, d_model).
        norm_first: LayerNorm before each sub-layer instead of after its residual.
        bias: Whether linear layers, attention and LayerNorms have biases.
        device: Where the parameters live.
        dtype: Their dtype.
        qk_head_dim: d_k; d_model / nhead if not given.
        v_head_dim: d_v; d_model / nhead if not given.

    Raises:
        ValueError: For sizes that do not fit or an unknown activation (also a RuntimeError and an AssertionError).

    In torch.nn: ``nn.TransformerEncoderLayer``. Differences: no fused fast path in eval without gradients, so that
    padded positions and fully masked rows get the same numbers in every mode.

    Source: Vaswani et al. 2017, sections 3.1 and 3.3; Xiong et al. 2020, figure 1 (pre-norm);
    https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html

    >>> layer = TransformerEncoderLayer(d_model=12, nhead=3, dim_feedforward=20)
    >>> layer(torch.randn(5, 2, 12)).shape
    torch.Size([5, 2, 12])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        qk_head_dim: int | None = None,
        v_head_dim: int | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.self_attn = MultiheadAttention(
            d_model,
            nhead,
            dropout,
            bias,
            batch_first=batch_first,
            qk_head_dim=qk_head_dim,
            v_head_dim=v_head_dim,
            **factory,
        )
        validation.check_not_negative(dim_feedforward=dim_feedforward)
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias, **factory)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias, **factory)

        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
        self.norm2 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.activation = activation_function(activation)
        # torch.nn sets this for its fast path, and programs read it.
        self.activation_relu_or_gelu = _relu_or_gelu(self.activation)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.setdefault("activation", F.relu)  # models pickled by the first releases of torch lack it
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Pass the source through the layer.

        Args:
            src: (len, batch, d_model), (batch, len, d_model) if batch_first, or (len, d_model).
            src_mask: (len, len) or (batch * nhead, len, len). Bool: True = may **not** look; float: added.
            src_key_padding_mask: (batch, len) or (len). Bool: True = **not** looked at; float: added.
            is_causal: Promises that ``src_mask``, which must still be given, is causal; without padding, a causal mask
                is applied in its place.

        Returns:
            The shape of ``src``.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError).
            TypeError: For masks that are neither bool nor float (also an AssertionError).
        """
        validation.check_encoder_layer_inputs(self, src, src_mask, src_key_padding_mask, is_causal)
        # As in torch.nn, overrides and hooks of these blocks see float biases; those of a decoder get masks unchanged.
        attn_mask, padding = (masks.score_bias_from_module(x, src.dtype) for x in (src_mask, src_key_padding_mask))
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), attn_mask, padding, is_causal=is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, attn_mask, padding, is_causal=is_causal))
        return self.norm2(x + self._ff_block(x))

    def _sa_block(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        attended = self.self_attn(
            x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=False, is_causal=is_causal
        )[0]
        return self.dropout1(attended)

    def _ff_block(self, x: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))


class TransformerDecoderLayer(nn.Module):
    """Self-attention, attention to the memory, then a feed-forward network, each with residual and LayerNorm.

    post-norm: x = LayerNorm(x + SelfAttention(x)); x = LayerNorm(x + Attention(x, memory)); x = LayerNorm(x + FFN(x))

    pre-norm (norm_first): x = x + SelfAttention(LayerNorm(x)); x = x + Attention(LayerNorm(x), memory);
    x = x + FFN(LayerNorm(x))

    FFN(x) = activation(x W_1 + b_1) W_2 + b_2

    Args:
        d_model: Width of input, memory and output.
        nhead: Number of heads; divides d_model unless both head sizes are given.
        dim_feedforward: Width of the hidden layer of the feed-forward network.
        dropout: Dropout probability for attention weights, hidden units and the output of each sub-layer.
        activation: "relu", "gelu" or a function.
        layer_norm_eps: Epsilon of the LayerNorms.
        batch_first: Input and output are (batch, len, d_model) instead of (len, batch, d_model).
        norm_first: LayerNorm before each sub-layer instead of after its residual. The memory is not normalised.
        bias: Whether linear layers, attentions and LayerNorms have biases.
        device: Where the parameters live.
        dtype: Their dtype.
        qk_head_dim: d_k; d_model / nhead if not given.
        v_head_dim: d_v; d_model / nhead if not given.

    Raises:
        ValueError: For sizes that do not fit or an unknown activation (also a RuntimeError and an AssertionError).

    In torch.nn: ``nn.TransformerDecoderLayer``. Differences: its self-attention takes no fast path in eval without
    gradients, so that fully masked rows get the same numbers in every mode; ``qk_head_dim``, ``v_head_dim`` and
    ``cache`` are extensions.

    Source: Vaswani et al. 2017, sections 3.1 and 3.3; Xiong et al. 2020, figure 1 (pre-norm);
    https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerDecoderLayer.html

    >>> layer = TransformerDecoderLayer(d_model=12, nhead=3, dim_feedforward=20)
    >>> layer(torch.randn(5, 2, 12), memory=torch.randn(7, 2, 12)).shape
    torch.Size([5, 2, 12])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        qk_head_dim: int | None = None,
        v_head_dim: int | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def attention() -> MultiheadAttention:
            return MultiheadAttention(
                d_model,
                nhead,
                dropout,
                bias,
                batch_first=batch_first,
                qk_head_dim=qk_head_dim,
                v_head_dim=v_head_dim,
                **factory,
            )

        self.self_attn = attention()
        self.multihead_attn = attention()
        validation.check_not_negative(dim_feedforward=dim_feedforward)
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias, **factory)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias, **factory)

        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
        self.norm2 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
        self.norm3 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.dropout3 = nn.Dropout(dropout)
        self.activation = activation_function(activation)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.setdefault("activation", F.relu)  # models pickled by the first releases of torch lack it
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        cache: DecoderLayerCache | None = None,
    ) -> Tensor:
        """Pass the target through the layer.

        Args:
            tgt: (tgt_len, batch, d_model), (batch, tgt_len, d_model) if batch_first, or (tgt_len, d_model).
            memory: The encoder's output, (src_len, batch, d_model), likewise.
            tgt_mask: (tgt_len, tgt_len) or (batch * nhead, tgt_len, tgt_len). Bool: True = may **not** look; float:
                added to the scores.
            memory_mask: (tgt_len, src_len) or (batch * nhead, tgt_len, src_len), likewise.
            tgt_key_padding_mask: (batch, tgt_len) or (tgt_len). Bool: True = **not** looked at; float: added.
            memory_key_padding_mask: (batch, src_len) or (src_len), likewise.
            tgt_is_causal: A promise that ``tgt_mask`` is causal.
            memory_is_causal: A promise that ``memory_mask`` is causal.
            cache: Keys and values of earlier calls; target masks then span the earlier positions too. Keyword only.

        Returns:
            The shape of ``tgt``.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError).
            TypeError: For masks that are neither bool nor float (also an AssertionError).
        """
        own, cross = (
            (tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            (memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        validation.check_decoder_layer_inputs(self, tgt, memory, own, cross, cache)
        self_cache, memory_cache = (None, None) if cache is None else (cache.self_attn, cache.multihead_attn)
        x = tgt
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), *own, **given(cache=self_cache))
            x = x + self._mha_block(self.norm2(x), memory, *cross, **given(cache=memory_cache))
            return x + self._ff_block(self.norm3(x))
        x = self.norm1(x + self._sa_block(x, *own, **given(cache=self_cache)))
        x = self.norm2(x + self._mha_block(x, memory, *cross, **given(cache=memory_cache)))
        return self.norm3(x + self._ff_block(x))

    def _sa_block(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        attended = self.self_attn(
            x,
            x,
            x,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            need_weights=False,
            **given(cache=cache),
        )[0]
        return self.dropout1(attended)

    def _mha_block(
        self,
        x: Tensor,
        mem: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        attended = self.multihead_attn(
            x,
            mem,
            mem,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            need_weights=False,
            **given(cache=cache),
        )[0]
        return self.dropout2(attended)

    def _ff_block(self, x: Tensor) -> Tensor:
        return self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(x)))))
