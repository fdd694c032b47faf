"""Which tokens the masks of a layer or a model hide, and whether these are what is set to 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equivalence_tests.checker.engine.vocabulary import words
from equivalence_tests.checker.engine.watching import Operation

BLANKS, COMPARES = words("mul masked_fill where"), words("eq ne gt")


@dataclass(eq=False)
class Hidden:
    """Knows the tensors that are made of masks, or of what ids are compared with, and of nothing else."""

    by_mask: Mapping[str, Tensor | None]  # the tokens, (batch, len), that each hides from all; None if not known
    made: dict[int, tuple[str, Tensor]] = field(default_factory=dict)  # by id, what hides tokens, and which

    def given(self, name: str, x: Tensor) -> bool:
        """Note an argument that is a mask; say whether it is one."""
        hides = self.by_mask.get(name)
        if hides is not None:
            self.made[id(x)] = name, hides
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
