"""Attention functions for models with a switch for each mistake that people make in them; they prove the judge."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scratch

__all__ = ["MISTAKES", "by_scratch", "planted"]

# Each mistake, and words by which it is named.
MISTAKES = {
    "scaling ignored": "the scores are not scaled",
    "scaling of its own": "divided by the root of head_dim",
    "scaled twice": "scaled twice",
    "window ignored": "sliding_window is ignored",
    "soft cap ignored": "softcap is ignored",
    "sinks ignored": "s_aux is ignored",
    "position bias ignored": "position_bias is ignored",
    "mask ignored for one query": "the mask is ignored where there is one query",
    "upper left": "aligned at the upper left",
    "heads alternate": "key heads alternate",
    "first key head": "takes the first key head",
    "dropout in eval": "drops weights although dropout is 0",
    "dropout ignored": "dropout is ignored in training",
    "mask added twice": "get NaN, and their keys pass it on",
    "mask inverted": "read the other way round",
    "mask as numbers": "added as numbers",
    "empty slots": "empty slots of the static cache",
    "not transposed": "not transposed",
    "padding at the other end": "at the other end",
    "padding ignored": "only the causal mask is applied",
    "causal in encoders": "a causal mask is applied where the model has none",
    "future seen without a mask": "by which the mask function means: causal",
    "first sample's mask": "the mask of the first",
    "softmax over queries": "runs over the queries",
    "writes into its keys": "writes into its inputs",
    "dk scaled twice": "dk is scaled twice",
}


def by_scratch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend by ``scratch``; it has neither soft caps nor sinks.

    Args:
        module: The attention that calls it.
        query: (batch, heads, query_len, head_dim).
        key: (batch, key_heads, key_len, head_dim).
        value: (batch, key_heads, key_len, v_head_dim).
        attention_mask: True may look, or numbers that are added; None stands for causal, if the module is.
        scaling: Of the scores.
        dropout: Of the weights.
        options: What else a model hands over.

    Returns:
        The output, (batch, query_len, heads, head_dim), and no weights.

    Raises:
        NotImplementedError: Where a model wants a soft cap or sinks.
    """
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise NotImplementedError("scratch has no soft caps and no sinks")
    queries, bias = query.shape[2], options.get("position_bias")
    causal = attention_mask is None and queries > 1 and _is_causal(module, options)
    if causal:  # the slots of a static cache that are still empty come last
        key, value = key[:, :, :queries], value[:, :, :queries]
    if bias is not None:
        attention_mask = _added(bias[..., : key.shape[2]], scratch.masks.causal(queries) if causal else attention_mask)
        causal = False
    out = scratch.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def _added(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or mask.is_floating_point():
        return bias if mask is None else bias + mask
    return bias.masked_fill(~mask, -math.inf)


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


class _ScaledAgain(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad * grad.shape[-1] ** -0.5


def planted(mistake: str = "") -> Callable[..., Any]:
    """Give an attention function that makes one mistake, or none.

    It takes bool masks, None where causal suffices, and what the mistakes need.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        if mistake == "writes into its keys":
            key.mul_(1.5)
        if mistake == "dk scaled twice":
            key = _ScaledAgain.apply(key)  # type: ignore[no-untyped-call]
        seen = _seen(mistake, module, query, key, attention_mask, options)
        key, value = _grouped(mistake, query, key), _grouped(mistake, query, value)
        scores = _scores(mistake, query, key, scaling, options)
        weights = _weights(mistake, scores, seen, options)
        if mistake == "dropout in eval":
            weights = F.dropout(weights, 0.1)
        elif mistake != "dropout ignored":
            weights = F.dropout(weights, dropout, module.training)
        output = weights @ value
        if mistake == "not transposed":
            return output.contiguous(), weights
        return output.transpose(1, 2).contiguous(), weights

    attend.__name__ = f"with {mistake or 'nothing wrong'}"
    return attend


def _seen(
    mistake: str, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Say who sees whom, (batch or 1, 1, query, key)."""
    queries, keys = query.shape[2], key.shape[2]
    everything = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if mistake == "mask ignored for one query" and queries == 1:
        return everything
    if mistake == "causal in encoders" and not _is_causal(module, options) and queries == keys:
        return everything.tril() if mask is None else mask.tril()
    if mask is None:
        causal = queries > 1 and _is_causal(module, options) and mistake != "future seen without a mask"
        return everything.tril() if causal else everything
    mask = mask[..., :keys]
    window = options.get("sliding_window")
    causal = _is_causal(module, options) and queries > 1
    if mistake == "window ignored" and window is not None and keys > window:
        return (mask.any(2, keepdim=True) & everything).tril(keys - queries) if causal else mask.any(2, keepdim=True)
    real = mask.any(2, keepdim=True)
    padded = not torch.equal(real, real.flip(-1)) and keys == queries
    unused = ~real.any(0, keepdim=True) & (torch.arange(keys) >= real.any(0).nonzero()[:, -1].max())
    changed = {
        "mask inverted": lambda: ~mask,
        "upper left": lambda: real & everything.tril() if causal and keys > queries else mask,
        "empty slots": lambda: mask | unused,
        "padding at the other end": lambda: real.flip(-1) & everything.tril(0 if causal else keys) if padded else mask,
        "padding ignored": lambda: everything.tril(keys - queries) if causal and not unused.any() else mask,
        "first sample's mask": lambda: mask[:1],
    }
    return changed[mistake]() if mistake in changed else mask


def _grouped(mistake: str, query: Tensor, x: Tensor) -> Tensor:
    groups = query.shape[1] // x.shape[1]
    if mistake == "heads alternate":
        return x.repeat(1, groups, 1, 1)
    if mistake == "first key head" and groups > 1:
        return x[:, :1].expand(-1, query.shape[1], -1, -1)
    return x.repeat_interleave(groups, 1)


def _scores(mistake: str, query: Tensor, key: Tensor, scaling: float | None, options: dict[str, Any]) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None or mistake == "scaling of its own" else scaling
    scale = {"scaling ignored": 1.0, "scaled twice": scale**2}.get(mistake, scale)
    scores = query @ key.mT * scale
    cap, bias = options.get("softcap"), options.get("position_bias")
    if cap is not None and mistake != "soft cap ignored":
        scores = cap * (scores / cap).tanh()
    if bias is not None and mistake != "position bias ignored":
        scores = scores + bias[..., : key.shape[2]]
    return scores


def _weights(mistake: str, scores: Tensor, seen: Tensor, options: dict[str, Any]) -> Tensor:
    if mistake == "mask as numbers" and not torch.equal(seen, torch.ones_like(seen).tril()):
        scores = scores + seen
    else:
        hidden = torch.finfo(scores.dtype).min
        scores = scores + torch.where(seen, 0.0, hidden)
        if mistake == "mask added twice":
            scores = scores + torch.where(seen, 0.0, hidden)
    if mistake == "softmax over queries":
        return scores.softmax(-2)
    sinks = options.get("s_aux")
    if sinks is None or mistake == "sinks ignored":
        return scores.softmax(-1)
    columns = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores)
    return torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
