"""Tests of children.py: a process that runs out of memory, is ended, or does not end by itself, is a result."""

import multiprocessing
import multiprocessing.util
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import scratch
from benchmarks import children, contenders
from benchmarks.children import (
    LARGE_BYTES,
    PATIENCE_SECONDS,
    ChildEndedError,
    available_bytes,
    expected_bytes,
    in_child,
    run_case_safely,
)
from benchmarks.grids import COMPONENTS, Case, Grid, cases_of
from benchmarks.measuring import Runner, peak_memory_bytes
from benchmarks.results import Row
from benchmarks.running import rows_without_times
from benchmarks.workloads import VOCABULARY, runnable, workload
from equivalence_tests.instruments.warm_processes import warm_context

CASE = Case("attention", batch=1, query_len=5, key_len=7, embed_dim=33, num_heads=3)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork children from a process that has imported torch."""
    context = warm_context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


def allocate(count: int) -> str:
    """Run in the child."""
    try:
        return f"got {torch.ones(count, dtype=torch.uint8).numel()}"
    except RuntimeError as error:
        return str(error)


def end_itself() -> None:
    """Run in the child, as if the system had ended it."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("warm")
def test_a_child_is_held_to_its_memory() -> None:
    assert in_child(allocate, [2**26], None) == f"got {2**26}"
    assert "can't allocate memory" in in_child(allocate, [2**34], 4 * 2**30)


def leave_last(path: Path) -> None:
    """Run in the child: write a file when it ends by itself."""
    multiprocessing.util.Finalize(None, path.touch, exitpriority=1)


@pytest.mark.usefixtures("warm")
def test_a_child_that_has_answered_ends_by_itself(tmp_path: Path) -> None:
    in_child(leave_last, [tmp_path / "ended"])
    assert (tmp_path / "ended").exists()


@pytest.mark.usefixtures("warm")
def test_a_child_that_is_ended_is_told_by_its_exit_code() -> None:
    with pytest.raises(ChildEndedError, match="was killed, as happens where memory runs out, before it gave a result"):
        in_child(end_itself, [])
    with pytest.raises(ChildEndedError, match="its process ended with exit code 7 before it gave a result"):
        in_child(os._exit, [7])


@pytest.mark.usefixtures("warm")
def test_a_child_that_is_killed_while_it_answers_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(_: Connection) -> None:
        raise OSError("got end of file during message")

    monkeypatch.setattr(Connection, "recv", cut_short)
    with pytest.raises(ChildEndedError, match="was killed"):
        in_child(end_itself, [])


def test_a_child_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", refuse)
    with pytest.raises(ChildEndedError, match=r"could not be started \(Resource temporarily unavailable\)"):
        in_child(end_itself, [])


@pytest.mark.usefixtures("warm")
def test_a_child_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ChildEndedError, match="was stopped after 0 s before it gave a result"):
        in_child(time.sleep, [1e6], patience_seconds=0.0)
    assert multiprocessing.active_children() == []


def test_a_child_does_not_hear_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert in_child(signal.getsignal, [signal.SIGINT]) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before


class FakeChildren:
    """Stands in for ``in_child``: ends where one of some contenders takes part, and writes down who was run."""

    def __init__(self, deadly: Sequence[str], exit_code: int = -9) -> None:
        self.deadly, self.exit_code = deadly, exit_code
        self.ran: list[Sequence[str]] = []
        self.limits: list[tuple[int | None, float | None]] = []

    def __call__(self, _run: object, arguments: Any, limit_bytes: int | None, patience: float | None) -> list[Row]:
        case, names, _ = arguments
        self.ran.append(names)
        self.limits.append((limit_bytes, patience))
        if set(names) & set(self.deadly):
            raise ChildEndedError("ended", self.exit_code)
        return run_case(case, names, 0.0)


def run_case(case: Case, chosen: Sequence[str], _seconds: float) -> list[Row]:
    """Stand in for the real one."""
    return [replace(row, detail="ran") for row in rows_without_times(case, chosen, "timed", "")]


def statuses(rows: Sequence[Row]) -> dict[str, str]:
    return {row.contender: row.status for row in rows}


@pytest.fixture
def children_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeChildren]:
    """Put fake children in place of real ones, and take "my.py:..." for functions."""
    monkeypatch.setattr(children, "run_case", run_case)
    monkeypatch.setattr(contenders, "own_takes_part", lambda _name, case: case.component == "attention")

    def make(*arguments: Any) -> FakeChildren:
        fake = FakeChildren(*arguments)
        monkeypatch.setattr(children, "in_child", fake)
        return fake

    return make


LARGE = replace(CASE, query_len=2**15, key_len=2**15)


def test_only_large_cases_and_the_users_code_run_apart(children_of: Callable[..., FakeChildren]) -> None:
    fake = children_of([])
    run_case_safely(CASE, ["scratch"], 0.0)
    assert fake.ran == []
    run_case_safely(CASE, ["scratch"], 0.0, limit_bytes=1000)
    run_case_safely(LARGE, ["scratch"], 0.0, limit_bytes=2**33)
    run_case_safely(LARGE, ["scratch"], 0.0)
    run_case_safely(CASE, ["scratch", "my.py:mine"], 0.0)
    run_case_safely(replace(CASE, component="self_attention"), ["scratch", "my.py:mine"], 0.0)
    assert fake.ran == 3 * [["builtin", "scratch"]] + [["builtin", "scratch", "my.py:mine"]]
    (small, _), (given, no_patience), (available, _), (_, patience) = fake.limits
    assert (small, given) == (1000, 2**33)
    assert available is not None
    assert 0 < available <= (available_bytes() or 0) * 1.1
    assert no_patience is None
    assert patience is not None
    assert patience >= PATIENCE_SECONDS


def test_who_ends_the_process_is_found_and_the_others_are_kept(children_of: Callable[..., FakeChildren]) -> None:
    names = ["scratch", "my.py:good", "my.py:deadly"]
    children_of(["my.py:deadly"], 7)
    rows = run_case_safely(CASE, names, 0.0)
    assert statuses(rows) == dict.fromkeys(["builtin", *names[:2]], "timed") | {"my.py:deadly": "unavailable"}
    assert rows[-1].detail == "its process ended before it gave a result"
    children_of(["scratch"])
    assert statuses(run_case_safely(LARGE, ["scratch", "math"], 0.0)) == {
        "builtin": "timed",
        "scratch": "out of memory",
        "math": "timed",
    }
    children_of(["builtin"])
    assert statuses(run_case_safely(LARGE, ["scratch"], 0.0)) == {
        "builtin": "out of memory",
        "scratch": "out of memory",
    }


def test_what_is_large() -> None:
    """By its scores, by its tokens, by its width or by its words; a backward pass keeps more."""
    small = Case("attention", batch=4, query_len=128, key_len=128)
    assert expected_bytes(small) < LARGE_BYTES < expected_bytes(replace(small, query_len=16384, key_len=16384))
    assert expected_bytes(replace(small, batch=4096, num_heads=1)) > LARGE_BYTES
    layer = replace(small, component="encoder_layer", batch=1)
    assert expected_bytes(layer) < LARGE_BYTES < expected_bytes(replace(layer, embed_dim=8192))
    words = replace(small, component="seq2seq", batch=512, query_len=512, embed_dim=8, num_layers=1)
    assert expected_bytes(replace(words, component="transformer")) < expected_bytes(words) - 4 * 512 * 512 * VOCABULARY
    stack = replace(layer, component="transformer", num_layers=2)
    assert expected_bytes(replace(stack, mode="backward")) > expected_bytes(replace(layer, mode="backward"))
    assert expected_bytes(replace(small, mode="backward")) > expected_bytes(small)


@pytest.mark.parametrize("mode", ["forward", "backward", "training_step"])
@pytest.mark.parametrize("component", [x for x in COMPONENTS if x != "generate"])
def test_what_is_held_is_not_more_than_expected(component: str, mode: str) -> None:
    grid = Grid((component,), (mode,), batch=(2,), length=(64,), width=(32,), heads=(2,))
    (case,) = cases_of([grid], [1], ["cpu"])
    run = runnable(case, workload(case, scratch))
    run()
    assert peak_memory_bytes(Runner(run, nullcontext, 1, torch.device("cpu"))) < expected_bytes(case)
