"""Tests of results.py: what is written comes back, and what is not whole or of another version is named."""

import csv
import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks.environment import environment_of
from benchmarks.grids import Case
from benchmarks.peers import PEERS
from benchmarks.results import Row, append_rows, ratio_between, read_rows, without_cut_line, write_csv
from equivalence_tests.learn.page import speed

ENVIRONMENT = environment_of(torch.device("cpu"))
ROWS = [
    Row(Case("attention"), "builtin", "timed", ENVIRONMENT, rounds_us=(1.0, 2.0, 4.0), median_us=2.0, flops=7),
    Row(Case("attention", mask="both"), "scratch", "unequal", ENVIRONMENT, detail="output[0] = 1, but should be 2"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "results.jsonl"
    append_rows(path, ROWS[:1])
    append_rows(path, ROWS[1:])
    return path


def test_rows_come_back_as_they_were(path: Path) -> None:
    assert read_rows(path) == ROWS
    assert len(path.read_text().splitlines()) == 2
    append_rows(path, ROWS)
    assert read_rows(path) == ROWS * 2


def test_a_disk_that_is_full_leaves_the_rows_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        append_rows(path, ROWS)
    assert path.read_bytes() == kept


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_cannot_be_written_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        append_rows(Path("/dev/full"), ROWS)


def test_units_stand_in_the_names() -> None:
    numbers = {x.name for x in dataclasses.fields(Row) if "float" in str(x.type)}
    units = ("_us", "_per_s", "ratio_low", "ratio_high", "ratio_to_builtin", "share_of_matmul_rate")
    assert all(name.endswith(units) for name in numbers)


def test_rows_are_compared_by_rounds_where_they_ran_in_turns() -> None:
    slow = dataclasses.replace(ROWS[0], contender="scratch", rounds_us=(2.0, 4.0, 8.0))
    assert dataclasses.astuple(ratio_between(slow, ROWS[0])) == (2.0, 2.0, 2.0)
    later = dataclasses.replace(slow, environment=dataclasses.replace(ENVIRONMENT, measured_at="later"))
    apart = ratio_between(later, ROWS[0])
    assert apart.value == 2.0
    assert apart.low < 2.0 < apart.high


def test_a_line_cut_short_is_named_and_taken_off_to_go_on(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2, is cut short; --resume goes on"):
        read_rows(path)
    without_cut_line(path)
    assert read_rows(path) == ROWS[:1]
    path.write_bytes(whole)
    without_cut_line(path)
    assert path.read_bytes() == whole
    path.write_bytes(whole[:10])
    without_cut_line(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row | {"schema_version": 99}, "line 1, must be of version 2, got version 99"),
        (lambda row: {name: x for name, x in row.items() if name != "case"}, "with all its fields: 'case'"),
        (lambda row: row | {"colour": "red"}, "with all its fields: .*colour"),
        (lambda _: [1, 2], r"line 1, must be a row of results, got '\[1, 2\]'"),
    ],
)
def test_what_is_no_row_is_named(path: Path, change: object, message: str) -> None:
    assert callable(change)
    path.write_text(json.dumps(change(dataclasses.asdict(ROWS[0]))) + "\n")
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_other_text_and_no_file_are_named(path: Path) -> None:
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="line 1, must be a row of results, got 'hello'"):
        read_rows(path)
    with pytest.raises(ValueError, match=r"results must be a file written by this command, got .*missing"):
        read_rows(path.with_name("missing"))
    path.write_text("")
    with pytest.raises(ValueError, match="must have at least one row of results, got an empty file"):
        read_rows(path)


def test_the_csv_has_a_column_for_each_setting_and_result(tmp_path: Path) -> None:
    write_csv(tmp_path / "results.csv", ROWS)
    with (tmp_path / "results.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["component"] == "attention"
    assert first["median_us"] == "2.0"
    assert first["torch"] == torch.__version__
    assert second["status"] == "unequal"
    assert second["median_us"] == ""
    assert not {"case", "environment", "rounds_us"} & set(first)


def test_the_page_to_learn_from_shows_every_row_that_was_timed() -> None:
    """It reads the files itself: what it depends on must not depend on it."""
    rows = [x for x in read_rows(speed.RESULTS / speed.SHOWN / "results.jsonl") if x.status == "timed"]
    timed = [(x.contender, x.case.query_len) for x in rows if x.contender not in speed.LEFT_OUT]
    assert set(speed.LEFT_OUT) == {*PEERS} - {"naive"}
    data = speed.speed_data()
    answers = [single.answer for single in data["singles"]]
    answers += [answer for chart in data["charts"] for answer in chart.answers]
    assert sorted((row.contender, answer.length) for answer in answers for row in answer.rows) == sorted(timed)
