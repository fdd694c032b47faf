"""The Transformer by hand: tensor operations, matrix products and softmax, and nothing of torch.nn's attention."""

from scratch import masks
from scratch.attention import MultiheadAttention
from scratch.functional import scaled_dot_product_attention
from scratch.layers import TransformerDecoderLayer, TransformerEncoderLayer
from scratch.positional import PositionalEncoding, sinusoidal_encoding
from scratch.recording import AttentionMaps, record_attention, trace_attention
from scratch.seq2seq import Seq2SeqTransformer
from scratch.transformer import Transformer, TransformerDecoder, TransformerEncoder

__all__ = [
    "AttentionMaps",
    "MultiheadAttention",
    "PositionalEncoding",
    "Seq2SeqTransformer",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "masks",
    "record_attention",
    "scaled_dot_product_attention",
    "sinusoidal_encoding",
    "trace_attention",
]
