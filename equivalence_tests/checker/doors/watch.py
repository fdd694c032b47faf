"""``with watch() as seen``: note what is called in a block of any program, and check its attentions afterwards.

While the block runs, the arguments of the outermost modules, and of the plain functions that compute an attention
outside of them, are set aside, detached; nothing is computed. What is proven is proven on copies, when the reports are
asked for.
"""

import contextlib
import gc
import inspect
import itertools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FrameType, FunctionType, MethodType
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
TRAINS = {"backward", "grad"}
# Code that stands inside a function and is none that could be called again.
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>")
MOST_TRIES = 3  # calls of a function that computes no attention, after which its arguments are not set aside again

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class WatchedCall:
    """One call of an outermost module, or of a function that computes an attention."""

    function: Callable[..., Any]  # what was called; the module inside, where a wrapper was
    args: tuple[Any, ...]  # its arguments, detached
    kwargs: dict[str, Any]  # those by name
    wrapped: tuple[str, ...] = ()  # the names of the wrappers around it, from the outside in


@dataclass(eq=False)
class Notebook:
    """Keeps calls to check them afterwards, within a bound of memory."""

    calls: list[WatchedCall]  # the first of each outermost module, and of each function that attends
    notes: list[str]  # receives what was not kept, and why
    room: int  # how many bytes the arguments may still take
    known: set[int] = field(default_factory=set)

    def note_module(self, module: nn.Module, given: Arguments) -> None:
        """Keep the first call of a module."""
        module, wrapped = inside_wrappers(module)
        if id(module) in self.known:
            return
        self.known.add(id(module))
        kept = self.put(given)
        if kept is not None:
            self.calls.append(WatchedCall(module, *kept, wrapped))
            return
        size = _size(given) / 1024**2
        self.note(f"{type(module).__name__}: its arguments take {size:.0f} MiB and were not kept (memory_mib)")

    def note_function(self, function: Callable[..., Any], given: Arguments) -> None:
        """Keep a call of a function that computes an attention; a module's own, as its method."""
        args, kwargs = given
        if args and isinstance(args[0], nn.Module) and hasattr(type(args[0]), function.__name__):
            function, args = MethodType(function, args[0]), args[1:]
        self.calls.append(WatchedCall(function, args, kwargs))

    def note(self, text: str) -> None:
        """Add a note that is not there yet."""
        if text not in self.notes:
            self.notes.append(text)

    def put(self, given: Arguments) -> Arguments | None:
        """Copy the arguments of a call; None where there is no room left."""
        if _size(given) > self.room:
            return None
        self.room -= _size(given)
        return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given)

    def give_back(self, given: Arguments | None) -> None:
        """Let go of arguments that are not needed."""
        self.room += _size(given)


def _size(given: Arguments | None) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(given) if isinstance(x, Tensor))


@dataclass(eq=False)
class Visit:
    """One call of a function, while it runs."""

    frame: FrameType | None  # of the call, while it runs: no other can be taken for it as long as it is held
    given: Arguments | None = None  # its arguments when it was first seen, set aside; None if they were not
    attends: bool = False  # whether this function computes an attention
    trains: bool = False  # whether it also goes backward, so that calling it again would change the program


@dataclass(eq=False)
class Functions(TorchFunctionMode):
    """Watches torch's functions, outside of modules."""

    notebook: Notebook  # sets arguments aside, and receives the functions that compute an attention
    visits: list[Visit] = field(default_factory=list)
    tries: Counter[CodeType] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()
        self.scores: Any = WeakTensorKeyDictionary()
        self.weights: Any = WeakTensorKeyDictionary()
        self.outermost: FrameType | None = None

    def __enter__(self) -> "Functions":
        self.outermost = next(_users_frames(sys._getframe(1)), None)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._leave([])
        self.outermost = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        path = self.visit(sys._getframe(1))
        result = function(*args, **kwargs)
        self._follow(plain(getattr(function, "__name__", "")), path, tree_leaves((args, kwargs)), tree_leaves(result))
        return result

    def visit(self, frame: FrameType) -> tuple[Visit, ...]:
        """Note the functions that are running, from the outermost in, and let go of those that have ended."""
        frames = [one for one in _users_frames(frame, self.outermost) if one.f_code.co_name not in INNER]
        running = list(reversed(frames))
        kept = [visit for visit, one in zip(self.visits, running, strict=False) if visit.frame is one]
        if len(kept) < len(self.visits):
            self._leave(kept)
        self.visits += [self._entered(one) for one in running[len(kept) :]]
        return tuple(self.visits)

    @contextlib.contextmanager
    def aside(self, frame: FrameType) -> Iterator[None]:
        """Stand aside while a module runs: what happens in it is its own."""
        self.visit(frame)
        with _pop_mode_temporarily() if _get_current_function_mode() is self else contextlib.nullcontext():
            yield

    def _entered(self, frame: FrameType) -> Visit:
        """Set the arguments of a call aside, where those of another call of the same function are not."""
        visit, code = Visit(frame), frame.f_code
        given = _arguments(frame) if self.tries[code] < MOST_TRIES else None
        visit.given = self.notebook.put(given) if given is not None else None
        self.tries[code] += visit.given is not None
        return visit

    def _leave(self, kept: list[Visit]) -> None:
        for visit in self.visits[len(kept) :]:
            if not (visit.attends and self._handed_over(visit)):
                self.notebook.give_back(visit.given)
            visit.frame = visit.given = None
        self.visits = kept

    def _handed_over(self, visit: Visit) -> bool:
        """Hand over a function that computes an attention; False where it cannot be called again."""
        frame, given = visit.frame, visit.given
        if frame is None or given is None:
            return False
        self.tries[frame.f_code] = MOST_TRIES
        name, function = frame.f_code.co_name, _function_of(frame)
        if visit.trains:
            why = "trains as well; put the attention into a function of its own"
        elif function is None or not any(isinstance(x, Tensor) for x in tree_leaves(given)):
            why = "takes no tensor; pass its tensors as arguments to have it checked"
        else:
            self.notebook.note_function(function, given)
            return True
        self.notebook.note(f"{name} computes an attention and {why}")
        return False

    def follow_module(self, module: nn.Module, args: Any, result: Any) -> None:
        """Carry on what is known of tensors through a module that was called among plain functions."""
        name = "softmax" if any(isinstance(m, nn.Softmax) for m in module.modules()) else "a module"
        self._follow(name, tuple(self.visits), tree_leaves(args), tree_leaves(result))

    def _follow(self, name: str, path: tuple[Visit, ...], given: list[Any], results: list[Any]) -> None:
        """Carry on which tensors are scores and which are weights, and where they were made."""
        if name in TRAINS:
            for visit in path:
                visit.trains = True
        tensors = [x for x in given if isinstance(x, Tensor)]
        weights = next((self.weights[x] for x in tensors if x in self.weights), None)
        scores = next((self.scores[x] for x in tensors if x in self.scores), None)
        if name in FUSED:
            self._attends(path, path)
        elif name in CONTRACTIONS and weights is not None:
            self._attends(weights, path)
        elif name in CONTRACTIONS:
            data = [x for x in tensors if not isinstance(x, nn.Parameter)]
            self._mark(self.scores, results, path if len(data) > 1 else scores)
        elif name in WEIGHS and scores is not None:
            self._mark(self.weights, results, scores)
        else:
            self._mark(self.scores, results, scores)
            self._mark(self.weights, results, weights)

    def _mark(self, kind: Any, results: list[Any], path: tuple[Visit, ...] | None) -> None:
        for x in results if path is not None else ():
            if isinstance(x, Tensor):
                kind[x] = path

    def _attends(self, first: tuple[Visit, ...], last: tuple[Visit, ...]) -> None:
        """The innermost function that both products were made in computes the attention."""
        common = [one for one, other in zip(first, last, strict=False) if one is other]
        if common:
            common[-1].attends = True
        else:
            self.notebook.note("an attention runs in no function and no module; put it into a function to check it")


def _users_frames(frame: FrameType, outermost: FrameType | None = None) -> Iterator[FrameType]:
    """The running calls of the user's code, from the inside out, as far as the block that watches."""
    running = (frame for frame, _ in traceback.walk_stack(frame))
    inside = itertools.takewhile(lambda frame: frame is not outermost, running)
    return (frame for frame in inside if is_users(frame.f_code.co_filename))


def _arguments(frame: FrameType) -> Arguments | None:
    """What a function was called with; None if some of it is gone."""
    info, local = inspect.getargvalues(frame), frame.f_locals
    count = frame.f_code.co_argcount
    names = frame.f_code.co_varnames[: count + frame.f_code.co_kwonlyargcount]
    if any(name not in local for name in names):
        return None
    more = local.get(info.varargs, ()) if info.varargs else ()
    named = {name: local[name] for name in names[count:]} | (local.get(info.keywords, {}) if info.keywords else {})
    return (*(local[name] for name in names[:count]), *more), named


def _function_of(frame: FrameType) -> FunctionType | None:
    """The function that is called: of those that share its code, the one that closes over the same things."""
    for function in gc.get_referrers(frame.f_code):
        if isinstance(function, FunctionType) and function.__code__ is frame.f_code:
            cells = zip(frame.f_code.co_freevars, function.__closure__ or (), strict=False)
            if all(frame.f_locals.get(name) is cell.cell_contents for name, cell in cells):
                return function
    return None


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
