"""What is known about the mask of an attention from outside the run."""

from dataclasses import dataclass

from torch import Tensor

from equivalence_tests.checker.engine.anchors import Attention

__all__ = ["Expectation", "ExpectedFor"]


@dataclass(frozen=True)
class Expectation:
    """What is known about a call from outside.

    Args:
        may: Which key each score's query may look at, flat as the scores are; None if nothing is known.
        masked: Whether a mask was handed over that hides something.
    """

    may: Tensor | None = None
    masked: bool = False


class ExpectedFor:
    """Says what is known about the mask of an attention; overridden by who knows more."""

    def of(self, attention: Attention) -> dict[int, Expectation]:
        """Give what is known, by the number of each part."""
        return {}
