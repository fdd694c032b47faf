"""A run over many cases: progress, rows kept as they come, and what is shown and written at the end."""

import shlex
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.benchmark import timer

from benchmarks.advice import advice_by_case
from benchmarks.children import run_case_safely
from benchmarks.contenders import contenders_of
from benchmarks.environment import environment_of
from benchmarks.grids import Case
from benchmarks.plots import save_pictures
from benchmarks.report import html_page
from benchmarks.results import Row, append_rows, read_rows, without_cut_line, write_csv
from benchmarks.screen import FAILED, INTERRUPTED, console, show_error
from benchmarks.summary import in_sentences, summary
from benchmarks.tables import result_tables
from scratch.validation import ArgumentValueError, check_writable

__all__ = ["RESULTS", "Plan", "begun", "make_folder", "measure", "write_report"]

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and where it is kept.

    Args:
        cases: What.
        chosen: Names of the contenders.
        seconds: Time for the rounds of each case, about.
        output: A folder, or None to keep nothing.
        limit_bytes: Memory that a large case may take on the CPU; what is available if not given.
        limit_seconds: Time in which to end: no case is begun that would take longer, as far as those before tell. None
            for any.
    """

    cases: Sequence[Case]
    chosen: Sequence[str]
    seconds: float
    output: Path | None
    limit_bytes: int | None = None
    limit_seconds: float | None = None

    def keep(self, rows: Sequence[Row]) -> None:
        """Add rows to the file.

        Raises:
            OSError: If they cannot be written.
        """
        if self.output is not None:
            append_rows(self.output / RESULTS, rows)

    def missing(self, done: Iterable[Row]) -> list[Case]:
        """List the cases of which a contender was not measured yet."""
        have = {(row.case, row.contender) for row in done}
        return [
            case for case in self.cases if any((case, x.name) not in have for x in contenders_of(case, self.chosen))
        ]


def begun(output: Path | None, resume: bool) -> list[Row]:
    """Make the folder of a run, and read what an earlier run has left in it.

    Args:
        output: The folder; None to keep nothing.
        resume: Whether to continue what is there.

    Returns:
        The rows that are there.

    Raises:
        ValueError: If the folder cannot be written, if it has results and they are not to be continued, or if they
            cannot be read.
    """
    if output is None:
        if resume:
            raise ArgumentValueError("--resume needs --output, the folder of the run that it continues")
        return []
    make_folder(output)
    path = output / RESULTS
    check_writable(path)
    if not path.exists():
        return []
    if not resume:
        raise ArgumentValueError(f"{path} is there already: continue it with --resume, or name another folder")
    without_cut_line(path)
    return read_rows(path) if path.stat().st_size else []


@dataclass
class _Run:
    """What came of a plan.

    Args:
        rows: By case and contender, those of earlier runs included.
        left: The cases that were not measured.
        status: The exit status, if something ended the run.
        error: What could not be written.
    """

    rows: dict[tuple[Case, str], Row]
    left: list[Case] = field(default_factory=list)
    status: int | None = None
    error: OSError | None = None


def measure(plan: Plan, done: Sequence[Row]) -> int:
    """Measure what is missing, show everything, and write what is made of it.

    Args:
        plan: What is to be measured.
        done: What was measured before.

    Returns:
        The exit status: 0 if all contenders are equal, 1 if one is not, 3 if something could not be written, 130 if
        interrupted.
    """
    screen = console()
    _show_grounds(plan, done, screen)
    run = _measured(plan, done)
    rows = list(run.rows.values())
    for table in result_tables(rows):
        screen.print(table)
    screen.print("Each cell: median time, its ratio to builtin's, peak memory. Yellow: no difference beyond the noise.")
    if rows:
        screen.print("", summary(rows), "", in_sentences(x for x in advice_by_case(rows) if x.own), markup=False)
    if plan.output is not None and run.error is None:
        try:
            write_report(rows, plan.output, screen)
        except OSError as error:
            run.error = error
        except KeyboardInterrupt:
            run.status = INTERRUPTED
    _show_end(plan, run, screen)
    if run.error is not None:
        return FAILED
    return int(any(row.status == "unequal" for row in rows)) if run.status is None else run.status


def _show_grounds(plan: Plan, done: Sequence[Row], screen: Console) -> None:
    """Say where is measured, and where something was measured before if that was elsewhere."""
    here = {str(environment_of(torch.device(device))) for device in {case.device for case in plan.cases}}
    for ground in sorted(here):
        screen.print(f"[bold]{ground}[/]")
    for ground in sorted({str(row.environment) for row in done} - here):
        screen.print(f"[yellow]Some of the results were measured elsewhere:[/] {ground}")


def _show_end(plan: Plan, run: _Run, screen: Console) -> None:
    """Say once why the run ended early, what is kept and how to get the rest."""
    count = len(plan.cases) - len(run.left)
    measured = f"{count} of {len(plan.cases)} cases measured"
    if run.error is not None:
        show_error(f"{run.error.filename or plan.output} could not be written: {run.error.strerror or run.error}")
        screen.print(f"{count} of {len(plan.cases)} cases are kept.")
    if run.status == INTERRUPTED:
        screen.print(f"[yellow]Interrupted:[/] {measured}.")
    elif run.left and run.error is None:
        screen.print(f"[yellow]Time limit reached:[/] {measured}. --component chooses some, --standard has no limit.")
    if plan.output is None:
        screen.print("Nothing is kept; --output FOLDER keeps rows, plots and a page.")
    elif run.left and count:
        kept = escape(str(plan.output / RESULTS))
        screen.print(f"{kept} keeps them; the same command with --resume goes on from there.", soft_wrap=True)
    elif count and (run.error is not None or run.status == INTERRUPTED):
        results = escape(shlex.quote(str(plan.output / RESULTS)))
        screen.print(f"All rows are kept; sidebyside-bench report {results} writes the rest.", soft_wrap=True)


def make_folder(output: Path) -> None:
    """Make the folder that --output names, unless it is there."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentValueError(f"output must be a folder that can be made, got {output}: {error}") from error


def write_report(rows: Sequence[Row], folder: Path, screen: Console) -> None:
    """Write the CSV, the plots and the page.

    Args:
        rows: Results.
        folder: Where.
        screen: Told what was written.

    Raises:
        OSError: If something cannot be written.
    """
    if not rows:
        return
    write_csv(folder / "results.csv", rows)
    try:
        drawn = save_pictures(rows, folder / "plots")
    except ArgumentValueError as error:
        drawn = 0
        screen.print(f"[yellow]No plots:[/] {error}")
    (folder / "report.html").write_text(html_page(rows), encoding="utf-8")
    plots = f", {drawn} plot{'s' * (drawn > 1)}" if drawn else ""
    screen.print(f"Written to {escape(shlex.quote(str(folder)))}: {RESULTS}, results.csv, report.html{plots}.")


def _measured(plan: Plan, done: Sequence[Row]) -> _Run:
    """Measure case by case, until all are done, the time is up, ctrl-c is pressed or nothing can be written."""
    missing = plan.missing(done)
    run = _Run({(row.case, row.contender): row for row in done}, list(missing))
    start = begun_at = timer()
    longest = 0.0
    try:
        with closing(_with_progress(missing)) as cases:
            for case in cases:
                found = run_case_safely(case, plan.chosen, plan.seconds, plan.limit_bytes)
                found = [row for row in found if (row.case, row.contender) not in run.rows]  # what is kept is frozen
                run.rows |= {(row.case, row.contender): row for row in found}
                plan.keep(found)
                run.left.remove(case)
                longest, begun_at = max(longest, timer() - begun_at), timer()
                if plan.limit_seconds is not None and begun_at - start + longest > plan.limit_seconds:
                    break
    except KeyboardInterrupt:
        run.status = INTERRUPTED
    except OSError as error:
        run.error = error
    return run


def _with_progress(cases: Sequence[Case]) -> Generator[Case, None, None]:
    """Show on the standard error which case is measured now: by a bar on a terminal, else by a line for each."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        for number, case in enumerate(cases, 1):
            print(f"[{number}/{len(cases)}] {case}", file=sys.stderr, flush=True)
            yield case
        return
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=screen, transient=True) as progress:
        bar = progress.add_task("", total=len(cases))
        for number, case in enumerate(cases):
            progress.update(bar, description=str(case), completed=number)
            yield case
