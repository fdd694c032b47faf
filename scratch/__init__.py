"""The Transformer by hand: tensor operations, matrix products and softmax, and nothing of torch.nn's attention."""

from scratch import masks
from scratch.attention import MultiheadAttention
from scratch.functional import scaled_dot_product_attention
from scratch.layers import TransformerDecoderLayer, TransformerEncoderLayer
from scratch.transformer import Transformer, TransformerDecoder, TransformerEncoder

__all__ = [
    "MultiheadAttention",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "masks",
    "scaled_dot_product_attention",
]
