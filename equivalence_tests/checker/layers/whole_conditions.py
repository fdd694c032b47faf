"""Vectors of each sample beside the tokens, as a time step or a class is embedded: what is made of them, and where."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.layers.whole_sums import Sums
from equivalence_tests.checker.layers.whole_values import Value

COMBINES = ("add", "sub", "mul", "div")


@dataclass(eq=False)
class Conditions:
    """Knows the tensors that are made of such vectors and of no tokens.

    Args:
        made: For each, by its id, the argument, and the path of the last sub-module that made it; "" for none.
    """

    made: dict[int, tuple[str, str]] = field(default_factory=dict)

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
        return known is not None

    def changed(self, operation: Operation, data: Sequence[Value], sums: Sums) -> str:
        """Give a label to tokens that such a vector changes, all alike; "" if none does."""
        inputs = [slot.tensor for slot in operation.inputs]
        known = next((self.made[id(x)] for x in inputs if id(x) in self.made), None)
        if known is None or len(data) != 1 or operation.name not in COMBINES:
            return ""
        (name, path), (value,) = known, data
        evidence = f"the sub-module {path} makes it of the argument {name}" if path else ""
        sums.say(f"{operation.name} of each token and a vector of its sample", "gate", evidence)
        sums.used(value, path or name)
        label = sums.labels.add("conditioned", f"{path or name} {operation.index}", data)
        if value.terms in sums.labels.streams:
            sums.labels.streams.add(((label, 1.0),))
        return label
