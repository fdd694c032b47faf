"""Large cases and the user's code run in a process of their own: what ends that does not end the whole run."""

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.contenders import BASELINE, contenders_of
from benchmarks.grids import TOKEN_LEVEL, Case
from benchmarks.own import is_own
from benchmarks.results import Row, Status
from benchmarks.running import rows_without_times, run_case
from benchmarks.work import flops
from benchmarks.workloads import VOCABULARY

__all__ = ["ChildEndedError", "available_bytes", "expected_bytes", "in_child", "run_case_safely"]

Result = TypeVar("Result")

LARGE_BYTES = 2**30
USED_SHARE = 0.9  # of the memory that is available now; the rest is for what else runs
# How long the user's code may take: what is slower than this hangs, as far as anybody can tell.
PATIENCE_SECONDS = 180.0
SLOW_FLOPS_PER_S = 1e9
ENDING_SECONDS = 5.0  # what has answered and does not end is ended


class ChildEndedError(Exception):
    """The process was ended before it gave its result.

    Args:
        reason: What happened to it.
        exit_code: Of the process; -9 if the system ended it, which it does where memory is short. None if it was
            ended here, because it took too long.
    """

    def __init__(self, reason: str, exit_code: int | None) -> None:
        super().__init__(f"its process {reason} before it gave a result")
        self.exit_code = exit_code


def run_case_safely(case: Case, chosen: Sequence[str], seconds: float, limit_bytes: int | None = None) -> list[Row]:
    """Run a case, a large one or one with the user's code in a process of its own.

    Args:
        case: What is computed.
        chosen: Names of contenders.
        seconds: Time for the rounds, about.
        limit_bytes: Memory that such a process may take on the CPU; what is available if not given.

    Returns:
        One row for each contender. If the process is ended, each is tried again apart from those that may have done it.
    """
    names = [x.name for x in contenders_of(case, chosen)]
    has_own = any(map(is_own, names))
    if not has_own and expected_bytes(case) < min(LARGE_BYTES, limit_bytes or LARGE_BYTES):
        return run_case(case, names, seconds)
    # CUDA maps far more than it uses, and limits itself.
    limit = None if case.device != "cpu" else limit_bytes or available_bytes()
    patience = PATIENCE_SECONDS + flops(case) / SLOW_FLOPS_PER_S if has_own else None
    try:
        return in_child(run_case, (case, names, seconds), limit, patience)
    except ChildEndedError as error:
        status: Status = "out of memory" if error.exit_code == -signal.SIGKILL else "unavailable"
        lost = rows_without_times(case, names, status, str(error))
        return _apart(lost, lambda others: run_case_safely(case, others, seconds, limit_bytes))


def _apart(lost: Sequence[Row], run: Callable[[Sequence[str]], list[Row]]) -> list[Row]:
    """Run those again that did not end the process, and those that may have done it one by one."""
    names = [row.contender for row in lost]
    suspects = [name for name in names if is_own(name)] or names[1:]
    rows = run([name for name in names if name not in suspects]) if suspects else list(lost)
    for name in suspects:
        again = lost if names == [BASELINE, name] else run([name])
        rows += [row for row in again if row.contender == name]
    return rows


def expected_bytes(case: Case) -> int:
    """Guess what the largest contender holds: scores and weights, tokens, parameters, and what backward passes add.

    >>> expected_bytes(Case("attention", batch=1, query_len=4096, key_len=4096)) // 2**20
    1152
    """
    scores = case.batch * case.num_heads * case.query_len * case.key_len
    tokens = case.batch * (case.query_len + case.key_len) * case.embed_dim
    words = case.batch * case.query_len * VOCABULARY if case.component in TOKEN_LEVEL else 0
    parameters = 0 if case.component == "attention" else 28 * case.embed_dim**2 * max(1, case.num_layers)
    kept = 1 if case.mode == "forward" else 2 * max(1, 3 * case.num_layers)  # each attention keeps its own
    itemsize: int = getattr(torch, case.dtype).itemsize
    return itemsize * (kept * (2 * scores + 8 * tokens) + 2 * words + 4 * parameters)


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


def in_child(
    function: Callable[..., Result],
    arguments: Sequence[Any],
    limit_bytes: int | None = None,
    patience_seconds: float | None = None,
) -> Result:
    """Call a function in a fresh process.

    Args:
        function: Can be pickled.
        arguments: What it is called with; these can be pickled too.
        limit_bytes: Memory that the process may take; None for any.
        patience_seconds: Time that it may take; None for any.

    Returns:
        What the function returns.

    Raises:
        ChildEndedError: If the process is ended first, by the system, by itself, or because it takes too long.
    """
    torch.cuda.empty_cache()  # what torch keeps for this process is not there for the other
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, arguments, limit_bytes))
    try:
        with _interrupts_ignored():
            process.start()
    except OSError as error:
        raise ChildEndedError(f"could not be started ({error.strerror}) and ended", None) from error
    sender.close()
    try:
        if not receiver.poll(patience_seconds):
            raise ChildEndedError(f"was stopped after {patience_seconds:.0f} s", None)
        result: Result = receiver.recv()
        process.join(ENDING_SECONDS)  # it gives semaphores back, of which the system would complain in the end
    except (EOFError, OSError, pickle.UnpicklingError):  # the last two: it was killed while it wrote
        process.join()
        killed = "was killed, as happens where memory runs out," if process.exitcode == -signal.SIGKILL else ""
        raise ChildEndedError(killed or f"ended with exit code {process.exitcode}", process.exitcode) from None
    finally:
        process.kill()
        process.join()
    return result


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Start processes that do not hear ctrl-c: it is for the one that waits for them, which ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _call(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any], limit_bytes: int | None) -> None:
    if limit_bytes is not None:
        import resource  # Windows has none, and no limit is found there

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    sender.send(function(*arguments))
