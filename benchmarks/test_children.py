"""Tests of children.py: a process that runs out of memory, or is ended, is a result."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from benchmarks import children
from benchmarks.cases import Case
from benchmarks.children import ChildEndedError, available_bytes, expected_bytes, in_child, run_case_safely

CASE = Case("attention", batch=1, query_len=5, key_len=7, embed_dim=33, num_heads=3)


def allocate(count: int) -> str:
    """Run in the child."""
    try:
        return f"got {torch.ones(count, dtype=torch.uint8).numel()}"
    except RuntimeError as error:
        return str(error)


def end_itself() -> None:
    """Run in the child, as if the system had ended it."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_child_is_held_to_its_memory() -> None:
    assert in_child(allocate, [2**26], None) == f"got {2**26}"
    assert "can't allocate memory" in in_child(allocate, [2**34], 4 * 2**30)


def test_a_child_that_is_ended_is_told_by_its_exit_code() -> None:
    with pytest.raises(ChildEndedError, match="exit code -9 before it gave a result"):
        in_child(end_itself, [], None)


def test_only_large_cases_run_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def record(function: object, arguments: object, limit_bytes: int | None) -> None:
        seen.append(limit_bytes)
        raise ChildEndedError(-9 if limit_bytes == 2**33 else 1)

    monkeypatch.setattr(children, "in_child", record)
    monkeypatch.setattr(children, "run_case", lambda *_: [])
    large = replace(CASE, query_len=2**15, key_len=2**15)
    assert run_case_safely(CASE, ["scratch"], 0.0) == []
    assert seen == []
    rows = run_case_safely(large, ["scratch"], 0.0, limit_bytes=2**33)
    assert [(row.contender, row.status, row.detail) for row in rows] == [
        ("builtin", "out of memory", "its process ended with exit code -9 before it gave a result"),
        ("scratch", "out of memory", "its process ended with exit code -9 before it gave a result"),
    ]
    assert {row.status for row in run_case_safely(large, ["scratch"], 0.0)} == {"unavailable"}
    assert seen[0] == 2**33
    assert seen[1] is not None
    assert 0 < seen[1] <= (available_bytes() or 0) * 1.1


def test_the_backward_pass_is_expected_to_take_more() -> None:
    assert expected_bytes(replace(CASE, mode="backward")) == 2 * expected_bytes(CASE) == 4 * 3 * 5 * 7 * 4
