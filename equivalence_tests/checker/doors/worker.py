"""What runs in the worker process of the sandbox: torch, the user's code, and the check of it.

It sends lines of text for the progress and a list of reports for each target. What the user's code prints goes nowhere.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from types import FrameType
from typing import Any

from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reporting.lines import CHECKER, OURS
from equivalence_tests.checker.reporting.report import Report

HEARTBEAT_SECONDS = 1.0


def work(
    requests: Sequence[dict[str, Any]], memory_mib: int, cpu: "Synchronized[float]", answers: Connection, stderr: str
) -> None:
    """Check what is asked for, each as a ``Request`` has it, and send the progress and the reports as answers.

    ``cpu`` receives every second how much CPU time was used; what is said on the standard error goes into a file.
    """
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    threading.Thread(target=_beat, args=(cpu,), daemon=True).start()
    for descriptor, path in enumerate((os.devnull, os.devnull, stderr)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    _look_like_a_plain_process()
    if sys.platform != "win32":
        import resource

        os.setsid()  # what the user's code starts can be ended with it
        os.register_at_fork(after_in_child=_end_where_the_code_returns)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * 1024**2, memory_mib * 1024**2))
    for request in requests:
        answers.send(_check(answers, **request))
    os._exit(0)  # threads of the user's code are not waited for


def _look_like_a_plain_process() -> None:
    """Hide from the user's code that ``multiprocessing`` started it, and from ours a folder that is called scratch."""
    sys.argv[1:] = []
    sys.path.insert(0, str(OURS))
    multiprocessing.set_start_method(None, force=True)


def _check(answers: Connection, target: str, inputs: str, adapter: str, compiled: bool, **options: Any) -> list[Report]:
    # Torch is imported when the parent is watched already: if it vanishes meanwhile, this process does too.
    from equivalence_tests.checker.reach.loading import load
    from equivalence_tests.checker.verify import verify

    try:
        options |= {"inputs": load(inputs)} if inputs else {}
        options |= {"adapter": load(adapter)} if adapter else {}
        found: Report | list[Report] = verify(target, progress=answers.send, **options)
        if compiled and isinstance(found, Report):
            from equivalence_tests.checker.doors.compiled import add_compiled

            answers.send("compiling it")
            add_compiled(found, target, options.get("adapter"))
    except CannotCheckError as error:
        return [Report(target, reason=str(error))]
    return found if isinstance(found, list) else [found]


def _beat(cpu: "Synchronized[float]") -> None:
    while True:
        cpu.value = time.process_time()
        time.sleep(HEARTBEAT_SECONDS)


def _die_with_the_parent() -> None:
    """Wait until the parent is gone, and take along whatever the user's code started."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # it was started by one
    parent.join()
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _end_where_the_code_returns() -> None:
    """Let a forked child run the user's code and nothing of ours: two would check, and then four."""
    running = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    ours = {frame for frame in running if frame.f_code.co_filename.startswith(CHECKER)}

    def end(frame: FrameType, event: str, _: object) -> None:
        if frame in ours or (event == "return" and frame.f_back in ours):
            os._exit(0)

    sys.setprofile(end)
