"""python -m equivalence_tests.checker.zoo.confusion: every class of the zoo, what it is and what the checker said."""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo.listing import Case, zoo

__all__ = ["Judged", "judge", "judged_case", "run"]


@dataclass(frozen=True)
class Judged:
    """What the checker said about one class.

    Args:
        case: The class and what should be said.
        found: Whether a mistake was found at all; for a correct class, whether none was.
        named: Whether exactly the right mistakes were named.
        said: The verdict and the names.
    """

    case: Case
    found: bool
    named: bool
    said: str


def judge(case: Case, report: Report) -> Judged:
    """Compare a report with what is true.

    Args:
        case: The truth.
        report: What was said.

    Returns:
        Whether it is right.
    """
    names = set(report.mistakes) - ({"weights_not_those_used"} if case.expected else set())
    said = f"{report.verdict}: {', '.join(report.mistakes)}" if report.mistakes else report.verdict
    if not case.expected:
        return Judged(case, report.verdict == "equal", report.verdict == "equal" and not names, said)
    each_named = all(names & set(allowed) for allowed in case.expected)
    nothing_else = names <= {name for allowed in case.expected for name in allowed}
    return Judged(case, bool(names), each_named and nothing_else, said)


def judged_case(index: int) -> Judged:
    """Verify one class of the zoo, by its place in the list: classes made at run time cannot cross processes."""
    torch.set_num_threads(1)
    case = zoo()[index]
    return judge(replace(case, target=case.label), verify(case.target))


def run(jobs: int, console: Console | None = None) -> list[Judged]:
    """Verify every class of the zoo and print the confusion matrix.

    Args:
        jobs: Number of processes.
        console: Where to print.

    Returns:
        One judgement for each class.
    """
    console = console or Console()
    total = len(zoo())
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(judged_case, range(total))
        judged = list(track(results, "verifying", total, console=Console(stderr=True), transient=True))
    console.print(_table(judged))
    for wrong in (j for j in judged if not (j.found and j.named)):
        console.print(f"  {wrong.case.label}: {wrong.said}; expected {wrong.case.expected or 'equal'}")
    return judged


def _table(judged: list[Judged]) -> Table:
    table = Table(title="what it is, and how often the checker said so")
    for heading in ("row", "classes", "found", "named"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    for row in dict.fromkeys(j.case.row for j in judged):
        group = [j for j in judged if j.case.row == row]
        table.add_row(row, str(len(group)), str(sum(j.found for j in group)), str(sum(j.named for j in group)))
    broken = [j for j in judged if j.case.expected]
    table.add_section()
    table.add_row("all broken", str(len(broken)), str(sum(j.found for j in broken)), str(sum(j.named for j in broken)))
    correct = [j for j in judged if not j.case.expected]
    table.add_row("false alarms", str(len(correct)), str(sum(not j.found for j in correct)), "")
    return table


def main() -> None:
    """Print the matrix; exit with 1 if anything was missed, misnamed or blamed wrongly."""
    judged = run(jobs=os.cpu_count() or 1)
    sys.exit(0 if all(j.found and j.named for j in judged) else 1)


if __name__ == "__main__":
    main()
