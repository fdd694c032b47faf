"""All parameters laid end to end, and which of their elements make a number: measured by its gradient."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    """One row of a projection: ``factor * (sum of weight * input + bias)``.

    Args:
        weight: Which parameter element multiplies each feature of the input, by its place in ``Parameters.end_to_end``.
        bias: Which one is added; -1 for none.
        factor: What all of them are multiplied by.
    """

    weight: Tensor
    bias: int
    factor: float


class Parameters:
    """The parameters of a module, or the matrices that a function is given, each element with a place.

    Args:
        named: The parameters by their names.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.named = dict(named)
        self.start: dict[str, int] = {}
        end = 0
        for name, parameter in self.named.items():
            self.start[name] = end
            end += parameter.numel()
        self.count = end

    @classmethod
    def of(cls, module: nn.Module | None) -> "Parameters":
        """Take those of a module; none of a plain function."""
        return cls({} if module is None else dict(module.named_parameters()))

    def end_to_end(self) -> Tensor:
        """Lay the parameters end to end, with their gradients."""
        pieces = [parameter.reshape(-1).double() for parameter in self.named.values()]
        return torch.cat(pieces) if pieces else torch.zeros(1, dtype=torch.float64)

    def taken(self, places: Tensor) -> Tensor:
        """Give the elements at some places; 0 where the place is -1."""
        return torch.where(places >= 0, self.end_to_end()[places.clamp_min(0)], 0.0)

    def name_at(self, place: int) -> str:
        """Name the parameter that an element belongs to."""
        return next(name for name, start in self.start.items() if start <= place < start + self.named[name].numel())

    def names_at(self, places: Tensor) -> list[str]:
        """Name the parameters that elements belong to, in the order of the state_dict."""
        found = [
            (name, (places >= start) & (places < start + self.named[name].numel()))
            for name, start in self.start.items()
        ]
        return [name for name, inside in found if bool(inside.any())]

    def gradient(self, element: Tensor, without: Collection[str] = ()) -> tuple[Tensor, Tensor]:
        """Differentiate one number by all parameters.

        Args:
            element: The number, of a run with gradients.
            without: Names of parameters to leave out.

        Returns:
            The places whose gradient is not 0, and these gradients.
        """
        asked = [name for name, x in self.named.items() if x.requires_grad and name not in without]
        if not asked or not element.requires_grad:
            return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.float64)
        wanted = [self.named[name] for name in asked]
        found = torch.autograd.grad(element, wanted, retain_graph=True, allow_unused=True)
        places, numbers = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.float64)]
        for name, gradient in zip(asked, found, strict=True):
            if gradient is not None:
                there = gradient.reshape(-1).nonzero()[:, 0]
                places.append(there + self.start[name])
                numbers.append(gradient.reshape(-1)[there].double())
        return torch.cat(places), torch.cat(numbers)

    def row(self, element: Tensor, features: Tensor, tolerance: float, without: Collection[str] = ()) -> Row | None:
        """Read one element of a projection's output.

        d element / d weight is the input of the projection, and d element / d bias is 1, each times the factor: that
        says which parameter element multiplies which feature.

        Args:
            element: The number, of a run with gradients.
            features: The input of the projection at its token, (e,).
            tolerance: What differs by less, relative to the largest feature, is rounding.
            without: Names of parameters that belong to something else.

        Returns:
            The row; None if no such row makes the number.
        """
        places, numbers = self.gradient(element, without)
        for found in _rows(places, numbers, features, tolerance):
            row = replace(found, factor=snapped(found.factor, 1.0, tolerance))
            if self._gives(row, features, element, tolerance):
                return row
        return None

    def _gives(self, row: Row, features: Tensor, element: Tensor, tolerance: float) -> bool:
        with torch.no_grad():
            taken = self.taken(torch.cat([row.weight, torch.tensor([row.bias])]))
            terms = row.factor * taken * torch.cat([features, features.new_ones(1)])
            difference, size = float(terms.sum() - element), float(terms.abs().sum())
        return abs(difference) <= 10 * tolerance * max(size, 1e-30)


def snapped(measured: float, exact: float, tolerance: float) -> float:
    """Take an exact number in the place of one that was measured, where they differ by rounding alone."""
    return exact if abs(measured - exact) <= 1e-2 * tolerance * abs(exact) else measured


def _rows(places: Tensor, numbers: Tensor, features: Tensor, tolerance: float) -> list[Row]:
    """Pair gradients with features by value: numbers = factor * features in some order, and factor for a bias."""
    count = len(features)
    if len(numbers) not in (count, count + 1) or not bool(features.any()):
        return []
    biased = len(numbers) > count
    size = float((numbers.square().sum() / (features.square().sum() + biased)).sqrt())
    left = dict.fromkeys(int((numbers - s).abs().argmin()) for s in (size, -size)) if biased else [-1]
    found = []
    for bias in left:
        kept = torch.arange(len(numbers)) != bias
        row = _row(places[kept], numbers[kept], features, tolerance)
        if row is not None and (bias < 0 or abs(float(numbers[bias]) / row.factor - 1) < 10 * tolerance):
            found.append(Row(row.weight, -1 if bias < 0 else int(places[bias]), row.factor))
    return found


def _row(places: Tensor, numbers: Tensor, features: Tensor, tolerance: float) -> Row | None:
    sign = 1.0 if float(numbers.sum() * features.sum()) >= 0 else -1.0
    factor = sign * float(numbers.norm() / features.norm())
    have, want = (numbers / factor).sort(), features.sort()
    if not torch.allclose(have.values, want.values, rtol=10 * tolerance, atol=tolerance * float(features.abs().max())):
        return None
    weight = torch.empty(len(features), dtype=torch.long)
    weight[want.indices] = places[have.indices]
    return Row(weight, -1, factor)
