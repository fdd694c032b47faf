"""How far two tensors are apart."""

from torch import Tensor

# Code that computes a part in float32, whatever it is given, is that exact and no more.
FLOAT32_INSIDE = 3e-6


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
    largest = expected[rows].abs().max().clamp_min(1e-30)
    return float((difference / largest).nan_to_num(float("inf")))
