"""Ranks of queries and keys within a sample, and the masks that are known by them."""

import torch
from torch import Tensor

from equivalence_tests.checker.engine.names import Part

__all__ = ["causal_pattern", "future_of", "hidden_by_formula", "padded_queries", "ranks_of", "with_some"]


def ranks_of(part: Part) -> tuple[Tensor, Tensor, int, int]:
    """Rank of each score's query and key, as they stand in the product, and how many queries and keys there are."""
    table = part.table
    return table.rank_query, table.rank_key, int(table.rank_query.max()) + 1, int(table.rank_key.max()) + 1


def future_of(part: Part) -> Tensor:
    """Which keys come after the query, the last query beside the last key."""
    query, key, queries, keys = ranks_of(part)
    return key > query + (keys - queries)


def causal_pattern(part: Part, hidden: Tensor, live: Tensor) -> str:
    """Tell which causal mask a pattern is: the right one, or one of the known wrong ones; "" for another pattern."""
    query, key, queries, keys = ranks_of(part)
    if not bool(hidden[live].any()) or queries < 2:
        return ""
    ahead = key - query - (keys - queries)
    patterns = {
        "causal": (ahead > 0,),
        "causal_sees_one_ahead": (ahead > 1,),
        "causal_cannot_see_itself": (ahead >= 0,),
        "causal_mask_inverted": (ahead <= 0, ahead < 0),
    }
    for name, known in patterns.items():
        if any(torch.equal(pattern[live], hidden[live]) and bool(pattern.any()) for pattern in known):
            return name
    return ""


def with_some(may: Tensor, rows: Tensor) -> Tensor:
    """Which scores stand in a row with some key that may be seen.

    >>> with_some(torch.tensor([True, False, False]), torch.tensor([0, 0, 1])).tolist()
    [True, True, False]
    """
    counts = torch.zeros(int(rows.max()) + 1, dtype=torch.long).index_add_(0, rows, may.long())
    return counts[rows] > 0


def padded_queries(part: Part, may: Tensor) -> Tensor:
    """The tokens that no query may look at and that are queries themselves: what comes out for them is nobody's.

    Args:
        part: Where tokens attend to themselves; where there are other keys than queries, nothing is padding.
        may: Which key each score's query may look at.
    """
    _, _, queries, keys = ranks_of(part)
    seen = part.table.key[may].unique()
    every = part.table.key.unique()
    return every[~torch.isin(every, seen)] if queries == keys else every[:0]


def hidden_by_formula(part: Part, own: Tensor, may: Tensor | None, pattern: str) -> Tensor:
    """What should be hidden: what is not allowed; the future, where a causal mask is wrong; else what is hidden.

    Args:
        part: Whose scores.
        own: What is hidden by the code itself.
        may: What is allowed, where that is known.
        pattern: Which causal mask the code has.
    """
    if may is not None:
        return ~may
    return future_of(part) if pattern.startswith("causal") else own
