"""Run the code of a trap, or of any example, as on a fresh start, and say what came of it."""

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from equivalence_tests.learn.traps.entry import Trap

__all__ = ["Examined", "Outcome", "State", "examine", "run"]


@dataclass(frozen=True)
class Outcome:
    """What a piece of code printed, warned of, returned and ended in."""

    printed: tuple[str, ...]
    warnings: tuple[str, ...]
    value: Any
    error: str

    @property
    def lines(self) -> tuple[str, ...]:
        """All that a person would see."""
        return (*self.printed, *self.warnings, *((self.error,) if self.error else ()))

    @property
    def data(self) -> dict[str, Any]:
        """The same, for JSON."""
        return {"printed": list(self.printed), "warnings": list(self.warnings), "error": self.error or None}


NOT_RUN = Outcome((), (), None, "")


class State(Enum):
    """What has become of a trap on a torch."""

    HOLDS = "holds"
    MENDED = "mended"
    ADVICE_FAILS = "advice fails"
    DESCRIBED = "described"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Examined:
    """A trap, and what its two pieces of code did."""

    trap: Trap
    wrong: Outcome
    right: Outcome

    @property
    def state(self) -> State:
        """Whether the trap is still there, and whether the advice helps."""
        trap = self.trap
        if not trap.runs_here:
            return State.DESCRIBED
        if not _as_told(self.wrong, trap.raises, trap.warns, trap.holds):
            return State.MENDED
        return State.HOLDS if _as_told(self.right, "", "", trap.helps) else State.ADVICE_FAILS


# A newer torch may call anything deprecated, and what others left open is found at any time: neither says anything of
# the trap.
OF_OTHERS = ("DeprecationWarning", "FutureWarning", "ResourceWarning")


def _as_told(outcome: Outcome, raises: str, warns: str, check: Callable[[Any], bool]) -> bool:
    ended = raises in outcome.error if raises else not outcome.error
    told = [text for text in outcome.warnings if not text.startswith(OF_OTHERS)]
    warned = any(warns in text for text in told) if warns else not told
    return ended and warned and bool(check(outcome.value))


def examine(trap: Trap) -> Examined:
    """Run both pieces of code of a trap, here and now.

    Args:
        trap: An entry.

    Returns:
        The trap with both outcomes; with none where what it needs is not here.
    """
    if not trap.runs_here:
        return Examined(trap, NOT_RUN, NOT_RUN)
    return Examined(trap, run(trap.wrong), run(trap.right))


def run(code: Callable[[], Any]) -> Outcome:
    """Run code after ``torch.manual_seed(0)``, and put all back that it changes.

    Args:
        code: A function without arguments.

    Returns:
        What it printed, warned of, returned and ended in.

    >>> run(lambda: print(torch.rand(1) < 2)).printed
    ('tensor([True])',)
    """
    printed, value, error = io.StringIO(), None, ""
    with _fresh_start(), warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        # torch says these once in a process: whether they are seen here is chance.
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        warnings.filterwarnings("ignore", "`torch.jit.script")  # of what torch's compiler is written with
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        try:
            value = code()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    texts = tuple(f"{warning.category.__name__}: {warning.message}" for warning in caught)
    return Outcome(tuple(printed.getvalue().splitlines()), texts, value, error)


@contextlib.contextmanager
def _fresh_start() -> Iterator[None]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # flex attention traces itself, a limited number of times
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _print_options():
        torch.manual_seed(0)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)


@contextlib.contextmanager
def _print_options() -> Iterator[None]:
    before = dict(vars(torch._tensor_str.PRINT_OPTS))
    torch.set_printoptions(precision=2, sci_mode=False, linewidth=72)
    try:
        yield
    finally:
        torch.set_printoptions(**before)
