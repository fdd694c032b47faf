"""What the user says is intended is reported and does not count, in an attention, a part and a layer."""

from typing import Any

import pytest
from torch import Tensor, nn

from equivalence_tests import Adapter, verify
from equivalence_tests.checker.zoo.layers import ParallelLayer
from equivalence_tests.checker.zoo.parts import LinearFeedForward
from equivalence_tests.checker.zoo.stages import OneMatrix


class Unscaled(OneMatrix):
    """Leaves the scale out, as T5 does."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        (q, _, _), (_, k, v) = self.operands(x), self.operands(context)
        return self.finish(self.scores(q, k).softmax(-1) @ v)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class T5Attention(Unscaled):
    """No scale, and a name that says why."""


class T5WithAnotherScale(T5Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 3 * super().scores(q, k)


class T5WithAScaleThatIsLeftOut(T5Attention):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.scaling = (dim // heads) ** -0.5


class T5OverQueries(T5Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k).softmax(-2)


class GPTJBlock(ParallelLayer):
    """Both sub-layers beside one another."""


class Layer(nn.Module):
    """Post-norm; its attention is the one above."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = Unscaled(d_model, n_heads), nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x, x))
        return self.norm2(x + self.down(self.up(x).relu()))


@pytest.mark.parametrize(
    ("target", "name"),
    [(Unscaled, "scale_missing"), (LinearFeedForward, "activation_missing"), (Layer, "scale_missing")],
)
def test_what_is_intended_is_listed_once(target: type[nn.Module], name: str) -> None:
    assert verify(target).mistakes == (name,)
    report = verify(target, intended={name: "as the paper has it"})
    assert report.verdict == "equal", str(report)
    assert [(finding.name, finding.reason) for finding in report.intended] == [(name, "as the paper has it")]
    assert str(report).startswith("EQUAL, except where intended")
    assert bool(report)


@pytest.mark.parametrize(
    ("target", "name"),
    [(T5Attention, "scale_missing"), (GPTJBlock, "sublayers_side_by_side")],
)
def test_the_name_of_a_model_that_does_so_says_that_it_is_intended(target: type[nn.Module], name: str) -> None:
    report = verify(target)
    assert report, str(report)
    listed = [(finding.name, finding.reason.partition(",")[0].split()[0]) for finding in report.intended]
    assert (name, target.__name__) in listed


@pytest.mark.parametrize("target", [T5WithAnotherScale, T5WithAScaleThatIsLeftOut, T5OverQueries])
def test_the_name_of_a_model_excuses_nothing_else(target: type[nn.Module]) -> None:
    assert verify(target).verdict == "deviates"


def test_what_is_intended_excuses_nothing_else() -> None:
    assert verify(Unscaled, intended={"softmax_missing": "as in linear attention"}).mistakes == ("scale_missing",)


def test_a_name_that_is_none_and_a_reason_that_is_none_raise() -> None:
    with pytest.raises(ValueError, match="is it 'scale_missing'"):
        verify(Unscaled, intended={"scale_mising": "as T5"})
    with pytest.raises(ValueError, match="must give a reason"):
        verify(Unscaled, intended={"scale_missing": " "})
    with pytest.raises(ValueError, match="got 'check_xyz'"):
        verify(Unscaled, intended={"check_xyz": "as T5"})
    with pytest.raises(ValueError, match="is it 'check_values'"):
        verify(Unscaled, intended={"check_valus": "as T5"})


REASON = {"scale_missing": "as T5"}


@pytest.mark.parametrize(
    "given",
    [
        {"adapter": Adapter(intended=REASON)},
        {"adapter": Adapter(intended=REASON), "intended": {"softmax_missing": "as in linear attention"}},
    ],
)
def test_it_is_said_by_an_adapter_too(given: dict[str, Any]) -> None:
    report = verify(Unscaled, **given)
    assert (report.verdict, [finding.name for finding in report.intended]) == ("equal", ["scale_missing"])
