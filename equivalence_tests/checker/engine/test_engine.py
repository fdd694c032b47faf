"""The engine on attentions in many styles: right ones are equal, wrong ones are found, named, and shown to be so."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.calls import diagnose_call
from equivalence_tests.checker.equivalent.subjects import diagnose_subject
from equivalence_tests.checker.helpers_for_tests import changed
from equivalence_tests.checker.reach.state import prepare, preserved_global_state
from equivalence_tests.checker.reach.subject import Adapter, subjects
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.zoo.stages import Operands, ThreeMatrices


def diagnosed(target: Any) -> Report:
    with preserved_global_state():
        torch.set_default_dtype(torch.float64)
        for subject in subjects(target, "it", Adapter()):
            if subject.module is not None:
                subject.function = prepare(copy.deepcopy(subject.module))
            report = diagnose_subject(subject)
            if report is not None:
                return report
    raise AssertionError("it cannot be called")


class Plain(ThreeMatrices):
    """The stages that the classes below replace."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.head_dim = embed_dim // num_heads

    def position(self, x: Tensor) -> Tensor:
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.position(q), self.position(k), v)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attended(query, key, value)


class Oneself(Plain):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)


class Fused(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class ByEinsum(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(self.head_dim**-0.5).softmax(-1)
        return torch.einsum("...qk,...kd->...qd", weights, v)


class ByHand(Plain):
    """A softmax of its own."""

    def weigh(self, scores: Tensor) -> Tensor:
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)


class HeadByHead(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [super(HeadByHead, self).attend(*(x[:, i] for x in (q, k, v))) for i in range(self.heads)]
        return torch.stack(heads, 1)


class ScaledInTwoPlaces(Plain):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.head_dim**-0.25) @ (k * self.head_dim**-0.25).mT


class Summed(Plain):
    """No matrix product anywhere."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q[:, :, :, None] * k[:, :, None]).sum(-1) / math.sqrt(self.head_dim)


class Tiled(Plain):
    """An online softmax over tiles of two keys."""

    rescaled = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        best = q.new_full((*q.shape[:-1], 1), -math.inf)
        total, out = torch.zeros_like(best), torch.zeros_like(q)
        for start in range(0, k.size(2), 2):
            scores = self.scores(q, k[:, :, start : start + 2])
            new = torch.maximum(best, scores.amax(-1, keepdim=True))
            e, shrink = (scores - new).exp(), (best - new).exp()
            total = total * shrink + e.sum(-1, keepdim=True)
            out = (out * shrink if self.rescaled else out) + e @ v[:, :, start : start + 2]
            best = new
        return out / total


class Rotating(Oneself):
    """Rotary positions in halves, by rotate_half."""

    sign = -1.0
    inv_freq: Tensor

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        width = self.head_dim // 2 * 2
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(0, width, 2).double() / width))

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((self.sign * second, first), -1)

    def position(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2)).double()[:, None] * torch.cat([self.inv_freq] * 2).to(x.dtype)
        return x * angle.cos() + self.turned(x) * angle.sin()


class RotatingNeighbours(Rotating):
    def position(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2)).double()[:, None] * self.inv_freq
        one, two = x[..., 0::2], x[..., 1::2]
        pairs = (one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos())
        return torch.stack(pairs, -1).flatten(-2)


class RotatingComplex(Rotating):
    def position(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2)).double()[:, None] * self.inv_freq
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.view_as_real(turned).flatten(-2)


class RotatingInPlace(Rotating):
    def position(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(2)).double()[:, None] * self.inv_freq
        x = x.clone()
        one, two = x[..., 0::2].clone(), x[..., 1::2].clone()
        x[..., 0::2] = one * angle.cos() - two * angle.sin()
        x[..., 1::2] = two * angle.cos() + one * angle.sin()
        return x


class Normed(Oneself):
    """QK-norm with a learnt gain, and no scale."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.norms = nn.ModuleList([nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.norms[0](q) @ self.norms[1](k).mT


class Causal(Oneself):
    ahead = 1

    def weigh(self, scores: Tensor) -> Tensor:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(self.ahead)
        return scores.masked_fill(future, -math.inf).softmax(-1)


class Overwrites(Plain):
    """The weights take the memory of the scores, whichever name is read afterwards."""

    axis = -1

    def weigh(self, scores: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return scores.softmax(self.axis)
        torch.softmax(scores, self.axis, out=scores)
        return scores


RIGHT = (
    Plain,
    Overwrites,
    Oneself,
    Fused,
    ByEinsum,
    ByHand,
    HeadByHead,
    ScaledInTwoPlaces,
    Summed,
    Tiled,
    Rotating,
    RotatingNeighbours,
    RotatingComplex,
    RotatingInPlace,
    Normed,
    Causal,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", RIGHT)
def test_what_is_right_is_equal(target: type[nn.Module]) -> None:
    report = diagnosed(target)
    assert report.verdict == "equal", report.mistakes


class SwappedInputs(Plain):
    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> Operands:
        return self.split(self.q(key)), self.split(self.k(query)), self.split(self.v(value))


class SwappedWeights(Oneself):
    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> Operands:
        return self.split(self.k(query)), self.split(self.q(key)), self.split(self.v(value))


class RotatesQueriesOnly(Rotating):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weigh(self.scores(self.position(q), k)) @ v


class HoldsScores(Plain):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.clamp(-5, 5).softmax(-1)


class RollsKeys(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weigh(self.scores(q, k)) @ v.roll(1, 2)


class TakesSizes(Plain):
    """The absolute value of the queries."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q.abs(), k, v)


class SquaresContext(Plain):
    def merge(self, context: Tensor) -> Tensor:
        return super().merge(context.relu())


class SeesNext(Causal):
    ahead = 2


class NormsQueriesOnly(Oneself):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.norm = nn.LayerNorm(embed_dim)

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> Operands:
        return super().projected(self.norm(query), key, value)


class ForgetsLastKey(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k[:, :, :-1], v[:, :, :-1])


class CrashesOnOtherLengths(Plain):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().forward(query, key.view(query.shape), value)


WRONG = (
    (SwappedInputs, "query_key_swapped", "self.q(key)"),
    (SwappedWeights, "query_key_swapped", "self.k(query)"),
    (changed(Tiled, rescaled=False), "", ""),
    (changed(Rotating, sign=1.0), "", ""),
    (RotatesQueriesOnly, "rotary_queries", ""),
    (HoldsScores, "changed_by_clamp", "scores.clamp(-5, 5)"),
    (changed(Overwrites, axis=-2), "softmax_over_queries", "torch.softmax(scores, self.axis, out=scores)"),
    (RollsKeys, "", "v.roll(1, 2)"),
    (TakesSizes, "query_changed_by_abs", "q.abs()"),
    (SquaresContext, "changed_by_relu", "context.relu()"),
    (SeesNext, "causal_sees_one_ahead", "triu("),
    (NormsQueriesOnly, "keys_not_normalised", ""),
    (ForgetsLastKey, "", "k[:, :, :-1]"),
    (CrashesOnOtherLengths, "", ""),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("target", "name", "line"), WRONG)
def test_what_is_wrong_is_found(target: type[nn.Module], name: str, line: str) -> None:
    report = diagnosed(target)
    assert report.verdict == "deviates"
    assert not name or report.mistakes == (name,)
    assert not line or (report.findings[0].line is not None and line in report.findings[0].line.text)


def test_a_sum_of_two_tensors_is_no_attention() -> None:
    assert diagnose_call(Call(lambda a, b: a + b, (torch.randn(2, 3), torch.randn(2, 3)))) == []


def test_every_attention_of_a_model_is_judged_where_it_stands() -> None:
    model = nn.Sequential(Oneself(12, 3), Causal(12, 3), SeesNext(12, 3)).eval()
    found = diagnose_call(Call(model, (torch.randn(2, 5, 12),)))
    assert [one.mistakes for one in found] == [(), (), ("causal_sees_one_ahead",)]
