"""What is added to scores or values, and norms of our own writing: a change on the way there is found, on its line."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.test_styles import (
    HEADS,
    WIDTH,
    Base,
    Configuration,
    LearntScales,
    NormedBoth,
    NormedValues,
    TurnedByMatrices,
    TwoStreams,
    judged,
)
from equivalence_tests.checker.equivalent.calls import diagnose_call
from equivalence_tests.checker.helpers_for_tests import changed, line_of
from equivalence_tests.checker.zoo.stages import SelfAttention, ThreeMatrices
from equivalence_tests.ledger.lookalikes import gpt


class BiasFromPlaces(Base):
    """A bias that a small network makes from the places, as a window of an image has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, HEADS, bias=False))
        self.register_buffer("places", torch.randn(25, 2))

    def bent(self, bias: Tensor) -> Tensor:
        return bias

    def weigh(self, scores: Tensor) -> Tensor:
        bias = self.net(self.places).view(5, 5, HEADS).permute(2, 0, 1)
        return super().weigh(scores + self.bent(16 * bias.sigmoid())[None])


class BiasRolled(BiasFromPlaces):
    def bent(self, bias: Tensor) -> Tensor:
        return bias.roll(1, -1)


class BiasClampedToAConstant(BiasFromPlaces):
    def bent(self, bias: Tensor) -> Tensor:
        return bias.clamp(-0.2, 0.2)


class BiasForgotten(Base):
    """A bias of the queries that another line forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.own_bias = nn.Parameter(torch.zeros(HEADS, 1, WIDTH // HEADS))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k, v


class BiasUsed(BiasForgotten):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q + self.own_bias, k, v


class BiasOfAnotherCall(BiasForgotten):
    """What another call adds is not run in this one."""

    wanted = False

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q + self.own_bias if self.wanted else q, k, v


class BiasReadAndForgotten(BiasForgotten):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _ = self.own_bias
        return super().operands(x)


class TableKept(Base):
    """A table that is laid out once and kept."""

    kept: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, 5, 5))

    def weigh(self, scores: Tensor) -> Tensor:
        TableKept.kept = self.bias.detach().mT if TableKept.kept is None else TableKept.kept
        return super().weigh(scores + TableKept.kept)


class Locally(Base):
    """Values go by a second, local way, too."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def bent(self, x: Tensor) -> Tensor:
        return x

    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x) + self.bent(self.local(self.v_proj(x).mT)).mT


class LocallyRolled(Locally):
    def bent(self, x: Tensor) -> Tensor:
        return x.roll(1, 1)


class SplitNorm(nn.Module):
    """A norm whose parts stand in two functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH // HEADS))

    def normed(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) * (1 + self.weight)


class SquaredNorm(SplitNorm):
    def normed(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).reciprocal()


class FlippedNorm(SplitNorm):
    def normed(self, x: Tensor) -> Tensor:
        return super().normed(x).flip(-1)


class BareNorm(nn.Module):
    """Divides by the root of the mean square, and learns nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


class ClampingNorm(BareNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-0.2, 0.2)


class BareNormOfTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-2, keepdim=True) + 1e-6).rsqrt()


class Normed(NormedBoth):
    norm: type[nn.Module] = SplitNorm


class NormedBarely(Normed):
    norm = BareNorm


class PaddedWindows(LearntScales):
    """Keys of padding are zero, whatever divides them."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shown = (torch.arange(x.size(1)) < 3)[:, None]
        q, _, v = Base.operands(self, x)
        return F.normalize(q, dim=-1), F.normalize(self.split(self.k_proj(x * shown)), dim=-1), v


class Upsampled(Base):
    """Comes back with more tokens than there are: their names are lost."""

    def ended(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.ended(F.interpolate(super().forward(x).mT, scale_factor=2.0))


class UpsampledAndClamped(Upsampled):
    def ended(self, x: Tensor) -> Tensor:
        return x.clamp(-0.2, 0.2)


class PackedAndTurned(TurnedByMatrices):
    """Queries and keys of one matrix, turned one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
        one, two = x.chunk(2, -1)
        return torch.cat([-two, one], -1), angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.split(part) for part in self.packed(x).chunk(3, -1))
        turned, cos, sin = self.halves(q)
        query = q * cos - turned * sin
        turned, cos, sin = self.halves(k)
        return query, k * cos + turned * sin, v


class TurnedInAPlane(Base):
    """A token without a place, then those of an image, turned by row and column, from the middle on."""

    sign: float | Tensor = 1

    def turned(self, x: Tensor) -> Tensor:
        place = torch.arange(-1, x.size(2) - 1, dtype=x.dtype)
        rows, columns = (place // 4 - 0.5, place % 4 - 1.5)
        angle = self.sign * torch.stack([0.6 * rows, 0.6 * columns], -1).repeat(1, 2) * (place >= 0)[:, None]
        one, two = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.turned(q), self.turned(k), v


class TurnedByEachHeadItsOwnWay(TurnedInAPlane):
    """Frequencies that are learnt have any sign."""

    sign = torch.tensor([-1.0, 0.7] + [-0.8] * (HEADS - 2))[:, None, None]


def test_positions_of_an_image_turn_forwards_too() -> None:
    assert judged(TurnedInAPlane, length=9).mistakes == ()
    assert judged(TurnedByEachHeadItsOwnWay, length=9).mistakes == ()
    assert judged(changed(TurnedInAPlane, sign=-1), length=9).mistakes == ("rotary_reversed",)


class TwoKinds(TwoStreams):
    """Keys of a text have a norm, those of an image beside them have none."""

    def bent(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def forward(self, x: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        key, value = self.bent(self.split(self.text_k(text)), self.split(self.text_v(text)))
        k, v = (
            torch.cat([F.layer_norm(k, k.shape[-1:]), F.layer_norm(key, key.shape[-1:])], 2),
            torch.cat([v, value], 2),
        )
        context = F.scaled_dot_product_attention(F.layer_norm(q, q.shape[-1:]), k, v)
        return self.o_proj(context.transpose(1, 2).flatten(2))


class KeysOfOneKindClamped(TwoKinds):
    def bent(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.clamp(-0.2, 0.2), v


class ValuesOfOneKindScaled(TwoKinds):
    def bent(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v * 1.3


class PackedWithNorms(Normed):
    """Queries and keys of one matrix, each with a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 3 * WIDTH)
        del self.k_proj, self.v_proj

    def packed(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.split(part) for part in self.q_proj(x).chunk(3, -1))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.packed(x)
        return self.q_norm(q), self.k_norm(k), v


class PackedWithNormsExchanged(PackedWithNorms):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return k, q, v


class ChannelsFirst(nn.Module):
    """Features in the middle, from the projections to what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (conv(x.mT).unflatten(1, (HEADS, -1)) for conv in (self.q, self.k, self.v))
        weights = (q.mT @ k * (WIDTH // HEADS) ** -0.5).softmax(-1)
        return (weights @ v.mT).mT.flatten(1, 2)


class FoldedHeads(Base):
    """Heads lie in the batch, so that the scores have one axis for both."""

    def weigh(self, scores: Tensor) -> Tensor:
        return self.moved(scores.flatten(0, 1)).softmax(-1).view_as(scores)

    def moved(self, scores: Tensor) -> Tensor:
        return scores


class FoldedHeadsRolledAndBack(FoldedHeads):
    def moved(self, scores: Tensor) -> Tensor:
        return scores.roll(1, 1).roll(-1, 1)


class BiasesJoined(Base):
    """One bias of parts, beside a packed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))

    def joined(self, *biases: Tensor) -> Tensor:
        return torch.cat(biases)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias = self.joined(self.q_bias, torch.zeros_like(self.v_bias), self.v_bias)
        q, k, v = (self.split(y) for y in F.linear(x, self.qkv, bias).chunk(3, -1))
        return q, k, v


class BiasesWithoutSigns(BiasesJoined):
    def joined(self, *biases: Tensor) -> Tensor:
        return torch.cat(biases).abs()


class OneRowAtATime(Base):
    """Causal, one query after another; what is hidden is written into the scores."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        rows = [self.row(q[:, :, [i]] @ k.mT * self.scale, i) @ v for i in range(x.size(1))]
        return torch.cat(rows, 2).transpose(1, 2).flatten(2)

    def row(self, scores: Tensor, i: int) -> Tensor:
        scores[..., i + 1 :] = -torch.inf
        return (scores - scores.amax(-1, keepdim=True)).softmax(-1)


class HeadsInSlices(Base):
    """Heads of all samples, two at a time."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (one.flatten(0, 1) for one in self.operands(x))
        context = torch.zeros_like(q)
        for start in range(0, len(q), 2):
            own = slice(start, start + 2)
            context[own] = self.kept((q[own] @ k[own].mT * self.scale).softmax(-1) @ v[own])
        return context.unflatten(0, (len(x), HEADS)).transpose(1, 2).flatten(2)

    def kept(self, context: Tensor) -> Tensor:
        return context


class HeadsInSlicesFlipped(HeadsInSlices):
    def kept(self, context: Tensor) -> Tensor:
        return context.flip(-1)


class TwoKindsInOneTensor(TwoStreams):
    """The first tokens of a tensor are projected by matrices of their own."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x + 1
        return super().forward(x[:, 2:], x[:, :2])


class NormedWithoutTheirScale(Normed):
    """Its configuration names a scale, and nothing has it."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = Configuration(query_pre_attn_scalar=4)


class ScaledBeforeAGain(Base):
    """Queries are scaled, then multiplied by what is learnt."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH // HEADS))

    def scaled(self, q: Tensor) -> Tensor:
        return q * (WIDTH // HEADS) ** -0.5

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.scaled(q) * self.gain, k, v


class GainWithoutAScale(ScaledBeforeAGain):
    def scaled(self, q: Tensor) -> Tensor:
        return q


class ScaledAsItsLogits(Base):
    """The scale of another thing is, by chance, that of its scores."""

    scale = 0.0625

    def __init__(self) -> None:
        super().__init__()
        self.config = Configuration(logit_scale=0.0625)


class LengthFirstRolled(Base):
    """Samples are exchanged while the length comes first."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attend(x).transpose(0, 1)).roll(1, 1).transpose(0, 1)


class AddsWhatItIsGiven(Base):
    """A residual from where nothing has a name."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return self.finished(super().forward(x) + residual)

    def finished(self, x: Tensor) -> Tensor:
        return x


class AddsAndLosesSigns(AddsWhatItIsGiven):
    def finished(self, x: Tensor) -> Tensor:
        return x.abs()


class NormedValuesScaled(NormedValues):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k, v * 1.3


class HandsKeysOverAsValues(Base):
    """What is kept takes keys before values, and gets them the other way round."""

    def kept(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        old = torch.empty(2, HEADS, 0, WIDTH // HEADS)
        keys = torch.cat((old, keys), 2)
        values = torch.cat((old, values), 2)
        return keys, values

    def attend(self, x: Tensor) -> Tensor:
        query = self.split(self.q_proj(x))
        key = self.split(self.k_proj(x))
        value = self.split(self.v_proj(x))
        k, v = self.kept(value, key)
        return (self.weigh(query @ k.mT * self.scale) @ v).transpose(1, 2).flatten(2)


class TurnedBesideOthers(TwoStreams):
    """Tokens turn by their positions, and look at others too, which do not."""

    direction = 1.0

    def turned(self, x: Tensor, sign: float = 1.0) -> Tensor:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
        one, two = x.chunk(2, -1)
        return torch.cat(
            (one * angle.cos() - sign * two * angle.sin(), two * angle.cos() + sign * one * angle.sin()), -1
        )

    def forward(self, x: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        k = torch.cat((self.turned(k, self.direction), self.split(self.text_k(text))), 2)
        v = torch.cat((v, self.split(self.text_v(text))), 2)
        return self.o_proj(F.scaled_dot_product_attention(self.turned(q), k, v).transpose(1, 2).flatten(2))


class GrowsWithPosition(nn.Module):
    """Multiplies queries by what is learnt for each head, and by their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.growth = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.growth * (torch.arange(x.size(2), dtype=x.dtype)[:, None] + 1).log() + 1)


class TurnedAndGrowing(TurnedInAPlane):
    def __init__(self) -> None:
        super().__init__()
        self.grow = GrowsWithPosition()

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.grow(q), k, v


class AmongSamples(nn.Module):
    """Queries of one feature lose an axis: rows of a product are samples then."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unbind(-1)
        return ((q @ k.mT).softmax(-1) @ v)[..., None]


class NormsOfBoth(nn.Module):
    """Normalises queries and keys, and learns how large keys are."""

    axis = -1

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q = q * (2 / q.norm(dim=self.axis, keepdim=True))
        k = k * (2 / k.norm(dim=-1, keepdim=True)) * self.size
        return q, k


class NormedTogether(Base):
    norm: type[nn.Module] = NormsOfBoth

    def __init__(self) -> None:
        super().__init__()
        self.norms = self.norm()

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return *self.norms(q, k), v


class NormedBarelyAndScaled(NormedBarely):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k * 1.3, v


class NormedBarelyAndScaledAsAsked(NormedBarely):
    """The configuration holds what multiplies the scores beside their scale."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Configuration(query_pre_attn_scalar=4, qk_scale_factor=1.3)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q * vars(self.config)["qk_scale_factor"], k, v


class NormedBarelyAndTurned(NormedBarely):
    """The half that a rotation takes with a minus is no factor of all."""

    def turned(self, x: Tensor, way: int = 1) -> Tensor:
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype).repeat(2)
        one, two = x.chunk(2, -1)
        return x * self.cosine(angle) + torch.cat([-two, one], -1) * (angle * way).sin()

    def cosine(self, angle: Tensor) -> Tensor:
        return angle.cos()

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.turned(q), self.turned(k), v


class NormedBarelyAndTurnedApart(NormedBarelyAndTurned):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = NormedBarely.operands(self, x)
        return self.turned(q), self.turned(k, -1), v


class NormedBarelyAndTurnedWithoutSigns(NormedBarelyAndTurned):
    def cosine(self, angle: Tensor) -> Tensor:
        return angle.cos().abs()


class LearntScaleOfEachElement(Base):
    """A scale of queries that is learnt for each element says how large the scores are."""

    def __init__(self) -> None:
        super().__init__()
        self.per_dim_scale = nn.Parameter(torch.zeros(WIDTH // HEADS))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q * 1.9 * self.gain(), k, v

    def gain(self) -> Tensor:
        return self.per_dim_scale.exp()


class ScaleOfEachElementFixed(Base):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q * 1.9 * torch.ones(WIDTH // HEADS), k, v


class Neighbours(nn.Module):
    """Adds to each token what a convolution makes of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bent(x) + self.conv(x.mT)[..., : x.size(1)].mT

    def bent(self, x: Tensor) -> Tensor:
        return x


class ValuesBesideTheirNeighbours(Base):
    def __init__(self) -> None:
        super().__init__()
        self.beside: nn.Module = Neighbours()

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _ = super().operands(x)
        return q, k, self.split(self.beside(self.v_proj(x)))


class NeighboursOfClamped(Neighbours):
    def bent(self, x: Tensor) -> Tensor:
        return x.clamp(-0.2, 0.2)


class ValuesClampedBesideTheirNeighbours(ValuesBesideTheirNeighbours):
    def __init__(self) -> None:
        super().__init__()
        self.beside = NeighboursOfClamped()


class ValuesOfTwoProjections(Base):
    """Four heads of queries share two of keys, and two of values that come from projections of their own."""

    scale = (WIDTH // 4) ** -0.5

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(WIDTH, WIDTH // 2)
        self.v_proj, self.v_late = (nn.Linear(WIDTH, WIDTH // 4) for _ in range(2))

    def grouped(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, 1)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (y.unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x)))
        v = torch.stack((self.v_proj(x), self.v_late(x)), 1)
        return q, k.repeat_interleave(2, 1), self.grouped(v)


class ValuesOfTwoProjectionsTiled(ValuesOfTwoProjections):
    def grouped(self, x: Tensor) -> Tensor:
        return x.repeat(1, 2, 1, 1)


class TurnedAndEnlarged(TurnedInAPlane):
    def turned(self, x: Tensor) -> Tensor:
        return super().turned(x).mul(1.3)


class PackedWithLargerKeys(Base):
    """Queries, keys and values are of one matrix, and split behind the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        k = k.transpose(1, 2).mul(1.3)
        context = F.scaled_dot_product_attention(q.transpose(1, 2), k, v.transpose(1, 2))
        return context.transpose(1, 2).flatten(2)


class SharesWithASink(Base):
    """A learnt score takes a share of every row; what a mask hides is the smallest number that there is."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def hide(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        return scores + attention_mask

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        scores = self.hide(q @ k.mT * self.scale, attention_mask)
        scores = torch.cat((scores, self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        scores = (scores - scores.amax(-1, keepdim=True)) * self.factor
        return self.o_proj((scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))


class SharesWithASinkUnmasked(SharesWithASink):
    def hide(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize(
    ("target", "names", "text"),
    [
        (SharesWithASink, (), ""),
        (SharesWithASinkUnmasked, ("mask_never_used",), "return self.o_proj("),
        (changed(SharesWithASink, factor=1.3), ("scale_wrong",), "scores = (scores - scores.amax("),
    ],
)
def test_a_sink_hides_no_other_mistake(target: type[nn.Module], names: tuple[str, ...], text: str) -> None:
    mask = torch.zeros(2, 1, 5, 5).double().masked_fill(torch.ones(5, 5).triu(1) > 0, torch.finfo(torch.float64).min)
    report = judged(target, mask, held=False)
    assert report.mistakes == names
    assert [finding.line.text.startswith(text) for finding in report.findings if finding.line] == [True] * len(names)


class TurnedByLearntAngles(Base):
    """Angles that are learnt, some of which fall: pairs are joined again after a cast."""

    steps = (-0.3, 0.4, -0.2, 0.1)

    def turned(self, x: Tensor) -> Tensor:
        steps = torch.tensor(self.steps[: x.size(-1) // 2], dtype=x.dtype)
        angle = torch.arange(x.size(2), dtype=x.dtype)[:, None] * steps
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        one = (even * angle.cos() - odd * angle.sin()).to(x.dtype)
        two = (even * angle.sin() + odd * angle.cos()).to(x.dtype)
        return torch.stack((one, two), -1).flatten(-2)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.turned(q), self.turned(k), v


def test_angles_of_which_some_fall_are_not_turned_round() -> None:
    assert judged(TurnedByLearntAngles).mistakes == ()
    assert judged(changed(TurnedByLearntAngles, steps=(-0.3, -0.4, -0.2, -0.1))).mistakes == ("rotary_reversed",)


@pytest.mark.parametrize("target", [NormedTogether, ValuesOfTwoProjections])
def test_norms_that_learn_of_keys_alone_and_values_of_two_matrices_are_right(target: type[nn.Module]) -> None:
    assert judged(target).mistakes == ()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("target", "name", "line"),
    [
        (
            changed(NormedTogether, norm=changed(NormsOfBoth, axis=-3)),
            "norm_leaves_different_sizes",
            "q = q * (2 / q.norm(",
        ),
        (NormedBarelyAndScaled, "scale_wrong", "return q, k * 1.3, v"),
        (ValuesOfTwoProjectionsTiled, "grouped_heads_tiled", "return x.repeat(1, 2, 1, 1)"),
        (PackedWithLargerKeys, "scale_wrong", "k = k.transpose(1, 2).mul(1.3)"),
        (TurnedAndEnlarged, "scale_wrong", "return super().turned(x).mul(1.3)"),
        (BiasRolled, "changed_by_roll", "return bias.roll(1, -1)"),
        (BiasClampedToAConstant, "changed_by_clamp", "return bias.clamp(-0.2, 0.2)"),
        (BiasForgotten, "bias_never_used", "return (self.weigh(q @ k.mT * self.scale) @ v)"),
        (BiasReadAndForgotten, "bias_never_used", "return (self.weigh(q @ k.mT * self.scale) @ v)"),
        (ValuesClampedBesideTheirNeighbours, "value_changed_by_clamp", "return x.clamp(-0.2, 0.2)"),
        (ScaleOfEachElementFixed, "scale_wrong", "return q * 1.9 * torch.ones("),
        (LocallyRolled, "changed_by_roll", "return x.roll(1, 1)"),
        (NormedWithoutTheirScale, "scale_missing", ""),
        (GainWithoutAScale, "scale_missing", ""),
        (ScaledAsItsLogits, "scale_wrong", ""),
        (LengthFirstRolled, "changed_by_roll", "return self.o_proj("),
        (NormedValuesScaled, "value_changed_by_mul", "return q, k, v * 1.3"),
        (HandsKeysOverAsValues, "key_value_swapped", "keys = torch.cat((old, keys), 2)"),
        (changed(Normed, norm=SquaredNorm), "norm_leaves_different_sizes", ""),
        (changed(Normed, norm=BareNormOfTokens), "norm_leaves_different_sizes", "return x * (x.pow(2).mean(-2"),
        (UpsampledAndClamped, "changed_by_clamp", "return x.clamp(-0.2, 0.2)"),
        (PackedAndTurned, "rotations_differ", "query = q * cos - turned * sin"),
        (PackedWithNormsExchanged, "query_key_swapped", "return (self.weigh(q @ k.mT * self.scale) @ v)"),
        (HeadsInSlicesFlipped, "changed_by_flip", "return context.flip(-1)"),
        (AmongSamples, "product_pairs_wrong_axes", "return ((q @ k.mT).softmax(-1) @ v)[..., None]"),
    ],
)
def test_what_changes_on_the_way_is_found_on_its_line(target: type[nn.Module], name: str, line: str) -> None:
    report = judged(target, held=False)
    assert report.mistakes == (name,)
    assert report.findings[0].line is not None
    assert report.findings[0].line.text.startswith(line)
    assert "bias of the scores are" not in report.findings[0].sentence


def test_biases_that_are_changed_before_they_are_added_are_not_equal() -> None:
    assert judged(BiasesWithoutSigns).verdict == "unchecked"


def test_a_norm_of_its_own_excuses_no_clamp_in_it() -> None:
    assert "query_changed_by_clamp" in judged(changed(Normed, norm=ClampingNorm)).mistakes


class HidesByNumbers(Base):
    """Its mask holds numbers: 1 for what is there."""

    def hidden(self, mask: Tensor) -> Tensor:
        return mask == 0

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        scores = (q @ k.mT * self.scale).masked_fill(self.hidden(attention_mask)[:, None, None], -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class HidesWhatIsThere(HidesByNumbers):
    def hidden(self, mask: Tensor) -> Tensor:
        return mask == 1


class HidesNothing(HidesByNumbers):
    def hidden(self, mask: Tensor) -> Tensor:
        return mask < 0


@pytest.mark.parametrize(
    ("target", "names"),
    [(HidesByNumbers, ()), (HidesWhatIsThere, ("mask_inverted",)), (HidesNothing, ("mask_never_used",))],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_mask_of_numbers_shows_what_is_there(
    target: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype
) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=dtype)
    assert judged(target, mask).mistakes == names


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "target",
    [
        BiasFromPlaces,
        BiasUsed,
        TableKept,
        Locally,
        Normed,
        NormedBarely,
        NormedBarelyAndScaledAsAsked,
        NormedBarelyAndTurned,
        ValuesBesideTheirNeighbours,
        LearntScaleOfEachElement,
        PaddedWindows,
        Upsampled,
        PackedWithNorms,
        ChannelsFirst,
        FoldedHeadsRolledAndBack,
        BiasesJoined,
        OneRowAtATime,
        HeadsInSlices,
        TwoKindsInOneTensor,
        TurnedAndGrowing,
        ScaledBeforeAGain,
    ],
)
def test_what_goes_its_own_way_unchanged_is_right(target: type[nn.Module]) -> None:
    assert judged(target).mistakes == ()


class BothWays(Base):
    """A text attends to an image, and the image to the text by the same scores."""

    def __init__(self) -> None:
        super().__init__()
        self.text_v, self.text_o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(text)), self.split(self.text_v(text))
        scores, v = q @ k.mT * self.scale, self.kept(v)
        context, back = scores.softmax(-1) @ v, scores.mT.softmax(-1) @ self.split(self.v_proj(x))
        return self.o_proj(context.transpose(1, 2).flatten(2)), self.text_o(back.transpose(1, 2).flatten(2))

    def kept(self, v: Tensor) -> Tensor:
        return v


class BothWaysWithHeadsTurned(BothWays):
    def kept(self, v: Tensor) -> Tensor:
        return v.flip(1)


def test_keys_may_attend_to_queries_beside_the_way_that_is_judged() -> None:
    text = torch.randn(2, 7, WIDTH).double()
    report = judged(BothWays, text)
    not_run = [exercise.what for exercise in report.not_exercised]
    assert (report.verdict, not_run) == ("partial", ["output 2"])
    assert judged(changed(BothWays, scale=1.0), text).mistakes == ("scale_missing",)
    assert judged(BothWaysWithHeadsTurned, text, held=False).verdict == "deviates"


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (NormedBarelyAndTurned, ()),
        (NormedBarelyAndTurnedApart, ("rotations_differ",)),
        (NormedBarelyAndTurnedWithoutSigns, ("query_changed_by_abs", "key_changed_by_abs")),
    ],
)
def test_a_rotation_is_seen_behind_a_norm_that_holds_no_gain(target: type[nn.Module], names: tuple[str, ...]) -> None:
    report = judged(target)
    assert report.mistakes == names
    assert ("rotary_positions" in [finding.name for finding in report.intended]) == (not names)


def test_a_parameter_of_a_line_that_did_not_run_is_listed() -> None:
    report = judged(BiasOfAnotherCall)
    assert report.mistakes == ()
    assert [exercise.what for exercise in report.not_exercised] == ["the parameter own_bias"]


@pytest.mark.parametrize(
    ("scale", "names"), [(256**-0.5, ()), (1 / 256, ("scale_wrong",))], ids=["the root", "the root is missing"]
)
def test_a_setting_gives_the_scale_as_itself_or_by_its_root(scale: float, names: tuple[str, ...]) -> None:
    class Configured(Base):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.scale = Configuration(query_pre_attn_scalar=256), scale

    assert judged(Configured).mistakes == names


def test_a_count_that_gives_a_scale_by_chance_is_no_setting_of_it() -> None:
    class Configured(Base):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.scale = Configuration(in_chans=3, stages=3), 3**-0.5

    assert judged(Configured).mistakes == ("scale_wrong",)


class ClampsItsWeights(Base):
    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores).clamp(max=0.2)


def test_the_weight_of_a_single_key_is_one() -> None:
    assert judged(Base, length=1).mistakes == ()
    assert judged(ClampsItsWeights, length=1).mistakes == ("weights_scaled",)


class ConditionsOnBoth(ThreeMatrices):
    """Keys and values of an image and of the queries behind it."""

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        both = torch.cat((x, latents), 1)
        return self.attended(latents, both, both)


class ConditionsOnBothUnscaled(ConditionsOnBoth):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


def test_inputs_may_be_joined_before_they_are_projected() -> None:
    assert verify(ConditionsOnBoth).mistakes == ()
    assert verify(ConditionsOnBothUnscaled).mistakes == ("scale_missing",)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (TwoKinds, ()),
        (KeysOfOneKindClamped, ("key_changed_by_clamp",)),
        (ValuesOfOneKindScaled, ("value_changed_by_mul",)),
    ],
)
def test_keys_and_values_of_each_kind_are_followed(target: type[nn.Module], names: tuple[str, ...]) -> None:
    report = judged(target, torch.randn(2, 4, WIDTH).double())
    assert report.mistakes == names
    assert not names or (report.findings[0].line is not None and "return k" in report.findings[0].line.text)


def test_a_residual_hides_nothing_that_comes_after_it() -> None:
    residual = torch.randn(2, 5, WIDTH).double()
    assert judged(AddsWhatItIsGiven, residual).mistakes == ()
    assert judged(AddsAndLosesSigns, residual).mistakes == ("changed_by_abs",)


@pytest.mark.parametrize(
    ("target", "names"),
    [(TurnedBesideOthers, ()), (changed(TurnedBesideOthers, direction=-1.0), ("rotations_differ",))],
)
def test_turned_tokens_beside_others_turn_alike(target: type[nn.Module], names: tuple[str, ...]) -> None:
    assert judged(target, torch.randn(2, 4, WIDTH).double()).mistakes == names


class OfAnImage(Base):
    """Channels come first in what it takes and gives, and a residual lies around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(HEADS, WIDTH)

    def laid_out(self, x: Tensor, shape: torch.Size) -> Tensor:
        return x.mT.reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).mT
        return self.laid_out(super().forward(tokens), x.shape) + x


class OfAnImageInNameOnly(OfAnImage):
    def laid_out(self, x: Tensor, shape: torch.Size) -> Tensor:
        return x.reshape(shape)


def test_what_meets_tokens_that_a_view_moved_is_not_told_too() -> None:
    report = verify(OfAnImageInNameOnly)
    assert report.mistakes == ("output_tokens_moved",)


class NormedBehind(Base):
    """Tokens come first; the norm stands behind the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def kept(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.kept(super().forward(x)))


class RolledBeforeItsSum(NormedBehind):
    def kept(self, x: Tensor) -> Tensor:
        return x.roll(1, 1)


@pytest.mark.parametrize(
    ("target", "shape", "names"),
    [
        (OfAnImage, (2, WIDTH, 3, 5), ()),
        (NormedBehind, (2, 5, WIDTH), ()),
        (RolledBeforeItsSum, (2, 5, WIDTH), ("changed_by_roll",)),
    ],
)
def test_a_residual_meets_its_own_tokens(
    target: type[nn.Module], shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    (report,) = diagnose_call(Call(target().double().eval(), (torch.randn(shape).double(),)))
    assert report.mistakes == names, str(report)


class BiasOfQueries(Base):
    """A bias that queries make with a table of places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDTH // HEADS))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        scores = q @ k.mT * self.scale + torch.einsum("bhqd,kd->bhqk", q, self.table)
        return (self.weigh(scores) @ v).transpose(1, 2).flatten(2)


def test_a_bias_that_queries_make_is_named_after_its_table() -> None:
    (bias,) = judged(BiasOfQueries).intended
    assert (bias.name, bias.reason) == ("bias_added", "it is made from the parameter table")


class Clipped(Base):
    """Scores that a setting holds between two bounds."""

    def __init__(self, clip: float = 3.0) -> None:
        super().__init__()
        self.clip = clip

    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores.clamp(-self.clip, self.clip))


class ClippedUnasked(Clipped):
    def weigh(self, scores: Tensor) -> Tensor:
        return Base.weigh(self, scores.clamp(-2.5, 2.5))


def test_a_setting_may_ask_for_bounds_of_the_scores() -> None:
    report = verify(Clipped)
    assert (report.verdict, report.findings) == ("unchecked", []), str(report)
    assert verify(ClippedUnasked).mistakes == ("changed_by_clamp",)


class EmptyTable(Base):
    """A parameter without any number, as where an option is off."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(0))


def test_a_parameter_without_numbers_need_not_be_used() -> None:
    assert verify(EmptyTable).verdict == "equal", str(verify(EmptyTable))


def test_what_is_zero_since_its_weights_are_was_not_dropped_itself() -> None:
    report = verify(f"{gpt.__file__}:CausalSelfAttention")  # its first token sees one key alone
    assert (report.verdict, report.intended) == ("equal", []), str(report)


class KeepsItsSoftmax(nn.Module):
    """Builds a softmax over the queries, and calls it later."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.normalise = nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT / x.size(-1) ** 0.5
        return self.normalise(scores) @ self.v(x)


def test_the_line_that_builds_a_wrong_softmax_comes_first() -> None:
    (finding,) = verify(KeepsItsSoftmax).findings
    assert finding.name == "softmax_over_queries"
    texts = [line.text for line in finding.stack]
    assert sorted(texts) == ["return self.normalise(scores) @ self.v(x)", "self.normalise = nn.Softmax(dim=1)"]
    assert line_of(finding) == "self.normalise = nn.Softmax(dim=1)"


class PiecesOfSeries(nn.Module):
    """Right: cuts each series into pieces, which attend to one another; the last one is filled up."""

    def __init__(self, length: int = 20, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.project, self.attention = nn.Linear(4, width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.head = nn.Linear((length // 4 + 1) * width, 7)

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.pad(x.reshape(-1, 1, x.size(-1)), (0, 4), mode="replicate")
        pieces = self.project(rows.unfold(2, 4, 4).squeeze(1))
        attended = self.attention(pieces, pieces, pieces)[0]
        return self.head(attended.flatten(1)).unflatten(0, x.shape[:2])


def test_pieces_of_one_token_have_names_of_their_own() -> None:
    report = verify(PiecesOfSeries, kind="attention")
    assert report.verdict != "deviates", str(report)


class FirstAsks(ThreeMatrices):
    """Right, and says so: the first token asks, and all are asked."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attended(x[:, :1], x, x)


class ClassAttention(FirstAsks):
    """The same."""


def test_the_first_token_of_what_holds_keys_and_values_may_ask() -> None:
    assert verify(ClassAttention).verdict == "equal", str(verify(ClassAttention))
    assert verify(FirstAsks).verdict == "unchecked"


class RotaryEmbedding(nn.Module):
    """Rotates one head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(64).double(), 10000.0 ** -(torch.arange(0, d_model, 2) / d_model))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        first, second = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos[: x.size(-2)], self.sin[: x.size(-2)]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class HandedARotation(SelfAttention):
    """Right: rotates each head by what it is handed."""

    def __init__(self, d_model: int, num_heads: int, rope: nn.Module) -> None:
        super().__init__(d_model, num_heads)
        self.rope = rope

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(self.rope(q), self.rope(k))


def test_a_rotation_that_is_handed_over_is_built_for_one_head() -> None:
    assert verify(HandedARotation).verdict == "equal", str(verify(HandedARotation))


class HidesByItself(ThreeMatrices):
    """Right: keys behind a query are hidden, and a buffer is what divides the scores."""

    scale: Tensor

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.register_buffer("scale", torch.sqrt(torch.tensor([d_model // num_heads])))

    def sees(self, queries: int, keys: int) -> Tensor:
        return self.scale.new_ones(queries, keys).tril() != 0

    def behind(self, context: Tensor, values: Tensor) -> Tensor:
        return context

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / self.scale).masked_fill(~self.sees(q.size(2), k.size(2)), -torch.inf)
        return self.behind(scores.softmax(-1) @ v, v)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attended(query, key, value)


class HidesEveryOther(HidesByItself):
    """Nothing asks for what is hidden."""

    def sees(self, queries: int, keys: int) -> Tensor:
        return (torch.arange(queries)[:, None] - torch.arange(keys)) % 2 == 0


class StretchedToOneValue(HidesByItself):
    """Only projections take part in a factor that torch's formula does not have."""

    def behind(self, context: Tensor, values: Tensor) -> Tensor:
        return context * (values[:, :, :1].norm(dim=-1, keepdim=True) / context.norm(dim=-1, keepdim=True))


def test_a_buffer_that_scales_is_no_evidence_for_a_mask() -> None:
    right, other = verify(HidesByItself), verify(HidesEveryOther)
    assert (right.verdict, right.intended) == ("equal", []), str(right)
    assert "causal mask" in [what for what, *_ in right.conventions]
    assert (other.verdict, other.intended) == ("unchecked", []), str(other)


def test_a_parameter_of_a_projection_is_no_evidence_for_a_factor() -> None:
    report = verify(StretchedToOneValue)
    assert (report.verdict in ("unchecked", "deviates"), report.intended) == (True, []), str(report)
    assert "changed_by_mul" in report.mistakes
