"""Check in a worker process, so that code which hangs, exits, crashes or takes all memory does no harm.

The worker imports torch and the user's code; this side stays light. It talks in lines of JSON, see ``worker``. One
that dies loses the target it was at; the rest is given to a new one.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from equivalence_tests.checker.reporting.report import Report

__all__ = ["Limits", "Request", "checked"]

OURS = str(Path(__file__).resolve().parents[3])
WORKER = "equivalence_tests.checker.doors.worker"
# A process that took no CPU time for so long waits for something that does not come. A busy machine is no reason.
STILL_SECONDS = 60.0
TAKES_PART = 0.05  # seconds of CPU time; the worker's heartbeat alone takes far less


@dataclass(frozen=True)
class Request:
    """What the worker is asked to check.

    Args:
        target: "file.py:Name", "notebook.ipynb:Name" or "module.path:Name".
        inputs: "file.py:name" of what the model is called with; "" to work out a call.
        kind: As in ``verify``.
        adapter: "file.py:NAME" of an ``Adapter``; "" for none.
        meant: As in ``verify``.
        run_all: Run every cell of a notebook.
    """

    target: str
    inputs: str = ""
    kind: str | None = None
    adapter: str = ""
    meant: dict[str, str] = field(default_factory=dict)
    run_all: bool = False


@dataclass(frozen=True)
class Limits:
    """What one target may take: they only protect against code that hangs, and decide no verdict.

    Args:
        cpu_seconds: CPU time.
        memory_mib: Memory.
    """

    cpu_seconds: float = 120.0
    memory_mib: int = 4096


def checked(
    requests: Sequence[Request],
    limits: Limits,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[list[Report]]:
    """Check one target after another, in a worker process.

    Args:
        requests: What to check.
        limits: For each of them.
        progress: Receives a line of text now and then.

    Yields:
        For each request what was found: one report, or one for each attention that ran.
    """
    waiting = list(requests)
    with _terminated_like_interrupted():
        while waiting:
            with _Worker(tuple(waiting), limits) as worker:
                for reports in worker.answers(progress):
                    waiting.pop(0)
                    yield reports


class _Worker:
    """One worker process, which is gone when the block is left, with everything that it started."""

    def __init__(self, requests: Sequence[Request], limits: Limits) -> None:
        self.requests, self.limits = requests, limits
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.last_words: list[str] = []

    def __enter__(self) -> "_Worker":
        self.process = subprocess.Popen(
            # -P: a folder of the user's that is called scratch must not stand for ours.
            [sys.executable, "-P", "-m", WORKER],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (OURS, os.environ.get("PYTHONPATH"))))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert self.process.stdin is not None  # three pipes were asked for
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        order = {"requests": [asdict(request) for request in self.requests], "limits": asdict(self.limits)}
        with contextlib.suppress(BrokenPipeError):  # why it died is told by its exit status
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        self.readers = [
            threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self.readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        for reader in self.readers:
            reader.join()

    def answers(self, progress: Callable[[str], None]) -> Iterator[list[Report]]:
        """Give the reports as they come; if the process dies, one that says why, and nothing more."""
        for request in self.requests:
            found = self._answer(progress)
            if isinstance(found, str):
                yield [Report(request.target, reason=found)]
                return
            yield [Report.from_dict(report) for report in found]

    def _answer(self, progress: Callable[[str], None]) -> list[dict[str, Any]] | str:
        """Wait for the reports on one target, or for the reason why there are none."""
        started: float | None = None
        seen, since = 0.0, time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=1.0)
                if line is None:
                    return self._why_it_died()
                message = json.loads(line)
                if "reports" in message:
                    return list(message["reports"])
                progress(message.get("progress", ""))
                cpu = float(message["cpu"])
                started = cpu if started is None else started
                if cpu > seen + TAKES_PART:
                    seen, since = cpu, time.monotonic()
                if cpu - started > self.limits.cpu_seconds:
                    return _too_long(self.limits)
            if self.process.poll() is not None and self.lines.empty():
                return self._why_it_died()
            if time.monotonic() - since > STILL_SECONDS:
                return f"It waited for {STILL_SECONDS:g} seconds without computing anything, and was stopped."

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.lines.put(line)
        self.lines.put(None)

    def _listen(self, stream: IO[str]) -> None:
        with stream:
            self.last_words += [line.strip() for line in stream if line.strip()]

    def _why_it_died(self) -> str:
        status = self.process.wait()
        time.sleep(0.1)  # its last words may still be on their way
        if any(sign in line for line in self.last_words for sign in ("MemoryError", "not enough memory", "bad_alloc")):
            return f"It wanted more than {self.limits.memory_mib} MiB of memory (--memory)."
        if hasattr(signal, "SIGXCPU") and status == -signal.SIGXCPU:
            return _too_long(self.limits)
        said = f" Its last words: {self.last_words[-1]}" if self.last_words else ""
        if status < 0:
            return f"Its process was killed by {signal.Signals(-status).name}.{said}"
        return f"Its process ended with status {status} before there was a report.{said}"


def _too_long(limits: Limits) -> str:
    return (
        f"It took more than {limits.cpu_seconds:g} seconds of CPU time and was stopped. The limit is there for code "
        "that hangs; --timeout raises it."
    )


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM leave through the same blocks as Ctrl-C, so that no worker is left behind."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
