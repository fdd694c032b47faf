"""Configurations of attention and Transformer, drawn by hypothesis: valid for torch.nn, with every argument in play.

module = case.construct(torch.nn)
output = module(**case.inputs())
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite
from torch.nn import functional as F

from equivalence_tests.instruments.inputs import (
    Alignment,
    Case,
    CausalBiasMask,
    Layout,
    Mask,
    MaskForm,
    Normal,
    Part,
    SameAs,
    TokenIds,
)

__all__ = [
    "COMPONENTS",
    "attention_masks",
    "decoder_cases",
    "decoder_layer_cases",
    "dropouts",
    "encoder_cases",
    "encoder_layer_cases",
    "float_dtypes",
    "fused_attention_cases",
    "layouts",
    "lengths",
    "multihead_attention_cases",
    "padding_masks",
    "scaled_dot_product_attention_cases",
    "seq2seq_cases",
    "transformer_cases",
]

FLOAT64 = st.just(torch.float64)
BOOL_FORM: SearchStrategy[MaskForm] = st.just("bool")
FLOAT_FORMS: list[MaskForm] = ["float", "bias"]
IN_ONE_PIECE: list[Layout] = ["contiguous", "expanded"]
ALIGNMENTS: list[Alignment] = ["upper_left", "lower_right"]


@dataclass(frozen=True)
class _Shape:
    """Where the batch stands in the shape of an input; without a batch, nowhere."""

    batch: int | None
    batch_first: bool

    def of(self, length: int, width: int) -> tuple[int, ...]:
        if self.batch is None:
            return length, width
        return (self.batch, length, width) if self.batch_first else (length, self.batch, width)


def float_dtypes() -> SearchStrategy[torch.dtype]:
    """The four floating dtypes; shrinks to float64."""
    return st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def layouts() -> SearchStrategy[Layout]:
    """How a tensor lies in memory; shrinks to contiguous."""
    return st.sampled_from(["contiguous", "transposed", "expanded"])


def lengths(min_value: int = 1) -> SearchStrategy[int]:
    """Lengths of sequences up to 7; shrinks to ``min_value``."""
    return st.integers(min_value, 7)


def dropouts() -> SearchStrategy[float]:
    """Probabilities of dropping; shrinks to 0."""
    return st.sampled_from([0.0, 0.25, 0.5])


def seeds() -> SearchStrategy[int]:
    """Where random numbers start; shrinks to 0."""
    return st.integers(0, 999)


def mask_forms() -> SearchStrategy[MaskForm]:
    """How a mask is written; shrinks to bool."""
    return st.sampled_from(["bool", "float", "bias"])


@composite
def attention_masks(
    draw: DrawFn,
    shape: Sequence[int],
    *,
    forms: SearchStrategy[MaskForm] | None = None,
    true_means_hidden: bool = True,
) -> Mask:
    """Masks of shape (..., query_len, key_len): causal, arbitrary, or with queries that may look at no key.

    Shrinks to a causal bool mask. ``forms`` limits how they are written.
    """
    kind = draw(st.sampled_from(["causal", "arbitrary", "blind rows"]))
    rows, key_len = math.prod(shape[:-1]), shape[-1]
    if kind == "causal":
        hidden = [key > row % shape[-2] for row in range(rows) for key in range(key_len)]
    else:
        hidden = draw(_bits(rows, key_len))
    if kind == "blind rows" and rows:
        blind = draw(st.integers(0, rows - 1))
        hidden[blind * key_len : (blind + 1) * key_len] = [True] * key_len
    return draw(_written(kind, tuple(shape), hidden, forms, true_means_hidden))


@composite
def padding_masks(draw: DrawFn, shape: Sequence[int], *, forms: SearchStrategy[MaskForm] | None = None) -> Mask:
    """Masks of shape (batch, key_len) or (key_len): padding at the end, with holes, or nothing but padding.

    Shrinks to a bool mask without any padding.
    """
    kind = draw(st.sampled_from(["padding at the end", "padding with holes", "all padding"]))
    rows, key_len = math.prod(shape[:-1]), shape[-1]
    if kind == "padding at the end":
        padded = draw(st.lists(st.integers(0, key_len), min_size=rows, max_size=rows))
        hidden = [key >= key_len - padding for padding in padded for key in range(key_len)]
    else:
        hidden = draw(_bits(rows, key_len))
    if kind == "all padding" and rows:
        sample = draw(st.integers(0, rows - 1))
        hidden[sample * key_len : (sample + 1) * key_len] = [True] * key_len
    return draw(_written(kind, tuple(shape), hidden, forms, true_means_hidden=True))


@composite
def _bits(draw: DrawFn, rows: int, columns: int) -> list[bool]:
    numbers = draw(st.lists(st.integers(0, 2**columns - 1), min_size=rows, max_size=rows))
    return [bool(number >> column & 1) for number in numbers for column in range(columns)]


@composite
def _written(
    draw: DrawFn,
    kind: str,
    shape: tuple[int, ...],
    hidden: list[bool],
    forms: SearchStrategy[MaskForm] | None,
    true_means_hidden: bool,
) -> Mask:
    form = draw(mask_forms() if forms is None else forms)
    seed = draw(seeds()) if form == "bias" else 0
    return Mask(kind, shape, tuple(hidden), form, seed, true_means_hidden)


@composite
def scaled_dot_product_attention_cases(draw: DrawFn, *, dtypes: SearchStrategy[torch.dtype] = FLOAT64) -> Case:
    """Calls of ``scaled_dot_product_attention`` on 2-D to 5-D inputs, with each of its arguments.

    Shrinks to one query, one key and heads of width 1, without a mask.
    """
    query_len, key_len = draw(lengths()), draw(lengths())
    head_dim, v_head_dim = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    lead = draw(st.lists(st.integers(1, 3), max_size=3))
    enable_gqa = len(lead) > 1 and draw(st.booleans())
    key_lead = list(lead)
    if enable_gqa:
        lead[-1] = key_lead[-1] * draw(st.integers(1, 3))
    arguments: dict[str, Any] = {
        "query": draw(_normals((*lead, query_len, head_dim))),
        "key": draw(_normals((*key_lead, key_len, head_dim))),
        "value": draw(_normals((*key_lead, key_len, v_head_dim))),
        **draw(_sdpa_masks(lead, query_len, key_len)),
    }
    arguments |= draw(_some_of({"dropout_p": dropouts(), "scale": st.sampled_from([None, 1.0, 0.25, -0.5])}))
    if enable_gqa:
        arguments["enable_gqa"] = True
    return Case(Part("scaled_dot_product_attention", {}), arguments, draw(dtypes))


@composite
def fused_attention_cases(draw: DrawFn) -> Case:
    """Calls that the fused kernels of ``scaled_dot_product_attention`` take: 4-D, rows in one piece, bool masks.

    Shrinks to one query, one key and heads of width 1, without a mask.
    """
    batch, num_heads, query_len, key_len = draw(st.tuples(*[st.integers(1, 3)] * 2, lengths(), lengths()))
    head_dim = draw(st.integers(1, 8))
    arguments: dict[str, Any] = {
        name: Normal((batch, num_heads, length, head_dim), draw(seeds()), draw(st.sampled_from(IN_ONE_PIECE)))
        for name, length in (("query", query_len), ("key", key_len), ("value", key_len))
    }
    kind = draw(st.sampled_from(["none", "is_causal", "mask"]))
    if kind == "mask":
        shape = draw(st.sampled_from([(query_len, key_len), (batch, 1, query_len, key_len)]))
        arguments["attn_mask"] = draw(attention_masks(shape, forms=BOOL_FORM, true_means_hidden=False))
    arguments |= {"is_causal": True} if kind == "is_causal" else {}
    arguments |= draw(_some_of({"scale": st.sampled_from([None, 1.0, 0.25])}))
    return Case(Part("scaled_dot_product_attention", {}), arguments)


@composite
def _sdpa_masks(draw: DrawFn, lead: list[int], query_len: int, key_len: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(["none", "is_causal", "mask", "causal bias"]))
    if kind == "mask":
        full = [*lead, query_len, key_len]
        kept = [size if draw(st.booleans()) else 1 for size in full[:-1]]
        shape = [*kept, key_len][draw(st.integers(0, len(lead))) :]
        return {"attn_mask": draw(attention_masks(shape, true_means_hidden=False))}
    if kind == "causal bias":
        # Aligned to the lower right, torch.nn warns of rows that see nothing where the queries are more than the keys.
        align = draw(st.sampled_from(ALIGNMENTS[: 1 + (query_len <= key_len)]))
        return {"attn_mask": CausalBiasMask(align, query_len, key_len)}
    return {"is_causal": True} if kind == "is_causal" else {}


@composite
def multihead_attention_cases(draw: DrawFn, *, dtypes: SearchStrategy[torch.dtype] = FLOAT64) -> Case:
    """Calls of ``MultiheadAttention``: self- and cross-attention, batched or not, with every argument of both doors.

    Shrinks to self-attention of one token with one head of width 1, without a mask.
    """
    num_heads, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    embed_dim, batch = num_heads * head_dim, draw(st.none() | st.integers(1, 3))
    sharing = draw(st.sampled_from(["self-attention", "key is value", "all different"]))
    options = _some_of(
        {
            "dropout": dropouts(),
            "bias": st.booleans(),
            "add_bias_kv": st.booleans(),
            "add_zero_attn": st.booleans(),
            "batch_first": st.booleans(),
        }
    )
    constructor = {"embed_dim": embed_dim, "num_heads": num_heads, **draw(options)}
    if sharing != "self-attention":
        widths = st.none() | st.integers(1, 9)
        kdim = draw(widths)
        constructor |= {"kdim": kdim, "vdim": kdim if sharing == "key is value" else draw(widths)}
    shape = _Shape(batch, bool(constructor.get("batch_first")))
    query_len = draw(lengths())
    key_len = query_len if sharing == "self-attention" else draw(lengths())
    arguments: dict[str, Any] = {"query": draw(_normals(shape.of(query_len, embed_dim)))}
    arguments |= draw(_keys_and_values(sharing, shape, key_len, constructor))
    names = ("attn_mask", "key_padding_mask", "is_causal")
    arguments |= draw(_module_masks(names, batch, num_heads, query_len, key_len))
    arguments |= draw(_some_of({"need_weights": st.booleans(), "average_attn_weights": st.booleans()}))
    return draw(_cases(Part("MultiheadAttention", constructor), arguments, dtypes))


@composite
def _keys_and_values(
    draw: DrawFn, sharing: str, shape: _Shape, key_len: int, constructor: Mapping[str, Any]
) -> dict[str, Any]:
    if sharing == "self-attention":
        return {"key": SameAs("query"), "value": SameAs("query")}
    kdim, vdim = (constructor[name] or constructor["embed_dim"] for name in ("kdim", "vdim"))
    key = draw(_normals(shape.of(key_len, kdim)))
    return {
        "key": key,
        "value": SameAs("key") if sharing == "key is value" else draw(_normals(shape.of(key_len, vdim))),
    }


@composite
def encoder_layer_cases(draw: DrawFn, *, dtypes: SearchStrategy[torch.dtype] = FLOAT64) -> Case:
    """Calls of ``TransformerEncoderLayer``; shrinks to one token of width 1, without a mask."""
    part = Part("TransformerEncoderLayer", draw(_layer_arguments()))
    return draw(_cases(part, draw(_encoder_inputs(part.arguments, "src_mask")), dtypes))


@composite
def decoder_layer_cases(draw: DrawFn, *, dtypes: SearchStrategy[torch.dtype] = FLOAT64) -> Case:
    """Calls of ``TransformerDecoderLayer``; shrinks to one token and a memory of one, without a mask."""
    part = Part("TransformerDecoderLayer", draw(_layer_arguments()))
    return draw(_cases(part, draw(_decoder_inputs(part.arguments)), dtypes))


@composite
def encoder_cases(draw: DrawFn, *, dtypes: SearchStrategy[torch.dtype] = FLOAT64) -> Case:
    """Calls of ``TransformerEncoder`` with 1 to 3 layers; shrinks to one layer without a final norm, without a mask."""
    layer = draw(_layer_arguments())
    constructor = {"encoder_layer": Part("TransformerEncoderLayer", layer), **draw(_stack_arguments(layer))}
    constructor |= draw(_some_of({"enable_nested_tensor": st.booleans(), "mask_check": st.booleans()}))
    arguments = draw(_encoder_inputs(layer, "mask", st.sampled_from([None, True, False])))
    return draw(_cases(Part("TransformerEncoder", constructor), arguments, dtypes))


@composite
def decoder_cases(draw: DrawFn, *, dtypes: SearchStrategy[torch.dtype] = FLOAT64) -> Case:
    """Calls of ``TransformerDecoder`` with 1 to 3 layers; shrinks to one layer without a final norm, without a mask."""
    layer = draw(_layer_arguments())
    constructor = {"decoder_layer": Part("TransformerDecoderLayer", layer), **draw(_stack_arguments(layer))}
    arguments = draw(_decoder_inputs(layer, st.sampled_from([None, True, False])))
    return draw(_cases(Part("TransformerDecoder", constructor), arguments, dtypes))


@composite
def transformer_cases(draw: DrawFn, *, dtypes: SearchStrategy[torch.dtype] = FLOAT64) -> Case:
    """Calls of ``Transformer`` with 1 or 2 layers on either side; shrinks to one token on either, without a mask."""
    constructor = draw(_layer_arguments())
    constructor |= {name: draw(st.integers(1, 2)) for name in ("num_encoder_layers", "num_decoder_layers")}
    batch, num_heads = draw(st.none() | st.integers(1, 3)), constructor["nhead"]
    shape, src_len, tgt_len = _Shape(batch, bool(constructor.get("batch_first"))), draw(lengths()), draw(lengths())
    hints = st.sampled_from([None, True, False])
    arguments: dict[str, Any] = {
        "src": draw(_normals(shape.of(src_len, constructor["d_model"]))),
        "tgt": draw(_normals(shape.of(tgt_len, constructor["d_model"]))),
    }
    for names, query_len, key_len, causal_hints in (
        (("src_mask", "src_key_padding_mask", "src_is_causal"), src_len, src_len, hints),
        (("tgt_mask", "tgt_key_padding_mask", "tgt_is_causal"), tgt_len, tgt_len, hints),
        (("memory_mask", "memory_key_padding_mask", "memory_is_causal"), tgt_len, src_len, st.booleans()),
    ):
        arguments |= draw(_module_masks(names, batch, num_heads, query_len, key_len, causal_hints))
    return draw(_cases(Part("Transformer", constructor), arguments, dtypes))


@composite
def _normals(draw: DrawFn, shape: tuple[int, ...]) -> Normal:
    return Normal(shape, draw(seeds()), draw(layouts()))


@composite
def _some_of(draw: DrawFn, options: Mapping[str, SearchStrategy[Any]]) -> dict[str, Any]:
    """Draw each argument, or leave it at its default; shrinks to leaving all."""
    return {name: draw(values) for name, values in options.items() if draw(st.booleans())}


@composite
def _cases(draw: DrawFn, part: Part, arguments: Mapping[str, Any], dtypes: SearchStrategy[torch.dtype]) -> Case:
    return Case(part, arguments, draw(dtypes), draw(seeds()), draw(st.booleans()))


@composite
def _module_masks(
    draw: DrawFn,
    names: tuple[str, str, str],
    batch: int | None,
    num_heads: int,
    query_len: int,
    key_len: int,
    hints: SearchStrategy[bool | None] | None = None,
) -> dict[str, Any]:
    """The masks of one attention, as torch.nn's modules take them; shrinks to none.

    Both are bool or both are float: torch.nn warns of a mixture.
    """
    forms = st.sampled_from(FLOAT_FORMS) if draw(st.booleans()) else BOOL_FORM
    attn_mask, padding_mask, is_causal = names
    arguments: dict[str, Any] = {}
    if draw(st.booleans()):
        heads = num_heads * (1 if batch is None else batch)
        lead = draw(st.sampled_from([(), (heads,)]))
        arguments[attn_mask] = draw(attention_masks((*lead, query_len, key_len), forms=forms))
        arguments |= draw(_some_of({is_causal: st.booleans() if hints is None else hints}))
    if draw(st.booleans()):
        lead = () if batch is None else (batch,)
        arguments[padding_mask] = draw(padding_masks((*lead, key_len), forms=forms))
    return arguments


@composite
def _layer_arguments(draw: DrawFn) -> dict[str, Any]:
    num_heads = draw(st.integers(1, 3))
    sizes = {"d_model": num_heads * draw(st.integers(1, 4)), "nhead": num_heads}
    options = _some_of(
        {
            "dropout": dropouts(),
            "activation": st.sampled_from(["relu", "gelu", F.relu, F.gelu, torch.tanh]),
            "layer_norm_eps": st.sampled_from([1e-5, 1e-3]),
            "batch_first": st.booleans(),
            "norm_first": st.booleans(),
            "bias": st.booleans(),
        }
    )
    return {**sizes, "dim_feedforward": draw(st.integers(1, 9)), **draw(options)}


@composite
def _stack_arguments(draw: DrawFn, layer: Mapping[str, Any]) -> dict[str, Any]:
    norm = {"norm": Part("LayerNorm", {"normalized_shape": layer["d_model"]})}
    return {"num_layers": draw(st.integers(1, 3)), **(norm if draw(st.booleans()) else {})}


@composite
def _encoder_inputs(
    draw: DrawFn, layer: Mapping[str, Any], mask_name: str, hints: SearchStrategy[bool | None] | None = None
) -> dict[str, Any]:
    batch, src_len = draw(st.none() | st.integers(1, 3)), draw(lengths())
    shape = _Shape(batch, bool(layer.get("batch_first")))
    names = (mask_name, "src_key_padding_mask", "is_causal")
    return {
        "src": draw(_normals(shape.of(src_len, layer["d_model"]))),
        **draw(_module_masks(names, batch, layer["nhead"], src_len, src_len, hints)),
    }


@composite
def _decoder_inputs(
    draw: DrawFn, layer: Mapping[str, Any], hints: SearchStrategy[bool | None] | None = None
) -> dict[str, Any]:
    batch, tgt_len, src_len = draw(st.none() | st.integers(1, 3)), draw(lengths()), draw(lengths())
    shape, num_heads = _Shape(batch, bool(layer.get("batch_first"))), layer["nhead"]
    own = ("tgt_mask", "tgt_key_padding_mask", "tgt_is_causal")
    cross = ("memory_mask", "memory_key_padding_mask", "memory_is_causal")
    return {
        "tgt": draw(_normals(shape.of(tgt_len, layer["d_model"]))),
        "memory": draw(_normals(shape.of(src_len, layer["d_model"]))),
        **draw(_module_masks(own, batch, num_heads, tgt_len, tgt_len, hints)),
        **draw(_module_masks(cross, batch, num_heads, tgt_len, src_len)),
    }


@composite
def seq2seq_cases(draw: DrawFn) -> Case:
    """Calls of ``Seq2SeqTransformer``, which torch.nn does not have; shrinks to one source and one target token."""
    constructor = {**draw(_layer_arguments()), "src_vocab_size": 7, "tgt_vocab_size": 5, "max_len": 9}
    constructor.pop("batch_first", None)
    constructor |= {name: draw(st.integers(1, 2)) for name in ("num_encoder_layers", "num_decoder_layers")}
    options = {
        "positional": st.sampled_from(["interleaved", "concatenated"]),
        "scale_embeddings": st.booleans(),
        "tie_weights": st.booleans(),
    }
    batch = draw(st.integers(1, 3))
    arguments = {
        "src_ids": draw(_sentences(batch, constructor["src_vocab_size"])),
        "tgt_ids": draw(_sentences(batch, constructor["tgt_vocab_size"])),
    }
    part = Part("Seq2SeqTransformer", constructor | draw(_some_of(options)))
    return draw(_cases(part, arguments, FLOAT64))


@composite
def _sentences(draw: DrawFn, batch: int, vocab_size: int) -> TokenIds:
    """Any ids, padding among them, in any place; shrinks to nothing but padding."""
    length = draw(lengths())
    row = st.tuples(*[st.integers(0, vocab_size - 1)] * length)
    return TokenIds(tuple(draw(row) for _ in range(batch)))


# The cases of every class and function that the packages share with torch.nn.
COMPONENTS: dict[str, Callable[..., SearchStrategy[Case]]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention_cases,
    "MultiheadAttention": multihead_attention_cases,
    "TransformerEncoderLayer": encoder_layer_cases,
    "TransformerDecoderLayer": decoder_layer_cases,
    "TransformerEncoder": encoder_cases,
    "TransformerDecoder": decoder_cases,
    "Transformer": transformer_cases,
}
