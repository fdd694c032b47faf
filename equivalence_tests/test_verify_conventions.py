"""verify on the ways in which attention is called and laid out elsewhere: each was read wrongly once, or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests import verify
from equivalence_tests.checker.diagnosis import Effort
from equivalence_tests.test_verify_attention import OfItself, Plain


class CausalUnlessToldOtherwise(OfItself):
    """The mask lies in an object; without one, no token sees the future."""

    def forward(self, x: Tensor, attn_mask: Any = None) -> Tensor:
        q, k = self.split(self.q(x)), self.split(self.k(x))
        blocked = torch.ones(x.size(1), x.size(1)).triu(1) > 0 if attn_mask is None else attn_mask.mask
        return self.mixed((q @ k.mT / q.size(-1) ** 0.5).masked_fill(blocked, -torch.inf).softmax(-1), x)


def test_a_mask_may_be_held_by_an_object_and_take_the_place_of_the_causal_mask() -> None:
    report = verify(CausalUnlessToldOtherwise)
    assert report.verdict == "equal", str(report)
    assert "held by an object" in str(report.conventions)
    assert "takes the place of the causal mask" in str(report.notes)


class TrainsInSilence(Plain):
    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mixed(self.weights(q, k), v)


RIGHT = (TrainsInSilence,)


@pytest.mark.parametrize("right", RIGHT)
def test_right_attention_is_not_blamed(right: Callable[..., Any]) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)


def test_a_file_may_switch_gradients_off(tmp_path: Path) -> None:
    lines = (
        "import torch",
        "torch.set_grad_enabled(False)",
        "def attention(query, key, value):",
        "    return (query @ key.mT / query.size(-1) ** 0.5).softmax(-1) @ value",
    )
    (tmp_path / "without.py").write_text("\n".join(lines), encoding="utf-8")
    report = verify(f"{tmp_path / 'without.py'}:attention")
    assert report.verdict == "equal", str(report)


class TakesAnything(nn.Module):
    def forward(self, *args: Any) -> Any:
        return args[0]


def test_a_forward_that_names_nothing_is_said() -> None:
    assert "names no argument" in verify(TakesAnything, kind="attention").reason


class MixesScalesAndNormalisesWrongly(Plain):
    """Three mistakes; two of them show where all tokens are alike, one does not."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key = self.split(self.q(q)), self.split(self.k(k))
        weights = (query @ key.mT / q.size(-1) ** 0.5).softmax(-2)
        return self.out((weights @ self.split(self.v(v))).flatten(1).view_as(q))


def test_three_mistakes_are_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Effort, "exhausted", property(lambda self: self.evaluated > 20000))
    report = verify(MixesScalesAndNormalisesWrongly)
    assert set(report.mistakes) == {
        "scale_sqrt_d_model",
        "softmax_over_queries",
        "heads_merged_without_transpose",
    }, str(report)
