"""How much work a case is: floating-point operations and bytes, from closed formulas, the same for every contender.

A multiplication with its addition counts as two operations. Only matrix products are counted, and all scores of an
attention, masked or not: what a kernel saves by leaving hidden keys out shows as a higher rate. What it computes twice
in the backward pass is not counted twice.

Letters: b batch, q query_len, k key_len, e embed_dim, n num_layers.
"""

import torch

from benchmarks.grids import Case
from benchmarks.workloads import VOCABULARY

__all__ = ["bytes_moved", "flops", "roofline_seconds"]


def flops(case: Case) -> int:
    """Count the floating-point operations of a case.

    Args:
        case: What is computed. The backward pass of a product is two products of the same size.

    Returns:
        Operations of one run.

    >>> flops(Case("attention", batch=2, query_len=5, key_len=7, embed_dim=33, num_heads=3))  # 4 b q k e
    9240
    """
    b, q, k, e, n = case.batch, case.query_len, case.key_len, case.embed_dim, case.num_layers
    forward = {
        "attention": attention_flops(q, k, e),
        "self_attention": projected_attention_flops(q, q, e),
        "cross_attention": projected_attention_flops(q, k, e),
        "encoder_layer": encoder_flops(q, e),
        "decoder_layer": decoder_flops(q, k, e),
        "transformer": n * (encoder_flops(k, e) + decoder_flops(q, k, e)),
        "seq2seq": n * (encoder_flops(k, e) + decoder_flops(q, k, e)) + 2 * q * e * VOCABULARY,
        "generate": generate_flops(q, k, e, n),
    }[case.component]
    return b * forward * (1 if case.mode == "forward" else 3)


def attention_flops(q: int, k: int, e: int) -> int:
    """Count q kᵀ and weights v, over all heads: 4 q k e."""
    return 4 * q * k * e


def projected_attention_flops(q: int, k: int, e: int) -> int:
    """Count attention with its four projections: 4 q k e + 4 q e² + 4 k e²."""
    return attention_flops(q, k, e) + 4 * q * e**2 + 4 * k * e**2


def feed_forward_flops(q: int, e: int) -> int:
    """Count two matrices of e x 4 e: 16 q e²."""
    return 16 * q * e**2


def encoder_flops(k: int, e: int) -> int:
    """Count one encoder layer."""
    return projected_attention_flops(k, k, e) + feed_forward_flops(k, e)


def decoder_flops(q: int, k: int, e: int) -> int:
    """Count one decoder layer."""
    return projected_attention_flops(q, q, e) + projected_attention_flops(q, k, e) + feed_forward_flops(q, e)


def generate_flops(q: int, k: int, e: int, n: int) -> int:
    """Count greedy decoding with a cache: each token is projected once and looks at the tokens up to itself.

    Recomputation does more; this is what has to be done.
    """
    looked_at = q * (q + 1) // 2
    self_attention = 8 * q * e**2 + 4 * looked_at * e
    layer = self_attention + projected_attention_flops(q, k, e) + feed_forward_flops(q, e)
    return n * (encoder_flops(k, e) + layer) + 2 * q * e * VOCABULARY


def bytes_moved(case: Case) -> int | None:
    """Count the bytes that have to be read and written at least once: inputs, parameters and output.

    Args:
        case: What is computed.

    Returns:
        Bytes of one forward pass of attention, projected or not; None where it is not clear what is least: in the
        backward pass, and in stacks.

    >>> bytes_moved(Case("attention", batch=2, query_len=5, key_len=7, embed_dim=33, num_heads=3))  # 4 (2 q + 2 k) b e
    6336
    """
    if case.mode != "forward" or case.component not in ("attention", "self_attention", "cross_attention"):
        return None
    b, q, k, e = case.batch, case.query_len, case.key_len, case.embed_dim
    key_width = case.head_dim * (case.key_heads or case.num_heads)
    keys_read = {"attention": 2 * k * key_width, "self_attention": 0, "cross_attention": k * e}[case.component]
    parameters = 0 if case.component == "attention" else 4 * e**2 + 4 * e * case.bias
    weights = b * q * k if case.need_weights else 0
    itemsize: int = getattr(torch, case.dtype).itemsize
    return (b * (2 * q * e + keys_read) + parameters + weights) * itemsize


def roofline_seconds(case: Case, flops_per_s: float, bytes_per_s: float) -> float | None:
    """Give the least time that the machine allows: arithmetic or memory, whichever takes longer.

    Args:
        case: What is computed.
        flops_per_s: The rate of matrix products, measured.
        bytes_per_s: The rate of memory, measured.

    Returns:
        Seconds; None where the bytes are not clear, or where a mask lets a kernel leave scores out.
    """
    moved = bytes_moved(case)
    return None if moved is None or case.mask != "none" else max(flops(case) / flops_per_s, moved / bytes_per_s)
