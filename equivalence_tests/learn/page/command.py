"""``sidebyside page``: write the page to learn from."""

from pathlib import Path
from typing import Annotated

import typer

from equivalence_tests.learn.page.building import SECTIONS, build_page
from equivalence_tests.progress import progress

__all__ = ["page"]


def page(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("attention.html"),
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
    with progress(f"computing {len(SECTIONS)} sections", len(SECTIONS)) as advance:
        html = build_page(lambda title: advance(f"computed {title!r}"))
    file.write_text(html, encoding="utf-8")
    typer.echo(f"{file}: {file.stat().st_size / 1e6:.2f} MB. Open it in a browser.")
