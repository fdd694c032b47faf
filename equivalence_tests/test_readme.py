"""README does what it says: its code runs, in the order in which a person would read it."""

import doctest
import re
import sys
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"

MY_ATTENTION = """
import torch
from torch import nn

class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, q, k, v):
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for p, x in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        )
        weights = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_python_of_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_attention.py").write_text(MY_ATTENTION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_attention", raising=False)
    names: dict[str, Any] = {}
    found = blocks("python")
    assert len(found) >= 4
    for block in found:
        exec(compile(block, str(README), "exec"), names)  # the reader's own session
    sys.modules.pop("my_attention", None)
    assert "output" in capsys.readouterr().out
    assert names["maps"]["encoder.layers.0.self_attn"].shape == (2, 4, 7, 7)
    assert list(names["stages"]) == ["q", "k", "v", "scores", "masked_scores", "weights", "context", "merged", "output"]


def test_the_sessions_of_readme_print_what_they_show() -> None:
    for block in blocks("pycon"):
        test = doctest.DocTestParser().get_doctest(block, {}, "README", str(README), 0)
        assert doctest.DocTestRunner().run(test) == doctest.TestResults(failed=0, attempted=len(test.examples))
        assert test.examples


def test_links_of_readme_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (README.parent / target).exists(), target


def test_the_make_targets_of_readme_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", README.read_text(encoding="utf-8")))
    assert named >= {"compare", "test"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
