"""Scores and weights of different heads that are mixed with one another, as talking heads and DeepViT do."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.checker.engine.same import near
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS, SOFTMAXES
from equivalence_tests.checker.engine.watching import ModuleCall, Operation
from equivalence_tests.checker.equivalent.expressions import Attended, Called, Expression, Mapped, Values
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.watched import Watched


@dataclass(frozen=True)
class Mixed(Mapped):
    """What is laid out as (batch, heads, query, key), its heads multiplied by a matrix that is a parameter."""

    def _of(self, values: Values) -> Tensor:
        matrix = values.learnt(self.name)
        return (self.inner(values).movedim(1, -1) @ (matrix.mT if self.transposed else matrix)).movedim(-1, 1)


@dataclass(frozen=True)
class CalledOnHeads(Called):
    """A sub-module of the user's that is given (batch, heads, query, key), or the heads last."""

    heads_last: bool = False

    def _of(self, values: Values) -> Tensor:
        given = self.inner[0](values)
        if not self.heads_last:
            return values.called(self.path, [given], {})
        return values.called(self.path, [given.movedim(1, -1)], {}).movedim(-1, 1)


def mixes_of(watched: Watched) -> tuple[Expression | None, Expression | None]:
    """Read what mixes the scores, and what mixes the weights; None for what does not.

    Raises:
        UnreadError: If it is made of anything but matrices and sub-modules.
    """
    attention, heads = watched.judgement.attention, len(watched.judgement.attention.parts[0].table.heads)
    departures = (one for one in watched.found.departures[0] if one.name == "heads_mixed")
    mixing = sorted({index for one in departures for index in one.patches})
    steps = (operation for part in attention.parts for operation, _, _ in part.steps(watched.found.run))
    softmax = next((one.index for one in steps if one.name in SOFTMAXES), -1)
    found: list[Expression | None] = [None, None]
    read = set[int]()
    for operation in (watched.operations[index] for index in mixing):
        call, place = watched.call_around(operation.index), int(operation.index > softmax)
        first = operation.index if call is None else call.first
        if first not in read:
            inner = found[place] or Attended()
            found[place] = _by_matrix(watched, operation, inner) if call is None else _by_call(call, inner, heads)
            read.add(first)
    return found[0], found[1]


def _by_call(call: ModuleCall, inner: Expression, heads: int) -> Expression:
    return CalledOnHeads(call.path, (inner,), heads_last=call.inputs[0].size(1) != heads)


def _by_matrix(watched: Watched, operation: Operation, inner: Expression) -> Expression:
    names = [watched.learnt[slot.key] for slot in operation.inputs if slot.key in watched.learnt]
    data = [slot.value.detach() for slot in operation.inputs if slot.key not in watched.learnt]
    given = operation.outputs[0].value.detach()
    matrix = watched.parameters.named[names[0]].detach() if names else torch.zeros(0)
    if operation.name in CONTRACTIONS and len(names) == len(data) == 1 and matrix.dim() == 2:
        for axis, transposed in itertools.product((1, -1), (False, True)):
            rows, factor = data[0].movedim(axis, -1), matrix.mT if transposed else matrix
            if rows.size(-1) == len(factor) and near((rows @ factor).movedim(-1, axis), given):
                return Mixed(names[0], inner, transposed)
    raise UnreadError("what mixes its heads is neither a matrix nor a sub-module")
