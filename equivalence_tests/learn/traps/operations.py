"""See which operations torch calls: they, and never a clock, say what is slow."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.profiler import profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["inner_operations", "largest_result", "operations"]


def operations(code: Callable[[], Any]) -> list[str]:
    """List the operations that run when code is called, in order, without those that only look at a tensor anew.

    Args:
        code: A function without arguments.

    Returns:
        Their names in aten, torch's library of operations.

    >>> import torch
    >>> x = torch.ones(2, 3)
    >>> operations(lambda: torch.softmax(x @ x.T, dim=-1))
    ['mm', '_softmax']
    """
    listener = _Listener()
    with listener:
        code()
    return listener.names


def largest_result(code: Callable[[], Any]) -> int:
    """Give the bytes of the largest tensor that an operation makes when code is called.

    Args:
        code: A function without arguments.

    >>> import torch
    >>> x = torch.ones(2, 3)
    >>> largest_result(lambda: (x @ x.T).sum())
    16
    """
    listener = _Listener()
    with listener:
        code()
    return max(listener.sizes)


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
            self.sizes += [x.nbytes for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        return result


def inner_operations(code: Callable[[], Any]) -> set[str]:
    """Name the operations that run when code is called, those inside a fused operation too.

    Args:
        code: A function without arguments.

    Returns:
        Their names in aten.

    >>> import torch
    >>> x = torch.ones(2, 3)
    >>> "mm" in inner_operations(lambda: x @ x.T)
    True
    """
    with warnings.catch_warnings(), _quiet_native_stderr():
        warnings.simplefilter("ignore")  # some versions of the profiler warn of themselves
        with profile() as watched:
            code()
    return {event.key.removeprefix("aten::") for event in watched.key_averages()}


@contextlib.contextmanager
def _quiet_native_stderr() -> Iterator[None]:
    """Keep the profiler's own log, which C++ writes past Python, off the screen."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
