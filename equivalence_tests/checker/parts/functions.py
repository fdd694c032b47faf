"""Make a module of a function of a part: layer_norm(x, gain, bias), feed_forward(x, w1, b1, w2, b2)."""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.reach.proposing import parameters_of

EPS = 1e-5
MOST = 64
BIAS = re.compile(r"^b(_?\w{0,3})?$|bias|beta|shift")


class FunctionModule(nn.Module):
    """Calls a function with x and with what is given for its other arguments: tensors are parameters."""

    def __init__(self, function: Callable[..., Any], given: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.names = function, tuple(given)
        for name, value in given.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, Tensor) else value)

    def forward(self, x: Tensor, **others: Any) -> Any:
        """Call it."""
        return self.function(x, *(getattr(self, name) for name in self.names), **others)


def function_modules(function: Callable[..., Any], kind: str, width: int, ff_dim: int) -> Iterator[FunctionModule]:
    """Give the required arguments after x what their names ask for, in each choice of shapes, callable or not."""
    required = [p.name for p in parameters_of(function) if p.default is p.empty][1:]
    choices = (_values(name.lower(), width, ff_dim if kind == "feed_forward" else 0) for name in required)
    for values in itertools.islice(itertools.product(*choices), MOST):
        yield FunctionModule(function, dict(zip(required, values, strict=True)))


def _values(name: str, width: int, ff_dim: int) -> list[Any]:
    """Give what a name asks for: a matrix may be (in, out) or (out, in), a bias as wide as what either gives."""
    if "eps" in name:
        return [EPS]
    sizes = (ff_dim, width) if ff_dim else (width,)
    if not ff_dim or BIAS.search(name):
        return [torch.ones(size) for size in sizes]
    return [torch.ones(sizes[::-1]), torch.ones(sizes)]
