"""A recorded operation as Python: torch's function, with sizes in the place of the numbers that they gave."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_unflatten

from equivalence_tests.checker.engine.vocabulary import GETTERS
from equivalence_tests.checker.engine.watching import HOLE, Operation
from equivalence_tests.checker.equivalent.unread import UnreadError

INFIX: Mapping[str, str] = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@", "pow": "**", "floordiv": "//", "mod": "%",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip
REVERSED: Mapping[str, str] = {"rsub": "-", "rdiv": "/"}
SIGNS: Mapping[str, str] = {"invert": "~", "neg": "-"}


class Text(str):
    """A piece of Python."""

    __slots__ = ()


class Sized:
    """Writes numbers as sizes of tensors, where they differ between two recordings as a size does.

    Args:
        known: For each tensor of a scope its name and its shapes in the two recordings.
        anchor: The name of a tensor, for devices.
        typed: The name of a tensor of real numbers, for dtypes; "" for none.
    """

    def __init__(self, known: Sequence[tuple[str, torch.Size, torch.Size]], anchor: str, typed: str) -> None:
        self.known, self.anchor, self.typed = [*known], anchor, typed

    def written(self, one: Any, other: Any) -> Text:
        """Write a constant of the first recording, which was another one in the second.

        Raises:
            UnreadError: If nothing says how it follows from sizes.
        """
        if isinstance(one, slice):
            ends = [self.written(*pair) for pair in ((one.start, other.start), (one.stop, other.stop))]
            step = [self.written(one.step, other.step)] if one.step is not None else []
            return Text(f"slice({', '.join([*ends, *step])})")
        if isinstance(one, torch.Size):
            return Text(f"({', '.join(self.written(a, b) for a, b in zip(one, other, strict=True))},)")
        if isinstance(one, torch.device):
            return Text(f"{self.anchor}.device")
        if isinstance(one, torch.dtype) and one == torch.get_default_dtype():  # others are asked for by name
            return Text(f"{self.typed}.dtype" if self.typed else "torch.get_default_dtype()")
        if one is ...:
            return Text("...")
        if one == other and type(one) is type(other):
            return _constant(one)
        if type(one) is int and type(other) is int:
            return self._size(one, other)
        raise UnreadError(f"{one!r} is another number at other sizes")

    def _size(self, one: int, other: int) -> Text:
        sizes = [(f"{n}.size({i})", a[i], b[i]) for n, a, b in self.known for i in range(len(a)) if a[i] != b[i]]
        exact = (text for text, a, b in sizes if (a, b) == (one, other))
        negated = (f"-{text}" for text, a, b in sizes if (a, b) == (-one, -other))
        more = ((f"{text} {one - a:+d}", abs(one - a)) for text, a, b in sizes if one - a == other - b)
        near = (text for text, _ in sorted(more, key=lambda found: found[1]))
        times = (f"{text} * {one // a}" for text, a, b in sizes if a and one % a == 0 and (one // a) * b == other)
        both = (f"{s} * {t}" for s, a, b in sizes for t, c, d in sizes if (a * c, b * d) == (one, other))
        found = next(itertools.chain(exact, negated, times, both, near), "")
        if not found:
            raise UnreadError(f"the number {one}, which is {other} at other sizes, is no size of what it takes")
        return Text(re.sub(r" ([+-])(\d+)$", r" \1 \2", found))


def _constant(x: Any) -> Text:
    if isinstance(x, bool | int | str) or x is None:
        return Text(repr(x))
    if isinstance(x, float):
        return Text(repr(float(x)) if abs(x) != float("inf") else f'float("{x}")')  # numpy has floats of its own
    if isinstance(x, torch.dtype | torch.memory_format | torch.layout):
        return Text(str(x))
    raise UnreadError(f"an argument of the kind {type(x).__name__} cannot be written down")


def nested(x: Any) -> str:
    """Write arguments that are nested, of which each leaf is written already."""
    if isinstance(x, Text):
        return x
    if isinstance(x, list):
        return f"[{', '.join(map(nested, x))}]"
    if isinstance(x, tuple):
        return f"({', '.join(map(nested, x))}{',' * (len(x) == 1)})"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{key!r}: {nested(value)}' for key, value in x.items())}}}"
    raise UnreadError(f"an argument of the kind {type(x).__name__} cannot be written down")


def operation_text(one: Operation, other: Operation, names: Sequence[str], sized: Sized) -> str:
    """Write an operation as an expression.

    Args:
        one: As it was recorded.
        other: The same at other sizes.
        names: Of the tensors that it takes.
        sized: Writes its numbers.

    Raises:
        UnreadError: If it cannot be written down.
    """
    given = iter(names)
    leaves = [
        Text(next(given)) if a is HOLE else sized.written(a, b)
        for a, b in zip(one.skeleton, other.skeleton, strict=True)
    ]
    args, kwargs = tree_unflatten(leaves, one.spec)
    args = [*args]
    if one.name in INFIX and len(args) == 2 and not kwargs:
        return f"{_operand(args[0])} {INFIX[one.name]} {_operand(args[1])}"
    if one.name in REVERSED and len(args) == 2:
        return f"{_operand(args[1])} {REVERSED[one.name]} {_operand(args[0])}"
    if one.name in SIGNS and len(args) == 1:
        return f"{SIGNS[one.name]}{nested(args[0])}"
    if one.name == "getitem":
        return f"{nested(args[0])}[{_index(args[1])}]"
    if one.name == "setitem":
        raise UnreadError("it writes into a tensor")
    said = ", ".join([*map(nested, args), *(f"{key}={nested(value)}" for key, value in kwargs.items())])
    if one.name in GETTERS:
        return f"{nested(args[0])}.{one.name}"
    owner, name = _named(one.function)
    if owner:
        return f"{owner}.{name}({said})"
    more = ", ".join([*map(nested, args[1:]), *(f"{key}={nested(value)}" for key, value in kwargs.items())])
    return f"{nested(args[0])}.{name}({more})"


def _operand(x: Any) -> str:
    text = nested(x)
    return f"({text})" if " " in text or text.startswith("-") else text


def _index(x: Any) -> str:
    pieces = x if isinstance(x, tuple) else [x]
    return ", ".join(_slice(nested(piece)) for piece in pieces)


def _slice(text: str) -> str:
    if not text.startswith("slice("):
        return text
    ends = ["" if end == "None" else end for end in text[len("slice(") : -1].split(", ")]
    return ":".join(ends)


def _named(function: Callable[..., Any]) -> tuple[str, str]:
    """Give the module that a function is in, and its name there; "" for a method of tensors, out of place."""
    name = getattr(function, "__name__", "")
    if getattr(Tensor, name, None) is function:
        plain = name.strip("_")
        return "", plain if name.endswith("_") and hasattr(Tensor, plain) else name
    for owner, home in (("F", F), ("torch", torch)):
        if getattr(home, name, None) is function:
            return owner, name
    raise UnreadError(f"{name or function} is no function of torch")
