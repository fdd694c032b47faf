"""``sidebyside page``: write the page to learn from."""

from pathlib import Path
from typing import Annotated

import typer

from equivalence_tests.learn.page.building import build_page

__all__ = ["page"]


def page(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = Path("attention.html"),
) -> None:
    """Write one self-contained HTML page: hand-written and built-in attention side by side, with live numbers."""
    if file.is_dir():
        raise typer.BadParameter(f"FILE must be a file, got the folder {file}")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"FILE must lie in a folder that exists, got {file}")
    try:
        file.touch()  # before the work, not after it
    except OSError as error:
        raise typer.BadParameter(f"FILE must be writable, got {file} ({error.strerror})") from None
    file.write_text(build_page(), encoding="utf-8")
    typer.echo(f"{file}: {file.stat().st_size / 1e6:.2f} MB. Open it in a browser.")
