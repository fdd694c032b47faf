"""The table of all arguments, one argument in full, and both as data."""

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from equivalence_tests.learn import terminal
from equivalence_tests.learn.excerpts import as_typed
from equivalence_tests.learn.explain.entry import Explanation
from equivalence_tests.learn.explain.registry import EXPLANATIONS, arguments_of
from equivalence_tests.learn.traps.entry import Trap
from equivalence_tests.learn.traps.registry import traps_about
from equivalence_tests.learn.traps.running import run

__all__ = ["as_data", "in_full", "listing", "short_data", "traps_of"]


def listing(owner: str | None = None) -> Group:
    """List arguments: all, in one table for those that the same classes take, or those of one class in their order.

    Args:
        owner: A key of ``OWNERS``; all if not given.

    Returns:
        Something to print.
    """
    if owner is None:
        groups = dict.fromkeys(explanation.owners for explanation in EXPLANATIONS)
        tables = {", ".join(group): [x for x in EXPLANATIONS if x.owners == group] for group in groups}
    else:
        tables = {owner: arguments_of(owner)}
    hint = "One in full: sidebyside explain ARGUMENT. Of one class: sidebyside explain --of CLASS."
    return Group(*(terminal.section(title, _table(rows)) for title, rows in tables.items()), Text(hint))


def _table(explanations: Sequence[Explanation]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column("argument", no_wrap=True, width=max(len(explanation.argument) for explanation in EXPLANATIONS))
    table.add_column("what it does", ratio=1)
    for explanation in explanations:
        table.add_row(explanation.argument, explanation.in_short)
    return table


def in_full(explanation: Explanation) -> Group:
    """Show all about an argument, and run its example here and now.

    Args:
        explanation: Of the argument, in the classes where it does the same.

    Returns:
        Something to print.
    """
    picture = [terminal.section("Picture", Text(explanation.picture))] if explanation.picture else []
    return Group(
        Text(explanation.argument, style="bold"),
        *(Text(usage, style="cyan") for usage in explanation.usages),
        "",
        terminal.section("What it does", terminal.paragraph(explanation.does)),
        *picture,
        terminal.section("By hand", terminal.quote(place.excerpt() for place in explanation.places)),
        terminal.section(
            f"An example, run now (torch {torch.__version__}, on CPU)",
            terminal.code_block(as_typed(explanation.example)),
            terminal.output_block(run(explanation.example).lines),
        ),
        *_traps_section(traps_of(explanation)),
    )


def _traps_section(traps: Sequence[Trap]) -> list[RenderableType]:
    if not traps:
        return []
    table = Table.grid(padding=(0, 2, 0, 0))
    for trap in traps:
        table.add_row(trap.name, trap.title)
    return [terminal.section("Traps that concern it (one in full: sidebyside traps NAME)", table)]


def traps_of(explanation: Explanation) -> list[Trap]:
    """Find the traps that concern an argument in any of the classes that an explanation is for."""
    found = {trap.number: trap for owner in explanation.owners for trap in traps_about(explanation.argument, owner)}
    return [found[number] for number in sorted(found)]


def short_data(explanation: Explanation) -> dict[str, Any]:
    """Give what the table says of an argument as plain data, for JSON: nothing is run."""
    return {
        "argument": explanation.argument,
        "owners": list(explanation.owners),
        "usages": explanation.usages,
        "does": explanation.does,
        "traps": [trap.name for trap in traps_of(explanation)],
    }


def as_data(explanation: Explanation) -> dict[str, Any]:
    """Give all about an argument as plain data, for JSON: its example is run.

    Args:
        explanation: Of the argument, in the classes where it does the same.

    Returns:
        Strings, numbers, lists and dictionaries.
    """
    return {
        **short_data(explanation),
        "picture": explanation.picture or None,
        "scratch": [place.excerpt().data for place in explanation.places],
        "example": {"code": as_typed(explanation.example), **run(explanation.example).data},
        "torch": str(torch.__version__),
    }
