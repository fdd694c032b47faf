"""Python as text: what stands for a tensor in a formula, or in a run, and writes down what is made of it."""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor
from torch.nn import functional as F

from equivalence_tests.checker.engine.vocabulary import GETTERS
from equivalence_tests.checker.equivalent.unread import UnreadError

# The operators, the loosest first, each by the names that the engine and numpy have for it.
OPERATORS: tuple[Mapping[str, str], ...] = (
    {"<": "lt less", "<=": "le", ">": "gt greater", ">=": "ge", "==": "eq equal", "!=": "ne"},
    {"|": "or bitwise_or"},
    {"&": "and bitwise_and"},
    {"+": "add", "-": "sub subtract"},
    {"*": "mul multiply", "/": "div divide", "//": "floordiv floor_divide", "%": "mod remainder", "@": "matmul"},
    {"**": "pow power"},
)
LEVELS = {symbol: level for level, row in enumerate(OPERATORS) for symbol in row}
SYMBOLS = {name: symbol for row in OPERATORS for symbol, names in row.items() for name in names.split()}
REVERSED = {"rsub": "-", "rdiv": "/"}
SIGNS = {"invert": "~", "neg": "-", "negative": "-"}


@dataclass(frozen=True, eq=False)
class Code(NDArrayOperatorsMixin):
    """Stands for a tensor, and writes down what is made of it."""

    expression: str  # what it is, as Python

    def made(self, expression: str) -> Self:
        """Give what is made of it."""
        return type(self)(expression)

    def __str__(self) -> str:
        return self.expression

    def __array_ufunc__(self, ufunc: Any, _: str, *inputs: Any) -> Self:
        return self.made(call_text(ufunc, ufunc.__name__, inputs, {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in GETTERS:
            return self.made(f"{bracketed(self)}.{name}")
        return lambda *args, **kwargs: self.made(f"{bracketed(self)}.{name}({arguments_text(args, kwargs)})")

    def __getitem__(self, index: Any) -> Self:
        return self.made(call_text(Tensor.__getitem__, "getitem", (self, index), {}))


def call_text(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Write a call of one of torch's functions, which the engine or numpy calls so: as an operator, a method and so on.

    >>> x = Code("x")
    >>> str(-(x + 1) ** 2), str((x @ x.mT)[..., :3].relu())
    ('-(x + 1) ** 2', '(x @ x.mT)[..., :3].relu()')
    """
    if len(args) == 2 and not kwargs and name in SYMBOLS:
        return _infix(SYMBOLS[name], *args)
    if len(args) == 2 and name in REVERSED:
        return _infix(REVERSED[name], *reversed(args))
    if len(args) == 1 and name in SIGNS:
        return f"{SIGNS[name]}{text(args[0]) if _level(text(args[0])) > LEVELS['*'] else f'({args[0]})'}"
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return f"{bracketed(args[0])}[{', '.join(map(text, index))}]"
    if name == "setitem":
        raise UnreadError("it writes into a tensor")
    if name in GETTERS:
        return f"{bracketed(args[0])}.{name}"
    owner, named = _named(function)
    if owner:
        return f"{owner}.{named}({arguments_text(args, kwargs)})"
    return f"{bracketed(args[0])}.{named}({arguments_text(args[1:], kwargs)})"


def arguments_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Write what a call is given."""
    return ", ".join([*map(text, args), *(f"{name}={text(x)}" for name, x in kwargs.items())])


def text(x: Any) -> str:
    """Write an argument, nested as it may be.

    >>> print(text((slice(None, Code("n")), ..., [True, float("inf")], {"width": 3})))
    (:n, ..., [True, float("inf")], {'width': 3})
    """
    if isinstance(x, slice):
        ends = ["" if end is None else text(end) for end in (x.start, x.stop, x.step)]
        return ":".join(ends if x.step is not None else ends[:2])
    if isinstance(x, tuple):
        return f"({', '.join(map(text, x))}{',' * (len(x) == 1)})"
    if isinstance(x, list):
        return f"[{', '.join(map(text, x))}]"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{text(key)}: {text(value)}' for key, value in x.items())}}}"
    if isinstance(x, float):
        return repr(float(x)) if abs(x) != float("inf") else f'float("{x}")'  # numpy has floats of its own
    if x is ...:
        return "..."
    if isinstance(x, bool | int | str) or x is None:
        return repr(x)
    if isinstance(x, Code | torch.dtype | torch.memory_format | torch.layout):
        return str(x)
    raise UnreadError(f"an argument of the kind {type(x).__name__} cannot be written down")


def without_defaults(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a function does anyhow."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of one that is written in C
        return dict(kwargs)
    return {key: value for key, value in kwargs.items() if parameters[key].default != value}


def bracketed(x: Any) -> str:
    """Write something so that an attribute of it may follow."""
    said = text(x)
    return f"({said})" if _level(said) < len(OPERATORS) or said.startswith("~") else said


@functools.lru_cache(maxsize=4096)
def outside_of_brackets(expression: str) -> str:
    """Leave out of an expression all that stands in brackets.

    >>> outside_of_brackets("~(a != b)[:, None] + 1")
    '~ + 1'
    """
    depth = itertools.accumulate({"(": 1, "[": 1}.get(x, -(x in ")]")) for x in expression)
    return "".join(x for x, inside in zip(expression, depth, strict=True) if not inside and x not in ")]")


def _level(expression: str) -> int:
    """Say how closely the loosest operator of an expression binds."""
    bare = outside_of_brackets(expression)
    if " if " in bare:
        return -1
    signs = ["-"] if bare.startswith("-") else []
    return min((LEVELS[x] for x in (*signs, *bare.split()) if x in LEVELS), default=len(OPERATORS))


def _infix(symbol: str, left: Any, right: Any) -> str:
    level, said, other = LEVELS[symbol], text(left), text(right)
    same = said if _level(said) >= level + (symbol == "**") else f"({said})"
    return f"{same} {symbol} {other if _level(other) > level else f'({other})'}"


def _named(function: Callable[..., Any]) -> tuple[str, str]:
    """Give the module that a function is in, and its name there; "" for a method of tensors, out of place."""
    name = getattr(function, "__name__", "")
    if getattr(Tensor, name, None) is function:
        plain = name.strip("_")
        return "", plain if name.endswith("_") and hasattr(Tensor, plain) else name
    for owner, home in (("F", F), ("torch", torch)):
        if getattr(home, name, None) is function:
            return owner, name
    raise UnreadError(f"{name or function} is not a function of torch")
