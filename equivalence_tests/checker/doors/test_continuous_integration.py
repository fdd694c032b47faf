"""Tests of action.yml and .pre-commit-hooks.yaml: their lines are run as the runner and pre-commit run them."""

import os
import re
import shlex
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equivalence_tests.__main__ import app

ROOT = Path(__file__).parents[3]
ACTION = (ROOT / "action.yml").read_text(encoding="utf-8")
HOOKS = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
SHOWS_ITS_ARGUMENTS = '#!/bin/sh\nprintf "%s\\n" "$@"\nexit 1\n'


def step(name: str) -> str:
    """The lines of one step of the action."""
    return textwrap.dedent(re.findall(rf"- name: {name}\n.*?run: \|\n(.*?)(?:\n\n|\Z)", ACTION, re.DOTALL)[0])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A change that touches three files, and leaves one as it was."""
    made = tmp_path / "repository"
    made.mkdir()
    git(made, "init", "--quiet")
    for name in ("kept.py", "touched.py", "removed.py"):
        (made / name).touch()
    git(made, "add", ".")
    git(made, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "before")
    (made / "sub").mkdir()
    for name in ("touched.py", "sub/my model.ipynb", "sub/test_model.py", "notes.md"):
        (made / name).write_text("new")
    (made / "removed.py").unlink()
    git(made, "add", "--all")
    git(made, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "after")
    return made


def git(place: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=place, check=True, capture_output=True, text=True).stdout.strip()


def run_steps(place: Path, **inputs: str) -> tuple[subprocess.CompletedProcess[str], Mapping[str, str]]:
    """Run the two steps that are ours, with a ``sidebyside`` that prints what it is called with."""
    temporary, output = place.parent / "runner", place.parent / "output"
    temporary.mkdir()
    (temporary / "sidebyside").write_text(SHOWS_ITS_ARGUMENTS)
    (temporary / "sidebyside").chmod(0o755)
    output.touch()
    given = {"RUNNER_TEMP": str(temporary), "GITHUB_OUTPUT": str(output), "PATHS": "", "ARGUMENTS": "--allow-partial"}
    environment = os.environ | given | inputs | {"PATH": f"{temporary}:{os.environ['PATH']}"}
    script = f"set -eo pipefail\n{step('targets')}\n(\n{step('verify')})\n"  # as GitHub's `shell: bash`
    done = subprocess.run(["bash", "-c", script], cwd=place, env=environment, capture_output=True, text=True)
    outputs = (line.partition("=") for line in output.read_text().splitlines())
    return done, {name: value for name, _, value in outputs}


def targets(said: str) -> list[str]:
    return said.splitlines()[said.splitlines().index("--") + 1 :]


def test_the_files_that_a_change_touches_are_checked(repository: Path) -> None:
    done, outputs = run_steps(repository, BASE=git(repository, "rev-parse", "HEAD~1"))
    assert targets(done.stdout) == ["sub/my model.ipynb", "touched.py"]
    assert done.returncode == 1
    assert outputs == {"sarif": f"{repository.parent}/runner/sidebyside.sarif"}


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ({"BASE": "0" * 40}, ["kept.py", "sub/my model.ipynb", "touched.py"]),
        ({"PATHS": "src\n\nmodel.py:My Class\n", "BASE": "none"}, ["src", "model.py:My Class"]),
    ],
)
def test_a_new_branch_is_checked_whole_and_paths_as_they_are_given(
    inputs: dict[str, str], wanted: list[str], repository: Path
) -> None:
    assert targets(run_steps(repository, **inputs)[0].stdout) == wanted


def test_a_change_without_code_passes(repository: Path) -> None:
    done, outputs = run_steps(repository, BASE="HEAD")
    assert (done.returncode, outputs) == (0, {})
    assert "touches no Python file" in done.stdout


def test_both_call_a_command_that_there_is_and_pass_what_holds_no_attention(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def attend():\n    return 1\n")
    (action,) = re.findall(r"sidebyside (verify [^$]*)--sarif", step("verify"))
    (hook,) = re.findall(r"entry: sidebyside (.*)", HOOKS)
    (default,) = re.findall(r"arguments:\n.*\n    default: (.*)", ACTION)
    for arguments in (f"{action} {default}", hook):
        findings = tmp_path / "findings.sarif"
        called = [*shlex.split(arguments), "--sarif", str(findings), "--", str(tmp_path / "other.py")]
        assert CliRunner().invoke(app, called).exit_code == 0
        assert '"results": []' in findings.read_text()
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "other.py")]).exit_code == 2
