"""Why no equivalent could be made."""

import traceback

from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reporting.equivalents import WRITTEN
from equivalence_tests.checker.reporting.lines import raised_at


class UnreadError(Exception):
    """What the code does is not among the parts that an equivalent is made of."""


def not_called_again(error: Exception) -> UnreadError:
    """Say that code raised something when it was called again; what says why it cannot be read stays as it is."""
    if isinstance(error, UnreadError):
        return error
    if any(frame.f_code.co_filename == WRITTEN for frame, _ in traceback.walk_tb(error.__traceback__)):
        return UnreadError("the program written from it does not run in all the calls in which it does")
    return UnreadError(f"it cannot be called again ({said(error)}{raised_at(error)})")
