"""Norms without a parameter are torch's, where they are of each token; they stand where other norms do."""

from pathlib import Path

import pytest

from equivalence_tests.checker.helpers_for_tests import report_on, saved
from equivalence_tests.checker.verify import verify

TEXT = """
import torch
from torch import nn
from torch.nn import functional as F


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Heads(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, y, mask=None):
        q, k, v = self.split(self.q(x)), self.split(self.k(y)), self.split(self.v(y))
        return self.o(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attn = Heads(dim, heads)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        h = norm(x)
        x = x + self.attn(h, h)
        return x + self.down(F.relu(self.up(norm(x))))


class CrossAttention(Block):
    def forward(self, x, y, mask):
        h = norm(x)
        x = x + self.attn(h, y, mask)
        return x + self.down(F.relu(self.up(norm(x))))
"""
JOINT = "F.layer_norm(x, x.shape[1:])"
WRONG = (
    ("h = norm(x)", f"h = {JOINT}", f"{JOINT} is not part of"),
    ("x = x + self.attn", "x = h + self.attn", ""),
    ("x + self.down", "norm(x) + self.down", ""),
    ("h = norm(x)", "h = norm(x) * 2", ""),
)
MODULES = TEXT.replace("def __init__(self, dim, heads, hidden)", "def __init__(self, dim, heads, hidden, seq_len)")
MODULES = MODULES.replace(
    "self.attn = Heads(dim, heads)", "self.attn, self.norm = Heads(dim, heads), nn.LayerNorm(dim)"
)
MODULES = MODULES.replace("h = norm(x)", "h = self.norm(x)")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("own", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("name", ["Block", "CrossAttention"])
def test_a_norm_of_each_token_needs_no_parameter(name: str, own: str, tmp_path: Path) -> None:
    said = report_on(TEXT.replace("F.rms_norm", f"F.{own}"), name, tmp_path)
    assert said.startswith("equal"), said
    assert f"{own} without a parameter. Intended: torch's own norm of each token, called by its name" in said


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["Block", "CrossAttention"])
@pytest.mark.parametrize(("old", "new", "sentence"), WRONG, ids=[new for _, new, _ in WRONG])
def test_a_norm_elsewhere_or_of_several_tokens_is_not_passed_over(
    old: str, new: str, sentence: str, name: str, tmp_path: Path
) -> None:
    assert old in TEXT
    said = report_on(TEXT.replace(old, new), name, tmp_path)
    assert said.startswith("deviates" if sentence else ("deviates", "unchecked")), said
    assert sentence in said


def test_a_module_that_normalises_several_tokens_as_one_is_not_passed_over(tmp_path: Path) -> None:
    assert report_on(MODULES, "Block", tmp_path).startswith("equal")
    said = report_on(MODULES.replace("nn.LayerNorm(dim)", "nn.LayerNorm((seq_len, dim))"), "Block", tmp_path)
    assert said.startswith("unchecked"), said
    assert "norm normalises several tokens as one" in said


BATCH = """
import torch
from torch import nn
from torch.nn import functional as F


class EncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2 = nn.BatchNorm1d(d_model), nn.BatchNorm1d(d_model)

    def forward(self, x):
        x = x + self.self_attn(x, x, x)[0]
        x = self.norm1(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.linear2(F.gelu(self.linear1(x)))
        return self.norm2(x.transpose(1, 2)).transpose(1, 2)
"""
WRONG_BATCH = (
    ("x = x + self.self_attn", "x = self.self_attn", "deviates"),
    ("x = x + self.linear2", "x = x + x + self.linear2", "deviates"),
    ("self.norm2(x", "self.norm1(x", "deviates"),
    ("self.norm1(x.transpose(1, 2)).transpose(1, 2)", "self.norm1(x.transpose(1, 2)).reshape(x.shape)", "unchecked"),
)


def test_a_norm_over_the_batch_may_stand_in_the_place_of_one_of_each_token(tmp_path: Path) -> None:
    flat = BATCH.replace("x.transpose(1, 2)).transpose(1, 2)", "x.flatten(0, 1)).view(x.shape)")
    for text in (BATCH, flat):
        said = report_on(text, "EncoderLayer", tmp_path)
        assert said.startswith("equal"), said
        assert "Intended: the sub-module norm1, a BatchNorm1d" in said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("old", "new", "verdict"), WRONG_BATCH, ids=[new for _, new, _ in WRONG_BATCH])
def test_mistakes_beside_norms_over_the_batch_are_found(old: str, new: str, verdict: str, tmp_path: Path) -> None:
    assert old in BATCH
    said = report_on(BATCH.replace(old, new), "EncoderLayer", tmp_path)
    assert said.startswith(verdict), said


SERIES = """
import torch
from torch import nn


class InvertedEmbedding(nn.Module):
    def __init__(self, seq_len, d_model):
        super().__init__()
        self.value = nn.Linear(seq_len, d_model)

    def forward(self, x, x_mark):
        x = x.permute(0, 2, 1)
        return self.value(x) if x_mark is None else self.value(torch.cat([x, x_mark.permute(0, 2, 1)], 1))


class Layer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))

    def forward(self, x):
        x = self.norm1(x + self.attention(x, x, x)[0])
        return self.norm2(x + self.ff(x))


class Model(nn.Module):
    def __init__(self, configs):
        super().__init__()
        self.pred_len = configs.pred_len
        self.embedding = InvertedEmbedding(configs.seq_len, configs.d_model)
        self.layers = nn.ModuleList(
            Layer(configs.d_model, configs.n_heads, configs.d_ff) for _ in range(configs.e_layers)
        )
        self.norm, self.projector = nn.LayerNorm(configs.d_model), nn.Linear(configs.d_model, configs.pred_len)

    def forward(self, x_enc, x_mark_enc, x_dec, x_mark_dec):
        x = self.embedding(x_enc, x_mark_enc)
        for layer in self.layers:
            x = layer(x)
        return self.projector(self.norm(x)).permute(0, 2, 1)[:, :, : x_enc.size(2)]
"""
OTHER_SERIES = (
    ("InvertedEmbedding", "SeriesEmbedding"),
    ("x = x.permute(0, 2, 1)\n", "x = x.reshape(x.size(0), x.size(2), x.size(1))\n"),
    ("self.norm(x)).permute(0, 2, 1)", "self.norm(x)).reshape(len(x), self.pred_len, -1)"),
    ("x = self.norm1(x + self.attention(x, x, x)[0])", "x = self.norm1(self.attention(x, x, x)[0])"),
)


def test_each_series_may_be_a_token(tmp_path: Path) -> None:
    report = verify(saved(tmp_path, SERIES, "Model"))
    assert report.verdict == "equal", str(report)
    assert "embedding.value takes features for tokens. Intended: the name Inverted" in " ".join(str(report).split())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("old", "new"), OTHER_SERIES)
def test_other_series_are_not_passed_over(old: str, new: str, tmp_path: Path) -> None:
    assert old in SERIES
    assert verify(saved(tmp_path, SERIES.replace(old, new), "Model")).verdict in ("deviates", "unchecked")


ANNOTATED = """

class Norm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.gain, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias

"""
OF_ANNOTATED = TEXT.replace("\n\nclass Block", ANNOTATED + "\nclass Block")
OF_ANNOTATED = OF_ANNOTATED.replace(
    "Heads(dim, heads)", "Heads(dim, heads)\n        self.norm1, self.norm2 = Norm(dim), Norm(dim)"
)
OF_ANNOTATED = OF_ANNOTATED.replace("h = norm(x)", "h = self.norm1(x)").replace("(norm(x))", "(self.norm2(x))")


def test_what_some_model_does_on_purpose_hides_nothing_else(tmp_path: Path) -> None:
    biased = OF_ANNOTATED.replace("x.std(-1, keepdim=True)", "x.std(-1, keepdim=True, unbiased=False)")
    said = report_on(biased, "Block", tmp_path)
    assert said.startswith("deviates")
    assert "The Annotated Transformer does so" in said
    assert "Note: apart from that, it is equal to torch" in said
    said = report_on(biased.replace("self.down(", "0.7 * self.down("), "Block", tmp_path)
    assert said.startswith("deviates")
    assert "The Annotated Transformer does so" in said
    assert "Note: apart from that: Nothing says whether this is intended: down times 0.7" in said
    assert "it is equal to torch" not in said


def test_the_norm_of_the_annotated_transformer_is_intended_and_nothing_else(tmp_path: Path) -> None:
    assert report_on(OF_ANNOTATED, "Block", tmp_path).startswith("equal")
    said = report_on(OF_ANNOTATED.replace("self.down(", "0.7 * self.down("), "Block", tmp_path)
    assert said.startswith("unchecked"), said


SHARED = MODULES.replace("(norm(x))", "(self.norm(x))")


def test_a_shared_norm_that_is_intended_excuses_nothing_else(tmp_path: Path) -> None:
    intended = {"norm_shared": "as it was published"}
    for text, verdict in ((SHARED, "equal"), (SHARED.replace("self.down(", "0.7 * self.down("), "unchecked")):
        (tmp_path / f"{verdict}.py").write_text(text, encoding="utf-8")
        report = verify(f"{tmp_path / verdict}.py:Block", intended=intended)
        assert report.verdict == verdict, report
        assert [one.name for one in report.intended] == ["norm_shared"]
        assert report.equivalent is not None
        assert report.equivalent.agrees
