"""What deviates from torch's formula on purpose: shown by evidence beyond the deviation itself."""

import functools
import linecache
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.contracts.changing import is_strange, strange_operations
from equivalence_tests.checker.engine.contracts.departure import Departure, changed_by
from equivalence_tests.checker.engine.contracts.operands import earlier
from equivalence_tests.checker.engine.conventions import Conventions, Names, is_of, modules_around, numbers_of
from equivalence_tests.checker.engine.judgement import Operand
from equivalence_tests.checker.engine.products import contraction_of
from equivalence_tests.checker.engine.same import LOOSE, MEASURED, SINGLE, constant_ratio, near
from equivalence_tests.checker.engine.taking_part import waiting_parameters
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS, MULTIPLIES, words
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.reach.proposing import nodes_of, parameters_of, parsed
from equivalence_tests.checker.reach.state import switch_off
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import source_of

HIDDEN = "the keys that it hides by itself"
FACTORS = re.compile(r"scal|factor|multiplier|temperature", re.IGNORECASE)
SIZES = re.compile(
    r"size|dim|width|num|heads|layers|eps|drop|vocab|len|range|_ids?$|chan|rank|hidden|depth|ratio|position|patch"
    r"|(^|_)[nd]_|token|logit"
)
# Values of a configuration that are the scale of the scores, whatever the value.
SCALES = re.compile(r"(attention|attn|query|qk|score|softmax)\w*(multiplier|scal\w*)|scal(e|ing)")
SWITCH_OF_SCALE = re.compile(rf"^({SCALES.pattern})$")
SCORING = re.compile(r"scal|query|attn|attention")
DIVISORS = re.compile(r"temperature|divisor|denominator")
POSITIONAL = re.compile(r"(^|_)pos|position|sinusoid", re.IGNORECASE)
SET_TRANSFORMER = re.compile("^(M?(MAB|ISAB|PMA)|SAB)$")  # its blocks, masked or not, by the names of their classes
OF_LUONG = "context and query are concatenated and go through tanh, as in Luong's attention, which has no scale"
OF_A_STATE = "a decoder's state attends to all encoder outputs, as in Luong's attention, which has no scale"
A_SCALE = re.compile(r"^(\w+_)?scal(e|ed|ing)$", re.IGNORECASE)  # in the names of code that has one
CHANGED = ("context", "output", "operand")
JOINS = words("cat hstack")
CUTS = ("changed_by_getitem", "changed_by_narrow")  # of the column of a sink, after the softmax


class Evidence(Conventions):
    """What shows that a departure is intended."""

    def added_to(self, departures: list[Departure]) -> list[Departure]:
        """Say which departures are intended, and add what is intended and no mistake at all."""
        explained = [one if one.evidence else self.explained(one) for one in departures]
        return [*explained, *self.conventions(explained)]

    def explained(self, departure: Departure) -> Departure:
        """Give a departure with what says that it is intended, under the name of what it turns out to be."""
        found = self._seen_through(departure)
        return replace(found, evidence=self.of(found) or self._as_named(found))

    def _seen_through(self, departure: Departure) -> Departure:
        """Give a departure under the name of what makes it: a sink, a norm, or what is strange in what takes part."""
        operation = departure.operation
        if operation is None or not self._is_of_this_run(operation):
            return departure
        if (departure.mistake.sink or departure.name in CUTS) and self._learnt_shares():
            return replace(departure, name="attention_sink")
        if departure.name.startswith("value_changed_by") and self._values_are_normed():
            scaled = next(self._scaled_outside(self.judgement.first_operands[2]), None)
            normed = replace(departure, name="values_normalised")
            return normed if scaled is None else _blaming(departure, scaled, "value")
        if "changed_by" in departure.name and departure.stage in ("context", "output"):
            takes_part = self._parameter_in(departure, operation)
            if takes_part is not None and takes_part[1] is not None:
                return _blaming(departure, takes_part[1], "factor" if "mul" in operation.name else "summand")
        return departure

    def _learnt_shares(self) -> list[str]:
        """Name the parameters that are joined to the scores."""
        joined = [bits for one, _, bits, _ in self._beside_scores() if one.name in JOINS]
        return [name for bits in joined for name in self.recorder.parameters(bits)]

    def not_judged(self) -> Iterator[Exercise]:
        """List what one call is no evidence for."""
        if self.judgement.models and not any(model.has_choice for model in self.judgement.models):
            why = "no query had more than one key to choose from in this call"
            yield Exercise("scale, mask and softmax", False, why)
        for name in waiting_parameters(self.run, self.module):
            yield Exercise(f"the parameter {name}", False, "the line that computes with it did not run in this call")
        own = self.own_mask()
        if own is not None and not self.is_judged(own):
            why = "a pattern that no argument and no setting asks for: only its author knows whether it is right"
            yield Exercise(HIDDEN, False, why)

    def own_mask(self) -> Departure | None:
        """A pattern that the code hides by itself, which the name of its class may ask for."""
        found = super().own_mask()
        return found if found is None or found.evidence else replace(found, evidence=self._as_named(found))

    def of(self, departure: Departure) -> str:
        """Say why a departure is intended; "" if nothing says that."""
        if self._is_of_wide_weights(departure):
            return "each projection is divided by the root of its input features, for which its weights are drawn"
        if departure.stage == "scale":
            return self._of_scale(departure)
        if departure.name == "changed_by_clamp" and departure.stage == "scores" and departure.operation is not None:
            bound = departure.operation.argument(2, "max")
            return self.limit_named("bound", bound) if isinstance(bound, int | float) else ""
        if departure.operation is not None and not self._is_of_this_run(departure.operation):
            return ""
        if "changed_by" in departure.name and departure.stage in CHANGED and departure.operation is not None:
            return self._of_part(departure, departure.operation)
        if departure.name == "changed_by_mul" and departure.stage == "scores" and departure.operation is not None:
            gates = self._parameters_beside(departure.operation)
            return f"the parameter {gates[0]} says how much of them is taken" if gates else ""
        if departure.name == "attention_sink":
            return f"the parameter {self._learnt_shares()[0]} takes a share of every row"
        return "a separate module normalises each value" if departure.name == "values_normalised" else ""

    def _as_named(self, departure: Departure) -> str:
        """What the class in which it stands, or one around that, is named after; a scale that is stated says more."""
        first = self.judgement.attention.first
        around = [type(module).__name__ for module in modules_around(self.module, (departure.operation or first).place)]
        stated = self._stated_scale() or any("scaled" in name.lower() for name in around)
        block = next(filter(SET_TRANSFORMER.search, around), "")
        if block and departure.facts.get("scale") in ("/ sqrt(embed_dim)", "/ sqrt(num_heads * head_dim)"):
            return f"{block} is a block of the Set Transformer, which divides by sqrt(num_heads * head_dim)"
        return "" if departure.name == "scale_missing" and stated else departure.mistake.as_named(around)

    def _is_of_this_run(self, operation: Operation) -> bool:
        """Whether it ran in the call that is judged, and not in another one, with a mask or a second tensor."""
        return any(operation is one for one in self._names.operations[operation.index : operation.index + 1])

    def _is_of_wide_weights(self, departure: Departure) -> bool:
        """Whether every projection is divided by the root of its inputs, and this departure is no more than that."""
        operands, taken = self.judgement.first_operands, self._features_taken()
        whole = [o.factor * math.sqrt(taken.get(o.role, 0)) for o in operands]
        if len(operands) != 3 or not all(abs(factor - 1) < MEASURED for factor in whole):
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
        made = {role: sources[0].operation for role, sources in {**roles, "output": own}.items() if sources}
        read = {role: contraction_of(operation) for role, operation in made.items() if operation is not None}
        return {role: contraction.left.size(-1) for role, contraction in read.items() if contraction is not None}

    def _of_part(self, departure: Departure, operation: Operation) -> str:
        """What a parameter or a part of the module's own does to values or to what is averaged."""
        if departure.name == "value_changed_by_mul" and (reason := self._value_scale()):
            return reason
        if departure.stage == "operand" and not is_strange(operation) and self._scaled_by_a_part(departure):
            return "a separate module scales it by its parameters"
        if departure.stage != "operand" and (reason := self._factor_asked_for(operation)):
            return reason
        kinds = [name for name in ("add", "mul") if name in operation.name]
        if departure.stage == "operand" and kinds and (argument := self._argument_for(departure, operation, kinds[0])):
            how = "is added" if kinds == ["add"] else "is its factor"
            return f"the argument {argument} {how} and has no other use"
        if departure.stage == "operand" and kinds == ["add"] and (names := self._own_parameters(operation)):
            return f"a separate module adds what it computes with {names[0]}"
        if departure.stage == "operand" and kinds == ["add"] and (table := self._positions_beside(operation)):
            return f"{table} gives what is added, whatever the input is"
        if not kinds or departure.stage == "operand":
            return self._activation(operation) or self._of_luong(operation)
        takes_part = self._parameter_in(departure, operation)
        how = "added" if kinds == ["add"] else "multiplied"
        return f"the parameter {takes_part[0]} takes part in what is {how}" if takes_part is not None else ""

    def _positions_beside(self, operation: Operation) -> str:
        """What is called after positions and gives what is added without any input: a function, a part or a buffer."""
        graph = self.run.graph
        for slot, bits in self._names.beside(operation):
            held = self.recorder.named(bits)
            made = graph.ancestors(slot, operation.index)
            names = [name for one in made for name in (one.place, *(function for _, _, function in one.frames))]
            called = filter(POSITIONAL.search, [*(name.removeprefix("buffer:") for name in held), *names])
            if all(name.startswith("buffer:") for name in held) and (found := next(called, "")):
                return found
        return ""

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
                if setting := self._setting(number, fits, own=True):
                    return f"its number is {form}what {setting}"
        return ""

    def _parameter_in(self, departure: Departure, operation: Operation) -> tuple[str, Operation | None] | None:
        """Name a parameter that takes part in what is added or multiplied, and what is strange on its way there."""
        if operation.name in CONTRACTIONS or not any(kind in operation.name for kind in ("add", "mul")):
            return None
        numbers = set(self.judgement.attention.context_sources)
        pairs = zip(operation.inputs, operation.origins, self._names.before[operation.index], strict=True)
        for place, (slot, bits, codes) in enumerate(pairs):
            own = place == 0 if departure.stage == "output" else is_of(codes, numbers)
            rest = functools.reduce(operator.or_, (*operation.origins[:place], *operation.origins[place + 1 :]), 0)
            names = [] if own else self.recorder.parameters(bits & ~rest)
            if names:
                return names[-1], next(strange_operations(self.run, slot, operation.index), None)
        return None

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
                return f"the module holds it as its sub-module {name}"
        return ""

    def may_be_luongs(self, function: object) -> bool:
        """Whether it has one head, and neither holds a scale nor names one: words in texts say nothing."""
        nodes = nodes_of(type(function)) if isinstance(function, nn.Module) else parsed(source_of(function))
        names = (getattr(x, "attr", None) or getattr(x, "id", None) or getattr(x, "arg", None) or "" for x in nodes)
        alone = len(self.judgement.attention.parts[0].table.heads) == 1
        return alone and not self._stated_scale() and not any(map(A_SCALE.search, names))

    def _of_luong(self, operation: Operation) -> str:
        """The tanh of what attends beside what asks; "" for any other operation."""
        if operation.name != "tanh":
            return ""
        graph, numbers = self.run.graph, {*self.judgement.attention.context_sources}
        before = graph.ancestors(operation.inputs[0], operation.index)
        joined = (self._names.before[one.index] for one in before if one.name in JOINS)
        sides = ([is_of(codes, numbers) for codes in taken] for taken in joined)
        return OF_LUONG if any(any(side) and not all(side) for side in sides) else ""

    def _value_scale(self) -> str:
        """A number of the configuration that multiplies the values; "" if none does."""
        factors = [operand.factor for operand in self.judgement.first_operands[2:] if abs(operand.factor - 1) > 1e-4]
        return next((f"it is what {name}" for factor in factors if (name := self._setting(factor, _is_no_size))), "")

    def _values_are_normed(self) -> bool:
        """Whether each value is normalised by itself, in a module inside."""
        normed = (value for value in self.judgement.first_operands[2:] if value.change == "normed")
        return any(self._in_a_part(step) for value in normed for step in value.steps(self.run))

    def _scaled_outside(self, operand: Operand) -> Iterator[Operation]:
        """What multiplies all of an operand by one number, and runs in no module inside."""
        for step in operand.steps(self.run):
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
        steps = (step for operand in operands for step in operand.steps(self.run))
        inside = (step[0] for step in steps if step[0].name in MULTIPLIES and self._in_a_part(step))
        names = (name for one in inside for bits in one.origins for name in self.recorder.named(bits))
        return any(name.startswith(("buffer:", "param:")) for name in names)

    def _of_scale(self, departure: Departure) -> str:
        own = departure.name == "scale_wrong" and not departure.facts["of_a_size"]
        learnt = own or departure.name == "scale_differs_by_head"
        names = self._parameters_between(MULTIPLIES) if learnt else []
        if names:
            return f"the parameter {names[0]} scales the scores"
        for operands in self.judgement.operands:
            if self._needs_no_scale(departure, operands[:2]):
                return "queries and keys are normalised, with learnt gains"
            sources, run = [(o, o.sources[0]) for o in operands[:2] if o.sources], self.run
            for before in (earlier(run, operand, source, ("gain",)) for operand, source in sources):
                if departure.name == "scale_missing" and before is not None and abs(before.factor - 1) > MEASURED:
                    return f"a learnt gain follows a scale of {before.factor:.4g}"
            if own and (both := self._sharpened(departure, operands[:2])):
                return f"queries and keys are normalised, and then multiplied by {both:.4g} each"
            if carried := self._carried_by_a_rotation(departure, operands[:2]):
                return carried
        cosines = all(_has_length_one(operand) for operands in self.judgement.operands for operand in operands[:2])
        if cosines and (kept := self._setting(departure.facts["factor"], SCALES.fullmatch, own=True)):
            return f"queries and keys have length one, and their cosines are multiplied by what {kept}"
        if abs(abs(departure.facts["factor"]) - 1) < MEASURED and (gate := self._gate_of_pixels()):
            return f"no matrix but convolutions, and {gate} says how much of it is added, as in SAGAN and DANet"
        behind = self._names.operations[self.judgement.attention.last.index :]
        if departure.name == "scale_missing" and any(map(self._of_luong, behind)) and self.may_be_luongs(self.module):
            return OF_LUONG
        off = switch_off(self.module, SWITCH_OF_SCALE) if departure.name == "scale_missing" else ""
        return f"{off} is False" if off else self._configured(departure.facts["factor"])

    def _carried_by_a_rotation(self, departure: Departure, operands: list[Operand]) -> str:
        """A scale that the tables of a rotation hold, alike for queries and keys; "" for none."""
        turns = [self._own_scale(operand) for operand in operands if operand.change == "rotated"]
        if len(turns) < 2 or abs(turns[0] - turns[1]) >= LOOSE or abs(turns[0] - 1) <= LOOSE:
            return ""
        total = departure.facts["factor"] * math.sqrt(departure.facts["width"])
        kept = self._setting(abs(turns[0]), _is_no_size, own=True)
        if abs(total / turns[0] / turns[1] - 1) >= LOOSE or not (kept or self._takes_angles(operands[0])):
            return ""
        return f"the angles of the rotation carry a scale {f'that {kept}' if kept else 'of their own'}"

    def _gate_of_pixels(self) -> str:
        """The single number, learnt, of a module that projects by convolutions alone, or not; "" for any other."""
        inside = list(self.module.modules()) if self.module is not None else []
        others = [one for one in inside if not isinstance(one, nn.modules.conv._ConvNd)]
        held = [(name, x) for one in others for name, x in one.named_parameters(recurse=False)]
        single = [name for name, x in held if x.numel() == 1]
        return single[0] if single and all(x.dim() < 2 for _, x in held) else ""

    def _needs_no_scale(self, departure: Departure, operands: list[Operand]) -> bool:
        """Whether gains that are learnt stand for the scale, and the module does not say that there is one."""
        if departure.name != "scale_missing":
            return False
        learnt = [name for operand in operands for name in self._gains(operand)]
        return len(learnt) >= len(operands) and not self._stated_scale()

    def _sharpened(self, departure: Departure, operands: list[Operand]) -> float:
        """How much longer a number makes queries and keys behind their norms, if nothing else is unusual; else 0."""
        one, other = (operand.factor / self._own_scale(operand) for operand in operands)
        total = departure.facts["factor"] * math.sqrt(departure.facts["width"])
        alike = abs(one - other) < LOOSE and abs(total / one / other - 1) < LOOSE
        return one if one > 1 and alike and all(map(self._norms_before, operands)) else 0.0

    def _gains(self, operand: Operand) -> list[str]:
        """The parameters of the norms that an operand went through, one a norm."""
        norms = (source.operation for source in self._norms_before(operand) if source.operation is not None)
        return [name for norm in norms for name in self._parameters_beside(norm)][:1]

    def _stated_scale(self) -> bool:
        """Whether the module in which the product runs, or a configuration, holds a scale other than one."""
        place = self.judgement.attention.first.place
        owners = [self.module.get_submodule(place)] if self.module is not None else []
        held = (item for holder in [*owners, *self._holders()] for item in numbers_of(holder))
        return any(SCALES.fullmatch(name) and x not in (0, 1) for name, x in held)

    def _own_scale(self, operand: Operand) -> float:
        """What a rotation multiplies by, without what numbers multiply before it and after it."""
        scale = operand.factor
        for operation, _, value in operand.steps(self.run):
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
            if setting := self._setting(number, SCALES.fullmatch if abs(number - 1) < 1e-4 else named):
                return f"the scale is {word}what {setting}"
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


def _has_length_one(operand: Operand) -> bool:
    sizes = operand.slot.value.reshape(-1)[operand.places].double().norm(dim=-1)
    return near(sizes, torch.ones_like(sizes), SINGLE)


def _blaming(departure: Departure, operation: Operation, what: str) -> Departure:
    """Let a departure speak of another operation than the one that was seen first."""
    bent = changed_by(operation, departure.stage, what)
    return replace(bent, patches=departure.patches, names=departure.names, seen_in=departure.seen_in)


def _is_no_size(name: str) -> bool:
    return bool(SCALES.fullmatch(name)) or not SIZES.search(name)


def _is_no_count(name: str) -> bool:
    """Whether a whole number of this name is a width, where small ones match by chance."""
    return SCORING.search(name) is not None and _is_no_size(name)
