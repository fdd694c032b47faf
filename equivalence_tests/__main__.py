"""The command ``sidebyside``; also ``python -m equivalence_tests``."""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# What each command is for, as the list shows it, and the function that does it: it is imported when it is asked for,
# so that the list need not wait for torch.
COMMANDS = {
    "compare": ("equivalence_tests.compare.command:compare", "Show that scratch and builtin compute the same numbers."),
    "verify": (
        "equivalence_tests.checker.doors.command:verify_command",
        "Check attention code against torch.nn: what is wrong, on which line, and how to fix it.",
    ),
    "kernels": (
        "equivalence_tests.kernels.command:kernels",
        "Find which of torch's attentions are wrong on this machine, forward and backward.",
    ),
    "models": (
        "equivalence_tests.models.command:models",
        "Find where an attention function for transformers goes wrong: in which models, situations and layers.",
    ),
    "traps": (
        "equivalence_tests.learn.traps.command:traps",
        "List the traps of torch.nn's attention, or show one in full, run on the installed torch.",
    ),
    "explain": (
        "equivalence_tests.learn.explain.command:explain",
        "Explain an argument of torch.nn's attention, with live code.",
    ),
    "practice": (
        "equivalence_tests.learn.practice.command:practice",
        "Learn by writing: twenty exercises, by hand and with torch, with a check that says what is wrong and why.",
    ),
    "page": (
        "equivalence_tests.learn.page.command:page",
        "Write one self-contained HTML page: hand-written and built-in attention side by side, with live numbers.",
    ),
}


# What typer calls a type in the help of a command, and what it is called here.
KINDS = {"str": "text", "int": "number", "float": "number", "list[str]": "text", "int range": "number"}
KINDS |= {"float range": "number", "list[int]": "number"}


def _in_words(shown: Callable[..., str], ctx: Any) -> str:
    """Name the kind of value that an argument takes in a word, and not by the type in the source."""
    label = shown(ctx=ctx).strip("<>")
    return f"<{KINDS.get(label, label)}>"


class LazyGroup(TyperGroup):
    """A group whose commands are imported one by one, when they are run."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Name the commands, in reading order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Import one command; None if there is no such."""
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        try:
            home = importlib.import_module(module)
        except ModuleNotFoundError:
            _require_torch()
            raise
        alone.command(cmd_name)(getattr(home, function))
        command = typer.main.get_command(alone)
        for parameter in command.params:
            if hasattr(parameter, "display_type"):  # older versions of typer write TEXT by themselves
                parameter.display_type = partial(_in_words, parameter.display_type)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sidebyside {importlib.metadata.version('attention-side-by-side')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Attention in PyTorch, by hand and built in, side by side."""
    del version  # its callback has answered already


def main() -> None:
    """Run the command line."""
    _find_ours_first()
    if {"--help", "--version"}.isdisjoint(sys.argv):
        _require_torch()
    app(prog_name="sidebyside")


def bench() -> None:
    """Run the command line of ``benchmarks``, from here, where no folder of the same name can be in the way."""
    _find_ours_first()
    _require_torch()
    importlib.import_module("benchmarks.__main__").main()


def _require_torch() -> None:
    """Say in one line that torch is missing, before anything else stumbles over it."""
    if importlib.util.find_spec("torch") is None:
        typer.echo(f"error: torch is not installed for {sys.executable}: pip install torch", err=True)
        raise SystemExit(2)


def _find_ours_first() -> None:
    """Pass by what is called ``scratch`` or ``benchmarks`` in a folder on PYTHONPATH, and in that of ``python -m``."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


if __name__ == "__main__":
    main()
