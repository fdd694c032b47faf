"""``with watch() as seen``: note what is called in a block of any program, and check its attentions afterwards.

While the block runs, the arguments of the outermost modules, and of the plain functions that compute an attention
outside of them, are set aside, detached; nothing is computed. What is proven is proven on copies, when the reports are
asked for.
"""

import contextlib
import html
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from rich.console import Group
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from equivalence_tests.checker.doors.frames import Arguments, Functions
from equivalence_tests.checker.own_call import NO_ATTENTION
from equivalence_tests.checker.reach.loading import inside_wrappers
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify, without

__all__ = ["Watched", "WatchedCall", "watch"]


NOTHING = "No attention ran while watching."


@dataclass(frozen=True)
class WatchedCall:
    """One call of an outermost module, or of a function that computes an attention.

    Args:
        function: What was called; the module inside, where a wrapper was.
        args: Its arguments, detached.
        kwargs: Those by name.
        wrapped: The names of the wrappers around it, from the outside in.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wrapped: tuple[str, ...] = ()


@dataclass(repr=False)
class Watched:
    """What was called while watching.

    Args:
        meant: As in ``verify``.
        calls: The first call of each module, and of each function that computes an attention.
        notes: What was not kept, and why.
    """

    meant: Mapping[str, str] = field(default_factory=dict)
    calls: list[WatchedCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def reports(self) -> list[Report]:
        """One report for each attention that ran; made when it is first asked for."""
        found = []
        for call in self.calls:
            for report in verify(call.function, inputs=(call.args, call.kwargs), meant=self.meant):
                report.notes += without(call.wrapped)
                if not report.reason.startswith(NO_ATTENTION):
                    found.append(report)
        return found

    def note(self, text: str) -> None:
        """Add a note that is not there yet."""
        if text not in self.notes:
            self.notes.append(text)

    def __bool__(self) -> bool:
        """True if there were attentions, and all of them are equal to torch's, but for what is meant so."""
        return bool(self.reports) and all(self.reports)

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    def __rich__(self) -> Group:
        """Lay all reports out, one below the other."""
        return Group(*self.reports, *self._notes())

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.reports), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        told = [f"<p>{html.escape(note)}</p>" for note in self._notes()]
        return "".join([*(report._repr_html_() for report in self.reports), *told])

    def _notes(self) -> list[str]:
        return self.notes if self.reports or self.notes else [NOTHING]


@contextlib.contextmanager
def watch(*, memory_mib: int = 512, meant: Mapping[str, str] | None = None) -> Iterator[Watched]:
    """Note what is called in a block, modules and plain functions, to check the attentions in it afterwards.

    Outputs, gradients and random numbers of the block are what they would have been without it. Of each module and
    function the first call is kept, as long as the arguments fit into ``memory_mib``. Functions are watched in the
    thread of the block, where they are not compiled.

    Args:
        memory_mib: How much the arguments that are set aside may take.
        meant: Which deviations are on purpose: name -> reason.

    Yields:
        What was seen; its ``reports`` are made when they are asked for.

    >>> attention = nn.MultiheadAttention(12, 3, batch_first=True)
    >>> x = torch.randn(2, 5, 12)
    >>> with watch() as seen:
    ...     output, weights = attention(x, x, x)
    >>> [report.verdict for report in seen]
    ['equal']
    """
    seen = Watched(meant or {})
    notebook = _Notebook(seen, memory_mib * 1024**2)
    functions = Functions(notebook.put, notebook.give_back, notebook.note_function, seen.note)
    original = nn.Module.__call__

    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        with notebook.inside() as outermost:
            if not outermost:
                return original(module, *args, **kwargs)
            notebook.note(module, args, kwargs)
            with functions.aside(sys._getframe(1)):
                result = original(module, *args, **kwargs)
            functions.follow_module(module, (args, kwargs), result)
            return result

    nn.Module.__call__ = noting  # type: ignore[method-assign]
    try:
        with functions:
            yield seen
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


class _Notebook:
    """Keeps the first call of each outermost module, within a bound of memory."""

    def __init__(self, seen: Watched, room: int) -> None:
        self.seen, self.room = seen, room
        self.known: set[int] = set()
        self.depth = threading.local()

    @contextlib.contextmanager
    def inside(self) -> Iterator[bool]:
        """Tell whether a call is an outermost one of its thread."""
        before = getattr(self.depth, "number", 0)
        self.depth.number = before + 1
        try:
            yield before == 0
        finally:
            self.depth.number = before

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the arguments of a call aside."""
        module, wrapped = inside_wrappers(module)
        if id(module) in self.known:
            return
        self.known.add(id(module))
        put = self.put((args, kwargs))
        if put is None:
            size = _size((args, kwargs)) / 1024**2
            self.seen.note(f"{type(module).__name__}: its arguments take {size:.0f} MiB and were not kept (memory_mib)")
        else:
            self.seen.calls.append(WatchedCall(module, *put[0], wrapped))

    def note_function(self, function: Callable[..., Any], given: Arguments) -> None:
        """Keep a call of a function that computes an attention; a module's own, as its method."""
        args, kwargs = given
        if args and isinstance(args[0], nn.Module) and hasattr(type(args[0]), function.__name__):
            function, args = MethodType(function, args[0]), args[1:]
        self.seen.calls.append(WatchedCall(function, args, kwargs))

    def put(self, given: Arguments) -> tuple[Arguments, int] | None:
        """Copy the arguments of a call; None where there is no room left."""
        size = _size(given)
        if size > self.room:
            return None
        self.room -= size
        return tree_map(_detached, given), size

    def give_back(self, size: int) -> None:
        """Let go of arguments that are not needed."""
        self.room += size


def _size(given: Arguments) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(given) if isinstance(x, Tensor))


def _detached(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x
