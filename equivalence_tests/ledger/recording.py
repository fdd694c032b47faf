"""A plugin of pytest that writes down each report of the checker that a test asks for."""

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.report import Report

__all__ = ["row_of"]

Row = dict[str, Any]


def row_of(target: str, report: Report, seconds: float) -> Row:
    """Give what a report says, without what only its wording or the place of a line in its file changes.

    Args:
        target: What to call it.
        report: What was said.
        seconds: CPU time that it took.
    """
    return {
        "target": target,
        "verdict": report.verdict,
        "found": sorted(map(_of_finding, report.findings)),
        "intended": sorted({finding.name for finding in report.intended}),
        "not_run": sorted({exercise.what for exercise in report.not_exercised}),
        "failed": sorted(check.name for check in report.checks if check.outcome == "failed"),
        "program": report.equivalent is not None,
        "seconds": round(seconds, 2),
    }


def _of_finding(finding: Finding) -> str:
    """Name, line and proof of a mistake in one line."""
    proof = "no proof" if finding.proof is None else "proven" if finding.proof.holds else "not proven"
    line = "no line" if finding.line is None else f"`{finding.line.text}`"
    return f"{finding.name}, {proof}, {line}"


class Recorder:
    """Writes a row for each report that a test asks for; what the checker asks itself is left out."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'all')}.jsonl"
        self.test, self.number, self.inside = "", 0, False

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Start to count the reports of a test."""
        self.test, self.number = item.nodeid.removeprefix("equivalence_tests/"), 0

    def recorded(self, function: Callable[..., Sequence[Report]]) -> Callable[..., Sequence[Report]]:
        """Give a function that makes reports, which are written down too."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Sequence[Report]:
            if self.inside:
                return function(*args, **kwargs)
            self.inside, started = True, time.process_time()
            try:
                reports = function(*args, **kwargs)
            finally:
                self.inside = False
            self._write(reports, (time.process_time() - started) / max(len(reports), 1))
            return reports

        return call

    def _write(self, reports: Sequence[Report], seconds: float) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for report in reports:
                self.number += 1
                row = row_of(f"{self.test} {self.number}", report, seconds)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the folder that the rows are written into."""
    parser.addoption("--ledger", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Take the place of the two doors, before any test imports them."""
    recorder = Recorder(config.getoption("--ledger"))
    config.pluginmanager.register(recorder)
    for module, name in (("equivalent.calls", "diagnose_call"), ("verify", "_guarded")):
        door = import_module(f"equivalence_tests.checker.{module}")
        setattr(door, name, recorder.recorded(getattr(door, name)))
