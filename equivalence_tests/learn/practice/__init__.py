"""Twenty exercises: write attention by hand and with torch, and hear why it is wrong."""

from typing import TYPE_CHECKING

from equivalence_tests.lazily import from_homes

if TYPE_CHECKING:
    from equivalence_tests.learn.practice.checking import check, solution

__all__ = ["check", "solution"]

__getattr__ = from_homes(__name__, dict.fromkeys(__all__, "equivalence_tests.learn.practice.checking"))
