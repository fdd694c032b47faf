"""The Transformer of torch.nn, made plain: its own classes behind the names, checks and masks of scratch."""

from builtin import masks
from builtin.attention import MultiheadAttention
from builtin.decoder_only import DecoderOnlyLayer, DecoderOnlyTransformer, SwiGLU
from builtin.flex import AuxRequest, BlockMask, create_block_mask, flex_attention
from builtin.grouped import GroupedQueryAttention
from builtin.layers import TransformerDecoderLayer, TransformerEncoderLayer
from builtin.norms import RMSNorm, rms_norm
from builtin.recording import AttentionMaps, record_attention, trace_attention
from builtin.rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RotaryEmbedding,
    YaRNScaling,
    adjacent_to_halves,
    halves_to_adjacent,
)
from builtin.sdpa import scaled_dot_product_attention
from builtin.seq2seq import Seq2SeqTransformer
from builtin.tracing import Tracer
from builtin.transformer import Transformer, TransformerDecoder, TransformerEncoder
from builtin.varlen import varlen_attn
from scratch import score_functions
from scratch.positional import PositionalEncoding, sinusoidal_encoding

__all__ = [
    "AttentionMaps",
    "AuxRequest",
    "BlockMask",
    "DecoderOnlyLayer",
    "DecoderOnlyTransformer",
    "GroupedQueryAttention",
    "LinearScaling",
    "Llama3Scaling",
    "MultiheadAttention",
    "NTKScaling",
    "PositionalEncoding",
    "RMSNorm",
    "RotaryEmbedding",
    "Seq2SeqTransformer",
    "SwiGLU",
    "Tracer",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "YaRNScaling",
    "adjacent_to_halves",
    "create_block_mask",
    "flex_attention",
    "halves_to_adjacent",
    "masks",
    "record_attention",
    "rms_norm",
    "scaled_dot_product_attention",
    "score_functions",
    "sinusoidal_encoding",
    "trace_attention",
    "varlen_attn",
]
