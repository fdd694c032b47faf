"""Attention over sequences that are packed one after the other, without padding between them.

Dimension letters: t tokens of all sequences, h num_heads, q query_len and k key_len of one sequence, d head_dim.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratch import flex, validation
from scratch.rounding import upcast_half

__all__ = ["AuxRequest", "varlen_attn"]


class AuxRequest(NamedTuple):
    """Ask ``varlen_attn`` for more than its output.

    Args:
        lse: Whether to return the log-sum-exp of the scores of each query.

    In torch.nn: ``torch.nn.attention.varlen.AuxRequest``.
    """

    lse: bool = False


def varlen_attn(
    query: Float[Tensor, "query_tokens num_heads head_dim"],
    key: Float[Tensor, "key_tokens num_key_heads head_dim"],
    value: Float[Tensor, "key_tokens num_key_heads head_dim"],
    cu_seq_q: Int[Tensor, " sequences_and_1"],
    cu_seq_k: Int[Tensor, " sequences_and_1"] | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: "AuxRequest | None" = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Attend within each of several sequences that are packed into one, each query to the keys of its own sequence.

    Attention(Q, K, V) = softmax(Q Kᵀ * scale) V, for each sequence separately

    Args:
        query: (tokens of all queries, num_heads, head_dim).
        key: (tokens of all keys, num_key_heads, head_dim).
        value: (tokens of all keys, num_key_heads, head_dim).
        cu_seq_q: Where the queries of each sequence begin, and where the last ones end: 0, then the sums of the lengths
            so far.
        cu_seq_k: The same for keys and values.
        max_q: The greatest number of queries of a sequence, or more.
        max_k: The greatest number of keys of a sequence, or more.
        return_aux: Whether to return the log-sum-exp of the scores, too.
        scale: Factor on the scores; 1 / sqrt(head_dim) if not given.
        window_size: How many keys a query sees before and after its own place, besides that one; -1 for all. The last
            query of a sequence stands at its last key: (-1, 0) is causal, aligned to the lower right corner.
        enable_gqa: Grouped heads: each head of keys serves num_heads / num_key_heads heads of queries that follow one
            another.
        seqused_k: For caches of torch's kernel, paged or not.
        block_table: For paged caches of torch's kernel.
        num_splits: For torch's kernel, which may cut the keys.

    Returns:
        (tokens of all queries, num_heads, head_dim). A query that may look at no key gets 0, with gradient 0. With
        ``return_aux`` a pair: the output and (num_heads, tokens of all queries), -inf for such a query.

    Raises:
        ValueError: For shapes or lengths that do not fit together, or an argument meant for torch's kernel.
        TypeError: If one of them is not a tensor, or has another dtype.

    In torch.nn: ``torch.nn.attention.varlen.varlen_attn``, for half precision on CUDA. There, lengths
    are neither checked nor read; here they are, which waits for the device.

    Source: Dao et al. 2022, section 3, for the kernel behind it;
    https://docs.pytorch.org/docs/stable/nn.attention.varlen.html

    >>> query, values = torch.zeros(5, 1, 5), torch.eye(5)[:, None]
    >>> cu_seq = torch.tensor([0, 2, 5], dtype=torch.int32)  # 2 tokens and 3
    >>> varlen_attn(query, query, values, cu_seq, cu_seq, 3, 3, window_size=(-1, 0))[:, 0]
    tensor([[1.0000, 0.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.3333, 0.3333, 0.3333]])
    """
    inputs, cu_seqs, longest = (query, key, value), (cu_seq_q, cu_seq_k), (max_q, max_k)
    validation.check_varlen_attn(inputs, cu_seqs, longest, window_size, enable_gqa, return_aux)
    validation.check_defaults(
        seqused_k=(seqused_k, None), block_table=(block_table, None), num_splits=(num_splits, None)
    )
    wanted = flex.AuxRequest(lse=return_aux is not None and return_aux.lse)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    groups = query.size(1) // key.size(1)
    with flex.without_autocast(query.device):
        q, k, v = upcast_half(query, key, value)
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        one_by_one = zip(sequences(q, cu_seq_q), sequences(k, cu_seq_k), sequences(v, cu_seq_k), strict=True)
        pieces = [flex.attend(windowed_scores(q, k, scale, window_size), v, wanted) for q, k, v in one_by_one]
    contexts, lses, _ = zip(*pieces, strict=True)
    output = torch.cat(contexts, dim=1).transpose(0, 1).to(query.dtype)  # (t, h, d)
    return (output, torch.cat(lses, dim=1)) if wanted.lse else output


def sequences(packed: Float[Tensor, "tokens num_heads width"], cu_seq: Tensor | None) -> Iterator[Tensor]:
    """Return the tokens of each sequence separately: (h, q, d)."""
    assert cu_seq is not None
    return (packed[begin:end].transpose(0, 1) for begin, end in itertools.pairwise(cu_seq.tolist()))


def windowed_scores(
    q: Float[Tensor, "num_heads query_len head_dim"],
    k: Float[Tensor, "num_heads key_len head_dim"],
    scale: float,
    window_size: tuple[int, int],
) -> Float[Tensor, "num_heads query_len key_len"]:
    """Score the keys of one sequence: query i may look at i + key_len - query_len - left up to the same + right."""
    scores = q @ k.transpose(-2, -1) * scale
    places = torch.arange(k.size(-2) - q.size(-2), k.size(-2), device=q.device)  # the last query stands at the last key
    steps = torch.arange(k.size(-2), device=q.device) - places[:, None]  # (q, k)
    left, right = (math.inf if size == -1 else size for size in window_size)
    return scores.masked_fill((steps < -left) | (steps > right), -math.inf)
