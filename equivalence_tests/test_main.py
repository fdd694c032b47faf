"""Tests of ``sidebyside`` itself: it answers without torch, and its list says what its commands say."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import equivalence_tests
from equivalence_tests import checker
from equivalence_tests.__main__ import COMMANDS, app, bench, main

ROOT = Path(__file__).parents[1]
# Fails if torch was imported on the way.
WITHOUT_TORCH = """
import sys
from equivalence_tests.__main__ import app
try:
    app(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""
# Runs commands as their console scripts do, all in one process.
SCRIPTS = """
import contextlib, importlib, sys
for home, *arguments in (words.split() for words in sys.argv[1:]):
    module, _, function = home.partition(":")
    sys.argv[1:] = arguments
    with contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function)()
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    (home, _, function), summary = COMMANDS[name][0].partition(":"), COMMANDS[name][1]
    told = inspect.getdoc(getattr(importlib.import_module(home), function)) or ""
    assert " ".join(told.split("\n\n")[0].split()) == summary


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--help"], ["--show-completion", "bash"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "AssertionError" not in ran.stderr, ran.stderr


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.2.3 of {name}")
    assert CliRunner().invoke(app, ["--version"]).stdout == "sidebyside 1.2.3 of attention-side-by-side\n"


def test_an_unknown_command_is_named() -> None:
    result = CliRunner().invoke(app, ["verfy"])
    assert result.exit_code == 2
    assert "verfy" in result.stderr


def test_folders_of_the_users_that_are_called_like_ours_are_not_taken_for_them(tmp_path: Path) -> None:
    for name in ("scratch", "builtin", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a package of the user')")
    homes = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    calls = (f"{homes['sidebyside']} explain --help", f"{homes['sidebyside-bench']} --help")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", SCRIPTS, *calls]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    assert re.findall(r"Usage: (.*) \[OPTIONS", ran.stdout) == ["sidebyside explain", "sidebyside-bench"]


@pytest.mark.parametrize(("command", "asked"), [(main, ["traps"]), (bench, ["--quick"]), (main, ["compare", "--help"])])
def test_without_torch_one_line_says_so(
    command: Callable[[], None],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {"torch": None}.get)
    monkeypatch.setitem(sys.modules, "equivalence_tests.compare.command", None)  # as if what it imports were missing
    monkeypatch.setattr(sys, "argv", ["sidebyside", *asked])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="2"):
        command()
    assert capsys.readouterr().err == f"error: torch is not installed for {sys.executable}: pip install torch\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_kinds_of_values_in_words(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "120"}).stdout
    assert set(re.findall(r"<(\S+(?: range)?)>", shown)) <= {"text", "number", "path", "file", "dir"} | choices(shown)


def choices(shown: str) -> set[str]:
    return set(re.findall(r"<(\w+(?:\|\w+)+)>", shown))


@pytest.mark.parametrize("package", [equivalence_tests, checker])
def test_every_exported_name_is_found_when_it_is_asked_for(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018
