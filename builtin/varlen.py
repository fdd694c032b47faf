"""Attention over sequences that lie one behind the other: torch's call of flash attention, which needs CUDA."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest

from scratch import validation

__all__ = ["AuxRequest", "varlen_attn"]


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
    """Attend within each of several sequences that are packed into one, each query to the keys of its own.

    Attention(Q, K, V) = softmax(Q Kᵀ * scale) V, of each sequence by itself

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
        window_size: How many keys a query sees before and after its own place, beside that one; -1 for all. The last
            query of a sequence stands at its last key: (-1, 0) is causal, aligned to the lower right corner.
        enable_gqa: Grouped heads: each head of keys serves num_heads / num_key_heads heads of queries that follow one
            another.
        seqused_k: For a cache of torch's kernel, with pages or without.
        block_table: For the pages of such a cache.
        num_splits: For torch's kernel, which may cut the keys.

    Returns:
        (tokens of all queries, num_heads, head_dim). A query that may look at no key gets 0, with gradient 0. With
        ``return_aux`` a pair: the output and (num_heads, tokens of all queries), -inf for such a query.

    Raises:
        ValueError: For shapes or lengths that do not fit together, or an argument that is for torch's kernel.
        TypeError: For what is no tensor, or has another dtype.

    In torch.nn: ``torch.nn.attention.varlen.varlen_attn``, which computes half precision on CUDA, and nothing else. The
    lengths are read and checked here before the call, which waits for the device.

    Traps:
        The log-sum-exp has the heads first, whatever the documents say: see trap `varlen_lse_heads_first`.
        A window counts the keys beside the query: see trap `window_of_neighbours`.
        Causal is aligned to the lower right corner: see trap `varlen_lower_right`.

    Source: Dao et al. 2022, section 3, for the kernel behind it;
    https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
    """
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    validation.check_varlen_attn(query, key, value, *lengths, window_size, enable_gqa, return_aux)
    validation.check_varlen_on_device(query)
    given = {"enable_gqa": enable_gqa, "seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits}
    # torch 2.11 does not have these four.
    options: dict[str, Any] = {name: x for name, x in given.items() if x is not None and x is not False}
    validation.check_known_to_torch(varlen.varlen_attn, options)
    return varlen.varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        return_aux=return_aux,
        scale=scale,
        window_size=window_size,
        **options,
    )
