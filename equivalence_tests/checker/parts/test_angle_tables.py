"""Tables of rotary positions: cosines and sines that come back apart, or as complex numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.parts.kinds import guess_kind
from equivalence_tests.checker.verify import verify


class RotaryEmbedding(nn.Module):
    """Right: both halves of a head, for the positions that are given."""

    def __init__(self, dim: int, base: float = 500.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def frequencies(self, positions: Tensor) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=positions.device).double() / self.dim)

    def angles(self, positions: Tensor) -> Tensor:
        return (positions[..., None] * self.frequencies(positions)).repeat(1, 1, 2)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(position_ids)
        return angles.cos(), angles.sin()


class Cached(RotaryEmbedding):
    """Right: kept for many positions, and cut to a length; sines come first."""

    def forward(self, x: Tensor, seq_len: int | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        angles = self.angles(torch.arange(64, device=x.device)[None])[None]
        return angles.sin()[:, :, :seq_len], angles.cos()[:, :, :seq_len]


class TooSlow(RotaryEmbedding):
    def frequencies(self, positions: Tensor) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=positions.device).double() / (2 * self.dim))


class FromOne(RotaryEmbedding):
    def angles(self, positions: Tensor) -> Tensor:
        return super().angles(positions + 1)


class OtherSines(RotaryEmbedding):
    """Has the sines of other angles than the cosines."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, position_ids)[0], self.angles(position_ids + 1).sin()


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    """Right: complex numbers, one for each pair."""
    frequencies = theta ** -(torch.arange(0, dim, 2).double() / dim)
    angles = torch.outer(torch.arange(end), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize("made", [RotaryEmbedding, Cached, precompute_freqs_cis])
def test_cosines_and_sines_are_one_table(made: Any) -> None:
    report = verify(made)
    assert (report.kind, report.verdict) == ("positional encoding", "equal"), report
    assert report.equivalent is not None
    assert "angles.cos()" in report.equivalent.source


@pytest.mark.parametrize(
    ("made", "mistake"), [(TooSlow, "position_exponent_wrong"), (FromOne, "position_starts_at_one"), (OtherSines, "")]
)
def test_other_angles_are_not_equal(made: type[RotaryEmbedding], mistake: str) -> None:
    report = verify(made, kind="positional_encoding")
    assert (report.verdict, report.mistakes) == (("deviates", (mistake,)) if mistake else ("unchecked", ()))


def test_what_is_called_after_rotations_is_a_positional_encoding() -> None:
    names = ["LlamaRotaryEmbedding", "precompute_freqs_cis", "RoPE", "apply_rotary_emb"]
    assert {guess_kind(type(name, (), {})) for name in names} == {"positional_encoding"}
