"""``python -m equivalence_tests.mutation [FILE ...]``: the mutation score of ``scratch``."""

import os
import random
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from equivalence_tests.mutation.breaking import Mutant, mutants_of
from equivalence_tests.mutation.running import ROOT, TESTS, Verdict, run_mutants

LISTED = Path(__file__).parent / "equivalent.toml"


@dataclass
class Outcome:
    """What became of the mutants of one file, and what is wrong with the list of equivalent ones."""

    file: str
    counts: Counter[str] = field(default_factory=Counter)
    complaints: int = 0

    def settle(self, mutant: Mutant, verdict: Verdict, reason: str | None) -> str:
        """Count one mutant, and say what is wrong with the verdict, if anything is."""
        place = f"scratch/{self.file}:{mutant.lines[0]}  {mutant.name}"
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


def chosen_mutants(name: str, sample: int | None) -> list[Mutant]:
    """Break one file of ``scratch`` in every way, or in some that are drawn at random."""
    file = ROOT / "scratch" / name
    mutants = mutants_of(file.read_text(encoding="utf-8"), str(file))
    return mutants if sample is None else random.Random(0).sample(mutants, min(sample, len(mutants)))


def break_files(names: list[str], jobs: int, sample: int | None, progress: Progress) -> list[Outcome]:
    """Test the mutants of some files of ``scratch``, and print those that no test notices."""
    mutants = {ROOT / "scratch" / name: chosen_mutants(name, sample) for name in names}
    outcomes, listed = {file: Outcome(name) for name, file in zip(names, mutants, strict=True)}, equivalent_mutants()
    bars = {file: progress.add_task(outcomes[file].file, total=len(mutants[file]), survived=0) for file in mutants}
    for file, mutant, verdict in run_mutants(mutants, jobs):
        outcome = outcomes[file]
        complaint = outcome.settle(mutant, verdict, listed.get(outcome.file, {}).pop(mutant.name, None))
        if complaint:
            progress.console.print(complaint, markup=False, soft_wrap=True)
        progress.update(bars[file], advance=1, survived=outcome.counts["survived"])
    for outcome in outcomes.values() if sample is None else ():
        for name in listed.get(outcome.file, {}):
            outcome.complaints += 1
            progress.console.print(f"listed as equivalent, but gone: {name}", markup=False, soft_wrap=True)
    return list(outcomes.values())


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
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    console = Console(highlight=False)
    columns = (
        TextColumn("{task.description:15}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[survived]} survived"),
    )
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        outcomes = break_files(names, jobs, sample, progress)
    console.print(score_table(outcomes))
    raise typer.Exit(1 if any(outcome.complaints for outcome in outcomes) else 0)


if __name__ == "__main__":
    typer.run(main)
