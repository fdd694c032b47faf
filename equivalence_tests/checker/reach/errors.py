"""What can go wrong before there is a verdict, and what the code said to it."""

from bdb import BdbQuit

__all__ = ["CannotCheckError", "said"]


class CannotCheckError(Exception):
    """The code could not be read, built or called; the message says what is missing and how to give it."""


def said(error: Exception) -> str:
    """Give the first line of what an exception says, with its type.

    >>> said(ValueError("no heads"))
    'ValueError: no heads'
    """
    if isinstance(error, BdbQuit):
        return "BdbQuit: it starts a debugger, which nobody can answer here"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
