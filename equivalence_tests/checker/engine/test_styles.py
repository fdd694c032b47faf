"""What libraries do that torch's attention does not, each style in a small class of our own, judged by one call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine import diagnose_call
from equivalence_tests.checker.report import Report
from equivalence_tests.checker.state import preserved_global_state

WIDTH, HEADS = 12, 3


def judged(target: type[nn.Module], *more: Tensor, length: int = 5) -> Report:
    """Judge one call of a class with parameters off their first values."""
    with preserved_global_state():
        torch.manual_seed(0)
        module = target().double().eval()
        for parameter in module.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
        found: list[Report] = diagnose_call(module, (torch.randn(2, length, WIDTH).double(), *more))
    assert len(found) == 1
    return found[0]


class Base(nn.Module):
    """Attention of a sequence with itself, whose stages the classes below replace."""

    scale: Any = (WIDTH // HEADS) ** -0.5

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return (self.weigh(q @ k.mT * self.scale) @ v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attend(x))


class TwoStreams(Base):
    """Tokens of a text, with projections of their own, before those of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.text_q, self.text_k, self.text_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]
        own = self.operands(x)
        texts = (self.split(project(text)) for project in (self.text_q, self.text_k, self.text_v))
        q, k, v = (torch.cat(pair, 2) for pair in zip(texts, own, strict=True))
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o_proj(context[:, text.size(1) :])


def test_two_streams_may_be_joined() -> None:
    assert judged(TwoStreams, torch.randn(2, 4, WIDTH).double()).verdict == "equal"


class TurnedByMatrices(Base):
    """Positions as matrices of two by two, multiplied and summed."""

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
        rows = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
        return (x.reshape(*x.shape[:-1], -1, 1, 2) * rows).sum(5).flatten(3)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.turned(q), self.turned(k), v


def test_positions_may_be_turned_by_matrices() -> None:
    report = judged(TurnedByMatrices)
    assert (report.verdict, [finding.name for finding in report.meant]) == ("equal", ["rotary_positions"])


class LearntScales(Base):
    """Cosines of queries and keys, each head with a scale that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])[:, None, None])
        self.table = nn.Parameter(torch.zeros(HEADS, 5, 5))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v

    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores * self.logit_scale.exp() + self.table)


class LearntScalesOnTheValues(LearntScales):
    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores) * 1.3


def test_each_head_may_have_a_scale_that_is_trained() -> None:
    report = judged(LearntScales)
    assert report.verdict == "equal"
    assert {finding.name for finding in report.meant} >= {"scale_differs_by_head", "bias_added"}
    assert judged(LearntScalesOnTheValues).mistakes == ("weights_scaled",)


class UnevenScales(Base):
    """Heads with different scales, and nothing that says why."""

    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores * torch.tensor([1.0, 2.0, 3.0])[:, None, None])


def test_heads_with_different_scales_deviate() -> None:
    assert judged(UnevenScales).mistakes == ("scale_differs_by_head",)


def test_a_single_key_says_nothing_about_scale_and_softmax() -> None:
    report = judged(Base, length=1)
    assert (report.verdict, report.mistakes) == ("partial", ())
    assert [exercise.what for exercise in report.not_exercised] == ["scale, mask and softmax"]


class TurnedAndScaled(Base):
    """Angles that carry a scale of their own, as for longer contexts than were trained."""

    scale = 1.0

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype).repeat(2)
        one, two = x.chunk(2, -1)
        return (x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()) * 1.25 * (WIDTH // HEADS) ** -0.25

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.turned(q), self.turned(k), v


class ScaledTables(TurnedAndScaled):
    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype).repeat(2)
        cos, sin = angle.cos() * 1.25, angle.sin() * 1.25
        one, two = x.chunk(2, -1)
        return (x * cos + torch.cat([-two, one], -1) * sin) * (WIDTH // HEADS) ** -0.25


def test_the_tables_of_a_rotation_may_carry_a_scale() -> None:
    report = judged(ScaledTables)
    assert (report.verdict, [finding.name for finding in report.meant]) == (
        "equal",
        ["scale_other", "rotary_positions"],
    )
    assert judged(TurnedAndScaled).mistakes == ("scale_other",)


class DropsBias(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(F.linear(x, self.v_proj.weight))


@pytest.mark.parametrize(("target", "name"), [(Base, ()), (DropsBias, ("value_bias_dropped",))])
def test_weights_that_lie_idle_are_told(target: type[nn.Module], name: tuple[str, ...]) -> None:
    assert judged(target).mistakes == name


class PooledQueries(Base):
    """Every two queries make one, as between the stages of a vision model."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q.unflatten(2, (-1, 2)).amax(3), k, v


class PooledImages(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pooled = F.avg_pool1d(x.mT, 2).mT
        return self.split(self.q_proj(x)), self.split(self.k_proj(pooled)), self.split(self.v_proj(pooled))


class MergesPooledWithoutTranspose(PooledQueries):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        context = self.weigh(q @ k.mT * self.scale) @ v
        return context.reshape(context.size(0), context.size(2), -1)


@pytest.mark.parametrize("target", [PooledQueries, PooledImages])
def test_tokens_may_be_pooled(target: type[nn.Module]) -> None:
    assert judged(target, length=6).verdict == "equal"


def test_pooled_tokens_are_followed_to_the_end() -> None:
    assert judged(MergesPooledWithoutTranspose, length=6).mistakes == ("heads_merged_without_transpose",)
