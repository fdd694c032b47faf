"""``python -m equivalence_tests.wrong``: wrong versions of right attentions and layers, and what the checker says."""

import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.wild.__main__ import with_reasons
from equivalence_tests.wild.children import Limits, in_children
from equivalence_tests.wild.models import WildModel
from equivalence_tests.wrong import fixed, fixed_layers, strangers, wild
from equivalence_tests.wrong.drawing import UNCHANGED, drawn, unchanged
from equivalence_tests.wrong.editing import Version
from equivalence_tests.wrong.judging import accused, called_equal, excused, judged
from equivalence_tests.wrong.operators import OPERATORS, Operator
from equivalence_tests.wrong.parts import rights as part_rights
from equivalence_tests.wrong.right import rights
from equivalence_tests.wrong.sources import Right
from equivalence_tests.wrong.table import summary, table, written
from equivalence_tests.wrong.unseen import UNSEEN
from equivalence_tests.wrong.wild import judged_in

AT_A_TIME = 20
WIDTH = 132  # of the table
WILD = Limits(cpu_seconds=180)
Row = dict[str, Any]


def chosen(only: str, operators: Sequence[Operator], of: Sequence[Right]) -> tuple[list[Right], list[Operator]]:
    """Choose by a part of a name each: OPERATOR/CLASS, where either may be left out.

    Raises:
        typer.BadParameter: If there is no such class or operator.
    """
    operator, _, name = only.partition("/")
    found = [right for right in of if name in (right.name, "")], [x for x in operators if operator in x.name]
    if not all(found):
        raise typer.BadParameter(f"--only must name an operator and a class as OPERATOR/CLASS, got {only}")
    return found


class Run:
    """One run: what was found out so far, and what is shown of it."""

    def __init__(self, facts: Row, output: Path | None, jobs: int) -> None:
        self.facts, self.output, self.jobs = facts, output, jobs
        self.console, self.rows, self.whole = _wide_enough(), list[Row](), dict[str, Row]()
        self.broken_off = False

    def over(self, versions: Iterator[Version], most: int) -> None:
        """Judge versions until so many differ."""
        self._watch(self._of_versions(versions, most), f"{most} that differ")

    def over_models(self, found: Sequence[WildModel], operators: Sequence[Operator], each: int) -> None:
        """Judge versions of the attentions of published models."""
        seed, known = self.facts["seed"], self.whole.keys()
        work = with_reasons(lambda model: judged_in(model, operators, seed, each, known))
        done = in_children(found, work, limits=WILD, jobs=self.jobs)
        self._watch((row for _, rows, _ in done for row in rows if "operator" in row), f"those of {len(found)} models")

    def over_folder(self, folder: Path, operators: Sequence[Operator], each: int) -> None:
        """Judge versions of what the files of a folder define, where it is equal."""
        try:
            found, seed = strangers.candidates_in(folder), self.facts["seed"]
        except CannotCheckError as error:
            raise typer.BadParameter(str(error)) from error
        work = partial(strangers.judged_in, operators=operators, seed=seed, each=each)
        done = in_children(found, work, limits=WILD, jobs=self.jobs)
        rows = (row for one, made, why in done for row in made or [strangers.left_out(one, why)])
        self._watch(rows, f"those of {len(found)} classes and functions")

    def _of_versions(self, versions: Iterator[Version], most: int) -> Iterator[Row]:
        while self.differ < most:
            some = list(islice(versions, min(AT_A_TIME, most - self.differ)))
            if not some:
                return
            yield from judged([*self._unchanged(some), *some], self.jobs)

    def _watch(self, rows: Iterator[Row], of: str) -> None:
        """Keep what comes, and what came before Ctrl-C."""
        columns = TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            shown = progress.add_task("")
            try:
                for number, row in enumerate(rows, 1):
                    self._keep(row)
                    said = f"{self.differ} of {of}: {sum(map(called_equal, self.rows))} called equal"
                    progress.update(shown, description=said)
                    if number % AT_A_TIME == 0:
                        self._write()
            except KeyboardInterrupt:
                self.broken_off = True
        self._write()

    @property
    def differ(self) -> int:
        """How many versions differ."""
        return sum(row.get("truth") == "differs" for row in self.rows)

    def _unchanged(self, versions: Sequence[Version]) -> Iterator[Version]:
        """Give each right attention once as it is."""
        for right in {one.right.name: one.right for one in versions}.values():
            if right.name not in self.whole:
                self.whole[right.name] = {}
                yield unchanged(right)

    def _keep(self, row: Row) -> None:
        if row["operator"] == UNCHANGED:
            self.whole[row["class"]] = row
        self.rows.append(row)
        for one in self.rows if row["operator"] == UNCHANGED else (row,):
            if "intended" in one and one["operator"] != UNCHANGED:
                known = self.whole.get(one["class"], {}).get("intended", ())
                one["intended_anew"] = [step for step in one["intended"] if step not in known]

    def _write(self) -> None:
        if self.output is not None:
            written(self.output, self.facts, self.rows)

    def conclude(self) -> int:
        """Show the table, and what is called equal or accused; give the exit status."""
        say = self.console.print
        say(table(self.rows))
        for title, rows in (
            ("EQUAL, and it differs", [row for row in self.rows if called_equal(row)]),
            ("to be judged: equal except where intended, or as far as it ran", [*filter(_open, self.rows)]),
            ("DEVIATES, and it does not differ", [row for row in self.rows if accused(row)]),
        ):
            for row in rows:
                say(f"\n{title}: {row['class']}, {row['operator']}", markup=False, highlight=False)
                steps = row.get("intended_anew") or row["names"]
                named = ["nothing that has a name was added"] if excused(row) and not row["adds"] else []
                say("\n".join([row["diff"], *steps, *named]), markup=False, highlight=False)
        for row in self.rows:
            if row["operator"] == UNCHANGED and "dropped" in row:
                say(f"\nnot edited: {row['class']}: {row['dropped']}", markup=False, highlight=False)
        found = summary(self.rows)
        say(f"\n{found['differ']} versions differ: {found['called_equal']} of them are called EQUAL.")
        say(f"{found['do_not_differ']} do not differ: {found['accused']} of them DEVIATES.")
        return 130 if self.broken_off else int(found["called_equal"] + found["accused"] > 0)


def _open(row: Row) -> bool:
    return excused(row) or (row.get("truth"), row.get("verdict")) == ("differs", "partial")


def _wide_enough() -> Console:
    console = Console()
    return console if console.width >= WIDTH else Console(width=WIDTH)


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the fixed versions of an attention, and of layers and models.")
    ] = False,
    sample: Annotated[int, typer.Option(min=1, help="How many versions that differ; not of a folder.")] = 3000,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    only: Annotated[str, typer.Option(help="OPERATOR/CLASS; a part of an operator's name will do.")] = "/",
    models: Annotated[int, typer.Option(min=0, help="How many published models, where they are installed.")] = 0,
    each: Annotated[int, typer.Option(min=1, help="How many versions of each attention of a model, or a folder.")] = 4,
    folder: Annotated[
        Path | None, typer.Option(exists=True, help="What its files define instead, where that is equal.")
    ] = None,
    parts: Annotated[bool, typer.Option("--parts", help="Norms, feed-forwards, positions and masks instead.")] = False,
    unseen: Annotated[bool, typer.Option("--unseen", help="Only the operators that are kept for the end.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the results here, as JSON.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many children at a time.")] = os.cpu_count() or 1,
) -> None:
    """Edit right attentions, layers and models at random and see that the checker calls no wrong version EQUAL.

    Whether a version is wrong is a number: its whole output, with weights copied, differs by more than 1e-6. The exit
    status is 1 if a version that differs is EQUAL without an intended step of its own, or one that does not DEVIATES.
    """
    if folder is not None and (quick or parts or models or only != "/"):
        raise typer.BadParameter("--folder goes without --quick, --parts, --models and --only")
    warnings.simplefilter("ignore")  # of the edited code
    torch.set_num_threads(1)
    operators = UNSEEN if unseen else OPERATORS
    facts = {"torch": version("torch"), "seed": seed, "sample": sample, "models": models, "only": only}
    facts |= {"parts": True} if parts else {}
    facts |= {"folder": str(folder), "each": each} if folder is not None else {}
    run = Run({**facts, "unseen": unseen, "quick": quick}, output, jobs)
    with tempfile.TemporaryDirectory() as written_to:
        if folder is not None:
            run.over_folder(folder, operators, each)
        elif quick:
            versions = [*fixed.versions(), *fixed_layers.versions()]
            run.over(iter(versions), len(versions))
        else:
            found, kinds = chosen(only, operators, part_rights() if parts else rights())
            run.over(drawn(found, kinds, seed, Path(written_to)), sample)
            if models and not run.broken_off:
                listed = wild.models()
                run.over_models(random.Random(seed).sample(listed, min(models, len(listed))), kinds, each)
    raise typer.Exit(run.conclude())


if __name__ == "__main__":
    typer.run(main)
