"""What can go wrong before there is a verdict."""

__all__ = ["CannotCheckError"]


class CannotCheckError(Exception):
    """The code could not be read, built or called; the message says what is missing and how to give it."""
