"""Judge a part of a Transformer: find the reading with the fewest mistakes that gives its output, and say so."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equivalence_tests.checker.engine.distance import FLOAT32_INSIDE, distance
from equivalence_tests.checker.engine.ran import lines_where, operations_of
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.mistakes import named_mistake, told
from equivalence_tests.checker.reporting.findings import CheckResult
from equivalence_tests.checker.reporting.report import Report

__all__ = ["Observation", "PartReading", "Row", "judge"]

EXACT = 1e-10
# How many readings are measured on every observation where the least difference is asked for.
MEASURED = 5
Observation = tuple[Tensor, Tensor]
Row = tuple[str, str, str]
Call = Callable[[], Any]


@dataclass(frozen=True)
class PartReading:
    """One way to understand a part.

    Args:
        formula: What it computes, from what an observation shows of its input.
        words: The settings that are its conventions: (what, in this code, in torch.nn).
        mistakes: What is wrong in it, by name.
        notes: What else should be known where this reading is right.
    """

    formula: Callable[[Tensor], Tensor]
    words: tuple[Row, ...]
    mistakes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Tried:
    """Readings, the fewest mistakes first, each with its difference on the first observation."""

    readings: list[PartReading]
    first: list[float]
    observations: Sequence[Observation]

    def worst(self, index: int) -> float:
        """The greatest difference of one reading over all observations."""
        return max(_error(self.readings[index], x, output) for x, output in self.observations)

    def matching(self, bound: float) -> list[int]:
        """The readings that give every output to within a bound."""
        near = [index for index, error in enumerate(self.first) if error <= bound]
        return [index for index in near if self.worst(index) <= bound]

    def least(self, mistakes: Iterable[str]) -> float | None:
        """The least difference of the readings with exactly these mistakes; None if there are none."""
        wanted = set(mistakes)
        near = sorted((e, i) for i, e in enumerate(self.first) if set(self.readings[i].mistakes) == wanted)[:MEASURED]
        return min((self.worst(index) for _, index in near), default=None)


def judge(
    name: str,
    kind: str,
    where: str,
    readings: Iterable[PartReading],
    observations: Sequence[Observation],
    calls: Sequence[Call],
) -> Report:
    """Take the reading with the fewest mistakes that gives the output, to rounding or to float32.

    Every reading meets the first observation, and only those that reproduce it meet the others.

    Args:
        name: What it is called.
        kind: What it is, in words.
        where: Path inside a model; "" for the object itself.
        readings: All that are known.
        observations: What was fed to it, or what the formulas want to know of that, and what came back.
        calls: Run it, to see which lines do.

    Returns:
        The report.
    """
    report = Report(name, kind)
    ranked = sorted(readings, key=lambda reading: len(reading.mistakes))
    first: list[float] = []
    for reading in ranked:
        first.append(_error(reading, *observations[0]))
    tried = _Tried(ranked, first, observations)
    for bound in (EXACT, FLOAT32_INSIDE):
        matching = tried.matching(bound)
        if matching:
            return _matched(report, tried, matching, calls, where)
    report.reason = f"No known form reproduces its output; {len(first)} readings were tried. This is not a verdict."
    return report


def _matched(report: Report, tried: _Tried, matching: list[int], calls: Sequence[Call], where: str) -> Report:
    reading = tried.readings[matching[0]]
    report.conventions, report.notes = list(reading.words), list(reading.notes)
    ran = operations_of(*calls) if reading.mistakes else []
    found = [
        told(
            named_mistake(name),
            stack=lines_where(named_mistake(name).ran, ran),
            evidence=_evidence(name, tried, matching[0]),
            alternatives=_alternatives(tried, matching),
            where=where,
            meant=_asked_for(name, ran),
        )
        for name in reading.mistakes
    ]
    report.findings = [finding for finding in found if not finding.meant]
    report.meant = [finding for finding in found if finding.meant]
    blamed = any(not named_mistake(finding.name).expressible for finding in report.findings)
    report.verdict = "deviates" if blamed else "equal"
    difference = tried.least(()) if blamed else tried.worst(matching[0])
    known = "the output is that of what is said above"
    detail = known if difference is None else f"greatest difference {difference:.1g} of the largest value"
    report.checks = [CheckResult("check_values", "failed" if blamed else "passed", detail)]
    return report


def _asked_for(name: str, ran: Sequence[Operation]) -> str:
    """Give the argument that asks torch for what deviates; "" if none does."""
    asked = any(operation.arguments[1].get("approximate") == "tanh" for operation in ran)
    return 'approximate="tanh" asks torch for it' if name == "gelu_approximated" and asked else ""


def _evidence(name: str, tried: _Tried, chosen: int) -> str:
    """Say how exact the reading is, and how far off it is with this one mistake put right and all others kept."""
    count = sum(len(x) for x, _ in tried.observations)
    exact = f"reproduces your output to {tried.worst(chosen):.0e} of its largest value on {count} inputs"
    without = tried.least(other for other in tried.readings[chosen].mistakes if other != name)
    return exact if without is None else f"{exact}; without it the difference is {without:.2g}"


def _alternatives(tried: _Tried, matching: list[int]) -> tuple[str, ...]:
    """Other mistakes, as few of them, that give the same numbers as exactly."""
    mistakes, limit = tried.readings[matching[0]].mistakes, 3 * max(tried.worst(matching[0]), 1e-12)
    others = [
        tried.readings[index].mistakes
        for index in matching[1:]
        if len(tried.readings[index].mistakes) == len(mistakes) and tried.worst(index) <= limit
    ]
    names = dict.fromkeys(name for other in others for name in other if name not in mistakes)
    return tuple(named_mistake(name).sentence for name in names)


def _error(reading: PartReading, x: Tensor, output: Tensor) -> float:
    try:
        return distance(output, reading.formula(x))
    except (RuntimeError, IndexError, ValueError):
        return float("inf")
