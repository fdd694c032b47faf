"""List the tensors in what a call takes or gives, and the layers that it constructs."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure

from equivalence_tests.checker.reporting.lines import Frames, frames_here, inside

# What holds nothing else.
BARE = int, float, str, type(None), torch.dtype, torch.device, slice, type(...)
SINGLE = (Tensor, *BARE)


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
        if not isinstance(item, BARE):  # some code returns its numbers as lists, too
            yield from tensors_of(item)


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """List what a call takes, and say how it is nested, as torch does; where nothing is, without looking closer."""
    flat = [*args, *kwargs.values()]
    if all(isinstance(x, SINGLE) for x in flat):
        return flat, _not_nested(len(args), tuple(kwargs))
    return tree_flatten((tuple(args), kwargs))


@functools.cache
def _not_nested(count: int, names: tuple[str, ...]) -> TreeSpec:
    return tree_structure(((0,) * count, dict.fromkeys(names, 0)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """List the floating tensors in nested containers and dataclasses, in order."""
    return (x for x in tensors_of(value) if x.is_floating_point())


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

    with torch.no_grad(), mock.patch.object(nn.Module, "__init__", noting):
        call()
    found: dict[str, Frames] = {}
    for one, frames in made:
        if any(True for _ in one.parameters(recurse=False)):
            found.setdefault(type(one).__name__, frames)
    return found
