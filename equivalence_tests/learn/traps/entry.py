"""What a trap is: words, the code a person writes, the code that is right, and what is true of both."""

import importlib.util
import inspect
from enum import Enum
from typing import Any, ClassVar

from equivalence_tests.learn.excerpts import Place

__all__ = ["Severity", "Trap"]


class Severity(Enum):
    """What the trap does to the one who steps into it, worst first."""

    WRONG_NUMBERS = "silently wrong"
    ERROR = "error"
    SLOW = "slow"
    SURPRISING = "surprising"


class Trap:
    """A behaviour of torch.nn that catches people out, as code that runs.

    A trap is a subclass. Its docstring is the trap in one line. ``wrong`` and ``right`` are written as a person would
    type them, because their source is shown: they print what is to be seen, and what they return, which is not shown,
    is what ``holds`` and ``helps`` look at. Both start from the same seed.

    Attributes:
        number: Its place in the list.
        name: What docstrings call it: see trap `NAME`.
        severity: What it does.
        concerns: The arguments it is about, as "argument" of whatever class, or as "Class.argument".
        expects: What the writer of the wrong code expects.
        happens: How to read what the wrong code prints.
        why: The reason, to be read beside the hand-written code at ``places``.
        places: Statements of scratch.
        instead: What to do, to be read beside the right code.
        issues: Where it is discussed, as "owner/repository#number".
        since: The torch version it came with, or the first in which it was seen, where that is known.
        mended_in: The first torch version without it.
        raises: Words of the error in which the wrong code ends, if it does.
        warns: Words of the warning that the wrong code gives, if it does.
        needs: What it takes to see it, where that is not torch on the CPU alone: the name of a package, which is run
            where it is installed, or a device, of which the trap only tells.
    """

    number: ClassVar[int]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    concerns: ClassVar[tuple[str, ...]]
    expects: ClassVar[str]
    happens: ClassVar[str]
    why: ClassVar[str]
    places: ClassVar[tuple[Place, ...]]
    instead: ClassVar[str]
    issues: ClassVar[tuple[str, ...]] = ()
    since: ClassVar[str] = ""
    mended_in: ClassVar[str] = ""
    raises: ClassVar[str] = ""
    warns: ClassVar[str] = ""
    needs: ClassVar[str] = ""

    @property
    def title(self) -> str:
        """The trap in one line."""
        return inspect.cleandoc(type(self).__doc__ or "").splitlines()[0]

    @property
    def runs_here(self) -> bool:
        """Whether the package that it needs is installed; a device is none."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def wrong(self) -> Any:
        """Do what people do."""
        raise NotImplementedError

    def right(self) -> Any:
        """Do what helps."""
        raise NotImplementedError

    def holds(self, wrong: Any) -> bool:
        """Say whether what the wrong code returned is the trap; an entry with ``raises`` or ``warns`` needs no more."""
        del wrong
        return bool(self.raises or self.warns)

    def helps(self, right: Any) -> bool:
        """Say whether what the right code returned is what was expected."""
        raise NotImplementedError
