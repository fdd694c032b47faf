"""Series that forecasters normalise by themselves at the start, and whose forecasts they scale back at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.checker.engine.same import LOOSE, MEASURED, near
from equivalence_tests.checker.engine.vocabulary import ELEMENTWISE
from equivalence_tests.checker.engine.watching import Operation, Slot
from equivalence_tests.checker.layers.whole_values import FEATURES, Terms, Value

MOST_OPERATIONS = 16  # by which a series is normalised
CHANGES = ELEMENTWISE & frozenset(("add", "sub", "mul", "div"))


@dataclass(eq=False)
class Series:
    """Features over time, each normalised by its own mean and deviation, and perhaps a gain and a bias."""

    given: Tensor
    normalised: Tensor
    time: int  # the axis of the tokens
    end: int  # the index of the last operation that normalises
    taken: set[int]  # the tensors that took part, by id
    terms: Terms = ()  # what the forecast is made of
    first: Tensor | None = None  # the forecast as it was made
    last: Tensor | None = None  # and as it was scaled back

    def follow(self, operation: Operation, data: Sequence[Value]) -> bool:
        """Follow what is made of the means and deviations alone, and a forecast that they change; say if it is one."""
        others = [slot for slot in operation.inputs if slot.key not in self.taken]
        if len(others) == len(operation.inputs) or len(others) != len(data):
            return False
        if not data:
            self.taken |= {slot.key for slot in operation.outputs}
            return True
        if len(operation.inputs) != 2 or operation.name not in CHANGES:
            return False
        self.first = others[0].value if self.first is None else self.first
        self.last, self.terms = operation.outputs[0].value, data[0].terms
        return True

    def is_undone(self, returned: Terms) -> bool:
        """Whether what comes back is a forecast, scaled back by what the series was normalised by."""
        if self.first is None or self.last is None or self.terms != returned or self.first.dim() != self.given.dim():
            return False
        centred = self.given - self.given.mean(self.time, keepdim=True)
        gain = (centred * self.normalised).sum(self.time, True) / centred.square().sum(self.time, True)
        bias = self.normalised.mean(self.time, True) - gain * self.given.mean(self.time, True)
        turned = ((gain, bias), (gain.mT, bias.mT))
        return any(_fits(a, self.first) and near(self.first, a * self.last + b, MEASURED) for a, b in turned)


def _fits(x: Tensor, other: Tensor) -> bool:
    return all(n in (1, m) for n, m in zip(x.shape, other.shape, strict=True))


def normalised(given: Slot, places: Tensor, operations: Sequence[Operation]) -> Series | None:
    """Find what the next operations make of the features that are given, if they normalise each along the tokens."""
    # Along all axes but one lie samples and features; a single token has no deviation.
    moved = ((axis, places.diff(dim=axis) // FEATURES) for axis in range(1, places.dim()))
    axes = [axis for axis, steps in moved if steps.numel() and bool(steps.all())]
    made, taken, found = {given.key}, set[int](), None
    for operation in operations[:MOST_OPERATIONS] if len(axes) == 1 and given.value.is_floating_point() else ():
        outputs = [slot.value for slot in operation.outputs]
        if made.isdisjoint(slot.key for slot in operation.inputs) or not all(x.is_floating_point() for x in outputs):
            break
        taken |= {slot.key for slot in (*operation.inputs, *operation.outputs)}
        made |= {slot.key for slot in operation.outputs}
        one = Series(given.value, outputs[0], axes[0], operation.index, set())
        if outputs[0].shape == places.shape and (_is_normal(one) or (found and _is_scaled(one, found))):
            one.taken, found = taken - {given.key, operation.outputs[0].key}, one
    return found


def _is_normal(one: Series) -> bool:
    """Whether each feature has the mean 0 and the deviation 1, and is what it was but for its mean and deviation."""
    mean, scale = one.normalised.mean(one.time), one.normalised.var(one.time)
    total = one.given.size(one.time)
    limits = torch.tensor([1.0, total / (total - 1)]).to(scale)
    unit = ((scale[..., None] - limits).abs() < LOOSE).any(-1)
    return bool((mean.abs() < MEASURED).all()) and bool(unit.all()) and _is_affine(one.normalised, one.given, one.time)


def _is_scaled(one: Series, before: Series) -> bool:
    """Whether it is what was normalised, each feature times a number of its own, and more a number of its own."""
    return _is_affine(one.normalised, before.normalised, one.time)


def _is_affine(x: Tensor, other: Tensor, axis: int) -> bool:
    one, two = (y - y.mean(axis, keepdim=True) for y in (x, other))
    gain = (one * two).sum(axis, keepdim=True) / two.square().sum(axis, keepdim=True)
    return near(one, gain * two)
