"""Every sinusoidal positional encoding: frequencies, order of sines and cosines, first position, axis, scaling."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.judging import PartReading

__all__ = ["position_readings"]


def position_readings(width: int) -> Iterator[PartReading]:
    """Every sinusoidal table: frequencies, order of sines and cosines, first position, axis, scaling of the input."""
    scalings = {"x + pe": 1.0, "sqrt(d_model) x + pe": math.sqrt(width), "pe alone": 0.0}
    bases = (10000.0, 1000.0, 100.0, 100000.0)
    options = itertools.product(
        bases,
        POSITION_TABLES.items(),
        POSITION_EXPONENTS.items(),
        (0, 1),
        (1, 0),
        scalings.items(),
    )
    for base, (layout, (order, swapped)), (exponent, exponents), start, axis, (scaling, factor) in options:
        mistakes = [exponent] if exponent else []
        mistakes += ["position_sine_cosine_swapped"] if swapped else []
        mistakes += ["position_starts_at_one"] if start else []
        mistakes += ["position_base_other"] if base != 10000.0 else []
        words = (
            ("order", layout, "torch.nn has none"),
            ("positions run along", "axis 1: (batch, len, features)" if axis else "axis 0: (len, batch, features)", ""),
            ("gives", scaling, ""),
        )
        yield PartReading(
            _position_formula(order, swapped, exponents, base, start, axis, factor), words, tuple(mistakes)
        )


POSITION_TABLES = {
    "sine and cosine interleaved": ("interleaved", False),
    "sines, then cosines": ("concatenated", False),
    "cosine and sine interleaved": ("interleaved", True),
    "cosines, then sines": ("concatenated", True),
}
# Exponent of the base for pair i of a width d: right, and wrong in known ways (for the sine, for the cosine).
POSITION_EXPONENTS: dict[str, Callable[[Tensor, int], tuple[Tensor, Tensor]]] = {
    "": lambda i, d: (2 * i / d, 2 * i / d),
    "position_exponent_halved": lambda i, d: (i / d, i / d),
    "position_exponent_doubled": lambda i, d: (4 * i / d, 4 * i / d),
    "position_cosine_exponent_shifted": lambda i, d: (2 * i / d, (2 * i + 1) / d),
    "position_cosine_exponent_doubled": lambda i, d: (4 * i / d, 2 * (2 * i + 1) / d),
    "position_timescale_of_tensor2tensor": lambda i, d: (i / max(d // 2 - 1, 1), i / max(d // 2 - 1, 1)),
}


def _position_formula(
    order: str, swapped: bool, exponents: Any, base: float, start: int, axis: int, factor: float
) -> Callable[[Tensor], Tensor]:
    def formula(x: Tensor) -> Tensor:
        width = x.size(-1)
        positions = torch.arange(start, start + x.size(axis), dtype=x.dtype)[:, None]
        pairs = torch.arange((width + 1) // 2, dtype=x.dtype)
        for_sine, for_cosine = exponents(pairs, width)
        first, second = (positions * base**-for_sine).sin(), (positions * base**-for_cosine).cos()
        if swapped:
            first, second = (positions * base**-for_sine).cos(), (positions * base**-for_cosine).sin()
        halves = (first, second[:, : width // 2])
        table = (
            torch.stack((first, second), -1).flatten(1)[:, :width] if order == "interleaved" else torch.cat(halves, 1)
        )
        return factor * x + (table if axis else table[:, None]).expand_as(x)

    return formula
