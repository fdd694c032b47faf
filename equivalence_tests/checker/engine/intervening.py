"""Put the right values in, let the user's code go on, and see whether torch's numbers come out."""

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import known, looked_up, place_of, source_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.formula import context_by_formula
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.names import Part, Run
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.engine.same import EXACT, FLOAT32_INSIDE, SINGLE, distance
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation, Patch, Recorder
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import ROUNDING, Proof

INPUTS = 20
FLOAT32 = torch.finfo(torch.float32).eps
MANY = 1500  # operations: a run of more is repeated on fewer inputs


def prove(found: Examination, place: int) -> list[Proof | None]:
    """Show for each departure of one attention that putting it right is needed, and that all together are enough."""
    departures, judgement = found.departures[place], found.judgements[place]
    unread = len(judgement.hidden) < len(judgement.attention.parts) or judgement.blocked() or judgement.values_rotated
    returned = next(tensors_in((found.run.output,)), None)
    if unread or returned is None or not any(departure.patches for departure in departures):
        return [None] * len(departures)
    count = INPUTS if len(found.run.operations) < MANY else 2
    rounding = FLOAT32_INSIDE if _is_single(judgement) else ROUNDING
    right = {**_all(departures), **reference(judgement, _is_biased(judgement, departures))}
    errors, without = 0.0, [0.0] * len(departures)
    for seed in range(1, count + 1):
        want = _output(found.call, right, seed)
        errors = max(errors, distance(_output(found.call, _all(departures), seed), want))
        for i in (i for i, departure in enumerate(departures) if departure.patches):
            left = _all(departures[:i] + departures[i + 1 :])
            without[i] = max(without[i], distance(_output(found.call, left, seed), want))
    pairs = zip(departures, without, strict=True)
    return [Proof(errors, alone, count, rounding) if one.patches else None for one, alone in pairs]


def _is_single(judgement: Judgement) -> bool:
    """Whether a part is computed in float32, or the root of the width was, which the scores are multiplied by."""
    operands = any(operand.single for own in judgement.operands for operand in own)
    widths = (part.product.left.size(-1) for part in judgement.attention.parts)
    apart = (abs(model.factor * width**0.5 - 1) for model, width in zip(judgement.models, widths, strict=False))
    return operands or any(model.single for model in judgement.models) or any(EXACT < x < FLOAT32 for x in apart)


def _is_biased(judgement: Judgement, departures: list[Departure]) -> bool:
    """Whether something is added to the scores that is put right, or that is right, as no mask is at fault."""
    if any(departure.stage == "bias" and departure.patches for departure in departures):
        return True
    added = (model.bias[model.live & ~model.hidden] for model in judgement.models)
    is_right = not any(departure.stage in ("mask", "bias") for departure in departures)
    return is_right and any(bool((bias.abs() > SINGLE).any()) for bias in added)


def _all(departures: list[Departure]) -> dict[int, Patch]:
    """What puts them all right; of two patches of one operation, the later."""
    return {index: patch for departure in departures for index, patch in departure.patches.items()}


def _output(call: Call, patches: dict[int, Patch], seed: int) -> Tensor:
    """The first output, with 0 for what is no number."""
    return next(tensors_in((call.run(patches, seed=seed, read=False).output,))).double().nan_to_num(0.0)


def reference(judgement: Judgement, biased: bool = False) -> dict[int, Patch]:
    """Torch's own formula in the place of what reaches the end of an attention; with what is added to the scores."""
    attention, names = judgement.attention, judgement.attention.names
    if names is None or not attention.context_sources:
        return {}
    factors = [[operand.factor for operand in own] for own in judgement.operands]

    def patch(recorder: Recorder, operation: Operation) -> Tensor:
        added = [_added(recorder, part, attention.run) if biased else 0.0 for part in attention.parts]
        made = context_by_formula(recorder, attention, factors, judgement.hidden, added)
        want = looked_up(names, *made)
        return torch.where(want.isnan(), operation.outputs[0].value.double(), want)

    return {attention.end.index: patch}


def _added(recorder: Recorder, part: Part, run: Run) -> Tensor | float:
    """What reaches the softmax where the product of queries and keys is 0, in the order of the scores."""
    steps = (operation.index for operation, _, _ in part.steps(run) if operation.name in SOFTMAXES)
    index, made = next(steps, None), recorder.operations[part.product.operation.index]
    codes = None if index is None else run.names.before[index][0]
    if index is None or codes is None:
        return 0.0
    start = {made.outputs[0].key: torch.zeros_like(made.outputs[0].value)}
    given = replayed(recorder, start, made.index, recorder.operations[index].inputs[0], index - 1)
    flat = torch.zeros(made.outputs[0].value.numel(), dtype=torch.float64)
    if given is not None:
        own = known(codes) & (source_of(codes) == part.number)
        flat[place_of(codes)[own]] = given[own].double()
    return flat
