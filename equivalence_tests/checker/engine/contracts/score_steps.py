"""The operations between the product of queries and keys and that of weights and values, one by one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.same import INFINITE, MEASURED, ROUNDING, constant_ratio
from equivalence_tests.checker.engine.watching import Operation, Recorder


@dataclass(eq=False)
class Step:
    """One operation between the products."""

    operation: Operation
    places: Tensor  # the score that each element of its result belongs to; negative where it belongs to none
    values: Tensor  # its result
    taken: Tensor | None  # the first of its arguments that is made of the scores; None if there is none
    ratio: float | None = None  # what it multiplied by, where that is one number

    def laid(self, count: int) -> Tensor:
        """Give its result in the order of the scores."""
        return self.met_by(self.values, count)

    def met_by(self, taken: Tensor, count: int) -> Tensor:
        """Give a tensor that the scores meet, in their order; NaN where it meets none, or is no real number."""
        flat = torch.full((count,), torch.nan, dtype=torch.float64)
        sizes = self.places.shape[-taken.dim() :] if taken.dim() else ()
        if len(sizes) == taken.dim() and all(have in (1, size) for have, size in zip(taken.shape, sizes, strict=True)):
            mine = (self.places >= 0) & taken.is_floating_point()
            flat[self.places[mine]] = taken.expand(self.places.shape)[mine].double()
        return flat


def ratio_of(value: Tensor, taken: Tensor) -> float | None:
    """Give the number that an operation multiplied by; None if it is not one. Hidden scores do not count."""
    if taken.shape != value.shape or not taken.is_floating_point():
        return None
    seen = taken.abs() < INFINITE
    if not torch.equal(seen, value.abs() < INFINITE):
        return None
    return constant_ratio(value[seen], taken[seen], MEASURED if value.dtype == torch.float32 else ROUNDING)


def divided(factors: Tensor, recorder: Recorder, operation: Operation) -> Tensor:
    """Divide what an operation returns by these factors."""
    value = operation.outputs[0].value
    return value / factors.expand(value.numel()).view(value.shape)


def fill_of(operation: Operation) -> float | None:
    """Give the number that an operation fills with; None if it fills with none."""
    value: Any = None
    if operation.name in ("masked_fill", "setitem"):
        value = operation.argument(2, "value")
    elif operation.name == "where":
        value = next((x for x in operation.arguments[0][1:] if isinstance(x, int | float)), None)
    return float(value) if isinstance(value, int | float) else None


def named_fill(fill: float) -> str:
    """Say what is wrong with a number that does not hide."""
    return "fill_too_small" if abs(fill) >= 1e-3 else "fill_not_negative" if fill else "fill_zero"
