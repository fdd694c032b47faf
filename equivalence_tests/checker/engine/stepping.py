"""Compare a step of decoding, line by line, with a run over all tokens."""

from collections import defaultdict
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.same import TABLE, near
from equivalence_tests.checker.engine.watching import Operation, Recorder
from equivalence_tests.checker.reporting.lines import Frames

Lines = dict[tuple[str, Frames], list[Tensor]]  # what the same function gave in the same line, one after another


@dataclass(frozen=True)
class Against:
    """A run over all tokens, with which a step over only the last of them is compared, line by line."""

    whole: Recorder  # the run over all
    new: int  # how many tokens the step is over
    total: int  # how many the whole run is over

    def departing(self, run: Recorder, known: Container[int]) -> Iterator[tuple[int, Tensor]]:
        """List what departs in a step, unless it is known or takes what departs, with what it should give."""
        graph, departs, passed = Graph(run.operations), set[int](), dict[int, Tensor]()
        lines: Lines = defaultdict(list)
        for operation in self.whole.operations:
            lines[operation.name, operation.frames] += [slot.value for slot in operation.outputs[:1]]
        for operation in run.operations:
            made = (graph.maker(slot, operation.index) for slot in operation.inputs)
            before = {maker.index for maker in made if maker is not None}
            wanted = self._wanted(operation, lines, passed, before)
            have = operation.outputs[0].value if wanted else None
            if before & departs or (have is not None and not any(near(_real(have), _real(x), TABLE) for x in wanted)):
                departs.add(operation.index)
                if not before & departs and operation.index not in known:
                    yield operation.index, wanted[0]

    def _wanted(
        self, operation: Operation, lines: Lines, passed: dict[int, Tensor], before: Collection[int]
    ) -> list[Tensor]:
        """List what an operation may have to give: what the same line gave in one pass, or else what it takes."""
        if not operation.frames or len(operation.outputs) != 1:
            return []
        shape, own = operation.outputs[0].value.shape, lines[operation.name, operation.frames]
        if own:
            passed[operation.index] = own.pop(0)
            return [*self._rows(passed[operation.index], shape)]
        # In one pass there is no such line, as where new tokens are joined with those of a cache.
        return [passed[index] for index in before if index in passed and passed[index].shape == shape]

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
