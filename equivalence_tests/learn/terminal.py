"""How traps and explanations look on a terminal: headings, paragraphs, code, quoted source and live output."""

import io
import itertools
import tokenize
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from equivalence_tests.learn.excerpts import Excerpt
from scratch.task.terminal import Screen

__all__ = ["code_block", "console", "output_block", "paragraph", "quote", "section"]

WIDEST = 110  # longer lines are hard to read
INDENT = 2


def console() -> Console:
    """Give a console as wide as the terminal, but not too wide to read."""
    found = Screen(highlight=False, emoji=False)
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
        number = [] if first_line is None else [str(first_line + offset)]
        block.add_row(*number, Padding(CodeLine(line[indentation:]), (0, 0, 0, indentation), expand=False))
    return block


class CodeLine:
    """One line of Python that stays Python where it is too long: its comment goes below it, and stays a comment.

    Args:
        line: Without its indentation.
    """

    def __init__(self, line: Text) -> None:
        self.line = line
        self.line.overflow = "fold"  # a name that is longer than the page goes on below, too

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Say how wide it would like to be."""
        return Measurement.get(console, options, self.line)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Give the line, or its code and its comment."""
        start = comment_start(self.line.plain)
        if start is None or self.line.cell_len <= options.max_width:
            yield self.line
            return
        code, comment = self.line[:start], self.line[start:]
        code.rstrip()
        if code:
            yield code
        first, *others = comment.wrap(console, options.max_width - 2)
        yield first
        yield from (Text("# ").append_text(part) for part in others)


def comment_start(line: str) -> int | None:
    """Find where the comment of a line begins; None if it has none.

    >>> comment_start('print("#")  # a comment')
    12
    """
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type == tokenize.COMMENT:
                return token.start[1]
    except tokenize.TokenError:  # a bracket that is closed on another line
        pass
    return None


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
