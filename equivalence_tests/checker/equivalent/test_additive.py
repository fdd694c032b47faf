"""Additive attention, as a decoder looks back with it at what an encoder gave."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.verify import verify


class Adds(nn.Module):
    """(batch, queries, features) and (batch, keys, features)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.of_query, self.of_key = nn.Linear(hidden_size, 11), nn.Linear(hidden_size, 11, bias=False)
        self.energy = nn.Linear(11, 1)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        both = self.of_query(queries)[:, :, None] + self.of_key(keys)[:, None]
        return self.energy(both.tanh()).squeeze(-1)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.scores(queries, keys)
        return (scores if mask is None else scores.masked_fill(mask == 0, -1e9)).softmax(-1) @ values


class Joins(nn.Module):
    """One state of a decoder, (batch, features), and all of an encoder, (len, batch, features)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.joined, self.v = nn.Linear(2 * hidden_size, hidden_size), nn.Parameter(torch.ones(hidden_size))

    def weights(self, hidden: Tensor, encoder_outputs: Tensor) -> Tensor:
        both = torch.cat((encoder_outputs, hidden.expand_as(encoder_outputs)), -1)
        return torch.sum(self.v * self.joined(both).tanh(), -1).t().softmax(1)  # (batch, len)

    def forward(self, hidden: Tensor, encoder_outputs: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights(hidden, encoder_outputs)
        return torch.einsum("bk,kbe->be", weights, encoder_outputs), weights


class JoinsForWeights(Joins):
    def forward(self, hidden: Tensor, encoder_outputs: Tensor) -> Tensor:  # type: ignore[override]
        return self.weights(hidden, encoder_outputs)


@pytest.mark.parametrize("right", [Adds, Joins, JoinsForWeights])
def test_additive_attention_is_compared_with_a_program_of_its_layers(right: Any) -> None:
    report = verify(right)
    assert (report.verdict, report.kind, report.not_exercised) == ("equal", "additive attention", []), str(report)
    assert [one.name for one in report.intended] == ["scores_of_its_own"]


def test_the_program_runs_with_the_users_weights_and_gives_them_back() -> None:
    report, theirs = verify(Adds), Adds(33)
    assert report.equivalent is not None
    ours, mask = report.equivalent.of(theirs), torch.rand(2, 3, 7) > 0.3
    given = torch.randn(2, 3, 33), torch.randn(2, 7, 33), torch.randn(2, 7, 33)
    mask[..., 0] = True
    torch.testing.assert_close(ours(*given, mask), theirs(*given, mask))
    other = copy.deepcopy(theirs)
    other.load_state_dict(report.equivalent.to_theirs(ours.state_dict(), other.state_dict()))
    torch.testing.assert_close(other(*given), theirs(*given))


class AddsWithoutTanh(Adds):
    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        both = self.of_query(queries)[:, :, None] + self.of_key(keys)[:, None]
        return self.energy(both.relu()).squeeze(-1)


class AddsOverQueries(Adds):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.scores(queries, keys).softmax(1) @ values


class AddsAndHidesTooLate(Adds):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.scores(queries, keys).softmax(-1)
        return (weights if mask is None else weights.masked_fill(mask == 0, 0.0)) @ values


class JoinsAndReturnsNoWeights(Joins):
    def forward(self, hidden: Tensor, encoder_outputs: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = super().forward(hidden, encoder_outputs)
        return output, weights.square()


class AddsAndDropsScores(Adds):
    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        return nn.functional.dropout(super().scores(queries, keys), 0.5, self.training)


@pytest.mark.parametrize("other", [AddsWithoutTanh, AddsOverQueries])
def test_what_is_no_such_program_could_not_be_checked(other: Any) -> None:
    report = verify(other)
    assert report.verdict == "unchecked", str(report)
    assert "additive attention" in report.reason


@pytest.mark.parametrize(
    ("other", "what"),
    [(AddsAndHidesTooLate, "mask"), (JoinsAndReturnsNoWeights, "output 2"), (AddsAndDropsScores, "training")],
)
def test_what_the_program_does_not_give_is_listed(other: Any, what: str) -> None:
    report = verify(other)
    assert (report.verdict, [one.what for one in report.not_exercised]) == ("partial", [what]), str(report)
