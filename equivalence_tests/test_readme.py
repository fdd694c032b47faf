"""README does what it says: its code runs, in the order in which a person would read it."""

import doctest
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.checker.helpers_for_tests import blocks, without_rounding
from equivalence_tests.checker.zoo.listing import zoo

README = Path(__file__).parents[1] / "README.md"

# The class of the report in README, mistake included.
MY_ATTENTION = """import math

from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, q, k, v, mask=None):
        b, l, e = q.shape
        q, k, v = self.q_proj(q), self.k_proj(k), self.v_proj(v)
        q, k, v = (x.view(b, -1, self.num_heads, e // self.num_heads).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(e)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        context = scores.softmax(dim=-1) @ v
        return self.out_proj(context.transpose(1, 2).reshape(b, l, e))
"""


def test_the_python_of_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_attention.py").write_text(MY_ATTENTION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_attention", raising=False)
    names: dict[str, Any] = {}
    found = blocks(README, "python")
    assert len(found) >= 4
    for block in found:
        exec(compile(block, str(README), "exec"), names)  # the reader's own session
    sys.modules.pop("my_attention", None)
    assert "output" in capsys.readouterr().out
    assert names["maps"]["encoder.layers.0.self_attn"].shape == (2, 4, 7, 7)
    assert list(names["stages"]) == ["q", "k", "v", "scores", "masked_scores", "weights", "context", "merged", "output"]


@pytest.mark.parametrize("command", ["verify my_attention.py:MultiHeadAttention", "traps mask_polarity"])
def test_what_readme_shows_is_printed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_attention.py").write_text(MY_ATTENTION)
    monkeypatch.chdir(tmp_path)
    prompt = f"$ sidebyside {command}\n"
    (shown,) = (block.removeprefix(prompt) for block in blocks(README, "text") if block.startswith(prompt))
    printed = iter(without_rounding(CliRunner().invoke(app, command.split(), env={"COLUMNS": "100"}).stdout))
    for line in without_rounding(shown):
        assert line.strip() == "..." or line in printed, f"not printed, or not in this order: {line!r}"


def test_the_sessions_of_readme_print_what_they_show() -> None:
    for block in blocks(README, "pycon"):
        test = doctest.DocTestParser().get_doctest(block, {}, "README", str(README), 0)
        assert doctest.DocTestRunner().run(test) == doctest.TestResults(failed=0, attempted=len(test.examples))
        assert test.examples


def test_links_of_readme_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        inside = target in anchors if target.startswith("#") else (README.parent / target).exists()
        assert inside or target.startswith("https://"), target


def test_readme_counts_the_classes_of_the_zoo() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert re.findall(r"a zoo of (\d+) small classes", text) == [str(len(zoo()))]


def test_the_make_targets_of_readme_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", README.read_text(encoding="utf-8")))
    assert named >= {"compare", "test"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
