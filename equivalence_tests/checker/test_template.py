"""Tests of the script that ``--template`` prints: it compiles, and where the code runs it comes to the same verdict."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.conventions import FusedCausal
from equivalence_tests.checker.zoo.layers import MaskDroppingLayer

HAS_NO_STRIPES = """
from torch import nn

class Zebra(nn.Module):
    def __init__(self, zebra, num_heads=3):
        super().__init__()
        self.projection = nn.Linear(zebra["stripes"].width, 3)

    def forward(self, query, mask, scale=1.0):
        return self.projection(query)
"""


def unscaled_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT, -1) @ value


def run(script: str) -> list[Report]:
    """Run a script to its end, and give the reports that it prints."""
    names: dict[str, Any] = {}
    with contextlib.suppress(SystemExit):
        exec(compile(script, "<template>", "exec"), names)
    return list(names["reports"])


@pytest.mark.parametrize(
    ("target", "call"),
    [
        (FusedCausal, "model = FusedCausal(config=SimpleNamespace(n_head=6, n_embd=60, bias=True))"),
        (unscaled_attention, "reports = verify(unscaled_attention, inputs)"),
        (MaskDroppingLayer, "reports = [verify(model), *verify(model, inputs)]"),
        (nn.LayerNorm, "reports = [verify(model)]"),
    ],
)
def test_the_script_comes_to_the_same_verdict(target: Any, call: str) -> None:
    report = verify(target)
    assert call in report.template
    assert run(report.template)[0].verdict == report.verdict


def test_what_cannot_be_built_gets_a_script_to_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stripes.py").write_text(HAS_NO_STRIPES)
    monkeypatch.chdir(tmp_path)
    report = verify("stripes.py:Zebra")
    assert "sidebyside verify stripes.py:Zebra --template" in " ".join(str(report).split())
    assert 'Zebra = load("stripes.py:Zebra")' in report.template
    assert "# It raised TypeError: 'int' object is not subscriptable (stripes.py:7)\n" in report.template
    assert '    "query": torch.randn(2, 5, 33),\n    "mask": None,\n}\n# It also takes scale=1.0.\n' in report.template
    compile(report.template, "<template>", "exec")
    completed = report.template.replace("zebra=60", "zebra={'stripes': SimpleNamespace(width=33)}")
    assert run(f"from types import SimpleNamespace\n{completed}")[0].reason.startswith("No attention runs in")
