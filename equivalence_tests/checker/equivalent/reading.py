"""Read somebody's attention into a program."""

import functools
import itertools
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from equivalence_tests.checker.engine.judgement import Judgement, WeightsModel
from equivalence_tests.checker.engine.names import Part
from equivalence_tests.checker.engine.running import Examination
from equivalence_tests.checker.engine.same import near
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.equivalent.biases import Bias, Visible, read_bias
from equivalence_tests.checker.equivalent.expressions import Attended, Expression, Learnt, Made, of_kind
from equivalence_tests.checker.equivalent.mixing import mixes_of
from equivalence_tests.checker.equivalent.operands import OperandReader, Projection
from equivalence_tests.checker.equivalent.parameters import Affine, order_of, snapped
from equivalence_tests.checker.equivalent.program import Output, Program
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.watched import SINGLE, Layout, Tracer, Watched
from equivalence_tests.checker.reach.arguments import ROLES

NOT_READ = (RuntimeError, IndexError, KeyError, ValueError, TypeError)  # of shapes that no part of the reading expects
SEVERAL = "more than one attention runs in it"
NOTHING = Output(torch.zeros(0, dtype=torch.long), None, around=Attended())


def read(found: Examination, layout: Layout) -> tuple[Program, float]:
    """Read the one attention of a call.

    Returns:
        The program, and what differs by less than rounding in it, relative to the largest value.

    Raises:
        UnreadError: If there is not one, or if it is made of anything that an equivalent has no part for.
    """
    if len(found.judgements) != 1:
        raise UnreadError(SEVERAL if found.judgements else "no attention runs in it")
    try:
        return _read(Watched(found, layout))
    except NOT_READ as error:
        raise UnreadError(f"its shapes could not be followed ({type(error).__name__}: {error})") from error


def _read(watched: Watched) -> tuple[Program, float]:
    reader = OperandReader(watched)
    query, key, value = (reader.read(role) for role in ROLES)
    if any(one.change.rotation is not None and one.change.rotation.single for one in reader.found.values()):
        watched.tolerance = SINGLE
    why, mixes = UnreadError(""), mixes_of(watched)
    for scale, bias in _scores(reader, query, key):
        cap = _cap(watched.judgement)
        program = Program(query, key, value, scale, bias, NOTHING, cap, gain=reader.gain, sink=reader.sink, mixes=mixes)
        with torch.no_grad():
            averaged = program.merged(watched.values).flatten(0, 1)
        try:
            output = EndReader(watched, averaged).read()
        except UnreadError as error:
            why = error
            continue
        return replace(program, output=output), watched.tolerance
    raise why


def _scores(reader: OperandReader, query: Projection, key: Projection) -> list[tuple[float, Bias]]:
    """What the scores are multiplied by and what is added; where no scores are seen, as in tiles, what it may be."""
    models, attention = reader.watched.judgement.models, reader.watched.judgement.attention
    with torch.no_grad():
        lengths = query.projected(reader.values).size(2), key.projected(reader.values).size(2)
    usual = query.weight.size(1) ** -0.5 / query.number / key.number
    reader.sink = _sink(reader)
    if not models or (reader.sink is None and any((one.kind, one.axis) == ("softmax", "") for one in models)):
        return [(usual, Bias()), (usual, Bias(Visible(0)))]
    if not any(model.has_choice for model in models):  # one key each: its weight is 1
        return [(usual, Bias())]
    reader.gain = _gain(reader)
    factors = torch.cat([_factors(model, reader, part) for model, part in zip(models, attention.parts, strict=False)])
    if float((factors / factors[0] - 1).abs().max()) > 1e-6:
        raise UnreadError("heads multiply their scores by different numbers")
    measured = float(factors[0])
    if any(model.cap for model in models) and abs(measured / usual - 1) <= 1e-6:  # read off a tanh
        measured = usual
    return [(_scale(measured, usual, reader.watched), read_bias(reader, lengths))]


def _gain(reader: OperandReader) -> Expression | None:
    """What the code learns to multiply all scores by, or those of each head; None for nothing."""
    watched, found = reader.watched, list[Expression]()
    factors = ((op, x) for op, x in _beside_scores(reader, ("mul", "div")) if x.numel() in (1, len(reader.heads)))
    for operation, one in factors:
        with suppress(UnreadError):  # else it is no parameter, and may be a number
            made = Tracer(watched).read(one, operation.index)
            named = [watched.parameters.named[x.name] for x in of_kind(Learnt, made)]
            if any(x.requires_grad for x in named):
                found.append(made if operation.name == "mul" else Made("reciprocal", (made,)))
    return functools.reduce(lambda one, other: Made("product", (one, other)), found) if found else None


def _sink(reader: OperandReader) -> Expression | None:
    """What the code learns to put beside the scores of each head before their softmax; None for nothing."""
    for operation, one in _beside_scores(reader, ("cat", "concat")):
        with suppress(UnreadError):
            made = Tracer(reader.watched).read(one, operation.index)
            if isinstance(made, Learnt):
                return made
    return None


def _beside_scores(reader: OperandReader, names: Collection[str]) -> Iterator[tuple[Operation, Tensor]]:
    """List the tensors that such functions take beside the scores, before the softmax."""
    watched, run = reader.watched, reader.watched.found.run
    steps = (operation for operation, _, _ in reader.slices[0].part.steps(run))
    for operation in itertools.takewhile(lambda one: one.name not in SOFTMAXES, steps):
        pairs = zip(watched.operations[operation.index].inputs, run.names.before[operation.index], strict=True)
        others = [slot.tensor for slot, codes in pairs if codes is None]
        if operation.name in names and len(others) == 1:
            yield operation, others[0]


def _scale(measured: float, usual: float, watched: Watched) -> float:
    """The scale as it will have been written: the usual one, or that with a root that was rounded to float32."""
    if (exact := snapped(measured, usual, watched.tolerance)) == usual:
        return exact
    single = torch.tensor(usual, dtype=torch.float64).pow(-2).float().sqrt().double()
    rounded = (1 / float(single), float(torch.tensor(usual, dtype=torch.float32)), float(1 / single.float()))
    if any(snapped(measured, one, watched.tolerance) == one for one in rounded):
        watched.tolerance = SINGLE
        return usual
    return measured


def _cap(judgement: Judgement) -> float:
    caps = {model.cap for model in judgement.models}
    if len(caps) > 1:
        raise UnreadError("heads cap their scores at different numbers")
    cap = caps.pop() if caps else 0.0
    written = round(cap, 6)
    return written if abs(cap - written) <= 1e-6 * abs(cap) else cap  # read off a tanh, not to the last digits


def _factors(model: WeightsModel, reader: OperandReader, part: Part) -> Tensor:
    """What the scores of each head of a part are multiplied by, beside what is learnt; none where nothing is chosen."""
    if not model.has_choice:
        return torch.zeros(0)
    if model.kind != "softmax" or model.axis != ("keys" if reader.sink is None else ""):
        raise UnreadError(f"its weights are not a softmax over the keys ({model.kind} over {model.axis or 'nothing'})")
    if bool(model.replaced.any()):
        raise UnreadError("its scores are replaced")
    factors = torch.full_like(model.bias, model.factor) if model.by_head is None else model.by_head
    laid = part.product.contraction.result(factors)
    own = (one for one in reader.slices if one.part is part)
    heads = {reader.heads.index(one.head): laid[one.number][one.rows].flatten()[0] for one in own}
    with torch.no_grad():
        gain = torch.ones(1) if reader.gain is None else reader.gain(reader.values).flatten()
    return torch.stack([number / gain[head % len(gain)] for head, number in heads.items()])


class EndReader:
    """Reads what stands behind the averaged values of all heads, side by side, (tokens, heads * head_dim)."""

    def __init__(self, watched: Watched, averaged: Tensor) -> None:
        self.watched, self.averaged = watched, averaged
        self.final = watched.layout.output(watched.returned)
        self.projection: Affine | None = None

    def read(self) -> Output:
        """Read it.

        Raises:
            UnreadError: If what comes back is made of the averaged values in a way that is not known.
        """
        around = Tracer(self.watched, self._is_projection).read(self.final, len(self.watched.operations))
        if self.projection is None:
            raise UnreadError("what is returned is not made from the averaged values")
        return Output(self.projection.weight, self.projection.bias, self.projection.factor, around=around)

    def _is_projection(self, tensor: Tensor, operation: Operation) -> bool:
        """Whether a tensor is a projection of the averaged values, or holds these as they are."""
        if operation.index < self.watched.judgement.attention.last.index:
            return False
        positions = self._positions(tensor, operation)
        if positions is None or len(positions) != len(self.averaged):
            return False
        values = tensor.detach().reshape(-1)[positions].double()
        found = self._projected(tensor.reshape(-1)[positions[-1]], values) or self._as_they_are(values)
        self.projection = found or self.projection
        return found is not None

    def _positions(self, tensor: Tensor, operation: Operation) -> Tensor | None:
        """Lay it out as what comes back, or by its names."""
        if tensor.shape == self.final.shape:
            numbers = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
            return self.watched.layout.outward(numbers).flatten(0, -2).long()
        return self.watched.positions(tensor, operation)

    def _projected(self, elements: Tensor, values: Tensor) -> Affine | None:
        """Read the rows of a projection, one for each feature of the last token; they have to give all tokens."""
        parameters, tolerance = self.watched.parameters, self.watched.tolerance
        found = parameters.projection(elements, self.averaged[-1], tolerance)
        if found is None:
            return None
        with torch.no_grad():
            given = found.of(self.averaged, parameters)
        return found if near(given, values, 100 * tolerance) else None

    def _as_they_are(self, have: Tensor) -> Affine | None:
        """Find which averaged value each feature is."""
        want = self.averaged
        if have.size(-1) != want.size(-1):
            return None
        order = order_of(have, want)
        close = near(have, want[:, order], 10 * self.watched.tolerance)
        return Affine(order, None) if close and len(order.unique()) == len(order) else None
