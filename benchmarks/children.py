"""Large cases run in a process of their own: too little memory ends that, and not the whole run."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.cases import Case
from benchmarks.results import Row, Status
from benchmarks.running import rows_without_times, run_case

__all__ = ["ChildEndedError", "available_bytes", "expected_bytes", "in_child", "run_case_safely"]

Result = TypeVar("Result")

LARGE_BYTES = 2**30
USED_SHARE = 0.9  # of the memory that is available now; the rest is for what else runs


class ChildEndedError(Exception):
    """The process was ended before it gave its result.

    Args:
        exit_code: Of the process; -9 if the system ended it, which it does where memory is short.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"its process ended with exit code {exit_code} before it gave a result")
        self.exit_code = exit_code


def run_case_safely(case: Case, chosen: Sequence[str], seconds: float, limit_bytes: int | None = None) -> list[Row]:
    """Run a case, a large one in a process of its own.

    Args:
        case: What is computed.
        chosen: Names of contenders.
        seconds: Time for the rounds, about.
        limit_bytes: Memory that a large case may take on the CPU; what is available if not given.

    Returns:
        One row for each contender.
    """
    if expected_bytes(case) < LARGE_BYTES:
        return run_case(case, chosen, seconds)
    # CUDA maps far more than it uses, and limits itself.
    limit = None if case.device != "cpu" else limit_bytes or available_bytes()
    try:
        return in_child(run_case, (case, chosen, seconds), limit)
    except ChildEndedError as error:
        status: Status = "out of memory" if error.exit_code == -signal.SIGKILL else "unavailable"
        return rows_without_times(case, chosen, status, str(error))


def expected_bytes(case: Case) -> int:
    """Guess what the largest contender holds: scores, weights, and in the backward pass the gradients of both.

    >>> expected_bytes(Case("attention", batch=1, query_len=4096, key_len=4096)) // 2**20
    1024
    """
    scores = case.batch * case.num_heads * case.query_len * case.key_len
    itemsize: int = getattr(torch, case.dtype).itemsize
    return scores * itemsize * (2 if case.mode == "forward" else 4)


def available_bytes() -> int | None:
    """Say how much memory this process may still take; None if the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
    found = 1024 * int(fields["MemAvailable"].split()[0])
    group = Path("/sys/fs/cgroup")
    most, used = (_number(group / name) for name in ("memory.max", "memory.current"))
    return int(USED_SHARE * (found if most is None or used is None else min(found, most - used)))


def _number(path: Path) -> int | None:
    text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def in_child(function: Callable[..., Result], arguments: Sequence[Any], limit_bytes: int | None) -> Result:
    """Call a function in a fresh process.

    Args:
        function: Can be pickled.
        arguments: Likewise.
        limit_bytes: Memory that the process may take; None for any.

    Returns:
        What the function returns.

    Raises:
        ChildEndedError: If the process is ended first, by the system or by itself.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, arguments, limit_bytes))
    process.start()
    sender.close()
    try:
        result: Result = receiver.recv()
    except EOFError:
        process.join()
        raise ChildEndedError(process.exitcode) from None
    finally:
        process.terminate()
        process.join()
    return result


def _call(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any], limit_bytes: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is for the process that waits, which ends this one
    if limit_bytes is not None:
        import resource  # Windows has none, and no limit is found there

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    sender.send(function(*arguments))
