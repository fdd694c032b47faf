"""Remember how the code that is checked was built and called, so that the call can be shown as a script."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

AT_LINE = re.compile(r"\([^()]*:(\d+)\)$")
NO_OUTPUT = "no output of the query's length came back"  # begins what is said of a call that ran


def line_of(error: str) -> float:
    """Read the last line of the code that a call reached in what it raised; 0 where none is named."""
    line = AT_LINE.search(error)
    return math.inf if error.startswith(NO_OUTPUT) else int(line[1]) if line else 0


def furthest_first(errors: Iterable[str]) -> list[str]:
    """List what calls raised, one text for each place; the call that came furthest fits the code best.

    >>> furthest_first(["A: 1 (mine.py:7)", "A: 2 (mine.py:7)", "B (mine.py:8, called from mine.py:9)", "C"])
    ['B (mine.py:8, called from mine.py:9)', 'A: 1 (mine.py:7)', 'C']
    >>> furthest_first(["A (mine.py:7)", f"{NO_OUTPUT}, but [(2, 1, 12)]"])[1]
    'A (mine.py:7)'
    """
    at_place: dict[str, str] = {}
    for text in errors:
        place = AT_LINE.search(text)
        at_place.setdefault(place[0] if place else text, text)
    return sorted(at_place.values(), key=line_of, reverse=True)


@dataclass(frozen=True)
class Try:
    """One attempt to build or to call."""

    function: Callable[..., Any]  # what was called: a class or a factory where something was built
    args: tuple[Any, ...]  # what it was given
    kwargs: dict[str, Any]  # by name
    error: str = ""  # what it raised; "" if it ran

    @property
    def got_as_far_as(self) -> tuple[bool, float]:
        """Whether it ran, and else the last line of the code that it reached."""
        return not self.error, line_of(self.error)


class Tried:
    """What was tried with one target."""

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()
        self.begin(None)

    def begin(self, target: Any) -> None:
        """Forget what was tried with another target."""
        self.target = target
        self.call: Try | None = None  # the first that ran, else the one that got furthest
        self.built_first: Try | None = None  # the first construction that succeeded
        self.not_built: Try | None = None  # the first that did not
        # The ways to call that failed with every mask and angles, and for each answer the first call it met.
        self.failed: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.handed_numbers_alone = True  # constructors were given nothing that could choose what is called
        self._kinds = {type(target)} - {FunctionType}

    def built(self, made: Try, instance: Any = None) -> None:
        """Note how something was built, or that it was not."""
        self.handed_numbers_alone &= all(map(_is_number, made.kwargs.values()))
        if made.function is self.target and made.error:
            self.not_built = self.not_built or made
        elif made.function is self.target:
            self.built_first = self.built_first or made
            self._kinds.add(type(instance))
        if instance is not None and type(instance).__weakrefoffset__:
            self._made[instance] = made

    def called(self, function: Any, given: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], error: str) -> None:
        """Note a call and what it was given; those of other code, such as the parts of a layer, are passed over."""
        if function is not self.target and type(function) not in self._kinds:
            return
        made = Try(function, (), {}, error)
        if self.call is None or made.got_as_far_as > self.call.got_as_far_as:
            self.call = Try(function, *given(), error)

    def construction_of(self, instance: Any) -> Try | None:
        """Give how an instance was built; None where it came ready."""
        found: Try | None = self._made.get(instance) if type(instance).__weakrefoffset__ else None
        return found


def _is_number(value: Any) -> bool:
    several = isinstance(value, tuple | list)
    return all(map(_is_number, value)) if several else value is None or isinstance(value, int | float)


TRIED = Tried()
