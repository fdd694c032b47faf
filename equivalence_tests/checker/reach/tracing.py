"""Watch a forward pass: which sub-module is called with what, and which layers it constructs."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from equivalence_tests.checker.reporting.lines import Frames, frames_here, inside


@dataclass(frozen=True)
class ModuleCall:
    """One call of a sub-module: copies of what went in and of what came out, and the user's lines that led to it."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    frames: Frames


def tensors_of(value: Any) -> Iterator[Tensor]:
    """List the tensors in nested containers and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, dict):
        held = list(value.values())
    elif isinstance(value, tuple | list):
        held = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        held = [getattr(value, one.name) for one in fields(value)]
    else:  # a container that its library has registered with torch, or something that holds none
        held = [leaf for leaf in tree_leaves(value) if leaf is not value]
    for item in held:
        yield from tensors_of(item)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """List the floating tensors in nested containers and dataclasses, in order."""
    return (x for x in tensors_of(value) if x.is_floating_point())


def trace(module: nn.Module, call: Callable[[], Any]) -> list[ModuleCall]:
    """Run a call of a module and note every sub-module that takes part.

    Args:
        module: The module that ``call`` calls.
        call: Runs its forward pass; it is known to run.

    Returns:
        The calls, in the order in which they ended.
    """
    seen: list[ModuleCall] = []
    outside = frames_here()
    with contextlib.ExitStack() as stack:
        for path, child in module.named_modules():
            if path and getattr(type(child), "forward", None) is not nn.Module.forward:
                stack.enter_context(_noting(child, path, seen, outside))
        call()
    return seen


@contextlib.contextmanager
def _noting(child: nn.Module, path: str, seen: list[ModuleCall], outside: Frames) -> Iterator[None]:
    """Note the calls of a sub-module, also where its forward is called by name, which passes hooks by."""
    own, forward = "forward" in vars(child), child.forward

    @functools.wraps(forward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        frames = inside(frames_here(), outside)
        copies: dict[int, Tensor] = {}  # what is one tensor stays one
        given, named = tree_map_only(Tensor, lambda x: copies.setdefault(id(x), x.clone()), (args, kwargs))
        output = forward(*args, **kwargs)
        seen.append(ModuleCall(path, given, named, tree_map_only(Tensor, torch.clone, output), frames))
        return output

    vars(child)["forward"] = noted
    try:
        yield
    finally:
        del vars(child)["forward"]
        if own:
            vars(child)["forward"] = forward


def layers_made(call: Callable[[], Any]) -> dict[str, Frames]:
    """Name the kinds of layers with weights that a call constructs, each with the lines where it first does.

    >>> list(layers_made(lambda: nn.Linear(2, 3)(torch.ones(2))))
    ['Linear']
    """
    made: list[tuple[nn.Module, Frames]] = []
    original, outside = nn.Module.__init__, frames_here()

    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        made.append((self, inside(frames_here(), outside)))
        original(self, *args, **kwargs)

    nn.Module.__init__ = noting  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            call()
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]
    found: dict[str, Frames] = {}
    for one, frames in made:
        if any(True for _ in one.parameters(recurse=False)):
            found.setdefault(type(one).__name__, frames)
    return found
