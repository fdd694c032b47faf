"""What a stage of an attention departs in, before it has words."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from equivalence_tests.checker.engine.watching import Operation, Patch, Recorder
from equivalence_tests.checker.mistakes import MISTAKES, Mistake
from equivalence_tests.checker.reach.arguments import ROLES
from equivalence_tests.checker.reporting.lines import Frames

UNKNOWN = Mistake("", "", "", "", "", "")


@dataclass(frozen=True, eq=False)
class Departure:
    """One stage that is not what it should be, given the stage before it."""

    name: str
    stage: str
    operation: Operation | None  # the first operation that departs; None where none shows it
    facts: Mapping[str, Any] = field(default_factory=dict)  # numbers that the words need
    patches: Mapping[int, Patch] = field(default_factory=dict)  # what puts it right, by the index of the operation
    # Names of what the patched operations give then, by index.
    names: Mapping[int, Tensor] = field(default_factory=dict)
    evidence: str = ""  # why it is intended; "" if nothing says that
    blocks: bool = False  # whether later stages cannot be read before it is put right
    frames: Frames = ()  # the lines, where they are not those of the operation
    # The examination of the call in which it was seen, and the number of the attention there.
    seen_in: tuple[Any, int] | None = None

    @property
    def lines(self) -> Frames:
        """The user's lines that led there, the innermost first."""
        return self.frames or (self.operation.frames if self.operation is not None else ())

    @property
    def mistake(self) -> Mistake:
        """The row of the catalogue; an empty one where no catalogue knows it."""
        return MISTAKES.get(self.name, UNKNOWN)

    def also(self, other: "Departure") -> "Departure":
        """Add what puts the same mistake right in another part."""
        return replace(self, patches={**self.patches, **other.patches}, names={**self.names, **other.names})


def changed_by(operation: Operation, stage: str, what: str, **more: Any) -> Departure:
    """Name what no catalogue knows: a function that torch's formula does not have there.

    What is changed is part of the name where it is a role; ``more`` is what else the departure holds.
    """
    function = operation.name
    name = f"{what}_changed_by_{function}" if what in ROLES else f"changed_by_{function}"
    return Departure(name, stage, operation, {"function": function, "what": what}, **more)


def as_it_was(recorder: Recorder, operation: Operation) -> Tensor:
    """Give what an operation took, in the place of what it gives."""
    return operation.inputs[0].value


def unmixed(recorder: Recorder, operation: Operation) -> Tensor:
    """Give what an operation took that is of the shape of what it gives."""
    return next(x.value for x in operation.inputs if x.value.shape == operation.outputs[0].value.shape)
