"""Layers that are handed positions and add them to queries and keys, as DETR does, and such as add them elsewhere."""

from pathlib import Path

import pytest

from equivalence_tests.checker.helpers_for_tests import program_of, saved
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
    report = verify(saved(tmp_path, TEXT, "Layer"))
    assert report.verdict == "equal", str(report)
    assert not report.not_exercised, str(report)
    assert "query_pos and pos: added to the queries and keys of cross, not to its values" in " ".join(
        str(report).split()
    )
    assert "(len, batch, features)" in str(report)  # which axis holds the tokens was taken for granted


def test_one_file_with_both_layouts_is_no_plain_equal(tmp_path: Path) -> None:
    report = verify(saved(tmp_path, f"{TEXT}\nOTHER = nn.LSTM(4, 2, batch_first=True)\n", "Layer"))
    assert report.verdict == "partial", str(report)
    assert "it attends along the first axis" in " ".join(str(report).split())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("old", "new"), ELSEWHERE)
def test_positions_that_are_added_elsewhere_are_not_passed_over(old: str, new: str, tmp_path: Path) -> None:
    assert old in TEXT
    report = verify(saved(tmp_path, TEXT.replace(old, new), "Layer"))
    assert report.verdict in ("deviates", "unchecked"), str(report)


OPTIONAL = TEXT.replace("pos, query_pos)", "pos=None, query_pos=None)")
for old, new in (("y + query_pos", "self.at(y, query_pos)"), ("memory + pos", "self.at(memory, pos)")):
    OPTIONAL = OPTIONAL.replace(old, new)
OPTIONAL += """
    def at(self, x, pos):
        return x if pos is None else x + pos
"""


def test_a_layer_that_may_do_without_positions_is_held_without_and_with_them(tmp_path: Path) -> None:
    report = verify(saved(tmp_path, OPTIONAL, "Layer"))
    assert (report.verdict, report.not_exercised, len(report.intended)) == ("equal", [], 2), str(report)
    assert "query_pos: Tensor" in program_of(report)
    given = [one for one in report.coverage if one.what.endswith("pos")]
    assert [one.detail for one in given] == ["it was passed, and compared with a program of torch's parts"] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory, pos), memory", "memory, pos), self.at(memory, pos)", "queries, keys, values of cross (line 18:"),
        ("x if pos is None else", "x.flip(0) if pos is None else", "line 22"),
        ("x if pos is None else", "2 * x if pos is None else", "line 22"),
        ("else x + pos", "else x - pos", "line 22"),
    ],
)
def test_what_is_wrong_without_or_with_positions_is_not_passed_over(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    assert old in OPTIONAL
    report = verify(saved(tmp_path, OPTIONAL.replace(old, new), "Layer"))
    assert report.verdict in ("deviates", "unchecked"), str(report)
    blamed = [f"line {one.line.number}" for one in report.findings if one.line]
    assert said in report.reason or said in blamed, str(report)


def test_positions_that_do_nothing_are_no_equal(tmp_path: Path) -> None:
    report = verify(saved(tmp_path, OPTIONAL.replace("else x + pos", "else x"), "Layer"))
    assert report.verdict == "partial", str(report)
    assert {"pos", "query_pos"} <= {one.what for one in report.not_exercised}, str(report)


def test_positions_that_change_the_program_are_no_equal(tmp_path: Path) -> None:
    old, new = "return tgt + self.lin2", "return tgt if pos is not None else tgt + self.lin2"
    assert old in OPTIONAL
    report = verify(saved(tmp_path, OPTIONAL.replace(old, new), "Layer"))
    assert (report.verdict, [one.what for one in report.not_exercised]) == ("partial", ["pos", "query_pos"]), report


OWN = """
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.nhead, self.packed, self.out = nhead, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, pos=None):
        x = x if pos is None else 3 * x + pos
        q, k, v = self.packed(x).unflatten(-1, (3, self.nhead, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward):
        super().__init__()
        self.attn = Attention(d_model, nhead)
        self.n1, self.n2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.lin1, self.lin2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)

    def forward(self, x, pos=None):
        x = x + self.attn(self.n1(x), pos)
        return x + self.lin2(torch.relu(self.lin1(self.n2(x))))


class Stack(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward):
        super().__init__()
        self.layer = Layer(d_model, nhead, dim_feedforward)
        self.table = nn.Embedding(64, d_model)

    def forward(self, x):
        return self.layer(x, self.table(torch.arange(x.size(1))).expand(len(x), -1, -1))
"""


@pytest.mark.parametrize("name", ["Layer", "Stack"])
def test_what_an_attention_does_with_positions_that_it_was_not_checked_with_is_no_equal(
    name: str, tmp_path: Path
) -> None:
    report = verify(saved(tmp_path, OWN, name))
    assert report.verdict == "partial", str(report)
    assert any(one.what.startswith("pos of ") and one.what.endswith("attn") for one in report.not_exercised), str(
        report
    )
