"""How far a command is, on the standard error: a bar on a terminal, a line now and then in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress"]

LOG_SECONDS = 10.0


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Show how far the work in a block is.

    Args:
        title: What is done.
        total: How many steps there are; None if that is not known.

    Yields:
        A function that is called after each step, with what is done now if that is not ``title`` any longer.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _in_lines(console, title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda what=title: bar.update(task, advance=1, description=what)


def _in_lines(console: Console, title: str, total: int | None) -> Callable[..., None]:
    """Give a function that writes a line if the last one is long ago."""
    started = time.monotonic()
    state: dict[str, Any] = {"done": 0, "told": started}

    def advance(what: str = title) -> None:
        state["done"] += 1
        now = time.monotonic()
        if now >= state["told"] + LOG_SECONDS:
            state["told"] = now
            of_all = f" ({state['done']} of {total})" if total else ""
            console.print(f"{now - started:.0f} s: {what}{of_all}", markup=False, highlight=False, soft_wrap=True)

    return advance
