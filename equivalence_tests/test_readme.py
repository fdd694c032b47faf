"""README does what it says: its code runs, in the order in which a person would read it."""

import doctest
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.checker.helpers_for_tests import blocks, without_rounding
from equivalence_tests.checker.zoo.listing import zoo
from scratch import __main__ as scratch_main

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the reader writes the one file of the examples."""
    monkeypatch.chdir(tmp_path)
    command, file = "verify --example", "my_attention.py"
    assert f"`sidebyside {command} > {file}`" in README.read_text(encoding="utf-8")
    (tmp_path / file).write_text(CliRunner().invoke(app, command.split()).stdout)
    return tmp_path


def test_the_file_of_the_examples_is_shown_once(folder: Path) -> None:
    written = (folder / "my_attention.py").read_text()
    assert [block for block in blocks(README, "python") if "nn.Module)" in block] == [written]


def test_the_python_of_readme_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_attention", raising=False)
    names: dict[str, Any] = {}
    found = blocks(README, "python")
    assert len(found) >= 4
    for block in found:
        exec(compile(block, str(README), "exec"), names)  # the reader's own session
    sys.modules.pop("my_attention", None)
    assert "output" in capsys.readouterr().out
    assert names["maps"]["encoder.layers.0.self_attn"].shape == (2, 4, 7, 7)
    assert list(names["stages"]) == ["q", "k", "v", "scores", "masked_scores", "weights", "context", "merged", "output"]


@pytest.mark.parametrize("command", ["verify my_attention.py:MultiHeadAttention", "traps mask_polarity"])
def test_what_readme_shows_is_printed(command: str, folder: Path) -> None:
    prompt = f"$ sidebyside {command}\n"
    (shown,) = (block.removeprefix(prompt) for block in blocks(README, "text") if block.startswith(prompt))
    printed = iter(without_rounding(CliRunner().invoke(app, command.split(), env={"COLUMNS": "100"}).stdout))
    for line in without_rounding(shown):
        assert line.strip() == "..." or line in printed, f"not printed, or not in this order: {line!r}"


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Give each command of ours in the blocks for a shell, and between backticks, with its arguments."""
    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
    for line in [*lines, *re.findall(r"`(sidebyside[^`]*)`", text)]:
        command = line.partition(" #")[0].partition(" > ")[0]
        found = re.search(r"(?:^| )(sidebyside(?:-bench)?|python -m scratch)((?: .*)?)$", command)
        if found:
            yield found[1], shlex.split(found[2])


def test_every_command_of_readme_is_one_that_there_is() -> None:
    apps = {"sidebyside": app, "sidebyside-bench": import_module("benchmarks.command").app}
    apps["python -m scratch"] = scratch_main.app
    found = list(commands(README.read_text(encoding="utf-8")))
    assert len(found) > 20
    for name, arguments in found:  # an option that there is not is refused all the same
        result = CliRunner().invoke(apps[name], [*arguments, "--help"])
        assert result.exit_code == 0, f"{name} {' '.join(arguments)}: {result.stderr}"


def test_the_sessions_of_readme_print_what_they_show() -> None:
    for block in blocks(README, "pycon"):
        test = doctest.DocTestParser().get_doctest(block, {}, "README", str(README), 0)
        assert doctest.DocTestRunner().run(test) == doctest.TestResults(failed=0, attempted=len(test.examples))
        assert test.examples


def test_links_of_readme_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        inside = target in anchors if target.startswith("#") else (README.parent / target).exists()
        assert inside or target.startswith("https://"), target


def test_readme_counts_the_classes_of_the_zoo() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert re.findall(r"a zoo of (\d+) small classes", text) == [str(len(zoo()))]


def test_the_make_targets_of_readme_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", README.read_text(encoding="utf-8")))
    assert named >= {"compare", "test"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
