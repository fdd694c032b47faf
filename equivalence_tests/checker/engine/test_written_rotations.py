"""Rotations that are written piece by piece into memory: every second element, in new memory or in place."""

import torch
from torch import Tensor
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.zoo.stages import SelfAttention


class Strided(SelfAttention):
    """Turns neighbours, and writes them where they belong."""

    def pairs(self, a: Tensor, b: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()

    def rotated(self, x: Tensor) -> Tensor:
        steps = 10000.0 ** (-torch.arange(0, x.size(-1), 2).to(x) / x.size(-1))
        out = torch.empty_like(x)
        first, second = self.pairs(x[..., 0::2], x[..., 1::2], torch.arange(x.size(2)).to(x)[:, None] * steps)
        out[..., 0::2] = first
        out[..., 1::2] = second
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v)


class InPlace(Strided):
    def rotated(self, x: Tensor) -> Tensor:
        x.copy_(super().rotated(x))
        return x


class NoRotation(Strided):
    def pairs(self, a: Tensor, b: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return a * angles.cos() + b * angles.sin(), a * angles.sin() + b * angles.cos()


def test_what_is_written_piece_by_piece_is_read() -> None:
    for right in (Strided, InPlace):
        report = verify(right)
        assert report.verdict == "equal", str(report)
        assert [finding.name for finding in report.intended] == ["rotary_positions"]
    (finding,) = verify(NoRotation).findings
    assert finding.name == "rotary_mixed"
    assert finding.line is not None
    assert "a * angles.sin() + b * angles.cos()" in finding.line.text
