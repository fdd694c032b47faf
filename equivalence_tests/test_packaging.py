"""What is installed: every module and every file that a command reads, and no test."""

import subprocess
import sys
from pathlib import Path

import pytest

import scratch

ROOT = Path(scratch.__file__).parents[1]
READ_BY_COMMANDS = (
    "scratch/py.typed",
    "builtin/py.typed",
    "equivalence_tests/checker/GUIDE.md",
    "equivalence_tests/learn/page/templates/page.html.j2",
    "equivalence_tests/learn/traps/states.json",
    "equivalence_tests/mutation/equivalent.toml",
    "benchmarks/templates/page.html",
    "benchmarks/results/cpu/results.jsonl",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Collect what goes into a wheel."""
    folder = tmp_path_factory.mktemp("build")
    where = str(folder)
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", where, "build_py", "--build-lib", where]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if not path.parts[0].endswith(".egg-info")}


def is_for_tests(path: str) -> bool:
    name = Path(path).name
    return name.startswith("test_") or name in ("conftest.py", "helpers_for_tests.py")


def test_no_test_is_installed(installed: set[str]) -> None:
    assert [path for path in installed if is_for_tests(path)] == []


def test_every_module_is_installed(installed: set[str]) -> None:
    packages = ("scratch", "builtin", "equivalence_tests", "benchmarks")
    modules = {path.relative_to(ROOT).as_posix() for package in packages for path in (ROOT / package).rglob("*.py")}
    assert {path for path in installed if path.endswith(".py")} == {x for x in modules if not is_for_tests(x)}


def test_files_that_commands_read_are_installed(installed: set[str]) -> None:
    assert set(READ_BY_COMMANDS) <= installed
