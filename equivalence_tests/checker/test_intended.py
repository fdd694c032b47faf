"""What the user says is meant so is told and not blamed, in an attention, a part and a layer."""

import pytest
from torch import Tensor, nn

from equivalence_tests import verify
from equivalence_tests.checker.zoo.parts import TanhGeluFeedForward


class Unscaled(nn.Module):
    """Leaves the scale out, as T5 does."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q = self.qkv(x).chunk(3, -1)[0]
        _, k, v = self.qkv(context).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        out: Tensor = self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Post-norm; its attention is the one above."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = Unscaled(d_model, n_heads), nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x, x))
        out: Tensor = self.norm2(x + self.down(self.up(x).relu()))
        return out


@pytest.mark.parametrize(
    ("target", "name"),
    [(Unscaled, "scale_missing"), (TanhGeluFeedForward, "gelu_approximated"), (Layer, "scale_missing")],
)
def test_what_is_meant_so_is_told_once(target: type[nn.Module], name: str) -> None:
    assert verify(target).mistakes == (name,)
    report = verify(target, meant={name: "as the paper has it"})
    assert report.verdict == "equal", str(report)
    assert [(finding.name, finding.meant) for finding in report.meant] == [(name, "as the paper has it")]
    assert str(report).startswith("EQUAL, but for what is meant so")
    assert bool(report)


def test_what_is_meant_excuses_nothing_else() -> None:
    assert verify(Unscaled, meant={"softmax_missing": "as in linear attention"}).mistakes == ("scale_missing",)


def test_a_name_that_is_none_and_a_reason_that_is_none_raise() -> None:
    with pytest.raises(ValueError, match="is it 'scale_missing'"):
        verify(Unscaled, meant={"scale_mising": "as T5"})
    with pytest.raises(ValueError, match="must give a reason"):
        verify(Unscaled, meant={"scale_missing": " "})
    with pytest.raises(ValueError, match="got 'check_xyz'"):
        verify(Unscaled, meant={"check_xyz": "as T5"})
    with pytest.raises(ValueError, match="is it 'check_values'"):
        verify(Unscaled, meant={"check_valus": "as T5"})
