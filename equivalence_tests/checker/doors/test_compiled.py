"""Tests of ``verify --compile``: right code stays right, and what a compiler changes is reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.checker.doors import compiled
from equivalence_tests.checker.reporting.report import Report

CODE = """
import torch
from torch import nn
class PermutedKeys(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.h, self.d = num_heads, embed_dim // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
    def forward(self, x):
        b, t, e = x.shape
        q, v = (f(x).view(b, t, self.h, self.d).transpose(1, 2) for f in (self.q, self.v))
        k = self.k(x).view(b, t, self.h, self.d).permute(0, 2, 3, 1)
        weights = (torch.matmul(q, k) * self.d ** -0.5).softmax(-1)
        return self.o(torch.matmul(weights, v).transpose(1, 2).reshape(b, t, e))
def right(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(CODE)
    return str(tmp_path / "mine.py")


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite only, which takes a tenth of the time."""
    monkeypatch.setattr(compiled, "has_compiler", lambda _: False)


def added(target: str) -> Report:
    report = Report(target, verdict="equal")
    compiled.add_compiled(report, target, None)
    return report


def test_right_code_stays_right(code: str) -> None:
    report = added(f"{code}:right")
    assert report.verdict == "equal"
    assert [check.outcome for check in report.checks] == ["passed"] * 4
    (note,) = report.notes
    assert note.endswith("for want of a C++ compiler; right in 4 of 4 runs.")


def doubled(graph: torch.fx.GraphModule, _: Any) -> Any:
    """Compile wrongly."""
    return lambda *inputs: tuple(2 * x for x in graph(*inputs))


def refused(*_: Any) -> Any:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("backend", "said"), [(doubled, "output is off by"), (refused, "it fails: RuntimeError: no such")]
)
def test_what_a_compiler_changes_is_told(code: str, backend: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "rewritten", backend)
    report = added(f"{code}:right")
    assert report.verdict == "deviates"
    (finding,) = report.findings
    assert finding.name == "changed_by_compile"
    assert "3 tokens, without gradients" in finding.sentence
    assert said in finding.sentence


def test_permuted_keys_are_told_on_the_torch_that_rewrites_them(code: str) -> None:
    report = added(f"{code}:PermutedKeys")
    if "2.13" <= torch.__version__ < "2.14":
        assert report.verdict == "deviates"
        assert "pytorch/pytorch#195320" in report.findings[0].sentence
    elif torch.__version__ < "2.12" or torch.__version__ >= "2.15":
        assert report.verdict == "equal"


def test_code_that_could_not_be_checked_is_not_compiled(code: str) -> None:
    report = Report(code, verdict="unchecked")
    compiled.add_compiled(report, f"{code}:right", None)
    assert not report.checks


@pytest.mark.thorough
def test_the_command_compiles_in_its_worker(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    result = CliRunner().invoke(app, ["verify", f"{code}:right", "--compile"])
    assert "right in 4 of 4 runs" in " ".join(result.output.split())
    assert result.exit_code in (0, 3)


def test_it_takes_no_inputs(code: str) -> None:
    result = CliRunner().invoke(app, ["verify", f"{code}:right", "--compile", "--inputs", f"{code}:x"])
    assert result.exit_code == 2
    assert "not with --inputs" in " ".join(result.output.split())
