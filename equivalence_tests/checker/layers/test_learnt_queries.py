"""Blocks for sets: attention and feed-forward in one forward, without norms, and learnt points that ask the set."""

from pathlib import Path

import pytest

from equivalence_tests.checker.helpers_for_tests import report_on

INDUCED = """

class Induced(nn.Module):
    def __init__(self, dim, heads, points=6):
        super().__init__()
        self.first, self.second = Meet(dim, heads), Meet(dim, heads)
        self.points = nn.Parameter(torch.randn(1, points, dim))

    def forward(self, x):
        return self.second(x, self.first(self.points.expand(len(x), -1, -1), x))
"""
TEXT = (
    """
import torch
from torch import nn


class Meet(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, ask, told):
        q, k, v = self.split(self.q(ask)), self.split(self.k(told)), self.split(self.v(told))
        a = torch.softmax(q @ k.transpose(-2, -1) / q.size(-1) ** 0.5, dim=-1) @ v
        h = ask + self.o(a.transpose(1, 2).flatten(2))
        return h + self.ff(h)

"""
    + INDUCED
)
WRONG = (
    ("return h + self.ff(h)", "return ask + self.ff(h)"),
    ("return h + self.ff(h)", "return h + self.ff(ask)"),
    ("return h + self.ff(h)", "return h + h + self.ff(h)"),
    ("self.second(x, self.first(self.points.expand(len(x), -1, -1), x))", "self.second(x, self.first(x, x)[:, :6])"),
    ("self.second(x, self.first(self.points.expand(len(x), -1, -1), x))",
     "self.second(x, self.first(self.points.expand(len(x), -1, -1), x).flip(1) - self.points)"),
)  # fmt: skip


def test_learnt_points_may_ask_a_set_and_the_set_them(tmp_path: Path) -> None:
    said = report_on(TEXT, "Induced", tmp_path)
    assert said.startswith("equal"), said
    assert "first takes tokens that are made from none that are passed in. Intended: the parameter points" in said
    assert "a feed-forward follows it" in said


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("old", "new"), WRONG)
def test_other_residuals_and_other_tokens_are_not_passed_over(old: str, new: str, tmp_path: Path) -> None:
    assert old in TEXT
    said = report_on(TEXT.replace(old, new), "Induced", tmp_path)
    assert said.startswith(("deviates", "unchecked")), said


NORMED = (
    """
import torch
from torch import nn


class Fed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down, self.shortcut = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.Linear(dim, dim)
        self.inner = nn.LayerNorm(dim)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.inner(x)))) + self.shortcut(x)


class Meet(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn, self.ff = nn.MultiheadAttention(dim, heads, batch_first=True), Fed(dim)
        self.norm, self.norm_told, self.norm_ff = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, ask, told=None):
        asks = self.norm(ask)
        told = asks if told is None else self.norm_told(told)
        h = ask + self.attn(asks, told, told)[0]
        return h + self.ff(self.norm_ff(h))

"""
    + INDUCED
)


def test_a_norm_that_only_the_whole_calls_is_not_missed_and_a_shortcut_is_known_by_its_name(tmp_path: Path) -> None:
    said = report_on(NORMED, "Induced", tmp_path)
    assert said.startswith("equal"), said
    assert "the sub-module first.ff.shortcut, by its name" in said


def test_a_norm_that_the_whole_does_not_call_is_missed(tmp_path: Path) -> None:
    said = report_on(NORMED.replace("self.norm_told(told)", "told"), "Induced", tmp_path)
    assert said.startswith("deviates"), said
    assert "never called, or its result is not used: norm_told" in said


def test_a_matrix_beside_a_feed_forward_is_no_shortcut_by_any_name(tmp_path: Path) -> None:
    said = report_on(NORMED.replace("shortcut", "other"), "Induced", tmp_path)
    assert said.startswith("unchecked"), said
    assert "are added in parallel" in said


LATENTS = """
import torch
from torch import nn


class Latents(nn.Module):
    def __init__(self, dim, heads, count=6):
        super().__init__()
        self.heads = heads
        self.latents = nn.Parameter(torch.randn(count, dim))
        self.norm_x, self.norm_latents = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x, mask=None):
        asking = self.norm_latents(self.latents.expand(len(x), -1, -1))
        told = self.norm_x(x)
        q, k, v = self.split(self.q(asking)), self.split(self.k(told)), self.split(self.v(told))
        s = q @ k.mT / q.size(-1) ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None], -torch.inf)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""
WRONG_LATENTS = (
    ("/ q.size(-1) ** 0.5", "/ q.size(-1)", "The scores are divided by head_dim"),
    ("~mask[:, None, None], -torch.inf", "~mask[:, None, None], 0.0", "The mask "),
    ("s.softmax(-1)", "s.softmax(-2)", "The softmax runs over the queries"),
    ("self.v(told)", "self.v(told).roll(1, 1)", "The value is changed by roll"),
)


@pytest.mark.parametrize("inverted", [False, True])
def test_latents_may_be_all_that_asks(inverted: bool, tmp_path: Path) -> None:
    said = report_on(LATENTS.replace("~mask", "mask") if inverted else LATENTS, "Latents", tmp_path)
    assert said.startswith("equal"), said
    assert "latents takes part. Intended: the parameter latents" in said
    assert ("(batch, key), True = may not look" if inverted else "(batch, key), True = may look") in said


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("old", "new", "sentence"), WRONG_LATENTS, ids=[new for _, new, _ in WRONG_LATENTS])
def test_mistakes_beside_latents_are_found(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    said = report_on(LATENTS.replace(old, new), "Latents", tmp_path)
    assert said.startswith("deviates"), said
    assert sentence in said


SETS = """
import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.to_q(query)), self.split(self.to_k(key)), self.split(self.to_v(value))
        s = q @ k.mT / q.size(-1) ** 0.5
        if mask is not None:
            s = s.masked_fill(~(mask[:, None, None] if mask.dim() == 2 else mask), -torch.inf)
        return self.to_out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Meet(nn.Module):
    def __init__(self, dim, num_heads, rff):
        super().__init__()
        self.attention = Heads(dim, num_heads)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.rff = rff

    def forward(self, x, y, mask=None):
        h = self.norm1(x + self.attention(x, y, y, mask))
        return self.norm2(h + self.rff(h))


class Pool(nn.Module):
    def __init__(self, dim, num_heads, rff, num_seeds=1):
        super().__init__()
        self.meet = Meet(dim, num_heads, rff)
        self.seeds = nn.Parameter(torch.randn(1, num_seeds, dim))

    def forward(self, x, mask=None):
        return self.meet(self.seeds.repeat(len(x), 1, 1), x, mask)


class Induce(nn.Module):
    def __init__(self, dim, num_points, num_heads, rff1, rff2):
        super().__init__()
        self.meet1, self.meet2 = Meet(dim, num_heads, rff1), Meet(dim, num_heads, rff2)
        self.points = nn.Parameter(torch.randn(1, num_points, dim))

    def forward(self, x, mask=None):
        return self.meet2(x, self.meet1(self.points.expand(len(x), -1, -1), x, mask))
"""
POST_NORM = """h = self.norm1(x + self.attention(x, y, y, mask))
        return self.norm2(h + self.rff(h))"""
PRE_NORM = """h = x + self.attention(self.norm1(x), y, y, mask)
        return h + self.rff(self.norm2(h))"""
WRONG_SETS = (
    ("self.norm1(x + self.attention(", "self.norm1(self.attention(", "The residual is missing"),
    ("self.norm1(x + self", "self.norm1(x + x.sigmoid() * self", "x.sigmoid() * self.attention(x, y, y, mask) is not"),
    ("self.norm1(x + self", "self.norm1(x + x + self", "The residual is added twice"),
    ("(x, y, y, mask)", "(x, y, y)", ""),
    ("(x, y, y, mask)", "(x, y[:, 1:], y[:, 1:], None if mask is None else mask[:, 1:])", ""),
    ("s.softmax(-1)", "s.softmax(-2)", "The softmax runs over the queries"),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["Pool", "Induce"])
@pytest.mark.parametrize("wired", [POST_NORM, PRE_NORM], ids=["post-norm", "pre-norm"])
def test_blocks_for_sets_may_have_norms_masks_and_a_feed_forward_that_is_handed_over(
    name: str, wired: str, tmp_path: Path
) -> None:
    said = report_on(SETS.replace(POST_NORM, wired), name, tmp_path)
    assert said.startswith("equal"), said
    assert "a call with mask" in said


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["Pool", "Induce"])
@pytest.mark.parametrize(("old", "new", "sentence"), WRONG_SETS, ids=[new for _, new, _ in WRONG_SETS])
def test_mistakes_in_blocks_for_sets_are_found(old: str, new: str, sentence: str, name: str, tmp_path: Path) -> None:
    assert old in SETS
    said = report_on(SETS.replace(old, new), name, tmp_path)
    assert said.startswith("deviates" if sentence else ("deviates", "unchecked")), said
    assert sentence in said
