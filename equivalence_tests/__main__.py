"""The command ``sidebyside``; also ``python -m equivalence_tests``."""

import typer

from equivalence_tests.compare import compare

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command()(compare)


@app.callback()
def about() -> None:
    """Two implementations of attention, side by side."""


def main() -> None:
    """Run the command line."""
    app(prog_name="sidebyside")


if __name__ == "__main__":
    main()
