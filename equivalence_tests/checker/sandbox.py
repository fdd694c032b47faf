"""Run verify in a child process, so that code which hangs, takes all memory or kills its process does no harm.

``python -m equivalence_tests.checker.sandbox REQUEST`` is the child; it writes its report to a file of its own, since
the user's code may print anything.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from equivalence_tests.checker.loading import load
from equivalence_tests.checker.report import Report
from equivalence_tests.checker.verify import verify

__all__ = ["Request", "verify_in_child"]

OURS = str(Path(__file__).resolve().parents[2])
PROGRESS = "\x1eprogress "


@dataclass(frozen=True)
class Request:
    """What the child shall check.

    Args:
        target: "file.py:Name" or "module.path:Name".
        kind: As in ``verify``.
        adapter: "file.py:NAME" of an ``Adapter``; "" for none.
        expected_failures: As in ``verify``.
        seconds: For the search.
    """

    target: str
    kind: str | None = None
    adapter: str = ""
    expected_failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 15.0


def verify_in_child(
    request: Request,
    *,
    timeout: float = 120.0,
    memory_mib: int = 4096,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Check in a child process with limits of time and memory.

    Args:
        request: What to check.
        timeout: Seconds after which the child is killed.
        memory_mib: How much memory it may take.
        progress: Receives a line of text now and then.

    Returns:
        The child's report; one that says what happened if it was killed or gave none.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "report.json"
        arguments = json.dumps(asdict(request) | {"answer": str(answer), "memory_mib": memory_mib})
        child = subprocess.Popen(
            # -P: a folder of the user's that is called scratch must not stand for ours.
            [sys.executable, "-P", "-m", "equivalence_tests.checker.sandbox", arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (OURS, os.environ.get("PYTHONPATH"))))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        last: list[str] = []
        assert child.stderr is not None  # a pipe was asked for
        reader = threading.Thread(target=_read, args=(child.stderr, progress, last), daemon=True)
        reader.start()
        try:
            status = child.wait(timeout)
        except subprocess.TimeoutExpired:
            _kill(child)
            return Report(request.target, reason=f"It did not end within {timeout:g} seconds and was stopped.")
        reader.join(timeout=2.0)
        if answer.is_file():
            return Report.from_dict(json.loads(answer.read_text(encoding="utf-8")))
        return Report(request.target, reason=_why_it_died(status, memory_mib, last))


def _read(stream: IO[str], progress: Callable[[str], None], last: list[str]) -> None:
    with stream:
        for line in stream:
            if line.startswith(PROGRESS):
                progress(line.removeprefix(PROGRESS).strip())
            elif line.strip():
                last.append(line.strip())


def _kill(child: "subprocess.Popen[str]") -> None:
    """Stop the child and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _why_it_died(status: int, memory_mib: int, last: list[str]) -> str:
    if any("MemoryError" in line or "not enough memory" in line or "bad_alloc" in line for line in last):
        return f"It wanted more than {memory_mib} MiB of memory."
    said = f" Its last words: {last[-1]}" if last else ""
    if status < 0:
        return f"Its process was killed by {signal.Signals(-status).name}.{said}"
    return f"Its process ended with status {status} before there was a report.{said}"


def _run(request: dict[str, object]) -> None:
    """The child: limit the memory, check, write the report."""
    limit = int(str(request.pop("memory_mib"))) * 1024 * 1024
    answer = Path(str(request.pop("answer")))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    asked = Request(**request)  # type: ignore[arg-type]
    try:
        report = verify(
            asked.target,
            kind=asked.kind,
            adapter=load(asked.adapter) if asked.adapter else None,
            expected_failures=asked.expected_failures,
            progress=lambda text: print(PROGRESS + text, file=sys.stderr, flush=True),
            seconds=asked.seconds,
        )
    except MemoryError:
        report = Report(asked.target, reason=f"It wanted more than {limit // 1024**2} MiB of memory.")
    answer.write_text(report.to_json(), encoding="utf-8")


if __name__ == "__main__":
    _run(json.loads(sys.argv[1]))
