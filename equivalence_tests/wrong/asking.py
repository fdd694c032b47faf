"""The one place that reads the checker's report: what it answers about a file, in words that stay."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify

__all__ = ["EQUAL", "INTENDED", "VERDICTS", "Answer", "answer_of", "asked"]

EQUAL, INTENDED = "equal", "equal except where intended"
VERDICTS = (EQUAL, INTENDED, "partial", "deviates", "unchecked")
SEVERITY = ("equal", "partial", "unchecked", "deviates")  # of several attentions in one call the worst speaks


@dataclass(frozen=True)
class Answer:
    """What the checker said.

    Args:
        verdict: One of ``VERDICTS``.
        names: Of the findings.
        lines: Numbers of the lines that are blamed.
        intended: The steps that are taken for intended, each with its evidence, and the meanings of masks.
        reason: Why there is no verdict.
        seconds: CPU time that it took.
    """

    verdict: str
    names: tuple[str, ...]
    lines: tuple[int, ...]
    intended: tuple[str, ...]
    reason: str
    seconds: float


def asked(path: Path, target: Any, inputs: Any = None) -> Answer:
    """Let the checker verify a class in a file, or an instance with its inputs."""
    started = time.process_time()
    found = verify(target, inputs)
    reports = found if isinstance(found, list) else [found]
    worst = max(reports, key=lambda one: SEVERITY.index(one.verdict) if one.verdict in SEVERITY else 0)
    return answer_of(worst, path, time.process_time() - started)


def answer_of(report: Report, path: Path, seconds: float = 0.0) -> Answer:
    """Read a report.

    Args:
        report: What the checker said.
        path: The file that was checked; lines of others are no answer.
        seconds: CPU time that it took.

    >>> answer_of(Report("x", verdict="equal"), Path("x.py")).verdict
    'equal'
    """
    intended = tuple(f"{one.name}: {one.sentence} ({one.reason})" for one in report.intended)
    verdict = INTENDED if report.verdict == "equal" and intended else report.verdict
    intended += tuple(f"{what}: {found}" for what, found, _ in report.conventions if what.startswith("mask ("))
    blamed = (finding.line for finding in report.findings)
    lines = tuple(line.number for line in blamed if line is not None and Path(line.path).name == path.name)
    return Answer(verdict, report.mistakes, lines, intended, report.reason, round(seconds, 3))
