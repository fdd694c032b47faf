"""LayerNorms and feed-forwards by themselves: what is right in another form, what is wrong, and how it is said."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from equivalence_tests.checker.helpers_for_tests import line_of, proof_holds
from equivalence_tests.checker.parts import checking
from equivalence_tests.checker.parts.readings import Judged, judge
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.parts import (
    GainBiasLayerNorm,
    LinearFeedForward,
    PaperFeedForward,
    PaperPositionalEncoding,
    UnbiasedLayerNorm,
)


def row(report: Report, what: str) -> str:
    return next((here for name, here, _ in report.conventions if name == what), "")


class Gated(nn.Module):
    """Three linears, of which one makes the gate."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up, self.down = nn.Linear(dim, hidden_dim, bias=False), nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activated(self.gate(x)) * self.up(x))

    def activated(self, x: Tensor) -> Tensor:
        return F.silu(x)


class SwiGluFeedForward(Gated):
    pass


class HandWrittenSwiGluFeedForward(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * torch.sigmoid(self.gate(x)) * self.up(x))


class BilinearFeedForward(Gated):
    def activated(self, x: Tensor) -> Tensor:
        return x


class PackedGegluFeedForward(nn.Module):
    """The halves of one linear: values first, gates after them, and pre-norm with a residual."""

    def __init__(self, dim: int, mult: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.inner, self.outer = nn.Linear(dim, 2 * mult * dim), nn.Linear(mult * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.inner(self.norm(x)).chunk(2, dim=-1)
        return x + self.outer(values * F.gelu(gates))


class ConvFeedForward(nn.Module):
    """Convolutions over one token at a time."""

    def __init__(self, d_in: int, d_hid: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(d_in, d_hid, 1), nn.Conv1d(d_hid, d_in, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.activated(self.conv1(x.transpose(1, 2)))).transpose(1, 2)

    def activated(self, x: Tensor) -> Tensor:
        return F.relu(x)


class LinearConvFeedForward(ConvFeedForward):
    def activated(self, x: Tensor) -> Tensor:
        return x


class ShuffledFeedForward(PaperFeedForward):
    """Nothing that is known."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.w_1(x).sin().cumsum(-1))


class TanhFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class CubedNorm(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return super().normalised(x) ** 3


class ScalarLayerNorm(nn.Module):
    """One gain and one bias for all features."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.alpha, self.bias, self.eps = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias


class ShapedLayerNorm(nn.Module):
    """Takes a list of sizes."""

    def __init__(self, normalized_shape: list[int], eps: float = 1e-5) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(normalized_shape)), nn.Parameter(torch.zeros(normalized_shape))
        self.dims, self.eps = [-1 - i for i in range(len(normalized_shape))], eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(self.dims, keepdim=True)
        return self.gain * centred / (centred.square().mean(self.dims, keepdim=True) + self.eps).sqrt() + self.bias


class RootlessLayerNorm(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + self.eps)


class SmallEpsLayerNorm(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-12)


class TorchsTanhFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.gelu(self.w_1(x), approximate="tanh"))


class SummingLayerNorm(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().sum(-1, keepdim=True) + self.eps).sqrt()


class LayerNormExchanged(GainBiasLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.beta * self.normalised(x) + self.gamma


class LayerNormOverAll(GainBiasLayerNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / (x.var(correction=0) + self.eps).sqrt()


class RootMeanSquare(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class MyRMSNorm(RootMeanSquare):
    pass


class MeanlessLayerNorm(RootMeanSquare):
    pass


class CentringRMSNorm(RootMeanSquare):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class ScaleNorm(RootMeanSquare):
    """One gain for all features, and the length of the vector for the root of the mean."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)


class ChannelsLayerNorm(GainBiasLayerNorm):
    """Takes (batch, features, len)."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        spread = (centred.square().mean(1, keepdim=True) + self.eps).sqrt()
        return self.gamma[:, None] * centred / spread + self.beta[:, None]


class HalfFeedForward(PaperFeedForward):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * super().forward(self.norm(x))


class EarlyActivationFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.w_1(x.relu()))


class LazyFeedForward(nn.Module):
    """Names the width of its output a feed-forward's, and works it out in the first call."""

    def __init__(self, ffn_num_hiddens: int, ffn_num_outputs: int) -> None:
        super().__init__()
        self.dense1, self.dense2 = nn.LazyLinear(ffn_num_hiddens), nn.LazyLinear(ffn_num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense2(F.relu(self.dense1(x)))


class SquareConvFeedForward(ConvFeedForward):
    """One width for all."""

    def __init__(self, hidden_units: int, dropout_rate: float) -> None:
        super().__init__(hidden_units, hidden_units)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(super().forward(x))
        y += x
        return y


class RawFeedForward(nn.Module):
    """Matrices and biases of its own, stored (in, out)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.W1, self.b1 = nn.Parameter(torch.empty(d_model, d_ff)), nn.Parameter(torch.zeros(d_ff))
        self.W2, self.b2 = nn.Parameter(torch.empty(d_ff, d_model)), nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.W1 + self.b1).relu() @ self.W2 + self.b2


class RawSwiGluFeedForward(nn.Module):
    """Matrices of its own without biases, stored (out, in)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(torch.empty(d_ff, d_model)), nn.Parameter(torch.empty(d_ff, d_model))
        self.down = nn.Parameter(torch.empty(d_model, d_ff))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class TiedFeedForward(nn.Module):
    """One matrix for there and back."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_ff, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.weight.T) @ self.weight


class WrittenGelu(PaperFeedForward):
    """Its activation is written down, with the first linear in it twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(0.5 * self.w_1(x) * (1 + torch.erf(self.w_1(x) / 2**0.5)))


class WeightNormFeedForward(PaperFeedForward):
    """Its matrices are made in each call."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.w_1, self.w_2 = weight_norm(self.w_1), weight_norm(self.w_2)


class ChannelsFeedForward(ConvFeedForward):
    """Features before tokens, outside too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.activated(self.conv1(x)))


class WideConvFeedForward(ConvFeedForward):
    """Looks at three tokens at once."""

    def __init__(self, d_in: int, d_hid: int) -> None:
        super().__init__(d_in, d_hid)
        self.conv1 = nn.Conv1d(d_in, d_hid, 3, padding=1)


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    return gamma * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt() + beta


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return (x @ w1 + b1).relu() @ w2 + b2


def feed_forward_of_rows(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return F.linear(F.linear(x, w1), w2)


class PreNorm(nn.Module):
    """A LayerNorm before anything."""

    def __init__(self, dim: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(dim), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x))


class Residual(nn.Module):
    """x beside anything."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


RIGHT: dict[str, tuple[Callable[[], Any], str, str]] = {
    "three linears": (lambda: SwiGluFeedForward, "gated", "SwiGLU"),
    "three linears, one of them applied twice": (lambda: HandWrittenSwiGluFeedForward, "gated", "SwiGLU"),
    "two linears, packed": (lambda: PackedGegluFeedForward, "gated", "GEGLU"),
    "convolutions": (lambda: ConvFeedForward, "activation", "ReLU"),
    "lazy linears": (lambda: LazyFeedForward, "activation", "ReLU"),
    "convolutions of one width": (lambda: SquareConvFeedForward, "includes", "+ residual"),
    "matrices of its own": (lambda: RawFeedForward, "linears", "W1, W2"),
    "one matrix twice": (lambda: TiedFeedForward, "activation", "GELU"),
    "one linear twice, in an activation by hand": (lambda: WrittenGelu, "activation", "GELU"),
    "matrices with a norm": (lambda: WeightNormFeedForward, "activation", "ReLU"),
    "gates of its own": (lambda: RawSwiGluFeedForward, "gated", "SwiGLU"),
    "features before tokens": (lambda: ChannelsFeedForward, "layout", "(batch, features, len)"),
    "containers in containers": (
        lambda: nn.Sequential(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 8)),
        "includes",
        "+ LayerNorm on the input",
    ),
    "wrappers": (
        lambda: Residual(PreNorm(8, PaperFeedForward(8, 16))),
        "includes",
        "+ LayerNorm on the input, + residual",
    ),
    "a function of gain and bias": (lambda: layer_norm, "gain and bias", "gamma and beta"),
    "a function that leaves the mean": (lambda: rms_norm, "compared with", "nn.RMSNorm"),
    "a function of matrices": (lambda: feed_forward, "activation", "ReLU"),
    "an instance": (lambda: SwiGluFeedForward(8, 16), "gated", "SwiGLU"),
    "one gain, no mean": (lambda: ScaleNorm, "compared with", "g * F.normalize(x)"),
    "features before tokens, normalised": (lambda: ChannelsLayerNorm, "layout", "(batch, features, len)"),
    "half of it": (lambda: HalfFeedForward, "includes", "+ LayerNorm on the input, half of it + residual"),
    "a list of sizes": (lambda: ShapedLayerNorm, "axes", "the last"),
    "an RMSNorm": (lambda: MyRMSNorm, "compared with", "nn.RMSNorm"),
    "torch's RMSNorm": (lambda: nn.RMSNorm, "compared with", "nn.RMSNorm"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_read(name: str) -> None:
    found, what, said = RIGHT[name]
    report = verify(found())
    assert report.verdict == "equal", str(report)
    assert row(report, what).startswith(said)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("found", "names"),
    [
        (RootlessLayerNorm, {"norm_without_root"}),
        (SummingLayerNorm, {"norm_sum_for_mean"}),
        (LayerNormExchanged, {"norm_gain_and_bias_exchanged"}),
        (LayerNormOverAll, {"norm_wrong_axes"}),
        (MeanlessLayerNorm, {"norm_without_mean"}),
        (CentringRMSNorm, {"norm_subtracts_mean"}),
        (EarlyActivationFeedForward, {"activation_misplaced"}),
        (BilinearFeedForward, {"gate_without_activation"}),
        (LinearConvFeedForward, {"activation_missing"}),
        (feed_forward_of_rows, {"activation_missing"}),
    ],
)
def test_what_is_wrong_is_named(found: Any, names: set[str]) -> None:
    report = verify(found)
    assert set(report.mistakes) == names, str(report)


def test_what_torch_has_an_argument_for_is_told_and_not_blamed() -> None:
    report = verify(SmallEpsLayerNorm)
    assert (report.verdict, report.intended) == ("equal", []), str(report)
    assert row(report, "eps").startswith("1e-12")
    report = verify(TorchsTanhFeedForward)
    assert report.verdict == "equal", str(report)
    assert [(finding.name, finding.reason) for finding in report.intended] == [
        ("gelu_approximated", "its formula is the approximation")
    ]
    report = verify(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)))
    assert (report.verdict, report.mistakes) == ("equal", ()), str(report)
    assert "The activation is SiLU" in report.intended[0].sentence


class FeedForwardOnNoDevice(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to("mlu"))


def test_what_the_code_said_to_the_calls_of_a_part_is_told() -> None:
    reason = verify(FeedForwardOnNoDevice).reason
    assert re.search(r"it said RuntimeError: Expected one of cpu.*\(\S*test_parts.py:\d+\)", reason), reason


@pytest.mark.parametrize("found", [ShuffledFeedForward, lambda: ShuffledFeedForward(8, 32)])
def test_what_fits_nothing_is_given_up_soon(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def counted(report: Report, *rest: Any) -> Judged:
        judged.append(report.kind)
        return judge(report, *rest)

    monkeypatch.setattr(checking, "judge", counted)
    monkeypatch.setattr(checking, "_located", lambda *_: False)  # it reads it again without each expression
    assert verify(found).verdict == "unchecked"
    assert max(judged.count(kind) for kind in judged) <= checking.MOST_OBSERVED, judged


class RolledFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.roll(1, -1))


def layer_norm_with_turned_bias(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return gamma * (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() + beta.flip(0)


class TurnedPositions(PaperPositionalEncoding):
    pe: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[: x.size(1)].flip(-1)


@pytest.mark.parametrize(
    ("found", "name", "line"),
    [
        (CubedNorm, "changed_by_pow", "return super().normalised(x) ** 3"),
        (RolledFeedForward, "changed_by_roll", "return super().forward(x.roll(1, -1))"),
        (layer_norm_with_turned_bias, "changed_by_flip", "beta.flip(0)"),
        (TurnedPositions, "changed_by_flip", "return x + self.pe[: x.size(1)].flip(-1)"),
    ],
)
def test_the_line_that_keeps_a_part_from_being_one_is_blamed(found: Any, name: str, line: str) -> None:
    report = verify(found)
    assert report.mistakes == (name,), str(report)
    (finding,) = report.findings
    assert line_of(finding).endswith(line)
    assert proof_holds(finding)


def test_what_may_be_intended_in_a_part_is_named_and_not_blamed() -> None:
    reason = verify(TanhFeedForward).reason
    assert re.search(r"on line \d+, it is a feed forward to .* It may be intended: it is an activation", reason), reason


class FeedForwardAfterNorm(PaperFeedForward):
    """Its name ends like a norm's."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(self.norm(x))


def test_a_feed_forward_may_speak_of_its_norm() -> None:
    report = verify(FeedForwardAfterNorm)
    assert (report.kind, report.verdict) == ("feed forward", "equal")


@pytest.mark.thorough
def test_a_feed_forward_taken_for_a_norm_breaks_nothing() -> None:
    report = verify(FeedForwardAfterNorm, kind="layer_norm")
    assert (report.verdict, report.reason[:7]) == ("unchecked", "No know")


def test_letters_of_a_name_that_meet_by_chance_make_no_rms_norm() -> None:
    report = verify(type("LayerNormScalingBias", (GainBiasLayerNorm,), {}))  # LayerNo-rmS
    assert report.kind == "layer norm"


def test_a_gate_is_known_by_its_linears_where_the_name_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("equivalence_tests.checker.verify.examine_attention", lambda *args: asked.append("attention"))
    report = verify(type("Dense", (Gated,), {}))
    assert (report.kind, report.verdict) == ("feed forward", "equal")
    assert not asked  # for an attention: that search is long


def test_a_convolution_over_tokens_is_said_to_be_one() -> None:
    assert "It mixes tokens" in verify(WideConvFeedForward, kind="feed_forward").reason


def test_evidence_is_that_of_its_own_finding() -> None:
    by_name = {f.name: float(f.evidence.rpartition(" ")[2]) for f in verify(ScalarLayerNorm).intended}
    assert by_name["norm_eps_outside"] < 3e-3 < by_name["norm_unbiased_std"]


def test_what_the_annotated_transformer_does_is_intended_together() -> None:
    report = verify(ScalarLayerNorm)
    assert report.verdict == "equal", str(report)
    assert {one.reason for one in report.intended} == {"both are the LayerNorm of The Annotated Transformer"}
    assert verify(UnbiasedLayerNorm).mistakes == ("norm_unbiased_std",)


def test_rows_are_words() -> None:
    class NoResidual(PaperFeedForward):
        def __init__(self, d_model: int, d_ff: int) -> None:
            super().__init__(d_model, d_ff)
            self.layer_norm = nn.LayerNorm(d_model)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer_norm(super().forward(x))

    report = verify(NoResidual, kind="feed_forward")
    assert report.mistakes == ("residual_missing",)
    assert not [cell for line in report.conventions for cell in line if "_missing" in cell]


def test_the_line_of_a_forgotten_activation_is_where_the_linears_meet() -> None:
    report = verify(LinearFeedForward)
    assert line_of(report.findings[0]).endswith("return self.w_2(self.w_1(x))")
    assert verify(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))).findings[0].line is None
    late = verify(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.ReLU()))
    assert [(f.name, f.line) for f in late.findings] == [("activation_misplaced", None)]  # no line of torch's


def test_an_instance_keeps_its_weights() -> None:
    module = PaperFeedForward(8, 16)
    before = module.w_1.weight.detach().clone()
    assert verify(module).verdict == "equal"
    assert torch.equal(module.w_1.weight, before)


class DropsInEval(nn.Module):
    """Drops by a function, which is not told that it is in eval."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(nn.functional.dropout(self.w_1(x).relu(), 0.1))


def test_a_feed_forward_that_drops_in_eval_is_told_its_line() -> None:
    (finding,) = verify(DropsInEval, kind="feed_forward").findings
    assert finding.name == "random_in_eval"
    assert "functional.dropout" in line_of(finding)
