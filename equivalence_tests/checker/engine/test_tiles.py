"""Exponentials that are divided by their sum at the end, in one tile or in several, and heads that are modules."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.calls import diagnose_call
from equivalence_tests.checker.helpers_for_tests import changed


class Flash(nn.Module):
    """Right: an online softmax over blocks of queries and keys, longer than the sequences that come first."""

    def __init__(self, dim: int, heads: int, block: int = 16, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.block, self.causal = heads, block, causal
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def scores(self, q: Tensor, k: Tensor, row: int, column: int) -> Tensor:
        scores = q @ k.mT
        if self.causal:
            rows, columns = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
            scores = scores.masked_fill(columns + column > rows[:, None] + row, -1e30)
        return scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, rows = q / math.sqrt(q.size(-1)), []
        for i in range(0, x.size(1), self.block):
            here = q[:, :, i : i + self.block]
            best = torch.full_like(here[..., :1], -1e30)
            total, out = torch.zeros_like(best), torch.zeros_like(here)
            for j in range(0, x.size(1), self.block):
                scores = self.scores(here, k[:, :, j : j + self.block], i, j)
                new = torch.maximum(best, scores.amax(-1, keepdim=True))
                e, shrink = (scores - new).exp(), (best - new).exp()
                total = total * shrink + e.sum(-1, keepdim=True)
                out = out * self.kept(shrink) + e @ v[:, :, j : j + self.block]
                best = new
            rows.append(out / total)
        return self.out(torch.cat(rows, 2).transpose(1, 2).flatten(2))

    def kept(self, shrink: Tensor) -> Tensor:
        """The stage that the next one replaces."""
        return shrink


class NeverRescaled(Flash):
    def kept(self, shrink: Tensor) -> Tensor:
        return torch.ones_like(shrink)


class Chunked(nn.Module):
    """Wrong beyond the first chunk, whose size only the class knows."""

    CHUNK = 24

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        split = [
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p, x in ((self.q, query), (self.k, key), (self.v, value))
        ]
        q, k, v = split
        top = out = total = torch.zeros(())
        for start in range(0, k.size(2), self.CHUNK):
            scores = q @ k[:, :, start : start + self.CHUNK].mT / math.sqrt(q.size(-1))
            best = scores.amax(-1, keepdim=True)
            top = torch.maximum(top, best) if start else best
            e = (scores - top).exp()
            out, total = out + e @ v[:, :, start : start + self.CHUNK], total + e.sum(-1, keepdim=True)
        return self.o((out / total).transpose(1, 2).flatten(2))


def tiled(q: Tensor, k: Tensor, v: Tensor, block: int = 32) -> Tensor:
    """Forgets to rescale both sums."""
    out, total = torch.zeros_like(q), q.new_zeros((*q.shape[:-1], 1))
    best = torch.full_like(total, -math.inf)
    for keys, values in zip(k.split(block, -2), v.split(block, -2), strict=True):
        scores = q @ keys.mT / math.sqrt(q.size(-1))
        best = torch.maximum(best, scores.amax(-1, keepdim=True))
        e = (scores - best).exp()
        out, total = out + e @ values, total + e.sum(-1, keepdim=True)
    return out / total


def in_room(q: Tensor, k: Tensor, v: Tensor, sram_size: int = 65536) -> Tensor:
    """Right: its tiles fill a memory of so many bytes."""
    tile = sram_size // (4 * q.size(-1))
    return shrunk(q, k.split(tile, -2), v.split(tile, -2), rescaled=True)


def in_long_tiles(q: Tensor, k: Tensor, v: Tensor, tile: int = 4096) -> Tensor:
    """Forgets to rescale what was averaged before, and no sequence is as long as its tile."""
    return shrunk(q, k.split(tile, -2), v.split(tile, -2), rescaled=False)


def shrunk(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *, rescaled: bool) -> Tensor:
    out, total = torch.zeros_like(q), q.new_zeros((*q.shape[:-1], 1))
    best = torch.full_like(total, -math.inf)
    for k, v in zip(keys, values, strict=True):
        scores = q @ k.mT / math.sqrt(q.size(-1))
        new = torch.maximum(best, scores.amax(-1, keepdim=True))
        e, before = (scores - new).exp(), total
        total = total * (best - new).exp() + e.sum(-1, keepdim=True)
        out = (before * (best - new).exp() * out if rescaled else before * out) + e @ v
        out, best = out / total, new
    return out


class Head(nn.Module):
    """One head, with projections and a mask of its own."""

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(width, head_size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        k, q = self.key(x), self.query(x)
        scores = q @ k.mT * self.scale(k)
        scores = scores.masked_fill(self.tril[:length, :length] == 0, -math.inf)  # type: ignore[index]
        weights: Tensor = self.dropout(F.softmax(scores, dim=-1))
        return weights @ self.value(x)

    def scale(self, k: Tensor) -> float:
        """The stage that the next one replaces."""
        return float(k.size(-1) ** -0.5)


class UnscaledHead(Head):
    def scale(self, k: Tensor) -> float:
        return 1.0


class Heads(nn.Module):
    """A list of heads, each a module, side by side."""

    HEAD: type[Head] = Head

    def __init__(self, n_embd: int, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(self.HEAD(n_embd, n_embd // num_heads) for _ in range(num_heads))
        self.proj, self.dropout = nn.Linear(n_embd, n_embd), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.proj(torch.cat([head(x) for head in self.heads], dim=-1)))


def test_tiles_that_add_up_are_right_in_one_tile_and_in_several() -> None:
    report = verify(Flash)
    assert report.verdict == "equal", str(report)
    assert "lengths beyond block = 16" in {exercise.what for exercise in report.coverage if exercise.exercised}


def test_a_number_whose_name_says_nothing_is_seen_to_be_the_room_for_a_tile() -> None:
    report = verify(in_room)
    assert report.verdict == "equal", str(report)
    assert "sram_size" in {exercise.what for exercise in report.coverage if exercise.exercised}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", [NeverRescaled, Chunked, tiled, in_long_tiles])
def test_tiles_that_do_not_add_up_are_found_beyond_the_first(wrong: object) -> None:
    report = verify(wrong)
    assert report.mistakes == ("tiles_do_not_add_up",), str(report)
    assert (report.verdict, report.findings) == ("unchecked", [])  # what is only suspected blames no line


def test_heads_with_projections_of_their_own_are_no_tiles() -> None:
    report = verify(Heads)
    assert report.verdict == "equal", str(report)
    assert ("heads", "3", "num_heads") in report.conventions
    assert verify(changed(Heads, HEAD=UnscaledHead)).mistakes == ("scale_missing",)


class Beside(nn.Module):
    """Scores of tokens in the same block beside those of tokens that all see, in one softmax."""

    scale = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))

    def hidden(self, scores: Tensor) -> Tensor:
        return scores

    def forward(self, x: Tensor, seen_by_all: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (3, 4)).unflatten(1, (-1, 4)).permute(0, 3, 1, 2, 4) for f in (self.q, self.k, self.v)
        )
        own_k, own_v = (f(seen_by_all).unflatten(-1, (3, 4)).transpose(1, 2) for f in (self.k, self.v))
        q = q * self.scale
        to_all, in_block = torch.einsum("bhnkd,bhgd->bhnkg", q, own_k), torch.einsum("bhnkd,bhnxd->bhnkx", q, k)
        weights = self.hidden(torch.cat([to_all, in_block], -1)).softmax(-1)
        one, two = weights.split([own_k.size(2), 4], -1)
        context = torch.einsum("bhnkg,bhgd->bhnkd", one, own_v) + torch.einsum("bhnkx,bhnxd->bhnkd", two, v)
        return self.out(context.flatten(2, 3).transpose(1, 2).flatten(2))


class BesideHidden(Beside):
    def hidden(self, scores: Tensor) -> Tensor:
        places = torch.arange(scores.size(-1)) == scores.size(-1) - 1
        return scores.masked_fill(places, -torch.inf)


class BesideTwice(Beside):
    def hidden(self, scores: Tensor) -> Tensor:
        return torch.cat([scores[..., :3].softmax(-1).log(), scores[..., 3:]], -1)


@pytest.mark.parametrize("target", [Beside, changed(Beside, scale=1.0), BesideHidden, BesideTwice])
def test_keys_of_two_kinds_that_share_a_softmax_are_no_attention_of_torchs(target: type[nn.Module]) -> None:
    torch.manual_seed(0)
    given = torch.randn(2, 8, 12).double(), torch.randn(2, 3, 12).double()
    (report,) = diagnose_call(Call(target().double().eval(), given))
    assert (report.verdict, report.mistakes) == ("unchecked", ()), str(report)
