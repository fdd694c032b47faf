"""The two layers as torch.nn has them, behind the checks that both packages share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scratch import layers as by_hand
from scratch import validation
from scratch.documentation import documented_like
from scratch.layers import DecoderLayerCache

__all__ = ["TransformerDecoderLayer", "TransformerEncoderLayer"]


@documented_like(by_hand.TransformerEncoderLayer)
class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """In torch.nn: ``nn.TransformerEncoderLayer``, of which this is a subclass; ``self_attn`` is torch's own
    ``nn.MultiheadAttention``. In eval, without gradients and batch first its ``forward`` is one call of
    ``torch._transformer_encoder_layer_fwd`` (the fast path), unless a hook, an odd number of heads, bias=False or
    another activation stands in the way.

    Raises:
        ValueError: For sizes that do not fit or an unknown activation (also a RuntimeError and an AssertionError); and
            if a head size is given, because torch.nn has no other than d_model / nhead.

    Traps:
        Sequence first by default, and batch-first input raises no error: see trap `batch_first_default`.
        It returns no attention weights: see trap `no_maps_from_layers`.
        Dropout is on, with 0.1, until ``eval()``: see trap `dropout_by_default`.
        ``dim_feedforward`` stays at 2048 whatever ``d_model`` is: see trap `feed_forward_stays_wide`.
        The fast path treats padding in its own way: see trap `fast_path_padding`.
        The fast path reads the weights of the sub-modules without calling them: see trap `parts_bypassed`.
        The fast path uses the activation that the layer was constructed with: see trap `activation_replaced_later`.
        The fast path is not always the faster one: see trap `fast_path_slower_on_cpu`.
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
        validation.check_no_head_dims(qk_head_dim, v_head_dim)
        validation.check_attention_sizes(d_model, nhead, None, None, None, None)
        validation.check_activation(activation)
        validation.check_not_negative(dim_feedforward=dim_feedforward)
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """In torch.nn: ``nn.TransformerEncoderLayer.forward``, called as it is.

        Traps:
            True means the opposite in ``F.scaled_dot_product_attention``: see trap `mask_polarity`.
            A query that may look at no key: see trap `fully_masked_row`.
            ``is_causal`` masks nothing by itself: see trap `is_causal_is_a_hint`.
            On the fast path a float bias is read as a bool mask: see trap `float_bias_becomes_mask`.
            In training an empty batch with a padding mask fails: see trap `empty_batch_with_padding`.
        """
        # In eval nn.TransformerEncoder hands padded input down as a nested tensor, which torch.nn's layer takes.
        if self.training or not src.is_nested:
            validation.check_encoder_layer_inputs(self, src, src_mask, src_key_padding_mask, is_causal)
        return super().forward(src, src_mask, src_key_padding_mask, is_causal)


@documented_like(by_hand.TransformerDecoderLayer)
class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """In torch.nn: ``nn.TransformerDecoderLayer``, of which this is a subclass; ``self_attn`` and ``multihead_attn``
    are torch's own ``nn.MultiheadAttention``, called with need_weights=False. There is no fused layer; the
    self-attention takes its own fast path.

    Raises:
        ValueError: For sizes that do not fit or an unknown activation (also a RuntimeError and an AssertionError); and
            if a head size is given, because torch.nn has no other than d_model / nhead.

    Traps:
        Sequence first by default, and batch-first input raises no error: see trap `batch_first_default`.
        It returns no attention weights: see trap `no_maps_from_layers`.
        Dropout is on, with 0.1, until ``eval()``: see trap `dropout_by_default`.
        ``dim_feedforward`` stays at 2048 whatever ``d_model`` is: see trap `feed_forward_stays_wide`.
        Step-by-step decoding recomputes everything at each step: see trap `no_cache`.
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
        validation.check_no_head_dims(qk_head_dim, v_head_dim)
        validation.check_attention_sizes(d_model, nhead, None, None, None, None)
        validation.check_activation(activation)
        validation.check_not_negative(dim_feedforward=dim_feedforward)
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )

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
        """In torch.nn: ``nn.TransformerDecoderLayer.forward``, called as it is.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError), and for a
                cache, which torch.nn does not have.
            TypeError: For masks that are neither bool nor float (also an AssertionError).

        Traps:
            True means the opposite in ``F.scaled_dot_product_attention``: see trap `mask_polarity`.
            A query that may look at no key: see trap `fully_masked_row`.
            ``tgt_is_causal`` and ``memory_is_causal`` mask nothing by themselves: see trap `is_causal_is_a_hint`.
        """
        validation.check_no_cache(cache)
        own = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross = (memory_mask, memory_key_padding_mask, memory_is_causal)
        validation.check_decoder_layer_inputs(self, tgt, memory, own, cross)
        return super().forward(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            tgt_is_causal,
            memory_is_causal,
        )
