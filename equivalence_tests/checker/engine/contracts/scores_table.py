"""Ranks of queries and keys within a sample, and the masks that are known by them."""

import torch
from torch import Tensor

from equivalence_tests.checker.engine.judgement import WeightsModel
from equivalence_tests.checker.engine.names import Part
from equivalence_tests.checker.engine.same import LOOSE
from equivalence_tests.checker.engine.visibility import OFF_BY_ONE, pattern_of


def ranks_of(part: Part) -> tuple[Tensor, Tensor, int, int]:
    """Rank of each score's query and key, as they stand in the product, and how many queries and keys there are."""
    table = part.table
    return table.rank_query, table.rank_key, int(table.rank_query.max()) + 1, int(table.rank_key.max()) + 1


def future_of(part: Part) -> Tensor:
    """Which keys come after the query, the last query beside the last key."""
    query, key, queries, keys = ranks_of(part)
    return key > query + (keys - queries)


def causal_pattern(part: Part, hidden: Tensor, live: Tensor) -> str:
    """Say which causal mask a pattern is: the right one, or one of the known wrong ones; "" for another pattern.

    With other numbers of queries and keys, a diagonal beside that of the last corner may be that of the first.
    """
    query, key, queries, keys = ranks_of(part)
    if not bool(hidden[live].any()) or queries < 2:
        return ""
    name = pattern_of(~hidden[live], (key - query - (keys - queries))[live])
    return "" if name in OFF_BY_ONE and queries != keys else name


def is_upper_left(part: Part, hidden: Tensor, live: Tensor) -> bool:
    """Whether query i sees keys 0 to i, whatever their numbers, as torch's ``is_causal`` has it."""
    query, key, _, _ = ranks_of(part)
    return bool(hidden[live].any()) and torch.equal(hidden[live], (key > query)[live])


def with_some(may: Tensor, rows: Tensor) -> Tensor:
    """Which scores stand in a row with some key that may be seen."""
    return sum_in(may, rows) > 0


def padded_queries(part: Part, may: Tensor) -> Tensor:
    """The tokens that no query may look at and that are queries themselves: what comes out for them is nobody's.

    Where there are other keys than queries, nothing is padding.
    """
    _, _, queries, keys = ranks_of(part)
    seen = part.table.key[may].unique()
    every = part.table.key.unique()
    return every[~torch.isin(every, seen)] if queries == keys else every[:0]


def hidden_by_formula(part: Part, own: Tensor, may: Tensor | None, pattern: str) -> Tensor:
    """What should be hidden: what is not allowed; the future, where a causal mask is wrong; else what is hidden."""
    if may is not None:
        return ~may
    return future_of(part) if pattern.startswith("causal") else own


def two_levels(model: WeightsModel, where: Tensor) -> float | None:
    """The step between the two numbers that are added to the scores of visible keys; None if it is not two."""
    below = (greatest_in(model.bias, model.rows, where) - model.bias)[where]
    # Next to nothing is a step only where there is no greater one: beside that it is rounding.
    steps = next((found for least in (1e-4, 1e-11) if len(found := below[below > least])), below[:0])
    if not len(steps) or float(steps.max() - steps.min()) > LOOSE * float(steps.max()):
        return None
    return float(steps.mean())


def sum_in(values: Tensor, rows: Tensor) -> Tensor:
    """Give for each number the sum of its row."""
    return torch.zeros(int(rows.max()) + 1, dtype=torch.float64).index_add_(0, rows, values.double())[rows]


def greatest_in(values: Tensor, rows: Tensor, where: Tensor | None = None) -> Tensor:
    """Give for each number the greatest of its row, taken over the places where ``where`` is true, if it is given."""
    best = torch.full((int(rows.max()) + 1,), -torch.inf, dtype=torch.float64)
    where = torch.ones_like(rows, dtype=torch.bool) if where is None else where
    return best.scatter_reduce(0, rows[where], values[where].double(), "amax")[rows]


def spread(x: Tensor, rows: Tensor) -> float:
    """How far apart the numbers of one row are, at most."""
    return float((greatest_in(x, rows) + greatest_in(-x, rows)).max())


def mask_name(part: Part, hidden: Tensor, wanted: Tensor, live: Tensor) -> str:
    """Name the mistake in a mask that hides other keys than it should."""
    if not bool(hidden[live].any()):
        return "mask_never_used"
    if torch.equal(hidden[live], (wanted | future_of(part))[live]) and not torch.equal(wanted[live], hidden[live]):
        return "causal_mask_unasked"
    ruled = live & with_some(wanted, part.table.row)
    if torch.equal(hidden[ruled], ~wanted[ruled]):
        return "mask_inverted"
    query, key, queries, keys = ranks_of(part)
    tokens = part.table.query // max(queries, 1)
    samples = int(tokens.max()) + 1
    table = torch.zeros(samples, queries, keys, dtype=torch.bool)
    table[tokens, query, key] = wanted
    if queries == keys and torch.equal(table.mT[tokens, query, key][live], hidden[live]):
        keyed = bool((table == table[:, :1]).all())
        return "padding_mask_on_queries" if keyed else "mask_transposed"
    if torch.equal(table[:1].expand_as(table)[tokens, query, key][live], hidden[live]):
        return "mask_of_first_sample"
    heads = int(part.table.head.max()) + 1
    for other in ((tokens * heads + part.table.head) % samples, (part.table.head * samples + tokens) // heads):
        if torch.equal(table[other, query, key][live], hidden[live]):
            return "mask_repeated_in_wrong_order"
    return "mask_hides_other_entries"
