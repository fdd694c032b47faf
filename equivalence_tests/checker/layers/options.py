"""Check a layer once more, built with the other values that its constructor takes."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from equivalence_tests.checker.engine.coverage import built_alike, never_asked
from equivalence_tests.checker.reach.configs import switched
from equivalence_tests.checker.reach.proposing import other_options
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reporting.findings import Exercise, Finding
from equivalence_tests.checker.reporting.report import Report

Examine = Callable[[Subject, str], Report]
CROSS = re.compile(r"cross|memory|context|encoder")
OF_ITSELF = re.compile(r"self_?att")
OF_NORMS = re.compile(r"(pre|post)[-_ ]?(norm|ln|layer_?norm)?", re.IGNORECASE)  # where they stand, and nothing else
NO_MEMORY = "cross_attention_from_decoder"


def with_memory(report: Report, subject: Subject, examine: Examine) -> Report:
    """Check a class that takes no keys from its memory once more with the option that asks for them."""
    target: Any = type(subject.function)
    options = other_options(target) if subject.built and NO_MEMORY in {one.name for one in report.findings} else ()
    asking = {True: CROSS, False: OF_ITSELF}
    for name, value in ((name, x) for name, x in options if isinstance(x, bool) and asking[x].search(name)):
        other = built_alike(target, subject, **{name: value})
        found = examine(replace(subject, function=other), report.target) if other is not None else report
        if NO_MEMORY not in {one.name for one in found.findings}:
            return found
    return report


def with_options(report: Report, subject: Subject, examine: Examine) -> Report:
    """Check a class that is right once more with each other string that its constructor takes, and as a decoder's."""
    target: Any = type(subject.function)
    if report.verdict not in ("equal", "partial") or not subject.built:
        return report
    own = [(f"{name}={x}", x, {name: x}) for name, x in other_options(target)]
    of_config = [(what, x, given) for what, _, x, given in switched(subject.function) if isinstance(x, str)]
    for what, value, given in [*own, *of_config]:
        if not (isinstance(value, str) or (value is True and CROSS.search(what))):
            continue
        other = built_alike(target, subject, **given)
        if other is None:
            report.coverage.append(Exercise(what, False, "no way to build it with that was found"))
            continue
        found = examine(replace(subject, function=other), report.target)
        with_it = [one for one in found.findings if _is_unasked(one, value)]
        report.findings += [
            replace(one, evidence="; ".join(filter(None, (one.evidence, f"built with {what}")))) for one in with_it
        ]
        if value is True and found.verdict != "unchecked":
            report.coverage = [*_run_in(report.coverage, found, what)]
        asked = ", ".join(one.name for one in found.findings if one not in with_it)
        reason = f"it deviates then, which may be intended: {asked}" * bool(asked) or found.reason
        unread = [Exercise(what, False, reason)] if reason else found.not_exercised
        report.coverage += [replace(one, what=what if one.what == what else f"{one.what}, {what}") for one in unread]
    report.verdict = "deviates" if report.findings else "partial" if report.not_exercised else "equal"
    return report


def _is_unasked(finding: Finding, value: object) -> bool:
    """Whether an option of such a value does not ask for what was found: one of norms says where they stand alone."""
    of_norms = isinstance(value, str) and OF_NORMS.fullmatch(value) is not None
    wired = finding.stage == "wiring" and finding.proof is not None
    return value is True or never_asked(finding) or (of_norms and wired)


def _run_in(coverage: list[Exercise], other: Report, what: str) -> Iterator[Exercise]:
    """Note of what was not run that it was in the same class, built with an option."""
    left = {one.what for one in other.not_exercised}
    for one in coverage:
        yield one if one.exercised or one.what in left else replace(one, exercised=True, detail=f"built with {what}")
