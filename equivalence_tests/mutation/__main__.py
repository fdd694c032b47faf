"""``python -m equivalence_tests.mutation [FILE ...]``: the mutation score of ``scratch``."""

import os
import random
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from equivalence_tests.mutation.breaking import Mutant, mutants_of
from equivalence_tests.mutation.running import ROOT, TESTS, Verdict, run_mutants, time_of_whole_code

LISTED = Path(__file__).parent / "equivalent.toml"


@dataclass
class Outcome:
    """What became of the mutants of one file, and what is wrong with the list of equivalent ones."""

    file: str
    counts: Counter[str] = field(default_factory=Counter)
    complaints: int = 0

    def settle(self, mutant: Mutant, verdict: Verdict, reason: str | None) -> str:
        """Count one mutant, and say what is wrong with the verdict, if anything is."""
        place = f"scratch/{self.file}:{mutant.line}  {mutant.name}"
        self.counts["equivalent" if reason and verdict == "survived" else verdict] += 1
        if reason and verdict != "survived":
            self.complaints += 1
            return f"listed as equivalent, but {verdict}: {place}"
        if verdict == "survived" and not reason:
            self.complaints += 1
            return f"survived: {place}"
        return ""

    @property
    def score(self) -> str:
        """The share of the mutants that are not equivalent which some test noticed."""
        noticed = self.counts["killed"] + self.counts["timed out"]
        return f"{100 * noticed / max(noticed + self.counts['survived'], 1):.1f} %"


def equivalent_mutants() -> dict[str, dict[str, str]]:
    """Read what is listed: for each file the reason of each mutant."""
    listed: dict[str, dict[str, str]] = {}
    for entry in tomllib.loads(LISTED.read_text(encoding="utf-8")).get("equivalent", []):
        listed.setdefault(entry["file"], {}).update(dict.fromkeys(entry["mutants"], entry["reason"]))
    return listed


def break_file(name: str, reasons: Mapping[str, str], jobs: int, sample: int | None, progress: Progress) -> Outcome:
    """Test every mutant of one file of ``scratch``, or some that are drawn at random."""
    file, outcome = ROOT / "scratch" / name, Outcome(name)
    mutants = mutants_of(file.read_text(encoding="utf-8"), str(file))
    gone = reasons.keys() - {mutant.name for mutant in mutants}
    for mutant_name in sorted(gone):
        outcome.complaints += 1
        progress.console.print(f"listed as equivalent, but gone: {mutant_name}", markup=False, soft_wrap=True)
    if sample is not None:
        mutants = random.Random(0).sample(mutants, min(sample, len(mutants)))
    bar = progress.add_task(name, total=len(mutants), survived=0)
    # Another process may be slowed down by its neighbours; only an endless loop takes this long.
    timeout_seconds = 30 + 5 * round(time_of_whole_code(file))
    for mutant, verdict in run_mutants(file, mutants, jobs, timeout_seconds):
        complaint = outcome.settle(mutant, verdict, reasons.get(mutant.name))
        if complaint:
            progress.console.print(complaint, markup=False, soft_wrap=True)
        progress.update(bar, advance=1, survived=outcome.counts["survived"])
    return outcome


def score_table(outcomes: list[Outcome]) -> Table:
    """Draw one row for each file, and one for all."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("file", no_wrap=True)
    for heading in ("mutants", "killed", "timed out", "equivalent", "survived", "score"):
        table.add_column(heading, justify="right")
    whole = Outcome("all", sum((x.counts for x in outcomes), Counter[str]()))
    for outcome in [*outcomes, whole]:
        counts = [outcome.counts[name] for name in ("killed", "timed out", "equivalent", "survived")]
        table.add_row(outcome.file, str(sum(counts)), *map(str, counts), outcome.score)
    return table


def main(
    files: Annotated[list[str] | None, typer.Argument(help="Files of scratch; all by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = os.cpu_count() or 1,
    sample: Annotated[int | None, typer.Option(min=1, help="So many mutants of each file, drawn at random.")] = None,
) -> None:
    """Break scratch in every small way, one at a time, and see that a test fails.

    The exit status is 0 if every mutant is noticed or listed in equivalent.toml with its reason, and 1 otherwise.
    """
    names = [name.removeprefix("scratch/") for name in files or TESTS]
    unknown = [name for name in names if name not in TESTS]
    if unknown:
        raise typer.BadParameter(f"FILE must be one of {', '.join(TESTS)}, got {', '.join(unknown)}")
    os.environ["HYPOTHESIS_PROFILE"] = "ci"  # the same examples for every mutant
    console, listed = Console(highlight=False), equivalent_mutants()
    columns = (
        TextColumn("{task.description:15}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[survived]} survived"),
    )
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        outcomes = [break_file(name, listed.get(name, {}), jobs, sample, progress) for name in names]
    console.print(score_table(outcomes))
    raise typer.Exit(1 if any(outcome.complaints for outcome in outcomes) else 0)


if __name__ == "__main__":
    typer.run(main)
