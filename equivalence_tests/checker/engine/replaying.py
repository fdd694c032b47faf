"""Run a part of a recording again with other numbers, without the user's code: experiments on single stages."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot
from equivalence_tests.checker.reach.tracing import tensors_of


def replayed(recorder: Recorder, start: Mapping[int, Tensor], after: int, wanted: Slot, until: int) -> Tensor | None:
    """Give what a tensor would have been, had others had new numbers; None if it does not depend on these.

    Operations are run again behind the one with the index ``after``, up to the one with the index ``until``.
    """
    replay = _Replay(recorder, start)
    with torch.no_grad():
        for operation in recorder.operations[after + 1 : until + 1]:
            replay.run(operation)
    return replay.values.get(wanted.key)


class _Replay:
    """Holds what differs from the recording; to a patch it looks like a recorder with these numbers."""

    def __init__(self, recorder: Recorder, start: Mapping[int, Tensor]) -> None:
        self.recorder, self.given = recorder, frozenset(start)
        self.values = {key: value.clone() for key, value in start.items()}

    def run(self, operation: Operation) -> None:
        """Run an operation again if anything that it takes has changed; what was given stays as it was given."""
        taken = {slot.key for slot in operation.inputs}  # out= may name what is read
        if not operation.inplace and any(slot.key in self.given - taken for slot in operation.outputs):
            return
        if not taken & self.values.keys():
            for slot in () if operation.inplace else operation.outputs:
                self.values.pop(slot.key, None)
            return
        if operation.inplace:  # what is written into gets memory of its own
            self.values.setdefault(operation.inputs[0].key, operation.inputs[0].value.clone())
        result = operation.call([self.values.get(slot.key, slot.value) for slot in operation.inputs])
        if operation.patch is not None:
            want, slot = operation.patch(self, self._renewed(operation)), operation.outputs[0]  # type: ignore[arg-type]
            self.values[slot.key] = want.to(slot.value.dtype).reshape(slot.value.shape)
        elif not operation.inplace:
            for slot, value in zip(operation.outputs, tensors_of(result), strict=False):
                self.values[slot.key] = value

    @property
    def operations(self) -> list[Operation]:
        """All operations, with what they take and give now."""
        return [self._renewed(operation) for operation in self.recorder.operations]

    def _renewed(self, operation: Operation) -> Operation:
        def renewed(slots: list[Slot]) -> list[Slot]:
            return [Slot(slot.tensor, self.values.get(slot.key, slot.value)) for slot in slots]

        return replace(operation, inputs=renewed(operation.inputs), outputs=renewed(operation.outputs))
