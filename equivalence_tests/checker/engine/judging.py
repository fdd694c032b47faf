"""Hold one attention against torch's formula, stage after stage."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equivalence_tests.checker.engine.anchors import Attention, Part
from equivalence_tests.checker.engine.contracts.context import context_departures, turned_back
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.entering import input_departures
from equivalence_tests.checker.engine.contracts.expectation import Expectation
from equivalence_tests.checker.engine.contracts.following import exchanged_departures, later_departures
from equivalence_tests.checker.engine.contracts.formula import hidden_by_formula
from equivalence_tests.checker.engine.contracts.layout import layout_departures, merge_departures
from equivalence_tests.checker.engine.contracts.operands import Operand, operand_departures, read_operands
from equivalence_tests.checker.engine.contracts.scores import score_departures
from equivalence_tests.checker.engine.contracts.scores_table import causal_pattern, padded_queries
from equivalence_tests.checker.engine.contracts.tiles import tile_departures
from equivalence_tests.checker.engine.contracts.weights import WeightsModel, read_weights

__all__ = ["Judgement", "judge"]

# The stages between the product of queries and keys and what the values are averaged to.
WEIGHING = ("scale", "scores", "mask", "softmax", "context")


@dataclass(eq=False)
class Judgement:
    """What was found out about one attention.

    Args:
        attention: Which.
        departures: What departs, in the order of the stages.
        operands: Its queries, keys and values, by part.
        models: What happens to its scores, by part.
        hidden: Which scores should be hidden, by part.
        unread: Why a stage could not be read; "" if all were.
        turned: Whether values are turned by their positions and turned back when they are averaged.
    """

    attention: Attention
    departures: list[Departure] = field(default_factory=list)
    operands: list[list[Operand]] = field(default_factory=list)
    models: list[WeightsModel] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    unread: str = ""
    turned: bool = False

    def blocked(self) -> bool:
        """Whether what departs keeps later stages from being read."""
        return any(departure.blocks for departure in self.departures)


def judge(attention: Attention, expected: dict[int, Expectation] | None = None) -> Judgement:
    """Hold an attention against torch's formula.

    Args:
        attention: As it was found.
        expected: What is known about the mask of each part, by its number.
    """
    found = Judgement(attention)
    found.departures += layout_departures(attention)
    if found.blocked():
        found.departures = _once(found.departures)
        return found
    if attention.tiled:
        return _judge_tiles(found, expected or {})
    found.departures += input_departures(attention)
    for part in attention.parts:
        _judge_part(found, part, (expected or {}).get(part.number, Expectation()))
    if found.blocked():
        return found
    found.departures += _of_context(found, expected or {})
    if _divided_later(found) and not any(tile_departures(attention, found.operands, expected or {})):
        found.departures = [departure for departure in found.departures if departure.stage not in WEIGHING]
    found.departures += later_departures(attention)
    found.departures += list(merge_departures(attention)) or list(exchanged_departures(attention))
    found.departures = _once(found.departures)
    return found


def _divided_later(found: Judgement) -> bool:
    """Whether exponentials are averaged with, and divided by their sum afterwards: then only what comes out tells."""
    return any(model.kind == "softmax" and not model.axis for model in found.models)


def _of_context(found: Judgement, expected: Mapping[int, Expectation]) -> Iterator[Departure]:
    """Values that are turned as the keys are, and turned back once they are averaged, are meant so."""
    attention = found.attention
    turned = [departure for departure in found.departures if departure.name == "rotary_values"]
    back = turned_back(attention) if turned and len(attention.parts) == 1 else False
    if isinstance(back, Departure):
        yield back
    elif not back:
        masks = ((part, expected[part.number].may) for part in attention.parts if part.number in expected)
        padding = [padded_queries(part, may) for part, may in masks if may is not None]
        yield from context_departures(attention, torch.cat([*padding, torch.zeros(0, dtype=torch.long)]))
    if back:
        found.turned = True
        for departure in turned:
            departure.evidence = "values turn as keys do, and what they are averaged to turns back"


def _judge_tiles(found: Judgement, expected: dict[int, Expectation]) -> Judgement:
    """Parts that add up to the weights of one query are judged by what comes out."""
    attention = found.attention
    for part in attention.parts:
        operands = read_operands(attention, part)
        found.operands.append(operands)
        found.departures += operand_departures(attention, part, operands)
    if not found.departures:
        found.departures += tile_departures(attention, found.operands, expected)
    found.departures += merge_departures(attention)
    found.departures = _once(found.departures)
    return found


def _judge_part(found: Judgement, part: Part, expected: Expectation) -> None:
    operands = read_operands(found.attention, part)
    found.operands.append(operands)
    found.departures += operand_departures(found.attention, part, operands)
    for context in part.contexts[:1]:
        model = read_weights(found.attention.run, part, context)
        found.models.append(model)
        found.departures += score_departures(found.attention, part, operands, model, expected)
        live = model.live
        pattern = causal_pattern(part, model.hidden | model.replaced, live)
        pattern = next((d.name for d in found.departures if d.name.startswith("causal")), pattern)
        found.hidden.append(hidden_by_formula(part, model, expected.may, pattern))


def _once(departures: list[Departure]) -> list[Departure]:
    """The same departure of several parts, in one line, is one; its patches belong together."""
    kept: dict[tuple[object, ...], Departure] = {}
    for departure in departures:
        frames = departure.lines
        first = kept.setdefault((departure.name, frames[:1]), departure)
        if first is not departure:
            first.patches.update(departure.patches)
            first.names.update(departure.names)
    return list(kept.values())
