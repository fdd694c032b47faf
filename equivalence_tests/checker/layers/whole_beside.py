"""What is beside the tokens of a layer or a model: masks, a vector of each sample, what normalises a series."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equivalence_tests.checker.engine.same import LOOSE, MEASURED, near
from equivalence_tests.checker.engine.vocabulary import MOVES, words
from equivalence_tests.checker.engine.watching import Operation, Slot
from equivalence_tests.checker.layers.whole_sums import Sums
from equivalence_tests.checker.layers.whole_values import FEATURES, Terms, Value
from equivalence_tests.checker.reach.tracing import tensors_of

BLANKS, COMPARES = words("mul masked_fill where"), words("eq ne gt")  # the last, ids with that of padding
OF_PADDING = re.compile(r"^(?!.*no[nt]).*pad")  # it says which tokens are none
COMBINES = ("add", "sub", "mul", "div")
MOST_OPERATIONS = 16  # by which a series is normalised


@dataclass(eq=False)
class Hidden:
    """Knows the tensors that are made of masks, or of what ids are compared with, and of nothing else."""

    by_mask: Mapping[str, Tensor | None]  # the tokens, (batch, len), that each hides from all; None if not known
    made: dict[int, tuple[str, Tensor]] = field(default_factory=dict)  # by id, what hides tokens, and which

    def given(self, name: str, x: Tensor) -> bool:
        """Note an argument that is a mask; say whether it is one."""
        hides, real = self.by_mask.get(name), x.dim() == 3 and x.size(-1) == 1 and bool((x == 1).all())
        if hides is not None or (real and name in self.by_mask and not OF_PADDING.search(name.lower())):
            self.made[id(x)] = name, torch.zeros(x.shape[:2]).bool() if hides is None else hides
        return name in self.by_mask

    def follow(self, operation: Operation) -> None:
        """Note what an operation makes of masks."""
        known = next((self.made[id(x.tensor)] for x in operation.inputs if id(x.tensor) in self.made), None)
        if known is not None:
            self.made.update({id(slot.tensor): known for slot in operation.outputs})

    def compared(self, operation: Operation) -> None:
        """Note where ids are one that they are compared with, as padding is."""
        ids = [x for x in operation.skeleton if type(x) is int]
        if operation.name in COMPARES and len(ids) == len(operation.inputs) == 1:
            hides = operation.inputs[0].value == ids[0]
            self.made[id(operation.outputs[0].tensor)] = f"the id {ids[0]}", hides

    def blanked(self, operation: Operation) -> str:
        """Say by what the tokens are hidden that an operation sets to 0; "" if it does anything else."""
        known = [self.made[id(x.tensor)] for x in operation.inputs if id(x.tensor) in self.made]
        if operation.name not in BLANKS or len(known) != 1:
            return ""
        (name, hides), after = known[0], operation.outputs[0].value
        zero, kept = (after == 0).all(-1), [(after == x.value).all(-1) for x in operation.inputs]
        alike = next((x for x in kept if x.shape == zero.shape and bool((x | zero).all())), None)
        return name if alike is not None and torch.equal(zero, hides) else ""


@dataclass(eq=False)
class Conditions:
    """Knows the tensors that are made of no tokens but a vector of each sample, as of a time step or a class."""

    made: dict[int, tuple[str, str]] = field(default_factory=dict)  # by id, the argument, and the last part or ""
    places: dict[int, Tensor] = field(default_factory=dict)  # which of the numbers of that part each element is
    taken: dict[str, list[Tensor]] = field(default_factory=dict)  # those of each part that change tokens
    widths: dict[str, int] = field(default_factory=dict)  # how many numbers each part gives to a sample

    def given(self, name: str, x: Tensor, all_given: Sequence[Tensor]) -> bool:
        """Note an argument, if it holds a vector or a number for each sample and others the tokens; say whether so."""
        samples = [len(other) for other in all_given if other.dim() > 2 or not other.is_floating_point()]
        if samples and ((x.dim() == 2 and x.is_floating_point()) or (x.dim() == 1 and len(x) in samples)):
            self.made[id(x)] = name, ""
        return id(x) in self.made

    def follow(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], path: str = "") -> bool:
        """Note what an operation or a sub-module makes of no tokens; say whether it is made of such a vector."""
        known = next((self.made[id(x)] for x in inputs if id(x) in self.made), None)
        if known is not None:
            self.made.update({id(x): (known[0], path or known[1]) for x in outputs})
        for x in outputs if path and known is not None else ():
            self.places[id(x)], self.widths[path] = torch.arange(x.size(-1)).expand(x.shape), x.size(-1)
        return known is not None

    def moved(self, operation: Operation) -> None:
        """Note which numbers lie where in what an operation makes of such a vector; all, where that is not known."""
        inputs, outputs = operation.inputs, [slot.tensor for slot in operation.outputs]
        every = [self.places[id(x.tensor)] for x in inputs if id(x.tensor) in self.places]
        if not every:
            return
        moves = operation.name in MOVES and len(inputs) == 1 and every[0].shape == inputs[0].value.shape
        known = every[0] if len(every) == 1 else torch.cat([one.flatten() for one in every])
        pieces = list(tensors_of(operation.call([known]))) if moves else [known] * len(outputs)
        self.places.update({id(x): piece for x, piece in zip(outputs, pieces, strict=True)})

    def changed(self, operation: Operation, data: Sequence[Value], sums: Sums) -> str:
        """Give a label to tokens that such a vector changes, all alike; "" if none does."""
        inputs = [slot.tensor for slot in operation.inputs]
        known = next((self.made[id(x)] for x in inputs if id(x) in self.made), None)
        if known is None or len(data) != 1 or operation.name not in COMBINES:
            return ""
        (name, path), (value,) = known, data
        evidence = f"the sub-module {path} makes it of the argument {name}" if path else ""
        places = (self.places[id(x)].flatten() for x in inputs if id(x) in self.places)
        self.taken.setdefault(path, []).extend(places)
        sums.say(f"{operation.name} of each token and a vector of its sample", "gate", evidence)
        sums.used(value, path or name)
        label = sums.labels.add("conditioned", f"{path or name} {operation.index}", data)
        if value.terms in sums.labels.streams:
            sums.labels.streams.add(((label, 1.0),))
        return label

    @property
    def idle(self) -> list[str]:
        """The sub-modules that make numbers of such a vector of which some change no tokens."""
        used = {path: torch.cat(taken).unique() for path, taken in self.taken.items() if taken}
        return [path for path, places in used.items() if len(places) < self.widths[path]]


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
        if len(operation.inputs) != 2 or operation.name not in COMBINES:
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
