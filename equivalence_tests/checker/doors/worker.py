"""The worker process of the sandbox: ``python -m equivalence_tests.checker.doors.worker``.

It reads one line of JSON, the order; it answers in lines of JSON: {"cpu": 1.5, "progress": "..."} now and then, and
{"reports": [...]} for each target. What the user's code prints goes nowhere.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any

from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reporting.report import Report

__all__: list[str] = []

CHECKER = str(Path(__file__).parents[1])
HEARTBEAT_SECONDS = 1.0
TAKES_OVER = 10.0  # seconds of CPU time after which the kernel stops what the parent did not


def main() -> None:
    """Check what is asked for, one target after another."""
    # The lines of the protocol are kept apart from everything that the user's code prints.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    order = json.loads(orders.readline())
    threading.Thread(target=_die_with_the_parent, args=(orders,), daemon=True).start()
    threading.Thread(target=_beat, args=(answers,), daemon=True).start()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_end_where_the_code_returns)
    limits = order["limits"]
    _limit_memory(limits["memory_mib"])
    for request in order["requests"]:
        _limit_cpu(limits["cpu_seconds"])
        say(answers, reports=[report.to_dict() for report in _check(answers, **request)])
    answers.flush()
    os._exit(0)  # threads of the user's code are not waited for


SPEAKING = threading.Lock()


def say(answers: IO[str], **message: Any) -> None:
    """Write one line of the protocol, from whichever thread."""
    with SPEAKING:
        answers.write(json.dumps(message) + "\n")


def _check(answers: IO[str], target: str, inputs: str, adapter: str, **options: Any) -> list[Report]:
    def progress(text: str) -> None:
        say(answers, cpu=time.process_time(), progress=text)

    # Torch is imported when the parent is watched already: if it vanishes meanwhile, this process does too.
    from equivalence_tests.checker.reach.loading import load
    from equivalence_tests.checker.verify import verify

    try:
        given = {name: value for name, value in options.items() if value}
        if inputs:
            given["inputs"] = load(inputs)
        found = verify(target, adapter=load(adapter) if adapter else None, progress=progress, **given)
    except CannotCheckError as error:
        return [Report(target, reason=str(error))]
    return found if isinstance(found, list) else [found]


def _beat(answers: IO[str]) -> None:
    """Tell the parent every second how much CPU time was used."""
    while True:
        say(answers, cpu=time.process_time())
        time.sleep(HEARTBEAT_SECONDS)


def _die_with_the_parent(orders: IO[str]) -> None:
    """Wait until the parent's end of the pipe is closed, and take along whatever the user's code started."""
    orders.read()
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _end_where_the_code_returns() -> None:
    """Let a forked child run the user's code and nothing of ours: two would check, and then four."""
    frame, ours = sys._getframe().f_back, set[FrameType]()
    while frame is not None:
        if frame.f_code.co_filename.startswith(CHECKER):
            ours.add(frame)
        frame = frame.f_back

    def end(frame: FrameType, event: str, _: object) -> None:
        if frame in ours or (event == "return" and frame.f_back in ours):
            os._exit(0)

    sys.setprofile(end)


def _limit_memory(mib: int) -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (mib * 1024**2, mib * 1024**2))


def _limit_cpu(seconds: float) -> None:
    if sys.platform != "win32":
        import resource

        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds + TAKES_OVER), most))


if __name__ == "__main__":
    main()
