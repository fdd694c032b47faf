"""Whether the checker finds the mistakes that were put into the attentions of one model."""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from rich import box
from rich.table import Table

from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.lines import CodeLine
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.wild.checking import Attention, Part, attentions_in, described, part_of, verdict_of
from equivalence_tests.wild.models import WildModel
from equivalence_tests.wild.mutants import Mutant, broken, mutants_of

__all__ = ["mutant_summary", "mutant_table", "rows_of_mutants"]

MEASURES = ("found", "on_the_line", "in_the_stack", "named")


def rows_of_mutants(
    wild: WildModel,
    known: Collection[str],
    part: Part | None,
    judge: Callable[[Attention], Report],
    seed: int,
    each: int,
) -> Iterator[dict[str, Any]]:
    """Break every attention of a model that is not known yet, and say what the checker said about each mistake."""
    for attention in attentions_in(wild, known):
        if part not in (None, part_of(attention.name)):
            continue
        whole = _report(attention, judge)
        yield _whole_row(attention, whole)
        for mutant in mutants_of(attention, seed, each):
            started = time.process_time()
            with broken(attention, mutant):
                report = _report(attention, judge)
            yield _mutant_row(attention, mutant, whole, report, time.process_time() - started)


def _report(attention: Attention, judge: Callable[[Attention], Report]) -> Report:
    try:
        return judge(attention)
    except Exception as error:  # counted as not found, with the reason
        return Report(attention.name, reason=f"the checker raised {type(error).__name__}: {error}")


def _whole_row(attention: Attention, report: Report) -> dict[str, Any]:
    return {**_place(attention), "key": attention.key, "verdict": verdict_of(report)}


def _place(attention: Attention) -> dict[str, str]:
    return {
        "library": attention.library,
        "model": attention.model,
        "name": attention.name,
        "path": attention.path,
        "implementation": attention.implementation,
    }


def _mutant_row(attention: Attention, mutant: Mutant, whole: Report, report: Report, seconds: float) -> dict[str, Any]:
    """What deviates in the code as published is no answer to the mistake that was put in."""
    said_before = {(finding.name, finding.line) for finding in whole.findings}
    new = [finding for finding in report.findings if (finding.name, finding.line) not in said_before]
    found = report.verdict == "deviates" and bool(new)
    return {
        **_place(attention),
        "key": f"{attention.key}; {mutant.operator.name}; {sorted(mutant.places)}; {mutant.before}; {mutant.after}",
        "operator": mutant.operator.name,
        "lines": [f"{_in_library(path)}:{number}" for path, number in sorted(mutant.places)],
        "before": mutant.before,
        "after": mutant.after,
        "whole": verdict_of(whole),
        "verdict": verdict_of(report),
        "found": found,
        "on_the_line": found and any(_is_there(finding, mutant) for finding in new),
        "in_the_stack": found and any(_calls_it(finding, mutant) for finding in new),
        "named": found and any(re.search(mutant.operator.named, finding.name) is not None for finding in new),
        "findings": [described(finding) for finding in new],
        "reason": report.reason,
        "seconds": round(seconds, 3),
    }


# Changes of what is handed to a function of the user's: the lines in it do the rest.
HANDED_OVER = ("change scale", "change scale in the constructor", "swap roles", "drop mask", "wrong mask")


def _is_there(finding: Finding, mutant: Mutant) -> bool:
    """Whether a finding blames a line that was changed, or one that such a line calls with the wrong argument."""
    blamed = finding.stack if mutant.operator.name in HANDED_OVER else finding.stack[-1:]
    return _any_changed(blamed, mutant)


def _calls_it(finding: Finding, mutant: Mutant) -> bool:
    return _any_changed(finding.stack, mutant)


def _any_changed(lines: Iterable[CodeLine], mutant: Mutant) -> bool:
    changed = {(_in_library(path), number) for path, number in mutant.places}
    return any((_in_library(line.path), line.number) in changed for line in lines)


def _in_library(path: str) -> str:
    return path.rpartition("site-packages/")[2]


def mutant_summary(mutants: Collection[dict[str, Any]]) -> dict[str, Any]:
    """Count what was found, all together and for each kind of mistake.

    >>> one = {"operator": "abs", "found": True, "on_the_line": True, "in_the_stack": True, "named": False}
    >>> mutant_summary([one])["abs"]
    {'mutants': 1, 'found': 1, 'on_the_line': 1, 'in_the_stack': 1, 'named': 0}
    """
    kinds = sorted({one["operator"] for one in mutants})
    groups = {"all": list(mutants)} | {kind: [one for one in mutants if one["operator"] == kind] for kind in kinds}
    return {
        name: {"mutants": len(group)} | {measure: sum(one[measure] for one in group) for measure in MEASURES}
        for name, group in groups.items()
    }


def mutant_table(mutants: Collection[dict[str, Any]]) -> Table:
    """Lay the counts out, a kind of mistake a row."""
    made = Table("mistake", "mutants", "found", "on the line", "in the stack", "named", box=box.SIMPLE)
    for name, counts in mutant_summary(mutants).items():
        total = counts["mutants"]
        shares = [f"{counts[measure]} ({100 * counts[measure] / max(total, 1):.0f} %)" for measure in MEASURES]
        made.add_row(name, str(total), *shares)
    return made
