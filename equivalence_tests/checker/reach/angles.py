"""Angles of rotary positions that a forward takes as an argument: complex numbers, cosines and sines, or themselves."""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BASE = 10000.0
ANGLES = re.compile(r"freq|theta", re.IGNORECASE)
AXES = ("l c", "1 l c", "1 1 l c", "1 l 1 c", "l 1 c")
# Where the angle of each pair stands: for both of its elements, as they are paired, or once.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda angles: torch.cat((angles, angles), -1),
    "pairs": lambda angles: angles.repeat_interleave(2, -1),
    "once": lambda angles: angles,
}


@dataclass(frozen=True)
class AngleForm:
    """One form in which angles are handed over; an argument called cos, sin or cos_sin gets just these."""

    # "complex" (cos + i sin), "stacked" (a last axis of cosine and sine), "angles", "both" (a tuple of cosines and
    # sines), "encoding" (sines and cosines as wide as the tokens), or "part" (a module that rotates)
    kind: str
    places: str = "once"  # one of ``PLACES``
    axes: str = "l c"  # "l c" for (len, columns), with a 1 for each axis of that size around the length

    @classmethod
    def all(cls) -> Iterator["AngleForm"]:
        """List the forms to try."""
        yield cls("complex")
        yield from (cls("stacked", places) for places in PLACES)
        for form in itertools.product(("both", "angles"), PLACES, AXES):
            yield cls(*form)
        yield cls("encoding", axes="b l c")
        yield cls("part")

    def build(self, name: str, x: Tensor, base: float, first: int = 0) -> Any:
        """Make the argument of this name for tokens of one head, (len, head_dim); "encoding": (b, len, embed_dim)."""
        steps = base ** -(torch.arange(0, x.size(-1), 2, dtype=x.dtype) / x.size(-1))
        angles = torch.outer(torch.arange(first, first + x.size(-2), dtype=x.dtype), steps)
        if self.kind == "encoding":
            return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., : x.size(-1)].expand_as(x)
        if self.kind == "complex":
            return torch.polar(torch.ones_like(angles), angles)
        axes = self.axes.removesuffix(" c").split()
        angles = PLACES[self.places](angles).unflatten(0, [-1 if axis == "l" else 1 for axis in axes])
        both = {"cos": angles.cos(), "sin": angles.sin()}
        if self.kind == "stacked":
            return torch.stack([*both.values()], -1)
        asked = [x for word, x in both.items() if word in name.lower()] or [*both.values()] * (self.kind == "both")
        return tuple(asked) if len(asked) == 2 else (*asked, angles)[0]


def base_of(module: Any) -> float:
    """Find the base of the angles: an attribute, or what kept frequencies tell; 10000 where nothing does.

    >>> module = nn.Module()
    >>> module.register_buffer("inv_freq", 500.0 ** -torch.arange(0, 1, 0.25, dtype=torch.float64))
    >>> round(base_of(module))
    500
    """
    for child in module.modules() if isinstance(module, nn.Module) else ():
        kept = {**vars(child), **dict(child.named_buffers(recurse=False))}
        for name, value in kept.items():
            if isinstance(value, int | float) and re.search(r"theta|base", name.lower()) and value > 1:
                return float(value)
            if isinstance(value, Tensor) and ANGLES.search(name) and _falls_from_one(value):
                return float(value[1].double() ** -len(value))  # base ** (-2 i / head_dim) at i = 1
    return BASE


def _falls_from_one(x: Tensor) -> bool:
    return x.dim() == 1 and len(x) > 1 and x.is_floating_point() and bool(x[0] == 1) and bool((x.diff() < 0).all())
