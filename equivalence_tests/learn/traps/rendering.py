"""The list of traps, one trap in full, and both as data."""

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from equivalence_tests.learn import terminal
from equivalence_tests.learn.excerpts import as_typed
from equivalence_tests.learn.traps.entry import Severity, Trap
from equivalence_tests.learn.traps.running import Examined, State
from equivalence_tests.learn.traps.states import INSTALLED, checked_on

__all__ = ["as_data", "in_full", "listing", "typed_code"]

COLOURS = {
    State.HOLDS: "red",
    State.MENDED: "green",
    State.ADVICE_FAILS: "yellow",
    State.DESCRIBED: "cyan",
    State.NOT_TRIED: "dim",
}
COUNTED = {
    State.HOLDS: "hold",
    State.MENDED: "are mended",
    State.ADVICE_FAILS: "have advice that fails",
    State.DESCRIBED: "need more than torch on the CPU, and are only described",
    State.NOT_TRIED: "were not tried on this version, which --run does",
}


def listing(states: Mapping[Trap, State], run_now: bool) -> Group:
    """List traps in one table for each severity, worst first.

    Args:
        states: The traps, each with what it is found to be.
        run_now: Whether they were run just now.

    Returns:
        Something to print.
    """
    tables: list[RenderableType] = []
    for severity in Severity:
        table = Table(title=severity.value.capitalize(), title_justify="left", box=None, expand=True, show_header=False)
        table.add_column("number", justify="right", width=2)
        table.add_column("name", no_wrap=True, width=max(len(trap.name) for trap in states))
        table.add_column("trap", ratio=1)
        table.add_column("state")
        for trap, state in states.items():
            if trap.severity is severity:
                table.add_row(str(trap.number), trap.name, trap.title, Text(state.value, style=COLOURS[state]))
        if table.row_count:
            tables += [table, ""]
    found = list(states.values())
    counts = [f"{found.count(state)} {words}" for state, words in COUNTED.items() if state in found]
    how = "run just now" if run_now else "as they were found to be when this version was tested"
    summary = f"{len(found)} traps on torch {INSTALLED}, {how}: {', '.join(counts)}."
    meaning = "A trap holds if the code that people write does what the entry says, and the advice helps."
    hint = "One in full, run now: sidebyside traps NAME. All of them: --run for this list, --all in full."
    return Group(*tables, *map(Text, (summary, meaning, hint)))


def in_full(one: Examined) -> Group:
    """Show one trap from end to end.

    Args:
        one: The trap and what it did.

    Returns:
        Something to print.
    """
    trap, here = one.trap, f"torch {torch.__version__}"
    first, second = typed_code(trap)
    gone = f"It is no longer so in {here}. What it was: " if one.state is State.MENDED else ""
    return Group(
        _head(one),
        Text(trap.title),
        "",
        terminal.section("What a person writes", terminal.code_block(first)),
        terminal.section("What they expect", terminal.paragraph(trap.expects)),
        terminal.section(
            f"What happens here, now ({here}, on CPU)" if trap.runs_here else f"What happens (not run: {needed(trap)})",
            terminal.output_block(one.wrong.lines),
            terminal.paragraph(gone + trap.happens),
        ),
        terminal.section("Why", terminal.paragraph(trap.why), terminal.quote(place.excerpt() for place in trap.places)),
        terminal.section(
            "What to write instead",
            terminal.paragraph(trap.instead),
            terminal.code_block(second),
            terminal.output_block(one.right.lines),
        ),
        *_discussed(trap),
        terminal.section("Versions", terminal.paragraph(versions(trap))),
    )


def _head(one: Examined) -> Text:
    trap, state = one.trap, one.state
    named = (f"Trap {trap.number}: {trap.name}", "bold")
    found = "confirmed on this torch" if state is State.HOLDS else state.value
    return Text.assemble(named, f"  {trap.severity.value}; ", (found, COLOURS[state]))


def _discussed(trap: Trap) -> list[RenderableType]:
    return (
        [terminal.section("Where it is discussed", Text("\n".join(map(issue_url, trap.issues))))] if trap.issues else []
    )


def typed_code(trap: Trap) -> tuple[str, str]:
    """Give the wrong and the right code of a trap as one would type them, one after the other, in one session.

    Args:
        trap: An entry.

    Returns:
        The wrong code with its imports, and the right code with those that it needs besides.
    """
    wrong = as_typed(trap.wrong)
    return wrong, as_typed(trap.right, known=wrong.splitlines())


def versions(trap: Trap) -> str:
    """Say what is known of the versions that have the trap."""
    known = [f"since torch {trap.since}"] if trap.since else []
    known += [f"mended in torch {trap.mended_in}"] if trap.mended_in else []
    known.append(needed(trap) or f"checked on torch {', '.join(checked_on(trap))}")
    text = "; ".join(known)
    return f"{text[0].upper()}{text[1:]}."


def needed(trap: Trap) -> str:
    """Say what it takes to see a trap; "" if that is torch on the CPU.

    Args:
        trap: An entry.

    Returns:
        A few words.
    """
    return f"it needs {trap.needs}" if trap.needs else ""


def issue_url(issue: str) -> str:
    """Turn "owner/repository#number" into an address."""
    repository, number = issue.split("#")
    return f"https://github.com/{repository}/issues/{number}"


def as_data(one: Examined) -> dict[str, Any]:
    """Give all that is known of a trap as plain data, for JSON.

    Args:
        one: The trap and what it did.

    Returns:
        Strings, numbers, lists and dictionaries.
    """
    trap = one.trap
    wrong_code, right_code = typed_code(trap)
    return {
        "number": trap.number,
        "name": trap.name,
        "trap": trap.title,
        "severity": trap.severity.value,
        "state": one.state.value,
        "torch": str(torch.__version__),
        "needs": trap.needs or None,
        "concerns": list(trap.concerns),
        "expects": trap.expects,
        "wrong": {"code": wrong_code, **one.wrong.data},
        "happens": trap.happens,
        "why": trap.why,
        "scratch": [place.excerpt().data for place in trap.places],
        "instead": trap.instead,
        "right": {"code": right_code, **one.right.data},
        "issues": [issue_url(issue) for issue in trap.issues],
        "since": trap.since or None,
        "mended_in": trap.mended_in or None,
    }
