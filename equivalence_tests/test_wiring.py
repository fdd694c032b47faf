"""Layers and models: what is put together rightly is followed to its end, what is not is named, the rest is said."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.walking import atoms_of, kind_of
from equivalence_tests.zoo import layers


@pytest.mark.parametrize("found", layers.CORRECT, ids=lambda found: found.__name__)
def test_what_is_right_is_equal(found: Any) -> None:
    report = verify(found)
    assert report.verdict == "equal", str(report)
    assert any(check.name.endswith("(wiring)") and check.outcome == "passed" for check in report.checks), str(report)


@pytest.mark.parametrize(("found", "names", "_"), layers.BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_wrong_is_named(found: Any, names: tuple[str, ...], _: str) -> None:
    report = verify(found)
    assert report.verdict == "deviates", str(report)
    assert set(report.mistakes) == set(names), str(report)


def test_an_instance_keeps_its_own_width() -> None:
    # A feed-forward four times as wide as the tokens was once taken for the width, and 4 heads of 8 for heads of 32.
    layer = layers.SequentialFeedForwardLayer(32, 4, 128)
    before = [p.clone() for p in layer.parameters()]
    assert verify(layer).verdict == "equal", str(verify(layer))
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))


def test_the_masks_of_a_layer_are_described() -> None:
    rows = {what: here for what, here, _ in verify(layers.TwoMaskDecoderLayer).conventions}
    assert rows["layer: tgt_mask"] == "hides the layer's own tokens: (batch * heads, query, key), True = may not look"
    assert rows["layer: src_mask"].startswith("hides tokens of the memory: ")


class ReZeroLayer(layers.SequentialFeedForwardLayer):
    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.alpha = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.alpha * self.attn(x, x, x)[0]
        return x + self.alpha * self.mlp(x)


def test_a_way_that_is_lost_is_no_verdict() -> None:
    report = verify(ReZeroLayer)
    assert (report.verdict, report.mistakes) == ("unchecked", ())
    assert "what attn gives is not seen in any sum" in report.reason


class SmallAttention(nn.MultiheadAttention):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads, batch_first=True)


class SmallFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x).relu())


class GivenPartsLayer(nn.Module):
    def __init__(self, size: int, self_attn: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.self_attn(x, x, x)[0])
        return self.norm2(x + self.feed_forward(x))


def test_parts_that_are_handed_to_the_constructor_are_built() -> None:
    report = verify(GivenPartsLayer)
    assert report.verdict == "equal", str(report)
    assert {check.name for check in report.checks} >= {"self_attn (multi-head attention)", "layer (wiring)"}


class UnnamedPartsLayer(nn.Module):
    def __init__(self, size: int, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm = first, second, nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.second(x + self.first(x, x, x)[0]))


def test_parts_that_cannot_be_built_are_asked_for() -> None:
    report = verify(UnnamedPartsLayer)
    assert report.verdict == "unchecked"
    assert "pass an instance" in report.reason


class DirectCallLayer(layers.SequentialFeedForwardLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.ln_1(x + self.attn.forward(x, x, x)[0])
        return self.ln_2(x + self.mlp.forward(x))


def test_forward_called_by_name_is_seen() -> None:
    assert verify(DirectCallLayer).verdict == "equal"


class SequenceFirstLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads)
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        src = self.norm1(src + self.attn(src, src, src, attn_mask=src_mask)[0])
        return self.norm2(src + self.linear2(self.linear1(src).relu()))


def test_a_sequence_first_layer_is_followed() -> None:
    report = verify(SequenceFirstLayer)
    assert report.verdict == "equal", str(report)
    assert any("src_mask" in what for what, _, _ in report.conventions)


class ShiftedModel(layers.TranslationModel):
    """Shifts the targets inside; without a causal mask it still sees the future."""

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return super().forward(src, torch.cat([torch.zeros_like(tgt[:, :1]), tgt[:, :-1]], 1))


class ShiftedPeekingModel(ShiftedModel, layers.PeekingModel):
    pass


def test_the_future_is_seen_behind_a_shift() -> None:
    assert verify(ShiftedModel).verdict == "equal"
    assert verify(ShiftedPeekingModel).mistakes == ("future_is_seen",)


class FlatOutputModel(layers.TranslationModel):
    """Gives the logits of all tokens in one axis, and keeps its positions fixed."""

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        self.positions.weight.requires_grad_(False)
        return super().forward(src, tgt).flatten(0, 1)


class UnorderedFlatModel(FlatOutputModel, layers.UnchainedModel):
    pass


def test_logits_in_one_axis_are_read_and_what_is_fixed_takes_part() -> None:
    assert verify(FlatOutputModel).verdict == "equal", str(verify(FlatOutputModel))
    assert verify(UnorderedFlatModel).mistakes == ("layers_not_chained",)


class RequiredMasksDecoderLayer(layers.TwoMaskDecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, tgt_mask: Tensor, src_mask: Tensor) -> Tensor:  # type: ignore[override]
        may = [mask.repeat_interleave(self.self_attn.num_heads, 0) for mask in (tgt_mask, src_mask)]
        return super().forward(x, memory, *may)


def test_a_layer_that_requires_two_masks_is_called() -> None:
    report = verify(RequiredMasksDecoderLayer)
    assert report.verdict == "equal", str(report)


def test_a_norm_that_holds_others_is_no_norm() -> None:
    class AddNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln = nn.LayerNorm(3)

    assert kind_of("addnorm1", AddNorm()) == ""
    assert atoms_of(nn.ModuleList([AddNorm(), nn.Linear(3, 3)])) == {"0.ln": "layer_norm", "1": ""}


class MemoryFirstDecoderLayer(layers.TwoMaskDecoderLayer):
    """Takes (memory, target), under names that do not say so, and only of one length."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(y.view_as(x), x)


class MemoryFirstMixedDecoderLayer(MemoryFirstDecoderLayer, layers.MixedMemoryDecoderLayer):
    pass


def test_of_two_tensors_of_one_length_the_memory_is_found_out() -> None:
    assert verify(MemoryFirstDecoderLayer).verdict == "equal", str(verify(MemoryFirstDecoderLayer))
    assert verify(MemoryFirstMixedDecoderLayer).mistakes == ("cross_values_from_decoder",)
