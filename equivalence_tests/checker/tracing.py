"""Watch a forward pass: which sub-module is called with what.

What is seen here only guides the search. No verdict rests on it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "ModuleCall",
    "Trace",
    "modules_created",
    "tensors_in",
    "trace",
]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a sub-module."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass
class Trace:
    """What was seen in one forward pass, in order."""

    calls: list[ModuleCall] = field(default_factory=list)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """List the floating tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def trace(module: nn.Module, call: Callable[[], Any]) -> Trace:
    """Run a call of a module and note every sub-module that takes part.

    Args:
        module: The module that ``call`` calls.
        call: Runs its forward pass.

    Returns:
        What was seen; empty where the call raised at once.
    """
    seen = Trace()
    with contextlib.ExitStack() as stack:
        for path, child in module.named_modules():
            if path and type(child).forward is not nn.Module.forward:
                stack.enter_context(_noting(child, path, seen))
        with contextlib.suppress(Exception), torch.no_grad():
            call()
    return seen


@contextlib.contextmanager
def _noting(child: nn.Module, path: str, seen: Trace) -> Iterator[None]:
    """Note the calls of a sub-module, also where its forward is called by name, which passes hooks by."""
    own, forward = "forward" in vars(child), child.forward

    @functools.wraps(forward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        seen.calls.append(ModuleCall(path, args, kwargs, output))
        return output

    vars(child)["forward"] = noted
    try:
        yield
    finally:
        del vars(child)["forward"]
        if own:
            vars(child)["forward"] = forward


@contextlib.contextmanager
def modules_created() -> Iterator[list[str]]:
    """List the classes of all layers that are constructed inside the block.

    >>> with modules_created() as created:
    ...     _ = nn.Linear(2, 3)
    >>> created
    ['Linear']
    """
    created: list[str] = []
    original = nn.Module.__init__

    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        created.append(type(self).__name__)
        original(self, *args, **kwargs)

    nn.Module.__init__ = noting  # type: ignore[method-assign]
    try:
        yield created
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]
