"""Layers and models: what is wired rightly is followed to its end, what is not is named, the rest is said."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.helpers_for_tests import changed, line_of
from equivalence_tests.checker.layers import wholes
from equivalence_tests.checker.parts.kinds import atoms_of, kind_of
from equivalence_tests.checker.reach.subject import Adapter
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo import layers
from equivalence_tests.checker.zoo.stages import ThreeMatrices


@pytest.mark.parametrize("found", layers.CORRECT, ids=lambda found: found.__name__)
def test_what_is_right_is_equal(found: Any) -> None:
    report = verify(found)
    assert report.verdict == "equal", str(report)
    assert any(check.name.endswith("(wiring)") and check.outcome == "passed" for check in report.checks), str(report)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("found", "names", "_"), layers.BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_wrong_is_named(found: Any, names: tuple[str, ...], _: str) -> None:
    report = verify(found)
    assert report.verdict == "deviates", str(report)
    assert set(report.mistakes) == set(names), str(report)
    sums = [one for one in report.findings if one.name.startswith(("residual", "sublayer_reads", "sublayers_side"))]
    assert all(one.proof is not None for one in sums)


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


class ShiftedLayer(layers.SequentialFeedForwardLayer):
    back = -1

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x).roll(1, dims=1)
        x = x + self.attn(y, y, y)[0].roll(self.back, dims=1)
        return x + self.mlp(self.ln_2(x))


def test_tokens_that_are_moved_before_an_attention_and_back_after_it_are_followed() -> None:
    report = verify(ShiftedLayer)
    assert report.verdict == "equal", str(report)
    assert verify(changed(ShiftedLayer, back=0)).mistakes == ("changed_by_roll",)


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
    assert "alpha is used 2 times" in report.reason


class ScaledNormsLayer(layers.SequentialFeedForwardLayer):
    """Right: a norm and a gain of its own behind each branch."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.after_1, self.after_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.gain_1, self.gain_2 = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        x = x + self.gain_1 * self.after_1(self.attn(y, y, y)[0])
        return x + self.gain_2 * self.after_2(self.mlp(self.ln_2(x)))


class GatedBranchLayer(layers.SequentialFeedForwardLayer):
    """Right: a gate of its own on the branch."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.gate = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        y = self.attn(y, y, y)[0]
        x = self.gated(x, y)
        return x + self.mlp(self.ln_2(x))

    def gated(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y * self.gate(y).sigmoid()


class AdaptedLayer(GatedBranchLayer):
    """Right: a small branch of its own beside the attention."""

    def gated(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y + self.gate(x)


class BentGateLayer(GatedBranchLayer):
    """Right: a number of its own opens the branch."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.gate = nn.Parameter(torch.zeros(1))  # type: ignore[assignment]

    def gated(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.gate.tanh() * y  # type: ignore[operator]


def test_what_is_read_as_wrong_wiring_and_cannot_be_proven_accuses_nobody() -> None:
    assert verify(ScaledNormsLayer).verdict == "equal"
    for layer, own in ((GatedBranchLayer, "gate.weight"), (AdaptedLayer, "gate.weight"), (BentGateLayer, "gate")):
        report = verify(layer)
        assert (report.verdict, report.findings) == ("unchecked", []), str(report)
        assert f"It may be intended: {own} has no other use" in report.reason


class BranchOfItsNeighbour(layers.SequentialFeedForwardLayer):
    """Takes what the feed-forward gives for the token before."""

    def stream(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        x = self.stream(x + self.attn(y, y, y)[0])
        y = self.mlp(self.ln_2(x))
        return x + torch.cat([y[:, :1], y[:, :-1]], 1)


class BranchOfItsOwn(BranchOfItsNeighbour):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        x = self.stream(x + self.attn(y, y, y)[0])
        return x + self.mlp(self.ln_2(x))


class ActivatedStream(BranchOfItsOwn):
    def stream(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class HalfABranch(layers.SequentialFeedForwardLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        y = self.attn(y, y, y)[0]
        x = x + y.index_fill(-1, torch.arange(y.size(-1) // 2), 0.0)
        return x + self.mlp(self.ln_2(x))


class SamplesRolled(BranchOfItsOwn):
    def stream(self, x: Tensor) -> Tensor:
        return x.roll(1, 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (BranchOfItsNeighbour, "changed_by_cat"),
        (ActivatedStream, "changed_by_gelu"),
        (HalfABranch, "changed_by_index_fill"),
        (SamplesRolled, "samples_mixed"),
    ],
)
def test_what_changes_the_stream_is_named(layer: type[nn.Module], name: str) -> None:
    report = verify(layer)
    assert (report.verdict, report.mistakes) == ("deviates", (name,)), str(report)


class SmallAttention(nn.MultiheadAttention):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads, batch_first=True)


class SmallFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x).relu())


class PositionwiseFeedForward(SmallFeedForward):
    pass


class GivenPartsLayer(nn.Module):
    def __init__(self, size: int, self_attn: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.self_attn(x, x, x)[0])
        return self.norm2(x + self.feed_forward(x))


@pytest.mark.thorough
class SandwichLayer(layers.SequentialFeedForwardLayer):
    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.after = nn.ModuleList(nn.LayerNorm(self.ln_1.normalized_shape) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        x = x + self.after[0](self.attn(y, y, y)[0])
        return x + self.after[1](self.mlp(self.ln_2(x)))


class OneNormLayer(layers.SequentialFeedForwardLayer):
    """Attention and feed-forward beside each other, as in GPT-J."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        del self.ln_2

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        return x + self.attn(y, y, y)[0] + self.mlp(y)


@pytest.mark.parametrize(
    ("layer", "said"),
    [(SandwichLayer, "a norm on both sides, x + LayerNorm(f(LayerNorm(x)))"), (OneNormLayer, "one norm serves them")],
)
def test_norms_on_both_sides_or_one_for_all_are_no_slip(layer: type[nn.Module], said: str) -> None:
    report = verify(layer)
    assert report.verdict == "equal", str(report)
    intended = [row for _, row, _ in report.conventions] + [finding.sentence for finding in report.intended]
    assert any(said in x for x in (*intended, " ".join(str(report).split())))


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


@pytest.mark.thorough
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
    assert report.verdict == "partial", str(report)  # others in this file are built with batch_first=True
    assert [one.what for one in report.not_exercised] == ["layer: (batch, len, features)"]
    assert any("src_mask" in what for what, _, _ in report.conventions)


class ShiftedModel(layers.TranslationModel):
    """Shifts the targets inside; without a causal mask it still sees the future."""

    layers = 1

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return super().forward(src, torch.cat([torch.zeros_like(tgt[:, :1]), tgt[:, :-1]], 1))


class ShiftedPeekingModel(ShiftedModel, layers.PeekingModel):
    pass


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_logits_in_one_axis_are_read_and_what_is_fixed_takes_part() -> None:
    assert verify(FlatOutputModel).verdict == "equal", str(verify(FlatOutputModel))
    assert verify(UnorderedFlatModel).mistakes == ("layers_not_chained",)


class RequiredMasksDecoderLayer(layers.TwoMaskDecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, tgt_mask: Tensor, src_mask: Tensor) -> Tensor:  # type: ignore[override]
        may = [mask.repeat_interleave(self.self_attn.num_heads, 0) for mask in (tgt_mask, src_mask)]
        return super().forward(x, memory, *may)


@pytest.mark.thorough
def test_a_layer_that_requires_two_masks_is_called() -> None:
    report = verify(RequiredMasksDecoderLayer)
    assert report.verdict == "equal", str(report)


class IdleMaskDecoderLayer(layers.TwoMaskDecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, pad_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, memory)


def test_an_idle_mask_has_no_line_where_it_may_be_of_either_attention() -> None:
    (finding,) = verify(IdleMaskDecoderLayer).findings
    assert (finding.name, finding.line) == ("mask_never_used", None)


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
    assert verify(MemoryFirstMixedDecoderLayer).mistakes == ("cross_attention_from_decoder",)


class SeriesModel(nn.Module):
    """Takes features, batch first, and gives one number for the sequence."""

    batch_first = True

    def __init__(self, width: int, d_model: int, nhead: int) -> None:
        super().__init__()
        self.proj, self.pos_embedding = nn.Linear(width, d_model), nn.Parameter(torch.zeros(1, 9, d_model))
        layer = nn.TransformerEncoderLayer(d_model, nhead, 20, batch_first=self.batch_first)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(d_model, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.place(self.proj(x)))[:, [-1]])  # keeps the axis

    def place(self, x: Tensor) -> Tensor:
        """The stage that defects replace."""
        return x + self.pos_embedding


class UnorderedSeriesModel(SeriesModel):
    def place(self, x: Tensor) -> Tensor:
        return x + self.pos_embedding[:, :1]


class ImageModel(SeriesModel):
    """Takes images of 12 by 12, patches of 4 by 4."""

    def __init__(self, d_model: int = 24) -> None:
        super().__init__(3, d_model, 4)
        del self.encoder, self.proj
        self.patches, self.blocks = nn.Conv2d(3, d_model, 4, 4), nn.ModuleList(self.make_blocks(d_model))

    def make_blocks(self, d_model: int) -> Sequence[nn.Module]:
        """The stage that defects replace."""
        return [layers.SequentialFeedForwardLayer(d_model, 4, 40) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.place(self.patches(x).flatten(2).mT)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class UnorderedImageModel(ImageModel, UnorderedSeriesModel):
    pass


class OneBlockImageModel(ImageModel):
    def make_blocks(self, d_model: int) -> Sequence[nn.Module]:
        return 2 * [layers.SequentialFeedForwardLayer(d_model, 4, 40)]


class MixesPatches(ImageModel):
    """Takes height and width for the last axes, which they are not."""

    def place(self, x: Tensor) -> Tensor:
        return super().place(x.mT.reshape(len(x), -1, x.size(-1)))


class CutsPatches(nn.Module):
    """Has no convolution: the features of a patch are projected together."""

    def __init__(self, image_size: int, patch_size: int, channels: int, d_model: int) -> None:
        super().__init__()
        self.patches, self.side = nn.Linear(channels * patch_size**2, d_model), patch_size
        self.pos_embedding = nn.Parameter(torch.randn((image_size // patch_size) ** 2, d_model))
        self.block, self.head = layers.SequentialFeedForwardLayer(d_model, 3, 40), nn.Linear(d_model, 7)

    def forward(self, img: Tensor) -> Tensor:
        patches = img.unfold(2, self.side, self.side).unfold(3, self.side, self.side).permute(0, 2, 3, 1, 4, 5)
        x = self.patches(patches.flatten(3).flatten(1, 2)) + self.pos_embedding
        return self.head(self.block(x).mean(1))


class NormsPatches(nn.Module):
    """Normalises the numbers of each patch before they are projected."""

    def __init__(self, image_size: int, patch_size: int, channels: int, d_model: int) -> None:
        super().__init__()
        width, self.side = channels * patch_size**2, patch_size
        self.patches = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, d_model), nn.LayerNorm(d_model))
        self.pos_embedding = nn.Parameter(torch.randn((image_size // patch_size) ** 2, d_model))
        self.blocks = nn.ModuleList(layers.SequentialFeedForwardLayer(d_model, 3, 40) for _ in range(2))
        self.head = nn.Linear(d_model, 7)

    def cut(self, img: Tensor) -> Tensor:
        """The stage that defects replace."""
        return img.unflatten(3, (-1, self.side)).unflatten(2, (-1, self.side)).permute(0, 2, 4, 3, 5, 1)

    def forward(self, img: Tensor) -> Tensor:
        x = self.patches(self.cut(img).flatten(3).flatten(1, 2)) + self.pos_embedding
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class TakesPixelsFarApart(NormsPatches):
    def cut(self, img: Tensor) -> Tensor:
        return img.unflatten(3, (self.side, -1)).unflatten(2, (self.side, -1)).permute(0, 3, 5, 2, 4, 1)


class ForgetsABlock(ImageModel):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.place(self.patches(x).flatten(2).mT)).mean(1))


class DropsBlocksInEval(SeriesModel):
    def place(self, x: Tensor) -> Tensor:
        return super().place(x) * (1 + torch.rand(()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "names"),
    [
        (MixesPatches(), ("patches_mixed",)),
        (CutsPatches, ()),
        (NormsPatches, ()),
        (TakesPixelsFarApart, ("patches_mixed",)),
        (ForgetsABlock(), ("part_never_used",)),
        (DropsBlocksInEval(6, 24, 4), ("random_in_eval",)),
        (SeriesModel(6, 24, 4), ()),
        (changed(SeriesModel, batch_first=False)(6, 24, 4), ("samples_mixed",)),
        (UnorderedSeriesModel(6, 24, 4), ("no_positions",)),
        (ImageModel(), ()),
        (UnorderedImageModel(), ("no_positions",)),
        (OneBlockImageModel(), ("layers_share_parameters",)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_of_features_and_images_are_run(model: nn.Module | type[nn.Module], names: tuple[str, ...]) -> None:
    report = verify(model)
    assert report.mistakes == names, str(report)
    assert report.verdict == ("deviates" if names else "equal"), str(report)
    built = [finding.line.text for finding in report.findings if finding.name == "samples_mixed" and finding.line]
    assert all("TransformerEncoderLayer(" in text for text in built)
    assert bool(built) == (names == ("samples_mixed",))


class PositionwiseLayer(layers.TwoMaskDecoderLayer):
    """Its feed-forward speaks of positions, and is no encoding of them."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.mlp = nn.Sequential(PositionwiseFeedForward(d_model, d_ff))


class Stack(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ff: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PositionwiseLayer(d_model, n_heads, d_ff) for _ in range(num_layers))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return x


class LastLayerStack(Stack):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return [layer(x, memory) for layer in self.layers][-1]


@pytest.mark.thorough
def test_a_bare_stack_is_run_as_its_layers_are() -> None:
    assert verify(Stack).verdict == "equal", str(verify(Stack))
    assert verify(LastLayerStack).mistakes == ("layers_not_chained",)


class CausalModel(nn.Module):
    """Has a causal mask, which gives later layers an order, and no name that says so."""

    def __init__(self, vocab_size: int, d_model: int, nhead: int, max_len: int) -> None:
        super().__init__()
        self.embedding, self.pe = nn.Embedding(vocab_size, d_model), nn.Parameter(torch.ones(max_len, d_model))
        layer = nn.TransformerEncoderLayer(d_model, nhead, 20, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.embedding(x) + self.places(x.size(1)), mask=self.hidden(x.size(1)))

    def places(self, length: int) -> Tensor:
        """The stage that defects replace."""
        return self.pe[:length]

    def hidden(self, length: int) -> Tensor:
        """The stage that defects replace."""
        return next(self.parameters()).new_ones(length, length).triu(1).bool()


class OneRowCausalModel(CausalModel):
    def places(self, length: int) -> Tensor:
        return self.pe[0]


class TransposedCausalModel(CausalModel):
    def hidden(self, length: int) -> Tensor:
        return super().hidden(length).mT


class Neighbours(CausalModel):
    """No model that predicts the next token: each token sees those of its own block."""

    def hidden(self, length: int) -> Tensor:
        blocks = torch.arange(length, device=self.pe.device) // 4
        return blocks[:, None] != blocks


def test_a_mask_that_torch_itself_looks_at_is_no_claim_to_be_causal() -> None:
    assert "future_is_seen" not in verify(Neighbours).mistakes


def test_a_causal_model_needs_positions_and_must_not_read_the_future() -> None:
    report = verify(CausalModel)
    assert report.verdict == "equal", str(report)
    assert ("the model: an output reads", "no later token (GPT)", "") in report.conventions
    (finding,) = verify(OneRowCausalModel).findings
    assert finding.name == "no_positions"
    assert line_of(finding) == "return self.pe[0]"
    assert verify(TransposedCausalModel).mistakes == ("causal_mask_inverted",)  # and not that the future is seen


class OrderlessCausalModel(CausalModel):
    def __init__(self, vocab_size: int, d_model: int, nhead: int) -> None:
        super().__init__(vocab_size, d_model, nhead, max_len=1)
        del self.pe

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.embedding(x), mask=self.hidden(x.size(1)))


class OrderlessModel(OrderlessCausalModel):
    def hidden(self, length: int) -> Tensor:
        return torch.zeros(length, length, dtype=torch.bool)


class OneCausalLayer(OrderlessCausalModel):
    def __init__(self, vocab_size: int, d_model: int, nhead: int) -> None:
        super().__init__(vocab_size, d_model, nhead)
        del self.encoder.layers[1]


def test_a_causal_mask_is_enough_to_show_the_order_and_no_mask_or_one_layer_is_not() -> None:
    report = verify(OrderlessCausalModel)
    assert (report.verdict, report.findings) == ("equal", []), str(report)
    for lost in (OrderlessModel, OneCausalLayer):
        assert "no_positions" in verify(lost).mistakes


class SinePositions(nn.Module):
    """Gives the rows for all samples at once, and leaves it to others to add them."""

    pe: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__()
        angles = torch.arange(64)[:, None] / 10000 ** (torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("pe", torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.pe[:, : x.size(1)]


class AddsPositionsOutside(OrderlessCausalModel):
    def __init__(self, vocab_size: int, d_model: int, nhead: int) -> None:
        super().__init__(vocab_size, d_model, nhead)
        self.positions = SinePositions(d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.encoder(x + self.positions(x), mask=self.hidden(x.size(1)))


class AddsPositionsTwice(AddsPositionsOutside):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.encoder(x + self.positions(x) + self.positions(x), mask=self.hidden(x.size(1)))


@pytest.mark.thorough
def test_positions_may_be_made_by_a_part_and_added_outside_of_it() -> None:
    report = verify(AddsPositionsOutside)
    assert report.verdict == "equal", str(report)
    report = verify(AddsPositionsTwice)
    assert report.verdict != "equal", str(report)


class ExchangingModel(layers.TranslationModel):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory, x = self.embed(tgt), self.encode(self.embed(src))
        for layer in self.decoder_layers:
            x = layer(x, memory)
        return self.head(self.norm(x))


def test_memory_and_target_are_told_apart() -> None:
    assert "memory_and_target_exchanged" in verify(ExchangingModel).mistakes, str(verify(ExchangingModel))


class DeafModel(CausalModel):
    """Reads out a first token of its own, which sees no other: attention runs along the samples."""

    def __init__(self, vocab_size: int, d_model: int, nhead: int, max_len: int) -> None:
        super().__init__(vocab_size, d_model, nhead, max_len)
        layer = nn.TransformerEncoderLayer(d_model, nhead, 20)
        self.encoder, self.first = nn.TransformerEncoder(layer, 2), nn.Parameter(torch.ones(1, 1, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(torch.cat([self.first.expand(len(x), -1, -1), self.embedding(x)], 1))[:, 0]


def test_a_model_that_does_not_read_its_input_is_named() -> None:
    assert verify(DeafModel).mistakes == ("input_never_read",), str(verify(DeafModel))


class PaddedByItsIds(CausalModel):
    """Right, on torch's encoder, which packs tokens without their padding where its heads are even in number."""

    def __init__(self, vocab_size: int, max_len: int, pad_id: int = 0) -> None:
        super().__init__(vocab_size, 12, 2, max_len)
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
        self.encoder, self.pad_id = nn.TransformerEncoder(layer, 2), pad_id
        self.positions = nn.Embedding(max_len, 12)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x) + self.positions.weight[: x.size(1)]
        return self.read_out(self.encoder(embedded, src_key_padding_mask=x == self.pad_id))

    def read_out(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.T


class LacksItsHead(PaddedByItsIds):
    def read_out(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[operator]


def test_padding_that_torch_packs_is_seen() -> None:
    report = verify(PaddedByItsIds)
    assert report.verdict == "equal", str(report)


@pytest.mark.thorough
def test_a_model_of_torchs_parts_that_does_not_run_says_why() -> None:
    assert "No way to run it was found; it said" in verify(LacksItsHead).reason


class OuterMasksModel(layers.TranslationModel):
    """Takes a mask for the source and one for the target, True = may not look."""

    def make_decoder(self, d_model: int, n_heads: int, d_ff: int) -> nn.ModuleList:
        self.num_heads = n_heads
        return super().make_decoder(d_model, n_heads, d_ff)

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        src_mask, tgt_mask = self.masks(src, tgt, src_mask, tgt_mask)
        encoder, own, crossed = self.dealt(src_mask, tgt_mask, tgt.size(1))
        memory, x = self.embed(src), self.embed(tgt)
        for layer in self.encoder_layers:
            memory = layer(memory, encoder)
        for layer in self.decoder_layers:
            x = layer(x, memory, own, crossed)
        return self.head(self.norm(x))

    def masks(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """From (batch, 1, key) to what torch's layers take."""
        return self.full(src_mask, src, src), self.full(tgt_mask, tgt, tgt)

    def full(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """The mask of each head."""
        shape = (len(query), query.size(1), key.size(1))
        return None if mask is None else mask.expand(shape).repeat_interleave(self.num_heads, 0)

    def dealt(self, source: Tensor | None, target: Tensor | None, length: int) -> tuple[Tensor | None, ...]:
        """The stage that defects replace: the masks of the encoder, the decoder, and its cross-attention."""
        return source, target, self.crossed(source, length)

    def crossed(self, source: Tensor | None, length: int) -> Tensor | None:
        """The source's mask for as many queries as there are targets."""
        return None if source is None else source[:, :1].expand(-1, length, -1)


class ExchangedMasksModel(OuterMasksModel):
    def dealt(self, source: Tensor | None, target: Tensor | None, length: int) -> tuple[Tensor | None, ...]:
        return source, self.crossed(source, length), target


class DroppedMaskModel(OuterMasksModel):
    def dealt(self, source: Tensor | None, target: Tensor | None, length: int) -> tuple[Tensor | None, ...]:
        return source, target, None


class UnusedMaskModel(OuterMasksModel):
    def dealt(self, source: Tensor | None, target: Tensor | None, length: int) -> tuple[Tensor | None, ...]:
        return source, None, self.crossed(source, length)


class InnerMasksModel(OuterMasksModel):
    """Makes its masks of the padding, 0."""

    layers = 1

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(src, tgt)

    def masks(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        future = torch.ones(2 * [tgt.size(1)]).triu(1).bool()
        return super().masks(src, tgt, self.hidden(src)[:, None], self.hidden(tgt)[:, None] | future)

    def hidden(self, ids: Tensor) -> Tensor:
        """The stage that defects replace."""
        return ids == 0


class PaddedRowsModel(InnerMasksModel):
    """Hides all from queries that are padding themselves, with a number that leaves them looking at everything."""

    def full(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        assert mask is not None  # it is made inside
        hidden = super().full(mask | self.hidden(query)[:, :, None], query, key)
        return None if hidden is None else hidden * torch.tensor(-1e12)


class ExchangedInnerMasksModel(InnerMasksModel, ExchangedMasksModel):
    pass


class InvertedInnerMasksModel(InnerMasksModel):
    def masks(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        source, target = super().masks(src, tgt, src_mask, tgt_mask)
        return None if source is None else ~source, target


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("found", "names"),
    [
        (OuterMasksModel, ()),
        (ExchangedMasksModel, ("masks_exchanged",)),
        (DroppedMaskModel, ("model_mask_dropped",)),
        (UnusedMaskModel, ("mask_never_used",)),
        (InnerMasksModel, ()),
        (PaddedRowsModel, ()),
        (ExchangedInnerMasksModel, ("future_is_seen", "masks_exchanged")),
        (InvertedInnerMasksModel, ("model_padding_inverted",)),
    ],
)
def test_masks_are_followed_through_a_model(found: Any, names: tuple[str, ...]) -> None:
    report = verify(found)
    assert report.mistakes == names, str(report)
    assert any(check.name.startswith("masks of the model") for check in report.checks), str(report)


class UnreadNormDecoderLayer(layers.TwoMaskDecoderLayer):
    """Normalises the memory, and reads it as it was."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.norm4 = nn.LayerNorm(d_model)

    def cross(self, x: Tensor, memory: Tensor, src_mask: Tensor | None) -> Tensor:
        self.norm4(memory)
        return super().cross(x, memory, src_mask)


def test_a_norm_that_nothing_reads_is_named() -> None:
    assert verify(UnreadNormDecoderLayer).mistakes == ("norm_never_used",)


class OptionalMemoryLayer(layers.TwoMaskDecoderLayer):
    """Right: without a memory, cross-attention and its norm are left out."""

    def forward(self, x: Tensor, memory: Tensor | None = None, tgt_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = self.norm1(x + self.self_attn(x, x, x, attn_mask=tgt_mask)[0])
        if memory is not None:
            x = self.norm2(x + self.cross(x, memory, None))
        return self.norm3(x + self.mlp(x))


def test_a_branch_that_is_left_out_whole_misses_no_norm() -> None:
    report = verify(OptionalMemoryLayer)
    assert (report.verdict, report.not_exercised) == ("equal", []), str(report)


class LosesItsTokensToTheMemory(OptionalMemoryLayer):
    def cross(self, x: Tensor, memory: Tensor, src_mask: Tensor | None) -> Tensor:
        return super().cross(x, memory, src_mask) - x


def test_what_becomes_of_a_memory_that_may_be_left_out_is_part_of_an_equal() -> None:
    assert verify(LosesItsTokensToTheMemory).verdict != "equal"


class WithMoreKeys(layers.SequentialFeedForwardLayer):
    """A mask of more keys has nothing to hide where none are given."""

    def forward(self, x: Tensor, more_kv: Tensor | None = None, more_kv_mask: Tensor | None = None) -> Tensor:
        y = self.ln_1(x)
        keys = y if more_kv is None else torch.cat([more_kv, y], 1)
        hidden = None if more_kv is None or more_kv_mask is None else nn.functional.pad(more_kv_mask, (0, y.size(1)))
        x = x + self.attn(y, keys, keys, key_padding_mask=hidden)[0]
        return x + self.mlp(self.ln_2(x))


def test_a_mask_of_what_is_not_given_has_nothing_to_hide() -> None:
    report = verify(WithMoreKeys)
    assert report.mistakes == (), str(report)
    assert ("more_kv_mask", "no more_kv is passed that it could hide") in [
        (exercise.what, exercise.detail) for exercise in report.not_exercised
    ]


class TakesWhatTorchsStackGives(layers.SequentialFeedForwardLayer):
    """Has arguments that no line reads, so that nn.TransformerDecoder may hold it."""

    def forward(
        self,
        x: Tensor,
        x_mask: Tensor | None = None,
        x_key_padding_mask: Tensor | None = None,
        x_is_causal: bool = False,
    ) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=x_mask)[0]
        return x + self.mlp(self.ln_2(x))


def test_a_mask_that_no_line_reads_beside_one_that_hides_is_listed() -> None:
    report = verify(TakesWhatTorchsStackGives)
    assert [(one.what, one.detail) for one in report.not_exercised] == [
        ("x_key_padding_mask", "no line of its forward reads it, so it hides nothing")
    ], str(report)


class Gates(nn.Module):
    """Beside ``memory_mask``, which this file passes to layers in a loop."""

    def forward(self, steps: Sequence[Callable[..., Tensor]], x: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        for step in steps:
            x = step(x, memory, memory_mask)
        return x


class ForgetsTheMemorysMask(layers.TwoMaskDecoderLayer):
    """A mask of the memory is accepted, and passed by ``Gates``; no line reads it."""

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(x, memory, tgt_mask)


class TakesWhatNobodyPasses(layers.TwoMaskDecoderLayer):
    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, enc_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(x, memory, tgt_mask)


def test_a_mask_of_the_memory_that_is_passed_and_never_read_is_a_mistake() -> None:
    assert verify(TakesWhatNobodyPasses).findings == []
    (finding,) = verify(ForgetsTheMemorysMask).findings
    assert finding.name == "mask_never_used"
    assert "step(x, memory, memory_mask) passes it" in finding.evidence


class AttendsBefore(nn.Module):
    """Causal, in torch's kernel."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.qkv, self.o = n_heads, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PutsNormsBehindByChoice(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ff: int, norm_position: str = "pre") -> None:
        super().__init__()
        self.attn, self.norm_position = AttendsBefore(d_model, n_heads), norm_position
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_position == "post":
            y = self.norm1(x + self.attn(x))
            return self.norm2(self.residual(x, y) + self.ff(y))
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))

    def residual(self, x: Tensor, y: Tensor) -> Tensor:
        return y


class AddsWhatWentInFirst(PutsNormsBehindByChoice):
    def residual(self, x: Tensor, y: Tensor) -> Tensor:
        return x


def test_an_option_that_places_norms_asks_for_no_other_residual() -> None:
    assert verify(PutsNormsBehindByChoice).verdict == "equal", str(verify(PutsNormsBehindByChoice))
    (finding,) = verify(AddsWhatWentInFirst).findings
    assert finding.name == "residual_from_elsewhere"
    assert finding.proof is not None
    assert "norm_position=post" in finding.evidence


class CrossesByChoice(layers.TwoMaskDecoderLayer):
    """Right: it leaves its memory out unless it is built to read one."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int, is_cross_attention: bool = False) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.is_cross_attention = is_cross_attention

    def cross(self, x: Tensor, memory: Tensor, src_mask: Tensor | None) -> Tensor:
        return super().cross(x, memory if self.is_cross_attention else x, src_mask)


class CrossesItselfByChoice(CrossesByChoice):
    def cross(self, x: Tensor, memory: Tensor, src_mask: Tensor | None) -> Tensor:
        return super().cross(x, x, src_mask)


class AttendsToItselfByChoice(CrossesByChoice):
    def __init__(self, d_model: int, n_heads: int, d_ff: int, is_self_attn: bool = True) -> None:
        super().__init__(d_model, n_heads, d_ff, not is_self_attn)


@pytest.mark.thorough
def test_a_memory_that_is_left_out_is_tried_with_the_option_that_asks_for_it() -> None:
    assert verify(CrossesByChoice).mistakes == ()
    assert verify(AttendsToItselfByChoice).mistakes == ()
    assert verify(CrossesItselfByChoice).mistakes == ("cross_attention_from_decoder",)


class AttendsToBothWithOne(layers.TwoMaskDecoderLayer):
    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.cross_attn = self.self_attn


class CallsOneForTheOther(layers.TwoMaskDecoderLayer):
    def cross(self, x: Tensor, memory: Tensor, src_mask: Tensor | None) -> Tensor:
        return self.self_attn(x, memory, memory, attn_mask=src_mask)[0]


@pytest.mark.parametrize("layer", [AttendsToBothWithOne, CallsOneForTheOther])
def test_an_attention_of_both_kinds_is_named_beside_what_else_is_shared(layer: type[nn.Module]) -> None:
    assert verify(layer).mistakes == ("attention_shared",)


class CrossesItself(layers.TwoMaskDecoderLayer):
    def cross(self, x: Tensor, memory: Tensor, src_mask: Tensor | None) -> Tensor:
        return self.cross_attn(x, x, x)[0]


class ReadsNoSource(nn.Module):
    """Embeds a source that nothing reads, and so shows the future by its cross-attention."""

    def __init__(self, src_vocab: int, tgt_vocab: int, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(src_vocab, d_model), nn.Embedding(tgt_vocab, d_model)
        self.positions, self.layer = nn.Embedding(64, d_model), CrossesItself(d_model, n_heads, d_ff)
        self.head = nn.Linear(d_model, tgt_vocab)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory, x = (
            e(ids) + self.positions.weight[: ids.size(1)] for e, ids in ((self.source, src), (self.target, tgt))
        )
        future = torch.ones(2 * [tgt.size(1)]).triu(1).bool()
        return self.head(self.layer(x, memory, future, None))


def test_what_follows_from_a_memory_that_is_not_read_is_not_told_again() -> None:
    assert verify(ReadsNoSource).mistakes == ("cross_attention_from_decoder",)


class RawValuesLayer(layers.SequentialFeedForwardLayer):
    """Normalises queries and keys, and takes the values from the stream as it is."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        x = x + self.attn(y, y, x)[0]
        return x + self.mlp(self.ln_2(x))


def test_queries_keys_and_values_of_a_layer_are_all_normalised_or_none() -> None:
    report = verify(RawValuesLayer)
    assert report.mistakes == ("sublayer_reads_another_tensor",), str(report)
    assert "self.attn(y, y, x)" in line_of(report.findings[0])
    assert report.findings[0].proof is not None
    rows = {what: here for what, here, _ in verify(layers.SequentialFeedForwardLayer).conventions}
    assert rows["layer: wiring"] == "pre-norm, x + f(LayerNorm(x)), around attn, mlp"


class KeepsWhatItNormalised(layers.SequentialFeedForwardLayer):
    """Adds to what it normalised, drops of the whole sum, and keeps its maps from call to call."""

    maps: Tensor | None = None

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.ln_1(x)
        attended, self.maps = self.attn(x, x, x)
        x = self.ln_2(self.dropout(x + attended))
        return x + self.mlp(x)


def test_a_residual_of_the_norm_is_proven_behind_a_dropout_and_beside_kept_maps() -> None:
    (finding,) = verify(KeepsWhatItNormalised).findings
    assert (finding.name, finding.proof is not None) == ("residual_from_normalised", True)


class AsInSasrec(layers.SequentialFeedForwardLayer):
    """Right, as its authors released it: all but keys and values is normalised."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        y = self.ln_2(y + self.attn(y, self.keys(x, y), x)[0])
        return y + self.mlp(y)

    def keys(self, x: Tensor, y: Tensor) -> Tensor:
        return x


class NormsItsKeys(AsInSasrec):
    """Wrong: its values alone are not normalised."""

    def keys(self, x: Tensor, y: Tensor) -> Tensor:
        return y


def test_the_block_of_sasrec_is_intended_as_a_whole() -> None:
    report = verify(AsInSasrec)
    assert {one.name for one in report.intended} >= {"sublayer_reads_another_tensor", "residual_from_normalised"}
    assert report.verdict == "equal", str(report)
    assert verify(NormsItsKeys).verdict == "deviates"


class ConditionedLayer(layers.SequentialFeedForwardLayer):
    """Is shifted by a vector of each sample, and attends along the length or, wrongly, along the samples."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.shift = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x) + self.shift(c)[:, None]
        x = x + self.attn(y, y, y)[0]
        return x + self.mlp(self.ln_2(x))


class ConditionedAlongSamples(ConditionedLayer):
    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.attn = nn.MultiheadAttention(d_model, n_heads)


def test_a_layer_whose_samples_meet_in_every_call_mixes_batch_and_length() -> None:
    assert verify(ConditionedLayer).findings == []
    (finding,) = verify(ConditionedAlongSamples).findings
    assert finding.name == "samples_mixed"
    assert "nn.MultiheadAttention(d_model, n_heads)" in line_of(finding)


class ForgetfulDecoderLayer(layers.TwoMaskDecoderLayer):
    """Adds what it had before in the place of what the cross-attention gave."""

    def cross(self, x: Tensor, memory: Tensor, src_mask: Tensor | None) -> Tensor:
        super().cross(x, memory, src_mask)
        return x


def test_a_sub_layer_whose_output_nothing_uses_is_named() -> None:
    report = verify(ForgetfulDecoderLayer)
    assert report.mistakes == ("sublayer_unused",), str(report)


class DeadProjectionLayer(layers.SequentialFeedForwardLayer):
    """Projects the tokens, and reads the projection nowhere."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(d_model, n_heads, d_ff)
        self.gate = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.gate(x)
        return super().forward(x)


class DeadProjectionBesideAnEarlierResidual(layers.StaleResidualLayer, DeadProjectionLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.gate(x)
        return super().forward(x)


def test_a_projection_that_nothing_reads_is_named_alone_and_beside_others() -> None:
    assert verify(DeadProjectionLayer).mistakes == ("sublayer_unused",)
    report = verify(DeadProjectionBesideAnEarlierResidual)
    assert set(report.mistakes) == {"sublayer_unused", "residual_from_elsewhere"}, str(report)


class InPlaceLayer(nn.Module):
    """Right: adds its residuals where the sub-layers wrote."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attn, self.dropout = nn.MultiheadAttention(d_model, n_heads, batch_first=True), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        out = self.dropout(self.attn(x, x, x)[0])
        out += x
        out = self.norm1(out)
        result = self.dropout(self.mlp(out))
        result += self.kept(x, out)
        return self.norm2(result)

    def kept(self, x: Tensor, out: Tensor) -> Tensor:
        return out


class InPlaceLayerWithAnEarlierResidual(InPlaceLayer):
    def kept(self, x: Tensor, out: Tensor) -> Tensor:
        return x


def test_a_residual_that_is_added_in_place_is_one() -> None:
    assert verify(InPlaceLayer).verdict == "equal"
    (finding,) = verify(InPlaceLayerWithAnEarlierResidual).findings
    assert finding.name == "residual_from_elsewhere"
    assert line_of(finding) == "result += self.kept(x, out)"


class AddsOnTwoLines(InPlaceLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x, x, x)[0])
        result = x + self.mlp(x)
        return self.norm2(self.joined(x, result))

    def joined(self, x: Tensor, result: Tensor) -> Tensor:
        return x + result


class AddsInPlaceOnTwoLines(AddsOnTwoLines):
    def joined(self, x: Tensor, result: Tensor) -> Tensor:
        result += x
        return result


@pytest.mark.parametrize(
    ("layer", "line"), [(AddsOnTwoLines, "return x + result"), (AddsInPlaceOnTwoLines, "result += x")]
)
def test_a_residual_that_is_added_once_more_is_named_and_proven_where_that_is_done(layer: Any, line: str) -> None:
    (finding,) = verify(layer).findings
    assert (finding.name, finding.line and finding.line.text) == ("residual_added_twice", line)
    assert finding.proof is not None


class OneLengthAttention(ThreeMatrices):
    """Right where queries and keys are as many."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, n, e = q.shape
        heads = (one.view(b, n, e) for one in (q, k, v))
        return self.attended(*heads)


class OneLengthLayer(nn.Module):
    def __init__(self, d_model: int, num_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attn = OneLengthAttention(d_model, num_heads)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x, x, x))
        return self.norm2(x + self.mlp(x))


def test_an_attention_that_a_layer_gives_one_tensor_need_not_take_keys_of_another_length() -> None:
    assert verify(OneLengthAttention).mistakes == ("other_lengths_crash",)
    assert verify(OneLengthLayer).verdict == "equal"


class NormsItsFirstArgument(OneLengthAttention):
    """Right with a context of its own; where a layer hands over the input twice, its keys are not normalised."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = self.norm(x)
        context = x if context is None else context
        return super().forward(x, context, context)


class NormsQueriesLayer(nn.Module):
    def __init__(self, d_model: int, num_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attn = NormsItsFirstArgument(d_model, num_heads)
        self.mlp = nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x)
        return x + self.mlp(x)


def test_an_attention_is_judged_with_the_arguments_that_its_layer_gives() -> None:
    report = verify(NormsQueriesLayer)
    assert (report.verdict, report.mistakes) == ("unchecked", ("keys_not_normalised",)), str(report)


class EmbeddingDecoder(Stack):
    """A decoder that embeds its own ids, and takes the memory and the masks of both."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int, d_ff: int, num_layers: int) -> None:
        super().__init__(d_model, n_heads, d_ff, num_layers)
        self.num_heads, self.embedding = n_heads, nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(9, d_model)

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor, src_mask: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embedding(tgt) + self.positions(torch.arange(tgt.size(1), device=tgt.device))
        own, crossed = (mask.repeat_interleave(self.num_heads, 0) for mask in self.dealt(tgt_mask, src_mask))
        for layer in self.layers:
            x = layer(x, memory, own, crossed)
        return x

    def dealt(self, tgt_mask: Tensor, src_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The stage that defects replace."""
        return tgt_mask, src_mask


class ExchangingEmbeddingDecoder(EmbeddingDecoder):
    def dealt(self, tgt_mask: Tensor, src_mask: Tensor) -> tuple[Tensor, Tensor]:
        return src_mask, tgt_mask


class ReadsFeatures(EmbeddingDecoder):
    """Projects what it reads from a width of its own."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int, d_ff: int, num_layers: int) -> None:
        super().__init__(vocab_size, d_model, n_heads, d_ff, num_layers)
        self.projected = nn.Linear(11, d_model)

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor, src_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tgt, self.projected(memory), tgt_mask, src_mask)


@pytest.mark.thorough
def test_a_decoder_that_embeds_its_own_ids_is_run_on_a_memory() -> None:
    assert verify(ReadsFeatures).verdict == "equal", str(verify(ReadsFeatures))
    assert verify(EmbeddingDecoder).verdict == "equal", str(verify(EmbeddingDecoder))
    assert verify(ExchangingEmbeddingDecoder).mistakes == ("masks_exchanged",)


class TorchModel(nn.Module):
    """nn.Transformer, with a padding mask for each side and one for the memory."""

    def __init__(self, vocab_size: int, d_model: int, nhead: int, max_len: int, device: str = "cuda") -> None:
        super().__init__()
        self.transformer = nn.Transformer(d_model, nhead, 2, 2, 20, batch_first=True, device=device)
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
        sequences = [self.embedding(x) + self.positions(torch.arange(x.size(1), device=x.device)) for x in (src, tgt)]
        return self.transformer(*sequences, **self.masks(src_mask, tgt_mask, src_padding_mask))

    def masks(self, src_mask: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> dict[str, Tensor]:
        """The stage that defects replace."""
        return {
            "src_mask": src_mask,
            "tgt_mask": tgt_mask,
            "src_key_padding_mask": src_padding_mask,
            "memory_key_padding_mask": src_padding_mask,
        }


class ExchangingTorchModel(TorchModel):
    def masks(self, src_mask: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> dict[str, Tensor]:
        return super().masks(tgt_mask, src_mask, src_padding_mask)


@pytest.mark.thorough
def test_masks_are_followed_to_torchs_own_layers() -> None:
    assert verify(TorchModel).verdict == "equal", str(verify(TorchModel))
    assert verify(ExchangingTorchModel).mistakes == ("masks_exchanged",)


class OnePatchImageModel(ImageModel):
    def __init__(self) -> None:
        super().__init__()
        self.image_size = 4

    def place(self, x: Tensor) -> Tensor:
        assert x.size(1) == 1
        return x + self.pos_embedding[:, :1]


def test_an_image_of_one_patch_shows_no_order() -> None:
    report = verify(OnePatchImageModel())
    assert (report.verdict, [one.what for one in report.not_exercised]) == ("partial", ["the whole model"]), str(report)


class ChoosyModel(CausalModel):
    """Refuses a token that comes twice."""

    def forward(self, x: Tensor) -> Tensor:
        assert all(len(row.unique()) == len(row) for row in x), "a token comes twice"
        return super().forward(x)


def test_a_model_that_refuses_other_tokens_is_no_verdict() -> None:
    report = verify(ChoosyModel)
    assert report.verdict == "unchecked", str(report)
    assert "a token comes twice" in report.reason


class BlockWithItsOwnMask(nn.Module):
    """Right attention, made wrong by the mask that the block hands to it."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def hidden(self, length: int) -> Tensor:
        return self.norm.weight.new_ones(length, length).triu(1).bool()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attn(h, h, h, attn_mask=self.hidden(x.size(1)), need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class BlockThatSeesTheFuture(BlockWithItsOwnMask):
    def hidden(self, length: int) -> Tensor:
        return torch.ones(length, length).tril(-1).bool()


class SigmoidCrossLayer(nn.Module):
    """Two attentions in one forward; only the second is wrong."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.h = n_heads
        self.qkv, self.own_out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.q, self.kv, self.out = (
            nn.Linear(d_model, d_model),
            nn.Linear(d_model, 2 * d_model),
            nn.Linear(d_model, d_model),
        )
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = map(self.split, self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.own_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        q = self.split(self.q(self.norm2(x)))
        k, v = map(self.split, self.kv(memory).chunk(2, -1))
        weights = torch.sigmoid(q @ k.mT / q.size(-1) ** 0.5)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm3(x))))


def test_a_mask_that_a_block_makes_is_judged_where_it_is_used() -> None:
    assert verify(BlockWithItsOwnMask).verdict == "equal"
    report = verify(BlockThatSeesTheFuture)
    assert report.mistakes == ("causal_mask_inverted",)
    (finding,) = report.findings
    assert "attn_mask=self.hidden" in line_of(finding)


def test_every_attention_of_one_forward_is_judged() -> None:
    assert verify(SigmoidCrossLayer).mistakes == ("sigmoid_for_softmax",)


class PaddedAttention(nn.Module):
    """True in its mask is padding."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor, pad: Tensor | None = None) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in (self.q(x), *self.kv(context).chunk(2, -1))
        )
        mask = None if pad is None else ~pad[:, None, None, :]
        return self.o(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class PaddedLayer(nn.Module):
    """Takes the padding of both of its inputs."""

    def __init__(self, dim: int, n_heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = PaddedAttention(dim, n_heads), PaddedAttention(dim, n_heads)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def of_memory(self, pad: Tensor) -> Tensor:
        return pad

    def forward(
        self, x: Tensor, memory: Tensor, x_pad: Tensor | None = None, memory_pad: Tensor | None = None
    ) -> Tensor:
        y = self.norm1(x)
        x = x + self.self_attn(y, y, x_pad)
        pad = None if memory_pad is None else self.of_memory(memory_pad)
        x = x + self.cross_attn(self.norm2(x), memory, pad)
        return x + self.fc2(torch.relu(self.fc1(self.norm3(x))))


class OppositeLayer(PaddedLayer):
    def of_memory(self, pad: Tensor) -> Tensor:
        return ~pad


class GatedLayer(PaddedLayer):
    def forward(
        self, x: Tensor, memory: Tensor, gates: Tensor | None = None, memory_pad: Tensor | None = None
    ) -> Tensor:
        return super().forward(x if gates is None else x * gates, memory, None, memory_pad)


class HalvedLayer(GatedLayer):
    def forward(
        self, x: Tensor, memory: Tensor, gates: Tensor | None = None, memory_pad: Tensor | None = None
    ) -> Tensor:
        return 0.5 * super().forward(x, memory, gates, memory_pad)


@pytest.mark.thorough
def test_what_nothing_explains_is_not_equal_as_far_as_it_ran() -> None:
    report = verify(HalvedLayer)
    assert report.verdict == "unchecked", str(report)


@pytest.mark.thorough
def test_masks_of_one_layer_mean_the_same() -> None:
    assert verify(PaddedLayer).verdict == "equal"
    report = verify(OppositeLayer)
    assert report.mistakes == ("masks_of_opposite_meaning",)
    assert "memory_pad: True = may look" in report.findings[0].evidence
    assert "cross_attn" in report.findings[0].stack[-1].text


def test_an_argument_of_a_layer_that_nobody_gave_is_listed() -> None:
    report = verify(GatedLayer)
    assert report.verdict == "partial"
    assert [exercise.what for exercise in report.not_exercised] == ["gates"]


class FusingAttention(nn.Module):
    """A whole layer under the name of an attention: x asks, and the spectrum answers."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attend, self.first = nn.MultiheadAttention(dim, num_heads, batch_first=True), nn.LayerNorm(dim)
        self.wide, self.narrow, self.second = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.LayerNorm(dim)
        self.ffn = nn.Sequential(self.wide, nn.GELU(), self.narrow)

    def forward(self, freq_map: Tensor, other: Tensor) -> Tensor:
        x = self.first(freq_map + self.mixed(freq_map, other))
        return self.second(x + self.ffn(x))

    def mixed(self, x: Tensor, other: Tensor) -> Tensor:
        return self.attend(x, other, other)[0]


class FusingTheWrongWay(FusingAttention):
    def mixed(self, x: Tensor, other: Tensor) -> Tensor:
        return self.attend(other, x, x)[0]


class FusingWithSomethingElse(FusingAttention):
    """Nobody can tell what it is called with."""

    def forward(self, x: Tensor, plan: object) -> Tensor:
        return super().forward(x, plan.tokens)  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_a_layer_named_as_an_attention_is_equal_only_where_it_was_run() -> None:
    assert verify(FusingAttention).verdict in ("equal", "partial")
    assert verify(FusingTheWrongWay).verdict == "deviates"
    assert verify(FusingWithSomethingElse).verdict == "unchecked"


class AttendsTwice(nn.Module):
    """A decoder layer under the name of an attention: both of its attentions are called."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.own, self.cross = (nn.MultiheadAttention(dim, num_heads, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def around(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norms[0](x + self.own(x, x, x)[0])
        x = self.norms[1](self.around(x, self.cross(x, memory, memory)[0]))
        return self.norms[2](x + self.ffn(x))


class DecoderAttention(AttendsTwice):
    pass


class DecoderAttentionWithoutResidual(AttendsTwice):
    def around(self, x: Tensor, branch: Tensor) -> Tensor:
        return branch


def test_a_decoder_layer_named_as_an_attention_is_read_as_a_layer() -> None:
    assert verify(DecoderAttention).verdict == "equal"
    assert verify(DecoderAttentionWithoutResidual).mistakes == ("residual_missing",)


class ReturnsItsMaps(ThreeMatrices):
    """Attention with its residual connection and its norm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.operands(x)
        weights = self.scores(q, k).softmax(-1)
        return self.norm(x + self.finish(weights @ v)), self.maps(weights)

    def maps(self, weights: Tensor) -> Tensor:
        return weights


class ReturnsNothing(ReturnsItsMaps):
    def maps(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights)


class NormOfNothing(ReturnsNothing):
    """It is no norm, whatever it is called."""


@pytest.mark.parametrize("made", [ReturnsNothing, NormOfNothing])
def test_what_comes_back_beside_and_is_none_of_torchs_is_said(made: type[nn.Module]) -> None:
    assert verify(ReturnsItsMaps).verdict == "equal"
    report = verify(made)
    assert report.verdict == "partial"
    assert ("output 2", "it is not part of torch's program") in [(x.what, x.detail) for x in report.not_exercised]


class AddsAndNormalises(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.norm(x + branch)


class NormalisesAlone(AddsAndNormalises):
    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.norm(branch)


class LayerWithHelpers(nn.Module):
    around: type[nn.Module] = AddsAndNormalises

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.first, self.second = self.around(dim), self.around(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, self.attention(x, x, x, need_weights=False)[0])
        return self.second(x, self.ffn(x))


class LayerWithHelpersThatForget(LayerWithHelpers):
    around = NormalisesAlone


def test_a_residual_that_one_helper_forgets_in_each_of_its_calls_is_proven() -> None:
    assert verify(LayerWithHelpers).verdict == "equal"
    report = verify(LayerWithHelpersThatForget)
    assert report.mistakes == ("residual_missing",)
    assert report.findings[0].is_proven
    assert line_of(report.findings[0]) == "return self.norm(branch)"


def test_a_program_that_leaves_a_residual_out_too_refutes_no_suspicion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wholes, "_proofs", lambda report, whole, repairs: [None] * len(repairs))
    report = verify(LayerWithHelpersThatForget)
    assert (report.verdict, [one.name for one in report.suspected]) == ("unchecked", ["residual_missing"])


def test_whoever_says_how_to_call_it_as_an_attention_has_it_read_as_one() -> None:
    def call(module: Any, query: Tensor, key: Tensor, value: Tensor, may_attend: Any) -> Any:
        return module(query, key)

    assert verify(DecoderAttention, adapter=Adapter(call=call)).kind == "multi-head attention"


class Projections(nn.Module):
    """Holds weights that its owner calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)


class HolderOfParts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Projections(width)
        self.mlp = nn.Sequential(nn.Linear(width, 9), nn.ReLU(), nn.Linear(9, width))


class StackOfParts(nn.Module):
    """Computes the attention of its layers in its own forward."""

    axis = -1

    def __init__(self, d_model: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HolderOfParts(d_model) for _ in range(n_layers))

    def forward(self, x: Any) -> Any:
        layer: Any
        for layer in self.layers:
            q, k, v = layer.attention.packed(layer.norm1(x)).chunk(3, -1)
            x = x + layer.attention.out((q @ k.mT / q.size(-1) ** 0.5).softmax(self.axis) @ v)
            x = x + layer.mlp(layer.norm2(x))
        return x


@pytest.mark.thorough
def test_parts_without_a_forward_are_read_where_their_owner_calls_them() -> None:
    report = verify(StackOfParts)
    assert report.verdict == "unchecked", str(report)  # nothing that can be called again holds its attention
    assert not report.findings
    assert verify(changed(StackOfParts, axis=-2)).mistakes == ("softmax_over_queries",)


class PositionalEncoding(nn.Module):
    """More than its name says: a learnt token comes before the others."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.first, self.table = nn.Parameter(torch.randn(1, 1, d_model)), nn.Embedding(64, d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(x.size(0), -1, -1), x], 1)
        return x + self.table(torch.arange(x.size(1), device=x.device))


class ReadsItsFirstToken(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.positions = PositionalEncoding(d_model)
        self.layer = layers.SequentialFeedForwardLayer(d_model, n_heads, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.layer(self.positions(x))
        return encoded[:, 0]


def test_a_part_that_cannot_be_read_is_followed_in_the_whole() -> None:
    report = verify(ReadsItsFirstToken)
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)
    assert "a token of all tokens is taken" in str(report.intended)


class TiedByALambda(nn.Module):
    """Its last function reads the weights of the instance that made it."""

    is_masked = True

    def __init__(self, vocab_size: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(64, d_model)
        self.layer = nn.TransformerEncoderLayer(d_model, n_heads, 2 * d_model, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(d_model)
        self.head: Callable[[Tensor], Tensor] = lambda x: F.linear(x, self.embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.full((ids.size(1), ids.size(1)), float("-inf"), device=ids.device).triu(1)
        x = self.embedding(ids) + self.positions.weight[: ids.size(1)]
        return self.head(self.norm(self.layer(x, src_mask=mask if self.is_masked else None)))


def test_a_model_whose_lambda_reads_its_own_weights_is_run_whole() -> None:
    assert verify(TiedByALambda).verdict == "equal", str(verify(TiedByALambda))
    assert verify(changed(TiedByALambda, is_masked=False)).mistakes == ("future_is_seen",)


class SkipsItselfInEval(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(1).item() < 0.2:
            return x
        x = self.norm1(x + self.attention(x, x, x)[0])
        return self.norm2(x + self.mlp(x))


def test_a_layer_that_is_skipped_at_random_in_eval_is_named() -> None:
    found = next(one for one in verify(SkipsItselfInEval).findings if one.name == "random_in_eval")
    assert line_of(found).startswith("if torch.rand(1)")
