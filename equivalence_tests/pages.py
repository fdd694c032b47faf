"""How traps and explanations look on a terminal: headings, paragraphs, code, quoted source and live output."""

import itertools
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from equivalence_tests.excerpts import Excerpt

__all__ = ["code_block", "console", "output_block", "paragraph", "quote", "section"]

WIDEST = 110  # longer lines are hard to read
INDENT = 2


def console() -> Console:
    """Give a console as wide as the terminal, but not too wide to read."""
    found = Console(highlight=False, emoji=False)
    found.width = min(found.width, WIDEST)
    return found


def section(title: str, *parts: RenderableType) -> Group:
    """Put parts under a heading.

    Args:
        title: The heading.
        *parts: What stands below it, indented, with an empty line between.

    Returns:
        Something to print, with an empty line at the end.
    """
    body: list[RenderableType] = []
    for part in parts:
        body += [*([""] if body else []), Padding(part, (0, 0, 0, INDENT), expand=False)]
    return Group(Text(title, style="bold"), *body, "")


def paragraph(text: str) -> Text:
    """Give running text, wrapped between words."""
    return Text(text)


def code_block(code: str, first_line: int | None = None) -> Table:
    """Show Python, with line numbers if it has any.

    Args:
        code: Lines of Python.
        first_line: The number of the first line.

    Returns:
        A line that is too long goes on below itself, at the same indentation.
    """
    block = Table.grid(padding=(0, 1, 0, 0))
    if first_line is not None:
        block.add_column(style="dim", justify="right")
    block.add_column()
    syntax = Syntax("", "python", theme="ansi_dark", background_color="default")
    for offset, line in enumerate(syntax.highlight(code).split("\n", allow_blank=False)):
        indentation = len(line.plain) - len(line.plain.lstrip())
        line.overflow = "fold"  # a name that is longer than the page goes on below, too
        number = [] if first_line is None else [str(first_line + offset)]
        block.add_row(*number, Padding(line[indentation:], (0, 0, 0, indentation), expand=False))
    return block


def quote(excerpts: Iterable[Excerpt]) -> Group:
    """Show pieces of source under the function where they stand."""
    shown: list[RenderableType] = []
    for _, group in itertools.groupby(excerpts, key=lambda excerpt: (excerpt.file, excerpt.owner)):
        first, *others = group
        shown += [Text(first.where, style="cyan"), code_block(first.code, first.line)]
        for other in others:
            shown += [Text("...", style="dim"), code_block(other.code, other.line)]
    return Group(*shown)


def output_block(lines: Sequence[str]) -> Table:
    """Show what a piece of code printed, with a bar on its left."""
    block = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        block.add_row(Text("│", style="dim"), Text(line))
    return block
