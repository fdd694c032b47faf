"""Transformer-XL's relative positions: queries with a bias of their own meet a projected vector of each distance."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.operands import Projection
from equivalence_tests.checker.equivalent.parameters import Parameters, factor_between
from equivalence_tests.checker.equivalent.rotation import Change

NEAR = 1e-5  # of sines in float32
Gradients = list[tuple[Tensor, Tensor]]  # of one score of each head: the parameter elements, and the numbers


@dataclass(frozen=True)
class Relative:
    """What is added to the scores: factor * (query · (weight · vector(query's place - key's place) + bias))."""

    query: Projection  # of those that meet the vectors; the second bias is what these have alone
    weight: Tensor  # the places of the projection of the vectors, (h, d, features)
    table: str  # the argument that holds the vectors
    factor: float = 1.0  # what the products are multiplied by
    backwards: bool = False  # whether the distance is counted from the query to the key
    of_pairs: bool = False  # whether it holds one for each query and key, (q, k, features); else one for each distance
    bias: Tensor | None = None  # the places of what the projection adds, (h, d); None for nothing

    def __call__(self, values: Values, key_len: int) -> Tensor:
        """Give what is added, (b, h, q, k)."""
        query, taken = self.query(values), values.parameters.taken
        bias = None if self.bias is None else taken(self.bias).flatten()
        vectors = F.linear(self.positions(values, query.size(-2), key_len), taken(self.weight).flatten(0, 1), bias)
        vectors = vectors.unflatten(-1, self.weight.shape[:2])
        return self.factor * torch.einsum("bhqd,qkhd->bhqk", query, vectors)

    def positions(self, values: Values, queries: int, keys: int) -> Tensor:
        """Give the vectors of all distances, (q, k, features)."""
        apart, given = torch.arange(queries)[:, None] - torch.arange(keys), values.given[self.table]
        return given if self.of_pairs else given[0, keys - 1 + (-apart if self.backwards else apart)]

    def split(self, query: Projection) -> Projection:
        """Give the queries that meet keys with what only these have added as their second bias."""
        assert query.bias is not None  # it is projected, and so is that of these
        assert self.query.bias is not None
        alone = query.more is None and not torch.equal(query.bias, self.query.bias)
        return replace(query, bias=self.query.bias, more=query.bias if alone else query.more)

    def added(self, query: Projection, parameters: Parameters) -> tuple[list[str], list[str]]:
        """Name what is added to these queries, and to those that meet keys, beside the bias of their projection."""
        none = torch.zeros(0, dtype=torch.long)
        own, here = (parameters.names_at(none if x is None else x) for x in (self.query.bias, self.query.more))
        return here, [name for name in parameters.names_at(query.biases) if name not in own]


def read_relative(
    query: Projection, gradients: Gradients, values: Values, lengths: tuple[int, int], tables: Sequence[str]
) -> Relative | None:
    """Read relative positions off the score of the second query and the first key in each head; None for anything else.

    The gradients are without those of what projects queries and keys; the tables are arguments that may hold vectors.
    """
    matrices, vectors = _by_parameter(gradients, values.parameters, query.weight.shape[1])
    if query.bias is None or query.change != Change() or len(matrices) != 1:
        return None
    ((weight, numbers),) = matrices
    for one in _with_other_biases(query, [places for places, _ in vectors], values.parameters):
        with torch.no_grad():
            met = one.projected(values)[0, :, 1]
        for backwards, table in itertools.product((False, True), tables):
            found = Relative(one, weight, table, 1.0, backwards, len(values.given[table]) > 1)
            wanted = met[..., None] * found.positions(values, lengths[0], lengths[1])[1, 0]
            factor = factor_between(wanted, numbers, NEAR)
            if factor is not None:
                usual = (x for x in (met.size(-1) ** -0.5, 1.0) if abs(factor / x - 1) < NEAR)
                biases = [places for places, of_bias in vectors if factor_between(met, of_bias, NEAR) is not None]
                return replace(found, factor=next(usual, factor), bias=biases[0] if biases else None)
    return None


def _by_parameter(
    gradients: Gradients, parameters: Parameters, width: int
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Take apart what each head is made with: matrices, (h, d, features), and vectors, (h, d), with their gradients."""
    matrices, vectors = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    for name in parameters.names_at(torch.cat([places for places, _ in gradients])):
        every = [(x[kept], y[kept]) for x, y in gradients for kept in [parameters.holds(name, x)]]
        if len({len(x) for x, _ in every}) > 1 or len(every[0][0]) % width:
            return [], []
        places, numbers = (torch.stack(one).view(len(every), width, -1) for one in zip(*every, strict=True))
        if places.size(-1) == 1:
            vectors.append((places[..., 0], numbers[..., 0]))
        else:
            matrices.append((places, numbers))
    return matrices, vectors


def _with_other_biases(query: Projection, vectors: list[Tensor], parameters: Parameters) -> Iterator[Projection]:
    """Give the queries with other vectors in the place of the one that is added to those that meet the keys."""
    assert query.bias is not None  # it is projected
    own, more = query.bias, query.more
    if more is None and not parameters.is_beside(own, query.weight):
        own, more = torch.full_like(own, -1), own
    for other in (None, *vectors, more):
        yield replace(query, bias=own, more=other)
