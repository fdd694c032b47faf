"""Which line ran what: the place of a mistake that shows in the output and not in any single operation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.watching import Operation, Recorder, storage_of
from equivalence_tests.checker.reporting.lines import Frames, frames_here, inside

MIRRORED = {"rsub": "sub", "rdiv": "div", "rpow": "pow"}


def operations_of(*calls: Callable[[], Any]) -> list[Operation]:
    """Watch calls that are known to run, and give the operations that have a line of the user's."""
    return [operation for call in calls for operation in recorded(call).operations if operation.frames]


def recorded(call: Callable[[], Any], named: Iterable[tuple[str, Tensor]] = ()) -> Recorder:
    """Watch a call that is known to run."""
    outside, recorder = frames_here(), Recorder(named)
    with torch.no_grad(), recorder:
        call()
    for operation in recorder.operations:
        operation.frames = inside(operation.frames, outside)
    return recorder


def unused_fill(operations: Sequence[Operation]) -> Operation | None:
    """Give the last ``masked_fill`` whose result no operation takes, so that it hides nothing."""
    taken = {storage_of(slot.tensor) for operation in operations for slot in operation.inputs}
    fills = (operation for operation in reversed(operations) if operation.name == "masked_fill")
    return next((fill for fill in fills if storage_of(fill.outputs[0].tensor) not in taken), None)


def frames_where(ran: str, operations: Sequence[Operation]) -> Frames:
    """Give the line at which something ran, with those that led there, the innermost first.

    Returns:
        Nothing where none of it ran.
    """
    for wanted in ran.split(", "):
        if wanted == "end":
            return operations[-1].frames[-1:] if operations else ()
        place, name = (-1, wanted.removeprefix("last ")) if wanted.startswith("last ") else (0, wanted)
        matching = [operation for operation in operations if MIRRORED.get(operation.name, operation.name) == name]
        if matching:
            return matching[place].frames
    return ()
