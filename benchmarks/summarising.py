"""What many timings say: medians, spread, ratios with their uncertainty, and how cost grows."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Ratio",
    "growth_exponent",
    "median_and_iqr",
    "ratio_in_turns",
    "ratio_of_medians",
    "why_unstable",
]

UNSTABLE_SPREAD = 0.10
UNSTABLE_DRIFT = 0.05
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


def why_unstable(times: Sequence[float], baseline: Sequence[float] | None = None) -> str:
    """Say why times cannot be relied on.

    Args:
        times: The time of each round.
        baseline: That of the baseline in the same rounds.

    Returns:
        A few words if the middle half of the times spreads over more than a tenth of their median, or if the ratio to
        the baseline is another by more than a twentieth when it is taken round by round. Else "".

    >>> why_unstable([1.0, 1.01, 1.02])
    ''
    >>> why_unstable([1.0, 1.5, 2.0])
    'its times spread by 33%'
    """
    median, iqr = median_and_iqr(times)
    if iqr > UNSTABLE_SPREAD * median:
        return f"its times spread by {iqr / median:.0%}"
    if baseline is None:
        return ""
    by_round = statistics.median(x / y for x, y in zip(times, baseline, strict=True))
    of_medians = median / statistics.median(baseline)
    if abs(by_round / of_medians - 1) > UNSTABLE_DRIFT:
        return f"round by round the ratio is {by_round:.2f}"
    return ""


def ratio_in_turns(times: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Give the ratio of two medians, with the interval of a bootstrap over the rounds that both ran in.

    A round is drawn for both or for neither: what slows a whole round slows both, and widens the interval little.

    Args:
        times: The time of each round.
        baseline: That of the baseline in the same rounds.

    Returns:
        The ratio of the medians, as they are printed beside it, and its interval.

    >>> ratio_in_turns([2.0, 20.0, 4.2], [1.0, 10.0, 2.1])
    Ratio(value=2.0, low=2.0, high=2.0)
    """
    ours, theirs = (np.median(_resampled(np.asarray(x)), axis=1) for x in (times, baseline))
    return Ratio(statistics.median(times) / statistics.median(baseline), *_interval(ours / theirs))


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
