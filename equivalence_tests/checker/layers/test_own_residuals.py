"""Attentions that add their input themselves, without a norm that would say so: their layer adds it, or does not."""

from pathlib import Path

import pytest

from equivalence_tests.checker.helpers_for_tests import saved
from equivalence_tests.checker.verify import verify

TEXT = """
from torch import nn


class Attention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1)
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attn = Attention(embed_dim, num_heads)
        self.ff = nn.Sequential(nn.Linear(embed_dim, 2 * embed_dim), nn.ReLU(), nn.Linear(2 * embed_dim, embed_dim))
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)

    def forward(self, x):
        ADDED
        return OUTPUT
"""
POST = ("x = self.norm1(ADDED)", "self.norm2(x + self.ff(x))")
PRE = ("x = ADDED", "x + self.ff(self.norm2(x))")  # with norm1 inside the attention


def report_on(added: str, wiring: tuple[str, str], folder: Path) -> str:
    text = TEXT.replace("ADDED", wiring[0].replace("ADDED", added)).replace("OUTPUT", wiring[1])
    if wiring is PRE:
        norm = "nn.LayerNorm(embed_dim)"
        text = text.replace("self.norm1, self.norm2 = nn.LayerNorm(embed_dim), ", "self.norm2 = ")
        text = text.replace("for _ in range(4))", f"for _ in range(4))\n        self.norm = {norm}")
        text = text.replace("(f(x).unflatten", "(f(self.norm(x)).unflatten")
    report = verify(saved(folder, text, "Block"))
    lines = [one.line.text.strip() for one in report.findings if one.line is not None]
    return f"{report.verdict} {report.mistakes} {lines} {report.reason}"


@pytest.mark.parametrize("wiring", [POST, PRE])
def test_a_layer_may_leave_the_residual_to_its_attention(wiring: tuple[str, str], tmp_path: Path) -> None:
    said = report_on("self.attn(x)", wiring, tmp_path)
    assert said.startswith("equal ()"), said


@pytest.mark.parametrize("wiring", [POST, PRE])
def test_a_layer_that_adds_it_once_more_is_wrong(wiring: tuple[str, str], tmp_path: Path) -> None:
    said = report_on("x + self.attn(x)", wiring, tmp_path)
    assert said.startswith("deviates ('residual_added_twice',)"), said
    assert wiring[0].replace("ADDED", "x + self.attn(x)") in said, said


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stopped", ["x.detach()", "x.data", "x.clone().detach()"])
def test_a_residual_whose_gradient_is_stopped_is_found(stopped: str, tmp_path: Path) -> None:
    taken = ("x = self.norm1(ADDED + x.new_zeros(1).detach())", f"self.norm2({stopped} + self.ff(x))")
    said = report_on("self.attn(x)", taken, tmp_path)
    assert said.startswith(f"deviates ('gradient_stopped',) ['return {taken[1]}']"), said


OUTSIDE = """
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.out = n_heads, nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        q, k, v = (x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class AddAndNorm(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x, residual):
        return self.norm(x + residual)


class DecoderBlock(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.q1, self.k1, self.v1 = (nn.Linear(d_model, d_model) for _ in range(3))
        self.q2, self.k2, self.v2 = (nn.Linear(d_model, d_model) for _ in range(3))
        self.mha1, self.mha2 = Attention(d_model, n_heads), Attention(d_model, n_heads)
        self.ff = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))
        self.add1, self.add2, self.add3 = (AddAndNorm(d_model) for _ in range(3))

    def forward(self, x, memory, src_mask=None, trg_mask=None):
        y = self.add1(self.mha1(self.q1(x), self.k1(x), self.v1(x), trg_mask), x)
        z = self.add2(self.mha2(self.q2(y), self.k2(memory), self.v2(memory), src_mask), y)
        return self.add3(self.ff(z), z)
"""


@pytest.mark.parametrize(("right", "wrong"), [("", ""), ("src_mask), y)", "src_mask), x)")])
def test_a_layer_may_project_for_its_attentions_and_add_in_a_class_of_its_own(
    right: str, wrong: str, tmp_path: Path
) -> None:
    report = verify(saved(tmp_path, OUTSIDE.replace(right, wrong), "DecoderBlock"))
    if not right:
        assert report.verdict == "equal", str(report)
        return
    assert report.verdict == "deviates", str(report)
    lines = [one.text for finding in report.findings for one in finding.stack]
    assert any(wrong in line for line in lines), lines


MASKS = """
from torch import nn


class DecoderLayer(nn.Module):
    def __init__(self, d_model: int, h: int):
        super().__init__()
        self.h = h
        self.self_attn = nn.MultiheadAttention(d_model, h, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(d_model, h, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x, enc_output, tgt_pad_mask, look_ahead_mask, memory_pad_mask):
        batch, queries = tgt_pad_mask.size()
        own = (look_ahead_mask & tgt_pad_mask[:, None]).repeat_interleave(self.h, 0)
        crossed = memory_pad_mask[:, None].expand(-1, queries, -1).repeat_interleave(self.h, 0)
        y = self.norm1(x + self.self_attn(x, x, x, attn_mask=~own)[0])
        z = self.norm2(y + self.cross_attn(y, enc_output, enc_output, attn_mask=~crossed)[0])
        return self.norm3(z + self.ffn(z))
"""


@pytest.mark.parametrize(
    ("right", "wrong"), [("", ""), ("(look_ahead_mask & tgt_pad_mask[:, None])", "look_ahead_mask")]
)
def test_each_of_three_masks_may_have_a_shape_of_its_own(right: str, wrong: str, tmp_path: Path) -> None:
    text = MASKS.replace(right, f"{wrong}.expand(batch, -1, -1)") if right else MASKS
    report = verify(saved(tmp_path, text, "DecoderLayer"))
    assert report.verdict == ("deviates" if right else "equal"), str(report)
    assert not right or "mask_never_used" in report.mistakes


IDLE = """
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn, self.norm1, self.norm2 = nn.MultiheadAttention(dim, heads), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.ff(self.norm2(x))
"""
TURNED = """
from torch import nn


class Layer(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, mask=None):
        x = self.norm1((x + self.attn(x, x, x, attn_mask=mask)[0]).flip(1))
        return self.norm2(x + self.ff(x))


class Stack(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.layers = nn.ModuleList(Layer(d_model, nhead) for _ in range(2))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x, mask)
        return x
"""
NEVER_CALLED = (
    TURNED.partition("class Stack")[0].replace(".flip(1)", "")
    + """
class Stack(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.layers, self.others = (nn.ModuleList(Layer(d_model, nhead) for _ in range(2)) for _ in range(2))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x, memory):
        for layer, other in zip(self.layers, self.others):
            x = LAYERS
        return self.norm(x)
"""
)


def test_an_attention_that_nothing_calls_is_a_mistake(tmp_path: Path) -> None:
    report = verify(saved(tmp_path, IDLE, "Block"))
    assert report.mistakes == ("sublayer_unused",), str(report)


def test_tokens_that_change_places_in_each_of_two_layers_are_not_equal(tmp_path: Path) -> None:
    report = verify(saved(tmp_path, TURNED, "Stack"))
    assert report.verdict in ("unchecked", "deviates"), str(report)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layers", "verdict", "mistakes", "left"),
    [
        ("x", "deviates", ("part_never_used",), []),
        ("layer(x)", "partial", (), ["others"]),
        ("other(layer(x if len(memory) else x))", "partial", (), ["memory"]),
        ("other(layer(x))", "equal", (), []),
    ],
)
def test_layers_that_nothing_calls_and_a_memory_that_changes_nothing_are_not_equal(
    layers: str, verdict: str, mistakes: tuple[str, ...], left: list[str], tmp_path: Path
) -> None:
    report = verify(saved(tmp_path, NEVER_CALLED.replace("LAYERS", layers), "Stack"))
    assert (report.verdict, report.mistakes) == (verdict, mistakes), str(report)
    assert [one.what for one in report.not_exercised] == left, str(report)
