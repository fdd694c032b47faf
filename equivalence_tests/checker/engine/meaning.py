"""What deviates from torch's formula and is meant so: told by evidence beyond the deviation itself."""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.anchors import Part
from equivalence_tests.checker.engine.codes import source_of
from equivalence_tests.checker.engine.contracts.departure import SINGLE, Departure, constant_ratio
from equivalence_tests.checker.engine.contracts.operands import Operand
from equivalence_tests.checker.engine.contracts.scores_table import ranks_of
from equivalence_tests.checker.engine.contracts.weights import WeightsModel
from equivalence_tests.checker.engine.identities import Source
from equivalence_tests.checker.engine.judging import Judgement
from equivalence_tests.checker.engine.vocabulary import words
from equivalence_tests.checker.engine.watching import Operation

__all__ = ["with_evidence"]

SIZES = re.compile(
    r"size|dim|width|num|heads|layers|eps|drop|vocab|len|range|_ids?$|channels|rank|hidden|depth|ratio|position|patch"
    r"|(^|_)[nd]_|token"
)


def with_evidence(judgement: Judgement, departures: list[Departure], module: nn.Module | None) -> list[Departure]:
    """Give the departures with the evidence that some are meant so, and add what is meant so and no mistake at all.

    Args:
        judgement: Of one attention.
        departures: What departs in it.
        module: Holds the parameters and configurations.
    """
    reader = _Evidence(judgement, module)
    for departure in departures:
        departure.evidence = departure.evidence or reader.of(departure)
    return [*departures, *reader.conventions(departures)]


class _Evidence:
    def __init__(self, judgement: Judgement, module: nn.Module | None) -> None:
        self.judgement, self.module = judgement, module
        self.recorder = judgement.attention.run.recorder

    # ------------------------------------------------------------------------------------------ departures
    def of(self, departure: Departure) -> str:
        """Say why a departure is meant so; "" if nothing says that."""
        if departure.stage == "scale":
            return self._of_scale(departure)
        if departure.operation is not None and departure.name in SINKS:
            names = self._parameters_between(JOINS)
            if names:
                departure.name = "attention_sink"
                return f"the parameter {names[0]} takes a share of every row"
        return ""

    def _of_scale(self, departure: Departure) -> str:
        learnt = departure.name in ("scale_other", "scale_differs_by_head")
        names = self._parameters_between(MULTIPLIES) if learnt else []
        if names:
            return f"the parameter {names[0]} scales the scores"
        for operands in self.judgement.operands:
            sides = [self._is_normed(operand) for operand in operands[:2]]
            if all(sides):
                return "queries and keys are normalised"
            turns = [self._own_scale(operand) for operand in operands[:2] if operand.change == "rotated"]
            if len(turns) == 2 and abs(turns[0] - turns[1]) < 1e-3 and abs(turns[0] - 1) > 1e-3:
                total = departure.facts["factor"] * math.sqrt(departure.facts["width"])
                if abs(total / turns[0] / turns[1] - 1) < 1e-3:
                    return "the angles of the rotation carry a scale of their own"
        return self._configured(departure.facts["factor"])

    def _own_scale(self, operand: Operand) -> float:
        """What a rotation multiplies by, without what numbers multiply before it and after it."""
        scale, names = operand.factor, self.judgement.attention.run.names
        for source in operand.sources[:1]:
            for operation, _, value in names.carrying(source.number, operand.until.index - 1):
                if operation.index > operand.start and operation.inputs[0].value.shape == value.shape:
                    scale /= constant_ratio(value, operation.inputs[0].value, SINGLE) or 1.0
        return scale

    def _configured(self, value: float) -> str:
        """A value of a configuration that is the scale, its root, or one over either."""
        for name, number in self.settings():
            if number in (0, 1, True, False) or SIZES.search(name):
                continue
            for word, made in (("", number), ("1 / ", 1 / number), ("1 / sqrt of ", abs(number) ** -0.5)):
                if abs(made / value - 1) < 1e-4:
                    return f"the scale is {word}{name} of the configuration ({number:g})"
        return ""

    def settings(self) -> Iterator[tuple[str, float]]:
        """Numbers of the configurations that the module holds."""
        seen: set[int] = set()
        for child in self.module.modules() if self.module is not None else ():
            for value in vars(child).values():
                holder = not isinstance(value, nn.Module | Tensor | str | int | float | dict | list | tuple | set)
                if holder and hasattr(value, "__dict__") and id(value) not in seen and not callable(value):
                    seen.add(id(value))
                    yield from _numbers(value)

    def _is_normed(self, operand: Operand) -> bool:
        return operand.change == "normed" or any(self._made_by_norm(source) for source in operand.sources)

    def _made_by_norm(self, source: Source) -> bool:
        if source.kind in ("normed", "gain"):
            return True
        if source.kind in ("added", "gated"):
            return any(self._made_by_norm(self.judgement.attention.run.names.sources[n]) for n in source.parents)
        return False

    def _parameters_between(self, functions: frozenset[str]) -> list[str]:
        """Parameters that such functions take between the two products."""
        found: list[str] = []
        for operation, _ in self._between():
            if operation.name not in functions:
                continue
            for bits, codes in zip(
                operation.origins, self.judgement.attention.run.names.before[operation.index], strict=True
            ):
                if codes is None:
                    found += [n.partition(":")[2] for n in self.recorder.named(bits) if n.startswith("param:")]
        return found

    def _between(self) -> Iterator[tuple[Operation, Part]]:
        for part in self.judgement.attention.parts:
            for operation, _, _ in self.judgement.attention.chain(part)[1:]:
                yield operation, part

    # ------------------------------------------------------------------------------------------ conventions
    def conventions(self, departures: list[Departure]) -> Iterator[Departure]:
        """What torch's formula does not have, and nobody would call a mistake."""
        wrong = {departure.stage for departure in departures if not departure.evidence}
        yield from self._rotations(departures)
        yield from self._norms(departures)
        for part, model in zip(self.judgement.attention.parts, self.judgement.models, strict=False):
            if model.cap:
                yield self._capped(part, model)
            if "mask" not in wrong and "scores" not in wrong:
                yield from self._biases(part, model)
            return

    def _rotations(self, departures: list[Departure]) -> Iterator[Departure]:
        for operands in self.judgement.operands[:1]:
            turned = [operand for operand in operands[:2] if operand.change == "rotated"]
            if len(turned) == 2 and not any(d.stage == "rotary" for d in departures):
                place = _first_step(self.judgement, turned[0])
                yield Departure("rotary_positions", "rotary", place, evidence="queries and keys turn alike")

    def _norms(self, departures: list[Departure]) -> Iterator[Departure]:
        for operands in self.judgement.operands[:1]:
            normed = [operand for operand in operands[:2] if self._is_normed(operand)]
            if len(normed) == 2:
                made = next((s.operation for s in normed[0].sources if s.operation is not None), None)
                yield Departure("queries_and_keys_normalised", "norm", made, evidence="both are, each by its own norm")

    def _capped(self, part: Part, model: WeightsModel) -> Departure:
        operation = next((op for op, _ in self._between() if op.name.startswith("tanh")), None)
        evidence = ""
        for name, number in self.settings():
            if abs(number / model.cap - 1) < 1e-6 and not SIZES.search(name):
                evidence = f"the cap is {name} of the configuration ({number:g})"
        del part
        return Departure("scores_capped", "scores", operation, {"cap": model.cap}, evidence=evidence)

    def _biases(self, part: Part, model: WeightsModel) -> Iterator[Departure]:
        live = ~model.weights.isnan() & ~model.hidden & ~model.dead[model.rows] & ~model.replaced
        if not bool(live.any()) or float(model.bias[live].abs().max()) < 1e-5:
            return
        for operation, _ in self._between():
            for bits, codes in zip(
                operation.origins, self.judgement.attention.run.names.before[operation.index], strict=True
            ):
                score = codes is not None and bool((source_of(codes) == part.number).any())
                if not score and bits and operation.name.strip("_") in ("add", "iadd", "sub", "isub", "radd"):
                    names = self.recorder.named(bits)
                    told = next((n for n in names if n.startswith("param:")), names[-1]).replace(":", " ")
                    yield Departure("bias_added", "bias", operation, evidence=f"it is made from {told}")
                    return
        adding = next((op for op, _ in self._between() if op.name.strip("_") in ("add", "iadd", "radd", "sub")), None)
        graded = len((model.bias[live] * 1e6).round().unique()) > 4
        if graded and _by_distance(part, model, live):
            yield Departure("bias_added", "bias", adding, evidence="it depends on the positions alone")
        elif graded:
            yield Departure("bias_added", "bias", adding)


JOINS = words("cat concat concatenate hstack")
MULTIPLIES = words("mul __mul__ __rmul__ mul_ __imul__ multiply div __truediv__ div_ __itruediv__ divide true_divide")
SINKS = ("mask_after_softmax", "causal_mask_after_softmax", "weights_scaled", "changed_by_getitem", "changed_by_narrow")


def _numbers(holder: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in sorted(vars(holder).items(), key=lambda item: str(item[0])):
        if isinstance(value, bool) or str(name).startswith("_"):
            continue
        if isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


def _first_step(judgement: Judgement, operand: Operand) -> Operation | None:
    for source in operand.sources:
        for operation, _, _ in judgement.attention.run.names.carrying(source.number, operand.until.index - 1):
            if operation.index > operand.start and operation.name.strip("_") in ("mul", "rmul"):
                return operation
    return None


def _by_distance(part: Part, model: WeightsModel, live: Tensor) -> bool:
    """Whether what is added is alike for all samples, up to a constant of each row."""
    query, key, queries, keys = ranks_of(part)
    sample = part.table.query.unique(return_inverse=True)[1] // max(queries, 1)
    heads, samples = int(part.table.head.max()) + 1, int(sample.max()) + 1
    table = torch.full((samples, heads, queries, keys), torch.nan, dtype=torch.float64)
    table[sample[live], part.table.head[live], query[live], key[live]] = model.bias[live]
    common = table.isfinite().all(0, keepdim=True).expand_as(table)
    table = table.masked_fill(~common, torch.nan)
    table = table - table.nanmean(-1, keepdim=True)
    return bool(((table - table[:1]).nan_to_num(0.0).abs() < 1e-3).all())
