"""What stands behind the averaged values: the output projection, and what follows it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equivalence_tests.checker.engine.same import near
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.equivalent.expressions import Expression
from equivalence_tests.checker.equivalent.parameters import Affine, order_of
from equivalence_tests.checker.equivalent.tracing import Tracer
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.watched import Watched


@dataclass(frozen=True)
class Output(Affine):
    """What is made of the averaged values of all heads, side by side."""

    around: Expression = field(kw_only=True)  # what is made of that: norms, gates, a residual connection


class EndReader:
    """Reads what stands behind the averaged values of all heads, side by side, (tokens, heads * head_dim)."""

    def __init__(self, watched: Watched, averaged: Tensor) -> None:
        self.watched, self.averaged = watched, averaged
        self.final = watched.layout.output(watched.returned)
        self.projection: Affine | None = None

    def read(self) -> Output:
        """Read it.

        Raises:
            UnreadError: If what comes back is made of the averaged values in a way that is not known.
        """
        around = Tracer(self.watched, self._is_projection).read(self.final, len(self.watched.operations))
        if self.projection is None:
            raise UnreadError("what is returned is not made from the averaged values")
        return Output(self.projection.weight, self.projection.bias, self.projection.factor, around=around)

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
        if tensor.shape == self.final.shape:
            numbers = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
            return self.watched.layout.outward(numbers).flatten(0, -2).long()
        return self.watched.positions(tensor, operation)

    def _projected(self, elements: Tensor, values: Tensor) -> Affine | None:
        """Read the rows of a projection, one for each feature of the last token; they have to give all tokens."""
        parameters, tolerance = self.watched.parameters, self.watched.tolerance
        found = parameters.projection(elements, self.averaged[-1], tolerance)
        if found is None:
            return None
        with torch.no_grad():
            given = found.of(self.averaged, parameters)
        return found if near(given, values, 100 * tolerance) else None

    def _as_they_are(self, have: Tensor) -> Affine | None:
        """Find which averaged value each feature is."""
        want = self.averaged
        if have.size(-1) != want.size(-1):
            return None
        order = order_of(have, want)
        close = near(have, want[:, order], 10 * self.watched.tolerance)
        return Affine(order, None) if close and len(order.unique()) == len(order) else None
