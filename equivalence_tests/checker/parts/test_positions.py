"""Positional encodings by themselves: however they are called, the table is found and compared."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.parts.kinds import guess_kind
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.parts import PaperPositionalEncoding


def row(report: Report, what: str) -> str:
    return next((here for name, here, _ in report.conventions if name == what), "")


def table_of_sines(n_position: int, d_model: int) -> Any:
    angles = np.arange(n_position)[:, None] / 10000 ** (2 * (np.arange(d_model) // 2) / d_model)
    return np.where(np.arange(d_model) % 2 == 0, np.sin(angles), np.cos(angles))


def position_table(dim: int, length: int) -> Any:
    return torch.from_numpy(table_of_sines(length, dim))[None]


def position_encoding_of_times(timesteps: Tensor, dim: int) -> Tensor:
    angles = timesteps[:, None] * torch.exp(-math.log(10000.0) * torch.arange(dim // 2) / (dim // 2))
    return torch.cat((angles.cos(), angles.sin()), -1)


class Table(PaperPositionalEncoding):
    """Its table is a tensor."""

    pe: Tensor


class IdsPositionalEncoding(Table):
    """Token ids in, the table out."""

    def forward(self, x: Tensor) -> Tensor:
        _, length = x.size()
        return self.pe[:length]


class EmbeddingPositionalEncoding(Table):
    """Embeds the ids itself, and is not cut to their length."""

    def __init__(self, d_model: int, max_len: int, n_vocab: int) -> None:
        super().__init__(d_model, max_len)
        self.embedding = nn.Embedding(n_vocab, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x) * self.d_model**0.5 + self.pe


class LengthPositionalEncoding(Table):
    def forward(self, x: int) -> Tensor:  # type: ignore[override]
        return self.pe[:x].unsqueeze(0)


class ScaledPositionalEncoding(Table):
    """A learned scale."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.alpha = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.pe[: x.size(1)]


class LearnedPositionalEmbedding(nn.Module):
    def __init__(self, max_len: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_len, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.size(1), device=x.device))


class TableOfPositions(nn.Embedding):
    """Token ids in, rows of itself out: it embeds no ids."""

    def __init__(self, max_len: int, d_model: int) -> None:
        super().__init__(max_len, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.arange(x.size(1), device=x.device).expand(x.shape))


class TableForAShape(nn.Embedding):
    """Takes the shape of the ids, for which positions may be taken."""

    def __init__(self, max_len: int, d_model: int) -> None:
        super().__init__(max_len, d_model)

    def forward(self, shape: tuple[int, int]) -> Tensor:  # type: ignore[override]
        _, length = shape[:2]
        return super().forward(torch.arange(length))


class OneRowPositionalEncoding(Table):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[None][:, x.size(1)]


class FirstRowPositionalEncoding(Table):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[0]


class LastRowPositionalEncoding(Table):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[x.size(1) - 1]


class MaskedPositionalEncoding(nn.Module):
    """Sums up a mask: positions from 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        position = mask.cumsum(1)
        angles = position[:, :, None] / 10000 ** (torch.arange(0, self.width, 2) / self.width)
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(2)


class SinesOnlyPositionalEncoding(Table):
    def table(self, length: int) -> Tensor:
        return self.angles(length).sin().repeat_interleave(2, 1)[:, : self.d_model]


class Postion(Table):
    """Only what it holds says what it is."""


class ForgottenPositionalEncoding(Table):
    def forward(self, x: Tensor) -> Tensor:
        return x


class RotaryPositionalEmbedding(nn.Module):
    """Rotates pairs of neighbours by tables of half their width."""

    def __init__(self, theta: float, d_k: int, max_seq_len: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_seq_len), theta ** -self.exponents(d_k))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def exponents(self, width: int) -> Tensor:
        return torch.arange(0, width, 2) / width

    def forward(self, x: Tensor, token_positions: Tensor) -> Tensor:
        cos, sin = self.get_buffer("cos")[token_positions], self.get_buffer("sin")[token_positions]
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack(self.turned(a, b, cos, sin), -1).flatten(-2)

    def turned(self, a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return a * cos - b * sin, b * cos + a * sin


class ReversedRotaryPositionalEmbedding(RotaryPositionalEmbedding):
    def turned(self, a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return a * cos + b * sin, b * cos - a * sin


class FastRotaryPositionalEmbedding(RotaryPositionalEmbedding):
    def exponents(self, width: int) -> Tensor:
        return torch.arange(0, width, 2) / (width // 2)


RIGHT: dict[str, tuple[Any, str, str]] = {
    "ids": (IdsPositionalEncoding, "takes", "token ids"),
    "ids, embedded": (EmbeddingPositionalEncoding, "gives", "sqrt(d_model) embedding(ids) + pe"),
    "a length": (LengthPositionalEncoding, "takes", "a length"),
    "a learned scale": (ScaledPositionalEncoding, "scaled by", "alpha"),
    "a learned table": (LearnedPositionalEmbedding, "table", "learned: table.weight"),
    "rows of itself": (TableOfPositions, "gives", "pe alone"),
    "a rotation": (RotaryPositionalEmbedding, "rotates", "pairs of neighbours"),
    "a function, length first": (table_of_sines, "takes", "a length and a width"),
    "a function, width first": (position_table, "takes", "a width and a length"),
    "a name that says nothing": (Postion, "order", "sine and cosine interleaved"),
    "an instance": (PaperPositionalEncoding(16), "order", "sine and cosine interleaved"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_read(name: str) -> None:
    found, what, said = RIGHT[name]
    report = verify(found)
    assert report.verdict == "equal", str(report)
    assert row(report, what) == said


def test_a_learned_table_is_said_to_be_one() -> None:
    assert any("a learned table" in note for note in verify(LearnedPositionalEmbedding).notes)


def test_one_row_is_no_mistake_where_no_tokens_are_given() -> None:
    assert verify(TableForAShape, kind="positional_encoding").findings == []


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (ReversedRotaryPositionalEmbedding, {"rotary_reversed"}),
        (FastRotaryPositionalEmbedding, {"position_exponent_wrong"}),
        (OneRowPositionalEncoding, {"position_one_row"}),
        (FirstRowPositionalEncoding, {"position_one_row"}),
        (LastRowPositionalEncoding, {"position_one_row"}),
        (ForgottenPositionalEncoding, {"position_not_added"}),
        (SinesOnlyPositionalEncoding, {"position_cosine_missing"}),
        (MaskedPositionalEncoding, {"position_starts_at_one"}),
        (position_encoding_of_times, {"position_sine_cosine_swapped"}),
    ],
)
def test_what_is_wrong_is_named(found: Callable[..., Any], names: set[str]) -> None:
    report = verify(found)
    assert set(report.mistakes) == names, str(report)


@pytest.mark.parametrize(
    "name", ["PostionalEncoding", "PositonalEmbedding", "PosEmb", "SinusoidalPositions", "LearnedPositions", "RelPE"]
)
def test_names_are_known_in_other_spellings(name: str) -> None:
    assert guess_kind(type(name, (nn.Module,), {})) == "positional_encoding"


def test_a_table_of_sines_tells_what_a_module_is() -> None:
    assert guess_kind(Postion(16)) == "positional_encoding"
    assert guess_kind(nn.Embedding(16, 8)) == ""


@pytest.mark.parametrize("name", ["PostNormEncoderLayer", "PosteriorEncoder", "PositionWiseFFN", "PositionalFF"])
def test_other_names_are_left_alone(name: str) -> None:
    assert guess_kind(type(name, (nn.Module,), {})) != "positional_encoding"


class WithoutFrequencies(nn.Module):
    """Is told all in the call; its exponent is zero for every feature."""

    def forward(self, seq_len: int, dim_model: int, device: str) -> Tensor:
        feature = torch.arange(dim_model, device=device)
        phase = torch.arange(seq_len, device=device)[:, None] / 10000.0 ** (feature // dim_model)
        return torch.where(feature % 2 == 0, phase.sin(), phase.cos())


def test_a_module_that_is_told_all_in_the_call_is_read() -> None:
    assert verify(WithoutFrequencies, kind="positional_encoding").mistakes == ("position_exponent_wrong",)


def sines_of(numbers: Tensor, width: int) -> Tensor:
    angles = numbers.reshape(-1)[:, None] / 10000 ** (torch.arange(0, width, 2).to(numbers) / width)
    return torch.cat((angles.sin(), angles.cos()), -1)


def columns_then_rows(embed_dim: int, grid_size: int) -> Any:
    """As in masked autoencoders: half of the features tell the column, the others the row."""
    columns, rows = np.meshgrid(np.arange(grid_size), np.arange(grid_size))
    return np.concatenate([sines_of(torch.from_numpy(x), embed_dim // 2).numpy() for x in (columns, rows)], axis=1)


def rows_then_columns(h: int, w: int, dim: int) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.cat((sines_of(rows, dim // 2), sines_of(columns, dim // 2)), -1)


def columns_twice(embed_dim: int, grid_size: int) -> Tensor:
    columns = torch.arange(grid_size).repeat(grid_size)
    return torch.cat((sines_of(columns, embed_dim // 2),) * 2, -1)


@pytest.mark.parametrize(
    ("made", "first", "not_run"),
    [(columns_then_rows, "columns", []), (rows_then_columns, "rows", ["more rows than columns"])],
)
def test_sinusoids_of_columns_and_rows_are_read(made: Callable[..., Any], first: str, not_run: list[str]) -> None:
    report = verify(made, kind="positional_encoding")
    assert report.verdict == ("partial" if not_run else "equal"), str(report)
    assert [one.what for one in report.not_exercised] == not_run
    assert f"{first} first" in row(report, "positions run along")
    assert report.equivalent is not None
    given = (3, 3, 20) if not_run else (20, 3)
    torch.testing.assert_close(report.equivalent.of(made)(*given), torch.as_tensor(made(*given)), check_dtype=False)


def test_columns_that_are_told_twice_are_no_equal() -> None:
    assert verify(columns_twice, kind="positional_encoding").verdict == "unchecked"
