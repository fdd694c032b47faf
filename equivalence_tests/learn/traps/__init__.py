"""The traps of the built-in API, each one runnable: what people write, what happens here, now, and what to write."""

from equivalence_tests.learn.traps.entry import Severity, Trap
from equivalence_tests.learn.traps.registry import TRAPS, find_trap, traps_about
from equivalence_tests.learn.traps.running import Examined, Outcome, State, examine, run

__all__ = [
    "TRAPS",
    "Examined",
    "Outcome",
    "Severity",
    "State",
    "Trap",
    "examine",
    "find_trap",
    "run",
    "traps_about",
]
