"""What the user says is meant so: it is told, and not blamed."""

import difflib
from collections.abc import Mapping
from dataclasses import replace

from equivalence_tests.checker.mistakes import MISTAKES
from equivalence_tests.checker.reporting.findings import CheckResult
from equivalence_tests.checker.reporting.report import Report

OF_ANY_FUNCTION = "changed_by_"  # the names of what no catalogue knows


def check_meant(meant: Mapping[str, str]) -> Mapping[str, str]:
    """Give the deviations that are on purpose, name -> reason, if each is one that could be found.

    Args:
        meant: What the user says.

    Raises:
        ValueError: If a name is none, or has no reason.

    >>> check_meant({"scale_mising": "as T5"})
    Traceback (most recent call last):
    ValueError: meant must name deviations that the checker knows, got 'scale_mising'; is it 'scale_missing'?
    """
    for name, reason in meant.items():
        if name not in MISTAKES and OF_ANY_FUNCTION not in name:
            near = difflib.get_close_matches(name, MISTAKES, n=1)
            hint = f"; is it {near[0]!r}?" if near else ""
            raise ValueError(f"meant must name deviations that the checker knows, got {name!r}{hint}")
        if not reason.strip():
            raise ValueError(f"meant must give a reason for {name!r}, got {reason!r}")
    return meant


def accepted(report: Report, meant: Mapping[str, str]) -> Report:
    """Move what is meant so from what is wrong to what is only told.

    Args:
        report: What was found.
        meant: Which deviations are on purpose, by name, each with the reason.

    Returns:
        The same report; its verdict is another one where nothing wrong is left.
    """
    moved = [replace(finding, meant=meant[finding.name]) for finding in report.findings if finding.name in meant]
    report.findings = [finding for finding in report.findings if finding.name not in meant]
    report.meant += moved
    if moved and not report.findings:
        report.checks = [_excused(check, meant) for check in report.checks]
        if report.verdict == "deviates" and not any(check.outcome == "failed" for check in report.checks):
            report.verdict, report.reason = "partial" if report.not_exercised else "equal", ""
    return report


def _excused(check: CheckResult, meant: Mapping[str, str]) -> CheckResult:
    """A check that fails for what is meant so alone: it names that, or holds the values against torch's."""
    named = [meant[name] for name in check.detail.split(", ") if name in meant]
    of_values = check.name == "check_values"
    return replace(check, outcome="expected") if check.outcome == "failed" and (named or of_values) else check
