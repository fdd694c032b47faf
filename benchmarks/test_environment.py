"""Tests of environment.py: the commit is this project's, or none."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import environment


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_repository_that_only_surrounds_it_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages" / "environment.py"
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert environment._commit() == ""
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "--message", "another project")
    assert environment._commit() == ""
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "this project")
    assert environment._commit() == git(tmp_path, "rev-parse", "--short=12", "HEAD")
    installed.write_text("changed")
    assert environment._commit() == git(tmp_path, "rev-parse", "--short=12", "HEAD") + "+"
