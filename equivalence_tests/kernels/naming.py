"""Say what is wrong in a kernel, where its numbers are those that a known mistake gives."""

import math
from collections.abc import Mapping

from torch import Tensor

from equivalence_tests.kernels.formulas import LOG2_E, Problem, backward_formulas, forward_formulas, lse_formulas

UNKNOWN_CAUSE = "the numbers do not say what is wrong here"

__all__ = ["explains", "is_unwritten", "mistakes_in"]

# A mistake is named if it explains all of the error but this part of it.
UNEXPLAINED = 2e-3


def mistakes_in(
    parts: Mapping[str, Tensor], right: Mapping[str, Tensor], wrong: set[str], problem: Problem
) -> list[str]:
    """Name every mistake whose numbers these are: in a small call several give the same.

    Args:
        parts: What the kernel gave: output, dq, dk, dv, and the log-sum-exp as lse.
        right: What is right, in float64.
        wrong: Which of them are wrong.
        problem: The call.

    Returns:
        Sentences without their full stops.
    """
    given = {name: parts[name].detach().double().cpu() for name in parts}
    if "output" in wrong:
        if _overflows(given["output"], problem):
            return ["the maximum is not subtracted before exp, which overflows"]
        judged, formulas = {"output"}, forward_formulas(problem)
    elif "lse" in wrong:
        judged, formulas = {"lse"}, lse_formulas(problem)
    else:
        judged, formulas = wrong, backward_formulas(problem)
    found = [name for name, told in formulas if judged <= set(told) and explains(told, given, right, judged)]
    factors = [_factor_of(name, given[name], right[name], problem) for name in sorted(judged)]
    return found or (["; ".join(factors)] if all(factors) else [])


def _overflows(output: Tensor, problem: Problem) -> bool:
    return bool(problem.scores.numel() and problem.scores.abs().amax() > 80 and not output.isfinite().all())


def explains(
    told: Mapping[str, Tensor], given: Mapping[str, Tensor], right: Mapping[str, Tensor], wrong: set[str]
) -> bool:
    """Say whether the mistake gives what was given, and not what is right."""
    return all(_apart(given[x], told[x]) <= UNEXPLAINED * _apart(given[x], right[x]) for x in wrong)


def _apart(x: Tensor, y: Tensor) -> float:
    """Measure how far two results are apart; infinitely where a number stands against none."""
    if x.shape != y.shape:
        return math.inf
    equal = (x == y) | (x.isnan() & y.isnan())
    far = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(equal, 0.0)
    return min(float(far.max()), 1e30) if far.numel() else 0.0


def _factor_of(name: str, given: Tensor, right: Tensor, problem: Problem) -> str:
    """Name a factor by which all numbers are off."""
    if given.shape != right.shape or not given.isfinite().all():
        return ""
    factor = float((given * right).sum() / right.square().sum())
    if _apart(given, factor * right) > UNEXPLAINED * _apart(given, right):
        return ""
    for words, value in (
        ("0", 0.0),
        ("scaled twice", problem.scale),
        ("not scaled", 1 / problem.scale),
        ("multiplied by ln 2", 1 / LOG2_E),
        ("multiplied by log2(e)", LOG2_E),
        ("of the wrong sign", -1.0),
        ("multiplied by 2", 2.0),
        ("half of what it should be", 0.5),
    ):
        if math.isclose(factor, value, rel_tol=1e-3, abs_tol=1e-6):
            return f"{name} is {words}"
    return f"{name} is multiplied by {factor:.4g}"


def is_unwritten(poisoned: Tensor, plain: Tensor) -> bool:
    """Say whether numbers come from memory that was never written: not a number once all new memory is."""
    return bool((poisoned.isnan() & ~plain.isnan()).any()) if poisoned.shape == plain.shape else False
