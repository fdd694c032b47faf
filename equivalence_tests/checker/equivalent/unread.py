"""Why no equivalent could be made."""

from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reporting.lines import raised_at


class UnreadError(Exception):
    """What the code does is not among the parts that an equivalent is made of."""


def not_called_again(error: Exception) -> UnreadError:
    """Say that code raised something when it was called again; what says why it cannot be read stays as it is."""
    if isinstance(error, UnreadError):
        return error
    return UnreadError(f"it cannot be called again ({said(error)}{raised_at(error)})")
