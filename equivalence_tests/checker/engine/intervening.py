"""Put the right values in, let the user's code go on, and see whether torch's numbers come out."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equivalence_tests.checker.engine.anchors import Run, attentions_of
from equivalence_tests.checker.engine.codes import looked_up
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.expectation import ExpectedFor
from equivalence_tests.checker.engine.contracts.formula import context_by_formula
from equivalence_tests.checker.engine.judging import Judgement, judge
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.watching import Operation, Patch, Recorder
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import Proof

__all__ = ["Examination", "examine", "prove", "reference"]

ROUNDS = 8
INPUTS = 20
MANY = 1500  # operations: a run of more is repeated on fewer inputs


@dataclass(eq=False)
class Examination:
    """All judgements of one call.

    Args:
        call: What was run.
        run: The last run, with what blocks the reading put right.
        judgements: One for each attention of that run.
        departures: What was found in each attention, in the order in which it was found.
        patches: What had to be put right before the rest could be read.
    """

    call: Call
    run: Run
    judgements: list[Judgement] = field(default_factory=list)
    departures: list[list[Departure]] = field(default_factory=list)
    patches: dict[int, Patch] = field(default_factory=dict)


def examine(call: Call, expected: ExpectedFor | None = None) -> Examination:
    """Find the attentions of a call, judge each, and put right what keeps the rest from being read.

    Args:
        call: What to run.
        expected: Says what is known about the masks.
    """
    expected = expected or ExpectedFor()
    names: dict[int, Tensor] = {}
    found = Examination(call, call.run())
    for _ in range(ROUNDS):
        judgements = [judge(a, expected.of(a)) for a in attentions_of(found.run)]
        _keep(found, judgements)
        fresh = [d for j in judgements for d in j.departures if d.blocks and not set(d.patches) <= set(found.patches)]
        if not fresh:
            break
        for departure in fresh:
            found.patches.update(departure.patches)
            names.update(departure.names)
        found.run = call.run(found.patches, names)
    return found


def _keep(found: Examination, judgements: list[Judgement]) -> None:
    """Add what is new: the attentions are those of the run before, in the same order."""
    if len(judgements) < len(found.judgements):
        return
    found.judgements = judgements
    while len(found.departures) < len(judgements):
        found.departures.append([])
    for judgement, kept in zip(judgements, found.departures, strict=True):
        now = {_place(departure) for departure in judgement.departures}
        kept[:] = [d for d in kept if not d.blocks or d.patches or _place(d) in now]  # what only followed is gone
        old = {_place(departure) for departure in kept}
        kept += [departure for departure in judgement.departures if _place(departure) not in old]


def _place(departure: Departure) -> tuple[object, ...]:
    return departure.name, departure.lines


def prove(found: Examination, place: int, inputs: int = INPUTS) -> list[Proof | None]:
    """Show for each departure of one attention that putting it right is needed, and that all together are enough.

    Args:
        found: The examination.
        place: Which attention.
        inputs: On how many fresh inputs.
    """
    departures, judgement = found.departures[place], found.judgements[place]
    if len(judgement.hidden) < len(judgement.attention.parts) or judgement.blocked() or judgement.turned:
        return [None] * len(departures)
    count = inputs if len(found.run.operations) < MANY else 2
    right = {**_all(departures), **reference(judgement)}
    errors, without = 0.0, [0.0] * len(departures)
    for seed in range(1, count + 1):
        want = _outputs(found.call, right, seed)
        errors = max(errors, _distance(_outputs(found.call, _all(departures), seed), want))
        for i in range(len(departures)):
            left = _all(departures[:i] + departures[i + 1 :])
            without[i] = max(without[i], _distance(_outputs(found.call, left, seed), want))
    return [Proof(errors, alone, count) if d.patches else None for d, alone in zip(departures, without, strict=True)]


def _all(departures: list[Departure]) -> dict[int, Patch]:
    """What puts them all right; of two patches of one operation, the later."""
    return {index: patch for departure in departures for index, patch in departure.patches.items()}


def _outputs(call: Call, patches: dict[int, Patch], seed: int) -> list[Tensor]:
    return [x.double() for x in tensors_in((call.run(patches, seed=seed, read=False).output,))]


def _distance(have: list[Tensor], want: list[Tensor]) -> float:
    """The greatest difference of the first output, relative to its largest value."""
    if not have or not want or have[0].shape != want[0].shape:
        return float("inf")
    x, y = have[0].nan_to_num(0.0), want[0].nan_to_num(0.0)
    return float((x - y).abs().max() / y.abs().max().clamp_min(1e-30))


def reference(judgement: Judgement, dtype: torch.dtype = torch.float64) -> dict[int, Patch]:
    """Torch's own formula in the place of what reaches the end of an attention.

    Args:
        judgement: Of that attention.
        dtype: In which the formula is computed.
    """
    attention = judgement.attention
    names = attention.names
    if names is None or len(attention.context_sources) == 0:
        return {}

    def patch(recorder: Recorder, operation: Operation) -> Tensor:
        made = context_by_formula(recorder, attention, judgement.operands, judgement.hidden, dtype)
        want = looked_up(names, *made)
        return torch.where(want.isnan(), operation.outputs[0].value.double().view(names.shape), want)

    return {attention.end.index: patch}
