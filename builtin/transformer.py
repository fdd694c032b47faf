"""The stacks as torch.nn has them, and the encoder-decoder they form."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builtin.layers import TransformerDecoderLayer, TransformerEncoderLayer
from scratch import transformer as by_hand
from scratch import validation
from scratch.documentation import documented_like
from scratch.layers import DecoderLayerCache

__all__ = ["Transformer", "TransformerDecoder", "TransformerEncoder"]

TORCHS_MASK = nn.Transformer.generate_square_subsequent_mask  # as it is now, whatever takes its place


@documented_like(by_hand.TransformerEncoder)
class TransformerEncoder(nn.TransformerEncoder):
    """In torch.nn: ``nn.TransformerEncoder``, of which this is a subclass. In eval, without gradients and with padding
    at the end it turns the input into a nested tensor, runs the layers on their fast path, and fills the padded places
    of the output with 0. Nested tensors themselves are refused as input, as by scratch.

    Traps:
        All layers start with the same parameters: see trap `clones_start_identical`.
        The layer passed in is copied and not used: see trap `layer_kept_beside_stack`.
        A warning tells why the input will not become a nested tensor: see trap `nested_tensor_warning`.
        Padded places of the output are 0 or not, depending on the path taken: see trap `fast_path_padding`.
        With mask_check=False padding in front costs the last tokens: see trap `mask_check_off`.
        torch.nn itself refuses 0 layers only at the first call: see trap `no_layers`.
        It returns no attention weights from its layers: see trap `no_maps_from_layers`.

    >>> encoder_layer = TransformerEncoderLayer(d_model=12, nhead=2, batch_first=True)
    >>> encoder = TransformerEncoder(encoder_layer, num_layers=2)
    >>> encoder(torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        validation.check_num_layers(num_layers)
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor, mask_check)  # type: ignore[arg-type]

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """In torch.nn: ``nn.TransformerEncoder.forward``, called as it is.

        Traps:
            True means the opposite in ``F.scaled_dot_product_attention``: see trap `mask_polarity`.
            ``is_causal`` masks nothing by itself: see trap `is_causal_is_a_hint`.
            Finding out whether the mask is causal waits for the device: see trap `causal_detection_syncs`.
            Padded queries carry numbers too: see trap `padded_queries_carry_numbers`.
        """
        validation.check_has_layers(self.layers)
        validation.check_stack_input("src", src, mask, "mask", src_key_padding_mask)
        validation.check_takes_bias("src", src, mask, src_key_padding_mask)
        return super().forward(src, mask, src_key_padding_mask, is_causal)


@documented_like(by_hand.TransformerDecoder)
class TransformerDecoder(nn.TransformerDecoder):
    """In torch.nn: ``nn.TransformerDecoder``, of which this is a subclass. There is no fast path.

    Traps:
        All layers start with the same parameters: see trap `clones_start_identical`.
        The layer passed in is copied and not used: see trap `layer_kept_beside_stack`.
        It returns no attention weights from its layers: see trap `no_maps_from_layers`.
        Step-by-step decoding computes everything anew: see trap `no_cache`.
    """

    def __init__(self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        validation.check_num_layers(num_layers)
        super().__init__(decoder_layer, num_layers, norm)  # type: ignore[arg-type]

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        cache: Sequence[DecoderLayerCache] | None = None,
    ) -> Tensor:
        """In torch.nn: ``nn.TransformerDecoder.forward``, called as it is.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError), and for a
                cache, which torch.nn does not have.
            TypeError: For masks that are neither bool nor float (also an AssertionError).

        Traps:
            True means the opposite in ``F.scaled_dot_product_attention``: see trap `mask_polarity`.
            ``tgt_is_causal`` and ``memory_is_causal`` mask nothing by themselves: see trap `is_causal_is_a_hint`.
            Finding out whether the mask is causal waits for the device: see trap `causal_detection_syncs`.
            With an integer mask torch.nn itself fails there: see trap `integer_tgt_mask`.
        """
        validation.check_no_cache(cache)
        validation.check_has_layers(self.layers)
        validation.check_stack_input("tgt", tgt, tgt_mask, "tgt_mask", tgt_key_padding_mask)
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


@documented_like(by_hand.Transformer)
class Transformer(nn.Transformer):
    """In torch.nn: ``nn.Transformer``, of which this is a subclass, with this package's stacks as ``custom_encoder``
    and ``custom_decoder``: the same parameters, drawn in the same order.

    Raises:
        ValueError: For sizes that do not fit or an unknown activation (also a RuntimeError and an AssertionError); and
            if a head size is given, because torch.nn has no other than d_model / nhead.

    Traps:
        Sequence first by default, and batch-first input raises no error: see trap `batch_first_default`.
        A custom encoder or decoder loses its weights: see trap `custom_encoder_redrawn`.
        A LayerNorm ends both stacks, even in post-norm: see trap `final_norm_post_norm`.
        It warns when it is built with its defaults: see trap `nested_tensor_warning`.

    >>> model = Transformer(12, nhead=2, num_encoder_layers=1, num_decoder_layers=1, batch_first=True)
    >>> model(torch.randn(2, 7, 12), torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
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
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        arguments: dict[str, Any] = {
            "dim_feedforward": dim_feedforward,
            "dropout": dropout,
            "activation": activation,
            "layer_norm_eps": layer_norm_eps,
            "batch_first": batch_first,
            "norm_first": norm_first,
            "bias": bias,
            **factory,
        }
        # torch's order: the encoder's layer and norm, then the decoder's, so that one seed gives one model.
        if custom_encoder is None:
            encoder_layer = TransformerEncoderLayer(d_model, nhead, **arguments)
            encoder_norm = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, encoder_norm)
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(d_model, nhead, **arguments)
            decoder_norm = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, decoder_norm)
        super().__init__(
            d_model, nhead, custom_encoder=custom_encoder, custom_decoder=custom_decoder, batch_first=batch_first
        )

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """In torch.nn: ``nn.Transformer.forward``, called as it is.

        Traps:
            True means the opposite in ``F.scaled_dot_product_attention``: see trap `mask_polarity`.
            Target tokens see later ones unless ``tgt_mask`` hides them: see trap `not_causal_by_default`.
            The target is not shifted, so that place i has seen token i: see trap `target_not_shifted`.
            The is_causal promises mask nothing by themselves: see trap `is_causal_is_a_hint`.
            Without memory_key_padding_mask the decoder looks at padding, which carries other numbers on the fast path:
            see trap `memory_padding_forgotten`.
        """
        validation.check_transformer_inputs(self, src, tgt)
        return super().forward(
            src,
            tgt,
            src_mask,
            tgt_mask,
            memory_mask,
            src_key_padding_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            src_is_causal,
            tgt_is_causal,
            memory_is_causal,
        )

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """In torch.nn: ``nn.Transformer.generate_square_subsequent_mask``, called as it is.

        Traps:
            float32 by default, whatever the model's dtype: see trap `square_subsequent_float32`.
        """
        validation.check_square_subsequent_mask(sz, dtype)
        return TORCHS_MASK(sz, device, dtype)  # type: ignore[arg-type]
