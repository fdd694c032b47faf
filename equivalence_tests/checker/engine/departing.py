"""Find the operation at which decoding with a cache first differs from one run over all tokens."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.same import TABLE, near
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot


@dataclass(frozen=True)
class Against:
    """A run over all tokens, with which a run over only the last of them, such as a decoding step, is compared.

    Args:
        whole: The run over all.
        new: How many tokens the other run is over.
        total: How many the whole run is over.
    """

    whole: Recorder
    new: int
    total: int

    def departing(self, run: Recorder, output: Tensor, known: Container[int]) -> tuple[Operation, Tensor] | None:
        """Find the first operation whose difference from the whole run reaches the output, and what it should give.

        Args:
            run: The run over the last tokens.
            output: The output of that run.
            known: The indices of operations that are reported already, which are passed over.

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
        """Find the tensor of the whole run that has this operation's output as its last rows; None if there is none.

        Operations of the same name come first; others are searched only where none of these has rows of this shape.
        """
        x = operation.outputs[0].value if operation.outputs else torch.zeros(0)
        given = [
            (y.name, s.value, r) for y in self.whole.operations for s in y.outputs for r in self._rows(s.value, x.shape)
        ]
        own = [one for one in given if one[0] == operation.name] or given
        return next((whole for _, whole, rows in own if near(_real(x), _real(rows), TABLE)), None)

    def _wanted(self, run: Recorder, operation: Operation, taken: list[Tensor]) -> Tensor | None:
        """Give the output that the operation should have had, of its shape; None if the whole run has none.

        That is what the same line gave in the whole run; else one of the whole inputs, as where new keys are to be
        concatenated to a cache.
        """
        shape, own = operation.outputs[0].value.shape, (operation.name, operation.frames)
        same_line = [other for other in self.whole.operations if (other.name, other.frames) == own]
        place = sum((other.name, other.frames) == own for other in run.operations[: operation.index])
        here = [rows for one in same_line[place : place + 1] for rows in self._rows(one.outputs[0].value, shape)]
        return next(iter([*here, *(whole for whole in taken if whole.shape == shape)]), None)

    def _rows(self, whole: Tensor, shape: torch.Size) -> Iterator[Tensor]:
        """Yield the last tokens of a tensor, for each way in which its axes may hold tokens, alone or flattened."""
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
