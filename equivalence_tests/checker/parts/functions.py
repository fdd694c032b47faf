"""Make a module of a function of a part: layer_norm(x, gain, bias), feed_forward(x, w1, b1, w2, b2)."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FunctionModule", "function_modules"]

EPS = 1e-5
BIAS = re.compile(r"^b(_?\w{0,3})?$|bias|beta|shift")


class FunctionModule(nn.Module):
    """Calls a function with x and with arguments of its own, those that are tensors as its parameters.

    Args:
        function: The function.
        given: Its arguments after x, by name.
    """

    def __init__(self, function: Callable[..., Any], given: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.names = function, tuple(given)
        for name, value in given.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, Tensor) else value)

    def forward(self, x: Tensor) -> Any:
        """Call it."""
        return self.function(x, *(getattr(self, name) for name in self.names))


def function_modules(function: Callable[..., Any], kind: str, width: int, ff_dim: int) -> Iterator[FunctionModule]:
    """Give the required arguments after x what their names ask for.

    Args:
        function: What is to be called.
        kind: "layer_norm" or "feed_forward".
        width: Width of x.
        ff_dim: Width inside a feed-forward.

    Yields:
        Modules: for a feed-forward with matrices of (in, out), then of (out, in).
    """
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty][1:]
    if kind == "layer_norm":
        for values in itertools.islice(itertools.product(*(_norm_values(name, width) for name in required)), 8):
            yield FunctionModule(function, dict(zip(required, values, strict=True)))
        return
    for transposed in (False, True):
        yield FunctionModule(function, _matrices(required, width, ff_dim, transposed))


def _norm_values(name: str, width: int) -> list[Any]:
    if "eps" in name:
        return [EPS]
    return [(width,), width] if re.search("shape|dim|size", name) else [torch.ones(width)]


def _matrices(names: list[str], width: int, ff_dim: int, transposed: bool) -> dict[str, Tensor]:
    """All matrices lead inside but the last, which leads back; a bias is as wide as what the matrix before it gives."""
    matrices = [name for name in names if not BIAS.search(name.lower())]
    given: dict[str, Tensor] = {}
    out = ff_dim
    for name in names:
        if name in matrices:
            out = width if name == matrices[-1] else ff_dim
            inner = ff_dim if name == matrices[-1] else width
            given[name] = torch.ones(out, inner) if transposed else torch.ones(inner, out)
        else:
            given[name] = torch.ones(out)
    return given
