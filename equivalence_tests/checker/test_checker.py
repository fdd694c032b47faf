"""The checker names the mistake in code that it has never seen, and blames nobody who is right."""

from pathlib import Path

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


def verify(tmp_path: Path, source: str) -> tuple[int, str]:
    path = tmp_path / "mine.py"
    path.write_text(source)
    result = CliRunner().invoke(app, ["verify", f"{path}:Attention"])
    return result.exit_code, result.stdout


def test_a_right_attention_is_found_equal(tmp_path: Path) -> None:
    status, report = verify(tmp_path, ATTENTION)
    assert (status, report.split()[0]) == (0, "EQUAL"), report


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str, tmp_path: Path) -> None:
    right, wrong, words = MISTAKES[name]
    assert right in ATTENTION
    status, report = verify(tmp_path, ATTENTION.replace(right, wrong))
    assert (status, report.split()[0]) == (1, "DEVIATES"), report
    assert words in report
    assert "returns torch's numbers" in " ".join(report.split())


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    status, report = verify(tmp_path, "raise SystemError('no')")
    assert status == 2, report
