"""Versions without end: each operator on each right attention in turn, in an order that is drawn."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from equivalence_tests.wrong.editing import Editable, Version
from equivalence_tests.wrong.operators import Operator
from equivalence_tests.wrong.sites import sites_of
from equivalence_tests.wrong.sources import Right

__all__ = ["UNCHANGED", "drawn", "unchanged"]

UNCHANGED = "unchanged"


def unchanged(right: Right) -> Version:
    """Give a right attention as it is: what it is excused for excuses no edit."""
    return Version(right, UNCHANGED, right.text, ())


def drawn(rights: Sequence[Right], operators: Sequence[Operator], seed: int, folder: Path) -> Iterator[Version]:
    """Give versions until there is none left.

    Args:
        rights: What is edited.
        operators: The edits.
        seed: Of the draw.
        folder: Where files may be written.
    """
    editable = {right.name: Editable(right, sites_of(right, folder)) for right in rights}
    waiting = [
        editable[right.name].versions(operator, random.Random(f"{seed} {right.name} {operator.name}"))
        for right in rights
        for operator in operators
    ]
    draw = random.Random(f"{seed} {[*editable]}")
    while waiting:
        draw.shuffle(waiting)
        for one in [*waiting]:
            made = next(one, None)
            if made is None:
                waiting.remove(one)
            else:
                yield made
