"""Textbook attention in the forms in which people write it: each right, and each what a compiler may rewrite.

All take (batch, tokens, heads, features), as a projection leaves them. Their source is what a reproducer shows.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["FORMS", "MASKED_FORMS"]


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v


def permuted_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.permute(0, 2, 3, 1), v.transpose(1, 2)
    return torch.matmul((torch.matmul(q, k) * q.shape[-1] ** -0.5).softmax(dim=-1), v)


def permuted_keys_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.permute(0, 2, 3, 1), v.transpose(1, 2)
    return torch.matmul((torch.matmul(q, k) / math.sqrt(q.shape[-1])).softmax(dim=-1), v)


def scaled_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), dim=-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bhqd", scores.softmax(dim=-1), v)


def dropout_of_0(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    weights = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
    return F.dropout(weights, 0.0) @ v


def folded_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, _, heads, width = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT) / math.sqrt(width), -1), v).unflatten(0, (batch, heads))


def permuted_keys_folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads = q.shape[0], q.shape[2]
    q, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, v))
    k = k.permute(0, 2, 3, 1).flatten(0, 1)
    return torch.bmm(torch.softmax(torch.bmm(q, k) * q.shape[-1] ** -0.5, -1), v).unflatten(0, (batch, heads))


def mask_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask, dim=-1) @ v


def added_to_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return torch.softmax(mask + q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v


def mask_added_before_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    root = math.sqrt(q.shape[-1])
    return torch.softmax((q @ k.transpose(-2, -1) + mask * root) / root, dim=-1) @ v


def permuted_keys_and_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.permute(0, 2, 3, 1), v.transpose(1, 2)
    return torch.softmax(torch.matmul(q, k) / math.sqrt(q.shape[-1]) + mask, dim=-1).matmul(v)


def masked_fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(mask == 0, -torch.inf), dim=-1) @ v


FORMS = (
    textbook,
    permuted_keys,
    permuted_keys_divided,
    permuted_keys_folded,
    scaled_query,
    einsum,
    dropout_of_0,
    folded_heads,
)
MASKED_FORMS = (mask_added, added_to_mask, mask_added_before_scale, permuted_keys_and_mask, masked_fill)
