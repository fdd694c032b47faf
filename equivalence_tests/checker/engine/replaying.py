"""Run a part of a recording again with other numbers, without the user's code: experiments on single stages."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot, storage_of


def replayed(recorder: Recorder, start: Mapping[int, Tensor], after: int, wanted: Slot, until: int) -> Tensor | None:
    """Give what a tensor would have been, had others been something else.

    Args:
        recorder: Holds the run.
        start: New numbers, by the ids of the tensors that get them.
        after: The last operation that is not run again.
        wanted: The tensor that is asked for.
        until: The last operation that is run again.

    Returns:
        Its new numbers; None if it does not depend on what was changed.
    """
    replay = _Replay(recorder, {key: value.clone() for key, value in start.items()})
    with torch.no_grad():
        for operation in recorder.operations[after + 1 : until + 1]:
            replay.run(operation)
    return replay.values.get(wanted.key)


class _Replay:
    """Holds what differs from the recording."""

    def __init__(self, recorder: Recorder, values: dict[int, Tensor]) -> None:
        self.recorder, self.values, self.given = recorder, values, set(values)

    def run(self, operation: Operation) -> None:
        """Run an operation again if anything that it takes has changed; what was given stays as it was given."""
        taken = {slot.key for slot in operation.inputs}  # out= may name what is read
        if not operation.inplace and any(slot.key in self.given - taken for slot in operation.outputs):
            return
        if not any(slot.key in self.values for slot in operation.inputs):
            for slot in operation.outputs:
                if not operation.inplace:
                    self.values.pop(slot.key, None)
            return
        if operation.inplace and operation.inputs[0].key not in self.values:
            self._renew_memory(operation, operation.inputs[0])
        result = operation.call([self.values.get(slot.key, slot.value) for slot in operation.inputs])
        if operation.patch is not None:
            self._patch(operation)
            return
        if operation.inplace:
            return
        given = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, Tensor)]
        for slot, value in zip(operation.outputs, given, strict=False):
            self.values[slot.key] = value

    def _patch(self, operation: Operation) -> None:
        """What was put in the place of a result is put there again, made from what is different now."""
        assert operation.patch is not None  # asked for only then
        want = operation.patch(_Seen(self), self.seen(operation))  # type: ignore[arg-type]
        slot = operation.outputs[0]
        self.values[slot.key] = want.to(slot.value.dtype).reshape(slot.value.shape)

    def seen(self, operation: Operation) -> Operation:
        """An operation with what it takes and gives now."""
        inputs = [Slot(slot.tensor, self.values.get(slot.key, slot.value)) for slot in operation.inputs]
        outputs = [Slot(slot.tensor, self.values.get(slot.key, slot.value)) for slot in operation.outputs]
        return replace(operation, inputs=inputs, outputs=outputs)

    def _renew_memory(self, operation: Operation, slot: Slot) -> None:
        """What is written into gets memory of its own."""
        self.values[slot.key] = slot.value.clone()
        for other in operation.inputs[1:]:
            if storage_of(other.tensor) == storage_of(slot.tensor) and other.key not in self.values:
                self.values[other.key] = other.value.clone()


class _Seen:
    """Looks like a recorder to a patch, with the numbers of the replay."""

    def __init__(self, replay: _Replay) -> None:
        self._replay = replay

    @property
    def operations(self) -> "_Seen":
        """All operations, by their index."""
        return self

    def __getitem__(self, index: int) -> Operation:
        return self._replay.seen(self._replay.recorder.operations[index])
