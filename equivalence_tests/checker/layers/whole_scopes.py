"""One forward while it is written: its variables, their sizes, and its lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from equivalence_tests.checker.layers.whole_operations import Sized


@dataclass
class Line:
    """One line of a forward.

    Args:
        names: The variables that it gives.
        text: The expression.
        takes: The variables that it takes.
    """

    names: list[str]
    text: str
    takes: set[str]


@dataclass
class Scope:
    """One call of a module of the user's.

    Args:
        path: Of the module.
        names: For each tensor, by its id in the first recording, what it is called.
        sized: Writes numbers.
        maybe: The names of masks that may be None, and of what is made of them alone.
        signature: The arguments of its forward, as written.
    """

    path: str
    names: dict[int, str]
    sized: Sized
    maybe: set[str]
    signature: list[str]
    lines: list[Line] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many variables there are."""
        return sum(len(line.names) for line in self.lines)


def live(lines: Sequence[Line], wanted: Sequence[str]) -> list[Line]:
    """Keep the lines that something is made of that is returned."""
    needed, kept = set(wanted), list[Line]()
    for line in reversed(lines):
        if needed & set(line.names):
            kept.append(line)
            needed |= line.takes
    return kept[::-1]
