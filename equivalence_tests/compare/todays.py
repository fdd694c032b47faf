"""Today's attention in ``sidebyside compare``: grouped heads, windows, packed sequences, rotary positions, RMSNorm.

On the CPU torch's flex attention has no gradient, and its packed attention does not run. Its
``scaled_dot_product_attention`` stands in for both, with the mask written out or sequence by sequence.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import builtin
from equivalence_tests.compare.drawing import (
    BATCH,
    EMBED_DIM,
    FF_DIM,
    HEAD_DIM,
    KEY_LEN,
    QUERY_LEN,
    Component,
    Drawing,
)
from equivalence_tests.instruments.inputs import (
    Alibi,
    CausalBiasMask,
    Part,
    SequenceStarts,
    TokenIds,
    WindowBlocks,
)

__all__ = ["todays_components"]

NUM_HEADS, NUM_KEY_HEADS, EVEN_HEAD_DIM = 6, 2, 10
QUERY_LENGTHS, KEY_LENGTHS = (3, 5, 1), (4, 7, 3)
LOOKING_BACK = 2  # how many keys a packed query sees beside its own
IDS = TokenIds(((5, 3, 7, 4, 9, 8, 6), (0, 0, 4, 10, 5, 2, 11)))  # 0 is padding, on the left


def todays_components(draw: Drawing) -> Iterator[Component]:
    """List what both packages have beside the classes of ``torch.nn.Transformer``.

    Args:
        draw: Describes their tensors.

    Yields:
        The components, from the small to the large.
    """
    yield from _grouped_heads(draw)
    yield from _flex_and_packed(draw)
    yield from _parts(draw)
    yield from _language_models(draw)


def _grouped_heads(draw: Drawing) -> Iterator[Component]:
    for kernel, backend in (("MATH kernel", SDPBackend.MATH), ("torch's choice of kernel", None)):
        inputs = _heads(draw) | {"attn_mask": CausalBiasMask("lower_right", QUERY_LEN, KEY_LEN), "enable_gqa": True}
        case = draw.case("scaled_dot_product_attention", {}, inputs)
        yield Component(f"scaled dot-product attention, grouped, causal, {kernel}", case, backend=backend)


def _flex_and_packed(draw: Drawing) -> Iterator[Component]:
    inputs = _heads(draw) | {"score_mod": Alibi(NUM_HEADS), "enable_gqa": True}
    inputs["block_mask"] = WindowBlocks(3, QUERY_LEN, KEY_LEN, block_len=2)
    case = draw.case("flex_attention", {}, inputs)
    yield Component("flex_attention, window, ALiBi", case, differentiable=False)
    yield Component("flex_attention, gradients by SDPA", case, trusted=attend_densely)
    packed: dict[str, Any] = {
        "query": draw.normal(sum(QUERY_LENGTHS), NUM_HEADS, HEAD_DIM),
        "key": draw.normal(sum(KEY_LENGTHS), NUM_KEY_HEADS, HEAD_DIM),
        "value": draw.normal(sum(KEY_LENGTHS), NUM_KEY_HEADS, HEAD_DIM),
    }
    packed |= {"cu_seq_q": SequenceStarts(QUERY_LENGTHS), "cu_seq_k": SequenceStarts(KEY_LENGTHS)}
    packed |= {"max_q": max(QUERY_LENGTHS), "max_k": max(KEY_LENGTHS)}
    packed |= {"window_size": (LOOKING_BACK, 0), "enable_gqa": True}
    case = draw.case("varlen_attn", {}, packed)
    yield Component("varlen_attn, window, by SDPA one by one", case, trusted=attend_one_by_one)


def _heads(draw: Drawing) -> dict[str, Any]:
    return {
        "query": draw.normal(BATCH, NUM_HEADS, QUERY_LEN, HEAD_DIM),
        "key": draw.normal(BATCH, NUM_KEY_HEADS, KEY_LEN, HEAD_DIM),
        "value": draw.normal(BATCH, NUM_KEY_HEADS, KEY_LEN, HEAD_DIM),
    }


def _parts(draw: Drawing) -> Iterator[Component]:
    x = {"input": draw.normal(BATCH, QUERY_LEN, EMBED_DIM), "normalized_shape": (EMBED_DIM,)}
    x |= {"weight": draw.normal(EMBED_DIM), "eps": 1e-5}
    yield Component("rms_norm", draw.case("rms_norm", {}, x), identical=True)
    tokens = {"x": draw.normal(BATCH, KEY_LEN, EMBED_DIM)}
    yield Component("RMSNorm", draw.case("RMSNorm", {"normalized_shape": (KEY_LEN, EMBED_DIM)}, tokens), identical=True)
    heads = {"x": draw.normal(BATCH, NUM_HEADS, KEY_LEN, EVEN_HEAD_DIM)}
    for pairing in ("adjacent", "halves"):
        case = draw.case("RotaryEmbedding", {"head_dim": EVEN_HEAD_DIM, "pairing": pairing}, heads)
        yield Component(f"RotaryEmbedding, {pairing}", case)


def _language_models(draw: Drawing) -> Iterator[Component]:
    options: dict[str, Any] = {"num_key_heads": NUM_KEY_HEADS, "head_dim": EVEN_HEAD_DIM}
    options |= {"qk_norm": True, "window": 3, "sinks": True}
    scaling = Part("YaRNScaling", {"factor": 4.0, "original_max_len": 16})
    rotary = {"rotary": Part("RotaryEmbedding", {"head_dim": EVEN_HEAD_DIM, "scaling": scaling})}
    tokens = {"x": draw.normal(BATCH, KEY_LEN, EMBED_DIM)}
    built_with = {"embed_dim": EMBED_DIM, "num_heads": NUM_HEADS, **options, **rotary}
    case = draw.case("GroupedQueryAttention", built_with, tokens)
    yield Component("GroupedQueryAttention, all but a soft cap", case)
    sizes = {"nhead": NUM_HEADS, "dim_feedforward": FF_DIM}
    built_with = {"d_model": EMBED_DIM, **sizes, **options, **rotary, "sandwich_norm": True}
    yield Component("DecoderOnlyLayer", draw.case("DecoderOnlyLayer", built_with, tokens))
    model = {"vocab_size": 13, "d_model": EMBED_DIM, "num_layers": 2, **sizes, **options, "window": (None, 3)}
    model |= {"pairing": "halves", "logit_soft_cap": 5.0, "tie_weights": True, "pad_id": 0, "end_id": 1}
    yield Component("DecoderOnlyTransformer", draw.case("DecoderOnlyTransformer", model, {"token_ids": IDS}))


def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, enable_gqa: bool
) -> Tensor:
    """Compute ``flex_attention`` with a score function that adds, from a bias that is written out.

    Args:
        query: (batch, num_heads, query_len, head_dim).
        key: (batch, num_key_heads, key_len, head_dim).
        value: Like the keys.
        score_mod: Adds to a score what does not depend on it.
        block_mask: What may be seen, the same in every sample and head.
        enable_gqa: Whether there are fewer heads of keys.

    Returns:
        The shape of the query.
    """
    head, i, j = (torch.arange(size, device=query.device) for size in (query.size(1), query.size(2), key.size(2)))
    place = (torch.zeros_like(head[:1]), head[:, None, None], i[:, None], j)
    score_bias = score_mod(query.new_zeros(()), *place).masked_fill(~block_mask.mask_mod(*place), -math.inf)
    return builtin.scaled_dot_product_attention(query, key, value, score_bias.to(query.dtype), enable_gqa=enable_gqa)


def attend_one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,  # noqa: ARG001  the signature of varlen_attn
    max_k: int,  # noqa: ARG001
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Compute ``varlen_attn`` with a window into the past, one sequence after another.

    Args:
        query: (tokens of all queries, num_heads, head_dim).
        key: (tokens of all keys, num_key_heads, head_dim).
        value: Like the keys.
        cu_seq_q: Where the queries of each sequence begin, and where the last ones end.
        cu_seq_k: The same for keys and values.
        max_q: Not needed.
        max_k: Not needed.
        window_size: How many keys before its own place a query sees, and 0.
        enable_gqa: Whether there are fewer heads of keys.

    Returns:
        The shape of the query.
    """
    starts = zip(itertools.pairwise(cu_seq_q.tolist()), itertools.pairwise(cu_seq_k.tolist()), strict=True)
    contexts = []
    for of_queries, of_keys in starts:
        q = query[slice(*of_queries)].transpose(0, 1)  # (h, q, d)
        k, v = (x[slice(*of_keys)].transpose(0, 1) for x in (key, value))
        lengths = (q.size(1), k.size(1))
        past = builtin.masks.causal(*lengths, align="lower_right", device=q.device)
        near = builtin.masks.sliding_window(*lengths, window=window_size[0] + 1, align="lower_right", device=q.device)
        contexts.append(builtin.scaled_dot_product_attention(q, k, v, past & near, enable_gqa=enable_gqa))
    return torch.cat(contexts, dim=1).transpose(0, 1)
