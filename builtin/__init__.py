"""The Transformer of torch.nn, made plain: its own classes behind the names, checks and masks of scratch."""

from builtin import masks
from builtin.attention import MultiheadAttention
from builtin.functional import scaled_dot_product_attention
from builtin.layers import TransformerDecoderLayer, TransformerEncoderLayer
from builtin.recording import AttentionMaps, record_attention, trace_attention
from builtin.seq2seq import Seq2SeqTransformer
from builtin.transformer import Transformer, TransformerDecoder, TransformerEncoder
from scratch.positional import PositionalEncoding, sinusoidal_encoding

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
