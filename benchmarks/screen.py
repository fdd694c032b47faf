"""What is printed and how a command ends: consoles, errors and exit statuses."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from scratch.task.terminal import Screen
from scratch.validation import ArgumentTypeError, ArgumentValueError

__all__ = ["BAD_ARGUMENTS", "BROKEN_PIPE", "FAILED", "INTERRUPTED", "command_errors", "console", "show_error"]

# Beside 0 for equal, and 1 for not equal or a regression and nothing else.
BAD_ARGUMENTS = 2
FAILED = 3
INTERRUPTED = 130  # what a shell says of a command that was ended by ctrl-c
BROKEN_PIPE = 141  # likewise of one whose reader has gone away

# A file has no width, and tables with many columns are not readable at the 80 that rich supposes then.
PIPED_WIDTH = 160


class _Screen(Screen):
    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE)


def console(*, stderr: bool = False) -> Console:
    """Give a console that prints texts as they are.

    Args:
        stderr: Whether it prints to the standard error: progress and errors.
    """
    screen = _Screen(stderr=stderr, highlight=False, emoji=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = PIPED_WIDTH
    return screen


def show_error(text: str) -> None:
    """Say in one line what went wrong."""
    console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)


@contextmanager
def command_errors() -> Iterator[None]:
    """End a command with one clear error, and with status 1 only where the command itself says so."""
    try:
        yield
    except typer.Exit:
        raise
    except (ArgumentValueError, ArgumentTypeError) as error:
        show_error(str(error))
        raise typer.Exit(BAD_ARGUMENTS) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        raise typer.Exit(BROKEN_PIPE) from error
    except OSError as error:
        show_error(f"{error.filename or 'a file'} could not be read or written: {error.strerror or error}")
        raise typer.Exit(FAILED) from error
    except Exception as error:
        traceback.print_exc()
        show_error(f"this is a mistake in the benchmark: {error}")
        raise typer.Exit(FAILED) from error
