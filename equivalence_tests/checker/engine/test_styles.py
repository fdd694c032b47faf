"""What libraries do that torch's attention does not, each style in a small class of our own, judged by one call."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.calls import diagnose_call
from equivalence_tests.checker.helpers_for_tests import changed, line_of
from equivalence_tests.checker.reach.state import preserved_global_state
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify

WIDTH, HEADS = 12, 3
UNREAD = "unchecked"  # right as far as the stages tell; there is no program of torch's parts to hold the whole against


def judged(target: Callable[[], nn.Module], *more: Tensor, length: int = 5, held: bool = True) -> Report:
    """Judge one call of a class with parameters off their first values, as the stages see it if it is not held."""
    with preserved_global_state():
        torch.manual_seed(0)
        module = target().double().eval()
        for parameter in module.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
        found: list[Report] = diagnose_call(Call(module, (torch.randn(2, length, WIDTH).double(), *more)), held=held)
    assert len(found) == 1
    return found[0]


class Base(nn.Module):
    """Attention of a sequence with itself, whose stages the classes below replace."""

    scale: Any = (WIDTH // HEADS) ** -0.5

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return (self.weigh(q @ k.mT * self.scale) @ v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attend(x))


class TwoStreams(Base):
    """Tokens of a text, with projections of their own, before those of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.text_q, self.text_k, self.text_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]
        own = self.operands(x)
        texts = (self.split(project(text)) for project in (self.text_q, self.text_k, self.text_v))
        q, k, v = (torch.cat(pair, 2) for pair in zip(texts, own, strict=True))
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o_proj(context[:, text.size(1) :])


def test_two_streams_may_be_joined() -> None:
    assert judged(TwoStreams, torch.randn(2, 4, WIDTH).double()).verdict == UNREAD


class TurnedByMatrices(Base):
    """Positions as matrices of two by two, multiplied and summed."""

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
        rows = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
        return (x.reshape(*x.shape[:-1], -1, 1, 2) * rows).sum(5).flatten(3)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.turned(q), self.turned(k), v


def test_positions_may_be_turned_by_matrices() -> None:
    report = judged(TurnedByMatrices)
    assert (report.verdict, [finding.name for finding in report.intended]) == ("equal", ["rotary_positions"])


class HeadsAmongSamples(nn.Module):
    """Features come before tokens, and heads lie among the samples; queries and keys are scaled by a root each."""

    power = -0.25

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.qkv = num_heads, nn.Conv1d(channels, 3 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        width, (q, k, v) = x.size(1) // self.num_heads, self.qkv(x).chunk(3, 1)
        scaled = (y * width**power for y, power in ((q, -0.25), (k, self.power)))
        q, k = (y.view(len(x) * self.num_heads, width, -1) for y in scaled)
        context = torch.einsum("bqk,bdk->bdq", (q.mT @ k).softmax(-1), v.reshape(q.shape))
        return context.reshape(x.shape)


def test_heads_may_lie_among_the_samples_and_features_first() -> None:
    assert verify(HeadsAmongSamples).verdict == "equal"
    assert verify(changed(HeadsAmongSamples, power=0.0)).mistakes == ("scale_wrong",)


class LearntScales(Base):
    """Cosines of queries and keys, each head with a scale that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])[:, None, None])
        self.table = nn.Parameter(torch.zeros(HEADS, 5, 5))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v

    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores * self.logit_scale.exp() + self.table)


class LearntScalesOnTheValues(LearntScales):
    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores) * 1.3


def test_each_head_may_have_a_scale_that_is_trained() -> None:
    report = judged(LearntScales)
    assert report.verdict == "equal", str(report)
    assert {finding.name for finding in report.intended} >= {"scale_differs_by_head", "bias_added"}
    assert judged(LearntScalesOnTheValues).mistakes == ("weights_scaled",)


class UnevenScales(Base):
    """Heads with different scales, and nothing that says why."""

    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores * torch.tensor([1.0, 2.0, 3.0])[:, None, None])


def test_heads_with_different_scales_deviate() -> None:
    assert judged(UnevenScales).mistakes == ("scale_differs_by_head",)


def test_a_single_key_says_nothing_about_scale_and_softmax() -> None:
    report = judged(Base, length=1)
    assert (report.verdict, report.mistakes) == ("partial", ())
    assert [exercise.what for exercise in report.not_exercised] == ["scale, mask and softmax"]


class TurnedAndScaled(Base):
    """Angles that carry a scale of their own, as for longer contexts than were trained."""

    scale = 1.0

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype).repeat(2)
        one, two = x.chunk(2, -1)
        return (x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()) * 1.25 * (WIDTH // HEADS) ** -0.25

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.turned(q), self.turned(k), v


class ScaledTables(TurnedAndScaled):
    def __init__(self) -> None:
        super().__init__()
        self.attention_scaling: Any = 1.25

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype).repeat(2)
        cos, sin = angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        one, two = x.chunk(2, -1)
        return (x * cos + torch.cat([-two, one], -1) * sin) * (WIDTH // HEADS) ** -0.25


def test_the_tables_of_a_rotation_may_carry_a_scale() -> None:
    report = judged(ScaledTables)
    assert (report.verdict, [finding.name for finding in report.intended]) == (
        "equal",
        ["scale_wrong", "rotary_positions"],
    )
    assert judged(TurnedAndScaled).mistakes == ("scale_wrong",)
    by_itself = ScaledTables().double().eval()
    by_itself.attention_scaling = torch.tensor(1.25)
    assert judged(lambda: by_itself).mistakes == ("scale_wrong",)


class DropsBias(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(F.linear(x, self.v_proj.weight))


@pytest.mark.parametrize(("target", "name"), [(Base, ()), (DropsBias, ("bias_never_used",))])
def test_weights_that_lie_idle_are_told(target: type[nn.Module], name: tuple[str, ...]) -> None:
    assert judged(target).mistakes == name


class PooledQueries(Base):
    """Every two queries make one, as between the stages of a vision model."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q.unflatten(2, (-1, 2)).amax(3), k, v


class PooledImages(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pooled = F.avg_pool1d(x.mT, 2).mT
        return self.split(self.q_proj(x)), self.split(self.k_proj(pooled)), self.split(self.v_proj(pooled))


class MergesPooledWithoutTranspose(PooledQueries):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        context = self.weigh(q @ k.mT * self.scale) @ v
        return context.reshape(context.size(0), context.size(2), -1)


@pytest.mark.parametrize("target", [PooledQueries, PooledImages])
def test_tokens_may_be_pooled(target: type[nn.Module]) -> None:
    assert judged(target, length=6).verdict == UNREAD


def test_pooled_tokens_are_followed_to_the_end() -> None:
    assert judged(MergesPooledWithoutTranspose, length=6).mistakes == ("heads_merged_without_transpose",)


class Masked(Base):
    """Adds the mask that it is given to the scores."""

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def masked(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        return scores + attention_mask

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        scores = self.masked(q @ k.mT * self.scale, attention_mask)
        return self.o_proj((self.weigh(scores) @ v).transpose(1, 2).flatten(2))


class CausalAndMasked(Masked):
    def masked(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return super().masked(scores, attention_mask).masked_fill(future, -torch.inf)


class ForgetsTheMask(Masked):
    def masked(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        return scores


class ShiftsTheMask(Masked):
    def masked(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        return scores + attention_mask.roll(1, -1)


class TakesTheMaskAway(Masked):
    def masked(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        return scores - attention_mask


def padding() -> Tensor:
    mask = torch.zeros(2, 1, 1, 5).double()
    mask[1, :, :, -2:] = torch.finfo(torch.float64).min
    return mask


@pytest.mark.parametrize("target", [Masked, CausalAndMasked])
def test_a_mask_that_is_given_hides_what_it_says(target: type[nn.Module]) -> None:
    assert judged(target, padding()).verdict == "equal"


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (ForgetsTheMask, "mask_never_used"),
        (ShiftsTheMask, "mask_hides_other_entries"),
        (TakesTheMaskAway, "mask_inverted"),
        (changed(CausalAndMasked, is_causal=False), "causal_mask_unasked"),
    ],
)
def test_a_mask_that_hides_something_else_is_found(target: type[nn.Module], name: str) -> None:
    assert judged(target, padding()).mistakes == (name,)


class CausalThoughItSaysNot(Base):
    is_causal = False

    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf))

    def forward(self, x: Tensor, position_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + 0 * position_mask[:, None])


def test_what_only_is_named_a_mask_explains_no_causal_one() -> None:
    assert judged(CausalThoughItSaysNot, torch.arange(2, 7)).mistakes == ("causal_mask_unasked",)


class PassesOnWhatItIsTold(Base):
    """A function of its own that calls the fused kernel."""

    def flag(self, is_causal: bool) -> bool:
        return is_causal

    def fused(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.flag(is_causal))

    def attend(self, x: Tensor) -> Tensor:
        return self.fused(*self.operands(x)).transpose(1, 2).flatten(2)


class PassesOnTheContrary(PassesOnWhatItIsTold):
    def flag(self, is_causal: bool) -> bool:
        return not is_causal


@pytest.mark.parametrize(
    ("target", "names"), [(PassesOnWhatItIsTold, ()), (PassesOnTheContrary, ("causal_mask_unasked",))]
)
def test_a_function_that_says_it_is_not_causal_shows_the_future(
    target: type[nn.Module], names: tuple[str, ...]
) -> None:
    assert judged(target).mistakes == names


def test_a_module_that_says_it_is_causal_hides_the_future() -> None:
    assert judged(changed(Base, is_causal=True)).mistakes == ("mask_never_used",)


class Swapped(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.split(self.q_proj(x))
        key = self.split(self.k_proj(x))
        return key, query, self.split(self.v_proj(x))


class SwappedWeights(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.split(self.k_proj(x))
        key = self.split(self.q_proj(x))
        return query, key, self.split(self.v_proj(x))


class ShufflesHeads(Base):
    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores).roll(1, 1)


class ShufflesTokens(Base):
    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x).roll(1, 1)


class BendsTheEnd(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


class BendsRotatedKeys(TurnedByMatrices):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k.clamp(-0.2, 0.2), v


class ScalesKeys(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k * 1.3, v


class Unmerged(Base):
    """Has no output projection, and forgets the transpose."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        context = F.scaled_dot_product_attention(q, k, v)
        return context.reshape(x.shape)


class ViewsValues(Base):
    """As many tokens as heads: sizes do not tell the axes apart."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        v = self.v_proj(x.flatten(0, 1)).view(x.size(0), x.size(1), HEADS, -1)
        return q, k, v.reshape(x.size(0), HEADS, x.size(1), -1)


@pytest.mark.parametrize(
    ("target", "name", "line"),
    [
        (Swapped, "query_key_swapped", "q @ k.mT"),
        (SwappedWeights, "query_key_swapped", "query = self.split(self.k_proj(x))"),
        (ShufflesHeads, "changed_by_roll", "roll(1, 1)"),
        (ShufflesTokens, "changed_by_roll", "roll(1, 1)"),
        (BendsTheEnd, "changed_by_abs", "abs()"),
        (BendsRotatedKeys, "key_changed_by_clamp", "k.clamp(-0.2, 0.2)"),
        (ScalesKeys, "scale_wrong", "k * 1.3"),
        (Unmerged, "heads_merged_without_transpose", "context.reshape(x.shape)"),
        (ViewsValues, "heads_split_without_transpose", "v.reshape(x.size(0), HEADS"),
    ],
)
def test_the_line_that_does_it_is_blamed(target: type[nn.Module], name: str, line: str) -> None:
    report = judged(target, held=False)
    assert report.mistakes[0] == name
    assert line in line_of(report.findings[0])


class Configuration:
    """Small, as a library would hold it."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class ScaledByConfiguration(Base):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = Configuration(attention_multiplier=1.0, hidden_size=WIDTH)


class Unscaled(Base):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = Configuration(residual_multiplier=1.0, hidden_size=WIDTH)


class ScaledForLongerContexts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.config = Configuration(rope_scaling={"factor": 8.0, "mscale_all_dim": 0.7})
        self.scale = 4**-0.5 * (1 + 0.07 * math.log(8.0)) ** 2


class OwnNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


class NormedValues(Base):
    def __init__(self) -> None:
        super().__init__()
        self.v_norm = OwnNorm()

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k, self.v_norm(v)


class KeysOfOneLength(NormedValues):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, _, v = super().operands(x)
        return q, self.split(F.normalize(self.k_proj(x), dim=-1)), v


def test_a_norm_of_the_values_says_nothing_for_one_of_the_keys() -> None:
    assert judged(KeysOfOneLength).mistakes == ("key_changed_by_normalize",)


class TakesItsFeaturesInAnotherOrder(NormedValues):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().operands(x.roll(1, -1))


def test_a_norm_of_the_values_says_nothing_for_the_order_of_features() -> None:
    assert judged(TakesItsFeaturesInAnotherOrder).verdict == "unchecked"


class Gated(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x) * self.gate(x).sigmoid()


class ScalesByPosition(nn.Module):
    growth: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("growth", torch.tensor(0.3).double())

    def forward(self, q: Tensor) -> Tensor:
        return q * (1 + self.growth * torch.arange(q.size(2)).log1p())[:, None]


class ScaledByPosition(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scaling = ScalesByPosition()

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.scaling(q), k, v


class ScaledByArgument(Base):
    """Multiplies queries by what it is given, in single precision."""

    def forward(self, x: Tensor, growth: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        scores = (q.float() * growth).to(q.dtype) @ k.mT * self.scale
        return self.o_proj((self.weigh(scores) @ v).transpose(1, 2).flatten(2))


class BentOnPurpose(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Hardswish()

    def attend(self, x: Tensor) -> Tensor:
        return self.act(super().attend(x))


class LearntQuery(Base):
    """One query that is a parameter, as where images are pooled."""

    def __init__(self) -> None:
        super().__init__()
        del self.q_proj
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.token.expand(x.size(0), -1, -1)), self.split(self.k_proj(x)), self.split(self.v_proj(x))


class Indexed(Base):
    """Chooses keys by sums of scores that no softmax weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.index_q, self.index_k, self.index_weights = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, HEADS))

    def attend(self, x: Tensor) -> Tensor:
        scores = (self.split(self.index_q(x)) @ self.split(self.index_k(x)).mT).relu()
        chosen = torch.einsum("bhqk,bqh->bqk", scores, self.index_weights(x)).topk(3, -1).indices
        hidden = torch.ones(x.size(0), x.size(1), x.size(1), dtype=torch.bool).scatter(-1, chosen, False)
        q, k, v = self.operands(x)
        scores = (q @ k.mT * self.scale).masked_fill(hidden[:, None], -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class IndexedByItsOutput(Indexed):
    def forward(self, x: Tensor) -> Tensor:
        return self.index_k(self.attend(x))


class IndexedInVain(Indexed):
    """What it chooses hides nothing."""

    def attend(self, x: Tensor) -> Tensor:
        scores = self.split(self.index_q(x)) @ self.split(self.index_k(x)).mT
        chosen = torch.einsum("bhqk,bqh->bqk", scores.relu(), self.index_weights(x)).topk(3, -1).indices
        hidden = torch.ones(x.size(0), x.size(1), x.size(1), dtype=torch.bool).scatter(-1, chosen, False)
        q, k, v = self.operands(x)
        scores = (q @ k.mT * self.scale).masked_fill(torch.zeros_like(hidden)[:, None], -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_a_mask_of_which_only_the_shape_is_taken_uses_no_weight() -> None:
    report = judged(IndexedInVain)
    assert report.mistakes == ("weight_never_used",), str(report)


def test_what_is_called_after_keys_is_no_output_projection() -> None:
    assert judged(IndexedByItsOutput).verdict == "unchecked"


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        (ScaledByConfiguration, ["scale_missing"]),
        (ScaledForLongerContexts, ["scale_wrong"]),
        (NormedValues, ["values_normalised"]),
        (Gated, []),
        (ScaledByPosition, ["query_changed_by_mul"]),
        (BentOnPurpose, ["changed_by_hardswish"]),
        (Indexed, ["own_mask"]),
    ],
)
def test_what_a_configuration_or_a_part_says_is_meant_so(target: type[nn.Module], meant: list[str]) -> None:
    report = judged(target)
    assert report.verdict in ("equal", UNREAD)
    # The steps of its program that torch does not have are listed too, each by its stage.
    assert [finding.name for finding in report.intended if not finding.name.endswith("_of_its_own")] == meant


def test_a_factor_of_each_query_that_is_given_is_no_rotation() -> None:
    growth = (1 + torch.arange(5).float() / 2048).pow(0.1)[:, None]
    report = judged(ScaledByArgument, growth)
    assert (report.verdict, [finding.name for finding in report.intended]) == (UNREAD, ["query_changed_by_mul"])
    assert judged(ScaledByArgument, growth - 1).mistakes[:1] == ("query_changed_by_mul",)


class ScoresAlone(Base):
    scale = 1.0

    def weigh(self, scores: Tensor) -> Tensor:
        return scores


def test_putting_a_forgotten_softmax_in_puts_the_scale_in_too() -> None:
    report = judged(ScoresAlone)
    assert report.mistakes == ("softmax_missing",), str(report)
    assert report.findings[0].proof is not None
    assert report.findings[0].proof.error < 1e-9


@pytest.mark.parametrize(
    ("target", "name"),
    [(Unscaled, "scale_missing"), (changed(LearntQuery, scale=HEADS / WIDTH), "scale_wrong")],
)
def test_what_nothing_says_deviates(target: type[nn.Module], name: str) -> None:
    assert judged(target).mistakes[:1] == (name,)


def test_of_learnt_queries_the_merge_is_left_open() -> None:
    report = judged(LearntQuery)
    assert (report.verdict, report.mistakes) == (UNREAD, ())


def test_a_mask_that_hides_everything_leaves_nothing_to_tell() -> None:
    report = judged(Masked, torch.full((2, 1, 1, 5), torch.finfo(torch.float64).min, dtype=torch.float64))
    assert (report.verdict, report.mistakes) == (UNREAD, ())


class TurnsOneTheOtherWay(TurnedByMatrices):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Base.operands(self, x)
        angle = torch.arange(x.size(1), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
        even, odd = k[..., 0::2], k[..., 1::2]
        pairs = even * angle.cos() + odd * angle.sin(), odd * angle.cos() - even * angle.sin()
        return self.turned(q), torch.stack(pairs, -1).flatten(3), v


class RollsQueries(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q.roll(1, 2), k, v


class RollsForASize(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k, v[:, :, : k.roll(1, 2).size(2)]


def test_what_nothing_takes_is_no_mistake() -> None:
    assert judged(RollsForASize).verdict == "equal", str(judged(RollsForASize))


class FlipsTheEnd(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(-1)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (TurnsOneTheOtherWay, "rotations_differ"),
        (RollsQueries, "query_changed_by_roll"),
        (FlipsTheEnd, "changed_by_flip"),
    ],
)
def test_what_is_done_to_one_side_alone_is_found(target: type[nn.Module], name: str) -> None:
    assert judged(target).mistakes[:1] == (name,)


class Packed(TurnedByMatrices):
    """One projection for all three, whose parts must be kept apart."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        del self.q_proj, self.k_proj, self.v_proj

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.split(one) for one in self.qkv(x).chunk(3, -1))
        return self.turned(q), self.turned(k), v.clamp(-0.2, 0.2)


def test_of_a_packed_projection_only_the_part_that_is_changed_is_blamed() -> None:
    assert judged(Packed).mistakes == ("value_changed_by_clamp",)


class RootNorm(nn.Module):
    axis = -1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        size = x.pow(2).mean(self.axis, keepdim=True)
        x = x * (size + 1e-6).rsqrt()
        return self.weight * x


class NormedBoth(Base):
    norm: type[nn.Module] = RootNorm

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = self.norm(), self.norm()

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.q_norm(q), self.k_norm(k), v


class NormsWhatItDoesNotProject(NormedBoth):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, k, v = super().operands(x)
        return self.q_norm(self.split(x)), k, v


def test_norms_of_queries_and_keys_stand_for_no_projection() -> None:
    report = judged(NormsWhatItDoesNotProject)
    assert report.verdict != "equal", str(report)


def test_a_norm_of_ones_own_makes_tokens_of_one_size() -> None:
    assert judged(NormedBoth).verdict == "equal"
    report = judged(changed(NormedBoth, norm=changed(RootNorm, axis=-2)), held=False)
    assert report.mistakes[:1] == ("norm_leaves_different_sizes",)


class WithAPartNotReached(Base):
    """Holds a part that only longer sequences need."""

    def __init__(self) -> None:
        super().__init__()
        self.compressor = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


class WithANormNotReached(Base):
    def __init__(self) -> None:
        super().__init__()
        self.memory_norm = nn.LayerNorm(WIDTH)


@pytest.mark.parametrize("target", [WithAPartNotReached, WithANormNotReached])
def test_what_the_call_does_not_reach_is_no_mistake(target: type[nn.Module]) -> None:
    assert judged(target).mistakes == ()


class MixesTokensWithALearntWeight(Base):
    """Sums over the queries."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return (self.weigh(q @ k.mT * self.scale).mT @ v).transpose(1, 2).flatten(2)


def test_tokens_that_are_mixed_are_never_meant_so() -> None:
    report = judged(MixesTokensWithALearntWeight)
    assert (report.mistakes, report.intended) == (("context_sums_over_queries",), [])


class AddsWhatCameBefore(Base):
    """Adds a residual whose tokens were sorted on the way: nobody knows their names."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sort(1).values


def test_a_residual_from_anywhere_may_be_added() -> None:
    assert judged(AddsWhatCameBefore).verdict == UNREAD


class TurnsBothToTheTypeOfValues(TurnedByMatrices):
    """Takes the values for their type alone, then exchanges queries and keys."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return k.type_as(v), q.type_as(v), v


def test_a_tensor_taken_for_its_type_says_nothing() -> None:
    assert judged(TurnsBothToTheTypeOfValues).mistakes == ("query_key_swapped",)


class NormedWithoutScale(NormedBoth):
    scale = 1.0


class StatesAScale(NormedWithoutScale):
    def __init__(self) -> None:
        super().__init__()
        self.scaling = 0.5


class NormedWithoutGains(Base):
    scale = 1.0

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v


class NormedOverTheBatch(NormedWithoutScale):
    norm = type("Norm", (nn.BatchNorm2d,), {"__init__": lambda self: nn.BatchNorm2d.__init__(self, HEADS)})


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (NormedWithoutScale, ()),
        (changed(NormedBoth, scale=1 / 4), ("scale_wrong",)),
        (StatesAScale, ("scale_missing",)),
        (NormedWithoutGains, ("scale_missing",)),
        (NormedOverTheBatch, ("scale_missing",)),
    ],
)
def test_only_norms_with_gains_stand_for_the_scale_where_none_is_stated(
    target: type[nn.Module], names: tuple[str, ...]
) -> None:
    assert judged(target).mistakes == names


class ForgetsOneNorm(NormedBoth):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Base.operands(self, x)
        q = self.q_norm(q)
        return q.contiguous(), k.contiguous(), v


class ForgetsItsTable(LearntScales):
    def weigh(self, scores: Tensor) -> Tensor:
        self.table[None]
        scores = scores * self.logit_scale.exp()
        return scores.softmax(-1)


class AsksAnotherInVain(Base):
    """Runs a part to compare with, and leaves it there."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.other(x)
        return super().operands(x)


@pytest.mark.parametrize(
    ("target", "name", "line"),
    [
        (AsksAnotherInVain, "weight_never_used", "self.other(x)"),
        (
            ForgetsOneNorm,
            "norm_never_used",
            "return self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))",
        ),
        (ForgetsItsTable, "weight_never_used", "scores = scores * self.logit_scale.exp()"),
    ],
)
def test_what_is_never_used_is_missed_where_it_could_be_used(target: type[nn.Module], name: str, line: str) -> None:
    finding = next(finding for finding in judged(target).findings if finding.name == name)
    assert line_of(finding) == line


class WidensBehindItsScale(Base):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        scores = q @ k.mT / (WIDTH // HEADS)
        return (scores.float().softmax(-1).type_as(v) @ v).transpose(1, 2).flatten(2)


def test_a_scale_is_not_taken_for_the_rounding_behind_it() -> None:
    (finding,) = judged(WidensBehindItsScale, held=False).findings
    assert finding.name == "scale_wrong"
    assert line_of(finding).startswith("scores = q @ k.mT")


class TakesAPaddingMask(Base):
    """Scores of samples and heads in one axis."""

    def attend(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = (one.flatten(0, 1) for one in self.operands(x))
        scores = torch.bmm(q, k.mT) * self.scale
        if key_padding_mask is not None:
            scores = scores.masked_fill(self.hidden(key_padding_mask).repeat_interleave(HEADS, 0)[:, None], -torch.inf)
        return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)

    def hidden(self, mask: Tensor) -> Tensor:
        return mask

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.o_proj(self.attend(x, key_padding_mask))


class TurnsItRound(TakesAPaddingMask):
    def hidden(self, mask: Tensor) -> Tensor:
        return ~mask


class RollsIt(TakesAPaddingMask):
    def hidden(self, mask: Tensor) -> Tensor:
        return mask.roll(1, -1)


@pytest.mark.parametrize(
    ("target", "names"),
    [(TakesAPaddingMask, ()), (TurnsItRound, ("mask_inverted",)), (RollsIt, ("mask_hides_other_entries",))],
)
def test_a_padding_mask_is_read_where_heads_share_an_axis_with_samples(
    target: type[nn.Module], names: tuple[str, ...]
) -> None:
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert judged(target, mask).mistakes == names


class PooledBesideAToken(Base):
    """Pools keys and values, but for the first token, and pads with keys that no weight has made."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.pools = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 2, 2) for _ in range(2))
        del self.q_proj, self.k_proj, self.v_proj

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, *pair = (self.split(one) for one in self.qkv(x).chunk(3, -1))
        k, v = (F.pad(self.pooled(one, pool), (0, 0, 0, 1)) for one, pool in zip(pair, self.pools, strict=True))
        return q, k, v

    def pooled(self, x: Tensor, pool: nn.Module) -> Tensor:
        rest = self.split(pool(x[:, :, 1:].transpose(1, 2).flatten(2).mT).mT)
        return torch.cat([x[:, :, :1], rest], 2)


class SoftmaxOverPooledQueries(PooledBesideAToken):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2)


def test_tokens_of_two_kinds_may_stand_side_by_side() -> None:
    assert judged(PooledBesideAToken).mistakes == ()
    assert judged(SoftmaxOverPooledQueries).mistakes == ("softmax_over_queries",)


class MergesByAView(Base):
    """Heads and queries of equal number, so that no size tells which axis is which."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        context = self.weigh(q @ k.mT * self.scale) @ v
        context = context.reshape(context.transpose(1, 2).shape)
        return context.flatten(2)


def test_the_first_view_that_stands_for_a_transpose_is_blamed() -> None:
    finding = judged(MergesByAView, length=2, held=False).findings[0]
    assert (finding.name, "transpose(1, 2).shape" in line_of(finding)) == ("heads_merged_without_transpose", True)


class ChangedBeforeTheNorm(NormedBoth):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Base.operands(self, x)
        return self.q_norm(q), self.k_norm(k.abs()), v


class NormedAfterwards(Base):
    """A norm between the averaged values and the output projection, and a residual behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.LayerNorm(WIDTH)

    def normed(self, x: Tensor) -> Tensor:
        return self.after(x)

    def ended(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.ended(self.o_proj(self.normed(self.attend(x)))) + x


class ClampedAfterTheNorm(NormedAfterwards):
    def normed(self, x: Tensor) -> Tensor:
        return self.after(x).clamp(-0.2, 0.2)


class FlippedBeforeTheResidual(NormedAfterwards):
    def ended(self, x: Tensor) -> Tensor:
        return x.flip(-1)


class ChangesItsInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.abs())


class BendsItsBias(LearntScales):
    def weigh(self, scores: Tensor) -> Tensor:
        return (scores * self.logit_scale.exp() + self.table.abs()).softmax(-1)


class BendsItsAngles(TurnedByMatrices):
    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2).clamp(-0.2, 0.2)
        half, other = x.chunk(2, -1)
        return x * cos + torch.cat([-other, half], -1) * sin


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (ChangedBeforeTheNorm, "key_changed_by_abs"),
        (ClampedAfterTheNorm, "changed_by_clamp"),
        (FlippedBeforeTheResidual, "changed_by_flip"),
        (BendsItsBias, "changed_by_abs"),
        (BendsItsAngles, "query_changed_by_clamp"),
    ],
)
def test_a_change_on_any_stretch_is_found_on_its_line(target: type[nn.Module], name: str) -> None:
    finding = judged(target, held=False).findings[0]
    assert (finding.name, f".{name.rpartition('_')[2]}(" in line_of(finding)) == (name, True)


def test_what_is_done_to_the_input_is_left_to_the_comparison_of_the_whole() -> None:
    report = judged(ChangesItsInput)
    assert (report.verdict, report.mistakes) == (UNREAD, ())
    assert "abs is not among the parts" in report.reason
    assert "return super().forward(x.abs())" in report.reason


class ShiftsItsWindows(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.roll(1, 1)).roll(-1, 1)


@pytest.mark.parametrize("target", [NormedAfterwards, ShiftsItsWindows])
def test_a_norm_behind_and_windows_that_are_put_back_are_right(target: type[nn.Module]) -> None:
    assert judged(target).verdict in ("equal", UNREAD)


class TurnsItBack(TurnedByMatrices):
    """Rotates values as the keys, rotates their average back, and merges it through groups of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.up = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, 2)), nn.Linear(2 * HEADS, WIDTH)
        del self.o_proj

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k, self.turned(v)

    def back(self, x: Tensor) -> Tensor:
        return self.turned(x.flip(2)).flip(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        context = self.back(self.weigh(q @ k.mT * self.scale) @ v).transpose(1, 2)
        return self.up(torch.einsum("bngd,gdr->bngr", context, self.low).flatten(2))


class TurnsItBackAndBendsIt(TurnsItBack):
    def back(self, x: Tensor) -> Tensor:
        return super().back(x).abs()


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (TurnsItBack, ()),
        (changed(TurnsItBack, scale=1.0), ("scale_missing",)),
        (TurnsItBackAndBendsIt, ("changed_by_abs",)),
    ],
)
def test_values_may_be_turned_and_what_they_are_averaged_to_turned_back(
    target: type[nn.Module], names: tuple[str, ...]
) -> None:
    assert judged(target).mistakes == names


class OneQuery(Base):
    """The first token asks, and its weights are one each where the softmax runs over queries."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q[:, :, :1], k, v

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2)


class DividedOverQueries(Base):
    """Slots that compete for keys: divided by the sums of the rows, their weights sum to one all the same."""

    def weigh(self, scores: Tensor) -> Tensor:
        weights = scores.softmax(-2)
        return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("target", [OneQuery, DividedOverQueries])
def test_of_one_query_and_behind_a_division_too_the_softmax_runs_over_keys(target: type[nn.Module]) -> None:
    finding = judged(target).findings[0]
    assert finding.name == "softmax_over_queries"
    assert "scores.softmax(-2)" in line_of(finding)


class ValuesFromBeside(Base):
    """Adds what is looked up elsewhere to the values."""

    def forward(self, x: Tensor, looked_up: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        v = v + self.split(looked_up)
        return self.o_proj((self.weigh(q @ k.mT * self.scale) @ v).transpose(1, 2).flatten(2))


class KeysFromBesideToo(ValuesFromBeside):
    def forward(self, x: Tensor, looked_up: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        k, v = k + self.split(looked_up), v + self.split(looked_up)
        return self.o_proj((self.weigh(q @ k.mT * self.scale) @ v).transpose(1, 2).flatten(2))


def test_an_argument_that_only_the_values_get_is_meant_for_them() -> None:
    looked_up = torch.randn(2, 5, WIDTH).double()
    report = judged(ValuesFromBeside, looked_up)
    assert (report.verdict, [finding.name for finding in report.intended]) == (UNREAD, ["value_changed_by_add"])
    assert "value_changed_by_add" in judged(KeysFromBesideToo, looked_up).mistakes


class BendsAFeedForward(Base):
    """A layer in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(super().forward(x))))


class NormalisesOverTokens(LearntScales):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Base.operands(self, x)
        return F.normalize(q, dim=-2), F.normalize(k, dim=-1), v


def test_a_feed_forward_may_bend_and_a_norm_runs_over_features() -> None:
    report = judged(BendsAFeedForward)
    assert report.mistakes == ()
    assert "Nothing says whether this is intended: a residual connection" in report.reason
    assert judged(NormalisesOverTokens).mistakes == ("norm_leaves_different_sizes",)


class TurnsValuesAndLeavesThem(TurnsItBack):
    def back(self, x: Tensor) -> Tensor:
        return x


def test_values_that_stay_turned_deviate() -> None:
    assert judged(TurnsValuesAndLeavesThem).mistakes == ("rotary_values",)


class TurnsWithItsHalvesExchanged(ScaledTables):
    def turned(self, x: Tensor) -> Tensor:
        return super().turned(torch.cat(x.chunk(2, -1)[::-1], -1))


def test_a_rotation_takes_the_features_of_a_head_as_they_come() -> None:
    assert judged(ScaledTables).verdict == "equal"
    report = judged(TurnsWithItsHalvesExchanged)
    assert report.verdict == "unchecked"
    assert "the features of a head of the key are rotated in another order" in report.reason


class BesideWhatPasses(Base):
    """Attends with half of the features; the others pass beside."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.cat([self.attend(x), x.sort(1).values], -1))


class BesideWhatPassesUnmerged(BesideWhatPasses):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return (self.weigh(q @ k.mT * self.scale) @ v).reshape(x.shape)


def test_features_may_pass_beside_the_attention() -> None:
    assert judged(BesideWhatPasses).mistakes == ()
    assert judged(BesideWhatPassesUnmerged).mistakes == ("heads_merged_without_transpose",)


class TimesTen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 10.0


class CosinesTimesTen(TimesTen):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q / q.norm(dim=-1, keepdim=True), F.normalize(k, dim=-1), v


def test_only_cosines_may_be_multiplied_by_a_number_of_the_module() -> None:
    assert judged(CosinesTimesTen).verdict == "equal", str(judged(CosinesTimesTen))
    assert judged(TimesTen).mistakes == ("scale_wrong",)


class NonLocal2d(Base):
    scale = 1.0


def test_what_is_named_after_a_non_local_block_has_no_scale() -> None:
    assert judged(NonLocal2d).verdict == "equal", str(judged(NonLocal2d))


class WeightFirstNorm(RootNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


class NormedWeightFirst(NormedBoth):
    norm = WeightFirstNorm


class WeightFirstNormOfHeads(RootNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.pow(2).mean(-3, keepdim=True) + 1e-6).rsqrt()


def test_a_norm_may_multiply_by_its_weight_before_it_divides() -> None:
    assert judged(NormedWeightFirst).verdict == "equal", str(judged(NormedWeightFirst))
    over_heads = judged(changed(NormedBoth, norm=WeightFirstNormOfHeads))
    assert [one.name for one in over_heads.suspected] == ["norm_leaves_different_sizes"], str(over_heads)


class RootNormOfSizes(RootNorm):
    def forward(self, x: Tensor) -> Tensor:
        size = x.pow(2).mean(-1, keepdim=True)
        x = (x * (size + 1e-6).rsqrt()).abs()
        return self.weight * x


class NormedAndSplitByAView(NormedBoth):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_proj(x).unflatten(-1, (HEADS, -1))
        q = self.q_norm(q.reshape(q.transpose(1, 2).shape))
        return q, self.k_norm(self.split(self.k_proj(x))), self.split(self.v_proj(x))


class NormedAndExchanged(TurnedByMatrices):
    """Keys and values exchanged behind norms and a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = RootNorm(), RootNorm()

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Base.operands(self, x)
        return self.turned(self.q_norm(q)), v, self.turned(self.k_norm(k))


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (changed(NormedBoth, norm=changed(RootNorm, axis=-3)), "norm_leaves_different_sizes"),
        (changed(NormedBoth, norm=RootNormOfSizes), "query_changed_by_abs"),
        (NormedAndSplitByAView, "heads_split_without_transpose"),
        (NormedAndExchanged, "key_value_swapped"),
    ],
)
def test_behind_a_norm_mistakes_are_found_as_without(target: type[nn.Module], name: str) -> None:
    assert judged(target).mistakes[:1] == (name,)


class FallsWithDistance(Base):
    """ALiBi, with slopes in a buffer or made on the way."""

    sign: Any = -1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 1 + HEADS)[:, None, None])

    def weigh(self, scores: Tensor) -> Tensor:
        place = torch.arange(scores.size(-1))
        distance = (place[:, None] - place).abs()
        return super().weigh(scores + self.sign * self.slopes * distance)


class GrowsWithoutSlopes(Base):
    def weigh(self, scores: Tensor) -> Tensor:
        place = torch.arange(float(scores.size(-1)))
        hidden = place > place[:, None]
        return super().weigh((scores + 0.3 * (place[:, None] - place)).masked_fill(hidden, -torch.inf))


class FavoursTheFuture(Base):
    """The distance has a sign: right beside a causal mask, and there is none."""

    def weigh(self, scores: Tensor) -> Tensor:
        place = torch.arange(float(scores.size(-1)))
        return super().weigh(scores + 0.3 * (place - place[:, None]))


class FavoursTheFutureOfNobody(FavoursTheFuture):
    """A mask may be given, which hides it."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (FallsWithDistance, ()),
        (FavoursTheFuture, ("bias_grows_with_distance",)),
        (FavoursTheFutureOfNobody, ()),
        (changed(FallsWithDistance, sign=1.0), ("bias_grows_with_distance",)),
        (GrowsWithoutSlopes, ("bias_grows_with_distance",)),
    ],
)
def test_a_bias_by_position_falls_with_the_distance(target: type[nn.Module], names: tuple[str, ...]) -> None:
    assert judged(target).mistakes == names


class RollsAllThree(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.stack(super().operands(x)).roll(1, 3)
        return q, k, v


class RollsAllThreeAndBack(RollsAllThree):
    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x).roll(-1, 1)


def test_tokens_that_are_rolled_all_at_once_must_be_put_back() -> None:
    assert judged(RollsAllThree).verdict == UNREAD
    assert judged(RollsAllThreeAndBack).verdict == "equal"


class RollsBeforeTheNorm(NormedBoth):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Base.operands(self, x)
        return self.q_norm(q), self.k_norm(k.roll(1, 2)), v


def test_a_roll_before_a_norm_is_found() -> None:
    assert judged(RollsBeforeTheNorm).mistakes == ("key_changed_by_roll",)


class Cascaded(Base):
    """What one attention averages goes on, with something else, into the projections of the next."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.attend(x) + x.sort(1).values)


def test_queries_are_not_held_against_what_another_attention_averaged() -> None:
    with preserved_global_state():
        torch.manual_seed(0)
        found = diagnose_call(Call(Cascaded().double().eval(), (torch.randn(2, 5, WIDTH).double(),)))
    assert not any(finding.stage == "operand" for report in found for finding in report.findings)


class CascadedHeads(nn.Module):
    """What each head averages is added to what the next one projects; a ReLU stands before the last projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH // HEADS, 3 * WIDTH // HEADS) for _ in range(HEADS))
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found = list[Tensor]()
        for own, part in zip(self.qkv, x.chunk(HEADS, -1), strict=True):
            q, k, v = own(part + found[-1] if found else part).chunk(3, -1)
            found.append((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v)
        return self.out(torch.cat(found, -1))


def test_what_goes_on_to_another_head_changes_nothing_of_what_comes_out() -> None:
    assert judged(CascadedHeads).mistakes == ()
