"""The arguments of varlen_attn; torch computes it on CUDA, so the examples run it by hand."""

import torch

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.entry import VARLEN, Explanation
from scratch import varlen, varlen_attn

__all__ = ["EXPLANATIONS"]


def packed() -> None:
    query = key = torch.zeros(5, 1, 5)  # tokens, num_heads, head_dim
    value = torch.eye(5)[:, None]  # the output is the weights
    cu_seq_q = cu_seq_k = torch.tensor([0, 2, 5], dtype=torch.int32)
    max_q = max_k = 3
    cu_seqs = cu_seq_q, cu_seq_k
    output = varlen_attn(query, key, value, *cu_seqs, max_q, max_k)
    print(output[:, 0])


def windowed() -> None:
    x = torch.zeros(5, 1, 5)  # tokens, num_heads, head_dim
    value = torch.eye(5)[:, None]  # the output is the weights
    cu_seq = torch.tensor([0, 5], dtype=torch.int32)
    window_size = (2, 0)
    sizes = (cu_seq, cu_seq, 5, 5)
    print(varlen_attn(x, x, value, *sizes, window_size=window_size)[:, 0])


def summed() -> None:
    x = torch.randn(5, 2, 8)  # tokens, num_heads, head_dim
    cu_seq = torch.tensor([0, 2, 5], dtype=torch.int32)
    sizes, request = (cu_seq, cu_seq, 3, 3), varlen.AuxRequest(lse=True)
    output, lse = varlen_attn(x, x, x, *sizes, return_aux=request)
    print(tuple(output.shape), tuple(lse.shape))


def for_the_kernel() -> None:
    x = torch.randn(5, 2, 8)  # tokens, num_heads, head_dim
    cu_seq = torch.tensor([0, 2, 5], dtype=torch.int32)
    sizes = (cu_seq, cu_seq, 3, 3)
    output = varlen_attn(
        x,
        x,
        x,
        *sizes,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    )
    print(tuple(output.shape))


SCORES = Place(varlen.windowed_scores, "scores = q @")
CUT = Place(varlen.sequences, "itertools.pairwise")
CHECKED = Place(varlen.varlen_attn, "validation.check_varlen_attn")
FOR_THE_KERNEL = Place(varlen.varlen_attn, "seqused_k=(seqused_k, None)")

EXPLANATIONS = (
    Explanation(
        "query",
        (VARLEN,),
        "The queries of all sequences, one after another. It is (tokens, num_heads, head_dim): there is no batch "
        "and no padding, and the heads come after the tokens.",
        (SCORES, CUT),
        packed,
    ),
    Explanation(
        "key",
        (VARLEN,),
        "The keys of all sequences, one after another. A query sees only the keys of its own sequence.",
        (SCORES, CUT),
        packed,
    ),
    Explanation(
        "value",
        (VARLEN,),
        "The values of all sequences, one after another, shaped like the keys.",
        (Place(varlen.varlen_attn, "pieces ="), CUT),
        packed,
    ),
    Explanation(
        "cu_seq_q",
        (VARLEN,),
        "Where the queries of each sequence begin: 0, then the sums of the lengths so far. It is int32, with one "
        "number more "
        "than there are sequences.",
        (CUT,),
        packed,
        "lengths  2, 3\ncu_seq   0, 2, 5\ntokens   a a b b b",
    ),
    Explanation(
        "cu_seq_k",
        (VARLEN,),
        "Where the keys of each sequence begin, as for the queries. A sequence may have more keys than queries, as "
        "with a "
        "cache.",
        (CUT,),
        packed,
    ),
    Explanation(
        "max_q",
        (VARLEN,),
        "The length of the longest sequence of queries, or more. torch's kernel relies on it and does not check "
        "it; here it is checked.",
        (CHECKED,),
        packed,
    ),
    Explanation(
        "max_k",
        (VARLEN,),
        "The length of the longest sequence of keys, or more. It is checked here, but not by torch.",
        (CHECKED,),
        packed,
    ),
    Explanation(
        "return_aux",
        (VARLEN,),
        "Asks for the log-sum-exp of the scores. It is (num_heads, tokens), the other way round from the output.",
        (Place(varlen.varlen_attn, "torch.cat(lses, dim=1)"),),
        summed,
    ),
    Explanation(
        "window_size",
        (VARLEN,),
        "How many keys a query sees before its own place and after it. -1 stands for all, and (-1, 0) is causal. "
        "Its own place is not counted: (2, 0) shows three keys. The last query of a sequence is aligned with its "
        "last key.",
        (Place(varlen.windowed_scores, "places ="), Place(varlen.windowed_scores, "masked_fill")),
        windowed,
    ),
    Explanation(
        "seqused_k",
        (VARLEN,),
        "How much of each sequence of keys counts, for a cache that is longer than what is in it. Only torch's kernel "
        "takes it, from 2.12 on.",
        (FOR_THE_KERNEL,),
        for_the_kernel,
    ),
    Explanation(
        "block_table",
        (VARLEN,),
        "Which pages of a shared pool hold the keys of each sequence. Only torch's kernel takes it, from 2.12 on.",
        (FOR_THE_KERNEL,),
        for_the_kernel,
    ),
    Explanation(
        "num_splits",
        (VARLEN,),
        "Into how many parts torch's kernel may cut the keys. 1 makes a sequence's numbers the same whatever else is "
        "packed "
        "with it. By hand they always are.",
        (FOR_THE_KERNEL,),
        for_the_kernel,
    ),
)
