"""Judge a part of a Transformer: find the reading with the fewest mistakes that gives its output, and say so."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from equivalence_tests.checker.engine.ran import frames_where, operations_of
from equivalence_tests.checker.engine.same import FLOAT32_INSIDE, distance
from equivalence_tests.checker.equivalent.writer import Text, Writer
from equivalence_tests.checker.mistakes import found_mistake, named_mistake
from equivalence_tests.checker.reporting.findings import CheckResult
from equivalence_tests.checker.reporting.lines import code_lines
from equivalence_tests.checker.reporting.report import Report

EXACT = 1e-10
# What nobody writes by mistake.
INTENDED = {
    "activation_exchanged": "torch's layers take any function for it",
    "gelu_approximated": "its formula is the approximation",
}
# What the source that they are copied from does together.
AS_IN = {
    frozenset({"norm_unbiased_std", "norm_eps_outside"}): "both are the LayerNorm of The Annotated Transformer",
}
# How many readings are measured on every observation where the least difference is asked for.
MEASURED = 5
Observation = tuple[Tensor, Tensor]
Row = tuple[str, str, str]
Call = Callable[[], Any]


@dataclass(frozen=True)
class PartReading:
    """One way to understand a part."""

    formula: Callable[[Tensor], Tensor]  # what it computes, from what an observation shows of its input
    words: tuple[Row, ...]  # the settings that are its conventions: (what, in this code, in torch.nn)
    mistakes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what else should be known where this reading is right
    facts: Mapping[str, str] = field(default_factory=dict)  # what the words of its mistakes speak of
    # Writes it down in torch's own parts; None where the formula does, given the text of its input.
    written: Callable[[Writer, Text], Text] | None = None

    def text(self, writer: Writer, x: Text) -> Text:
        """Write down what it makes of its input."""
        return self.formula(x) if self.written is None else self.written(writer, x)  # type: ignore[arg-type, return-value]

    def beside(
        self, words: tuple[Row, ...], mistakes: tuple[str, ...] = (), notes: tuple[str, ...] = ()
    ) -> "PartReading":
        """Add what was found out about the call."""
        return replace(
            self, words=(*self.words, *words), mistakes=(*mistakes, *self.mistakes), notes=(*self.notes, *notes)
        )


def is_right(mistakes: Iterable[str]) -> bool:
    """Whether there is no mistake, but for what nobody writes by mistake."""
    return INTENDED.keys() >= {*mistakes}


@dataclass(frozen=True)
class Judged:
    """What is said of a part, the reading that fits, and how exactly that gives the output."""

    report: Report
    reading: PartReading | None = None
    bound: float = EXACT


@dataclass(frozen=True)
class _Tried:
    """Readings, the fewest mistakes first; of those that were asked for, the differences on the first observation."""

    readings: list[PartReading]
    observations: Sequence[Observation]
    errors: dict[int, float] = field(default_factory=dict)

    def first(self, place: int) -> float:
        """The difference of one reading on the first observation."""
        if place not in self.errors:
            self.errors[place] = _error(self.readings[place], *self.observations[0])
        return self.errors[place]

    def worst(self, reading: PartReading) -> float:
        """The greatest difference of one reading over all observations."""
        return max(_error(reading, x, output) for x, output in self.observations)

    def matching(self, bound: float) -> PartReading | None:
        """The first reading that gives every output to within a bound."""
        near = (reading for place, reading in enumerate(self.readings) if self.first(place) <= bound)
        return next((reading for reading in near if self.worst(reading) <= bound), None)

    def least(self, mistakes: set[str]) -> float | None:
        """The least difference of the readings with exactly these mistakes; None if there are none."""
        alike = [place for place, reading in enumerate(self.readings) if set(reading.mistakes) == mistakes]
        near = sorted(alike, key=self.first)[:MEASURED]
        return min((self.worst(self.readings[place]) for place in near), default=None)


def judge(
    report: Report,
    readings: Iterable[PartReading],
    observations: Sequence[Observation],
    calls: Sequence[Call],
    where: str,
    owner: str = "",
) -> Judged:
    """Take the reading with the fewest mistakes that gives the output, to rounding or to float32.

    One reading after the other meets the first observation, and only those that reproduce it meet the others. The
    calls run it, to see which lines do; ``owner`` is the name of its class.
    """
    ranked = sorted(readings, key=lambda reading: len(reading.mistakes))
    tried = _Tried(ranked, observations)
    for bound in (EXACT, FLOAT32_INSIDE):
        if matching := tried.matching(bound):
            return Judged(_matched(report, tried, matching, calls, where, owner), matching, bound)
    report.reason = f"No known form reproduces its output; {len(ranked)} readings were tried. This is not a verdict."
    return Judged(report)


def _matched(
    report: Report, tried: _Tried, chosen: PartReading, calls: Sequence[Call], where: str, owner: str
) -> Report:
    report.conventions, report.notes = list(chosen.words), list(chosen.notes)
    ran = operations_of(*calls) if chosen.mistakes else []
    found = [
        found_mistake(
            name,
            chosen.facts,
            stack=code_lines(frames_where(named_mistake(name).ran, ran)),
            evidence=_evidence(name, tried, chosen),
            where=where,
            reason=_reason(name, chosen.mistakes, owner),
        )
        for name in chosen.mistakes
    ]
    report.findings = [finding for finding in found if not finding.reason]
    report.intended = [finding for finding in found if finding.reason]
    report.verdict = "deviates" if report.findings else "equal"
    difference = tried.least(set()) if report.findings else tried.worst(chosen)
    known = "the output is that of the formula above"
    detail = known if difference is None else f"greatest difference {difference:.1g} of the largest value"
    report.checks = [CheckResult("check_values", "failed" if report.findings else "passed", detail)]
    return report


def _reason(name: str, mistakes: Iterable[str], owner: str) -> str:
    """Say why a mistake is none in this class; "" if it is one."""
    together = next((why for names, why in AS_IN.items() if name in names and names.issubset(mistakes)), "")
    return INTENDED.get(name, "") or together or named_mistake(name).as_named([owner])


def _evidence(name: str, tried: _Tried, chosen: PartReading) -> str:
    """Say how exact the reading is, and how far off it is with this one mistake put right and all others kept."""
    count = sum(len(x) for x, _ in tried.observations)
    exact = f"reproduces your output to {tried.worst(chosen):.0e} of its largest value on {count} inputs"
    without = tried.least(set(chosen.mistakes) - {name})
    return exact if without is None else f"{exact}; without it the difference is {without:.2g}"


def _error(reading: PartReading, x: Tensor, output: Tensor) -> float:
    try:
        return distance(output, reading.formula(x))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return float("inf")
