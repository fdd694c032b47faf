"""The traps, each run while the page is built: what people write beside what helps, with what both printed."""

from typing import Any

from equivalence_tests.learn.traps.entry import Severity
from equivalence_tests.learn.traps.registry import TRAPS
from equivalence_tests.learn.traps.rendering import as_data, versions
from equivalence_tests.learn.traps.running import examine

__all__ = ["trap_data"]


def trap_data() -> dict[str, Any]:
    """Run every trap.

    Returns:
        The severities, worst first, and all that is known of each trap.
    """
    cards = [as_data(examine(trap)) | {"versions": versions(trap)} for trap in TRAPS]
    present = {card["severity"] for card in cards}
    return {"severities": [x.value for x in Severity if x.value in present], "traps": cards}
