"""Say why an expression without which code is torch's attention may belong to a right attention of another sort."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.leaving_out import Repair, Without
from equivalence_tests.checker.engine.meaning import SIZES
from equivalence_tests.checker.engine.same import HIDING, ROUNDING, constant_ratio, identical
from equivalence_tests.checker.engine.vocabulary import ADDS, CASTS, CONTRACTIONS, MIXES, REDUCES, SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation, storage_of
from equivalence_tests.checker.reach.arguments import role_of_parameter

ALIKE = 1e-3  # of sizes that a norm or a rotation leaves, relative
FACTOR = "it is a constant factor"
SETTING = re.compile(r"\bself\.(\w+)")


@dataclass(frozen=True)
class Doubt:
    """What may be said for an expression."""

    watched: Without  # the run, with the places of its operations
    repair: Repair
    module: nn.Module  # the user's; an empty one for a function
    behind: bool = False  # whether it stands behind an attention, wherever it is, as in a layer

    def said(self) -> str:
        """Say what may be said for it; "" where nothing may."""
        out, instead = self.repair.operation.outputs[0].value.double(), self.repair.instead.value.double()
        if out.shape != instead.shape:
            return self._asked_for()
        of_values = of_its_values(out, instead) or self._rounds(out, instead)
        if of_values == FACTOR and any(one.name in REDUCES for one in self.repair.parts):
            of_values = ""  # a number that is made of the data is no constant
        of_values = of_values or self._zeroes_padding(out, instead)
        return self._asked_for() or self._adds_what_is_there() or of_values or self._acts()

    def _asked_for(self) -> str:
        """What has a name of its own: a parameter, a buffer, an argument, a part without parameters, a setting."""
        if self.repair.own:
            return f"{self.repair.own[0]} has no other use"
        if bent := self._bent():
            return f"{bent} has no other use"
        for one in self.repair.parts:
            holder = self.watched.holders[one.index]
            if holder is not None and holder is not self.module and next(holder.parameters(), None) is None:
                return f"a separate module does it, a {type(holder).__name__}"
        held = [vars(x) for x in self.module.modules()]
        for name in SETTING.findall(self.repair.left_out[0].place.text):
            if not SIZES.search(name) and any(isinstance(x.get(name), int | float | str) for x in held):
                return f"the setting {name} may ask for it"
        return ""

    def _bent(self) -> str:
        """The vector or number that is learnt of which a function is taken, as of a gate, if nothing else takes it."""
        instead, parts = self.repair.instead, self.repair.parts
        names = [name for name, x in zip(self.watched.names, self.watched.given, strict=True) if x.key == instead.key]
        users = Graph(self.watched.operations).users(instead)
        vector = instead.value.numel() == max(instead.value.shape, default=1)
        alone = all(one in parts for one in users) and not any(map(_mixes, self._way()))
        return names[0] if names and vector and alone else ""

    def _way(self) -> list[Operation]:
        """The operations that take what is left, or what others have made of it."""
        made, found = {storage_of(self.repair.instead.tensor)}, list[Operation]()
        for one in self.repair.parts:
            if made & {storage_of(x.tensor) for x in one.inputs}:
                made |= {storage_of(x.tensor) for x in one.outputs}
                found.append(one)
        return found

    def _adds_what_is_there(self) -> str:
        """A residual connection, or a branch: behind the scores, something is added that is made of other data."""
        operation = self.repair.operation
        between = [x for one in self._way() if one is not operation for x in one.outputs]
        made = {storage_of(x.tensor) for x in (self.repair.instead, *between)}
        held = {*dict(self.module.named_parameters()), *dict(self.module.named_buffers())}
        pairs = zip(operation.inputs, operation.origins, strict=True)
        outside = (bits for x, bits in pairs if storage_of(x.tensor) not in made)
        others = [bits for bits in outside if not held.issuperset(self.watched.named(bits))]
        return (
            "it adds what is computed from something else"
            if operation.name in ADDS and others and self._behind()
            else ""
        )

    def _zeroes_padding(self, out: Tensor, instead: Tensor) -> str:
        """A mask that is handed over, times tokens: those that it hides become 0."""
        operation = self.repair.operation
        names = [name.rpartition(":")[2] for bits in operation.origins for name in self.watched.named(bits)]
        masked = any(role_of_parameter(name) == "mask" for name in names)
        return "it sets padded tokens to 0" if masked and bool(((out == 0) | (out == instead)).all()) else ""

    def _acts(self) -> str:
        """The activation of a network behind the attention: a function of each number alone."""
        learnt = {storage_of(x.tensor) for x in self.watched.given}
        weighed = any(
            one.name in CONTRACTIONS and any(storage_of(x.tensor) in learnt for x in one.inputs)
            for one in self._behind()
        )
        outputs = (x for one in self.repair.parts for x in one.outputs)
        known = {storage_of(x.tensor) for x in (self.repair.instead, *outputs)}
        alone = all(
            not _mixes(one)
            and all(storage_of(x.tensor) in known for x in one.inputs)
            and (one.inputs or all(x.value.numel() == 1 for x in one.outputs))  # places are no constant
            for one in self.repair.parts
        )
        return "it is an activation" if weighed and alone and self._is_of_a_matrix() else ""

    def _is_of_a_matrix(self) -> bool:
        """Whether what is left is what a product gave, or that with its bias."""
        found = Graph(self.watched.operations).maker(self.repair.instead, self.repair.operation.index)
        if found is not None and found.name in ADDS:
            found = Graph(self.watched.operations).maker(found.inputs[0], found.index)
        return found is not None and found.name in CONTRACTIONS

    def _behind(self) -> list[Operation]:
        """The operations between the last softmax before the expression, and that; none if there is no softmax."""
        before = self.watched.operations[: self.repair.operation.index]
        if self.behind:
            return before
        last = max((one.index for one in before if one.name in SOFTMAXES), default=len(before))
        return before[last + 1 :]

    def _rounds(self, out: Tensor, instead: Tensor) -> str:
        close = torch.allclose(out, instead, rtol=0.02, atol=0.02 * float(instead.abs().max()))
        return "it rounds to another precision" if close and any(x.name in CASTS for x in self.repair.parts) else ""


def _mixes(one: Operation) -> bool:
    """Whether an operation is no function of each number alone; along an axis of one number it gives what it takes."""
    return one.name in MIXES and not identical(one.outputs[0].value, one.inputs[0].value)


def of_its_values(out: Tensor, instead: Tensor) -> str:
    """Say by its numbers what an expression may be: a factor, positions, a mask, a norm, a rotation; "" if none."""
    if bool((out == out.flatten()[0]).all()):
        return ""
    if (factor := constant_ratio(out, instead)) is not None:
        return FACTOR if factor > 0 else ""
    apart, ratio = out - instead, torch.where(instead == 0, 1.0, out / instead)
    if bool((apart[apart != 0] <= -HIDING).all()):
        return "it hides keys"
    of_places = (_is_same(x, 0) and not _is_same(x, -2) for x in (apart, ratio))
    if out.dim() > 2 and not _is_same(instead, 0) and any(of_places):
        return "it depends on positions alone"
    for axis in (-1, -2) if out.dim() > 1 else ():
        if _is_normal(out, axis) and not _is_normal(instead, axis):
            return "it normalises"
    turned = bool((out < 0).any()) and torch.allclose(out.norm(dim=-1), instead.norm(dim=-1), rtol=ALIKE)
    moved = torch.allclose(out.flatten().sort().values, instead.flatten().sort().values)
    return "it rotates" if turned and not moved and not torch.allclose(out.abs(), instead.abs()) else ""


def _is_normal(what: Tensor, axis: int) -> bool:
    """Whether all vectors along an axis are of one size."""
    sizes = [torch.linalg.vector_norm(what, dim=axis), what.std(dim=axis)]
    return any(float(x.std() / x.mean().abs().clamp_min(1e-30)) < ALIKE for x in sizes)


def _is_same(what: Tensor, axis: int) -> bool:
    """Whether all slices along an axis are the same, up to rounding."""
    return bool(((what - what.narrow(axis, 0, 1)).abs() <= ROUNDING * what.abs().max()).all())
