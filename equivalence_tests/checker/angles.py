"""Angles of rotary positions that a forward takes as an argument: complex numbers, cosines and sines, or themselves."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.inner import angles_of, in_places

__all__ = ["AngleForm", "takes_angles"]

NAMES = re.compile(
    r"^(freqs?|angles?|rope|rotary|cos|sin|pos(ition)?_?emb(edding)?s?)($|_)|freqs_c|(^|_)(cos|sin|rope)$"
)

AXES = ("l c", "1 l c", "1 1 l c", "1 l 1 c", "l 1 c")


def takes_angles(name: str) -> bool:
    """Whether an argument of this name is for the angles of rotary positions.

    >>> [takes_angles(name) for name in ("freqs_cis", "cos", "position_embeddings", "rotary_pos_emb", "context")]
    [True, True, True, True, False]
    """
    return bool(NAMES.search(name.lower()))


@dataclass(frozen=True)
class AngleForm:
    """One form in which angles are handed over.

    Args:
        kind: "complex" (cos + i sin), "angles", or "both" (a tuple of cosines and sines). An argument called cos,
            sin or cos_sin gets just these.
        places: "once" for a column a pair, "halves" or "pairs" for a column an element.
        axes: "l c" for (len, columns), with a 1 for each axis of that size around the length.
    """

    kind: str
    places: str = "once"
    axes: str = "l c"

    @classmethod
    def all(cls) -> Iterator["AngleForm"]:
        """List the forms to try."""
        yield cls("complex")
        for form in itertools.product(("both", "angles"), ("halves", "pairs", "once"), AXES):
            yield cls(*form)

    def build(self, name: str, x: Tensor, base: float) -> Any:
        """Make the argument of this name for tokens of one head, (..., len, head_dim)."""
        angles = angles_of(x, base)
        if self.kind == "complex":
            return torch.polar(torch.ones_like(angles), angles)
        laid_out = angles if self.places == "once" else in_places(angles, self.places)
        before, after = self.axes.removesuffix(" c").split("l")
        laid_out = laid_out.unflatten(0, (*(1,) * before.count("1"), -1, *(1,) * after.count("1")))
        if asked := set(re.findall("cos|sin", name.lower())):
            given = [laid_out.cos()] * ("cos" in asked) + [laid_out.sin()] * ("sin" in asked)
            return tuple(given) if len(given) == 2 else given[0]
        return (laid_out.cos(), laid_out.sin()) if self.kind == "both" else laid_out
