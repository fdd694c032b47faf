"""Where a run over the last tokens departs from one over all of them: the first operation whose rows are others."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.same import TABLE, near
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot


@dataclass(frozen=True)
class Against:
    """A run over all tokens, which another run over the last of them is held against.

    Args:
        whole: The run over all.
        new: How many tokens the other run is over.
        total: How many the whole run is over.
    """

    whole: Recorder
    new: int
    total: int

    def departing(self, run: Recorder, output: Tensor, known: Container[int]) -> tuple[Operation, Tensor] | None:
        """Give the first operation that made the output other than it is in the whole run, and what it should give.

        Args:
            run: The run over the last tokens.
            output: What came of it.
            known: What is found already: the indices of operations.

        Returns:
            None where no operation of the whole run corresponds to it.
        """
        graph, guilty = Graph(run.operations), dict[int, Tensor]()
        departs: set[int] = set()
        same: dict[int, Tensor] = {}  # what the whole run has where this one has some rows of it
        for operation in run.operations:
            made = (graph.maker(slot, operation.index) for slot in operation.inputs)
            before = [maker.index for maker in made if maker is not None]
            found = self._found(operation)
            if found is not None:
                same[operation.index] = found
            elif departs.intersection(before):
                departs.add(operation.index)
            elif operation.frames and len(operation.outputs) == 1 and operation.index not in known:
                want = self._wanted(run, operation, [same[index] for index in before if index in same])
                if want is not None:
                    departs.add(operation.index)
                    guilty[operation.index] = want
        way = graph.ancestors(
            Slot(output, output), len(run.operations), lambda op: op.inputs if op.index in departs else ()
        )
        first = min((op.index for op in way if op.index in guilty), default=None)
        return None if first is None else (run.operations[first], guilty[first])

    def _found(self, operation: Operation) -> Tensor | None:
        """What gave these rows in the whole run: something of the same name, if that gave rows of this shape at all."""
        x = operation.outputs[0].value if operation.outputs else torch.zeros(0)
        given = [
            (y.name, s.value, r) for y in self.whole.operations for s in y.outputs for r in self._rows(s.value, x.shape)
        ]
        own = [one for one in given if one[0] == operation.name] or given
        return next((whole for _, whole, rows in own if near(_real(x), _real(rows), TABLE)), None)

    def _wanted(self, run: Recorder, operation: Operation, taken: list[Tensor]) -> Tensor | None:
        """What it should give: as its line did; all of what it puts beside what was kept; or as the last alike did."""
        shape, own = operation.outputs[0].value.shape, (operation.name, operation.frames)
        alike = [other for other in self.whole.operations if other.name == operation.name]
        same_line = [other for other in alike if other.frames == operation.frames]
        place = sum((other.name, other.frames) == own for other in run.operations[: operation.index])
        here, elsewhere = (
            [rows for other in others for rows in self._rows(other.outputs[0].value, shape)]
            for others in (same_line[place : place + 1], reversed(alike))
        )
        return next(iter([*here, *(whole for whole in taken if whole.shape == shape), *elsewhere]), None)

    def _rows(self, whole: Tensor, shape: torch.Size) -> Iterator[Tensor]:
        """The rows of the last tokens, on whichever axes hold tokens, alone or together with others."""
        if whole.dim() != len(shape):
            return
        found = [whole]
        for axis, (have, size) in enumerate(zip(shape, whole.shape, strict=True)):
            if have != size and have * self.total != size * self.new:
                return
            if have != size:
                found = [rows for x in found for rows in self._last(x, axis)]
        yield from found

    def _last(self, x: Tensor, axis: int) -> Iterator[Tensor]:
        for sizes, tokens in (((-1, self.total), axis + 1), ((self.total, -1), axis)):
            yield x.unflatten(axis, sizes).narrow(tokens, self.total - self.new, self.new).flatten(axis, axis + 1)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
