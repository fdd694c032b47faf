"""Write down every operation of a call, forward and backward, with the statement that asked for it."""

import ast
import functools
import inspect
import linecache
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equivalence_tests.learn.excerpts import Excerpt

__all__ = ["Entry", "NotOnTapeError", "Place", "Tape", "backward_tape", "lacks", "tape_of"]

# The files whose statements are quoted: below them nothing is written in Python.
QUOTED = re.compile(r"[/\\]((?:scratch|builtin|torch[/\\]nn)[/\\].*\.py)$")
# Functions and modules that only hand on: what matters is who called them.
HANDING_ON = re.compile(
    r"torch/nn/functional\.py:(softmax|dropout|relu|gelu|layer_norm|linear)$"
    r"|torch/nn/modules/(linear|normalization|dropout)\.py:forward$|torch/nn/modules/module\.py:"
    r"|scratch/paths\.py:softmax$"
)
TOLERANCE = 1e-9  # far above rounding in float64, far below the distance of two random numbers


def lacks() -> str:
    """Say what this torch does not have that a tape needs; "" if it has all."""
    if hasattr(torch._C, "_current_autograd_node"):
        return ""
    return f"torch {torch.__version__} does not tell which step of a backward pass is running: a newer one does."


class NotOnTapeError(LookupError):
    """No operation made this tensor."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One operation.

    Args:
        operation: Its name in aten, torch's library of operations.
        result: What it gave: one entry for each tensor.
        stack: The statements that led to it, the innermost last.
        module: Path of the innermost module whose forward was running; "" for the called one itself.
        node: What autograd calls the step, in a backward pass.
        is_view: Whether it only looks at its input anew.
        part: Which of its results this is, counted from 0.
    """

    operation: str
    result: Tensor
    stack: tuple["Place", ...]
    module: str = ""
    node: str = ""
    is_view: bool = False
    part: int = 0

    @property
    def statement(self) -> Excerpt:
        """The statement that asked for it, past those that only hand on."""
        return next(place for place in (*reversed(self.stack), *self.stack) if not place.hands_on).statement

    def statement_in(self, *files: str) -> Excerpt:
        """The innermost statement in some files: a layer's, where the last one stands in a module that it calls."""
        return next(place for place in reversed(self.stack) if place.short.startswith(files)).statement


@dataclass(frozen=True)
class Place:
    """A line of a file, in some function."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The path from the package on: ``torch/nn/functional.py``."""
        return short_path(self.file)

    @property
    def hands_on(self) -> bool:
        """Whether the function does no more than call another one."""
        return HANDING_ON.match(f"{self.short}:{self.function}") is not None

    @property
    def statement(self) -> Excerpt:
        """The statement that holds the line."""
        return statement_at(self.file, self.line)


class Tape(TorchDispatchMode):
    """Keeps every operation that runs inside the block."""

    def __init__(self, model: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self._paths = (
            {id(module): path for path, module in model.named_modules()} if isinstance(model, nn.Module) else {}
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and write it down."""
        del types
        out = func(*args, **(kwargs or {}))
        stack, module = self._frames(sys._getframe(1))
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            stack = _places_of(node) or stack
        name = func.overloadpacket.__name__
        undoes = "" if node is None else node.name()
        self.entries += [
            Entry(name, result.detach().clone(), stack, module, undoes, func.is_view, part)
            for part, result in enumerate(out if isinstance(out, tuple | list) else (out,))
            if isinstance(result, Tensor)
        ]
        return out

    def _frames(self, frame: FrameType | None) -> tuple[tuple[Place, ...], str]:
        places, module = [], None
        while frame is not None:
            if QUOTED.search(frame.f_code.co_filename):
                places.append(Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            if module is None and frame.f_code.co_name == "forward":
                module = self._paths.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return tuple(reversed(places)), module or ""

    def made(self, wanted: Tensor) -> Entry:
        """Find the operation that computed a tensor, or a greater one that it is cut out of.

        Args:
            wanted: A tensor of numbers that do not occur elsewhere by chance.

        Returns:
            The first operation among whose results all its numbers are.

        Raises:
            NotOnTapeError: If there is none.
        """
        for entry in self.entries:
            if _holds_all(entry.result, wanted):
                return entry
        raise NotOnTapeError(f"none of {len(self.entries)} operations made a tensor of shape {tuple(wanted.shape)}")

    def found(self, wanted: Tensor) -> Tensor:
        """Find this side's own tensor for one of the other side.

        Args:
            wanted: The other side's.

        Returns:
            This side's numbers, in the shape of ``wanted``.

        Raises:
            NotOnTapeError: If no operation gave these numbers in this order.
        """
        return self.entries[self._found_at(wanted)].result.reshape(wanted.shape)

    def _found_at(self, wanted: Tensor, after: int = -1) -> int:
        for index, entry in enumerate(self.entries):
            same = entry.result.numel() == wanted.numel() and _equal(entry.result.reshape(wanted.shape), wanted)
            if same and (after < 0 or (index > after and entry.statement != self.entries[after].statement)):
                return index
        raise NotOnTapeError(f"no tensor has the numbers of shape {tuple(wanted.shape)} in their order")

    def way_to(self, wanted: Tensor, after: Tensor | None = None) -> list[Entry]:
        """List the operations that compute a tensor and bring it into its order.

        Args:
            wanted: The tensor.
            after: One that has been made by then, with the same numbers in another order: the way begins there.

        Returns:
            At least one.
        """
        if after is not None:
            done = self._found_at(after)
            between = self.entries[done + 1 : self._found_at(wanted, after=done) + 1]
            return [x for x in between if _has_all(x, wanted) and x.statement != self.entries[done].statement]
        same = [x for x in self.entries[: self._found_at(wanted) + 1] if _has_all(x, wanted)]
        made = self.made(wanted)
        return same if made in same else [made, *same]

    @property
    def computing(self) -> list[Entry]:
        """The operations that compute something, without those that only look at a tensor anew."""
        return [entry for entry in self.entries if not entry.is_view]


def tape_of(call: Callable[[], Any], model: Any = None) -> Tape:
    """Run a call and write down its operations.

    >>> import scratch
    >>> attention = scratch.MultiheadAttention(4, 2, dtype=torch.float64)
    >>> x = torch.randn(3, 1, 4, dtype=torch.float64)
    >>> tape = tape_of(lambda: attention(x, x, x), attention)
    >>> [entry.operation for entry in tape.computing if entry.operation.endswith(("mm", "softmax"))]
    ['addmm', 'bmm', '_softmax', 'bmm', 'addmm']
    >>> tape.computing[-1].statement.file
    'scratch/attention.py'
    """
    with Tape(model) as tape:
        call()
    return tape


def backward_tape(call: Callable[[], tuple[Tensor, Any]], gradient: Tensor) -> Tape:
    """Run a call, then its backward pass, and write down the latter: each step with the forward statement it undoes.

    Args:
        call: Gives the output and something else, as an attention does.
        gradient: That of the loss with respect to the output.

    Returns:
        The operations of the backward pass.
    """
    with _tracebacks():
        output, _ = call()
        with Tape() as tape:
            output.backward(gradient)
    return tape


@contextmanager
def _tracebacks() -> Iterator[None]:
    """Let autograd remember where each of its steps was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            yield


def _places_of(node: Any) -> tuple[Place, ...]:
    lines = node.metadata.get("traceback_", [])
    found = (re.match(r'\s*File "(.+)", line (\d+), in (\S+)', line) for line in lines)
    return tuple(Place(x[1], int(x[2]), x[3]) for x in found if x and QUOTED.search(x[1]))


def _equal(actual: Tensor, expected: Tensor) -> bool:
    if actual.is_floating_point() != expected.is_floating_point():
        return False
    return torch.allclose(actual.to(expected.dtype), expected, rtol=0, atol=TOLERANCE, equal_nan=True)


def _has_all(entry: Entry, wanted: Tensor) -> bool:
    """Whether an operation gave a tensor's numbers, and no others, in any order."""
    return entry.result.numel() == wanted.numel() and _holds_all(entry.result, wanted)


def _holds_all(result: Tensor, wanted: Tensor) -> bool:
    """Whether every number of one tensor is among those of another one."""
    if result.numel() < wanted.numel() or not result.is_floating_point():
        return False
    have, want = result.flatten().double().sort().values, wanted.flatten().double()
    at = torch.searchsorted(have, want).clamp(max=have.numel() - 1)
    near = torch.stack([have[at], have[(at - 1).clamp(min=0)]])
    same = ((near - want).abs() <= TOLERANCE) | (near == want)  # infinities are equal, and have no difference
    return bool(same.any(dim=0).all())


def short_path(file: str) -> str:
    """Cut a path down to what follows site-packages or the project: ``torch/nn/functional.py``."""
    match = QUOTED.search(file)
    return Path(match[1]).as_posix() if match else file


@functools.cache
def statement_at(file: str, line: int) -> Excerpt:
    """Quote the statement of a file that holds a line.

    Args:
        file: Its path.
        line: Counted from 1.

    Returns:
        The innermost statement, without the indentation.
    """
    statements = [node for node in _statements_of(file) if _covers(node, line)]
    innermost = max(statements, key=lambda node: node.lineno)
    owners = [node.name for node in statements if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    last = innermost.end_lineno or line
    if isinstance(innermost, ast.If | ast.For | ast.With | ast.While):  # its head alone
        last = max(innermost.lineno, innermost.body[0].lineno - 1)
    code = "".join(linecache.getlines(file)[innermost.lineno - 1 : last])
    return Excerpt(short_path(file), innermost.lineno, ".".join(owners), inspect.cleandoc("\n" + code).rstrip())


@functools.cache
def _statements_of(file: str) -> list[ast.stmt]:
    nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    return [node for node in nodes if isinstance(node, ast.stmt)]


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
