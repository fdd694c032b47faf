"""Tensors as the page shows them: numbers with three digits, each with a level of colour."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.instruments.differences import FLOAT64_BOUND, compare_tensors

__all__ = ["LEVELS", "Matrix", "gap", "largest_of", "matrices", "printed", "rounding_of"]

DIGITS = 3
SINGULAR = {
    "batch": "sample",
    "num_heads": "head",
    "head_dim": "feature",
    "embed_dim": "feature",
    "d_model": "feature",
    "dim_feedforward": "unit",
    "len": "token",
}
LEVELS = 8  # of colour on either side of 0


@dataclass(frozen=True)
class Cell:
    """One number: its text, and the class of its colour."""

    text: str
    level: str


@dataclass(frozen=True)
class Matrix:
    """A table of numbers.

    Args:
        title: Which part of the tensor it is: "head 1"; "" if it is all.
        rows: What a row stands for.
        columns: What a column stands for.
        cells: Row after row.
    """

    title: str
    rows: str
    columns: str
    cells: tuple[tuple[Cell, ...], ...]


def printed(number: float) -> str:
    """Print a number as the page does.

    >>> [printed(x) for x in (0.12345, -2.0, -0.0001, -math.inf, math.nan, 1234567.0)]
    ['0.123', '−2.000', '0.000', '−∞', 'NaN', '1.235e+06']
    """
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else "∞" if number > 0 else "−∞"
    text = f"{number:.{DIGITS}f}" if abs(number) < 1e4 else f"{number:.{DIGITS}e}"
    text = text.removeprefix("-") if not text.strip("-0.") else text
    return text.replace("-", "−", 1) if text.startswith("-") else text


def level(number: float, largest: float) -> str:
    """Choose the colour of a number: "p" with a step above 0, "n" below, "z" near 0, "inf" and "nan".

    >>> [level(x, 2.0) for x in (2.0, -1.0, 0.01, -math.inf, math.nan)]
    ['p8', 'n4', 'z', 'inf', 'nan']
    """
    if not math.isfinite(number):
        return "nan" if math.isnan(number) else "inf"
    step = round(min(abs(number) / largest, 1.0) * LEVELS) if largest else 0
    return f"{'p' if number > 0 else 'n'}{step}" if step else "z"


def largest_of(*tensors: Tensor) -> float:
    """Give the greatest finite absolute value among tensors, or 0."""
    flat = torch.cat([x.detach().double().flatten() for x in tensors])
    finite = flat[flat.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def matrices(x: Tensor, words: Sequence[str], largest: float | None = None) -> tuple[Matrix, ...]:
    """Cut a tensor into tables of its last two axes.

    Args:
        x: At least one axis.
        words: The word of each axis, as DESIGN has them: ("batch", "num_heads", "query_len", "key_len").
        largest: The value of the strongest colour; the tensor's greatest if not given.

    Returns:
        One table for each index of the other axes; an axis of length 1 goes unnamed.

    >>> [matrix.title for matrix in matrices(torch.zeros(1, 2, 3, 5), ("batch", "num_heads", "query_len", "key_len"))]
    ['head 0', 'head 1']
    """
    x = x.detach().double()
    if x.dim() == 1:
        x, words = x.unsqueeze(0), ("", *words)
    top = largest_of(x) if largest is None else largest
    return tuple(
        Matrix(title, singular(words[-2]), singular(words[-1]), _cells(table, top))
        for title, table in _tables(x, words[:-2], "")
    )


def _tables(x: Tensor, words: Sequence[str], title: str) -> Iterator[tuple[str, Tensor]]:
    if not words:
        yield title, x
        return
    for index, part in enumerate(x):
        here = f"{singular(words[0])} {index}" if x.size(0) > 1 else ""
        yield from _tables(part, words[1:], ", ".join(filter(None, (title, here))))


def _cells(table: Tensor, largest: float) -> tuple[tuple[Cell, ...], ...]:
    return tuple(tuple(Cell(printed(x), level(x, largest)) for x in row) for row in table.tolist())


def singular(word: str) -> str:
    """Say what one index of an axis stands for: "query_len" counts queries."""
    names = {
        "batch": "sample",
        "num_heads": "head",
        "head_dim": "feature",
        "embed_dim": "feature",
        "d_model": "feature",
    }
    return names.get(word, word.removesuffix("_len").replace("dim_feedforward", "unit"))


def rounding_of(dtype: torch.dtype) -> float:
    """Give what rounding in a dtype stays below, relative to the largest value."""
    return FLOAT64_BOUND if dtype == torch.float64 else 16 * torch.finfo(dtype).eps


def gap(actual: Tensor, expected: Tensor) -> str:
    """Print the greatest difference relative to the largest value; what is rounding is "< 1e-12" in float64.

    Args:
        actual: One side.
        expected: The other.

    Returns:
        "< 1e-12", a number with two digits, or why the two cannot be compared.

    >>> x = torch.ones(3, dtype=torch.float64)
    >>> gap(x, x + 1e-14), gap(x.float(), x.float()), gap(x, x + 1)
    ('< 1e-12', '< 2e-06', '0.5')
    """
    bound = rounding_of(expected.dtype)
    found = compare_tensors(actual.detach(), expected.detach(), relative_bound=bound)
    if found.misfit:
        return found.misfit
    if found.passed:
        return f"< {bound:.0e}"
    return f"{found.max_abs_difference / found.largest:.2g}"
