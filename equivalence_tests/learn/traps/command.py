"""``sidebyside traps``: the list, or one trap in full, run here and now."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from equivalence_tests.learn import terminal
from equivalence_tests.learn.traps.entry import Trap
from equivalence_tests.learn.traps.registry import TRAPS, find_trap
from equivalence_tests.learn.traps.rendering import as_data, in_full, listing
from equivalence_tests.learn.traps.running import Examined, examine

__all__ = ["traps"]


def traps(
    name_or_number: Annotated[
        str | None, typer.Argument(metavar="NAME|NUMBER", help="The trap to show in full.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every trap in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the traps as JSON, in full.")] = False,
) -> None:
    """List the traps of torch.nn's attention, or show one in full, run on the installed torch."""
    if name_or_number is not None and everything:
        raise typer.BadParameter("give a NAME or --all, not both")
    try:
        chosen = TRAPS if name_or_number is None else (find_trap(name_or_number),)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from None
    examined = _examine_all(chosen)
    if as_json:
        data = [as_data(one) for one in examined]
        typer.echo(json.dumps(data if name_or_number is None else data[0], indent=2))
        return
    page = terminal.console()
    if name_or_number is None and not everything:
        page.print(listing(examined))
        return
    for one in examined:
        page.print(in_full(one))


def _examine_all(chosen: Sequence[Trap]) -> list[Examined]:
    screen = Console(stderr=True)
    hidden = len(chosen) == 1 or not sys.stderr.isatty()
    return [examine(trap) for trap in track(chosen, "Running", console=screen, transient=True, disable=hidden)]
