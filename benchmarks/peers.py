"""Attention as people usually write it, to be timed beside ``scratch`` and torch's kernels.

Dimension letters: b batch, h num_heads, q query_len, k key_len, d head_dim.
"""

import math

import torch
from torch import Tensor

__all__ = ["PEERS", "chunked", "einsum", "naive"]

CHUNK = 256  # queries


def naive(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """Write down all scores, hide later keys, take the softmax and multiply.

    Args:
        query: (b, h, q, d).
        key: (b, h, k, d).
        value: (b, h, k, d).
        is_causal: Query i may look at keys 0 ... i.

    Returns:
        (b, h, q, d).
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return torch.softmax(scores, dim=-1) @ value


def einsum(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """Do as ``naive`` does, with tokens before heads and the axes named, and with the mask added to the scores."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # (b, len, h, d)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.size(-1) ** -0.5
    if is_causal:
        mask = torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype, device=query.device)
        scores = scores + mask.triu(1)
    context = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, dim=-1), value)
    return context.transpose(1, 2)


def chunked(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """Do as ``naive`` does for some queries at a time, and leave out keys that are later than all of them."""
    contexts = []
    for start in range(0, query.size(-2), CHUNK):
        chunk = query[..., start : start + CHUNK, :]
        stop = min(start + chunk.size(-2), key.size(-2)) if is_causal else key.size(-2)
        scores = chunk @ key[..., :stop, :].transpose(-2, -1) / math.sqrt(query.size(-1))
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1 + start)
            scores = scores.masked_fill(later, -math.inf)
        contexts.append(torch.softmax(scores, dim=-1) @ value[..., :stop, :])
    return torch.cat(contexts, dim=-2)


PEERS = {"naive": naive, "einsum": einsum, "chunked": chunked}
