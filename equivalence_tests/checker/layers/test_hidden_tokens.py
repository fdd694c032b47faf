"""Tokens that a mask hides may be set to 0 between the parts; others, and other masks, are no padding."""

from pathlib import Path

import pytest

from equivalence_tests.checker.verify import verify

TEXT = """
import torch
from torch import nn


class Attends(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.mT / q.size(-1) ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None], -1e9)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.attn = Attends(d_model, num_heads)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    def forward(self, x, mask=None):
        x = self.norm1(x + self.attn(x, mask))
        x = self.norm2(x + self.ff(x))
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return x
"""
END = "x = x * mask.unsqueeze(-1)"
RIGHT = (
    "x = x * mask.unsqueeze(-1).float()",
    "x = x.masked_fill(~mask[..., None], 0)",
    "x = torch.where(mask[..., None], x, 0.0)",
)
WRONG = (
    "x = x * ~mask.unsqueeze(-1)",
    "x = x.masked_fill(mask[..., None], 0)",
    "x = x * mask.roll(1, 1).unsqueeze(-1)",
    "x = x * (mask.unsqueeze(-1) + 1)",
    "x = x.roll(1, 1)",
)
IDS = (
    TEXT.replace("class EncoderLayer", "class Layer").replace("self.attn(x, mask)", "self.attn(x)")
    + """

class Tagger(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, d_ff, max_len=64):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.layer = Layer(d_model, num_heads, d_ff)
        self.head = nn.Linear(d_model, 5)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.size(1)))
        x = x * (ids != 0).unsqueeze(-1)
        return self.head(self.layer(x))
"""
)


def report_on(text: str, name: str, folder: Path) -> str:
    (folder / "theirs.py").write_text(text, encoding="utf-8")
    report = verify(f"{folder / 'theirs.py'}:{name}")
    return f"{report.verdict}: {' '.join(str(report).split())}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("end", [END, *RIGHT])
def test_hidden_tokens_may_be_set_to_0(end: str, required: bool, tmp_path: Path) -> None:
    text = TEXT.replace("(self, x, mask=None):\n        x =", "(self, x, mask):\n        x =") if required else TEXT
    said = report_on(text.replace(END, end), "EncoderLayer", tmp_path)
    assert said.startswith("equal"), said
    assert "the tokens that are hidden are set to 0: mask says that they are no tokens" in said


@pytest.mark.parametrize("end", WRONG)
def test_what_is_done_to_tokens_only_where_a_mask_is_handed_over_is_not_passed_over(end: str, tmp_path: Path) -> None:
    said = report_on(TEXT.replace(END, end), "EncoderLayer", tmp_path)
    assert said.startswith(("deviates", "unchecked")), said
    assert "Nothing says whether this is intended" in said or "another order" in said


def test_padding_may_be_set_to_0_and_words_may_not(tmp_path: Path) -> None:
    assert "the id 0 says that they are no tokens" in (said := report_on(IDS, "Tagger", tmp_path))
    assert said.startswith("equal"), said
    said = report_on(IDS.replace("(ids != 0)", "(ids == 0)"), "Tagger", tmp_path)
    assert said.startswith(("deviates", "unchecked")), said


def test_sasrec_adds_what_is_normalised(tmp_path: Path) -> None:
    normed = TEXT.replace(
        "x = self.norm1(x + self.attn(x, mask))", "y = self.norm1(x)\n        x = y + self.attn(y, mask)"
    )
    normed = normed.replace("x = self.norm2(x + self.ff(x))", "y = self.norm2(x)\n        x = y + self.ff(y)")
    said = report_on(normed, "EncoderLayer", tmp_path)
    assert said.startswith("deviates"), said
    assert "The residual is taken from the normalised input" in said
    said = report_on(normed.replace("class EncoderLayer", "class SASRecLayer"), "SASRecLayer", tmp_path)
    assert said.startswith("equal"), said
    assert "SASRecLayer is named after SASRec" in said
