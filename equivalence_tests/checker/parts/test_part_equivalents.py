"""What is right of a part is written in torch's own: it runs alone, loads strictly, and gives the same numbers."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo import builders
from equivalence_tests.checker.zoo.parts import (
    ConcatenatedPositionalEncoding,
    GainBiasLayerNorm,
    GeluFeedForward,
    PaperFeedForward,
    PaperPositionalEncoding,
)
from equivalence_tests.instruments.weights import randomize_parameters

ALONE = """
import importlib.util, sys, torch
for path in sys.argv[1:]:
    case = torch.load(path + ".pt")
    spec = importlib.util.spec_from_file_location("theirs", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    made = theirs.Equivalent().double()
    made.load_state_dict(theirs.from_theirs(case["state"]), strict=True)
    assert torch.allclose(made(case["x"]), case["output"], rtol=0, atol=case["bound"]), path
    back = theirs.to_theirs(made.state_dict(), {name: torch.zeros_like(x) for name, x in case["state"].items()})
    for name in case["learnt"]:
        assert torch.allclose(back[name], case["state"][name], rtol=0, atol=1e-15), (path, name)
assert not {"equivalence_tests", "benchmarks"} & {name.partition(".")[0] for name in sys.modules}
"""


class RMSNorm(nn.Module):
    """Right: its gain starts at 0, and 1 is added."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.gain = eps, nn.Parameter(torch.zeros(dim))

    def forward(self, hidden_states: Tensor) -> Tensor:
        size = hidden_states.square().mean(-1, keepdim=True)
        return hidden_states * torch.rsqrt(size + self.eps) * (1 + self.gain)


class ScaleNorm(nn.Module):
    """Right: one number for all features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(dim**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * F.normalize(x, dim=-1)


class GatedFeedForward(nn.Module):
    """Right: gate and values in one matrix."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(dim, 2 * hidden_dim, bias=False), nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, values = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * values)


class PreNormFeedForward(nn.Module):
    """Right: with a norm of torch's and a residual."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.norm, self.net = nn.LayerNorm(dim), nn.Sequential(nn.Conv1d(dim, hidden_dim, 1), nn.ReLU())
        self.out = nn.Parameter(torch.randn(hidden_dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(self.norm(x).mT).mT @ self.out


class LearnedPositionalEncoding(nn.Module):
    """Right: a table for each place, after the embedding of the token."""

    def __init__(self, vocab_size: int, d_model: int, max_len: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, d_model), nn.Parameter(torch.randn(1, max_len, d_model))

    def forward(self, ids: Tensor) -> Tensor:
        return math.sqrt(self.tokens.embedding_dim) * self.tokens(ids) + self.places[:, : ids.size(1)]


class RotaryPositionalEncoding(nn.Module):
    """Right: pairs of neighbours."""

    def __init__(self, dim: int, base: float = 500.0) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.size(-2)).to(x)[:, None] / self.base ** (
            torch.arange(0, x.size(-1), 2).to(x) / x.size(-1)
        )
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1).flatten(-2)


# Each with what torch builds for it, or what its text holds.
WRITTEN: dict[type[nn.Module], str] = {
    GainBiasLayerNorm: "nn.LayerNorm(32, eps=1e-05)",
    RMSNorm: "nn.RMSNorm(32, eps=1e-06)",
    ScaleNorm: "self.g * F.normalize(x, dim=-1)",
    PaperFeedForward: "nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 32))",
    GeluFeedForward: "nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 32))",
    GatedFeedForward: "self.down(F.silu(self.gate(x)) * self.up(x))",
    PreNormFeedForward: "x + self.linear2(F.relu(self.linear1(self.norm(x))))",
    PaperPositionalEncoding: "x + sinusoidal_encoding(x.size(1), 32).to(x)",
    ConcatenatedPositionalEncoding: 'x + sinusoidal_encoding(x.size(1), 32, "concatenated").to(x)',
    LearnedPositionalEncoding: "tokens.size(-1) ** 0.5 * tokens + self.places[:ids.size(1)]",
    RotaryPositionalEncoding: "RotaryEmbedding(22, base=500.0)",
}
ARGUMENTS: dict[str, Any] = {"ids": lambda: torch.randint(0, 24, (2, 5))}


def of(kind: type[nn.Module]) -> nn.Module:
    names = kind.__init__.__code__.co_varnames[1 : kind.__init__.__code__.co_argcount]
    sizes = {name: 24 if name in ("d_ff", "hidden_dim") else 32 for name in names}
    sizes = {name: size for name, size in sizes.items() if name not in ("eps", "dropout", "max_len", "base")}
    return randomize_parameters(kind(**sizes).double().eval(), seed=3)


@pytest.fixture(scope="module")
def reports() -> dict[type[nn.Module], Any]:
    return {kind: verify(of(kind)) for kind in WRITTEN}


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_right_part_is_written_in_torchs_own(reports: dict[type[nn.Module], Any], kind: type[nn.Module]) -> None:
    report = reports[kind]
    assert report.verdict == "equal", report
    assert WRITTEN[kind] in (report.equivalent.torchs or report.equivalent.source), report.equivalent.source
    assert report.equivalent.agrees
    single = issubclass(kind, PaperPositionalEncoding)  # its table is made in float32
    assert report.equivalent.difference < (1e-5 if single else 1e-12)


def test_what_is_written_runs_alone_and_loads_strictly_both_ways(
    reports: dict[type[nn.Module], Any], tmp_path: Path
) -> None:
    paths = []
    for kind, report in reports.items():
        path, module = tmp_path / f"{kind.__name__}.py", of(kind)
        x = torch.randn(2, 5, 22 if kind is RotaryPositionalEncoding else 32).double()
        x = torch.randint(0, 24, (2, 5)) if kind is LearnedPositionalEncoding else x
        path.write_text(report.equivalent.source)
        learnt = [name for name, _ in module.named_parameters()]
        bound = 1e-6 if issubclass(kind, PaperPositionalEncoding) else 1e-12  # its table is made in float32
        case = {"bound": bound, "state": module.state_dict(), "x": x, "output": module(x).detach(), "learnt": learnt}
        torch.save(case, f"{path}.pt")
        paths.append(str(path))
    subprocess.run([sys.executable, "-c", ALONE, *paths], check=True, cwd=tmp_path)


def test_torchs_own_module_takes_the_weights(reports: dict[type[nn.Module], Any]) -> None:
    module, equivalent = of(PaperFeedForward), reports[PaperFeedForward].equivalent
    torchs = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 32)).double()
    torchs.load_state_dict(equivalent.names()["from_theirs"](module.state_dict()), strict=True)
    x = torch.randn(2, 5, 32).double()
    assert torch.equal(torchs(x), module(x))


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return gamma * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + beta


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, sizes: tuple[int, ...] = (1, 2)) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.gelu(x @ w1 + b1) @ w2 + b2


FUNCTIONS: dict[Callable[..., Tensor], str] = {
    layer_norm: "F.layer_norm(x, x.shape[-1:], gamma, beta, eps=eps)",
    rms_norm: "F.rms_norm(x, x.shape[-1:], weight, eps=eps)",
    feed_forward: "F.linear(F.gelu(F.linear(x, w1.T, b1)), w2.T, b2)",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_equivalent_of_a_function_is_a_function(function: Callable[..., Tensor]) -> None:
    report = verify(function)
    assert report.verdict == "equal", report
    assert report.equivalent is not None
    assert f"return {FUNCTIONS[function]}\n" in report.equivalent.source
    assert "sizes" not in report.equivalent.source  # what is given and ignored is no argument
    sizes = {"w1": (8, 24), "b1": (24,), "w2": (24, 8)}
    names = [
        name
        for name in function.__code__.co_varnames[1 : function.__code__.co_argcount]
        if name not in ("eps", "sizes")
    ]
    given = [torch.randn(2, 3, 8), *(torch.randn(sizes.get(name, (8,))) for name in names)]
    torch.testing.assert_close(report.equivalent.of(None)(*given), function(*given))


class FarOff(PaperPositionalEncoding):
    """Wrong beyond the rows that the formulas are compared with."""

    def table(self, length: int) -> Tensor:
        return super().table(length).masked_fill(torch.arange(length)[:, None] == 20, 0.5)


class BendsLargeNumbers(PaperFeedForward):
    """Wrong for other weights than those that it is read with."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.relu(self.w_1(x)).detach())


@pytest.mark.parametrize("kind", [FarOff, BendsLargeNumbers])
def test_the_comparison_of_the_whole_decides(kind: type[nn.Module]) -> None:
    report = verify(kind)
    assert report.verdict == "unchecked", report
    assert report.equivalent is not None
    assert not report.equivalent.agrees
    assert "differs from torch with the same weights" in report.reason


# Each with the expression that says what may be looked at.
MASKS: dict[Callable[..., Any], str] = {
    builders.square_subsequent_mask: "torch.ones(sz, sz, dtype=torch.bool).tril()",
    builders.finite_causal_mask: "torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)",
    builders.key_padding_mask: "tokens != pad_idx",
    builders.target_mask: "dtype=torch.bool, device=tgt.device).tril() & (tgt != pad)[:, None])[:, None]",
    builders.all_masks: "src.T != 1",
    builders.mask_from_lengths: "torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]",
    builders.window_mask: "torch.ones(size, size, dtype=torch.bool).tril().triu(1 - window)",
}
GIVEN: dict[str, Any] = {"sz": 4, "q_len": 3, "k_len": 5, "size": 7, "window": 2, "pad": 1}
GIVEN |= {"lengths": torch.tensor([2, 4])}


@pytest.mark.parametrize("function", MASKS)
def test_a_mask_is_written_with_torchs_triangles(function: Callable[..., Any]) -> None:
    report = verify(function)
    assert report.verdict == "equal", report
    assert report.equivalent is not None
    assert MASKS[function] in report.equivalent.source
    ids = torch.randint(0, 3, (4, 6))
    code = function.__code__
    required = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
    given = [GIVEN.get(name, ids) for name in required]
    torch.testing.assert_close(report.equivalent.of(None)(*given), function(*given))


def mask_of_short_texts(size: int) -> Tensor:
    """Wrong for texts longer than those that it is read with."""
    mask = torch.ones(size, size).tril().bool()
    mask[30:, 3] = False
    return mask


def test_a_mask_is_compared_at_other_lengths_than_those_it_is_read_at() -> None:
    report = verify(mask_of_short_texts)
    assert report.verdict == "unchecked", report
    assert "differs from torch" in report.reason


class NormWithEpsOutside(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        std = x.std(-1, keepdim=True, unbiased=False)
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (std + 1e-6) + self.b_2


class PositionsFromOne(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        pos = torch.arange(1.0, x.size(1) + 1).to(x)[:, None]
        angles = pos * 10000.0 ** -(torch.arange(0, self.d_model, 2).to(x) / self.d_model)
        return x + torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[:, : self.d_model]


@pytest.mark.parametrize(
    ("kind", "name", "written"),
    [
        (NormWithEpsOutside, "norm_eps_outside", ".sqrt() + 1e-06"),
        (PositionsFromOne, "position_starts_at_one", "torch.sin(first), torch.cos(second)"),
    ],
)
def test_what_torch_does_not_have_is_written_out_where_it_is_intended(
    kind: type[nn.Module], name: str, written: str
) -> None:
    assert verify(kind).mistakes == (name,)
    report = verify(kind, intended={name: "as in the paper"})
    assert report.verdict == "equal", str(report)
    assert report.equivalent is not None
    assert written in report.equivalent.source, report.equivalent.source
