"""``with watch() as seen``: note what is called in a block of any program, and check its attentions afterwards.

While the block runs, the arguments of the outermost modules are set aside, detached; nothing is computed. What is
proven is proven on copies, when the reports are asked for. Plain functions that compute an attention outside of modules
are named: of two tensors a product gives scores, an exponential of these gives weights, and where weights meet a third
tensor there is an attention.
"""

import contextlib
import itertools
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from rich.console import Group, RichCast
from rich.padding import Padding
from rich.text import Text
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS, WEIGHS, plain
from equivalence_tests.checker.own_call import NO_ATTENTION
from equivalence_tests.checker.reach.loading import inside_wrappers
from equivalence_tests.checker.reporting.lines import is_users
from equivalence_tests.checker.reporting.rendering import Shown
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify, without

FUSED = {"scaled_dot_product_attention", "multi_head_attention_forward"}
# Code that stands inside a function and is none that could be called.
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>")
BLOCK = "the block"
CALL = "No module runs it, so that it cannot be called again: pass it to verify, with the inputs, or put it into one."

Place = tuple[tuple[CodeType, int], ...]  # the functions that run, from the outermost in, each with where it is


@dataclass(frozen=True)
class WatchedCall:
    """One call of an outermost module."""

    function: nn.Module  # the module inside, where a wrapper was
    args: tuple[Any, ...]  # its arguments, detached
    kwargs: dict[str, Any]  # those by name
    wrapped: tuple[str, ...] = ()  # the names of the wrappers around it, from the outside in


class Functions(TorchFunctionMode):
    """Watches torch's functions outside of modules, and names the functions that compute an attention there."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found
        self.scores: Any = WeakTensorKeyDictionary()  # each with the place where its product was made
        self.weights: Any = WeakTensorKeyDictionary()
        self.outermost: FrameType | None = None

    def __enter__(self) -> "Functions":
        self.outermost = next(_users_frames(sys._getframe(1)), None)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.outermost = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            name = plain(getattr(function, "__name__", ""))
            self.follow(name, sys._getframe(1), tree_leaves((args, kwargs)), tree_leaves(result))
        return result

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Stand aside while a module runs: what happens in it is its own."""
        return _pop_mode_temporarily() if _get_current_function_mode() is self else contextlib.nullcontext()

    def follow(self, name: str, frame: FrameType, given: list[Any], results: list[Any]) -> None:
        """Carry on which tensors are scores and which are weights, and where their products were made."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        weights = next((self.weights[x] for x in tensors if x in self.weights), None)
        scores = next((self.scores[x] for x in tensors if x in self.scores), None)
        here = _place(frame, self.outermost) if name in FUSED or name in CONTRACTIONS else ()
        if name in FUSED:
            self._attends(here, here)
        elif name in CONTRACTIONS and weights is not None:
            self._attends(weights, here)
        elif name in CONTRACTIONS:
            data = [x for x in tensors if not isinstance(x, nn.Parameter)]
            self._mark(self.scores, results, here if len(data) > 1 else scores)
        elif name in WEIGHS and scores is not None:
            self._mark(self.weights, results, scores)
        else:
            self._mark(self.scores, results, scores)
            self._mark(self.weights, results, weights)

    def _mark(self, kind: Any, results: list[Any], place: Place | None) -> None:
        for x in results if place is not None else ():
            if isinstance(x, Tensor):
                kind[x] = place

    def _attends(self, first: Place, last: Place) -> None:
        """The innermost function that both products were made in computes the attention."""
        name = BLOCK
        for (code, at), (other, there) in zip(first, last, strict=False):
            name = code.co_name if code is other else name
            if (code, at) != (other, there):
                break
        self.found += [name] if name not in self.found else []


def _users_frames(frame: FrameType, outermost: FrameType | None = None) -> Iterator[FrameType]:
    """The running calls of the user's code, from the inside out, as far as the block that watches."""
    running = (frame for frame, _ in traceback.walk_stack(frame))
    inside = itertools.takewhile(lambda frame: frame is not outermost, running)
    return (frame for frame in inside if is_users(frame.f_code.co_filename))


def _place(frame: FrameType, outermost: FrameType | None) -> Place:
    """Say where the user's functions are that run."""
    running = ((one.f_code, one.f_lasti) for one in _users_frames(frame, outermost))
    return tuple(one for one in running if one[0].co_name not in INNER)[::-1]


@dataclass(repr=False)
class Watched(Shown):
    """What was called while watching.

    Args:
        intended: As in ``verify``.
        calls: The first call of each module.
        functions: Plain functions that computed an attention outside of modules, by name; they are not called again.
        notes: What was not kept, and why.
    """

    intended: Mapping[str, str] = field(default_factory=dict)
    calls: list[WatchedCall] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    known: set[nn.Module] = field(default_factory=set)
    mib: float = 0.0  # what the arguments take that are kept

    @cached_property
    def reports(self) -> list[Report]:
        """One report for each attention that ran; made when it is first asked for."""
        found = [Report(name, reason=f"{name} computes an attention. {CALL}") for name in self.functions]
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

    def keep(self, module: nn.Module, args: Any, kwargs: Any, memory_mib: int) -> None:
        """Keep the first call of a module, while there is room for what it is given."""
        module, wrapped = inside_wrappers(module)
        if module in self.known:
            return
        self.known.add(module)
        size = sum(x.numel() * x.element_size() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)) / 2**20
        if size > memory_mib - self.mib:
            kept = f"its arguments take {size:.0f} MiB and were not kept (memory_mib)"
            self.notes.append(f"{type(module).__name__}: {kept}")
            return
        self.mib += size
        own, named = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
        self.calls.append(WatchedCall(module, own, named, wrapped))


@contextlib.contextmanager
def watch(*, memory_mib: int = 512, intended: Mapping[str, str] | None = None) -> Iterator[Watched]:
    """Note which modules are called in a block, to check the attentions in it afterwards.

    Outputs, gradients and random numbers of the block are what they would have been without it. Of each module the
    first call is kept, as long as the arguments fit into ``memory_mib``. A plain function that computes an attention
    outside of modules is named in a report that could not be checked: ``verify`` takes it with its arguments. Functions
    are watched in the thread of the block, where they are not compiled.

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
    functions = Functions(seen.functions)
    original = nn.Module.__call__
    running = threading.local()  # of each thread: whether a module runs

    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(running, "module", False):
            return original(module, *args, **kwargs)
        seen.keep(module, args, kwargs, memory_mib)
        running.module = True
        try:
            with functions.aside():
                result = original(module, *args, **kwargs)
        finally:
            running.module = False
        name = "softmax" if any(isinstance(m, nn.Softmax) for m in module.modules()) else "a module"
        functions.follow(name, sys._getframe(1), tree_leaves((args, kwargs)), tree_leaves(result))
        return result

    with mock.patch.object(nn.Module, "__call__", noting), functions:
        yield seen
