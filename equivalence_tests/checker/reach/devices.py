"""What names a GPU is run on the CPU, and what stays on the CPU wherever inputs are is followed to its line."""

import ast
import functools
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from equivalence_tests.checker.reach.errors import ASKED_FOR
from equivalence_tests.checker.reach.syntax import file_of, setting
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import TORCH, Frames, is_users, local_here

T = TypeVar("T")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")
GPUS = ("cuda", "mps", "xpu")
MOVE, TO_GPU = {"to", "type_as"}, {"cuda", "xpu"}
KINDS = ("FloatTensor", "LongTensor", "BoolTensor", "ByteTensor")
IN_PLACE: dict[str, Any] = {kind: getattr(torch, kind) for kind in KINDS}  # of what torch.cuda has
IN_PLACE["current_device"] = lambda: torch.device("cpu")
CHOOSES = re.compile(r"device|cuda|\.to\(|type_as")  # who makes a tensor where it is needed
# What takes tensors of two devices: those that write from one to the other, and those that only read a shape.
TAKE_BOTH = {"copy_", "__setitem__", "expand_as", "view_as", "reshape_as"}


class AsksForGPU(BaseException):
    """Ends a check, so that it begins anew on the CPU; no ``except Exception`` stops it."""


class OnCPU(TorchFunctionMode):
    """Lets tensors be made on the CPU, and stay there, whatever device the code names."""

    may_begin = False  # whether a check runs that can begin anew in it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in TO_GPU:
            return args[0]
        given = {name: _on_cpu(x) for name, x in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **given)


def _on_cpu(x: Any) -> Any:
    """Give the CPU in the place of a GPU, and anything else as it is."""
    return torch.device("cpu") if _kind_of(x) in GPUS else x


def on_cpu_where_a_gpu_is_asked_for(check: Callable[[], T]) -> tuple[T, BaseException | None]:
    """Check, and once more on the CPU where the code asks for a GPU; give what it said then, too."""
    OnCPU.may_begin = True
    try:
        return check(), None
    except AsksForGPU as ended:
        asked = ended.__cause__
    finally:
        OnCPU.may_begin = False
    with OnCPU(), mock.patch.multiple(torch.cuda, **IN_PLACE):
        return check(), asked


def begin_anew_on_cpu(error: BaseException) -> None:
    """End the check, if it may begin anew, where an exception says that its code asks for a GPU."""
    if OnCPU.may_begin and ASKED_FOR.search(str(error)):
        raise AsksForGPU from error


def _kind_of(x: Any) -> str:
    """Give the kind of device that something names; "" where it names none."""
    named = DEVICE.fullmatch(x) if isinstance(x, str) else None
    return x.type if isinstance(x, torch.device) else named[1] if named else ""


class LeftOnCPU(TorchFunctionMode):
    """Follows what is made on the CPU through some calls, as if everything else were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Forget the calls of another target."""
        self.met: dict[Frames, Frames] = {}  # the line that would raise: the one that made a tensor on the CPU
        self._made: dict[int, tuple[Tensor, Frames]] = {}  # what stays on the CPU, and where it was made

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Give a function that follows in each call what is made on the CPU."""

        @functools.wraps(function, updated=())
        def called(*args: Any, **kwargs: Any) -> Any:
            with self:
                returned = function(*args, **kwargs)
            self._made.clear()
            return returned

        return called

    def listed(self) -> Iterator[Exercise]:
        """List what would raise where the inputs are on a GPU."""
        for ((path, line, _),), ((_, made, function),) in self.met.items():
            kept, here = f"what line {made} sets is not a buffer, so it", f"the tensor made on line {made}"
            why = f"{kept if function == '__init__' else here} stays on the CPU"
            if not any("set_default_" in text for text in linecache.getlines(path)):  # which chooses for all
                yield Exercise("on a GPU", False, f"line {line} would raise: {why}")

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        returned, leaves = func(*args, **kwargs), tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        made = [self._origin(x) for x in given]
        if name in TO_GPU or any(map(_kind_of, leaves)) or (name in MOVE and not all(made)):
            self._keep(returned, ())  # which may be what was handed in
        elif all(made):
            self._keep(returned, made[0] if made else _line_here())
        elif name not in TAKE_BOTH and (name != "__getitem__" or made[0]):
            self._meet(given, made)
        return returned

    def _origin(self, x: Tensor) -> Frames:
        """Give the line that made on the CPU what is handed to an operation; () where none did."""
        if id(x) not in self._made and not isinstance(x, nn.Parameter):
            self._made[id(x)] = x, _kept_by(local_here("self"), x)
        return self._made[id(x)][1] if id(x) in self._made else ()

    def _keep(self, returned: Any, where: Frames) -> None:
        for x in tree_leaves(returned):
            if isinstance(x, Tensor):
                self._made[id(x)] = x, where

    def _meet(self, given: Sequence[Tensor], made: Sequence[Frames]) -> None:
        left = next((where for x, where in zip(given, made, strict=True) if where and x.dim()), ())
        here = _line_here()
        if left and here:
            self.met.setdefault(here, left)


def _line_here() -> Frames:
    """Give the line of the user's code that calls an operation; () where the checker itself does."""
    frame = sys._getframe(1)
    while (path := frame.f_code.co_filename).startswith((TORCH, __file__)) and frame.f_back is not None:
        frame = frame.f_back
    return ((path, frame.f_lineno, frame.f_code.co_name),) if is_users(path) else ()


def _kept_by(owner: object, x: Tensor) -> Frames:
    """Give the line that makes a tensor a plain attribute of a module, which may have been registered since."""
    held = {**vars(owner), **owner._buffers} if isinstance(owner, nn.Module) else {}
    lines = (_made_once(kind, name) for name, kept in held.items() if kept is x for kind in type(owner).__mro__)
    return next(filter(None, lines), ())


@functools.lru_cache(maxsize=256)
def _made_once(kind: type, name: str) -> Frames:
    """Give the line of a constructor that alone sets an attribute and chooses no device; () if there is none."""
    every = [(method.name, line, ast.unparse(value)) for method, line, value in setting(kind, name)]
    alone = [line for method, line, value in every if method == "__init__" and not CHOOSES.search(value)]
    return ((file_of(kind), alone[0], "__init__"),) if len(every) == len(alone) == 1 else ()


LEFT = LeftOnCPU()  # in the calls that were compared
