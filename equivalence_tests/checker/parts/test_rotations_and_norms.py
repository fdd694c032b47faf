"""verify on attention that rotates or normalises its queries and keys, which torch.nn's does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.reach.angles import base_of
from equivalence_tests.checker.zoo.stages import Operands, SelfAttention


class Rotating(SelfAttention):
    """Right: elements i and i + head_dim / 2 of queries and keys are rotated together."""

    def __init__(self, dim: int, heads: int, theta: float = 10000.0) -> None:
        super().__init__(dim, heads)
        self.theta = theta

    def angles(self, x: Tensor) -> Tensor:
        steps = self.theta ** -(torch.arange(0, x.size(-1), 2).to(x) / x.size(-1))
        return torch.outer(torch.arange(x.size(-2)).to(x), steps)

    def laid_out(self, angles: Tensor) -> Tensor:
        return torch.cat((angles, angles), -1)

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    def rotated(self, x: Tensor) -> Tensor:
        angles = self.laid_out(self.angles(x))
        return x * angles.cos() + self.turned(x) * angles.sin()

    def inner(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        return self.rotated(q), self.rotated(k), v

    def scale(self, q: Tensor) -> float:
        return float(q.size(-1)) ** -0.5

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = self.inner(q, k, v)
        return (q @ k.mT * self.scale(q)).softmax(-1) @ v


class Complex(Rotating):
    """Right: neighbours are complex numbers, turned by a table that is kept."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        steps = 10000.0 ** -(torch.arange(0, dim // heads, 2)[: dim // heads // 2] / (dim // heads))
        table = torch.outer(torch.arange(64), steps)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(table), table))

    def rotated(self, x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        table = self.freqs_cis
        assert isinstance(table, Tensor)
        return torch.view_as_real(numbers * table[: x.size(-2)]).flatten(-2)


class KeepsFrequencies(Rotating):
    """Right: the base is nowhere but in the frequencies that are kept."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        del self.theta
        head_dim = dim // heads
        self.register_buffer("inv_freq", 500.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim))

    def angles(self, x: Tensor) -> Tensor:
        steps = self.inv_freq
        assert isinstance(steps, Tensor)
        return torch.outer(torch.arange(x.size(-2)).to(x), steps.to(x.dtype))


class Normalising(Rotating):
    """Right: a norm in each head, then the rotation."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // heads), nn.RMSNorm(dim // heads)

    def inner(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(self.q_norm(q)), self.rotated(self.k_norm(k)), v


class NormalisingAll(Rotating):
    """Right: a norm over the whole width, and no rotation."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm_q, self.norm_k = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def inner(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = (norm(x.transpose(1, 2).flatten(2)) for norm, x in ((self.norm_q, q), (self.norm_k, k)))
        q, k = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in whole)
        return q, k, v


class TakesCosAndSin(Rotating):
    """Right: cosines and sines are made outside, for each sample or for all."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        self.given = cos[: x.size(1)], sin[: x.size(1)]
        return super().forward(x)

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = self.given
        return x * cos + self.turned(x) * sin


class TakesBoth(TakesCosAndSin):
    """Right: one argument, and an axis for the samples."""

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        cos, sin = (y.unsqueeze(1) for y in position_embeddings)
        self.given = cos, sin
        return Rotating.forward(self, x)


class TakesComplex(Complex):
    """Right: the table of complex numbers is an argument."""

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:  # type: ignore[override]
        self.freqs_cis = freqs_cis
        return super().forward(x)


class TakesCosAndSinForQueries(TakesCosAndSin):
    def inner(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q), k, v


class Block(nn.Module):
    """Right: a layer as today's language models have it, whose heads must be of even width."""

    def __init__(self, dim: int, num_heads: int, hidden_dim: int) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.ffn_norm = Rotating(dim, num_heads), nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class BlockThatTakesAngles(Block):
    def __init__(self, dim: int, num_heads: int, hidden_dim: int) -> None:
        super().__init__(dim, num_heads, hidden_dim)
        self.attention = TakesCosAndSin(dim, num_heads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class BlockWithoutAResidual(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class NormalisingWithoutWeights(Rotating):
    """Right: rotated first, which the norm does not mind."""

    def inner(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (F.rms_norm(self.rotated(x), x.shape[-1:]) for x in (q, k))
        return q, k, v


class TakesOneTuple(TakesCosAndSin):
    """Right: both in one argument, as its name says."""

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x, *cos_sin)


class Reversed(Rotating):
    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((b, -a), -1)


class Mixed(Rotating):
    def laid_out(self, angles: Tensor) -> Tensor:
        return angles.repeat_interleave(2, -1)


class OnlyQueries(Rotating):
    def inner(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q), k, v


class OnlyKeys(Rotating):
    def inner(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, self.rotated(k), v


class ValuesToo(Rotating):
    def inner(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q), self.rotated(k), self.rotated(v)


class ScaledByTheWidth(Normalising):
    def scale(self, q: Tensor) -> float:
        return float(q.size(-1) * self.heads) ** -0.5


ROTATED, NORMED = "rotary_positions", "queries_and_keys_normalised"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("right", "names", "words"),
    [
        (Rotating, {ROTATED}, "halves of a head"),
        (lambda: Rotating(24, 2, theta=100.0), {ROTATED}, "halves of a head"),
        (Complex, {ROTATED}, "pairs of neighbours"),
        (KeepsFrequencies, {ROTATED}, "halves of a head"),
        (Normalising, {ROTATED, NORMED}, "halves of a head"),
        (NormalisingAll, {NORMED}, "each by its own norm"),
        (TakesCosAndSin, {ROTATED}, "halves of a head"),
        (TakesBoth, {ROTATED}, "halves of a head"),
        (TakesOneTuple, {ROTATED}, "halves of a head"),
        (NormalisingWithoutWeights, {NORMED, "rotary_of_its_own"}, "each by its own norm"),
        (TakesComplex, {ROTATED}, "pairs of neighbours"),
    ],
)
def test_what_is_done_to_queries_and_keys_is_read(right: Callable[..., Any], names: set[str], words: str) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)
    assert {finding.name for finding in report.intended} == names
    assert report.intended[0].reason.endswith(words)
    assert not [check for check in report.checks if check.outcome == "failed"], str(report)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (Reversed, "rotary_reversed"),
        (Mixed, "rotary_mixed"),
        (OnlyQueries, "rotary_queries"),
        (TakesCosAndSinForQueries, "rotary_queries"),
        (OnlyKeys, "rotary_keys"),
        (ValuesToo, "rotary_values"),
        (ScaledByTheWidth, "scale_wrong"),
    ],
)
def test_mistakes_beside_a_rotation_are_named(broken: Callable[..., Any], name: str) -> None:
    report = verify(broken)
    assert [finding.name for finding in report.findings] == [name], str(report)


class BentBehind(Rotating):
    def inner(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q).tanh(), self.rotated(k), v


def test_what_bends_queries_behind_a_rotation_has_its_line() -> None:
    (finding,) = verify(BentBehind).findings
    assert (finding.name, finding.proof is not None) == ("query_changed_by_tanh", True)
    assert finding.line is not None
    assert ".tanh()" in finding.line.text


@pytest.mark.parametrize("right", [Block, BlockThatTakesAngles])
def test_a_layer_around_such_attention_is_followed(right: Callable[..., Any]) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)
    assert [(finding.where, finding.name) for finding in report.intended] == [("attention", ROTATED)]


def test_a_mistake_of_such_a_layer_is_named() -> None:
    assert [finding.name for finding in verify(BlockWithoutAResidual).findings] == ["residual_missing"]


def test_what_names_no_base_has_the_usual_one() -> None:
    assert base_of(nn.LayerNorm(3)) == 10000.0


class LayerNormOfMixedAxes(nn.Module):
    """Takes off the mean of each feature over the tokens, and divides by the spread of each token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        spread = x.var(-1, unbiased=False, keepdim=True) + 1e-5
        return self.gain * (x - x.mean(1, keepdim=True)) / spread.sqrt()


def test_a_layer_norm_of_no_known_form_that_mixes_tokens_is_wrong() -> None:
    report = verify(LayerNormOfMixedAxes)
    assert report.verdict == "deviates", str(report)
    assert "It mixes tokens" in report.reason
