"""The command ``sidebyside``; also ``python -m equivalence_tests``."""

import typer

from equivalence_tests.checker.command import verify_command
from equivalence_tests.compare import compare
from equivalence_tests.explain.command import explain
from equivalence_tests.traps.command import traps

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command()(compare)
app.command("verify")(verify_command)
app.command()(traps)
app.command()(explain)


@app.callback()
def about() -> None:
    """Two implementations of attention, side by side."""


def main() -> None:
    """Run the command line."""
    app(prog_name="sidebyside")


if __name__ == "__main__":
    main()
