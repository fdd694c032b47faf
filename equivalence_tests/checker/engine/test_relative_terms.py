"""Scores that get what another query says to relative positions: named, on the line, with a proof."""

import functools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.relative_terms import of_other_queries
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.equivalent import subjects
from equivalence_tests.checker.helpers_for_tests import line_of, proof_holds
from equivalence_tests.checker.zoo.stages import SelfAttention

NAME = "positions_of_another_query"
report_on = functools.cache(verify)  # several tests ask for the same reports


class Skewed(SelfAttention):
    """Right: a table of the distances up to a query, skewed, and a causal mask of its own."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.table = nn.Parameter(torch.randn(1024, dim // num_heads))

    def rows(self, said: Tensor) -> Tensor:
        length = said.size(-1)
        padded = F.pad(said, (1, 0)).reshape(*said.shape[:-2], length + 1, length)
        return self.kept(padded)

    def kept(self, padded: Tensor) -> Tensor:
        return padded[..., 1:, :]

    def scale(self, query: Tensor) -> int:
        return query.size(-1)

    def of_positions(self, query: Tensor) -> Tensor:
        return self.rows(query @ self.table[1024 - query.size(-2) :].mT)

    def hidden(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT + self.of_positions(q)) / math.sqrt(self.scale(q))
        return self.hidden(scores).softmax(-1) @ v


class Seen(Skewed):
    """Nothing hides later keys, which get what the next query says."""

    def hidden(self, scores: Tensor) -> Tensor:
        return scores


class LastRowLeftOut(Skewed):
    def kept(self, padded: Tensor) -> Tensor:
        return padded[..., :-1, :]


class PaddedBehind(Skewed):
    def rows(self, said: Tensor) -> Tensor:
        length = said.size(-1)
        padded = F.pad(said, (0, 1)).reshape(*said.shape[:-2], length + 1, length)
        return self.kept(padded)


class FromTheFirst(Skewed):
    """Reads the first rows of its table, so that a distance has another one at each length."""

    def of_positions(self, query: Tensor) -> Tensor:
        return self.rows(query @ self.table[: query.size(-2)].mT)


class TwiceWrong(LastRowLeftOut):
    def scale(self, query: Tensor) -> int:
        return query.size(-1) * self.heads


class HeadByHead(LastRowLeftOut):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        every = zip(*(x.split(1, 1) for x in (q, k, v)), strict=True)
        return torch.cat([super(HeadByHead, self).attend(*one) for one in every], 1)


class OfAllHeadsAtOnce(LastRowLeftOut):
    """Half of what all heads say to positions is taken apart, for the scores of one head after the other."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        said, outs = self.of_positions(q), []
        for head in range(self.heads):
            scores = q[:, head] @ k[:, head].mT / math.sqrt(self.scale(q)) + 0.5 * said[:, head]
            outs.append(self.hidden(scores[:, None]).softmax(-1)[:, 0] @ v[:, head])
        return torch.stack(outs, 1)


class Across(Skewed):
    """Takes other keys than queries as well, where skewing means nothing."""

    def hidden(self, scores: Tensor) -> Tensor:
        return scores

    def rows(self, said: Tensor) -> Tensor:
        queries, keys = said.shape[-2:]
        return F.pad(said, (1, 0)).reshape(*said.shape[:-2], keys + 1, queries)[..., :-1, :].reshape(said.shape)

    def scale(self, query: Tensor) -> int:
        return query.size(-1) * self.heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.projected(query, key, value)
        said = self.rows(q @ self.table[1024 - k.size(-2) :].mT)
        return self.finish(((q @ k.mT + said) / math.sqrt(self.scale(q))).softmax(-1) @ v)


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


class OfAllPairsAtOnce(MetByTheKeysPlace, OfAllHeadsAtOnce):
    """The same, taken apart for the scores of each head."""


class OfKeys(OfPairs):
    """Right: the key meets the vector, and no query does."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split(project(x)) for project in (self.q, self.k, self.v))
        pairs = self.table[: x.size(1), : x.size(1)]
        scores = (query @ key.mT + torch.einsum("bhkd,qkd->bhqk", key, pairs)) / math.sqrt(query.size(-1))
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class OfSharedQueries(OfPairs):
    """The key meets the vector; keys are the queries."""

    meeting = "bhkd,qkd->bhqk"

    def forward(self, x: Tensor) -> Tensor:
        query, value = self.split(self.q(x)), self.split(self.v(x))
        scores = (query @ query.mT + self.of_positions(query)) / math.sqrt(query.size(-1))
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Sinusoids(Skewed):
    """Right beside a causal mask that is handed over: Transformer-XL's sinusoids up to the farthest key."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.table = nn.Parameter(torch.randn(dim, dim // num_heads))

    def of_positions(self, query: Tensor) -> Tensor:
        steps = 10_000 ** (-torch.arange(0, len(self.table), 2, dtype=query.dtype) / len(self.table))
        angles = self.places(query.size(-2)).to(query)[:, None] * steps
        return self.rows(query @ (torch.cat([angles.sin(), angles.cos()], -1) @ self.table).mT)

    def places(self, length: int) -> Tensor:
        return torch.arange(length - 1, -1, -1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (self.split(project(x)) for project in (self.q, self.k, self.v))
        scores = (query @ key.mT + self.of_positions(query)) / math.sqrt(query.size(-1))
        scores = scores if mask is None else self.masked(scores, mask)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None], -math.inf)


class SinusoidsFromTheStart(Sinusoids):
    """A conformer's: the sinusoid of a distance is another one for each length, so that no mask makes it right."""

    def places(self, length: int) -> Tensor:
        return torch.arange(length)


class SinusoidsBesidePadding(Sinusoids):
    """Its mask hides keys from all queries, and no later ones."""

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, key_padding_mask)

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None, None], -math.inf)


class HandedOver(OfAllDistances):
    """Right where a vector for each distance is handed over, which the name of the argument does not say."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.far = nn.Linear(dim, dim)

    def forward(self, x: Tensor, rel: Tensor) -> Tensor:  # type: ignore[override]
        query, key, value = (self.split(project(x)) for project in (self.q, self.k, self.v))
        scores = (query @ key.mT + self.rows(query @ self.split(self.far(rel)).mT)) / math.sqrt(query.size(-1))
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("wrong", "line", "said"),
    [
        (LastRowLeftOut, "padded[..., :-1, :]", "the score of query 1 and key 0 gets that of query 0"),
        (PaddedBehind, "padded[..., 1:, :]", "the score of query 0 and key 0 gets what the rows were padded with"),
        (Seen, "padded[..., 1:, :]", "the score of query 0 and key 2 gets that of query 1"),
        (ViewedAnew, "[..., length:, :]", "the score of query 0 and key 0 gets that of query 2"),
        (MetByTheKeysPlace, "torch.einsum(self.meeting", "the score of query 1 and key 0 gets that of query 0"),
        (HeadByHead, "padded[..., :-1, :]", "the score of query 1 and key 0 gets that of query 0"),
        (SinusoidsFromTheStart, "padded[..., 1:, :]", "the score of query 0 and key 2 gets that of query 1"),
        (SinusoidsBesidePadding, "padded[..., 1:, :]", "the score of query 0 and key 2 gets that of query 1"),
    ],
)
def test_what_another_query_says_is_named_on_its_line_with_a_proof(wrong: type, line: str, said: str) -> None:
    report = report_on(wrong)
    assert (report.verdict, report.mistakes) == ("deviates", (NAME,)), str(report)
    (finding,) = report.findings
    assert proof_holds(finding)
    assert line in line_of(finding)
    assert said in finding.sentence


def test_a_distance_that_has_another_vector_in_a_longer_call_is_named_on_the_line_that_takes_it() -> None:
    (finding,) = report_on(FromTheFirst).findings
    assert finding.name == "positions_by_length"
    assert "is that of the key 3 before it in a call of 8." in finding.evidence
    assert finding.line is not None
    assert "self.table[: query.size(-2)]" in finding.line.text


def test_it_is_put_right_in_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Departure] = []

    def kept(situation: Situation) -> list[Departure]:
        found.extend(of_other_queries(situation))
        return found

    monkeypatch.setattr(subjects, "of_other_queries", kept)
    for wrong in (HeadByHead, OfAllHeadsAtOnce):
        found.clear()
        assert verify(wrong).verdict == "deviates"
        assert len(found[0].patches) == 3


@pytest.mark.parametrize("wrong", [TwiceWrong, Across])
def test_a_wrong_scale_is_proven_beside_it(wrong: type) -> None:
    report = report_on(wrong)
    assert [finding.name for finding in report.findings] == ["scale_wrong", NAME], str(report)
    assert all(finding.proof is not None and finding.proof.holds for finding in report.findings)


@pytest.mark.parametrize("right", [Skewed, OfAllDistances, OfPairs, OfKeys, OfSharedQueries, Sinusoids, HandedOver])
def test_what_its_own_query_or_a_key_says_is_not_accused(right: type) -> None:
    report = report_on(right)
    suspected = {finding.name for finding in (*report.findings, *report.suspected)}
    assert NAME not in suspected, str(report)


@pytest.mark.parametrize("right", [Skewed, PaddedWithInfinity, OfAllDistances])
def test_tables_that_are_skewed_rightly_are_equal(right: type) -> None:
    assert report_on(right).verdict == "equal"


@pytest.mark.parametrize("wrong", [MetByTheKeysPlace, OfAllPairsAtOnce])
def test_vectors_of_pairs_are_not_skewed(wrong: type) -> None:
    assert report_on(wrong).findings[0].fix.startswith("Multiply each query by its own vectors")


def test_a_mask_that_does_not_help_is_said_not_to() -> None:
    assert "Hiding later keys is not enough" in report_on(SinusoidsFromTheStart).findings[0].fix
    assert report_on(SinusoidsBesidePadding).findings[0].fix.endswith("or hide later keys.")
