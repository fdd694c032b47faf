"""Which keys each query sees, read off its weights or found by changing one token at a time, and names for patterns."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.same import ROUNDING
from equivalence_tests.checker.reach.calling import Trial

OFF_BY_ONE = ("causal_sees_one_ahead", "causal_cannot_see_itself")


def pattern_of(sees: Tensor, ahead: Tensor) -> str:
    """Name what queries see: "all", "causal", a known mistake in a causal mask, or "" for another pattern.

    ``ahead`` says how many tokens after its query each key stands.

    >>> ahead = torch.arange(4) - torch.arange(4)[:, None]
    >>> pattern_of(ahead <= 1, ahead)
    'causal_sees_one_ahead'
    """
    known = {
        "all": (torch.ones_like(sees),),
        "causal": (ahead <= 0,),
        "causal_sees_one_ahead": (ahead <= 1,),
        "causal_cannot_see_itself": (ahead < 0,),
        "causal_mask_inverted": (ahead > 0, ahead >= 0),
    }
    return next((name for name, forms in known.items() if any(torch.equal(sees, form) for form in forms)), "")


def triangle_of(x: Tensor) -> str:
    """Name the causal mask that the last two axes hold, right or off by one: one value on one side, another beyond."""
    if x.dim() < 2 or x.size(-1) != x.size(-2) or x.size(-1) < 3:
        return ""
    square = x.reshape(-1, *x.shape[-2:])[0]
    seen = square == square[-1, 0]
    two_values = bool((seen | (square == square[0, -1])).all())
    name = pattern_of(seen, ahead_of(len(seen))) if two_values else ""
    return name if name in ("causal", *OFF_BY_ONE) else ""


def seen_in(judgement: Judgement, tokens: int) -> Tensor:
    """Say which of the first tokens gives weight to which in any head, (tokens, tokens) bool, [query, key]."""
    sees = torch.zeros(tokens, tokens, dtype=torch.bool)
    for part, model in zip(judgement.attention.parts, judgement.models, strict=False):
        query, key = part.table.query, part.table.key
        seen = ~(model.hidden | model.replaced | model.dead[model.rows]) & (query.max(key) < tokens)
        sees[query[seen], key[seen]] = True
    return sees


def met_in(judgement: Judgement) -> Tensor:
    """Say which query has a score with which key, masked or not, (tokens, tokens) bool, [query, key]."""
    tables = [part.table for part in judgement.attention.parts]
    tokens = 1 + max(int(x.max()) for table in tables for x in (table.query, table.key))
    met = torch.zeros(tokens, tokens, dtype=torch.bool)
    for table in tables:
        met[table.query, table.key] = True
    return met


@torch.no_grad()
def probed(
    trial: Trial, length: int, extra: Mapping[str, Any] | None = None, tokens: Iterable[int] | None = None
) -> Tensor:
    """Say which outputs change when one input token does, (batch, length, length) bool, [sample, output, input].

    Where queries are a tensor of their own, only the keys' token changes, with its value. All tokens are changed, one
    after another, unless some are named.
    """
    inputs = trial.inputs(length, length)
    whole = trial.output(inputs, extra)
    seen = torch.zeros(len(whole), length, length, dtype=torch.bool)
    for token in range(length) if tokens is None else tokens:
        changed = inputs.changed(token=token)
        changed = changed if trial.plan.self_attention else replace(changed, query=inputs.query)
        apart = (whole - trial.output(changed, extra)).abs() > ROUNDING * whole.nan_to_num().abs().max()
        seen[..., token] = apart.flatten(2).any(-1)
    return seen


def ahead_of(length: int) -> Tensor:
    """Say how many tokens after each query each key stands, (length, length)."""
    return torch.arange(length) - torch.arange(length)[:, None]
