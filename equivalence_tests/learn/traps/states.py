"""What each trap was found to be on each tested torch: ``states.json``, renewed by ``sidebyside traps --record``."""

import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from equivalence_tests.learn.traps.entry import Trap
from equivalence_tests.learn.traps.running import Examined, State

__all__ = ["INSTALLED", "checked_on", "recorded", "state_of"]

FILE = Path(__file__).with_name("states.json")
INSTALLED = torch.__version__.partition("+")[0]


@cache
def _states() -> dict[str, dict[str, list[str]]]:
    """Read the file: for each trap and each state the versions of torch."""
    read: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return read


def state_of(trap: Trap, version: str = INSTALLED) -> State:
    """Say what a trap was found to be; nothing is run.

    Args:
        trap: An entry.
        version: Of torch.

    Returns:
        The state; ``State.NOT_TRIED`` on a version that was not tested, and for what this machine may lack.

    >>> from equivalence_tests.learn.traps.registry import find_trap
    >>> state_of(find_trap("mask_polarity"), "2.13.0").value
    'holds'
    """
    if trap.needs:
        return State.DESCRIBED
    found = _states().get(trap.name, {})
    return next((State(state) for state, versions in found.items() if version in versions), State.NOT_TRIED)


def checked_on(trap: Trap) -> list[str]:
    """Name the versions of torch on which a trap was run."""
    return sorted(itertools.chain.from_iterable(_states().get(trap.name, {}).values()))


def recorded(examined: Sequence[Examined]) -> str:
    """Put what was found on the installed torch into the file, a line for each trap.

    Args:
        examined: All traps, run. Those that take more than torch have no line: what else is installed decides.

    Returns:
        The text of the file.
    """
    lines = []
    for one in (one for one in examined if not one.trap.needs):
        known = {state: [x for x in versions if x != INSTALLED] for state, versions in _known(one).items()}
        known[one.state.value] = sorted([*known.get(one.state.value, []), INSTALLED])
        lines.append(f"{json.dumps(one.trap.name)}: {json.dumps({s: v for s, v in known.items() if v})}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _known(one: Examined) -> dict[str, list[str]]:
    return _states().get(one.trap.name, {})
