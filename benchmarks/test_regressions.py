"""Tests of regressions.py: changes beyond noise are found, and noise is not."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.command import app
from benchmarks.environment import environment_of
from benchmarks.grids import Case
from benchmarks.regressions import changes_between
from benchmarks.results import Row, append_rows

ENVIRONMENT = environment_of(torch.device("cpu"))


def row(mean_us: float, seed: int, memory: int = 1000, contender: str = "scratch") -> Row:
    """Make a row with noise of a twentieth."""
    rounds = mean_us * (1 + 0.05 * np.random.default_rng(seed).standard_normal(25))
    times = {"rounds_us": tuple(rounds.tolist()), "median_us": float(np.median(rounds))}
    return Row(Case("attention"), contender, "timed", ENVIRONMENT, peak_memory_bytes=memory, **times)  # type: ignore[arg-type]


def verdict(old: Row, new: Row) -> str:
    (change,) = changes_between([old], [new], threshold=0.05)
    return change.verdict


@pytest.mark.parametrize("seed", range(5))
def test_verdicts(seed: int) -> None:
    old = row(100.0, seed)
    assert verdict(old, row(101.0, seed + 100)) == "same"
    assert verdict(old, row(125.0, seed + 100)) == "slower"
    assert verdict(old, row(80.0, seed + 100)) == "faster"
    assert verdict(old, row(100.0, seed + 100, memory=1100)) == "more memory"
    assert verdict(old, row(100.0, seed + 100, memory=900)) == "less memory"
    assert verdict(old, replace(old, status="unequal")) == "lost"
    assert verdict(replace(old, status="out of memory"), old) == "gained"
    assert verdict(replace(old, status="unequal"), replace(old, status="unavailable")) == "same"


def test_a_small_change_does_not_count_however_sure_it_is() -> None:
    old = replace(row(1.0, 0), rounds_us=(100.0, 100.0, 100.0))
    assert verdict(old, replace(old, rounds_us=(104.0, 104.0, 104.0))) == "same"
    assert verdict(old, replace(old, rounds_us=(106.0, 106.0, 106.0))) == "slower"


def test_a_large_change_in_larger_noise_does_not_count() -> None:
    old = replace(row(1.0, 0), rounds_us=(50.0, 100.0, 200.0))
    assert verdict(old, replace(old, rounds_us=(60.0, 110.0, 190.0))) == "same"


def test_only_equal_cells_are_compared() -> None:
    old = [row(100.0, 0), row(100.0, 1, contender="builtin")]
    new = [row(100.0, 2, contender="math"), row(200.0, 3, contender="builtin")]
    assert [(x.new.contender, x.verdict) for x in changes_between(old, new, 0.05)] == [("builtin", "slower")]
    with pytest.raises(ValueError, match="must share a cell"):
        changes_between(old, [replace(old[0], case=replace(old[0].case, threads=9))], 0.05)


@pytest.mark.parametrize("seed", range(5))
def test_what_slows_all_alike_is_the_machine(seed: int) -> None:
    def rows(load: float, scratch_us: float, at: int) -> list[Row]:
        return [row(load * 100.0, at, contender="builtin"), row(load * scratch_us, at + 1)]

    def verdicts(new: list[Row]) -> list[str]:
        return [x.verdict for x in changes_between(rows(1.0, 200.0, seed), new, 0.05)]

    assert verdicts(rows(3.0, 200.0, seed + 100)) == ["same", "same"]
    assert verdicts(rows(1.5, 300.0, seed + 100)) == ["same", "slower"]
    assert verdicts([row(50.0, seed + 100, contender="builtin"), row(200.0, seed + 101)]) == ["faster", "same"]
    apart = [row(300.0, seed + 100, contender="builtin"), row(600.0, seed + 101)]
    apart[1] = replace(apart[1], environment=replace(ENVIRONMENT, measured_at="later"))
    assert verdicts(apart) == ["slower", "slower"]


def run(folder: Path, old: Sequence[Row], new: Sequence[Row]) -> tuple[int, str]:
    paths = [folder / "old.jsonl", folder / "new.jsonl"]
    for path, rows in zip(paths, (old, new), strict=True):
        path.unlink(missing_ok=True)
        append_rows(path, rows)
    result = CliRunner().invoke(app, ["compare", *map(str, paths)])
    return result.exit_code, result.output


def test_the_command_ends_with_1_on_a_regression(tmp_path: Path) -> None:
    slow, fast = row(150.0, 0), row(100.0, 1)
    status, output = run(tmp_path, [fast], [slow])
    assert status == 1
    assert "slower" in output
    assert " scratch " in output
    assert "1 thread" in " ".join(output.split())
    assert "Cells compared: 1. Worse: 1, better: 0, the same: 0." in output
    status, output = run(tmp_path, [slow], [fast])
    assert status == 0
    assert "faster" in output
    status, output = run(tmp_path, [fast], [fast])
    assert (status, output) == (0, "Cells compared: 1. Worse: 0, better: 0, the same: 1.\n")


def test_the_command_says_if_the_machines_differ(tmp_path: Path) -> None:
    elsewhere = replace(row(100.0, 0), environment=replace(ENVIRONMENT, processor="Another"))
    assert "Measured on different machines or versions" in run(tmp_path, [row(100.0, 0)], [elsewhere])[1]


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 2
    assert result.output.startswith("error: results must be a file written by this command")
