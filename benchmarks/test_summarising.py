"""Tests of summarising.py on synthetic timings with known answers."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.summarising import (
    Ratio,
    growth_exponent,
    median_and_iqr,
    ratio_in_turns,
    ratio_of_medians,
    why_unstable,
)

ROUNDS = 25


def noisy(seconds: float, seed: int, noise: float = 0.05) -> list[float]:
    """Draw timings around a true one."""
    return list(seconds * (1 + noise * np.random.default_rng(seed).standard_normal(ROUNDS)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("summarise", [ratio_in_turns, ratio_of_medians])
def test_a_tenth_is_found_in_noise_of_a_twentieth(summarise: object, seed: int) -> None:
    ratio = (ratio_in_turns if summarise is ratio_in_turns else ratio_of_medians)(
        noisy(1.1, seed), noisy(1.0, seed + 1000)
    )
    assert ratio.is_clear
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.value == pytest.approx(1.1, rel=0.06)


@pytest.mark.parametrize("summarise", [ratio_in_turns, ratio_of_medians])
def test_where_there_is_no_difference_none_is_found_but_in_few_of_a_hundred(summarise: object) -> None:
    function = ratio_in_turns if summarise is ratio_in_turns else ratio_of_medians
    found = [function(noisy(1.0, seed), noisy(1.0, seed + 1000)).is_clear for seed in range(100)]
    assert sum(found) <= 12  # 95% intervals: about 5, with the luck of 100 draws


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    ratios = [ratio_in_turns(noisy(1.1, seed), noisy(1.0, seed + 1000)) for seed in range(200)]
    assert 0.88 <= np.mean([ratio.low <= 1.1 <= ratio.high for ratio in ratios]) <= 0.99


def test_what_slows_whole_rounds_falls_out_of_the_interval() -> None:
    load = [1.0, 5.0, 1.0, 3.0, 1.0]
    ratio = ratio_in_turns([2.2 * x for x in load], [2.0 * x for x in load])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


@pytest.mark.parametrize("summarise", [ratio_in_turns, ratio_of_medians])
def test_the_ratio_is_that_of_the_medians_that_are_printed(summarise: Callable[..., Ratio]) -> None:
    times, baseline = [500.0, 510.0, 503.0, 420.0, 610.0], [119.0, 140.0, 190.0, 121.0, 130.0]
    assert summarise(times, baseline).value == 503.0 / 130.0


def test_rounds_of_two_runs_are_resampled_apart() -> None:
    times = [1.0, 1.2, 1.4, 1.6, 1.8]
    ratio = ratio_of_medians(times, times)
    assert ratio.low < 0.9 < 1.0 < 1.1 < ratio.high


def test_median_and_spread() -> None:
    assert median_and_iqr([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0)
    assert why_unstable(noisy(1.0, 0, noise=0.2)).startswith("its times spread by ")
    assert why_unstable(noisy(1.0, 0, noise=0.02)) == ""


def test_a_ratio_is_unstable_where_the_rounds_contradict_the_medians() -> None:
    times, baseline = [1.0, 1.0, 1.0, 1.0, 1.04], [1.2, 1.2, 1.0, 1.0, 1.4]
    assert why_unstable(times) == why_unstable(times, times) == ""
    assert why_unstable(times, baseline) == ""  # 0.83 either way
    assert why_unstable([1.04, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.2, 1.2, 1.2]) == ""
    assert why_unstable([1.0, 1.0, 1.0, 1.08, 1.08], [1.0, 1.0, 1.3, 1.3, 1.3]) == "round by round the ratio is 0.83"


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.7, 2.0])
def test_the_exponent_of_growth_is_recovered(exponent: float) -> None:
    lengths = [64, 256, 1024, 4096]
    assert growth_exponent(lengths, [3.0 * n**exponent for n in lengths]) == pytest.approx(exponent)
    noise = np.random.default_rng(0).uniform(0.95, 1.05, len(lengths))
    costs = [3.0 * n**exponent * factor for n, factor in zip(lengths, noise, strict=True)]
    assert growth_exponent(lengths, costs) == pytest.approx(exponent, abs=0.05)
