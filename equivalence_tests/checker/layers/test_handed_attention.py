"""Layers that are handed their attention, which is handed another one that knows nothing of projections."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.reach.sublayer import names_with_sublayer
from equivalence_tests.checker.verify import verify


class FullAttention(nn.Module):
    """Attends with heads that are split already."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None) -> Tensor:
        scores = torch.einsum("blhe,bshe->bhls", queries, keys) / queries.size(-1) ** 0.5
        scores = scores if attn_mask is None else scores.masked_fill(attn_mask, -torch.inf)
        return torch.einsum("bhls,bshd->blhd", self.dropout(scores.softmax(-1)), values)


class AttentionLayer(nn.Module):
    """Projects for the attention that it is handed; with ``mix`` it merges heads as Informer does."""

    def __init__(self, attention: nn.Module, d_model: int, n_heads: int, mix: bool = False) -> None:
        super().__init__()
        self.inner, self.n_heads, self.mix = attention, n_heads, mix
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None) -> Tensor:
        pairs = ((self.q, queries), (self.k, keys), (self.v, values))
        context = self.inner(*(f(x).unflatten(-1, (self.n_heads, -1)) for f, x in pairs), attn_mask)
        context = context.transpose(1, 2).contiguous() if self.mix else context
        return self.out(context.reshape(*queries.shape))


class EncoderLayer(nn.Module):
    """Is handed the attention that projects; its feed-forward is made of convolutions."""

    def __init__(self, attention: nn.Module, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.attention = attention
        self.conv1, self.conv2 = nn.Conv1d(d_model, d_ff, 1), nn.Conv1d(d_ff, d_model, 1)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.attention(x, x, x, attn_mask))
        y = self.conv2(torch.relu(self.conv1(self.turned(x)))).transpose(1, 2)
        return self.norm2(x + y)

    def turned(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class TakesTokensForFeatures(EncoderLayer):
    def turned(self, x: Tensor) -> Tensor:
        return x.reshape(x.size(0), x.size(2), x.size(1))


def test_a_layer_is_handed_the_attention_that_projects() -> None:
    report = verify(EncoderLayer)
    (never,) = report.not_exercised
    assert never.what.endswith("where `self.mix` is true"), str(report)


@pytest.mark.thorough
def test_a_layer_whose_attention_takes_tokens_for_features_is_not_equal() -> None:
    assert verify(TakesTokensForFeatures).verdict != "equal"


def test_an_option_that_mixes_heads_and_tokens_asks_for_that() -> None:
    assert "heads_merged_without_transpose" not in verify(AttentionLayer).mistakes


class Sublayer(nn.Module):
    """The pre-norm residual of The Annotated Transformer, which is handed what it stands around."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class TwiceAdded(Sublayer):
    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(x + sublayer(self.norm(x)))


class OfTheNorm(Sublayer):
    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        x = self.norm(x)
        return x + self.dropout(sublayer(x))


class TakesAPart(Sublayer):
    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x))[0])


class Around(nn.Module):
    """Is handed what it stands around when it is made."""

    def __init__(self, dim: int, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fn(self.norm(x))


class AroundTheNorm(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.fn(self.norm(x))


@pytest.mark.parametrize(
    ("tested", "verdict", "names"),
    [
        (Sublayer, "equal", ()),
        (Around, "equal", ()),
        (TwiceAdded, "deviates", ("residual_added_twice",)),
        (OfTheNorm, "deviates", ("residual_from_normalised",)),
        (AroundTheNorm, "deviates", ("residual_from_normalised",)),
    ],
)
def test_what_stands_around_any_function_is_called_with_an_attention(
    tested: type[nn.Module], verdict: str, names: tuple[str, ...]
) -> None:
    report = verify(tested)
    assert (report.verdict, report.mistakes) == (verdict, names), report


class Projected(Sublayer):
    """Holds a matrix, so that it may be the attention, and what it is handed something else."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__(size, dropout)
        self.out = nn.Linear(size, size)


def test_what_is_taken_apart_or_projected_is_no_attention() -> None:
    assert names_with_sublayer(Sublayer(6, 0.1)) == ("x", "sublayer")
    assert names_with_sublayer(TakesAPart(6, 0.1)) is names_with_sublayer(Projected(6, 0.1)) is None
