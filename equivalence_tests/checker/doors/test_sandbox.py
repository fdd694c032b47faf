"""Tests of the sandbox: what the user's code does to its process is said, and nothing of it is left running."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from equivalence_tests.checker.doors import sandbox
from equivalence_tests.checker.doors.sandbox import Limits, Request, checked
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.instruments.warm_processes import warm_context

ROOT = Path(__file__).parents[3]
SOURCE = """
import os, sys, time, torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        {}
"""
# Starts a check that never ends, and says who runs it.
ENDLESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it
from equivalence_tests.checker.doors.sandbox import Limits, Request, checked
print("started", flush=True)
list(checked([Request(sys.argv[1])], Limits(cpu_seconds=600)))
"""


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers from a process that has imported torch."""
    context = warm_context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


def written(tmp_path: Path, forward: str, name: str = "mine.py") -> str:
    path = tmp_path / name
    path.write_text(SOURCE.format(forward))
    return f"{path}:Mine"


def report_of(target: str, limits: Limits | None = None) -> Report:
    ((report,),) = checked([Request(target)], limits or Limits())
    return report


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def ends(pid: int) -> bool:
    """Whether a process that was killed is gone before long."""
    for _ in range(100):
        if not is_alive(pid):
            return True
        time.sleep(0.1)
    return False


SAID = {
    "raise ValueError('not today')": "ValueError: not today",
    "os._exit(7)": "ended with status 7",
    "sys.exit(3)": "It ends the process: exit(3)",
    "os.kill(os.getpid(), 11)": "killed by SIGSEGV",
    "return torch.ones(10**12)": "can't allocate memory",
    "return sys.stdin.readline()": "no output of the query's length",
}


@pytest.mark.usefixtures("warm")
def test_it_is_said_what_happened_and_the_others_are_checked(tmp_path: Path) -> None:
    targets = [written(tmp_path, forward, f"mine{number}.py") for number, forward in enumerate(SAID)]
    answers = list(checked([Request(target) for target in targets], Limits()))
    assert [report.target for (report,) in answers] == targets
    for (report,), said in zip(answers, SAID.values(), strict=True):
        assert report.exit_status == 2
        assert said in report.reason


@pytest.mark.usefixtures("warm")
def test_what_waits_forever_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "STILL_SECONDS", 6.0)
    report = report_of(written(tmp_path, "time.sleep(3600)"))
    assert report.exit_status == 2
    assert report.reason == "It waited for 6 seconds without computing anything, and was stopped."


def test_what_computes_forever_is_stopped(tmp_path: Path) -> None:
    report = report_of(written(tmp_path, "while True: pass"), Limits(cpu_seconds=2.0))
    assert report.reason.startswith("It took more than 2 seconds of CPU time and was stopped.")
    assert "--timeout" in report.reason


@pytest.mark.usefixtures("warm")
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_what_the_code_started_is_stopped_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    tell = f"open({str(note)!r}, 'w').write(str(child)); os._exit(7)"
    body = f"child = os.fork()\n        if not child:\n            time.sleep(600)\n        {tell}"
    report_of(written(tmp_path, body))
    assert ends(int(note.read_text()))


@pytest.mark.usefixtures("warm")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_runs_the_users_code_and_checks_nothing(tmp_path: Path) -> None:
    note = tmp_path / "children"
    write = f"open({str(note)!r}, 'a').write('x')"
    once = f"if not sys.argv[1:]:\n            sys.argv.append('forked')\n            os.fork() or {write}"
    report = report_of(written(tmp_path, f"{once}\n        return self.proj(x)"))
    assert report.verdict == "unchecked"
    assert note.read_text() == "x"


# Stands in for torch, which the worker imports before anything else; real code would take seconds to get there.
WAITS = """
import os, time
open({!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_worker_outlives_its_parent(signal_name: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    (tmp_path / "torch.py").write_text(WAITS.format(str(note)))
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    parent = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, "mine.py:Mine"],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    while not (note.exists() and note.read_text()):
        assert parent.poll() is None
        time.sleep(0.1)
    parent.send_signal(getattr(signal, signal_name))
    assert parent.wait() != 0
    assert ends(int(note.read_text()))
