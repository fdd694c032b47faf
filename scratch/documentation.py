"""What two twins say alike, written once: the docstring of the one is attached to the other when it is imported."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["documented_like", "merged"]

Documented = TypeVar("Documented", bound=Callable[..., Any])

# The sections of a docstring in their order; the first has no title, and the last are examples.
SECTIONS = ("", "Args", "Attributes", "Returns", "Yields", "Raises", "In torch.nn", "Traps", "Limits", "Source", ">>>")
TITLE = re.compile(rf"({'|'.join(map(re.escape, SECTIONS[1:-1]))}):|(>>>) ")


def documented_like(original: Callable[..., Any]) -> Callable[[Documented], Documented]:
    """Add to a function, or a class and its methods, the sections of the original that its own docstrings leave out.

    Args:
        original: The twin whose docstrings are complete.

    Returns:
        A decorator.

    >>> def greet(name: str) -> str:
    ...     '''Greet.
    ...
    ...     Args:
    ...         name: Of whom.
    ...     '''
    >>> @documented_like(greet)
    ... def greet_in_french(name: str) -> str:
    ...     '''Source: France.'''
    >>> print(greet_in_french.__doc__)
    Greet.
    <BLANKLINE>
    Args:
        name: Of whom.
    <BLANKLINE>
    Source: France.
    """

    def attach(twin: Documented) -> Documented:
        twin.__doc__ = merged(original, twin)
        if inspect.isclass(twin):
            for name in vars(twin).keys() & vars(original).keys():
                method = getattr(twin, name)
                if inspect.isfunction(method):
                    method.__doc__ = merged(getattr(original, name), method)
        return twin

    return attach


def merged(original: Callable[..., Any], twin: Callable[..., Any]) -> str | None:
    """Put the sections of two docstrings together: each once, the twin's own where it has one.

    Args:
        original: What is said of both.
        twin: What is said of it alone.

    Returns:
        The docstring; None if neither has one.
    """
    theirs, own = (sections_of(inspect.cleandoc(x.__doc__ or "")) for x in (original, twin))
    found = {**theirs, **own}
    return "\n\n".join(found[title] for title in SECTIONS if title in found) or None


def sections_of(docstring: str) -> dict[str, str]:
    """Cut a docstring into its sections, each with its title."""
    found: dict[str, str] = {}
    title = ""
    for paragraph in filter(None, docstring.split("\n\n")):
        match = TITLE.match(paragraph)
        title = title if match is None else match[1] or match[2]
        found[title] = f"{found[title]}\n\n{paragraph}" if title in found else paragraph
    return found
