"""Tables of rotary positions: the cosines and sines of all angles, side by side as they come back."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from equivalence_tests.checker.parts.kinds import ALIKE
from equivalence_tests.checker.parts.position_writing import kept, numbers_to, sinusoids
from equivalence_tests.checker.parts.positions import BASES, EXPONENTS, NUMBERINGS, Exponents, Map
from equivalence_tests.checker.parts.readings import PartReading
from equivalence_tests.checker.reach.angles import base_of

Lay = Callable[[Any, Any], Any]  # what is made of cosines and sines, and how many times as wide as a head it is
LAYOUTS: dict[str, tuple[Lay, int]] = {
    "cosines, then sines": (lambda cos, sin: torch.cat((cos, sin), -1), 1),
    "the cosine and the sine of each angle": (lambda cos, sin: torch.stack((cos, sin), -1).flatten(-2), 1),
    "cosines for halves of a head, then sines": (lambda cos, sin: torch.cat((cos, cos, sin, sin), -1), 2),
    "cosines for pairs of neighbours, then sines": (
        lambda cos, sin: torch.cat((cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)), -1),
        2,
    ),
}
NOTE = "torch.nn has no rotary positions: the angles are pos / base^(2i / d)"


class AngleTables:
    """Lets code give cosines and sines as one table, and says in ``met`` whether it gave any."""

    def __init__(self) -> None:
        self.met = False

    @contextmanager
    def of(self, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Give the code, whose tables come back side by side; a module is as it was afterwards."""
        called = function.forward if isinstance(function, nn.Module) else function

        @wraps(called)
        def joined(*args: Any, **kwargs: Any) -> Any:
            returned = called(*args, **kwargs)
            table = side_by_side(returned)
            self.met = self.met or table is not None
            return returned if table is None else table

        if isinstance(function, nn.Module):
            with mock.patch.object(function, "forward", joined):
                yield function
        else:
            yield joined


def side_by_side(returned: Any) -> Tensor | None:
    """Lay cosines and sines side by side: two tensors, the last axis of one, or the parts of complex numbers.

    >>> side_by_side((torch.zeros(3, 2), torch.ones(3, 2))).shape, side_by_side(torch.rand(3, 2))
    (torch.Size([3, 4]), None)
    """
    both = torch.view_as_real(returned) if isinstance(returned, Tensor) and returned.is_complex() else returned
    if isinstance(both, Tensor):
        pair = [*both.unbind(-1)] if both.dim() > 2 and both.size(-1) == 2 else []
    else:
        pair = [x for x in both if isinstance(x, Tensor)] if isinstance(both, tuple | list) else []
    if len(pair) != 2 or pair[0].shape != pair[1].shape or not all(x.is_floating_point() for x in pair):
        return None
    if not bool(((pair[0].square() + pair[1].square() - 1).abs() < ALIKE).all()):
        return None
    table = both.flatten(-2) if isinstance(both, Tensor) else torch.cat(pair, -1)
    return table.flatten(0, -3) if table.dim() > 3 else table


def angle_readings(module: nn.Module | None, width: int) -> Iterator[PartReading]:
    """Read cosines and sines, side by side in a table of this width, in every way; the module may state a base.

    The formulas take the numbers of the positions.
    """
    laws = {name: law for name, law in EXPONENTS.items() if "cosine" not in name}
    bases = dict.fromkeys((BASES[0], base_of(module)))
    options = itertools.product(bases, LAYOUTS.items(), (False, True), laws.items(), NUMBERINGS.items())
    for base, (layout, (lay, times)), turned, (exponent, (law, wrong)), (numbers, (number, shifted)) in options:
        of_sines = layout.replace("cosine", "-").replace("sine", "cosine").replace("-", "sine")
        words = (("order", of_sines if turned else layout, "torch.nn has none"), ("positions", numbers, ""))
        words = (*words, *((("base", f"{base:g}", "10000"),) if base != BASES[0] else ()))
        table = partial(_table, lay, turned, law, base, number)
        written = partial(sinusoids, "", base, table, width // times)
        formula, mistakes = partial(table, width // times), (*wrong, *shifted)
        yield PartReading(formula, words, mistakes, (NOTE,), {"exponent": exponent}, written=written)


def _table(lay: Lay, turned: bool, law: Exponents, base: float, number: Map, width: Any, given: Any) -> Any:
    """Compute the rows of these positions, or write them down; turned, sines come first."""
    positions, pairs = kept("positions", number(given[..., None])), kept("pairs", numbers_to(width // 2))
    angles = kept("angles", positions * base ** -law(pairs, width)[0])
    return lay(*((angles.sin(), angles.cos()) if turned else (angles.cos(), angles.sin())))
