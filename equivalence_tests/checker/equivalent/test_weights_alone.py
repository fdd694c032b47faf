"""Modules and functions that return the weights of an attention, and nothing else."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.verify import verify


class LooksBack(nn.Module):
    """One state of a decoder, (1, batch, features), asks all of an encoder, (len, batch, features)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.projects = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, encoder_outputs: Tensor) -> Tensor:
        return self.energies(hidden, encoder_outputs).t().softmax(1).unsqueeze(1)

    def energies(self, hidden: Tensor, encoder_outputs: Tensor) -> Tensor:
        return torch.sum(hidden * self.projects(encoder_outputs), dim=2)


class AttnOverSamples(LooksBack):
    def forward(self, hidden: Tensor, encoder_outputs: Tensor) -> Tensor:
        return self.energies(hidden, encoder_outputs).t().softmax(0).unsqueeze(1)


class OfHeads(nn.Module):
    """(batch, heads, query, key)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.to_q, self.to_k = num_heads, nn.Linear(dim, dim), nn.Linear(dim, dim)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        pairs = (self.to_q, query), (self.to_k, key)
        q, k = (project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for project, x in pairs)
        return q @ k.mT / q.size(-1) ** 0.5

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.scores(query, key)
        return (scores if mask is None else scores.masked_fill(mask == 0, -torch.inf)).softmax(-1)


class OfHeadsBehindQueries(OfHeads):
    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(query, key, mask).transpose(1, 2)


class AttentionMaskedTooLate(OfHeads):
    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.scores(query, key).softmax(-1)
        return weights if mask is None else weights.masked_fill(mask == 0, 0.0)


def weights_of(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) / query.size(-1) ** 0.5
    return scores.masked_fill(mask == 0, -torch.inf).softmax(-1)


def attention_of_queries(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) / query.size(-1) ** 0.5).softmax(-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("right", [LooksBack, OfHeads, OfHeadsBehindQueries, weights_of])
def test_weights_that_come_back_alone_are_compared_with_torch(right: Any) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)
    assert report.equivalent is not None
    assert not report.equivalent.source  # which would return something else
    assert "returns the weights alone" in " ".join(report.notes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (AttnOverSamples, "softmax_over_batch"),
        (AttentionMaskedTooLate, "mask_after_softmax"),
        (attention_of_queries, "softmax_over_queries"),
    ],
)
def test_wrong_weights_that_come_back_alone_are_named(wrong: Callable[..., Any], name: str) -> None:
    report = verify(wrong)
    assert report.mistakes == (name,), str(report)
    assert all(one.is_proven for one in report.findings)


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-2, -1) / query.size(-1) ** 0.5


def matches(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1)).softmax(-1)  # unscaled, as in contrastive losses


class Affinities(OfHeads):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:  # type: ignore[override]
        return self.scores(query, key).sigmoid()


class CannotBeCopied(Affinities):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.lock = threading.Lock()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("other", [scores_of, matches, Affinities, CannotBeCopied])
def test_what_comes_back_and_is_not_called_attention_or_is_no_weights_is_not_accused(other: Any) -> None:
    report = verify(other)
    assert (report.verdict, report.findings) == ("unchecked", []), str(report)
    assert "The check stopped" not in report.reason


class ByMethod(LooksBack):
    """With one of its options it joins the features of queries and keys, and what it makes of them is no product."""

    def __init__(self, hidden_size: int, method: str = "general") -> None:
        super().__init__(hidden_size)
        if method == "concat":
            self.projects, self.v = nn.Linear(2 * hidden_size, hidden_size), nn.Parameter(torch.ones(hidden_size))
        self.method = method

    def energies(self, hidden: Tensor, encoder_outputs: Tensor) -> Tensor:
        if self.method == "concat":
            joined = torch.cat((hidden.expand(len(encoder_outputs), -1, -1), encoder_outputs), 2)
            return torch.sum(self.v * self.projects(joined), dim=2)
        return super().energies(hidden, encoder_outputs)


class ByMethods(ByMethod):
    def energies(self, hidden: Tensor, encoder_outputs: Tensor) -> Tensor:
        if self.method == "concat":
            joined = torch.cat((hidden.expand(len(encoder_outputs), -1, -1), encoder_outputs), 2)
            return torch.sum(self.v * self.projects(joined).tanh(), dim=2)
        return super().energies(hidden, encoder_outputs)


def test_an_option_that_makes_it_additive_attention_is_compared_as_such() -> None:
    report = verify(ByMethods)
    assert (report.verdict, report.not_exercised) == ("equal", []), str(report)
    assert "scores_of_its_own" in [one.name for one in report.intended]


def test_an_option_with_which_no_product_makes_the_scores_is_not_run() -> None:
    report = verify(ByMethod)
    assert [one.what for one in report.not_exercised] == ["method=concat"], str(report)
    assert "concatenates queries and keys" in report.not_exercised[0].detail
