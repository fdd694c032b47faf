"""``sidebyside traps``: the list, as the traps were found to be, or one in full, run here and now."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from equivalence_tests.learn import terminal
from equivalence_tests.learn.traps.entry import Trap
from equivalence_tests.learn.traps.registry import TRAPS, find_trap
from equivalence_tests.learn.traps.rendering import as_data, in_full, listing
from equivalence_tests.learn.traps.running import Examined, examine
from equivalence_tests.learn.traps.states import FILE, recorded, state_of
from equivalence_tests.progress import progress

__all__ = ["traps"]


def traps(
    name_or_number: Annotated[
        str | None, typer.Argument(metavar="NAME|NUMBER", help="The trap to run and show in full.", show_default=False)
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Run every trap before it is listed; about a minute.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Run every trap, and show each in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the traps as JSON, run and in full.")] = False,
    record: Annotated[bool, typer.Option("--record", hidden=True)] = False,
) -> None:
    """List the traps of torch.nn's attention, or show one in full, run on the installed torch."""
    if name_or_number is not None and (everything or run or record):
        raise typer.BadParameter("give a NAME or --run or --all, not both")
    try:
        chosen = TRAPS if name_or_number is None else (find_trap(name_or_number),)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from None
    page = terminal.console()
    if name_or_number is None and not (run or everything or as_json or record):
        page.print(listing({trap: state_of(trap) for trap in TRAPS}, run_now=False))
        return
    examined = _examine_all(chosen)
    if record:
        FILE.write_text(recorded(examined), encoding="utf-8")
    if as_json:
        data = [as_data(one) for one in examined]
        typer.echo(json.dumps(data if name_or_number is None else data[0], indent=2))
    elif run or record:
        page.print(listing({one.trap: one.state for one in examined}, run_now=True))
    else:
        for one in examined:
            page.print(in_full(one))


def _examine_all(chosen: Sequence[Trap]) -> list[Examined]:
    examined = []
    with progress(f"running {chosen[0].name}", len(chosen)) as advance:
        for trap, following in zip(chosen, [*chosen[1:], chosen[-1]], strict=True):
            examined.append(examine(trap))
            advance(f"running {following.name}")
    return examined
