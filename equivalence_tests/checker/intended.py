"""What the user says is intended, or may fail: it is reported, and does not count against the code."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from equivalence_tests.checker.equivalent.steps import names_a_step
from equivalence_tests.checker.mistakes import MISTAKES
from equivalence_tests.checker.reporting.findings import NOT_JUDGED, CheckResult
from equivalence_tests.checker.reporting.report import Report

OF_ANY_FUNCTION = "changed_by_"  # the names of what no catalogue knows
OF_A_CHECK = "check_"
VALUES = "check_values"  # the one check of a part


def reasons(options: Sequence[str]) -> dict[str, str]:
    """Read what is given as NAME=REASON; ValueError for anything else.

    >>> reasons(["scale_missing=as T5"])
    {'scale_missing': 'as T5'}
    """
    read = {}
    for option in options:
        name, _, reason = (part.strip() for part in option.partition("="))
        if not (name and reason):
            raise ValueError(f"must be NAME=REASON, got {option!r}")
        read[name] = reason
    return read


def check_intended(intended: Mapping[str, str]) -> Mapping[str, str]:
    """Give the deviations that are on purpose, and the checks that may fail, if each is one that could be.

    >>> check_intended({"scale_mising": "as T5"})
    Traceback (most recent call last):
    ValueError: intended must name deviations that the checker knows, got 'scale_mising'; is it 'scale_missing'?
    """
    for name, reason in intended.items():
        known = list(MISTAKES)
        if name.startswith(OF_A_CHECK):  # torch is loaded only then
            from equivalence_tests.checker.engine.checks import all_checks

            known = [VALUES, *all_checks()]
        if name not in known and OF_ANY_FUNCTION not in name and not names_a_step(name):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; is it {near[0]!r}?" if near else ""
            raise ValueError(f"intended must name deviations that the checker knows, got {name!r}{hint}")
        if not reason.strip():
            raise ValueError(f"intended must give a reason for {name!r}, got {reason!r}")
    return intended


def accepted(report: Report, intended: Mapping[str, str]) -> Report:
    """Move what is intended from what is wrong to what is only listed, which may change the verdict."""
    moved = [replace(finding, reason=intended[finding.name]) for finding in report.findings if finding.name in intended]
    report.findings = [finding for finding in report.findings if finding.name not in intended]
    report.intended += moved
    if not report.findings:
        report.checks = [_excused(check, intended, bool(moved)) for check in report.checks]
        outcomes = {check.outcome for check in report.checks if check.name not in NOT_JUDGED}
        if report.verdict == "deviates" and (moved or "expected" in outcomes) and "failed" not in outcomes:
            report.verdict, report.reason = "partial" if report.not_exercised else "equal", ""
    known = {check.name: check.outcome for check in report.checks}
    idle = [name for name in intended if name.startswith(OF_A_CHECK) and known.get(name) != "expected"]
    report.notes += [f"{name} was expected to fail and did not" for name in idle]
    return report


def _excused(check: CheckResult, intended: Mapping[str, str], moved: bool) -> CheckResult:
    """A check that may fail, or fails for what is intended alone: it names that, or compares with torch's values."""
    if check.outcome != "failed":
        return check
    named = [intended[name] for name in check.detail.split(", ") if name in intended]
    detail = intended.get(check.name, check.detail)
    excused = check.name in intended or (moved and (named or check.name == VALUES))
    return replace(check, outcome="expected", detail=detail) if excused else check
