"""The report is the same on an idle machine and beside busy ones: no clock decides."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from equivalence_tests import verify
from equivalence_tests.checker.mistakes import named_mistake
from equivalence_tests.checker.zoo.right import broken

BUSY = 3


@contextmanager
def busy_machine() -> Iterator[None]:
    """Let other processes compute without a pause."""
    with ExitStack() as stack:
        for _ in range(BUSY):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def told(target: str) -> dict[str, object]:
    """What the report says, but for the time that it took."""
    return {key: value for key, value in verify(target).to_dict().items() if key != "seconds"}


def test_a_busy_machine_gets_the_same_report(tmp_path: Path) -> None:
    mistake = named_mistake("mask_of_first_sample")
    (tmp_path / "mine.py").write_text(broken(mistake.right, mistake.changes))
    target = f"{tmp_path / 'mine.py'}:Attention"
    idle = told(target)
    with busy_machine():
        assert told(target) == idle
