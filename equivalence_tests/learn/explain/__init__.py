"""What each argument of the mirrored classes and functions does: in words, by hand, drawn and run."""

from equivalence_tests.learn.explain.entry import Explanation
from equivalence_tests.learn.explain.registry import EXPLANATIONS, arguments_of, find_explanations

__all__ = ["EXPLANATIONS", "Explanation", "arguments_of", "find_explanations"]
