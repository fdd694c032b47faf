"""A layer that calls the norms that its sub-modules hold."""

from typing import Any

import pytest
from torch import Tensor, nn

from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix


class Attention(OneMatrix):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(dim), nn.ReLU()
        self.into, self.out = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.into(x)))


class PreNormLayer(nn.Module):
    """Right."""

    def __init__(self, dim: int, heads: int, hidden_dim: int) -> None:
        super().__init__()
        self.attn, self.ff = Attention(dim, heads), FeedForward(dim, hidden_dim)

    def residual(self, x: Tensor, sub: Any) -> Tensor:
        return x + sub(sub.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(self.residual(x, self.attn), self.ff)


class PostNormLayer(PreNormLayer):
    """Right."""

    def residual(self, x: Tensor, sub: Any) -> Tensor:
        return sub.norm(x + sub(x))


class CallsOneNorm(PreNormLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn.norm(x))
        return x + self.ff(self.attn.norm(x))


class CallsNoNorm(PreNormLayer):
    def residual(self, x: Tensor, sub: Any) -> Tensor:
        return x + sub(x)


class LeavesOneOfTwo(PreNormLayer):
    """The attention holds a second norm, which nobody calls."""

    def __init__(self, dim: int, heads: int, hidden_dim: int) -> None:
        super().__init__(dim, heads, hidden_dim)
        self.attn.norm_out = nn.LayerNorm(dim)


def test_one_norm_that_the_layer_calls_excuses_no_other() -> None:
    assert "norm_never_used" in verify(LeavesOneOfTwo).mistakes


@pytest.mark.parametrize("right", [PreNormLayer, PostNormLayer])
def test_norms_that_the_layer_calls_are_no_idle_norms(right: type[nn.Module]) -> None:
    report = verify(right)
    assert (report.verdict, report.intended) == ("equal", []), str(report)
    assert "nn.TransformerEncoderLayer(" in str(report)


@pytest.mark.parametrize(("wrong", "name"), [(CallsOneNorm, "norm_shared"), (CallsNoNorm, "norm_never_used")])
def test_norms_that_are_called_wrongly_or_not_at_all_are_found(wrong: type[nn.Module], name: str) -> None:
    assert name in verify(wrong).mistakes
