"""The language model of today on torch: its RMSNorm and its fused attention, wired as in ``scratch``."""

from builtin.grouped import GroupedQueryAttention
from builtin.norms import RMSNorm
from builtin.rotary import RotaryEmbedding
from scratch import decoder_only
from scratch.decoder_only import SwiGLU
from scratch.documentation import documented_like

__all__ = ["DecoderOnlyLayer", "DecoderOnlyTransformer", "SwiGLU"]


@documented_like(decoder_only.DecoderOnlyLayer)
class DecoderOnlyLayer(decoder_only.DecoderOnlyLayer):
    """>>> import torch
    >>> layer = DecoderOnlyLayer(48, nhead=6, dim_feedforward=64, num_key_heads=2)
    >>> layer(torch.randn(2, 5, 48)).shape
    torch.Size([2, 5, 48])
    """

    attention_class = GroupedQueryAttention
    norm_class = RMSNorm


@documented_like(decoder_only.DecoderOnlyTransformer)
class DecoderOnlyTransformer(decoder_only.DecoderOnlyTransformer):
    """In torch.nn: only the parts: ``nn.Embedding``, ``nn.RMSNorm``,
    ``F.scaled_dot_product_attention`` or, for capped scores, flex attention, and ``nn.Linear``.

    >>> import torch
    >>> model = DecoderOnlyTransformer(11, d_model=12, nhead=3, num_layers=2, dim_feedforward=16, num_key_heads=1)
    >>> prompt_ids = torch.tensor([[5, 3, 7], [4, 9, 2]])
    >>> model(prompt_ids).shape
    torch.Size([2, 3, 11])
    >>> model.generate(prompt_ids, max_len=4).shape
    torch.Size([2, 4])
    """

    layer_class = DecoderOnlyLayer
    norm_class = RMSNorm
    rotary_class = RotaryEmbedding
