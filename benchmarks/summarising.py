"""What many timings say: medians, spread, ratios with their uncertainty, and how cost grows."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "UNSTABLE_SPREAD",
    "Ratio",
    "growth_exponent",
    "is_unstable",
    "median_and_iqr",
    "median_ratio",
    "ratio_of_medians",
]

UNSTABLE_SPREAD = 0.10
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """A ratio and the interval in which it lies, with a confidence of 95%.

    Args:
        value: The ratio itself.
        low: The least that the bootstrap leaves.
        high: The greatest.
    """

    value: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether 1 lies outside of the interval."""
        return self.low > 1 or self.high < 1


def median_and_iqr(times: Sequence[float]) -> tuple[float, float]:
    """Give the median and the range that holds the middle half.

    >>> median_and_iqr([1.0, 2.0, 3.0, 4.0, 100.0])
    (3.0, 2.0)
    """
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75))
    return float(median), float(high - low)


def is_unstable(times: Sequence[float]) -> bool:
    """Whether the middle half spreads over more than a tenth of the median.

    >>> is_unstable([1.0, 1.01, 1.02]), is_unstable([1.0, 1.5, 2.0])
    (False, True)
    """
    median, iqr = median_and_iqr(times)
    return iqr > UNSTABLE_SPREAD * median


def median_ratio(times: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Give the median of the ratios round by round: what slows a whole round slows both and falls out.

    Args:
        times: The time of each round.
        baseline: That of the baseline in the same rounds.

    Returns:
        The median, with the interval of a bootstrap over rounds.

    >>> median_ratio([2.0, 20.0, 4.2], [1.0, 10.0, 2.0]).value
    2.0
    """
    ratios = np.asarray(times) / np.asarray(baseline)
    medians = np.median(_resampled(ratios), axis=1)
    return Ratio(statistics.median(ratios.tolist()), *_interval(medians))


def ratio_of_medians(times: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Give the ratio of two medians whose rounds do not belong together, with the interval of a bootstrap over each.

    >>> ratio_of_medians([2.0, 2.0, 2.0], [1.0, 1.0])
    Ratio(value=2.0, low=2.0, high=2.0)
    """
    ours, theirs = (np.median(_resampled(np.asarray(x), seed), axis=1) for seed, x in enumerate((times, baseline)))
    return Ratio(statistics.median(times) / statistics.median(baseline), *_interval(ours / theirs))


def growth_exponent(lengths: Sequence[int], costs: Sequence[float]) -> float:
    """Fit cost = c * length^p and give p.

    >>> round(growth_exponent([64, 128, 256], [1.0, 4.0, 16.0]), 6)
    2.0
    """
    slope, _ = np.polyfit(np.log(lengths), np.log(costs), 1)
    return float(slope)


def _resampled(values: np.ndarray, seed: int = 0) -> np.ndarray:
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    return values[draws]


def _interval(estimates: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(estimates, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)
