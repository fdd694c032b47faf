"""The Transformer by hand: tensor operations, matrix products and softmax, and nothing of torch.nn's attention."""

from scratch import masks, score_functions
from scratch.attention import MultiheadAttention
from scratch.decoder_only import DecoderOnlyLayer, DecoderOnlyTransformer, SwiGLU
from scratch.flex import AuxRequest, BlockMask, create_block_mask, flex_attention
from scratch.grouped import GroupedQueryAttention
from scratch.layers import TransformerDecoderLayer, TransformerEncoderLayer
from scratch.norms import RMSNorm, rms_norm
from scratch.positional import PositionalEncoding, sinusoidal_encoding
from scratch.recording import AttentionMaps, record_attention, trace_attention
from scratch.rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RotaryEmbedding,
    YaRNScaling,
    adjacent_to_halves,
    halves_to_adjacent,
)
from scratch.sdpa import scaled_dot_product_attention
from scratch.seq2seq import Seq2SeqTransformer
from scratch.tracing import Tracer
from scratch.transformer import Transformer, TransformerDecoder, TransformerEncoder
from scratch.varlen import varlen_attn

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
