"""The stacks, and the encoder-decoder they form."""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.init import xavier_uniform_

from scratch import masks, validation
from scratch.layers import DecoderLayerCache, TransformerDecoderLayer, TransformerEncoderLayer, given

__all__ = ["Transformer", "TransformerDecoder", "TransformerEncoder", "is_causal_mask"]


@validation.quiet_while_tracing
def is_causal_mask(attn_mask: Tensor | None, is_causal: bool | None, length: int) -> bool:
    """Return whether a module mask is the causal one, unless the caller has said so already.

    Looking at the values waits for the device: pass ``is_causal`` where that matters.

    Args:
        attn_mask: A mask as torch.nn's modules take it, bool (True = may not look) or float.
        is_causal: What the caller said; None asks to look.
        length: Number of queries.

    Returns:
        Whether it is causal.

    In torch.nn: the detection in ``nn.TransformerEncoder.forward`` and ``nn.TransformerDecoder.forward``.

    >>> is_causal_mask(Transformer.generate_square_subsequent_mask(3), None, 3)
    True
    """
    if is_causal is not None or attn_mask is None:
        return bool(is_causal)
    if attn_mask.shape != (length, length):
        return False
    return torch.equal(
        attn_mask, Transformer.generate_square_subsequent_mask(length, attn_mask.device, attn_mask.dtype)
    )


class TransformerEncoder(nn.Module):
    """A stack of encoder layers.

    x = layer_N(... layer_1(x)); norm(x) if there is one

    Args:
        encoder_layer: The layer that is copied; all copies start with the same parameters.
        num_layers: Number of copies.
        norm: What is applied to the last layer's output.
        enable_nested_tensor: Let torch.nn leave padding out of the arithmetic, in eval without gradients.
        mask_check: Let torch.nn do so only where padding stands at the end.

    Raises:
        ValueError: If num_layers is negative.

    In torch.nn: ``nn.TransformerEncoder``. Differences: there, in eval without gradients and with all padding at the
    end, the output is 0 at padded places; here every place is computed and every mode gives the same numbers, whatever
    ``enable_nested_tensor`` and ``mask_check`` say. Of its warnings about nested tensors only the one about
    ``bias=False`` is given.

    Source: Vaswani et al. 2017, section 3.1;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoder.html

    >>> encoder = TransformerEncoder(TransformerEncoderLayer(d_model=12, nhead=3), num_layers=2)
    >>> encoder(torch.randn(5, 2, 12)).shape
    torch.Size([5, 2, 12])
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
        super().__init__()
        self.layers = nn.ModuleList([copy.deepcopy(encoder_layer) for _ in range(num_layers)])
        self.num_layers = num_layers
        self.norm = norm
        self.enable_nested_tensor = enable_nested_tensor
        self.use_nested_tensor = False  # what torch.nn makes of it; here nothing is nested
        self.mask_check = mask_check
        # torch.nn's published tests, and filters in user code, look for this one.
        if enable_nested_tensor and getattr(getattr(encoder_layer, "self_attn", None), "in_proj_bias", True) is None:
            warnings.warn(
                "enable_nested_tensor is True, and nothing comes of it: encoder_layer.self_attn was passed bias=False",
                stacklevel=2,
            )

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Pass the source through the layers in turn.

        Args:
            src: (len, batch, d_model), (batch, len, d_model) if batch_first, or (len, d_model).
            mask: (len, len) or (batch * nhead, len, len). Bool: True = may **not** look; float: added.
            src_key_padding_mask: (batch, len) or (len). Bool: True = **not** looked at; float: added.
            is_causal: A promise that ``mask`` is causal; None looks at the values to find out.

        Returns:
            The shape of ``src``.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError), and without
                layers (also an IndexError).
            TypeError: For masks that are neither bool nor float (also an AssertionError).
        """
        validation.check_has_layers(self.layers)
        validation.check_stack_input("src", src, mask, "mask", src_key_padding_mask)
        validation.check_takes_bias("src", src, mask, src_key_padding_mask)
        # As in torch.nn, layers receive masks as biases.
        mask, padding = (masks.score_bias_from_module(x, src.dtype) for x in (mask, src_key_padding_mask))
        is_causal = is_causal_mask(mask, is_causal, sequence_len(src, self.layers))
        x = src
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=is_causal, src_key_padding_mask=padding)
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(nn.Module):
    """A stack of decoder layers.

    x = layer_N(... layer_1(x, memory), memory); norm(x) if there is one

    Args:
        decoder_layer: The layer that is copied; all copies start with the same parameters.
        num_layers: Number of copies.
        norm: What is applied to the last layer's output.

    Raises:
        ValueError: If num_layers is negative.

    In torch.nn: ``nn.TransformerDecoder``. Differences: ``cache`` is an extension.

    Source: Vaswani et al. 2017, section 3.1;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerDecoder.html

    >>> decoder = TransformerDecoder(TransformerDecoderLayer(d_model=12, nhead=3), num_layers=2)
    >>> decoder(torch.randn(5, 2, 12), memory=torch.randn(7, 2, 12)).shape
    torch.Size([5, 2, 12])
    """

    def __init__(self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        validation.check_num_layers(num_layers)
        super().__init__()
        self.layers = nn.ModuleList([copy.deepcopy(decoder_layer) for _ in range(num_layers)])
        self.num_layers = num_layers
        self.norm = norm

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
        """Pass the target through the layers in turn.

        Args:
            tgt: (tgt_len, batch, d_model), (batch, tgt_len, d_model) if batch_first, or (tgt_len, d_model).
            memory: The encoder's output, (src_len, batch, d_model), likewise.
            tgt_mask: (tgt_len, tgt_len) or (batch * nhead, tgt_len, tgt_len). Bool: True = may **not** look; float:
                added to the scores.
            memory_mask: (tgt_len, src_len) or (batch * nhead, tgt_len, src_len), likewise.
            tgt_key_padding_mask: (batch, tgt_len) or (tgt_len). Bool: True = **not** looked at; float: added.
            memory_key_padding_mask: (batch, src_len) or (src_len), likewise.
            tgt_is_causal: A promise that ``tgt_mask`` is causal; None looks at the values to find out.
            memory_is_causal: A promise that ``memory_mask`` is causal.
            cache: One for each layer; masks of the target then span the earlier positions too. Keyword only.

        Returns:
            The shape of ``tgt``.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError).
            TypeError: For masks that are neither bool nor float (also an AssertionError).
        """
        validation.check_has_layers(self.layers)
        validation.check_stack_input("tgt", tgt, tgt_mask, "tgt_mask", tgt_key_padding_mask)
        if cache is not None:
            validation.check_cache_layers(cache, len(self.layers))
        keywords = {
            "tgt_mask": tgt_mask,
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": tgt_key_padding_mask,
            "memory_key_padding_mask": memory_key_padding_mask,
            "tgt_is_causal": is_causal_mask(tgt_mask, tgt_is_causal, sequence_len(tgt, self.layers)),
            "memory_is_causal": memory_is_causal,
        }
        x = tgt
        for i, layer in enumerate(self.layers):
            x = layer(x, memory, **keywords, **given(cache=None if cache is None else cache[i]))
        return x if self.norm is None else self.norm(x)


def sequence_len(x: Tensor, layers: nn.ModuleList) -> int:
    """Read the length off a stack's input, in the layout of its first layer."""
    first_layer: Any = layers[0]
    return x.size(1 if x.dim() == 3 and first_layer.self_attn.batch_first else 0)


class Transformer(nn.Module):
    """The encoder-decoder of the paper, without embeddings and output projection.

    memory = Encoder(src); output = Decoder(tgt, memory)

    Args:
        d_model: Width of source, target and output.
        nhead: Number of heads; divides d_model unless both head sizes are given.
        num_encoder_layers: Number of encoder layers.
        num_decoder_layers: Number of decoder layers.
        dim_feedforward: Width of the hidden layer of the feed-forward networks.
        dropout: Dropout probability for attention weights, hidden units and the output of each sub-layer.
        activation: "relu", "gelu" or a function.
        custom_encoder: Stands in for the encoder: called as ``encoder(src, mask=, src_key_padding_mask=, is_causal=)``.
        custom_decoder: Stands in for the decoder, called with the decoder's keywords.
        layer_norm_eps: Epsilon of the LayerNorms.
        batch_first: Inputs and output are (batch, len, d_model) instead of (len, batch, d_model).
        norm_first: LayerNorm before each sub-layer instead of after its residual.
        bias: Whether linear layers, attentions and LayerNorms have biases.
        device: Where the parameters live.
        dtype: Their dtype.
        qk_head_dim: d_k; d_model / nhead if not given.
        v_head_dim: d_v; d_model / nhead if not given.

    Raises:
        ValueError: For sizes that do not fit or an unknown activation (also a RuntimeError and an AssertionError).

    In torch.nn: ``nn.Transformer``. As there, both stacks end in a LayerNorm, even in post-norm, which the paper
    does not have. Differences: those of the encoder and the layers.

    Source: Vaswani et al. 2017, figure 1;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.Transformer.html

    >>> model = Transformer(d_model=12, nhead=3, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=20)
    >>> model(torch.randn(7, 2, 12), torch.randn(5, 2, 12)).shape
    torch.Size([5, 2, 12])
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
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        arguments: dict[str, Any] = {
            "dim_feedforward": dim_feedforward,
            "dropout": dropout,
            "activation": activation,
            "layer_norm_eps": layer_norm_eps,
            "batch_first": batch_first,
            "norm_first": norm_first,
            "bias": bias,
            "qk_head_dim": qk_head_dim,
            "v_head_dim": v_head_dim,
            **factory,
        }

        def final_norm() -> nn.LayerNorm:
            return nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)

        if custom_encoder is None:
            encoder_layer = TransformerEncoderLayer(d_model, nhead, **arguments)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, final_norm())
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(d_model, nhead, **arguments)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, final_norm())
        self.encoder, self.decoder = custom_encoder, custom_decoder
        self._reset_parameters()
        self.d_model = d_model
        self.nhead = nhead
        self.batch_first = batch_first

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
        """Encode the source and decode the target against it.

        Args:
            src: (src_len, batch, d_model), (batch, src_len, d_model) if batch_first, or (src_len, d_model).
            tgt: (tgt_len, batch, d_model), likewise.
            src_mask: (src_len, src_len) or (batch * nhead, src_len, src_len). Bool: True = may **not** look; float:
                added to the scores.
            tgt_mask: (tgt_len, tgt_len), likewise. It is not causal unless you make it so.
            memory_mask: (tgt_len, src_len), likewise.
            src_key_padding_mask: (batch, src_len) or (src_len). Bool: True = **not** looked at; float: added.
            tgt_key_padding_mask: (batch, tgt_len) or (tgt_len), likewise.
            memory_key_padding_mask: (batch, src_len) or (src_len): usually ``src_key_padding_mask`` once more.
            src_is_causal: A promise that ``src_mask`` is causal; None looks at the values to find out.
            tgt_is_causal: A promise that ``tgt_mask`` is causal; None looks at the values to find out.
            memory_is_causal: A promise that ``memory_mask`` is causal.

        Returns:
            The shape of ``tgt``.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError).
            TypeError: For masks that are neither bool nor float (also an AssertionError).
        """
        validation.check_transformer_inputs(self, src, tgt)
        memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
        output: Tensor = self.decoder(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )
        return output

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Build the square causal mask in float form: 0 where a query may look, -inf at later keys.

        Args:
            sz: Number of queries and keys.
            device: Where to build it.
            dtype: Its dtype.

        Returns:
            (sz, sz).

        Raises:
            ValueError: For a negative size (also a RuntimeError).
            TypeError: For a dtype of integers, which has no -inf (also a RuntimeError).

        In torch.nn: ``nn.Transformer.generate_square_subsequent_mask``. ``masks.causal`` is the bool form.

        >>> Transformer.generate_square_subsequent_mask(2)
        tensor([[0., -inf],
                [0., 0.]])
        """
        validation.check_square_subsequent_mask(sz, dtype)
        return torch.full((sz, sz), -math.inf, device=device, dtype=dtype).triu(1)

    def _reset_parameters(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                xavier_uniform_(parameter)
