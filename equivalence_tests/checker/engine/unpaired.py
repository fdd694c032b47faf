"""What mixes tokens without a weight for each pair of them: linear attention, and pooling. Said, and held to a rule.

Neither has a twin in torch.nn. But the weights of an average sum to one: with values that are all alike, each token of
a linear attention gives the same, and a pooling gives the same for any number of equal tokens.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import feature_of, token_of
from equivalence_tests.checker.engine.names import Run, Source
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import SINGLE, near
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES, WEIGHS
from equivalence_tests.checker.engine.watching import Operation, Slot
from equivalence_tests.checker.reach.calling import from_layout
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.lines import code_lines
from equivalence_tests.checker.reporting.report import Report

LENGTHS = (5, 7)
POOLING = "attention pooling"


def judge_linear(report: Report, situation: Situation) -> None:
    """Say of what averages values without weights that it does, and whether it divides by the right sum."""
    run = situation.found.run
    weighed = any(operation.name in WEIGHS for operation in run.operations)
    if not run.names.across and (weighed or not run.names.products):
        return
    output = list(tensors_in((run.output,)))[situation.plan.output]
    every = (_Linear(run, *values, Slot(output, output), situation.plan.layout) for values in _projected(run))
    found = next((one for one in every if one.averages), None)
    if found is None:
        return
    report.reason = (
        f"It is a linear attention: the output is a sum of the values of {_line(found.made)}, and no weights of single "
        "tokens are computed that could be compared with torch's softmax."
    )
    if (divides := found.divides()) is not None:
        whole = found.is_whole()
        report.verdict = report.verdict if whole else "deviates"
        report.reason += f" Divided in {_line(divides)}, the weights of a query {'' if whole else 'do not '}sum to one."


def _projected(run: Run) -> Iterator[tuple[Source, Tensor]]:
    """What weights project, and the elements of it that may be values: all, or those of a third of the weight."""
    for source in run.names.sources.values():
        if source.kind == "projection" and source.operation is not None:
            feature = feature_of(run.names.plain(source.codes))
            third = feature * 3 // (int(feature.max()) + 1)
            yield from ((source, mine) for mine in (third >= 0, third == 2, third == 1, third == 0))


class _Linear:
    """A run as a function of what may be its values: the recording is run again on others."""

    def __init__(self, run: Run, source: Source, mine: Tensor, output: Slot, layout: str) -> None:
        self.run, self.source, self.mine, self.output, self.layout = run, source, mine, output, layout
        assert source.operation is not None  # it is a projection
        self.made: Operation = source.operation
        self.own = source.slot.value

    def _given(self, values: Tensor, slot: Slot | None = None, until: int | None = None) -> Tensor | None:
        given = torch.where(self.mine, values, self.own)
        last = len(self.run.operations) - 1 if until is None else until
        return replayed(self.run.recorder, {self.source.slot.key: given}, self.made.index, slot or self.output, last)

    @property
    def averages(self) -> bool:
        """Whether the output is linear in the values, and those of one token reach more of it than one token."""
        tokens = token_of(self.run.names.plain(self.source.codes))
        first = torch.where(tokens == tokens.min(), -1.5 * self.own, self.own)
        found = [self._given(x) for x in (0 * self.own, self.own, 2 * self.own, first)]
        none, once, twice, other = (x.double() if x is not None else torch.zeros(()) for x in found)
        linear = near(twice - none, 2 * (once - none), SINGLE) and not near(once, none, SINGLE)
        reached = (other - once).abs() > SINGLE * once.abs().max()
        return linear and int(reached.sum()) * len(tokens.unique()) > once.numel()

    def divides(self) -> Operation | None:
        """What divides a sum of values by numbers of its own."""
        for operation in self.run.operations[self.made.index + 1 :]:
            if operation.name == "div" and operation.inputs[-1].value.numel() > 1:
                taken = [self._given(2 * self.own, slot, operation.index - 1) for slot in operation.inputs]
                if len(taken) == 2 and taken[0] is not None and taken[1] is None:
                    return operation
        return None

    def is_whole(self) -> bool:
        """Whether values that are all alike give the same everywhere."""
        none, ones = self._given(0 * self.own), self._given(torch.ones_like(self.own))
        assert none is not None  # the output follows the values
        assert ones is not None
        apart = from_layout(ones - none, self.layout)
        return near(apart, apart[:1, :1].expand(apart.shape), 1e-2)


def judge_pooling(subject: Subject) -> Report | None:
    """Say of what gives one vector for each sample that it pools, after giving it equal tokens; None if it does not."""
    for few, many in zip(*(_arguments(subject, length) for length in LENGTHS), strict=True):
        call, longer = (Call(subject.function, given, module=subject.module) for given in (few, many))
        run = attempt(partial(call.run, read=False))
        weighs = next((op for op in run.operations if op.name in SOFTMAXES), None) if run is not None else None
        other = attempt(partial(longer.run, read=False)) if weighs is not None else None
        if run is None or weighs is None or other is None:
            continue
        one, two = (next(tensors_in((ran.output,))) for ran in (run, other))
        if one.shape == two.shape and one.dim() == 2 and len(one) == subject.sizes.batch:
            return _pooled(subject, weighs, "one vector of each sample comes back", near(one, two, SINGLE))
        if [x.numel() for x in (one, two)] == [subject.sizes.batch * length for length in LENGTHS]:
            sums = one.reshape(subject.sizes.batch, -1).sum(-1)
            return _pooled(subject, weighs, "their weights alone come back", near(sums, torch.ones_like(sums), SINGLE))
    return None


def _arguments(subject: Subject, length: int) -> Iterator[tuple[Tensor, ...]]:
    """Tokens that are all equal; or a query for each sample and these, in either order, with a mask that hides none."""
    batch, generator = subject.sizes.batch, torch.Generator().manual_seed(1)
    drawn = {n: torch.randn(2, batch, n, generator=generator, dtype=torch.float64) for n in _widths(subject)}
    token, query = ({n: x[i].to(subject.dtype) for n, x in drawn.items()} for i in (0, 1))
    required = sum(p.default is p.empty for p in parameters_of(subject.function))
    keep = (torch.ones(batch, length, dtype=torch.bool),) * (required == 3)
    for one, other, axis in itertools.product(drawn, drawn, (1, 0)):
        tokens = torch.stack([token[one]] * length, axis)
        if required > 1:
            yield from ((query[other], tokens, *keep), (tokens, query[other], *keep))
        elif one == other:
            yield (tokens,)


def _widths(subject: Subject) -> list[int]:
    """The widths that the inputs may have: of the tokens, or what a linear takes in, of two side by side in parts."""
    width, modules = subject.sizes.embed_dim, [] if subject.module is None else list(subject.module.modules())
    taken = [m.in_features for m in modules if isinstance(m, torch.nn.Linear)]
    parts = [part for n in taken for part in (n, n - width, n // 2)]
    return [n for n in dict.fromkeys([width, *parts]) if n > 0]


def _pooled(subject: Subject, weighs: Operation, gives: str, whole: bool) -> Report:
    report = Report(subject.name, POOLING)
    report.reason = (
        f"It is a pooling: {_line(weighs)} weighs tokens, and {gives}. torch.nn has none that it could be compared "
        "with."
    )
    over = weighs.inputs[0].value.size(weighs.argument(1, "dim", -1))
    if over != LENGTHS[0] and not whole:
        report.verdict = "deviates"
        report.reason += (
            f" Its softmax runs over an axis of length {over}, not over the tokens: their weights do not sum to one, "
            "and more tokens that are all equal give another vector."
        )
    return report


def _line(operation: Operation) -> str:
    line = code_lines(operation.frames)[-1]
    return f"line {line.number} (`{line.text}`)"
