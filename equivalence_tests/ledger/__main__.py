"""``python -m equivalence_tests.ledger``: run the checker over all that its tests show it, and say what changed."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from equivalence_tests.ledger.comparing import Row, changes, kept, read, summary, written

HOME = Path(__file__).parent
ROOT = HOME.parents[1]
RESULTS = HOME / "results" / "ledger.jsonl"
CHECKER = "equivalence_tests/checker"
TESTS = (
    *(f"{CHECKER}/{room}" for room in ("zoo", "mistakes", "engine", "equivalent", "parts", "layers", "reach")),
    "equivalence_tests/wrong/test_verdicts.py",
    "equivalence_tests/ledger/lookalikes",
)


def run(tests: Sequence[str], folder: Path, jobs: int) -> list[str]:
    """Run tests with each report of the checker written into a folder.

    Args:
        tests: Their files and folders, from the root of the project.
        folder: Receives the rows.
        jobs: Number of processes.

    Returns:
        The tests that failed.

    Raises:
        RuntimeError: If pytest could not run them.
    """
    options = ["-p", "equivalence_tests.ledger.recording", "--ledger", str(folder), "-m", "", "-q"]
    options += ["-p", "no:cacheprovider", "--tb=no", "-rfE"]
    options += ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)


def main(
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    tests: Annotated[list[str] | None, typer.Option("--test", help="Only these files; nothing is written.")] = None,
) -> None:
    """Print what the checker says differently from the ledger, and write the ledger anew; 1 if anything changed."""
    say, before = Console(soft_wrap=True, highlight=False, markup=False).print, read(RESULTS)
    with tempfile.TemporaryDirectory() as folder:
        failed = run(tests or TESTS, Path(folder), jobs)
        after = {target: row for path in Path(folder).glob("*.jsonl") for target, row in read(path).items()}
    if tests:
        before = {target: row for target, row in before.items() if target.partition("::")[0] in _files(after)}
    changed = [*changes(before, after)]
    say("\n".join([*changed, *(f"failed: {test}" for test in failed)]))
    say(f"before: {summary([*before.values()])}\nnow:    {summary([*after.values()])}\n{len(changed)} changed")
    if not tests:
        written(RESULTS, kept(before, after))
    raise typer.Exit(int(bool(changed)))


def _files(rows: Mapping[str, Row]) -> set[str]:
    return {target.partition("::")[0] for target in rows}


if __name__ == "__main__":
    typer.run(main)
