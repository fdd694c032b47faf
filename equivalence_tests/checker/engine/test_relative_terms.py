"""Scores that get what another query says to relative positions are never equal to torch's."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify


class Skewed(nn.Module):
    """Right: a table of the distances up to a query, skewed, and a causal mask of its own."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.table = nn.Parameter(torch.randn(1024, dim // num_heads))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def rows(self, said: Tensor) -> Tensor:
        length = said.size(-1)
        padded = F.pad(said, (1, 0)).reshape(*said.shape[:-2], length + 1, length)
        return self.kept(padded)

    def kept(self, padded: Tensor) -> Tensor:
        return padded[..., 1:, :]

    def of_positions(self, query: Tensor) -> Tensor:
        return self.rows(query @ self.table[1024 - query.size(-2) :].mT)

    def hidden(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split(project(x)) for project in (self.q, self.k, self.v))
        scores = (query @ key.mT + self.of_positions(query)) / math.sqrt(query.size(-1))
        return self.o((self.hidden(scores).softmax(-1) @ value).transpose(1, 2).flatten(2))


class Seen(Skewed):
    """Nothing hides later keys, which get what the next query says."""

    def hidden(self, scores: Tensor) -> Tensor:
        return scores


class LastRowLeftOut(Skewed):
    def kept(self, padded: Tensor) -> Tensor:
        return padded[..., :-1, :]


class PaddedWithInfinity(Skewed):
    """Right: what skewing leaves the next key is hidden twice."""

    def rows(self, said: Tensor) -> Tensor:
        length = said.size(-1)
        padded = F.pad(said, (1, 0), value=-math.inf).reshape(*said.shape[:-2], length + 1, length)
        return padded[..., 1:, :]


class OfAllDistances(Seen):
    """Right: as many vectors as there are distances, laid out as in Transformer-XL."""

    def of_positions(self, query: Tensor) -> Tensor:
        length = query.size(-2)
        return self.rows(query @ self.table[512 - length : 511 + length].mT)

    def rows(self, said: Tensor) -> Tensor:
        length = said.size(-2)
        return F.pad(said, (1, 0)).flatten(2)[..., length:].unflatten(-1, (length, -1))[..., :length]


class ViewedAnew(OfAllDistances):
    """Cuts the rows off at the wrong end."""

    def rows(self, said: Tensor) -> Tensor:
        length = said.size(-2)
        return F.pad(said, (0, 1)).flatten(2).unflatten(-1, (-1, length))[..., length:, :]


class OfPairs(Seen):
    """Right: a vector for each pair, which the query meets."""

    meeting = "bhqd,qkd->bhqk"

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.table = nn.Parameter(torch.randn(32, 32, dim // num_heads))

    def of_positions(self, query: Tensor) -> Tensor:
        return torch.einsum(self.meeting, query, self.table[: query.size(-2), : query.size(-2)])


class MetByTheKeysPlace(OfPairs):
    meeting = "bhkd,qkd->bhqk"


@pytest.mark.parametrize("right", [Skewed, PaddedWithInfinity, OfAllDistances])
def test_tables_that_are_skewed_rightly_are_equal(right: type) -> None:
    assert verify(right).verdict == "equal"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (LastRowLeftOut, "It differs from torch with the same weights"),
        (Seen, "scores of later keys get what the next query says to other distances"),
        (ViewedAnew, "It differs from torch with the same weights"),
        (MetByTheKeysPlace, "It differs from torch with the same weights"),
    ],
)
def test_what_another_query_says_is_not_equal(wrong: type, said: str) -> None:
    report = verify(wrong)
    assert (report.verdict, report.findings) == ("unchecked", []), str(report)
    assert said in report.reason
