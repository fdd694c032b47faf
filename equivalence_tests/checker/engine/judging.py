"""Find the attentions of a call, and compare each with torch's formula, stage by stage."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.changing import context_departures, rotated_back, side_departures
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.formula import tile_departures
from equivalence_tests.checker.engine.contracts.layout import layout_departures
from equivalence_tests.checker.engine.contracts.merging import merge_departures
from equivalence_tests.checker.engine.contracts.operands import operand_departures, read_operands
from equivalence_tests.checker.engine.contracts.scores import Scores
from equivalence_tests.checker.engine.contracts.scores_table import causal_pattern, hidden_by_formula, padded_queries
from equivalence_tests.checker.engine.contracts.weights import read_weights
from equivalence_tests.checker.engine.judgement import Expectation, Expecting, Judgement, Operand
from equivalence_tests.checker.engine.names import Attention, Part, Run
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.engine.vocabulary import ADDS, FILLS, MOVES, MULTIPLIES, WEIGHS, words
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.mistakes import MISTAKES

ROUNDS = 8
# The stages from the product of queries and keys to the averaged values.
WEIGHING = ("scale", "scores", "mask", "softmax", "context")
# What makes features of queries and keys, for an attention that is intended to be linear.
FEATURES_OF = words("elu relu softplus gelu silu selu celu")


def judge(attention: Attention, expected: Mapping[int, Expectation]) -> Judgement:
    """Compare an attention with torch's formula."""
    found = Judgement(attention)
    found.departures += layout_departures(attention)
    if not found.blocked() and attention.tiled:
        _judge_tiles(found, expected)
    elif not found.blocked():
        _judge_stages(found, expected)
    found.departures += side_departures(attention)
    found.departures = _once(found.departures)
    return found


def _judge_stages(found: Judgement, expected: Mapping[int, Expectation]) -> None:
    attention = found.attention
    for part in attention.parts:
        _judge_part(found, part, expected.get(part.number, Expectation()))
    if found.blocked():
        return
    averaged = list(_of_context(found, expected))  # which may explain what was found before
    found.departures += averaged
    # Where the values are weighed by exponentials and divided by their sum later, no weights can be compared.
    divided_later = any(model.kind == "softmax" and not model.axis for model in found.models)
    if divided_later and not any(tile_departures(attention, found.operands, expected)):
        found.departures = [departure for departure in found.departures if departure.stage not in WEIGHING]
    found.departures += merge_departures(attention)


def _of_context(found: Judgement, expected: Mapping[int, Expectation]) -> Iterator[Departure]:
    """Judge the averaged values; values that are rotated like the keys, and back once averaged, are intended."""
    attention = found.attention
    rotated = [departure for departure in found.departures if departure.name == "rotary_values"]
    back = rotated_back(attention) if rotated and len(attention.parts) == 1 else False
    if isinstance(back, Departure):
        yield back
    elif not back:
        yield from context_departures(attention, padding_of(attention, expected))
    if back:
        found.values_rotated, said = True, "values are rotated as the keys are, and their average is rotated back"
        found.departures = [replace(one, evidence=said) if one in rotated else one for one in found.departures]


def padding_of(attention: Attention, expected: Mapping[int, Expectation]) -> Tensor:
    """Give the tokens that are padding, as far as the masks are known."""
    masks = ((part, expected[part.number].may) for part in attention.parts if part.number in expected)
    padding = [padded_queries(part, may) for part, may in masks if may is not None]
    return torch.cat([*padding, torch.zeros(0, dtype=torch.long)])


def _judge_tiles(found: Judgement, expected: Mapping[int, Expectation]) -> None:
    """Judge tiles, which only together hold all weights of a query, by the output; not those that share one softmax."""
    attention = found.attention
    for part in attention.parts:
        _judge_operands(found, part)
    if not found.departures and not attention.beside:
        found.departures += tile_departures(attention, found.operands, expected)
    found.departures += merge_departures(attention)


def _judge_operands(found: Judgement, part: Part) -> list[Operand]:
    operands = read_operands(found.attention, part)
    found.operands.append(operands)
    found.departures += operand_departures(found.attention, part, operands)
    return operands


def _judge_part(found: Judgement, part: Part, expected: Expectation) -> None:
    operands = _judge_operands(found, part)
    model = read_weights(found.attention.run, part, part.contexts[0])
    found.models.append(model)
    found.departures += Scores(found.attention, part, operands, model, expected).departures()
    pattern = causal_pattern(part, model.hidden | model.replaced, model.live)
    pattern = next((d.name for d in found.departures if d.name.startswith("causal")), pattern)
    found.hidden.append(hidden_by_formula(part, model.hidden, expected.may, pattern))


def _once(departures: list[Departure]) -> list[Departure]:
    """Merge the same departure, with its patches, where several parts, or queries and keys, have it in one line."""
    kept: dict[tuple[object, ...], Departure] = {}
    for departure in departures:
        of_both = departure.stage == "rotary" and not departure.facts
        place = departure.name, () if of_both else departure.lines[:1]
        kept[place] = kept[place].also(departure) if place in kept else departure
    return list(kept.values())


def examine(call: Call, expecting: Expecting | None = None) -> Examination:
    """Find the attentions of a call and judge each, patching what keeps the rest from being read."""
    names: dict[int, Tensor] = {}
    found = Examination(call, call.run())
    for _ in range(ROUNDS):
        judgements = [judge(a, expecting(a) if expecting is not None else {}) for a in attentions_of(found.run)]
        _keep(found, judgements)
        fresh = [d for j in judgements for d in j.departures if d.blocks and not set(d.patches) <= set(found.patches)]
        if not fresh:
            break
        for departure in fresh:
            found.patches.update(departure.patches)
            names.update(departure.names)
        found.run = call.run(found.patches, names)
    return found


def attentions_of(run: Run) -> list[Attention]:
    """Find the attentions of a run, in the order in which they end.

    Products that nothing weighs are left out, unless nothing weighs anywhere: then the softmax was forgotten.
    """
    numbered = ((product, product.source.number) for product in run.names.products if product.source is not None)
    made = ((product, [c for c in run.names.contexts if number in c.score_sources]) for product, number in numbered)
    parts = [Part(product, contexts) for product, contexts in made if contexts]
    weighed = any(operation.name in WEIGHS for operation in run.operations)
    found: dict[int, Attention] = {}
    for part in parts:
        if any(step.name in WEIGHS for step, _, _ in part.steps(run)) if weighed else _only_scaled(run, part):
            operation, names = _end_of(run, part)
            found.setdefault(operation.index, Attention(run, [], operation, names)).parts.append(part)
    return [found[index] for index in sorted(found)]


def _only_scaled(run: Run, part: Part) -> bool:
    """Whether the values meet nothing but scaled scores, or a function of them, masked too, in the softmax's place."""
    made = (part.product.operation, *(context.operation for context in part.contexts))
    steps = [operation for operation, _, _ in part.steps(run) if operation not in made]
    bends = [step for step in steps if f"{step.name}_for_softmax" in MISTAKES]
    scales = [step for step in steps if step.name in MULTIPLIES and not (bends and step.index > bends[0].index)]
    masks = [step for step in steps if bends and step.name in ADDS | FILLS]
    plain = all(step in (*scales, *bends, *masks) or step.name in MOVES | {"dropout"} for step in steps)
    linear = not bends and any(operation.name in FEATURES_OF for operation in run.operations)
    numbers = (slot.value.numel() == 1 for step in steps if step not in masks for slot in step.inputs[1:])
    return plain and not linear and all(numbers)


def _end_of(run: Run, part: Part) -> tuple[Operation, Tensor | None]:
    """The last operation that gives nothing but what the part's contexts gave, as far as the first weight."""
    numbers = {context.source.number for context in part.contexts if context.source is not None}
    last, names = part.contexts[-1].operation, None
    for operation, codes, _ in run.names.carrying(numbers, part.contexts[0].operation.index - 1):
        first = codes is run.names.after[operation.index][0]
        if first and all(run.names.sources[x].kind == "context" for x in sources_in(codes)):
            last, names = operation, codes
    return last, names


def _keep(found: Examination, judgements: list[Judgement]) -> None:
    """Add the departures that are new; the attentions are those of the previous run, in the same order."""
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
