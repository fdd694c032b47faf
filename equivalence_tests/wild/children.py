"""Tasks in forked children, each with limits of time and memory, so that one model cannot take the others with it."""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Limits", "in_children"]


@dataclass(frozen=True)
class Limits:
    """What one child may take.

    Args:
        cpu_seconds: Of computing.
        wall_seconds: Until it is given up, however little it computed.
        memory_mib: Of memory beyond what the parent holds.
    """

    cpu_seconds: int = 45
    wall_seconds: float = 300.0
    memory_mib: int = 6144


@dataclass
class _Child:
    pid: int
    task: Any
    pipe: int
    deadline: float
    said: bytes = b""


def in_children(
    tasks: Sequence[Any], work: Callable[[Any], Iterator[dict[str, Any]]], *, limits: Limits = Limits(), jobs: int = 1
) -> Iterator[tuple[Any, list[dict[str, Any]], str]]:
    """Do each task in a child of its own, some at a time.

    Args:
        tasks: What to do.
        work: Yields what is found out about a task, as plain data.
        limits: For each child.
        jobs: How many children at a time.

    Yields:
        The task, what was found out before the child ended, and why it ended early ("" if it did not).
    """
    waiting = list(reversed(tasks))
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(), work, limits))
            ready, _, _ = select.select([child.pipe for child in running], [], [], 0.5)
            for child in list(running):
                ended = child.pipe in ready and not _read(child)
                if ended or time.monotonic() > child.deadline:
                    running.remove(child)
                    yield child.task, *_end(child, in_time=ended)
    finally:
        for child in running:
            _end(child, in_time=False)


def _start(task: Any, work: Callable[[Any], Iterator[dict[str, Any]]], limits: Limits) -> _Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(pid, task, reading, time.monotonic() + limits.wall_seconds)
    status = 1
    try:
        os.close(reading)
        os.setsid()
        _limit(limits)
        torch.set_num_threads(1)  # the parent's were not forked, and to wait for them would never end
        with open(os.devnull, "w") as nowhere, os.fdopen(writing, "w") as answer:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            for one in work(task):
                answer.write(json.dumps(one) + "\n")
                answer.flush()
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's may run a second time


def _limit(limits: Limits) -> None:
    import resource  # Windows has none, and no children of this kind either

    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + limits.cpu_seconds, used + limits.cpu_seconds + 5))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    memory = (held + limits.memory_mib) * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def _read(child: _Child) -> bool:
    """Take what the child said; False at its end."""
    said = os.read(child.pipe, 1 << 16)
    child.said += said
    return bool(said)


def _end(child: _Child, in_time: bool) -> tuple[list[dict[str, Any]], str]:
    if not in_time:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pipe)
    lines = child.said.decode(errors="replace").splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return found, _why(status, in_time)


def _why(status: int, in_time: bool) -> str:
    if not in_time:
        return "it did not end in time"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "it took too long" if number == signal.SIGXCPU else f"killed by {signal.Signals(number).name}"
    return "" if status == 0 else "its child failed"
