"""verify on the ways in which attention is called and laid out elsewhere: each was read wrongly once, or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests import verify
from equivalence_tests.checker.test_verify_attention import OfItself, Plain


class CausalUnlessToldOtherwise(OfItself):
    """The mask lies in an object; without one, no token sees the future."""

    def forward(self, x: Tensor, attn_mask: Any = None) -> Tensor:
        blocked = x.new_ones(x.size(1), x.size(1)).triu(1) > 0 if attn_mask is None else attn_mask.mask
        return self.mixed(self.compared(x, x).masked_fill(blocked, -torch.inf).softmax(-1), x)


def test_a_mask_may_be_held_by_an_object_and_take_the_place_of_the_causal_mask() -> None:
    report = verify(CausalUnlessToldOtherwise)
    assert report.verdict == "equal", str(report)
    assert "held by an object" in str(report.conventions)
    assert "replaces the built-in causal mask" in str(report.notes)


class CausalUnlessPadded(OfItself):
    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        blocked = x.new_ones(x.size(1), x.size(1)).triu(1) > 0 if padding is None else padding[:, None, None, :]
        return self.mixed(self.compared(x, x).masked_fill(blocked, -torch.inf).softmax(-1), x)


def test_padding_that_takes_the_place_of_the_causal_mask_is_listed() -> None:
    report = verify(CausalUnlessPadded)
    assert [one.what for one in report.not_exercised] == ["padding together with the causal mask"], str(report)


class TrainsInSilence(Plain):
    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mixed(self.weights(q, k), v)


class OfSounds(nn.Module):
    """(batch, features, len), projected by convolutions over one step; q, k, v lie together for each head."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, channels)
        self.qkv, self.proj = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (self.heads, -1)).chunk(3, 2)
        weights = (q.mT @ k / q.size(2) ** 0.5).softmax(-1)
        return x + self.proj((v @ weights.mT).flatten(1, 2))


class OfImages(nn.Module):
    """(batch, features, height, width)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def laid_out(self, context: Tensor) -> Tensor:
        return context.mT

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, self.heads, -1)).mT.unbind(1)
        context = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v
        return self.proj(self.laid_out(context).reshape(x.shape))


class InFloat32(OfItself):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return x + super().forward(self.norm(x))


class OfAnImageOfThisSize(OfItself):
    def forward(self, x: Tensor, H: int = 0, W: int = 0) -> Tensor:  # noqa: N803  (the names are what is read)
        return super().forward(x.unflatten(1, (H, W)).flatten(1, 2))


class HasSections(OfItself):
    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.transformer["num_heads"])


class MaySwitchMasksOff(OfItself):
    def __init__(self, dim: int, heads: int, mask_flag: bool = False) -> None:
        super().__init__(dim, heads)
        self.mask_flag = mask_flag

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.mask_flag and mask is not None:
            raise NotImplementedError
        return super().forward(x)


class NormalisesHeads(Plain):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // heads), nn.LayerNorm(dim // heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key = self.q_norm(self.split(self.q(q))), self.k_norm(self.split(self.k(k)))
        return self.mixed((query @ key.mT / query.size(-1) ** 0.5).softmax(-1), v)


class NormalisesMemory(Plain):
    """Two norms, one for each sequence."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.q_norm, self.kv_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def normalised(self, memory: Tensor) -> Tensor:
        return self.kv_norm(memory)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory = self.normalised(memory)
        return self.mixed(self.weights(self.q_norm(x), memory), memory)


class SplitsAlone(nn.Module):
    """Heads, but no matrices."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        return ((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class TakesItsWholeLength(OfItself):
    """The causal mask is as long as asked for, and never cut."""

    def __init__(self, dim: int, heads: int, n_ctx: int) -> None:
        super().__init__(dim, heads)
        self.register_buffer("triangle", torch.ones(n_ctx, n_ctx).tril())

    def hidden(self, scores: Tensor) -> Tensor:
        return scores * self.triangle - 1e9 * (1 - self.triangle)  # type: ignore[operator]


class ProjectsTheOutputOnly(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.out = heads, nn.Linear(dim, dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        return self.out(((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


RIGHT = (
    TakesItsWholeLength,
    ProjectsTheOutputOnly,
    TrainsInSilence,
    OfSounds,
    OfImages,
    InFloat32,
    OfAnImageOfThisSize,
    HasSections,
    NormalisesHeads,
    NormalisesMemory,
    SplitsAlone,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("right", RIGHT)
def test_right_attention_is_not_blamed(right: Callable[..., Any]) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)


def test_a_mask_that_the_constructor_switches_off_is_no_mistake() -> None:
    report = verify(MaySwitchMasksOff)
    assert report.verdict == "partial", str(report)
    assert "mask_flag is False" in str(report)


class MergesImagesWrongly(OfImages):
    def laid_out(self, context: Tensor) -> Tensor:
        return context


class MergesFeaturesFirst(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = self.weights(q, k) @ self.split(self.v(v))
        return self.out(context.mT.reshape(q.shape))


class ForgetsOneNorm(NormalisesMemory):
    def normalised(self, memory: Tensor) -> Tensor:
        return memory


class NormalisesKeysOnly(Plain):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        normalised = self.norm(x)
        return x + self.mixed(self.weights(x, normalised), normalised)


class NormalisesMergedHeadsAndScalesTwice(Plain):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key = self.split(self.q(q)), self.split(self.k(k))
        context = (query @ key.mT / query.size(-1)).softmax(-1) @ self.split(self.v(v))
        return self.out(self.norm(context.transpose(1, 2).flatten(2)))


class CutsThePackAtOnce(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(3, batch, self.heads, length, width // self.heads)
        return self.proj(((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


class KeepsNoCount(nn.Module):
    """The mask is required, True = may not look: one that was meant to hide nothing may hide everything."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.shape, self.norm = (heads, dim // heads), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        split = [
            layer(x).unflatten(-1, self.shape).transpose(1, 2) for layer, x in ((self.q, q), (self.k, k), (self.v, v))
        ]
        scores = (split[0] @ split[1].mT / q.size(-1) ** 0.5).masked_fill(attn_mask[:, None], -1e9)
        return self.norm(q + self.out((scores.softmax(-1) @ split[2]).transpose(1, 2).flatten(2)))


class TakesTenFromHiddenKeys(Plain):
    """Right for a mask of 0 and -inf, which nobody would hand to it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.compared(q, k)
        if mask is not None:
            scores = scores - 10.0 * (1.0 - mask[:, None, None].to(scores.dtype))
        return self.mixed(scores.softmax(-1), v)


class FoldsHeadsFirst(Plain):
    """Heads lie outside the batch, and the mask is repeated as if they lay inside."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key = (self.split(x).transpose(0, 1).flatten(0, 1) for x in (self.q(q), self.k(k)))
        scores = query @ key.mT / query.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask.repeat_interleave(self.heads, 0), -torch.inf)
        return self.mixed(scores.softmax(-1).unflatten(0, (self.heads, -1)).transpose(0, 1), v)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (FoldsHeadsFirst, "mask_repeated_in_wrong_order"),
        (TakesTenFromHiddenKeys, "mask_fill_too_small"),
        (CutsThePackAtOnce, "heads_split_without_transpose"),
        (KeepsNoCount, "scale_wrong"),
        (MergesImagesWrongly, "heads_merged_without_transpose"),
        (MergesFeaturesFirst, "heads_merged_without_transpose"),
        (ForgetsOneNorm, "norm_never_used"),
        (NormalisesKeysOnly, "queries_not_normalised"),
        (NormalisesMergedHeadsAndScalesTwice, "scale_wrong"),
    ],
)
def test_a_mistake_is_named(broken: Callable[..., Any], name: str) -> None:
    report = verify(broken)
    assert report.mistakes == (name,), str(report)


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
        return max(args, key=len)


def test_a_forward_that_names_nothing_is_said() -> None:
    assert "names no argument" in verify(TakesAnything, kind="attention").reason


class MixesScalesAndNormalisesWrongly(Plain):
    """Three mistakes; two of them show where all tokens are alike, one does not."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key = self.split(self.q(q)), self.split(self.k(k))
        weights = (query @ key.mT / q.size(-1) ** 0.5).softmax(-2)
        return self.out((weights @ self.split(self.v(v))).flatten(1).view_as(q))


def test_three_mistakes_are_found_in_parts() -> None:
    report = verify(MixesScalesAndNormalisesWrongly)
    assert set(report.mistakes) == {
        "scale_wrong",
        "softmax_over_queries",
        "heads_merged_without_transpose",
    }, str(report)
