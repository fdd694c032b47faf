"""The checker names the mistake in code that it has never seen, and blames nobody who is right."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equivalence_tests.__main__ import app

ATTENTION = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.q_proj(query)), self.split(self.k_proj(key)), self.split(self.v_proj(value))
        scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        context = scores.softmax(-1) @ v
        return self.out(context.transpose(1, 2).flatten(2))
"""
MISTAKES = {
    "the scale of the whole width": ("q.size(-1) ** 0.5", "query.size(-1) ** 0.5", "sqrt(embed_dim)"),
    "heads that mix tokens": (
        "x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)",
        "x.reshape(x.size(0), self.heads, x.size(1), -1)",
        "transpose",
    ),
    "heads merged without the transpose back": (
        "context.transpose(1, 2).flatten(2)",
        "context.reshape(query.shape)",
        "transpose",
    ),
    "no scale": (" / q.size(-1) ** 0.5", "", "scale"),
    "softmax over the queries": ("softmax(-1)", "softmax(-2)", "softmax"),
}


SOURCES = {
    "right": ATTENTION,
    "what cannot be loaded": "from math import cosine\n" + ATTENTION,
    **{name: ATTENTION.replace(right, wrong) for name, (right, wrong, _) in MISTAKES.items()},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Check them all by one command."""
    folder = tmp_path_factory.mktemp("mine")
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source)
    result = CliRunner().invoke(app, ["verify", str(folder), "--json", "-"])
    assert result.exit_code == 1, result.output
    found = {Path(report["target"].rpartition(":")[0]).stem: report for report in json.loads(result.stdout)}
    assert set(found) == set(SOURCES)
    return found


def test_a_right_attention_is_found_equal(reports: dict[str, Any]) -> None:
    assert reports["right"]["verdict"] == "equal", reports["right"]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_proven(name: str, reports: dict[str, Any]) -> None:
    right, _, words = MISTAKES[name]
    assert right in ATTENTION
    (finding,) = reports[name]["findings"]
    assert words in " ".join(finding[part] for part in ("sentence", "have", "fix"))
    assert finding["proof"]["error"] < 1e-9 < finding["proof"]["without"]


def test_what_cannot_be_loaded_is_said(reports: dict[str, Any]) -> None:
    assert reports["what cannot be loaded"]["verdict"] == "unchecked"
    assert "ImportError: cannot import name 'cosine'" in reports["what cannot be loaded"]["reason"]
