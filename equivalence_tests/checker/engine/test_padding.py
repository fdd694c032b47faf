"""Padding that is hidden as queries too, or whose output is set to zero, is right; as queries alone it is not."""

import math

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests import verify


class Padded(nn.Module):
    """Hides keys that are padding; what the classes below have in common."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~keep[:, None, None, :], -math.inf)

    def finished(self, context: Tensor, keep: Tensor) -> Tensor:
        return context

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        scores = scores if mask is None else self.hide(scores, mask)
        context = scores.softmax(-1) @ v
        context = context if mask is None else self.finished(context, mask)
        out: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return out


class HidesPaddedRowsToo(Padded):
    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        both = keep[:, None, :, None] & keep[:, None, None, :]
        return scores.masked_fill(~both, -torch.finfo(scores.dtype).max)


class ZeroesPaddedRows(Padded):
    def finished(self, context: Tensor, keep: Tensor) -> Tensor:
        return context.masked_fill(~keep[:, None, :, None], 0.0)


class HidesPaddedRowsAlone(Padded):
    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~keep[:, None, :, None], -1e9)


class TakesTheFirstRow(Padded):
    """Takes a mask with a row for each query, and gives them all the first."""

    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        rows = [scores[:, :, i : i + 1].masked_fill(~keep[:, :, :1], -math.inf) for i in range(scores.size(2))]
        return torch.cat(rows, 2)


class TakesEachRow(TakesTheFirstRow):
    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        assert keep.dim() == 4
        return scores.masked_fill(~keep, -math.inf)


class ZeroesAnotherRow(Padded):
    def finished(self, context: Tensor, keep: Tensor) -> Tensor:
        return context.masked_fill(~keep.roll(1, -1)[:, None, :, None], 0.0)


@pytest.mark.parametrize("right", [Padded, HidesPaddedRowsToo, ZeroesPaddedRows])
def test_what_comes_out_for_padding_is_nobodys(right: type[nn.Module]) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)


def test_padding_that_is_hidden_as_queries_alone_is_named() -> None:
    report = verify(HidesPaddedRowsAlone)
    assert report.mistakes == ("padding_mask_on_queries",), str(report)
    assert report.findings[0].line is not None
    assert "keep[:, None, :, None]" in report.findings[0].line.text


def test_a_row_that_is_no_padding_is_not_excused() -> None:
    assert verify(ZeroesAnotherRow).mistakes == ("changed_by_masked_fill",)


def test_a_mask_by_query_of_which_one_row_is_taken_is_told() -> None:
    report = verify(TakesTheFirstRow)
    assert [exercise.what for exercise in report.not_exercised] == ["mask with a row for each query"], str(report)
    assert verify(TakesEachRow).verdict == "equal"
