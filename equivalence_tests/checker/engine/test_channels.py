"""Attention over channels is none of torch's; convolutions may go over keys and values behind their projections."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.zoo.stages import ThreeMatrices


class OverChannels(nn.Module):
    """Each feature of a sample attends to those of its head; the product sums over the tokens."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 4, 1)
        return q, k, v

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / q.size(-2) ** 0.5).softmax(-1)

    def merged(self, context: Tensor) -> Tensor:
        return context.permute(0, 3, 1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return self.out(self.merged(self.weights(q, k) @ v))


class OfTransposed(OverChannels):
    """Tokens stand before features, and the product transposes."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return q, k, v

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q.mT @ k * k.size(-1) ** -0.5).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return self.out((self.weights(q, k) @ v.mT).mT.transpose(1, 2).flatten(2))


class OfMaps(nn.Module):
    """Of images, each channel normalised, with a temperature for each head, and a normalised input."""

    def __init__(self, channels: int, heads: int = 1) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.BatchNorm2d(channels)
        self.qkv, self.near = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(3 * channels, 3 * channels, 3, padding=1)
        self.temperature, self.out = nn.Parameter(torch.ones(heads, 1, 1)), nn.Conv2d(channels, channels, 1)

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.reshape(len(x), self.heads, -1, x[0, 0].numel()) for y in self.near(self.qkv(self.norm(x))).chunk(3, 1)
        )
        q, k = self.normed(q, k)
        context = (q @ k.mT * self.temperature).softmax(-1) @ v
        return x + self.out(context.reshape(x.shape))


class WithoutWeights(nn.Module):
    """The features of an image attend to one another as they are."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.channels = nn.Parameter(torch.zeros(1)), channels

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        rows = x.view(batch, channels, height * width)
        weights = (rows @ rows.mT / self.channels**0.5).softmax(-1)
        return x + self.gamma * (weights @ rows).view(x.shape)


@pytest.mark.parametrize("found", [OverChannels, OfTransposed, OfMaps, WithoutWeights])
def test_features_that_attend_to_features_are_no_attention_of_torchs(found: type[nn.Module]) -> None:
    report = verify(found)
    assert (report.verdict, report.mistakes) == ("unchecked", ()), str(report)
    assert report.reason.startswith("No attention runs in it: in line")
    assert "features attend to one another, over the tokens" in report.reason


def test_features_that_attend_to_features_are_listed_in_a_call() -> None:
    (report,) = verify(OfTransposed(12, 3), torch.randn(2, 5, 12))
    assert (report.verdict, report.kind) == ("unchecked", "attention over channels"), str(report)
    assert report.reason.startswith("In line")


class ConvolvesKeys(ThreeMatrices):
    """Lets a depthwise convolution go over the keys and over the values, each an image again, behind their matrices."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.conv_k, self.conv_v = (nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False) for _ in range(2))

    def over(self, x: Tensor, conv: nn.Module, h: int, w: int) -> Tensor:
        made: Tensor = conv(x.transpose(1, 2).unflatten(-1, (h, w)))
        return made.flatten(2).transpose(1, 2)

    def values(self, x: Tensor, h: int, w: int) -> Tensor:
        return self.over(self.v(x), self.conv_v, h, w)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        keys = self.over(self.k(x), self.conv_k, h, w)
        q, k, v = map(self.split, (self.q(x), keys, self.values(x, h, w)))
        return self.finish(F.scaled_dot_product_attention(q, k, v))


class TakesColumnsForRows(ConvolvesKeys):
    def over(self, x: Tensor, conv: nn.Module, h: int, w: int) -> Tensor:
        return super().over(x, conv, w, h)


class MixesChannels(ConvolvesKeys):
    def over(self, x: Tensor, conv: nn.Module, h: int, w: int) -> Tensor:
        made: Tensor = conv(x.reshape(len(x), -1, h, w))
        return made.flatten(2).transpose(1, 2)


class ConvolvesValuesAsKeys(ConvolvesKeys):
    def values(self, x: Tensor, h: int, w: int) -> Tensor:
        return self.over(self.v(x), self.conv_k, h, w)


class AddsItsValues(ConvolvesKeys):
    def values(self, x: Tensor, h: int, w: int) -> Tensor:
        return super().values(x, h, w) + self.v(x).roll(1, 1)


def test_a_depthwise_convolution_may_go_over_keys_and_values() -> None:
    report = verify(ConvolvesKeys)
    assert report.verdict == "equal", str(report)
    assert "conv_k is called. Intended: the sub-module conv_k, a Conv2d" in " ".join(str(report).split())


@pytest.mark.parametrize("found", [TakesColumnsForRows, MixesChannels, ConvolvesValuesAsKeys, AddsItsValues])
def test_other_convolutions_of_keys_are_not_equal(found: type[nn.Module]) -> None:
    assert verify(found).verdict in ("deviates", "unchecked"), str(verify(found))
