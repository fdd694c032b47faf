"""Masks given together, masks of queries, fills that nobody takes, a cache with its length, an encoding as argument."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.stages import OneMatrix


class BothMasks(OneMatrix):
    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        future_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        if padding_mask is not None:
            scores = scores.masked_fill(padding_mask[:, None, None] == 0, -torch.inf)
        if future_mask is not None:
            scores = scores.masked_fill(future_mask == 0, -torch.inf)
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        return self.finish(scores.softmax(-1) @ v)


class SecondMaskForgetsTheFirst(OneMatrix):
    def forward(self, x: Tensor, padding_mask: Tensor | None = None, future_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.operands(x)
        masked = scores = self.scores(q, k)
        if padding_mask is not None:
            masked = scores.masked_fill(padding_mask[:, None, None] == 0, -torch.inf)
        if future_mask is not None:
            masked = scores.masked_fill(future_mask == 0, -torch.inf)
        return self.finish(masked.softmax(-1) @ v)


class PaddingEndsCausality(OneMatrix):
    def forward(self, x: Tensor, padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.operands(x)
        hidden = None if padding_mask is None else padding_mask[:, None, None]
        is_causal = is_causal and hidden is None
        return self.finish(functional.scaled_dot_product_attention(q, k, v, hidden, is_causal=is_causal))


class DiscardsTheFill(OneMatrix):
    def forward(self, x: Tensor, causal_mask: bool = False) -> Tensor:
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        if causal_mask:
            scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)  # nobody takes it
        return self.finish(scores.softmax(-1) @ v)


class LeavesQueriesAlone(OneMatrix):
    def forward(self, x: Tensor, q_padding_mask: Tensor | None = None, k_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.operands(x)
        scores = self.scores(q, k)
        if k_padding_mask is not None:
            scores = scores.masked_fill(~k_padding_mask[:, None, None], -torch.inf)
        return self.finish(scores.softmax(-1) @ v)


class TakesTheLengthOfItsCache(OneMatrix):
    def forward(  # type: ignore[override]
        self, x: Tensor, past_kv: tuple[Tensor, Tensor] | None = None, cache_len: int = 0
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.operands(x)
        if past_kv is not None:
            k, v = (torch.cat(pair, -2) for pair in zip(past_kv, (k, v), strict=True))
        scores = self.scores(q, k)
        places = torch.arange(k.size(-2), device=x.device)
        future = places > places[: q.size(-2), None] + cache_len
        return self.finish(scores.masked_fill(future, -torch.inf).softmax(-1) @ v), (k, v)


def test_masks_that_hide_together_are_equal() -> None:
    assert verify(BothMasks).verdict == "equal"


def test_a_mask_that_forgets_the_one_before_it_is_found_on_the_line_of_that() -> None:
    report = verify(SecondMaskForgetsTheFirst)
    assert report.verdict == "deviates"
    assert report.mistakes == ("mask_lost_beside_another",)
    finding = report.findings[0]
    assert finding.sentence == "Where future_mask is given, padding_mask no longer hides anything."
    assert "padding_mask[:, None, None]" in finding.stack[0].text


def test_a_padding_mask_that_ends_causality_is_found() -> None:
    report = verify(PaddingEndsCausality)
    assert report.verdict == "deviates"
    assert [finding.sentence for finding in report.findings] == [
        "Where padding_mask is given, is_causal no longer hides anything."
    ]


def test_a_fill_that_nobody_takes_is_the_line_of_a_switch_without_effect() -> None:
    report = verify(DiscardsTheFill)
    assert report.mistakes == ("causal_switch_wrong",)
    assert "nobody takes it" in report.findings[0].stack[0].text


def test_an_unused_mask_of_queries_is_a_note() -> None:
    report = verify(LeavesQueriesAlone)
    assert report.verdict == "equal"
    assert any(note.startswith("q_padding_mask: it says which queries are padding") for note in report.notes)


def test_the_length_of_a_cache_is_handed_over_with_it() -> None:
    report = verify(TakesTheLengthOfItsCache)
    assert report.verdict == "equal", str(report)


class TakesAnEncoding(OneMatrix):
    """As in Transformer-XL: the scores of positions are made of an encoding that every call is handed."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.positions = nn.Linear(dim, dim, bias=False)
        self.u, self.v = (nn.Parameter(torch.randn(heads, 1, dim // heads)) for _ in range(2))

    def forward(self, x: Tensor, pos_embedding: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.operands(x)
        p = self.split(self.positions(pos_embedding))
        by_position = (q + self.v) @ p.mT
        padded = functional.pad(by_position, (1, 0)).reshape(*by_position.shape[:2], -1, x.size(1))
        by_position = padded[:, :, 1:].reshape_as(by_position)
        scores = ((q + self.u) @ k.mT + by_position) / self.divisor(q)
        return self.finish(scores.softmax(-1) @ v)

    def divisor(self, q: Tensor) -> float:
        return math.sqrt(q.size(-1))


class DividesByTheWidth(TakesAnEncoding):
    def divisor(self, q: Tensor) -> float:
        return math.sqrt(q.size(-1) * self.heads)


@pytest.mark.thorough
def test_an_encoding_that_is_an_argument_is_handed_over() -> None:
    assert verify(TakesAnEncoding).verdict != "deviates"
    (finding,) = verify(DividesByTheWidth).findings
    assert finding.sentence.startswith("The scores are divided by sqrt(embed_dim)")


class TilesItsKeys(nn.Module):
    """Keys are tiled and values are not, so that heads meet the values of another group."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, width = heads, kv_heads, dim // heads * kv_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, n) for n in (dim, width, width, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        groups = self.heads // self.kv_heads
        k, v = k.repeat(1, groups, 1, 1), v.repeat_interleave(groups, 1)
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_tiled_keys_are_proven_by_the_order_of_repeat_interleave() -> None:
    (finding,) = verify(TilesItsKeys).findings
    assert finding.name == "grouped_heads_tiled"
    assert finding.proof is not None
    assert finding.proof.holds
