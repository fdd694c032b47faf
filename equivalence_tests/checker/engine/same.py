"""When two tensors are the same: the helpers and the limits that every stage shares."""

import torch
from torch import Tensor

# What differs by less, relative to the largest value, is rounding.
EXACT = 1e-9  # of float64 alone
ROUNDING = 1e-7  # of float64, after several steps
MEASURED = 1e-6  # of what was measured by a difference, or solved for
TABLE = 1e-5  # of a table in float32
SINGLE = 2e-4  # where a part is computed in float32, whatever the input is
LOOSE = 1e-3  # of what only has to be distinguished from other known values
FLOAT32_INSIDE = 3e-6  # of code that computes a part in float32, in what comes back

# Which scores and weights hide a key.
HIDING = 1e3  # no score is as large; one below its opposite is hidden
INFINITE = 1e30  # larger numbers stand for infinity
UNDERFLOW = -700.0  # the exponential of what is below is 0
VANISHED = 1e-25  # a weight below this is none
SMALLEST = 1e-30  # what is divided by, at least


def near(x: Tensor, y: Tensor, tolerance: float = ROUNDING) -> bool:
    """Whether two tensors are equal but for rounding, relative to the largest value; NaN and inf must match.

    >>> near(torch.ones(2), torch.ones(2) + 1e-9)
    True
    """
    if x.shape != y.shape:
        return False
    x, y = x.double(), y.double()
    finite = y.isfinite()
    if not torch.equal(finite, x.isfinite()):
        return False
    if not bool(finite.any()):
        return True
    return bool(((x - y)[finite].abs() <= tolerance * (y[finite].abs().max() + SMALLEST)).all())


def constant_ratio(x: Tensor, y: Tensor, tolerance: float = ROUNDING) -> float | None:
    """Give c with x = c y; None if there is none.

    >>> constant_ratio(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    2.0
    """
    x, y = x.double().reshape(-1), y.double().reshape(-1)
    good = y.isfinite() & x.isfinite()
    if not bool(good.all()) or not len(y):
        return None
    largest = y.abs().argmax()
    if not y[largest]:
        return None
    ratio = float(x[largest] / y[largest])
    return ratio if bool(((x - ratio * y).abs() <= tolerance * x.abs().max().clamp_min(SMALLEST)).all()) else None


def distance(actual: Tensor, expected: Tensor) -> float:
    """Greatest difference relative to the largest expected value, over rows where the expected one is finite.

    >>> distance(Tensor([[1.0, 2.5]]), Tensor([[1.0, 2.0]]))
    0.25
    """
    if actual.shape != expected.shape:
        return float("inf")
    rows = expected.isfinite().all(-1)
    if 2 * int(rows.sum()) < rows.numel():
        return float("inf")
    difference = (actual[rows] - expected[rows]).abs().max()
    largest = expected[rows].abs().max().clamp_min(SMALLEST)
    return float((difference / largest).nan_to_num(float("inf")))


def identical(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal to the last bit, NaNs in equal places counting as equal.

    >>> identical(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
    True
    """
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())
