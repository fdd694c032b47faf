"""What the user says is meant so, or may fail: it is told, and not blamed."""

import difflib
from collections.abc import Mapping
from dataclasses import replace

from equivalence_tests.checker.mistakes import MISTAKES
from equivalence_tests.checker.reporting.findings import NOT_JUDGED, CheckResult
from equivalence_tests.checker.reporting.report import Report

OF_ANY_FUNCTION = "changed_by_"  # the names of what no catalogue knows
OF_A_CHECK = "check_"
VALUES = "check_values"  # the one check of a part


def check_meant(meant: Mapping[str, str]) -> Mapping[str, str]:
    """Give the deviations that are on purpose, and the checks that may fail, if each is one that could be.

    Raises:
        ValueError: If a name is none, or has no reason.

    >>> check_meant({"scale_mising": "as T5"})
    Traceback (most recent call last):
    ValueError: meant must name deviations that the checker knows, got 'scale_mising'; is it 'scale_missing'?
    """
    for name, reason in meant.items():
        known = _checks() if name.startswith(OF_A_CHECK) else list(MISTAKES)
        if name not in known and OF_ANY_FUNCTION not in name:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; is it {near[0]!r}?" if near else ""
            raise ValueError(f"meant must name deviations that the checker knows, got {name!r}{hint}")
        if not reason.strip():
            raise ValueError(f"meant must give a reason for {name!r}, got {reason!r}")
    return meant


def _checks() -> list[str]:
    """Name the checks, which torch is loaded for."""
    from equivalence_tests.checker.engine.checks import attention_checks

    return [VALUES, *(check.__name__ for check in attention_checks())]


def accepted(report: Report, meant: Mapping[str, str]) -> Report:
    """Move what is meant so from what is wrong to what is only told.

    Returns:
        The same report; its verdict is another one where nothing wrong is left.
    """
    moved = [replace(finding, meant=meant[finding.name]) for finding in report.findings if finding.name in meant]
    report.findings = [finding for finding in report.findings if finding.name not in meant]
    report.meant += moved
    if not report.findings:
        report.checks = [_excused(check, meant, bool(moved)) for check in report.checks]
        outcomes = {check.outcome for check in report.checks if check.name not in NOT_JUDGED}
        if report.verdict == "deviates" and (moved or "expected" in outcomes) and "failed" not in outcomes:
            report.verdict, report.reason = "partial" if report.not_exercised else "equal", ""
    known = {check.name: check.outcome for check in report.checks}
    idle = [name for name in meant if name.startswith(OF_A_CHECK) and known.get(name) != "expected"]
    report.notes += [f"{name} was expected to fail and did not" for name in idle]
    return report


def _excused(check: CheckResult, meant: Mapping[str, str], moved: bool) -> CheckResult:
    """A check that may fail, or fails for what is meant so alone: it names that, or compares with torch's values."""
    if check.outcome != "failed":
        return check
    named = [meant[name] for name in check.detail.split(", ") if name in meant]
    detail = meant.get(check.name, check.detail)
    excused = check.name in meant or (moved and (named or check.name == VALUES))
    return replace(check, outcome="expected", detail=detail) if excused else check
