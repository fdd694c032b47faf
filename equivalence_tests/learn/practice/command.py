"""``sidebyside practice``: the list, the next exercise, a check, a solution, or a notebook."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from equivalence_tests.checker.reporting.rendering import show
from equivalence_tests.learn import terminal
from equivalence_tests.learn.practice.cells import notebook
from equivalence_tests.learn.practice.checking import solution_view
from equivalence_tests.learn.practice.exercise import Exercise
from equivalence_tests.learn.practice.folder import Folder, FolderError
from equivalence_tests.learn.practice.listing import EXERCISES, find_exercise, number_of

__all__ = ["practice"]


def practice(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="EXERCISE|check|solution",
            help="Name or number of the exercise to begin; or check or solution, for the exercise named after it "
            "or else the next unsolved one.",
            show_default=False,
        ),
    ] = None,
    exercise: Annotated[
        str | None, typer.Argument(metavar="EXERCISE", help="What to check or to show.", show_default=False)
    ] = None,
    folder: Annotated[Path, typer.Option(file_okay=False, help="The folder of your files and your progress.")] = Path(
        "practice"
    ),
    as_notebook: Annotated[
        bool,
        typer.Option("--notebook", help="Write all exercises as one notebook, practice.ipynb."),
    ] = False,
) -> None:
    """Learn by writing: twenty exercises, by hand and with torch, with a check that says what is wrong and why.

    Exit status of a check: 0 solved, 1 not yet.
    """
    place = Folder(folder)
    try:
        if as_notebook:
            _write_notebook(place, what)
        elif what in ("check", "solution"):
            chosen = _chosen(place, exercise)
            if what == "check":
                raise typer.Exit(_check(place, chosen))
            terminal.console().print(solution_view(chosen))
        elif exercise is not None:
            raise typer.BadParameter(f"expected check or solution before {exercise!r}, got {what!r}")
        else:
            _begin(place, _chosen(place, what))
    except FolderError as error:
        raise typer.BadParameter(str(error)) from None


def _chosen(place: Folder, name_or_number: str | None) -> Exercise:
    """Find what was named; else the first exercise that is not solved, or the last one."""
    if name_or_number is None:
        return place.following() or EXERCISES[-1]
    try:
        return find_exercise(name_or_number)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from None


def _begin(place: Folder, exercise: Exercise) -> None:
    """List everything, and write the file of one exercise."""
    page = terminal.console()
    page.print(_listing(place))
    written = place.begin(exercise)
    file = place.file_of(exercise)
    page.print(
        f"\n{file}: {'written' if written else 'already begun, and left unchanged'}. Fill in the blank, then run"
    )
    page.print(f"  sidebyside practice check {exercise.name}")


def _listing(place: Folder) -> Table:
    solved = place.solved()
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("", "name", f"{len(solved)} of {len(EXERCISES)} solved", ""):
        table.add_column(heading, no_wrap=heading == "name")
    for exercise in EXERCISES:
        begun = "begun" if place.file_of(exercise).exists() else ""
        state = Text("solved", style="green") if exercise.name in solved else Text(begun)
        table.add_row(str(number_of(exercise)), Text(exercise.name), Text(exercise.title), state)
    return table


def _check(place: Folder, exercise: Exercise) -> int:
    answer = place.check(exercise)
    page = terminal.console()
    show(answer, page)
    if not answer.solved:
        return 1
    after = place.following()
    page.print(f"Next: sidebyside practice {after.name}" if after else "All exercises are solved.")
    return 0


def _write_notebook(place: Folder, what: str | None) -> None:
    if what is not None:
        raise typer.BadParameter(f"--notebook holds all exercises, got {what!r} as well")
    file = place.path / "practice.ipynb"
    if file.exists():
        raise FolderError(f"{file} exists already: move it away first, so that your work in it is not lost")
    place.path.mkdir(parents=True, exist_ok=True)
    file.write_text(notebook(), encoding="utf-8")
    typer.echo(f"{file}: {len(EXERCISES)} exercises. Its first cell installs what it needs.")
