"""The page to learn from: hand-written and built-in attention side by side, computed while it is built."""

from equivalence_tests.learn.page.building import build_page
from equivalence_tests.learn.page.notebook import show

__all__ = ["build_page", "show"]
