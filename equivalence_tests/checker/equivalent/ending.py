"""What stands behind the averaged values: the output projection, and what follows it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.equivalent.expressions import Expression
from equivalence_tests.checker.equivalent.parameters import Row
from equivalence_tests.checker.equivalent.tracing import Tracer
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.watched import Watched


@dataclass(frozen=True)
class Output:
    """What is made of the averaged values.

    Args:
        weight: (features, heads * head_dim), places of parameter elements; None where nothing is projected.
        bias: (features,); -1 for none.
        order: Which averaged value each feature is, where nothing is projected.
        factor: What it is multiplied by.
        around: What is made of that: norms, gates, a residual connection.
    """

    weight: Tensor | None
    bias: Tensor | None
    order: Tensor | None
    factor: float
    around: Expression

    @property
    def places(self) -> Tensor:
        """The parameter elements that it uses."""
        if self.weight is None or self.bias is None:
            return torch.zeros(0, dtype=torch.long)
        every = torch.cat([self.weight.reshape(-1), self.bias])
        return every[every >= 0]


class EndReader:
    """Reads what stands behind the averaged values.

    Args:
        watched: The run.
        averaged: The averaged values of all heads, side by side, (tokens, heads * head_dim).
    """

    def __init__(self, watched: Watched, averaged: Tensor) -> None:
        self.watched, self.averaged = watched, averaged
        self.projection: tuple[Tensor | None, Tensor | None, Tensor | None, float] | None = None

    def read(self) -> Output:
        """Read it.

        Raises:
            UnreadError: If what comes back is made of the averaged values in a way that is not known.
        """
        around = Tracer(self.watched, self._is_projection).read(self._final(), len(self.watched.operations))
        if self.projection is None:
            raise UnreadError("what is returned is not made from the averaged values")
        return Output(*self.projection, around)

    def _final(self) -> Tensor:
        """The tensor that comes back, as the run gave it."""
        return self.watched.layout.output(self.watched.returned)

    def _is_projection(self, tensor: Tensor, operation: Operation) -> bool:
        """Whether a tensor is a projection of the averaged values, or holds these as they are."""
        if operation.index < self.watched.judgement.attention.last.index:
            return False
        positions = self._positions(tensor, operation)
        if positions is None or len(positions) != len(self.averaged):
            return False
        values = tensor.detach().reshape(-1)[positions].double()
        found = self._projected(tensor.reshape(-1)[positions[-1]], values) or self._as_they_are(values)
        self.projection = found or self.projection
        return found is not None

    def _positions(self, tensor: Tensor, operation: Operation) -> Tensor | None:
        """Lay it out as what comes back, or by its names."""
        final = self._final()
        if tensor.shape == final.shape:
            numbers = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
            return self.watched.layout.outward(numbers).flatten(0, -2).long()
        return self.watched.positions(tensor, operation)

    def _projected(self, elements: Tensor, values: Tensor) -> tuple[Tensor, Tensor, None, float] | None:
        """Read the rows of a projection, one for each feature of the last token; they have to give all tokens."""
        parameters, tolerance = self.watched.parameters, self.watched.tolerance
        rows: list[Row] = []
        for element in elements:
            row = parameters.row(element, self.averaged[-1], tolerance)
            if row is None or (rows and abs(row.factor / rows[0].factor - 1) > 10 * tolerance):
                return None
            rows.append(row)
        weight, bias = torch.stack([row.weight for row in rows]), torch.tensor([row.bias for row in rows])
        with torch.no_grad():
            given = rows[0].factor * F.linear(self.averaged, parameters.taken(weight), parameters.taken(bias))
        close = torch.allclose(given, values, rtol=0, atol=100 * tolerance * float(values.abs().max()))
        return (weight, bias, None, rows[0].factor) if close else None

    def _as_they_are(self, have: Tensor) -> tuple[None, None, Tensor, float] | None:
        """Find which averaged value each feature is, read off the last token and confirmed by all others."""
        want = self.averaged
        if have.size(-1) != want.size(-1):
            return None
        order = (have[-1][:, None] - want[-1]).abs().argmin(-1)
        close = torch.allclose(have, want[:, order], rtol=0, atol=10 * self.watched.tolerance * float(want.abs().max()))
        return (None, None, order, 1.0) if close and len(order.unique()) == len(order) else None
