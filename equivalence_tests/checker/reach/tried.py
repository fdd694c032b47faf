"""Remember how the code that is checked was built and called, so that the call can be shown as a script."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

AT_LINE = re.compile(r":(\d+)\)$")


@dataclass(frozen=True)
class Try:
    """One attempt to build or to call.

    Args:
        function: What was called: a class or a factory where something was built.
        args: What it was given.
        kwargs: By name.
        error: What it raised; "" if it ran.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    error: str = ""

    @property
    def got_as_far_as(self) -> tuple[bool, int]:
        """Whether it ran, and else the last line of the code that it reached."""
        line = AT_LINE.search(self.error)
        return not self.error, int(line[1]) if line else 0


class Tried:
    """What was tried with one target.

    Attributes:
        target: The class, function or instance that is checked.
        call: The first call that ran, else the one that got furthest.
        built_first: The first construction of it that succeeded.
        not_built: The first that did not.
    """

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()
        self.begin(None)

    def begin(self, target: Any) -> None:
        """Forget what was tried with another target."""
        self.target = target
        self.call, self.built_first, self.not_built = None, None, None  # type: Try | None, Try | None, Try | None
        self._kinds = {type(target)} - {FunctionType}

    def built(self, made: Try, instance: Any = None) -> None:
        """Note how something was built, or that it was not."""
        if made.function is self.target and made.error:
            self.not_built = self.not_built or made
        elif made.function is self.target:
            self.built_first = self.built_first or made
            self._kinds.add(type(instance))
        if instance is not None and type(instance).__weakrefoffset__:
            self._made[instance] = made

    def called(self, function: Any, given: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], error: str) -> None:
        """Note a call and what it was given; those of other code, such as the parts of a layer, are passed over."""
        if not self._is_target(function):
            return
        made = Try(function, (), {}, error)
        if self.call is None or made.got_as_far_as > self.call.got_as_far_as:
            self.call = Try(function, *given(), error)

    def construction_of(self, instance: Any) -> Try | None:
        """Give how an instance was built; None where it came ready."""
        found: Try | None = self._made.get(instance)
        return found

    def _is_target(self, function: Any) -> bool:
        return function is self.target or type(function) in self._kinds


TRIED = Tried()
