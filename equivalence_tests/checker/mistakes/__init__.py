"""Every known mistake: what it is in a sentence, the formula it makes, the right one, and the fix.

A mistake is one row here. How it is told from others stands in the contract of its stage (``engine/contracts``), or
in the readings of its part; which change makes it of a right attention stands in its row, and a test makes that
change and asks for the name.
"""

from equivalence_tests.checker.mistakes import attention, masks, offers, parts, wiring
from equivalence_tests.checker.mistakes.mistake import Mistake

__all__ = ["MISTAKES", "Mistake", "named_mistake"]

MISTAKES = {
    mistake.name: mistake for mistake in (*attention.ROWS, *offers.ROWS, *parts.ROWS, *wiring.ROWS, *masks.ROWS)
}


def named_mistake(name: str) -> Mistake:
    """Look a mistake up by its name.

    Raises:
        KeyError: If there is none.

    >>> named_mistake("softmax_missing").fix
    'Apply softmax over the keys before multiplying by the values.'
    """
    return MISTAKES[name]
