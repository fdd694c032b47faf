"""A run over many cases: progress, rows kept as they come, and what is shown and written at the end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.cases import Case
from benchmarks.children import run_case_safely
from benchmarks.contenders import contenders_of
from benchmarks.environment import environment_of
from benchmarks.plots import Picture, pictures, save_pictures
from benchmarks.report import html_page
from benchmarks.results import Row, append_rows, read_rows, without_cut_line, write_csv
from benchmarks.tables import result_tables
from scratch.validation import ArgumentValueError, check_writable

__all__ = ["RESULTS", "Plan", "measure", "write_report"]

RESULTS = "results.jsonl"
INTERRUPTED = 130  # what a shell says of a command that was ended by ctrl-c


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and where it is kept.

    Args:
        cases: What.
        chosen: Names of the contenders.
        seconds: Time for the rounds of each case, about.
        output: A folder, or None to keep nothing.
        limit_bytes: Memory that a large case may take on the CPU; what is available if not given.
    """

    cases: Sequence[Case]
    chosen: Sequence[str]
    seconds: float
    output: Path | None
    limit_bytes: int | None = None

    def begin(self, resume: bool) -> list[Row]:
        """Make the folder, and read what an earlier run has left in it.

        Args:
            resume: Whether to go on with that.

        Returns:
            The rows that are there.

        Raises:
            ValueError: If the folder cannot be written, if it has results and they are not to be gone on with, or if
                they cannot be read.
        """
        if self.output is None:
            if resume:
                raise ArgumentValueError("--resume needs --output, the folder of the run that it goes on with")
            return []
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentValueError(f"output must be a folder that can be made, got {self.output}: {error}") from error
        path = self.output / RESULTS
        check_writable(path)
        if not path.exists():
            return []
        if not resume:
            raise ArgumentValueError(f"{path} is there already: go on with --resume, or name another folder")
        without_cut_line(path)
        return read_rows(path) if path.stat().st_size else []

    def keep(self, rows: Sequence[Row]) -> None:
        """Add rows to the file."""
        if self.output is not None:
            append_rows(self.output / RESULTS, rows)

    def missing(self, done: Iterable[Row]) -> list[Case]:
        """List the cases of which a contender was not measured yet."""
        have = {(row.case, row.contender) for row in done}
        return [
            case for case in self.cases if any((case, x.name) not in have for x in contenders_of(case, self.chosen))
        ]


def measure(plan: Plan, done: Sequence[Row]) -> int:
    """Measure what is missing, show everything, and write what is made of it.

    Args:
        plan: What is to be measured.
        done: What was measured before.

    Returns:
        The exit status: 0 if all contenders are equal, 1 if one is not, 130 if interrupted.
    """
    console = Console(highlight=False, emoji=False)
    _show_grounds(plan, done, console)
    rows, interrupted = _measured(plan, done)
    for table in result_tables(rows):
        console.print(table)
    console.print("Each cell: median time, ratio to builtin, peak memory. ~ is unstable; yellow may be equal.")
    if plan.output is None:
        console.print("Nothing is kept; --output FOLDER keeps rows, plots and a page.")
    else:
        write_report(rows, plan.output, console)
    if interrupted:
        console.print("[yellow]Interrupted:[/] what was measured is above; --resume goes on with what is in a folder.")
        return INTERRUPTED
    return int(any(row.status == "unequal" for row in rows))


def _show_grounds(plan: Plan, done: Sequence[Row], console: Console) -> None:
    """Say where is measured, and on what else something was before."""
    here = {str(environment_of(torch.device(device))) for device in {case.device for case in plan.cases}}
    for ground in sorted(here):
        console.print(f"[bold]{ground}[/]")
    for ground in sorted({str(row.environment) for row in done} - here):
        console.print(f"[yellow]Some of what is there was measured on other grounds:[/] {ground}")


def write_report(rows: Sequence[Row], folder: Path, console: Console) -> None:
    """Write the CSV, the plots and the page; the page has no plots where matplotlib is missing.

    Args:
        rows: Results.
        folder: Where.
        console: Told what was written.
    """
    if not rows:
        return
    write_csv(folder / "results.csv", rows)
    drawn: list[Picture] = []
    try:
        drawn += pictures(rows)
        save_pictures(drawn, folder / "plots")
    except ArgumentValueError as error:
        console.print(f"[yellow]No plots:[/] {error}")
    (folder / "report.html").write_text(html_page(rows, drawn), encoding="utf-8")
    console.print(f"Written to {folder}: rows, results.csv, report.html{', plots' if drawn else ''}.")


def _measured(plan: Plan, done: Sequence[Row]) -> tuple[list[Row], bool]:
    """Measure case by case; ctrl-c ends it early."""
    rows = {(row.case, row.contender): row for row in done}
    missing = plan.missing(done)
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("", total=len(missing))
            for case in missing:
                progress.update(bar, description=str(case))
                found = run_case_safely(case, plan.chosen, plan.seconds, plan.limit_bytes)
                found = [row for row in found if (row.case, row.contender) not in rows]  # what is kept is frozen
                plan.keep(found)
                rows |= {(row.case, row.contender): row for row in found}
                progress.advance(bar)
    except KeyboardInterrupt:
        return list(rows.values()), True
    return list(rows.values()), False
