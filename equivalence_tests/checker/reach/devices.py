"""Run on the CPU what names a GPU: what is checked here is checked on the CPU."""

import re
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from equivalence_tests.checker.reach.errors import ASKED_FOR

T = TypeVar("T")
GPU = re.compile(r"^(cuda|mps|xpu)(:\d+)?$")
MOVING = (Tensor.cuda, Tensor.xpu)
KINDS = ("FloatTensor", "LongTensor", "BoolTensor", "ByteTensor")
IN_PLACE: dict[str, Any] = {kind: getattr(torch, kind) for kind in KINDS}  # of what torch.cuda has
IN_PLACE["current_device"] = lambda: torch.device("cpu")


class AsksForGPU(BaseException):
    """Ends a check, so that it begins anew on the CPU; no ``except Exception`` stops it."""


class OnCPU(TorchFunctionMode):
    """Lets tensors be made on the CPU, and stay there, whatever device the code names."""

    may_begin = False  # whether a check runs that can begin anew in it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MOVING:
            return args[0]
        given = {name: _on_cpu(x) for name, x in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **given)


def _on_cpu(x: Any) -> Any:
    """Give the CPU in the place of a GPU, and anything else as it is."""
    names_one = isinstance(x, str | torch.device) and GPU.match(str(x))
    return torch.device("cpu") if names_one else x


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
