"""Every known mistake: what it is in a sentence, the formula it makes, the right one, and the fix.

A mistake is one row here. How it is recognised stands in the contract of its stage (``engine/contracts``), or
in the readings of its part; which change makes it of a right attention stands in its row, and a test makes that
change and asks for the name.
"""

import math
from collections.abc import Mapping
from typing import Any

from equivalence_tests.checker.mistakes import attention, calls, offers, parts, scores, wiring
from equivalence_tests.checker.mistakes.mistake import Mistake
from equivalence_tests.checker.reporting.findings import Finding

__all__ = ["MISTAKES", "Mistake", "found_mistake", "named_mistake"]

ROOMS = (scores, attention, calls, offers, parts, wiring)
MISTAKES = {mistake.name: mistake for room in ROOMS for mistake in room.ROWS}


def named_mistake(name: str) -> Mistake:
    """Look a mistake up by its name; an unknown one raises a KeyError."""
    return MISTAKES[name]


def found_mistake(mistake: Mistake | str, facts: Mapping[str, Any] | None = None, **shown: Any) -> Finding:
    """Give a finding with the words of a known mistake, the facts that they speak of, and what else it shows."""
    mistake = named_mistake(mistake) if isinstance(mistake, str) else mistake
    facts = {"factor": math.nan, "fill": math.nan, "cap": math.nan, "argument": ""} | dict(facts or {})
    said = {words: getattr(mistake, words).format(**facts) for words in ("sentence", "have", "want", "fix")}
    known = {"name": mistake.name, "stage": mistake.stage, "on_purpose_in": mistake.on_purpose_in}
    return Finding(**known | said | shown)
