"""``with watch() as seen``: note what is called in a block of any program, and check its attentions afterwards.

While the block runs, the arguments of the outermost modules, and of the plain functions that compute an attention
outside of them, are set aside, detached; nothing is computed. What is proven is proven on copies, when the reports are
asked for.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from rich.console import Group, RichCast
from rich.padding import Padding
from rich.text import Text
from torch import nn

from equivalence_tests.checker.doors.frames import Functions, Notebook, WatchedCall
from equivalence_tests.checker.own_call import NO_ATTENTION
from equivalence_tests.checker.reporting.rendering import Shown
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify, without


@dataclass(repr=False)
class Watched(Shown):
    """What was called while watching.

    Args:
        intended: As in ``verify``.
        calls: The first call of each module, and of each function that computes an attention.
        notes: What was not kept, and why.
    """

    intended: Mapping[str, str] = field(default_factory=dict)
    calls: list[WatchedCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def reports(self) -> list[Report]:
        """One report for each attention that ran; made when it is first asked for."""
        found = []
        for call in self.calls:
            for report in verify(call.function, inputs=(call.args, call.kwargs), intended=self.intended):
                report.notes += without(call.wrapped)
                if not report.reason.startswith(NO_ATTENTION):
                    found.append(report)
        return found

    def __bool__(self) -> bool:
        """True if there were attentions, and all of them are equal to torch's, except where intended."""
        return bool(self.reports) and all(self.reports)

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    def __rich__(self) -> Group:
        """Lay all reports out, one below the other."""
        notes = self.notes if self.reports or self.notes else ["No attention ran while watching."]
        shown: list[RichCast | Text] = [*self.reports, *map(Text, notes)]
        return Group(*(Padding(part, (int(number > 0), 0, 0, 0)) for number, part in enumerate(shown)))


@contextlib.contextmanager
def watch(*, memory_mib: int = 512, intended: Mapping[str, str] | None = None) -> Iterator[Watched]:
    """Note what is called in a block, modules and plain functions, to check the attentions in it afterwards.

    Outputs, gradients and random numbers of the block are what they would have been without it. Of each module and
    function the first call is kept, as long as the arguments fit into ``memory_mib``. Functions are watched in the
    thread of the block, where they are not compiled.

    Args:
        memory_mib: How much the arguments that are set aside may take.
        intended: Which deviations are on purpose: name -> reason.

    Yields:
        What was seen; its ``reports`` are made when they are asked for.

    >>> attention = nn.MultiheadAttention(12, 3, batch_first=True)
    >>> x = torch.randn(2, 5, 12)
    >>> with watch() as seen:
    ...     output, weights = attention(x, x, x)
    >>> [report.verdict for report in seen]
    ['equal']
    """
    seen = Watched(intended or {})
    notebook = Notebook(seen.calls, seen.notes, memory_mib * 1024**2)
    functions = Functions(notebook)
    original = nn.Module.__call__
    running = threading.local()  # of each thread: whether a module runs

    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(running, "module", False):
            return original(module, *args, **kwargs)
        notebook.note_module(module, (args, kwargs))
        running.module = True
        try:
            with functions.aside(sys._getframe(1)):
                result = original(module, *args, **kwargs)
        finally:
            running.module = False
        functions.follow_module(module, (args, kwargs), result)
        return result

    with mock.patch.object(nn.Module, "__call__", noting), functions:
        yield seen
