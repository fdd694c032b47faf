"""Who made each tensor of a run, who used it, and what of it comes back."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from equivalence_tests.checker.engine.vocabulary import OF_A_SHAPE
from equivalence_tests.checker.engine.watching import Operation, Slot, storage_of

Passing = Callable[[Operation], Iterable[Slot]]  # gives what is followed of what an operation takes


class Graph:
    """The operations of one run, in the order in which they ran, as a graph from what was given to what comes back."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self._giving, self._taking, self._writing = (defaultdict[int, list[int]](list) for _ in range(3))
        for operation in operations:
            for slot in operation.outputs:
                self._giving[slot.key].append(operation.index)
            for slot in operation.inputs:
                self._taking[slot.key].append(operation.index)
            if operation.inplace:  # by the memory that it writes into
                self._writing[storage_of(operation.inputs[0].tensor)].append(operation.index)

    def maker(self, slot: Slot, before: int) -> Operation | None:
        """Give the last operation before another that gave a tensor, or wrote into its memory; None where none did."""
        gave, wrote = self._giving.get(slot.key, []), self._writing.get(storage_of(slot.tensor), [])
        last = gave[place - 1] if (place := bisect_left(gave, before)) else -1
        for index in reversed(wrote[: bisect_left(wrote, before)]):
            if index > last and _overlap(self.operations[index].inputs[0].tensor, slot.tensor):
                return self.operations[index]
        return self.operations[last] if last >= 0 else None

    def users(self, slot: Slot) -> list[Operation]:
        """List the operations that take a tensor."""
        return [self.operations[index] for index in self._taking.get(slot.key, [])]

    def ancestors(self, slot: Slot, before: int, passing: Passing = attrgetter("inputs")) -> Iterator[Operation]:
        """List the operations before another that a tensor was made by, the last one first."""
        left, seen = [(slot, before)], set[int]()
        while left:
            operation = self.maker(*left.pop())
            if operation is not None and operation.index not in seen:
                seen.add(operation.index)
                yield operation
                left += [(taken, operation.index) for taken in passing(operation)]

    def live(self, tensors: Iterable[Tensor]) -> set[int]:
        """Give the indices of the operations on which some tensors depend."""
        needed, live = {storage_of(x) for x in tensors}, set[int]()
        for operation in reversed(self.operations):
            if any(storage_of(slot.tensor) in needed for slot in operation.outputs):
                live.add(operation.index)
                taken = [] if operation.name in OF_A_SHAPE else operation.inputs
                needed |= {storage_of(slot.tensor) for slot in taken}
        return live

    def unwatched(self, given: Iterable[Slot]) -> Operation | None:
        """Give the first of the user's lines that takes what neither was given nor came of an operation."""
        known = {storage_of(slot.tensor) for slot in given}
        for operation in self.operations:
            taken = {storage_of(slot.tensor) for slot in operation.inputs}
            if operation.frames and not taken <= known:
                return operation
            known |= taken | {storage_of(slot.tensor) for slot in operation.outputs}
        return None


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views of one memory have elements in common."""
    return bool(torch.isin(*(elements_of(view) * view.element_size() for view in (one, other))).any())


def elements_of(view: Tensor) -> Tensor:
    """Say where the elements of a view lie in its memory, counted in elements.

    >>> elements_of(torch.zeros(2, 3)[:, 1]).tolist()
    [1, 4]
    """
    places = torch.tensor(view.storage_offset())
    for size, stride in zip(view.shape, view.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places.reshape(-1)
