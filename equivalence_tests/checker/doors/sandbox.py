"""Check in a worker process, so that code which hangs, exits, crashes or takes all memory does no harm.

The worker imports torch and the user's code; this side stays light. A worker that dies loses the target it was at;
the rest is given to a new one.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from equivalence_tests.checker.reporting.report import Report

# A process that took no CPU time for so long waits for something that does not come. A busy machine is no reason.
STILL_SECONDS = 60.0
TAKES_PART = 0.05  # seconds of CPU time; the worker's heartbeat alone takes far less


@dataclass(frozen=True)
class Request:
    """What the worker is asked to check."""

    target: str  # "file.py:Name", "notebook.ipynb:Name" or "module.path:Name"
    inputs: str = ""  # "file.py:name" of what the model is called with; "" to work out a call
    kind: str | None = None  # as in ``verify``
    adapter: str = ""  # "file.py:NAME" of an ``Adapter``; "" for none
    intended: dict[str, str] = field(default_factory=dict)  # as in ``verify``
    run_all: bool = False  # run every cell of a notebook
    compiled: bool = False  # compile it too


@dataclass(frozen=True)
class Limits:
    """What one target may take: they only protect against code that hangs, and decide no verdict."""

    cpu_seconds: float = 120.0
    memory_mib: int = 4096


def checked(
    requests: Sequence[Request], limits: Limits, progress: Callable[[str], None] = lambda text: None
) -> Iterator[list[Report]]:
    """Check targets in a worker process, and give for each one report, or one for each attention that ran."""
    waiting = list(requests)
    while waiting:
        with _started(waiting, limits) as worker:
            while waiting:
                found = worker.answer(progress)
                target = waiting.pop(0).target
                yield found if isinstance(found, list) else [Report(target, reason=found)]
                if isinstance(found, str):
                    break


@contextlib.contextmanager
def _started(requests: Sequence[Request], limits: Limits) -> "Iterator[_Worker]":
    """Start a worker, which is gone when the block is left, with everything that it started."""
    spawning = multiprocessing.get_context("spawn")
    answers, theirs = spawning.Pipe(duplex=False)
    cpu = spawning.Value("d", lock=False)
    with tempfile.TemporaryDirectory() as folder:
        stderr = Path(folder, "stderr")
        orders = [asdict(request) for request in requests]
        process = spawning.Process(target=_work, args=(orders, limits.memory_mib, cpu, theirs, str(stderr)))
        process.start()
        theirs.close()
        try:
            yield _Worker(process, answers, cpu, stderr, limits)
        finally:
            if hasattr(os, "killpg") and process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _work(*given: Any) -> None:
    """Import what needs torch in the worker alone."""
    from equivalence_tests.checker.doors import worker

    worker.work(*given)


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    answers: Connection
    cpu: "Synchronized[float]"
    stderr: Path
    limits: Limits

    def answer(self, progress: Callable[[str], None]) -> list[Report] | str:
        """Wait for the reports on one target, or for the reason why there are none."""
        started = seen = self.cpu.value
        since = time.monotonic()
        while True:
            ended = not self.process.is_alive()  # asked first: what it said last is read all the same
            if self.answers.poll(1.0):
                try:
                    said: list[Report] | str = self.answers.recv()
                except (EOFError, OSError):
                    return self._why_it_died()
                if isinstance(said, list):
                    return said
                progress(said)
            elif ended:
                return self._why_it_died()
            if self.cpu.value > seen + TAKES_PART:
                seen, since = self.cpu.value, time.monotonic()
            if seen - started > self.limits.cpu_seconds:
                return (
                    f"It took more than {self.limits.cpu_seconds:g} seconds of CPU time and was stopped. The limit is "
                    "there for code that hangs; --timeout raises it."
                )
            if time.monotonic() - since > STILL_SECONDS:
                return f"It waited for {STILL_SECONDS:g} seconds without computing anything, and was stopped."

    def _why_it_died(self) -> str:
        self.process.kill()  # where it only closed the pipe
        self.process.join()
        status, words = self.process.exitcode or 0, self.stderr.read_text("utf-8", "replace").strip()
        if any(sign in words for sign in ("MemoryError", "not enough memory", "bad_alloc")):
            return f"It needed more than {self.limits.memory_mib} MiB of memory (--memory)."
        said = f" Its last line of output:  {words.splitlines()[-1].strip()}" if words else ""
        if status < 0:
            return f"Its process was killed by {signal.Signals(-status).name}.{said}"
        return f"Its process ended with status {status} before there was a report.{said}"
