"""What cannot be compared of a part is said, and parts are checked through every door."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.checker.doors.pytest_checks import parametrize_with_checks
from equivalence_tests.checker.doors.watch import watch
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.parts import GainBiasLayerNorm, PaperFeedForward


class OnceFeedForward(PaperFeedForward):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        if type(self).calls > 3:
            raise RuntimeError("it was called before")
        return super().forward(x)


class InPlaceFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x))


class WithoutGradientsFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


class NoEpsForZerosRMSNorm(nn.Module):
    """As torch's, but for a token of zeros."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight


class IntegersFeedForward(nn.Module):
    """Its first weights are whole numbers and a scale."""

    whole: Tensor

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.register_buffer("whole", torch.randint(-9, 9, (d_ff, d_model), dtype=torch.int8))
        self.scale, self.w_2 = nn.Parameter(torch.ones(d_ff, 1)), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.relu(x @ (self.whole * self.scale).T))


UNCOMPARED: dict[type[nn.Module], str] = {
    OnceFeedForward: "was called, and cannot be called again: RuntimeError: it was called before",
    InPlaceFeedForward: "It writes into its argument number 1: after the call, the caller's tensor holds other numbers",
    WithoutGradientsFeedForward: "gradients, of which it gives none",
    NoEpsForZerosRMSNorm: "it gives NaN",
    IntegersFeedForward: "what multiplies its features is computed from parameters, and is not one itself",
}


@pytest.mark.parametrize("kind", UNCOMPARED)
def test_what_cannot_be_compared_is_said(kind: type[nn.Module]) -> None:
    report = verify(kind)
    assert report.verdict == "unchecked", report
    assert UNCOMPARED[kind] in report.reason


def test_sparse_and_quantised_weights_are_named() -> None:
    module = PaperFeedForward(8, 12)
    module.w_1.weight = nn.Parameter(module.w_1.weight.detach().to_sparse())
    assert verify(module).reason.startswith("w_1.weight is sparse, which no float64 can hold")


class NestFeedForward(PaperFeedForward):
    def forward(self, x: Tensor) -> dict[str, object]:  # type: ignore[override]
        inner = F.relu(self.w_1(x))
        return {"out": self.w_2(inner), "inner": [inner]}


def test_of_a_nest_the_first_tensor_is_compared_and_the_rest_is_listed() -> None:
    report = verify(NestFeedForward)
    assert report.verdict == "partial", report
    assert [one.what for one in report.not_exercised] == ["the other outputs"]


class SharedFeedForward(nn.Module):
    """One matrix there and back, and a module under two names."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.there = nn.Linear(d_model, d_ff)
        self.again = self.there

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.again(x)) @ self.there.weight


def test_weights_that_are_shared_are_named_and_go_back_under_every_name() -> None:
    module = SharedFeedForward(8, 12)
    report = verify(module)
    assert report.verdict == "equal", report
    assert any(note.startswith("there.weight is used in several places") for note in report.notes)
    made = report.equivalent.of(module)  # type: ignore[union-attr]
    with torch.no_grad():
        made[0].bias += 1
    back = report.equivalent.to_theirs(made.state_dict(), module.state_dict())  # type: ignore[union-attr]
    module.load_state_dict(back, strict=True)
    assert torch.equal(module.there.bias, made[0].bias)


# ------------------------------------------------------------------------------------------- doors
PARTS = """
import torch
from torch import nn

class TokenNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() + self.bias

class FeedForward(nn.Sequential):
    def __init__(self, dim, hidden_dim):
        super().__init__(nn.Linear(dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, dim))

    def forward(self, x):
        return super().forward(x)
"""


def test_a_folder_and_a_notebook_give_each_part_with_its_equivalent(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": PARTS.replace("TokenNorm", "NotebookNorm"), "metadata": {}}]
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "notebook.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    found = CliRunner().invoke(app, ["verify", str(tmp_path), "--equivalent", "--json", str(tmp_path / "found.json")])
    assert found.exit_code == 0, found.output
    assert found.stdout.count("class Equivalent(nn.LayerNorm):") == 2
    assert found.stdout.count("class Equivalent(nn.Sequential):") == 2
    reports = json.loads((tmp_path / "found.json").read_text())
    assert [one["equivalent"]["torchs"].partition("(")[0] for one in reports] == [
        "nn.LayerNorm",
        "nn.Sequential",
    ] * 2


def test_an_own_call_and_watching_check_a_part_with_the_inputs_given() -> None:
    norm, x = GainBiasLayerNorm(8), torch.randn(2, 3, 8)
    (report,) = verify(norm, x)
    assert report.verdict == "equal", report
    assert report.equivalent is not None
    assert "your own inputs" in report.equivalent.compared
    assert "nn.LayerNorm" in report._repr_html_()
    with watch() as seen:
        norm(x)
    assert [one.verdict for one in seen] == ["equal"]


class ShiftsLargeNorm(GainBiasLayerNorm):
    """Wrong for large numbers alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x > 100)


def test_the_inputs_of_an_own_call_decide_too() -> None:
    (report,) = verify(ShiftsLargeNorm(8), 100 + torch.randn(2, 3, 8))
    assert report.verdict == "unchecked", report
    assert "your own inputs" in report.reason


@parametrize_with_checks([PaperFeedForward])
def test_pytest_takes_a_part(check) -> None:  # type: ignore[no-untyped-def]
    check()


class DetachedPositionalEncoding(nn.Module):
    """The token vectors are detached with the table."""

    pe: Tensor

    def __init__(self, d_model: int, max_len: int = 64) -> None:
        super().__init__()
        steps = torch.exp(-torch.arange(0, d_model, 2) * math.log(10000.0) / d_model)
        angles = torch.arange(max_len)[:, None] * steps
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :d_model])

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.pe[: x.size(1)]).detach()


class UnlearntPositionalEncoding(DetachedPositionalEncoding):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x + self.pe[: x.size(1)]


class FixedPositionalEncoding(DetachedPositionalEncoding):
    """Right: the table alone has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[: x.size(1)].detach()


@pytest.mark.parametrize("kind", [DetachedPositionalEncoding, UnlearntPositionalEncoding])
def test_positions_that_stop_the_gradients_of_their_tokens_are_a_mistake(kind: type[nn.Module]) -> None:
    (finding,) = verify(kind).findings
    assert finding.name == "gradient_stopped"
    assert finding.line is not None
    assert "x + self.pe[: x.size(1)]" in finding.line.text
    assert verify(FixedPositionalEncoding).findings == []
