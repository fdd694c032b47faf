"""Transformer-XL's relative positions, where the caller hands the vectors of all distances over, as in a Conformer."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.helpers_for_tests import line_of, proof_holds
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import SelfAttention


class OfDistances(SelfAttention):
    """Right: takes (1, 2 len - 1, features), from the farthest key ahead to the farthest behind or back."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.positions = nn.Linear(dim, dim)
        self.of_keys, self.of_distances = (nn.Parameter(torch.zeros(num_heads, 1, dim // num_heads)) for _ in range(2))

    def shifted(self, said: Tensor) -> Tensor:
        length = said.size(-2)
        return F.pad(said, (1, 0)).flatten(2)[..., length:].unflatten(-1, (length, -1))[..., :length]

    def of_positions(self, query: Tensor, pos_emb: Tensor) -> Tensor:
        return self.shifted((query + self.of_distances) @ self.split(self.positions(pos_emb)).mT)

    def forward(self, x: Tensor, pos_emb: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        query, key, value = self.operands(x)
        scores = (query + self.of_keys) @ key.mT + self.of_positions(query, pos_emb)
        scores = scores / math.sqrt(query.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
        return self.finish(scores.softmax(-1) @ value)


class OfPairs(OfDistances):
    """Right: takes a vector for each query and key, (len, len, features)."""

    meeting = "bhqd,qkhd->bhqk"

    def of_positions(self, query: Tensor, pos_emb: Tensor) -> Tensor:
        vectors = self.positions(pos_emb).unflatten(-1, (self.heads, -1))
        return torch.einsum(self.meeting, query + self.of_distances, vectors)


class OfThree(OfDistances):
    """Right: takes queries, keys and values apart, and (batch, 2 len - 1, features)."""

    def of_positions(self, query: Tensor, pos_emb: Tensor) -> Tensor:
        vectors = self.positions(pos_emb).view(len(query), -1, self.heads, query.size(-1)).transpose(1, 2)
        return self.shifted((query + self.of_distances) @ vectors.mT)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pos_embedding: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.projected(query, key, value)
        scores = ((q + self.of_keys) @ k.mT + self.of_positions(q, pos_embedding)) / math.sqrt(q.size(-1))
        return self.finish(scores.softmax(-1) @ v)


class OfTheFirst(OfDistances):
    """Takes the first vectors, whatever the distance is."""

    def shifted(self, said: Tensor) -> Tensor:
        return said[..., : said.size(-2)]


class OfTheLast(OfDistances):
    """Cuts the rows off at the wrong end."""

    def shifted(self, said: Tensor) -> Tensor:
        length = said.size(-2)
        return F.pad(said, (0, 1)).flatten(2).unflatten(-1, (-1, length))[..., length:, :]


class OfTheLastColumns(OfDistances):
    """Has vectors for later keys, and keeps the wrong columns, so that no mask is an excuse."""

    def shifted(self, said: Tensor) -> Tensor:
        length = said.size(-2)
        return F.pad(said, (1, 0)).flatten(2)[..., length:].unflatten(-1, (length, -1))[..., -length:]


class MetByTheKey(OfPairs):
    """What stands at the place of the key meets the vectors."""

    meeting = "bhkd,qkhd->bhqk"


@pytest.mark.parametrize("made", [OfDistances, OfPairs])
def test_relative_positions_that_are_handed_over_are_read(made: type[OfDistances]) -> None:
    report = verify(made)
    assert (report.verdict, report.mistakes) == ("equal", ())
    assert report.equivalent is not None
    assert any("Transformer-XL's relative positions" in reason for _, reason in report.equivalent.steps)
    module = made(33, 3).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 7, 33, dtype=torch.float64)
    table = torch.randn((7, 7, 33) if made is OfPairs else (1, 13, 33), dtype=torch.float64)
    torch.testing.assert_close(report.equivalent.of(module)(x, table), module(x, table))


def test_vectors_of_distances_may_be_given_for_each_sample() -> None:
    report = verify(OfThree)
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)
    assert report.equivalent is not None
    module = OfThree(33, 3).double()
    x, table = torch.randn(3, 7, 33, dtype=torch.float64), torch.randn(3, 13, 33, dtype=torch.float64)
    torch.testing.assert_close(report.equivalent.of(module)(x, x, x, table), module(x, x, x, table))


def test_what_is_said_to_another_distance_is_not_equal() -> None:
    report = verify(OfTheFirst)
    assert report.verdict == "unchecked"
    assert "It differs from torch with the same weights" in report.reason


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (OfTheLast, "[..., length:, :]"),
        (OfTheLastColumns, "[..., -length:]"),
        (MetByTheKey, "torch.einsum(self.meeting"),
    ],
)
def test_what_another_query_says_is_named(made: type[OfDistances], line: str) -> None:
    (finding,) = verify(made).findings
    assert finding.name == "positions_of_another_query"
    assert proof_holds(finding)
    assert line in line_of(finding)
