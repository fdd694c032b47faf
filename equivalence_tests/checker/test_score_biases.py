"""verify on attention that adds a bias of its own to the scores: by distance, or from a table."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.equivalent.biases import Bias
from equivalence_tests.checker.helpers_for_tests import changed, line_of
from equivalence_tests.checker.zoo.stages import SelfAttention


class Distant(SelfAttention):
    """Right: a straight line for each head (ALiBi)."""

    def bias(self, x: Tensor) -> Tensor:
        position = torch.arange(x.size(-2)).to(x)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1).to(x)
        return -slopes[:, None, None] * (position[:, None] - position).abs()

    def scale(self, q: Tensor) -> float:
        return float(q.size(-1)) ** -0.5

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT * self.scale(q) + self.bias(q)).softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weights(q, k) @ v


class Table(Distant):
    """Right: a learned number for each distance and head (T5), beside a causal mask."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.relative_bias = nn.Embedding(9, heads)

    def bias(self, x: Tensor) -> Tensor:
        position = torch.arange(x.size(-2), device=x.device)
        distance = (position[:, None] - position).clamp(-4, 4) + 4
        future = position[:, None] < position
        return self.relative_bias(distance).permute(2, 0, 1).masked_fill(future, -math.inf)


class Fused(Distant):
    """Right: the fused kernel adds the bias."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(q))


class Unscaled(Table):
    def scale(self, q: Tensor) -> float:
        return 1.0


class OverQueries(Distant):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT * self.scale(q) + self.bias(q)).softmax(-2)


class AfterTheSoftmax(Distant):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT * self.scale(q)).softmax(-1) + self.bias(q)


class AddsItsMask(Distant):
    """A causal mask of ones and zeros, added: no bias that anybody would want."""

    def bias(self, x: Tensor) -> Tensor:
        return torch.ones(x.size(-2), x.size(-2), dtype=x.dtype).tril()


class Backwards(Table):
    """T5's distances with the wrong sign, so that all keys that are seen share one number."""

    def bias(self, x: Tensor) -> Tensor:
        position = torch.arange(x.size(-2), device=x.device)
        return self.relative_bias((position - position[:, None]).clamp(0, 8)).permute(2, 0, 1)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT * self.scale(q) + self.bias(q)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1)


class WrongSide(Distant):
    """ALiBi that counts distances in the future, which is hidden."""

    def bias(self, x: Tensor) -> Tensor:
        position = torch.arange(x.size(-2)).to(x)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1).to(x)
        return -slopes[:, None, None] * (position - position[:, None]).clamp(min=0)

    def future(self, x: Tensor) -> Tensor:
        return x.new_ones(x.size(-2), x.size(-2)).triu(1).bool()

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT * self.scale(q)
        return self.hidden(scores, self.bias(q), self.future(q)).softmax(-1)

    def hidden(self, scores: Tensor, bias: Tensor, future: Tensor) -> Tensor:
        return (scores + bias).masked_fill(future, -math.inf)


class WrongSideOfTheMask(WrongSide):
    """The same, added together with the mask."""

    def hidden(self, scores: Tensor, bias: Tensor, future: Tensor) -> Tensor:
        return scores + bias.masked_fill(future, -1e9)


class RightSide(WrongSideOfTheMask):
    """Right: distances of the past."""

    def bias(self, x: Tensor) -> Tensor:
        return super().bias(x).mT


class OfTheQuery(Distant):
    """A number for each query, which the softmax takes away."""

    def bias(self, x: Tensor) -> Tensor:
        return super().bias(x)[..., :1]


class KeptSlopesOfTheWrongSign(Distant):
    """Far keys are favoured; first query beside first key, however many there are of each."""

    slopes: Tensor

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        distance = (torch.arange(q.size(2))[:, None] - torch.arange(k.size(2))).abs()
        return (q @ k.mT * self.scale(q) + self.slopes[:, None, None] * distance).softmax(-1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return self.attended(query, key, value)


class OverAGrid(Distant):
    """Right: ALiBi between the patches of an image behind a class token, from a buffer."""

    table: Tensor
    sign = -1.0

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        places = torch.tensor([(row, column) for row in range(2) for column in range(4)]).float()
        far = F.pad((places[:, None] - places).square().sum(-1).sqrt(), (1, 0, 1, 0))
        self.register_buffer("table", self.sign * 2.0 ** -torch.arange(1, heads + 1)[:, None, None] * far)

    def bias(self, x: Tensor) -> Tensor:
        return self.table


class Near(Distant):
    """A mask of its own, which nothing but its author knows to be right."""

    def bias(self, x: Tensor) -> Tensor:
        position = torch.arange(x.size(-2), device=x.device)
        far = (position[:, None] - position).abs() > 1
        return torch.zeros_like(far, dtype=x.dtype).masked_fill(far, -math.inf)


class MetByQueries(Distant):
    """Right: queries meet a vector for each distance (Shaw)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.distances = nn.Embedding(21, dim // heads)

    def rows(self, x: Tensor) -> Tensor:
        position = torch.arange(x.size(-2), device=x.device)
        return self.distances((position[:, None] - position).clamp(-10, 10) + 10)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        met = torch.einsum("bhid,ijd->bhij", q, self.rows(q))
        return ((q @ k.mT + met) * self.scale(q)).softmax(-1)


class Skewed(Distant):
    """Right beside a causal mask: Huang's skewing, which leaves later keys what the next query says."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.table = nn.Embedding(64, dim // heads)

    def rows(self, length: int) -> Tensor:
        return self.table(torch.arange(64 - length, 64, device=self.table.weight.device))

    def skewed(self, scores: Tensor, pad: tuple[int, int] = (1, 0)) -> Tensor:
        queries, keys = scores.shape[-2:]
        return F.pad(scores, pad).reshape(*scores.shape[:-2], keys + 1, queries)[..., 1:, :].reshape(scores.shape)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.operands(x)
        scores = (q @ k.mT + self.skewed(q @ self.rows(x.size(-2)).mT)) * self.scale(q)
        scores = scores if mask is None else scores.masked_fill(mask[:, None], -math.inf)
        return self.finish(scores.softmax(-1) @ v)


class SkewedFromTheStart(Skewed):
    def rows(self, length: int) -> Tensor:
        return self.table(torch.arange(length))


class SkewedWithoutMask(Skewed):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class SkewedToTheOtherSide(Skewed):
    def skewed(self, scores: Tensor, pad: tuple[int, int] = (0, 1)) -> Tensor:
        return super().skewed(scores, pad)


@pytest.mark.parametrize("right", [Distant, Table, Fused, RightSide])
def test_a_bias_by_position_is_taken_as_it_is(right: Callable[..., Any]) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)
    assert ("scores", "a bias by position is added") in {row[:2] for row in report.conventions}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (changed(OverAGrid, sign=1.0), "bias_grows_with_distance"),
        (Unscaled, "scale_missing"),
        (OverQueries, "softmax_over_queries"),
        (AfterTheSoftmax, "changed_by_add"),
        (Backwards, "bias_never_used"),
        (WrongSide, "bias_without_effect"),
        (WrongSideOfTheMask, "bias_without_effect"),
        (OfTheQuery, "changed_by_getitem"),
        (KeptSlopesOfTheWrongSign, "bias_grows_with_distance"),
    ],
)
def test_mistakes_beside_a_bias_are_named(broken: Callable[..., Any], name: str) -> None:
    report = verify(broken)
    assert report.mistakes == (name,), str(report)


def test_slopes_fall_between_the_patches_of_an_image() -> None:
    report = verify(OverAGrid(12, 3))
    assert report.verdict == "equal", str(report)
    assert "in a grid of 2 x 4 patches behind 1 other times a slope" in " ".join(str(report).split())
    table = OverAGrid(12, 3)
    table.table *= 2
    assert verify(table).verdict == "unchecked"


def test_queries_may_meet_a_vector_for_each_distance() -> None:
    module, x = MetByQueries(12, 3).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    report = verify(module)
    assert report.verdict == "equal", str(report)
    assert report.equivalent is not None
    assert torch.allclose(report.equivalent.of(module)(x), module(x), atol=1e-12)
    assert "distances.weight, a vector for each distance" in " ".join(str(report).split())


def test_skewed_products_are_of_distances_up_to_the_query() -> None:
    report = verify(Skewed(8, 2))
    assert report.verdict == "equal", str(report)
    assert (
        "scores of later keys get what the next query says to other distances. Intended: mask is there to hide them"
        in " ".join(str(report).split())
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrong", [SkewedFromTheStart, SkewedWithoutMask, SkewedToTheOtherSide])
def test_skewed_products_that_are_of_no_distance_are_not_called_right(wrong: Callable[..., Any]) -> None:
    assert verify(wrong(8, 2)).verdict != "equal"


def test_rows_that_are_not_shifted_are_of_no_distance() -> None:
    position = torch.arange(5)
    distance, place = position[:, None] - position + 4, position.expand(5, 5)
    assert Bias(learnt=distance.expand(3, 5, 5)[..., None], meets=True).is_of_distance
    assert not Bias(learnt=place.expand(3, 5, 5)[..., None], meets=True).is_of_distance


def test_what_is_added_to_weights_has_its_line() -> None:
    (finding,) = verify(AfterTheSoftmax).findings
    assert "+ self.bias(q)" in line_of(finding)


def test_a_mask_that_is_added_is_no_bias() -> None:
    report = verify(AddsItsMask)
    assert report.verdict == "deviates"
    assert all("bias by position" not in theirs for _, theirs, _ in report.conventions), str(report)


def test_a_mask_of_its_own_is_not_called_right() -> None:
    report = verify(Near)
    assert report.verdict == "unchecked"
    assert "a query sees keys at distances from -1 to 1 only" in report.reason
    assert "the keys that it hides by itself" in {exercise.what for exercise in report.not_exercised}


class OfTwoProducts(Distant):
    """Scores of two products side by side, of which more are biased than either has."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        (q, k, v), (_, more, of_more) = self.operands(x), self.operands(y)
        scores = torch.cat([q @ k.mT, q @ more.mT], -1) * self.scale(q)
        bias = torch.arange(scores.size(-1), dtype=x.dtype)
        first, second = (scores - bias).softmax(-1).split([k.size(2), more.size(2)], -1)
        return self.finish(first @ v + second @ of_more)


def test_a_bias_of_two_products_side_by_side_is_followed_to_each() -> None:
    reports = verify(OfTwoProducts(12, 3), inputs=(torch.randn(2, 5, 12), torch.randn(2, 3, 12)))
    assert all("check stopped" not in report.reason for report in reports), reports
