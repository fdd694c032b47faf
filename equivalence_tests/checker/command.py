"""sidebyside verify: check somebody's attention from the command line."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from equivalence_tests.checker.sandbox import Request, verify_in_child
from equivalence_tests.checker.verify import KINDS

__all__ = ["verify_command"]


def verify_command(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="file.py:Name or module.path:Name", show_default=False)
    ],
    kind: Annotated[
        str | None, typer.Option(help=f"What it is, if the name does not tell: {', '.join(KINDS)}.")
    ] = None,
    adapter: Annotated[str, typer.Option(help="file.py:NAME of an Adapter that says what cannot be found out.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON; - for the terminal.")
    ] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", help="Write the checks as JUnit XML.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until the code is stopped.", min=1)] = 120.0,
    memory_mib: Annotated[int, typer.Option("--memory", help="MiB of memory that it may take.", min=256)] = 4096,
) -> None:
    """Check an attention against torch.nn, and name its bug.

    Reads how the class is built and called, compares it with the built-in, and searches for the mistake that
    reproduces its numbers. Exit status: 0 equal, 1 deviates, 2 could not be checked.
    """
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"must be one of {', '.join(KINDS)}, got {kind!r}", param_hint="--kind")
    errors = Console(stderr=True)
    with errors.status(f"checking {target}") as status:
        report = verify_in_child(
            Request(target, kind, adapter, seconds=min(15.0, timeout / 2)),
            timeout=timeout,
            memory_mib=memory_mib,
            progress=lambda text: status.update(f"checking {target}: {text}"),
        )
    if json_file == Path("-"):
        typer.echo(report.to_json())
    else:
        Console().print(report)
        _write(json_file, report.to_json(), "--json")
    _write(junit_file, report.to_junit(), "--junit")
    raise typer.Exit(report.exit_status)


def _write(path: Path | None, text: str, option: str) -> None:
    if path is None or path == Path("-"):
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint=option) from error


def main() -> None:
    """Run the command by itself: python -m equivalence_tests.checker.command."""
    typer.run(verify_command)


if __name__ == "__main__":
    main()
