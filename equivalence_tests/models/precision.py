"""Let models compute in float64 throughout, also where they ask for float32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from equivalence_tests.checker.reach.state import default_dtype

__all__ = ["in_float64"]

BY_DTYPE = (torch.Tensor.to, torch.Tensor.type)


class _NoFloat32(TorchFunctionMode):
    """Turns every request for float32 into one for float64: a softmax in float32 is not what is judged here."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        if func in BY_DTYPE:
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return func(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64, and compile nothing.

    >>> with in_float64():
    ...     torch.ones(2).softmax(-1, dtype=torch.float32).dtype, torch.ones(2).float().dtype
    (torch.float64, torch.float64)
    """
    with default_dtype(torch.float64), torch.compiler.set_stance("force_eager"), _NoFloat32():
        yield
