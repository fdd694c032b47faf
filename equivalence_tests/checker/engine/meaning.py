"""What deviates from torch's formula on purpose: shown by evidence beyond the deviation itself."""

import functools
import linecache
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.changing import is_strange, strange_operations
from equivalence_tests.checker.engine.contracts.departure import Departure, changed_by
from equivalence_tests.checker.engine.contracts.layout import are_followed, ways_back
from equivalence_tests.checker.engine.contracts.operands import earlier, is_normed
from equivalence_tests.checker.engine.contracts.scores_table import causal_pattern, ranks_of
from equivalence_tests.checker.engine.judgement import Judgement, Operand, WeightsModel
from equivalence_tests.checker.engine.names import Part, Source
from equivalence_tests.checker.engine.products import contraction_of
from equivalence_tests.checker.engine.same import LOOSE, MEASURED, SINGLE, TABLE, constant_ratio
from equivalence_tests.checker.engine.taking_part import waiting_parameters
from equivalence_tests.checker.engine.vocabulary import ADDS, FILLS, MOVES, MULTIPLIES, words
from equivalence_tests.checker.engine.watching import Operation, Slot
from equivalence_tests.checker.reach.plans import role_of_parameter
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reporting.findings import Exercise

Names = Callable[[str], object]  # whether it is the name of what is meant

HIDDEN = "the keys that it hides by itself"
FACTORS = re.compile(r"scal|factor|multiplier|temperature", re.IGNORECASE)
CAP = re.compile(r"cap|clip", re.IGNORECASE)
WINDOW = re.compile(r"window|sliding|local|span|band|block|chunk|context_size", re.IGNORECASE)
SIZES = re.compile(
    r"size|dim|width|num|heads|layers|eps|drop|vocab|len|range|_ids?$|chan|rank|hidden|depth|ratio|position|patch"
    r"|(^|_)[nd]_|token|logit"
)


class Evidence:
    """What shows that a departure is intended.

    Args:
        judgement: Of one attention.
        module: Holds the parameters and configurations.
    """

    def __init__(self, judgement: Judgement, module: nn.Module | None) -> None:
        self.judgement, self.module = judgement, module
        self.modules = list(module.modules()) if module is not None else []
        self.recorder, self._names = judgement.attention.run.recorder, judgement.attention.run.names

    def added_to(self, departures: list[Departure]) -> list[Departure]:
        """Say which departures are intended, and add what is intended and no mistake at all."""
        for departure in departures:
            departure.evidence = departure.evidence or self.of(departure) or self._as_named(departure)
        return [*departures, *self.conventions(departures)]

    def untold(self) -> Iterator[Exercise]:
        """List what one call says nothing about."""
        if self.judgement.models and not any(model.tells for model in self.judgement.models):
            yield Exercise(
                "scale, mask and softmax", False, "no query had more than one key to choose from in this call"
            )
        if any(model.kind == "other" for model in self.judgement.models) and self._parameters_between(MULTIPLIES):
            yield Exercise("the weights", False, "a parameter mixes them with others: they are no softmax of scores")
        if any(ways_back(part) for part in self.judgement.attention.parts):
            yield Exercise("keys that attend to queries", False, "by the same scores, which is not judged")
        for name in waiting_parameters(self.judgement.attention.run, self.module):
            yield Exercise(f"the parameter {name}", False, "the line that computes with it did not run in this call")
        if not are_followed(self.judgement.attention):
            yield Exercise("where heads come from", False, "queries or keys come from where tokens are not followed")
        own = self.own_mask()
        if own is not None and not own.evidence:
            why = "a pattern that no argument and no setting asks for: only its author knows whether it is right"
            yield Exercise(HIDDEN, False, why)
        if self._favours_later_keys():
            why = "the later a key is, the more it gets: right only where the mask that is handed over hides such keys"
            yield Exercise("the bias of later keys", False, why)

    # ------------------------------------------------------------------------------------------ departures
    def of(self, departure: Departure) -> str:
        """Say why a departure is intended; "" if nothing says that."""
        if self._is_of_wide_weights(departure):
            return "each projection is divided by the root of the features that it takes, whose weights are drawn so"
        if departure.stage == "scale":
            return self._of_scale(departure)
        if departure.operation is not None and not self._is_of_this_run(departure.operation):
            return ""
        if "changed_by" in departure.name and departure.stage in CHANGED and departure.operation is not None:
            return self._of_part(departure, departure.operation)
        if departure.name == "changed_by_mul" and departure.stage == "scores" and departure.operation is not None:
            gates = self._parameters_beside(departure.operation)
            return f"the parameter {gates[0]} says how much is taken of them" if gates else ""
        if departure.operation is not None and (departure.mistake.sink or departure.name in CUTS):
            joined = [bits for one, _, bits, _ in self._beside_scores() if one.name in JOINS]
            names = [name for bits in joined for name in self.recorder.parameters(bits)]
            if names:
                departure.name = "attention_sink"
                return f"the parameter {names[0]} takes a share of every row"
        return ""

    def _as_named(self, departure: Departure) -> str:
        """What the class in which it stands, or one around that, is named after; a scale that is stated says more."""
        first = self.judgement.attention.first
        if departure.name == "scale_missing" and self._stated_scale():
            return ""
        around = modules_around(self.module, (departure.operation or first).place)
        return departure.mistake.as_named([type(module).__name__ for module in around])

    def _is_of_this_run(self, operation: Operation) -> bool:
        """Whether it ran in the call that is judged, and not in another one, with a mask or a second tensor."""
        return any(operation is one for one in self._names.operations[operation.index : operation.index + 1])

    def _is_of_wide_weights(self, departure: Departure) -> bool:
        """Whether every projection is divided by the root of its inputs, and this departure is no more than that."""
        operands, taken = self.judgement.first_operands, self._features_taken()
        if len(operands) != 3 or not all(
            abs(o.factor * math.sqrt(taken.get(o.role, 0)) - 1) < MEASURED for o in operands
        ):
            return False
        if departure.stage == "scale":
            right = operands[0].factor * operands[1].factor / math.sqrt(departure.facts["width"])
            return abs(departure.facts["factor"] / right - 1) < MEASURED
        if departure.stage != "output" or departure.operation is None or "changed_by" not in departure.name:
            return departure.name.startswith("value_changed_by_") and abs(operands[2].factor - 1) > MEASURED
        ratio = constant_ratio(departure.operation.outputs[0].value, departure.operation.inputs[0].value)
        return ratio is not None and abs(ratio * math.sqrt(taken.get("output", 0)) - 1) < MEASURED

    def _features_taken(self) -> dict[str, int]:
        """How many features the projections of queries, keys, values and what is averaged take."""
        roles = {operand.role: operand.sources for operand in self.judgement.first_operands}
        own = [s for s in self._names.sources.values() if set(s.parents) & {*self.judgement.attention.context_sources}]
        made = {
            role: contraction_of(s.operation)
            for role, x in {**roles, "output": own}.items()
            for s in x[:1]
            if s.operation
        }
        return {role: contraction.left.size(-1) for role, contraction in made.items() if contraction is not None}

    def _of_part(self, departure: Departure, operation: Operation) -> str:
        """What a parameter or a part of the module's own does to values or to what is averaged."""
        if departure.name.startswith("value_") and self._values_are_normed():
            scaled = next(self._scaled_outside(self.judgement.first_operands[2]), None)
            if scaled is None:
                departure.name = "values_normalised"
                return "a part of its own normalises each value"
            _blame(departure, scaled, "value")
            return ""
        if departure.name == "value_changed_by_mul" and (told := self._value_scale()):
            return told
        if departure.stage == "operand" and not is_strange(operation) and self._scaled_by_a_part(departure):
            return "a part of its own scales it by what it holds"
        if departure.stage != "operand" and (told := self._factor_asked_for(operation)):
            return told
        kinds = [name for name in ("add", "mul") if name in operation.name]
        if departure.stage == "operand" and kinds and (argument := self._argument_for(departure, operation, kinds[0])):
            how = "is added" if kinds == ["add"] else "is its factor"
            return f"the argument {argument} {how} and has no other use"
        if departure.stage == "operand" and kinds == ["add"] and (names := self._own_parameters(operation)):
            return f"a part of its own adds what it makes with {names[0]}"
        if not kinds or departure.stage == "operand":
            return self._activation(operation)
        return self._by_a_parameter(departure, operation, "added" if kinds == ["add"] else "multiplied")

    def _factor_asked_for(self, operation: Operation) -> str:
        """The argument or setting of which a line makes the number that multiplies; "" if there is none."""
        line = linecache.getline(*operation.frames[0][:2]) if operation.frames else ""
        asked = {p.name for child in self.modules for p in parameters_of(type(child))}
        asked |= {name for holder in self._holders() for name in vars(holder)}

        def written(name: str) -> bool:
            is_size = SIZES.search(name) or SCALES.fullmatch(name)
            return not is_size and re.search(rf"\b{re.escape(name)}\b", line) is not None

        def named(name: str) -> bool:
            return name in asked and written(name)

        out = operation.outputs[0].value
        same = (slot.value for slot in operation.inputs if slot.value.shape == out.shape)
        for ratio in (ratio for x in same if (ratio := constant_ratio(out, x))):
            for form, number, fits in (("", ratio, named), ("", 1 / ratio, named), ("1 - ", 1 - ratio, written)):
                if told := self._setting(number, fits, own=True):
                    return f"its number is {form}what {told}"
        return ""

    def _by_a_parameter(self, departure: Departure, operation: Operation, how: str) -> str:
        """What a parameter takes part in may be added or multiplied, unless something strange happens to it before."""
        numbers = set(self.judgement.attention.context_sources)
        pairs = zip(operation.inputs, operation.origins, self._names.before[operation.index], strict=True)
        for place, (slot, bits, codes) in enumerate(pairs):
            own = place == 0 if departure.stage == "output" else _is_of(codes, numbers)
            rest = functools.reduce(operator.or_, (*operation.origins[:place], *operation.origins[place + 1 :]), 0)
            names = [] if own else self.recorder.parameters(bits & ~rest) or self.recorder.parameters(bits)
            strange = next(strange_operations(self.judgement.attention.run, slot, operation.index), None)
            if names and strange is None:
                return f"the parameter {names[-1]} takes part in what is {how}"
            if names and strange is not None:
                _blame(departure, strange, "summand" if how == "added" else "factor")
        return ""

    def _own_parameters(self, operation: Operation) -> list[str]:
        """The parameters of the part inside in which an operation runs, as far as it takes something of them."""
        inside = operation.place != self.judgement.attention.first.place
        names = [name for bits in operation.origins for name in self.recorder.parameters(bits)]
        return [name for name in names if inside and name.startswith(f"{operation.place}.")]

    def _argument_for(self, departure: Departure, operation: Operation, kind: str) -> str:
        """The argument that is added to values, or gives each row a factor, and reaches no other operand."""
        role, kept = departure.facts["what"], self.recorder.origins_of
        others = [kept(operand.slot.tensor) for operand in self.judgement.first_operands if operand.role != role]
        for slot, bits in self._names.beside(operation):
            names = self.recorder.named(bits)
            fits = role == "value" if kind == "add" else slot.value.size(-1) == 1 and bool((slot.value > 0).all())
            if fits and [name.startswith("arg:") for name in names] == [True] and not any(bits & x for x in others):
                return names[0].partition(":")[2]
        return ""

    def _activation(self, operation: Operation) -> str:
        """A function that stands in the module as a part."""
        wanted = operation.name.replace("_", "")
        for name, child in self.module.named_modules() if self.module is not None else ():
            if name and type(child).__name__.lower() == wanted:
                return f"the module holds it as its part {name}"
        return ""

    def _value_scale(self) -> str:
        """A number of the configuration that multiplies the values; "" if none does."""
        factors = [operand.factor for operand in self.judgement.first_operands[2:] if abs(operand.factor - 1) > 1e-4]
        return next((f"it is what {told}" for factor in factors if (told := self._setting(factor, _is_no_size))), "")

    def _values_are_normed(self) -> bool:
        """Whether each value is normalised by itself, in a module inside."""
        run = self.judgement.attention.run
        values = self.judgement.first_operands[2:]
        return any(is_normed(run, value) and any(map(self._in_a_part, value.steps(run))) for value in values)

    def _scaled_outside(self, operand: Operand) -> Iterator[Operation]:
        """What multiplies all of an operand by one number, and runs in no module inside."""
        for step in operand.steps(self.judgement.attention.run):
            taken, given = step[0].inputs[0].value, step[2]
            ratio = constant_ratio(given, taken, SINGLE) if taken.shape == given.shape else None
            if ratio is not None and abs(ratio - 1) > SINGLE and not self._in_a_part(step):
                yield step[0]

    def _in_a_part(self, step: tuple[Operation, Tensor, Tensor]) -> bool:
        """Whether it ran in a module inside."""
        return step[0].place != self.judgement.attention.first.place

    def _scaled_by_a_part(self, departure: Departure) -> bool:
        """Whether a module inside multiplies queries or keys by a parameter or a buffer of its own."""
        operands = (o for o in self.judgement.first_operands[:2] if o.role == departure.facts["what"])
        for step in (step for operand in operands for step in operand.steps(self.judgement.attention.run)):
            own = [name for bits in step[0].origins for name in self.recorder.named(bits)]
            held = any(name.startswith(("buffer:", "param:")) for name in own)
            if held and step[0].name in MULTIPLIES and self._in_a_part(step):
                return True
        return False

    def _of_scale(self, departure: Departure) -> str:
        own = departure.name == "scale_wrong" and not departure.facts["of_a_size"]
        learnt = own or departure.name == "scale_differs_by_head"
        names = [*self._parameters_between(MULTIPLIES), *self._learnt_scales()] if learnt else []
        if names:
            return f"the parameter {names[0]} scales the scores"
        for operands in self.judgement.operands:
            if self._needs_no_scale(departure, operands[:2]):
                return "queries and keys are normalised, with gains that are learnt"
            for before in (earlier(self.judgement.attention.run, operand, ("gain",)) for operand in operands[:2]):
                if departure.name == "scale_missing" and before is not None and abs(before.factor - 1) > MEASURED:
                    return f"a gain that is learnt follows a scale of {before.factor:.4g}"
            turns = [self._own_scale(operand) for operand in operands[:2] if operand.change == "rotated"]
            if len(turns) == 2 and abs(turns[0] - turns[1]) < LOOSE and abs(turns[0] - 1) > LOOSE:
                total = departure.facts["factor"] * math.sqrt(departure.facts["width"])
                if abs(total / turns[0] / turns[1] - 1) < LOOSE:
                    return "the angles of the rotation carry a scale of their own"
        return self._configured(departure.facts["factor"])

    def _learnt_scales(self) -> Iterator[str]:
        """The parameters called scales that multiply queries or keys element by element, where no norm is beside."""
        for operand in self.judgement.first_operands[:2]:
            made = self._norms_before(operand)
            gains = [s.operation for s in made if s.operation is not None and all(one.kind == "gain" for one in made)]
            yield from (name for gain in gains for name in self._parameters_beside(gain) if "scale" in name)

    def _needs_no_scale(self, departure: Departure, operands: list[Operand]) -> bool:
        """Whether gains that are learnt stand for the scale, and the module does not say that there is one."""
        if departure.name != "scale_missing":
            return False
        learnt = [name for operand in operands for name in self._gains(operand)]
        return len(learnt) >= len(operands) and not self._stated_scale()

    def _gains(self, operand: Operand) -> list[str]:
        """The parameters of the norms that an operand went through, one a norm."""
        norms = (source.operation for source in self._norms_before(operand) if source.operation is not None)
        return [name for norm in norms for name in self._parameters_beside(norm)][:1]

    def _stated_scale(self) -> bool:
        """Whether the module in which the product runs, or a configuration, holds a scale other than one."""
        place = self.judgement.attention.first.place
        owners = [self.module.get_submodule(place)] if self.module is not None else []
        held = (item for holder in [*owners, *self._holders()] for item in _numbers(holder))
        return any(SCALES.fullmatch(name) and x not in (0, 1) for name, x in held)

    def _own_scale(self, operand: Operand) -> float:
        """What a rotation multiplies by, without what numbers multiply before it and after it."""
        scale = operand.factor
        for operation, _, value in operand.steps(self.judgement.attention.run):
            if operation.inputs[0].value.shape == value.shape:
                scale /= constant_ratio(value, operation.inputs[0].value, SINGLE) or 1.0
        return scale

    def _configured(self, value: float) -> str:
        """A value of a configuration that is the scale, its root, or one over either."""
        ways: list[tuple[str, float, Names]] = [("", value, _is_no_size), ("1 / ", 1 / value, DIVISORS.search)]
        ways.append(("1 / sqrt of ", value**-2, _is_no_count))
        width = self.judgement.attention.parts[0].product.width
        ways.append(("1 / sqrt(head_dim) times ", value * math.sqrt(width), FACTORS.search))
        for word, number, named in ways:
            if told := self._setting(number, SCALES.fullmatch if abs(number - 1) < 1e-4 else named):
                return f"the scale is {word}what {told}"
        return self._stretched(value)

    def _stretched(self, value: float) -> str:
        """A scale that grows with the stretch of the positions: YaRN's (0.1 m ln s + 1)**2 / sqrt(width)."""
        total = value * math.sqrt(self.judgement.attention.parts[0].product.left.size(-1))
        tables = ((name, x) for holder in self._holders() for name, x in vars(holder).items() if isinstance(x, dict))
        for name, table in tables:
            factor, others = table.get("factor", 1), [table.get(key) or 0.0 for key in ("mscale", "mscale_all_dim")]
            for m in (1.0, *others) if isinstance(factor, int | float) else ():
                if factor > 1 and abs((1 + 0.1 * m * math.log(factor)) ** 2 / total - 1) < 1e-4:
                    return f"the scale grows with the factor in {name} of the configuration ({factor:g})"
        return ""

    def _setting(self, wanted: float, named: Names, own: bool = False) -> str:
        """Say which number of a configuration, or of a module's own, is the one that is wanted; "" if none is."""
        held = (item for holder in [*self._holders(), *(self.modules if own else ())] for item in _numbers(holder))
        found = ((name, x) for name, x in held if named(name) and abs(x - wanted) < 1e-4 * abs(wanted))
        return next((f"{name} says ({x:g})" for name, x in found), "")

    def _holders(self) -> list[Any]:
        found: dict[int, Any] = {}
        for child in self.modules:
            for value in vars(child).values():
                holder = not isinstance(value, nn.Module | Tensor | str | int | float | dict | list | tuple | set)
                if holder and hasattr(value, "__dict__") and not callable(value):
                    found[id(value)] = value
        return list(found.values())

    def _is_normed(self, operand: Operand) -> bool:
        return operand.change == "normed" or bool(self._norms_before(operand))

    def _norms_before(self, operand: Operand) -> list[Source]:
        """What norms of tokens made of an operand, after its projection."""
        made_of = self._names.made_of(source.number for source in operand.sources)
        return [s for s in made_of if s.kind in NORMED and (s.operation is None or s.operation.name != "batch_norm")]

    def _parameters_between(self, functions: frozenset[str]) -> list[str]:
        """Parameters that such functions take between the two products."""
        between = (operation for operation, _ in self._between() if operation.name in functions)
        return [name for operation in between for name in self._parameters_beside(operation)]

    def _parameters_beside(self, operation: Operation) -> list[str]:
        """The parameters of which an operation takes something beside what has names."""
        return [name for _, bits in self._names.beside(operation) for name in self.recorder.parameters(bits)]

    def _between(self) -> Iterator[tuple[Operation, Part]]:
        for part in self.judgement.attention.parts:
            for operation, _, _ in list(part.steps(self.judgement.attention.run))[1:]:
                yield operation, part

    def _beside_scores(self) -> Iterator[tuple[Operation, Slot, int, Part]]:
        """What the scores meet between the two products: the operation, the tensor, and what that was made of."""
        own = {part.number for part in self.judgement.attention.parts}
        for operation, part in self._between():
            pairs = zip(operation.inputs, operation.origins, self._names.before[operation.index], strict=True)
            yield from ((operation, slot, bits, part) for slot, bits, x in pairs if not _is_of(x, own))

    # ------------------------------------------------------------------------------------------ conventions
    def conventions(self, departures: list[Departure]) -> Iterator[Departure]:
        """What torch's formula does not have, and nobody would call a mistake."""
        wrong = {departure.stage for departure in departures if not departure.evidence}
        yield from self._rotations(departures)
        yield from self._norms(departures)
        own = self.own_mask()
        if own is not None and own.evidence and "mask" not in wrong:
            yield own
        for model in self.judgement.models[:1]:
            if model.cap:
                yield self._capped(model)
            if "mask" not in wrong and "scores" not in wrong:
                yield from self._bent()
                yield from self._biases(self.judgement.attention.parts[0], model)

    def _rotations(self, departures: list[Departure]) -> Iterator[Departure]:
        turned = [operand for operand in self.judgement.first_operands[:2] if operand.turned]
        if len(turned) == 2 and not any(d.stage == "rotary" for d in departures):
            place = _first_step(self.judgement, turned[0])
            paired = next((f", in {operand.turn}" for operand in turned if operand.turn), "")
            yield Departure("rotary_positions", "rotary", place, evidence=f"queries and keys turn alike{paired}")

    def _norms(self, departures: list[Departure]) -> Iterator[Departure]:
        normed = [operand for operand in self.judgement.first_operands[:2] if self._is_normed(operand)]
        made = next((s.operation for o in normed for s in self._norms_before(o) if s.kind == "normed"), None)
        if len(normed) == 2:
            yield Departure("queries_and_keys_normalised", "norm", made, evidence="both are, each by its own norm")
        elif made is not None and not any("norm" in d.name for d in departures) and self._of_one_tensor():
            yield changed_by(made, "norm", normed[0].role)

    def _of_one_tensor(self) -> bool:
        """Whether queries and keys are made of the same tensor."""
        numbers = ([source.number for source in operand.sources] for operand in self.judgement.first_operands[:2])
        query, key = ({s.number for s in self._names.made_of(own, beyond=True) if not s.parents} for own in numbers)
        return query == key

    def own_mask(self) -> Departure | None:
        """A pattern that the code hides by itself and that is not causal; with evidence or without."""
        judgement = self.judgement
        for part, model, hidden in zip(judgement.attention.parts, judgement.models, judgement.hidden, strict=False):
            live = model.live
            if bool(hidden[live].any()) and not causal_pattern(part, hidden, live):
                operation, names = self._hiding()
                evidence = _made_from(names[0]) if names else self._window(part, hidden, live)
                return Departure("own_mask", "mask", operation, evidence=evidence)
        return None

    def _hiding(self) -> tuple[Operation | None, list[str]]:
        """The first operation that scores meet something else in, and what that is made from."""
        first: Operation | None = None
        for operation, _, bits, part in self._beside_scores():
            own = self.recorder.origins_of(part.product.operation.outputs[0].tensor)
            if bits != own:  # the largest score has these
                first = first or operation
                if bits:
                    return operation, self.recorder.named(bits)
        return first, []

    def _window(self, part: Part, hidden: Tensor, live: Tensor) -> str:
        """Torch's own alignment of unequal lengths, or a setting that is the width of the band that is left."""
        query, key, _, _ = ranks_of(part)
        apart = (key - query)[live]
        if torch.equal(hidden[live], apart > 0):
            return "query i sees keys 0 to i, as is_causal of F.scaled_dot_product_attention has it"
        seen = apart[~hidden[live]]
        low, high = int(seen.min()), int(seen.max())
        if not torch.equal(hidden[live], (apart < low) | (apart > high)):
            return ""
        return self.width_named({-low, 1 - low, high, high + 1, high - low, high - low + 1})

    def width_named(self, widths: Iterable[float]) -> str:
        """Say which setting is as wide as what is seen; "" if none is."""
        told = (self._setting(width, WINDOW.search, own=True) for width in widths)
        return next((f"it is as wide as {setting}" for setting in told if setting), "")

    def _capped(self, model: WeightsModel) -> Departure:
        operation = next((op for op, _ in self._between() if op.name == "tanh"), None)
        told = self._setting(model.cap, CAP.search, own=True)
        evidence = f"the cap is what {told}" if told else ""
        return Departure("scores_capped", "scores", operation, {"cap": model.cap}, evidence=evidence)

    def _biases(self, part: Part, model: WeightsModel) -> Iterator[Departure]:
        live = model.live & ~model.hidden & ~model.replaced
        if not bool(live.any()) or float(model.bias[live].abs().max()) < TABLE:
            return
        for operation, _, bits, _ in self._beside_scores():
            if bits and operation.name in ADDS:
                own = self.recorder.origins_of(part.product.operation.outputs[0].tensor)
                names = self.recorder.named(bits & ~own) or self.recorder.named(bits)
                if all(name.startswith("buffer:") for name in names) and self._grows(part, model, live):
                    yield Departure("bias_grows_with_distance", "bias", operation)
                    return
                told = next((n for n in names if n.startswith("param:")), names[-1])
                yield Departure("bias_added", "bias", operation, evidence=_made_from(told))
                return
        adding = next((op for op, _ in self._between() if op.name in ADDS), None)
        graded = len((model.bias[live] * 1e6).round().unique()) > 4
        if graded and self._grows(part, model, live):
            yield Departure("bias_grows_with_distance", "bias", adding)
        elif graded:
            told = "it depends on the positions alone" if _by_distance(part, model, live) else ""
            yield Departure("bias_added", "bias", adding, evidence=told)

    def _grows(self, part: Part, model: WeightsModel, live: Tensor) -> bool:
        """Whether what is added is the greater the farther a key is from the query, before it or behind it.

        What later keys get tells nothing where a mask that may be given hides them.
        """
        favoured = self._favoured(part, model, live)
        return "earlier" in favoured or ("later" in favoured and not self._takes_a_mask())

    def _favoured(self, part: Part, model: WeightsModel, live: Tensor) -> list[str]:
        """The keys of which the farthest get the most, in every row."""
        query, key, queries, keys = ranks_of(part)
        apart = [key - query - shift for shift in {0, keys - queries}]
        sides = {"earlier": [(x <= 0, -x) for x in apart], "later": [(x >= 0, x) for x in apart]}
        return [name for name, ways in sides.items() if any(_rises(model, live & own, far) for own, far in ways)]

    def _favours_later_keys(self) -> bool:
        """Whether a bias that nothing learnt and no argument makes gives the most to the last keys, which are seen."""
        added = [bits for operation, _, bits, _ in self._beside_scores() if bits and operation.name in ADDS]
        made = (name for bits in added for name in self.recorder.named(bits))
        if not self.judgement.models or not all(name.startswith("buffer:") for name in made):
            return False
        part, model = self.judgement.attention.parts[0], self.judgement.models[0]
        live = model.live & ~model.hidden & ~model.replaced
        return bool(live.any()) and "later" in self._favoured(part, model, live)

    def _takes_a_mask(self) -> bool:
        """Whether the module that holds the attention, or one around it, may be given a mask."""
        around = modules_around(self.module, self.judgement.attention.first.place)
        return not around or any(role_of_parameter(p.name) == "mask" for one in around for p in parameters_of(one))

    def _bent(self) -> Iterator[Departure]:
        """What no known model does to what is added to the scores, or says which of them are hidden."""
        seen: set[int] = set()
        for operation, slot, _, _ in self._beside_scores():
            if operation.name in ADDS | FILLS:
                for strange in self._strange(slot, operation):
                    if strange.index not in seen:
                        seen.add(strange.index)
                        yield changed_by(strange, "bias", "bias of the scores")

    def _strange(self, slot: Slot, before: Operation) -> Iterator[Operation]:
        """What is strange on the way of a bias: of what nothing learnt takes part in, only what puts it elsewhere."""
        for operation in strange_operations(self.judgement.attention.run, slot, before.index):
            if operation.name in MOVES or any(map(self.recorder.parameters, operation.origins)):
                yield operation


KINDS = {"arg": "argument", "param": "parameter", "buffer": "buffer"}
# Values of a configuration that are the scale of the scores, whatever the value.
SCALES = re.compile(r"(attention|attn|query|qk|score|softmax)\w*(multiplier|scal\w*)|scal(e|ing)")
SCORING = re.compile(r"scal|query|attn|attention")
DIVISORS = re.compile(r"temperature|divisor|denominator")
NORMED = ("normed", "gain")
CHANGED = ("context", "output", "operand")
JOINS = words("cat hstack")
CUTS = ("changed_by_getitem", "changed_by_narrow")  # of the column of a sink, after the softmax


def modules_around(module: nn.Module | None, place: str) -> list[nn.Module]:
    """Give what holds the module at a path, and that itself, the outermost first; nothing of a function."""
    held = module.named_modules() if module is not None else ()
    return [own for path, own in held if not path or f"{place}.".startswith(f"{path}.")]


def _blame(departure: Departure, operation: Operation, what: str) -> None:
    """Let a departure speak of another operation than the one that was seen first."""
    bent = changed_by(operation, departure.stage, what)
    departure.name, departure.operation, departure.facts = bent.name, operation, bent.facts
    departure.have = departure.want = ()


def _made_from(name: str) -> str:
    """Say what a tensor with a name is.

    >>> _made_from("arg:attention_mask")
    'it is made from the argument attention_mask'
    """
    kind, _, own = name.partition(":")
    return f"it is made from the {KINDS[kind]} {own}"


def _is_of(codes: Tensor | None, numbers: set[int]) -> bool:
    return codes is not None and bool(set(sources_in(codes)) & numbers)


def _is_no_size(name: str) -> bool:
    return bool(SCALES.fullmatch(name)) or not SIZES.search(name)


def _is_no_count(name: str) -> bool:
    """Whether a whole number of this name is a width, where small ones match by chance."""
    return SCORING.search(name) is not None and _is_no_size(name)


def _numbers(holder: Any) -> Iterator[tuple[str, float]]:
    for name, value in sorted(vars(holder).items(), key=lambda item: str(item[0])):
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if plain and math.isfinite(value) and not str(name).startswith("_"):
            yield str(name), float(value)


def _first_step(judgement: Judgement, operand: Operand) -> Operation | None:
    steps = (operation for operation, _, _ in operand.steps(judgement.attention.run))
    return next((operation for operation in steps if operation.name == "mul"), None)


def _rises(model: WeightsModel, live: Tensor, distance: Tensor) -> bool:
    """Whether what is added rises with these distances, in every row."""
    order = (model.rows[live] * (int(distance.max()) + 1) + distance[live]).argsort()
    rows, apart, bias = (x[live][order] for x in (model.rows, distance, model.bias))
    farther = (rows.diff() == 0) & (apart.diff() > 0)
    return bool((farther & (apart[1:] > 1)).any()) and bool((bias.diff()[farther] > MEASURED).all())


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
    return bool(((table - table[:1]).nan_to_num(0.0).abs() < LOOSE).all())
