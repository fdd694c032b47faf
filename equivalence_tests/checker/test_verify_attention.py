"""verify on ways to write attention that the zoo does not have: each was read wrongly once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.helpers_for_tests import line_of, proof_holds
from equivalence_tests.checker.zoo.conventions import ValuesFirst
from equivalence_tests.checker.zoo.stages import ThreeMatrices


class Plain(ThreeMatrices):
    """Right attention in small stages; each case below changes one."""

    def compared(self, query: Tensor, key: Tensor) -> Tensor:
        return self.scores(self.split(self.q(query)), self.split(self.k(key)))

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        return self.compared(query, key).softmax(-1)

    def mixed(self, weights: Tensor, value: Tensor) -> Tensor:
        return self.finish(weights @ self.split(self.v(value)))


class SharedMask(Plain):
    """The mask is (query, key): every sample has the same."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.compared(q, k)
        if mask is not None:
            scores = scores.masked_fill(mask[None, None] == 0, -1e9)
        return self.mixed(scores.softmax(-1), v)


class MapsOfHeadsFirst(Plain):
    """The maps come back as (heads * batch, query, key)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights(q, k)
        return self.mixed(weights, v), weights.transpose(0, 1).flatten(0, 1)


class OfItself(Plain):
    """Self-attention whose causal mask is somebody else's."""

    def hidden(self, scores: Tensor) -> Tensor:
        return scores

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.hidden(self.compared(x, x)).softmax(-1), x)


class CausalOnRequest(OfItself):
    """A triangle is there whether it is asked for or not."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__(dim, heads)
        self.causal = causal
        self.register_buffer("triangle", torch.ones(64, 64).tril())

    def hidden(self, scores: Tensor) -> Tensor:
        length = scores.size(-1)
        return scores.masked_fill(self.triangle[:length, :length] == 0, -torch.inf) if self.causal else scores  # type: ignore[index]


class DropsTheFill(OfItself):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.register_buffer("triangle", torch.ones(64, 64).tril())

    def hidden(self, scores: Tensor) -> Tensor:
        length = scores.size(-1)
        scores.masked_fill(self.triangle[:length, :length] == 0, -torch.inf)  # type: ignore[index]
        return scores


class DropsATriangleOfItsOwn(OfItself):
    """Whether padding is hidden says nothing of the future."""

    def __init__(self, dim: int, heads: int, pad_mask: bool = False) -> None:
        super().__init__(dim, heads)

    def hidden(self, scores: Tensor) -> Tensor:
        future = torch.ones(scores.shape[-2:]).triu(1) > 0
        scores.masked_fill(future, -torch.inf)
        return scores


class CausalSelfAttention(OfItself):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=False).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (DropsTheFill, "scores.masked_fill(self.triangle"),
        (DropsATriangleOfItsOwn, "scores.masked_fill(future"),
        (CausalSelfAttention, "is_causal=False"),
    ],
)
def test_a_causal_mask_that_hides_nothing_is_named(broken: Callable[..., Any], line: str) -> None:
    report = verify(broken)
    assert report.mistakes == ("causal_mask_never_used",), str(report)
    assert line in line_of(report.findings[0])


class TwoMasks(Plain):
    """One mask for each pair, one for the padding."""

    def hidden(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None, None], -torch.inf)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        scores = self.compared(q, k)
        scores = scores if attn_mask is None else scores.masked_fill(attn_mask, -torch.inf)
        scores = scores if padding_mask is None else self.hidden(scores, padding_mask)
        return self.mixed(scores.softmax(-1), v)


class AddsThePadding(TwoMasks):
    def hidden(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + (mask[:, None, None] != 0).to(scores.dtype)


class InfiniteWeights(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.weights(q, k)
        return self.mixed(weights if mask is None else weights.masked_fill(mask == 0, -torch.inf), v)


class FillsWithANameForNothing(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores, nearly = self.compared(q, k), 1e-12
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -nearly)
        return self.mixed(scores.softmax(-1), v)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("broken", "name", "line"),
    [
        (AddsThePadding, "mask_added_as_01", "scores + (mask"),
        (InfiniteWeights, "mask_after_softmax", "masked_fill(mask == 0"),
        (FillsWithANameForNothing, "mask_fill_not_negative", "masked_fill(mask == 0"),
    ],
)
def test_masks_that_hide_nothing_are_named(broken: Callable[..., Any], name: str, line: str) -> None:
    report = verify(broken)
    assert report.mistakes == (name,), str(report)
    assert line in line_of(report.findings[0])


def test_each_mask_has_a_row() -> None:
    rows = {row[0]: row[1] for row in verify(TwoMasks).conventions}
    assert rows["mask (padding_mask)"] == "(batch, key), True = may not look"
    assert "mask (attn_mask)" in rows


class Single(nn.Module):
    """One head of a lecture: the scale is that of the input."""

    def __init__(self, n_embd: int, head_size: int, block_size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(n_embd, head_size, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) @ self.key(x).mT * x.size(-1) ** -0.5).softmax(-1) @ self.value(x)


class OneHeadForAll(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.q(q) @ self.k(k).mT / (q.size(-1) // self.heads) ** 0.5
        return self.out(scores.softmax(-1) @ self.v(v))


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [(Single, "divided by sqrt(embed_dim)"), (OneHeadForAll, "heads are never split")],
)
def test_the_first_sizes_that_are_read_decide(broken: Callable[..., Any], sentence: str) -> None:
    report = verify(broken)
    assert len(report.findings) == 1, str(report)
    assert sentence in report.findings[0].sentence


class RotatedAttention(OfItself):
    """Values that turn with their position, too."""

    def split(self, x: Tensor) -> Tensor:
        split = super().split(x)
        angle = torch.arange(split.size(-2), dtype=x.dtype)[:, None]
        return split * angle.cos() + split.roll(1, -1) * angle.sin()


def test_what_no_catalogue_has_is_located_and_proven() -> None:
    report = verify(RotatedAttention)
    assert report.verdict == "deviates"
    for finding in report.findings:
        assert "angle" in line_of(finding)
        assert proof_holds(finding)


class HidesWhatItIsTold(Plain):
    """A required mask, True = may not look, filled with -inf; maps and output come back in that order."""

    def hidden(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return self.compared(q, k).masked_fill(mask[:, None], -torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.hidden(q, k, mask).softmax(-1).flatten(1, 2)
        return weights, self.mixed(weights.unflatten(1, (self.heads, -1)), v)


class HidesAndScalesTwice(HidesWhatItIsTold):
    def hidden(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return super().hidden(q, k, mask) / (q.size(-1) // self.heads) ** 0.5


class ProjectsForNothing(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        merged = (self.weights(q, k) @ self.split(self.v(v))).transpose(1, 2).flatten(2)
        self.out(merged)
        return merged


class ValuesOfTheKeys(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mixed(self.weights(q, k), k)


class PacksQueriesAndKeys(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qk, self.v, self.proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (*self.qk(x).chunk(2, -1), self.v(x)))
        return self.proj(((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (HidesAndScalesTwice, "scale_wrong"),
        (ProjectsForNothing, "output_projection_skipped"),
        (ValuesOfTheKeys, "values_from_key"),
    ],
)
def test_other_ways_to_break_are_named(broken: Callable[..., Any], name: str) -> None:
    report = verify(broken)
    assert report.mistakes == (name,), str(report)


class Misspelt(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.weights(q, k)
        return self.mixed(weights if mask is None else weights.mask_fill(mask, 0.0), v)  # type: ignore[attr-defined]


class WantsALengthOfFour(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.weights(q, k)
        return self.mixed(weights if mask is None else weights * mask.reshape(4, 4), v)


class InvertsBool(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.weights(q, k)
        return self.mixed(weights if mask is None else weights.masked_fill(1 - mask, 0.0), v)


class InvertsAnythingButBool(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.weights(q, k)
        return self.mixed(weights if mask is None else (weights * (1 - mask)).masked_fill(~mask, 0.0), v)


class AsksForAByte(Plain):
    """With masks of one byte it runs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.weights(q, k)
        return self.mixed(weights if mask is None else torch.where(1 - mask, 0.0, weights), v)


class OfFourInts(Plain):
    """Integers run, of a length that nobody tries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.weights(q, k)
        return self.mixed(weights if mask is None else weights + -1e9 * (1 - (1 - mask)).reshape(4, 4) * ~mask, v)


def test_a_mask_that_fails_for_its_type_whatever_it_is_fails_always() -> None:
    for found in (InvertsBool, InvertsAnythingButBool):
        report = verify(found)
        assert report.mistakes == ("mask_fails",), str(report)
        assert "1 - mask" in line_of(report.findings[0])
    for taken in (AsksForAByte, OfFourInts):
        assert verify(taken).findings == [], str(verify(taken))


@pytest.mark.thorough
def test_what_a_mask_raises_is_said() -> None:
    report = verify(Misspelt)
    assert report.mistakes == ("mask_fails",)
    assert "no attribute 'mask_fill'" in report.findings[0].sentence
    assert "weights.mask_fill" in line_of(report.findings[0])
    other = verify(WantsALengthOfFour)
    assert other.verdict == "partial"
    assert "mask was not read: every form raised" in str(other.notes)


class NeedsAConfig(Plain):
    def __init__(self, config: Any) -> None:
        super().__init__(config.n_embd, config.n_head)
        self.scaled, self.again = config.scale_attn_weights, config.scale_attn_by_inverse_layer_idx

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.weights(q, k)
        return self.mixed(weights if self.scaled and not self.again else weights / 2, v)


class MayLookElsewhere(OfItself):
    """The second mask is for a tensor that this instance cannot take."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        if memory is not None:
            raise ValueError("this layer looks at itself only")
        scores = self.compared(x, x)
        return self.mixed((scores if mask is None else scores.masked_fill(mask, -torch.inf)).softmax(-1), x)


RIGHT = (
    MapsOfHeadsFirst,
    TwoMasks,
    OfItself,
    CausalOnRequest,
    HidesWhatItIsTold,
    PacksQueriesAndKeys,
    NeedsAConfig,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("right", RIGHT)
def test_right_attention_is_not_blamed(right: Callable[..., Any]) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)


def test_a_mask_that_all_samples_share_is_listed() -> None:
    report = verify(SharedMask)
    assert report.verdict == "partial", str(report)
    assert [one.what for one in report.not_exercised] == ["mask for each sample"]


def test_what_the_code_refuses_is_listed_as_not_run() -> None:
    report = verify(MayLookElsewhere)
    assert report.verdict == "partial", str(report)
    assert "this layer looks at itself only" in str(report)


class CallsCountsSizes(nn.Module):
    """Right; its head_size is a count, and its mask, which it needs, is added as -1e9."""

    def __init__(self, hidden_size: int, head_size: int = 8) -> None:
        super().__init__()
        self.head_size, self.att_size = head_size, hidden_size // head_size
        width = head_size * self.att_size
        self.linear_q, self.linear_k, self.linear_v = (nn.Linear(hidden_size, width) for _ in range(3))
        self.output_layer = nn.Linear(width, hidden_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        split = [
            linear(x).unflatten(-1, (self.head_size, self.att_size)).transpose(1, 2)
            for linear, x in ((self.linear_q, q), (self.linear_k, k), (self.linear_v, v))
        ]
        scores = split[0] @ split[1].mT * self.att_size**-0.5
        scores = scores + torch.zeros_like(scores).masked_fill(mask.unsqueeze(1), -1e9)
        return self.output_layer((scores.softmax(-1) @ split[2]).transpose(1, 2).flatten(2))


def test_a_count_that_is_called_a_size_is_found_and_a_mask_of_large_numbers_is_no_float32() -> None:
    report = verify(CallsCountsSizes)
    assert report.verdict == "equal", str(report)
    assert not any("float32" in note for note in report.notes), report.notes
    assert {what: here for what, here, _ in report.conventions}["mask (mask)"].endswith("True = may not look")


class StacksItsParameters(nn.Module):
    """Right; every matrix is a parameter with an axis for the heads."""

    def __init__(self, n_heads: int, embed_dim: int) -> None:
        super().__init__()
        head_dim = embed_dim // n_heads
        self.W_query, self.W_key, self.W_val = (
            nn.Parameter(torch.empty(n_heads, embed_dim, head_dim)) for _ in range(3)
        )
        self.W_out = nn.Parameter(torch.empty(n_heads, head_dim, embed_dim))

    def forward(self, q: Tensor, h: Tensor | None = None) -> Tensor:
        h = q if h is None else h
        query, key, value = q[:, None] @ self.W_query, h[:, None] @ self.W_key, h[:, None] @ self.W_val
        context = (query @ key.mT * key.size(-1) ** -0.5).softmax(-1) @ value
        return (context @ self.W_out).sum(1)


def test_matrices_with_an_axis_for_the_heads_are_read() -> None:
    report = verify(StacksItsParameters)
    assert (report.verdict, [one.what for one in report.not_exercised]) == ("partial", ["other calls", "h"]), str(
        report
    )


def test_a_factory_is_what_it_makes() -> None:
    def make_gpt_attention() -> nn.Module:
        return StacksItsParameters(4, 24)

    assert verify(make_gpt_attention).verdict == "partial"  # nothing says what h is


class SubtractsTheScores(ValuesFirst):
    """With a mask only what is hidden looks like a softmax, of scores that are multiplied by nothing."""

    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        scores = scores if hidden is None else self.hide(scores, hidden)
        return F.softmax(scores, dim=-1) - scores


def test_weights_that_follow_the_formula_only_where_they_are_hidden_have_no_wrong_scale() -> None:
    (finding,) = verify(SubtractsTheScores).findings
    assert finding.name == "changed_by_sub"
    assert "return F.softmax(scores, dim=-1) - scores" in line_of(finding)


class SkipsAtRandom(Plain):
    least = 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q if bool(torch.rand(1) < self.least) else self.mixed(self.weights(q, k), v)


def test_what_is_drawn_in_eval_mode_is_no_plain_equal() -> None:
    report = verify(SkipsAtRandom)
    assert report.verdict == "partial", str(report)
    assert any("torch.rand(1) < self.least" in one.detail for one in report.not_exercised)


class HidesZeros(Plain):
    """Tokens of zeros are padding."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        empty = (k.abs().sum(-1) == 0)[:, None, None]
        scores = self.compared(q, k).masked_fill(empty, -torch.inf)
        return self.mixed(scores.softmax(-1), v)


def test_a_mask_of_what_no_token_was_is_listed() -> None:
    report = verify(HidesZeros)
    assert report.verdict == "partial", str(report)
    assert [one.detail for one in report.not_exercised if "masked_fill(empty" in one.detail], str(report)


class OneMatrixFourTimes(nn.Module):
    """A list of four copies that are none."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.linears = heads, nn.ModuleList([nn.Linear(dim, dim)] * 4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pairs = zip(self.linears, (q, k, v), strict=False)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, x in pairs)
        context = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v
        return self.linears[-1](context.transpose(1, 2).flatten(2))


def test_a_list_of_one_module_shows_that_no_projection_is_meant_to_be_shared() -> None:
    (finding,) = verify(OneMatrixFourTimes).findings
    assert finding.name == "projection_shared"
    assert "All 4 entries of linears are the same module" in finding.evidence


class ReadsNumbersAndFails(Plain):
    """Takes the numbers of a bias alone, and writes over what gradients need."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.weights(q, k) + 0 * self.q.bias.detach().sum()
        mixed = self.mixed(weights.exp().log_(), v)
        return mixed


def test_gradients_that_fail_stop_no_check() -> None:
    assert "The check stopped" not in str(verify(ReadsNumbersAndFails))
