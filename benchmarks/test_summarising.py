"""Tests of summarising.py on synthetic timings with known answers."""

import numpy as np
import pytest

from benchmarks.summarising import growth_exponent, is_unstable, median_and_iqr, median_ratio, ratio_of_medians

ROUNDS = 25


def noisy(seconds: float, seed: int, noise: float = 0.05) -> list[float]:
    """Draw timings around a true one."""
    return list(seconds * (1 + noise * np.random.default_rng(seed).standard_normal(ROUNDS)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("summarise", [median_ratio, ratio_of_medians])
def test_a_tenth_is_found_in_noise_of_a_twentieth(summarise: object, seed: int) -> None:
    ratio = (median_ratio if summarise is median_ratio else ratio_of_medians)(noisy(1.1, seed), noisy(1.0, seed + 1000))
    assert ratio.is_clear
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.value == pytest.approx(1.1, rel=0.06)


@pytest.mark.parametrize("summarise", [median_ratio, ratio_of_medians])
def test_where_there_is_no_difference_none_is_found_but_in_few_of_a_hundred(summarise: object) -> None:
    function = median_ratio if summarise is median_ratio else ratio_of_medians
    found = [function(noisy(1.0, seed), noisy(1.0, seed + 1000)).is_clear for seed in range(100)]
    assert sum(found) <= 12  # 95% intervals: about 5, with the luck of 100 draws


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    ratios = [median_ratio(noisy(1.1, seed), noisy(1.0, seed + 1000)) for seed in range(200)]
    assert 0.88 <= np.mean([ratio.low <= 1.1 <= ratio.high for ratio in ratios]) <= 0.99


def test_what_slows_whole_rounds_falls_out_of_the_median_of_the_ratios() -> None:
    load = [1.0, 5.0, 1.0, 3.0, 1.0]
    ratio = median_ratio([2.2 * x for x in load], [2.0 * x for x in load])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


def test_rounds_of_two_runs_are_resampled_apart() -> None:
    times = [1.0, 1.2, 1.4, 1.6, 1.8]
    ratio = ratio_of_medians(times, times)
    assert ratio.low < 0.9 < 1.0 < 1.1 < ratio.high


def test_median_and_spread() -> None:
    assert median_and_iqr([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0)
    assert is_unstable(noisy(1.0, 0, noise=0.2))
    assert not is_unstable(noisy(1.0, 0, noise=0.02))


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.7, 2.0])
def test_the_exponent_of_growth_is_recovered(exponent: float) -> None:
    lengths = [64, 256, 1024, 4096]
    assert growth_exponent(lengths, [3.0 * n**exponent for n in lengths]) == pytest.approx(exponent)
    noise = np.random.default_rng(0).uniform(0.95, 1.05, len(lengths))
    costs = [3.0 * n**exponent * factor for n, factor in zip(lengths, noise, strict=True)]
    assert growth_exponent(lengths, costs) == pytest.approx(exponent, abs=0.05)
