"""No accusation without proof: what counts against the code is shown by numbers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.taking_part import unused_parameters
from equivalence_tests.checker.engine.watching import Operation, Patch, Recorder
from equivalence_tests.checker.equivalent.comparing import difference_of, kept_parameters, redraw
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.plain import Plain, plain_programs
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reporting.findings import ROUNDING, Proof

INPUTS = 20
NOT_ITS_SIZE = (RuntimeError, IndexError)  # a program by names alone may be of other sizes


def proven(
    module: nn.Module | None, gaps: Callable[[int], tuple[float, float]], rounding: float = ROUNDING
) -> Proof | None:
    """Give the greatest differences with something put right, and without, on fresh inputs and other parameters.

    Both are given for the inputs of a seed; None where they prove nothing, or the program is of other sizes.
    """
    with kept_parameters(module), torch.no_grad():
        redraw(module, 9)
        try:
            errors, without = map(max, zip(*map(gaps, range(1, INPUTS + 1)), strict=True))
        except NOT_ITS_SIZE:
            return None
    proof = Proof(errors, without, INPUTS, max(rounding, ROUNDING))
    return proof if proof.holds else None


@dataclass
class Proving:
    """Puts torch's averaged values into the user's run, and lets the user's own code go on."""

    situation: Situation

    @cached_property
    def layout(self) -> Layout:
        """Of its arguments and its output."""
        return Layout.of(self.situation.trial)

    @cached_property
    def parameters(self) -> Parameters:
        """Of the user's module."""
        return Parameters.of(self.situation.subject.module)

    @property
    def rotates(self) -> bool:
        """Whether queries or keys are rotated by something, which no plain attention does."""
        judgement = self.situation.judgement
        return judgement is not None and any(one.rotated for one in judgement.first_operands)

    def plain(self, counts: Sequence[int] = ()) -> Iterator[tuple[float, Plain]]:
        """List the plain attentions that the code may be intended to be, each with how far the code is from it.

        Its heads may be so many; () for as many as it was built with.
        """
        situation, sizes = self.situation, self.situation.trial.sizes
        flat = situation.subject.module is None and "h" not in situation.plan.layout
        for heads in [1] if flat else counts or [sizes.num_heads]:
            for one in plain_programs(self.parameters, situation.arguments, heads, sizes.embed_dim):
                yield self.difference(one.program), one

    def proof(self, plain: Plain, blamed: Operation | None) -> Proof | None:
        """Show that torch's values make the user's code return torch's numbers, and that it does not without them.

        Where the operation that is blamed stands behind the attention, what comes back is put in there. None where
        something takes part in the user's code that the program does not have: nobody knows then what is right.
        """
        place, end = self._around(plain.output)
        late = blamed is not None and blamed.index >= end
        place = blamed if late else place
        if place is None or not self._accounts_for_all(plain):
            return None
        module = self.situation.subject.module
        return proven(module, lambda seed: self._gaps(plain.program, seed, place, late))

    def _gaps(self, program: Program, seed: int, place: Operation, late: bool) -> tuple[float, float]:
        """How far the user's code is from a program with the right values put in, and without."""
        values = self.values(seed)
        want = program(values)
        right = want if late else program.merged(values)
        patched = self._run(seed, {place.index: _put(right, self.layout)})
        return difference_of(want, patched), difference_of(want, self._run(seed, {}))

    def difference(self, program: Program) -> float:
        """How far the user's code is from a program, relative to the largest value, with parameters drawn anew."""
        module = self.situation.subject.module
        with kept_parameters(module), torch.no_grad():
            redraw(module, 9)
            try:
                return difference_of(program(self.values(1)), self._run(1, {}))
            except NOT_ITS_SIZE:
                return math.inf

    def values(self, seed: int) -> Values:
        """Give what a program computes from, with fresh inputs."""
        _, _, copies = self.situation.call.fresh(seed)
        return self.layout.values(self.situation.call, copies)

    def _run(self, seed: int, patches: Mapping[int, Patch]) -> Tensor:
        run = self.situation.call.run(patches, seed=seed, read=False)
        return self.layout.tokens(run.output).double()

    def _around(self, path: str) -> tuple[Operation | None, int]:
        """What gives the averaged values to the output projection, or back, and the first operation behind that."""
        run = self.situation.found.run
        calls = [call for call in run.recorder.calls if call.path == path and path]
        taken, before, end = self.layout.output(run.output), len(run.operations), len(run.operations)
        if calls:
            taken, before, end = calls[0].inputs[0], calls[0].first, calls[0].end
        made = (op for op in reversed(run.operations[:before]) if any(slot.tensor is taken for slot in op.outputs))
        return next(made, None) if len(calls) == bool(path) else None, end

    def _accounts_for_all(self, plain: Plain) -> bool:
        """Whether all that takes part in the user's code is in the program: parameters, and other arguments."""
        situation = self.situation
        learnt = self.parameters.named.keys() - {*unused_parameters(situation.found.run, situation.subject.module)}
        others = [x for _, x in situation.call.tensors if x.is_floating_point() and id(x) not in situation.call.seeds]
        return learnt <= plain.used and not others


def _put(right: Tensor, layout: Layout) -> Patch:
    """A patch that gives numbers, (b, q, features), in the layout of what they stand for."""

    def patch(recorder: Recorder, operation: Operation) -> Tensor:
        stand_in = operation.outputs[0].value
        if stand_in.numel() != right.numel():
            return stand_in
        if stand_in.dim() == 2:
            return right.reshape(stand_in.shape)
        places = layout.outward(torch.arange(stand_in.numel(), dtype=torch.float64).view(stand_in.shape)).long()
        flat = torch.empty(stand_in.numel(), dtype=right.dtype)
        flat[places.reshape(-1)] = right.reshape(-1)
        return flat.view(stand_in.shape)

    return patch
