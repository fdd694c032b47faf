"""Layers that are handed positions and add them to queries and keys, as DETR does, and such as add them elsewhere."""

from pathlib import Path

import pytest

from equivalence_tests.checker.verify import verify

TEXT = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward):
        super().__init__()
        self.attn, self.cross = nn.MultiheadAttention(d_model, nhead), nn.MultiheadAttention(d_model, nhead)
        self.lin1, self.lin2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
        self.n1, self.n2, self.n3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, tgt, memory, pos, query_pos):
        y = self.n1(tgt)
        q = k = y + query_pos
        tgt = tgt + self.attn(q, k, y)[0]
        y = self.n2(tgt)
        tgt = tgt + self.cross(y + query_pos, memory + pos, memory)[0]
        return tgt + self.lin2(torch.relu(self.lin1(self.n3(tgt))))
"""
ELSEWHERE = (
    ("memory + pos, memory)", "memory + pos, memory + pos)"),
    ("memory + pos, memory)", "memory, memory)"),
    ("memory + pos, memory)", "memory - pos, memory)"),
    ("q = k = y + query_pos", "q, k = y, y + query_pos"),
    ("q = k = y + query_pos", "q, k = y + query_pos, y + query_pos.flip(0)"),
    ("self.n2(tgt)", "self.n2(tgt + query_pos)"),
)


def test_positions_that_are_handed_over_may_be_added_to_queries_and_keys(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(TEXT, encoding="utf-8")
    report = verify(f"{tmp_path / 'theirs.py'}:Layer")
    assert report.verdict == "equal", str(report)
    assert not report.not_exercised, str(report)
    assert "query_pos and pos: added to the queries and keys of cross, not to its values" in str(report)
    assert "(len, batch, features)" in str(report)  # which axis holds the tokens was taken for granted


def test_one_file_with_both_layouts_is_no_plain_equal(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(f"{TEXT}\nOTHER = nn.LSTM(4, 2, batch_first=True)\n", encoding="utf-8")
    report = verify(f"{tmp_path / 'theirs.py'}:Layer")
    assert report.verdict == "partial", str(report)
    assert "it attends along the first axis" in " ".join(str(report).split())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("old", "new"), ELSEWHERE)
def test_positions_that_are_added_elsewhere_are_not_passed_over(old: str, new: str, tmp_path: Path) -> None:
    assert old in TEXT
    (tmp_path / "theirs.py").write_text(TEXT.replace(old, new), encoding="utf-8")
    report = verify(f"{tmp_path / 'theirs.py'}:Layer")
    assert report.verdict in ("deviates", "unchecked"), str(report)
