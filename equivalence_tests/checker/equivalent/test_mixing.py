"""Heads whose scores or weights are mixed with one another: talking heads, CaiT, DeepViT."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.helpers_for_tests import changed, line_of, program_of
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix


class Attends(OneMatrix):
    """Mixes nothing."""

    axis = -1

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.before, self.behind = self.made(num_heads), self.made(num_heads)

    def made(self, heads: int) -> Any:
        return None

    def mixed(self, x: Tensor) -> Tensor:
        return x

    def weights(self, x: Tensor) -> Tensor:
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.mixed(self.scores(q, k)).softmax(self.axis)
        return self.weights(weights) @ v


class ByMatrices(Attends):
    def made(self, heads: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(heads, heads))

    def mixed(self, x: Tensor) -> Tensor:
        return torch.einsum("bhqk,hg->bgqk", x, self.before)

    def weights(self, x: Tensor) -> Tensor:
        return torch.einsum("gh,bhqk->bgqk", self.behind, x)


class ByLinearMaps(Attends):
    def made(self, heads: int) -> nn.Module:
        return nn.Linear(heads, heads)

    def mixed(self, x: Tensor) -> Tensor:
        return self.before(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def weights(self, x: Tensor) -> Tensor:
        return self.behind(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ByConvolutionsAndNorms(Attends):
    def made(self, heads: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(heads, heads, 1), nn.BatchNorm2d(heads))

    def weights(self, x: Tensor) -> Tensor:
        return self.behind(self.before(x))


class BySharedMatrix(ByMatrices):
    def weights(self, x: Tensor) -> Tensor:
        return self.mixed(x)


class ByProjection(Attends):
    def weights(self, x: Tensor) -> Tensor:
        return torch.einsum("bhqk,hg->bgqk", x, self.out.weight[: self.heads, : self.heads])


class ByBuffer(Attends):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.register_buffer("mix", torch.randn(num_heads, num_heads))

    def weights(self, x: Tensor) -> Tensor:
        return torch.einsum("bhqk,hg->bgqk", x, self.mix)


class ScalesItsScoresTwice(ByLinearMaps):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x * x.size(1) ** -0.5)


class Causal(ByMatrices):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x).masked_fill(x.new_ones(x.shape[-2:]).triu(1).bool(), -torch.inf)


class CausalWithABias(ByLinearMaps):
    """What its second map adds, it adds to the weights of later keys, too."""

    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x).masked_fill(x.new_ones(x.shape[-2:]).triu(1).bool(), -torch.inf)


class MaskedWithABias(ByLinearMaps):
    """The same with keys that a mask hides."""

    mask: Tensor | None = None

    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x) if self.mask is None else super().mixed(x).masked_fill(self.mask, -1e9)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.mask = None if mask is None else mask[:, None, None] == 0
        return super().forward(x)


@pytest.mark.parametrize("found", [ByMatrices, ByLinearMaps, ByConvolutionsAndNorms, Causal])
def test_heads_may_be_mixed_by_what_is_learnt(found: type[nn.Module]) -> None:
    report = verify(found)
    assert (report.verdict, [one.name for one in report.intended]) == ("equal", ["heads_mixed"]), str(report)
    assert program_of(report)


@pytest.mark.parametrize(
    ("found", "name", "line"),
    [
        (changed(ByMatrices, axis=1), "softmax_over_heads", "weights = self.mixed("),
        (changed(ByConvolutionsAndNorms, axis=-2), "softmax_over_queries", "weights = self.mixed("),
        (ScalesItsScoresTwice, "scale_wrong", "return super().mixed(x * x.size(1) ** -0.5)"),
        (CausalWithABias, "hidden_keys_mixed_in", "return self.behind(x.permute(0, 2, 3, 1))"),
        (MaskedWithABias, "hidden_keys_mixed_in", "return self.behind(x.permute(0, 2, 3, 1))"),
        (ByProjection, "heads_mixed", 'return torch.einsum("bhqk,hg->bgqk", x, self.out.weight['),
        (ByBuffer, "heads_mixed", 'return torch.einsum("bhqk,hg->bgqk", x, self.mix)'),
    ],
)
def test_what_is_wrong_beside_that_or_in_it_is_proven(found: type[nn.Module], name: str, line: str) -> None:
    report = verify(found)
    assert report.mistakes == (name,), str(report)
    assert report.findings[0].is_proven
    assert line in line_of(report.findings[0])


def test_a_matrix_that_mixes_twice_is_no_evidence() -> None:
    assert verify(BySharedMatrix).verdict == "unchecked"
