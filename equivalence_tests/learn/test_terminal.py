"""Tests of what traps and explanations look like on narrow terminals and in pipes."""

import pytest
from rich.console import Console
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.learn.terminal import code_block

LONG = "promised = encoder(source, is_causal=True)  # reads no mask, and so need not wait for the device"


def shown(code: str, width: int, first_line: int | None = None) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(code_block(code, first_line))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [48, 60, 80])
def test_a_comment_stays_a_comment_where_it_is_too_long(width: int) -> None:
    lines = shown(f"if found:\n    {LONG}", width)
    assert max(map(len, lines)) <= width
    assert lines[:2] == ["if found:", "    promised = encoder(source, is_causal=True)"]
    assert all(line.startswith("    # ") for line in lines[2:])
    assert " ".join(line.strip().removeprefix("# ") for line in lines[2:]) == LONG.split("# ")[1]
    compile("\n".join(lines), "shown", "exec")


def test_a_line_that_fits_is_left_as_it_is() -> None:
    assert shown(LONG, 120) == [LONG]
    assert shown("first(  # open", 60, first_line=7) == ["7 first(  # open"]


@pytest.mark.parametrize("arguments", [["traps", "mask_polarity"], ["explain", "is_causal"]])
def test_what_is_piped_has_no_blanks_at_the_ends_of_lines(arguments: list[str]) -> None:
    lines = CliRunner().invoke(app, arguments, env={"COLUMNS": "60"}).stdout.splitlines()
    assert len(lines) > 20
    assert [line for line in lines if line != line.rstrip()] == []
