"""What torch's formula does not have and nobody would call a mistake: rotations, norms, masks and biases of its own."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.changing import strange_operations
from equivalence_tests.checker.engine.contracts.departure import Departure, changed_by
from equivalence_tests.checker.engine.contracts.operands import turns_of
from equivalence_tests.checker.engine.contracts.scores_table import causal_pattern, is_upper_left, ranks_of
from equivalence_tests.checker.engine.judgement import Judgement, Operand, WeightsModel
from equivalence_tests.checker.engine.names import Part, Source
from equivalence_tests.checker.engine.same import LOOSE, MEASURED, SINGLE, TABLE
from equivalence_tests.checker.engine.vocabulary import ADDS, FILLS, MOVES, MULTIPLIES
from equivalence_tests.checker.engine.watching import Operation, Slot
from equivalence_tests.checker.reach.angles import base_of
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.syntax import nodes_in

CAP = re.compile(r"cap|clip|clamp", re.IGNORECASE)
Names = Callable[[str], object]  # whether a name asks for it
WINDOW = re.compile(r"window|sliding|local|span|band|block|chunk|context_size", re.IGNORECASE)
NORMED = ("normed", "gain")
LAST = "last_key_hidden"
KINDS = {"arg": "argument", "param": "parameter", "buffer": "buffer"}


class Conventions:
    """Lists the conventions of one attention, each with the evidence that it is intended."""

    def __init__(self, judgement: Judgement, module: nn.Module | None) -> None:
        self.judgement, self.module = judgement, module
        self.modules = list(module.modules()) if module is not None else []
        self.run = judgement.attention.run
        self.recorder, self._names = self.run.recorder, self.run.names

    def conventions(self, departures: list[Departure]) -> Iterator[Departure]:
        """What torch's formula does not have, and nobody would call a mistake."""
        wrong = {departure.stage for departure in departures if not departure.evidence}
        yield from self._rotations(departures)
        yield from self._norms(departures)
        own = self.own_mask()
        if own is not None and self.is_judged(own) and "mask" not in wrong:
            yield own
        for model in self.judgement.models[:1]:
            if model.cap:
                yield self._capped(model)
            if "mask" not in wrong and "scores" not in wrong:
                yield from self._bent()
                yield from self._biases(self.judgement.attention.parts[0], model)

    def _rotations(self, departures: list[Departure]) -> Iterator[Departure]:
        rotated = [operand for operand in self.judgement.first_operands[:2] if operand.rotated]
        if len(rotated) == 2 and not any(d.stage == "rotary" for d in departures):
            steps = rotated[0].steps(self.run)
            place = next((operation for operation, _, _ in steps if operation.name == "mul"), None)
            paired = next((f", in {operand.pairs}" for operand in rotated if operand.pairs), "")
            turns, base = turns_of(self.run, rotated[0]), base_of(self.module)
            stated = self._numbers_beside(rotated[0])
            doubled = _is_whole(rotated[0]) and _falls_as(turns, base, 4) and base**2 not in stated
            if doubled and not self._takes_angles(rotated[0]):
                claim = f"From one token to the next, pair 1 turns by {base:g}^(-4 / d), pair 2 by {base:g}^(-8 / d)."
                yield Departure("position_exponent_wrong", "rotary", place, {"exponent": "4i / d", "claim": claim})
                return
            said = f"queries and keys are rotated by the same angles{paired}{_pace(turns, {base, *stated})}"
            yield Departure("rotary_positions", "rotary", place, evidence=said)

    def _takes_angles(self, operand: Operand) -> bool:
        """Whether the tables that rotate an operand are handed over: their base and scale are known elsewhere."""
        pairs = zip(self.recorder.names, self.recorder.given, strict=True)
        given = {name for name, x in pairs if name.startswith("arg:") and x.value.is_floating_point()}
        turning = (operation for operation, _, _ in operand.steps(self.run) if operation.name == "mul")
        beside = (pair for operation in turning for pair in self._names.beside(operation))
        sides = [self.recorder.named(bits) for _, bits in beside]
        return any(names and given.issuperset(names) for names in sides)

    def _numbers_beside(self, operand: Operand) -> set[float]:
        """The numbers in the files that rotate an operand."""
        steps = operand.steps(self.run)
        files = {path for operation, _, _ in steps for path, *_ in operation.frames if path.endswith(".py")}
        numbers = (getattr(node, "value", None) for path in files for node in nodes_in(path))
        return {float(x) for x in numbers if isinstance(x, int | float)}

    def _norms(self, departures: list[Departure]) -> Iterator[Departure]:
        both = self.judgement.first_operands[:2]
        normed = [operand for operand in both if operand.change == "normed" or self._norms_before(operand)]
        made = next((s.operation for o in normed for s in self._norms_before(o) if s.kind == "normed"), None)
        named = any("norm" in one.name for one in departures if one.name != "values_normalised")
        if len(normed) == 2:
            yield Departure("queries_and_keys_normalised", "norm", made, evidence="both are, each by its own norm")
        elif made is not None and not named and self._of_one_tensor():
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
                if is_upper_left(part, hidden, live):
                    return None
                operation, names = self._hiding()
                if len(judgement.attention.parts) == 1 and is_window_without_last(part, hidden, live):
                    claim = f"Of {ranks_of(part)[3]} tokens, the last is hidden from every query, and from its own."
                    return Departure(LAST, "mask", operation, {"claim": claim})
                evidence = _made_from(names[0]) if names else self._window(part, hidden, live)
                return Departure("own_mask", "mask", operation, evidence=evidence)
        return None

    def is_judged(self, own: Departure) -> bool:
        """Whether it is known of a pattern of the code's own that it is intended, or that it is wrong."""
        return bool(own.evidence) or own.name == LAST

    def _hiding(self) -> tuple[Operation | None, list[str]]:
        """The first operation that scores meet something else in, but for a scale, and what that is made from."""
        first: Operation | None = None
        for operation, _, bits, part in self._beside_scores():
            own = self.recorder.origins_of(part.product.operation.outputs[0].tensor)
            scales = operation.name in MULTIPLIES and bool(operation.outputs[0].value.all())
            if bits != own and not scales:  # the largest score has these
                first = first or operation
                if bits:
                    return operation, self.recorder.named(bits)
        return first, []

    def _window(self, part: Part, hidden: Tensor, live: Tensor) -> str:
        """A setting that is the width of the band that is left."""
        query, key, _, _ = ranks_of(part)
        apart = (key - query)[live]
        seen = apart[~hidden[live]]
        low, high = int(seen.min()), int(seen.max())
        if not torch.equal(hidden[live], (apart < low) | (apart > high)):
            return ""
        return self.width_named({-low, 1 - low, high, high + 1, high - low, high - low + 1})

    def _capped(self, model: WeightsModel) -> Departure:
        operation = next((op for op, _ in self._between() if op.name == "tanh"), None)
        evidence = self.limit_named("cap", model.cap)
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
                source = next((n for n in names if n.startswith("param:")), names[-1])
                yield Departure("bias_added", "bias", operation, evidence=_made_from(source))
                return
        adding = next((op for op, _ in self._between() if op.name in ADDS), None)
        graded = len((model.bias[live] * 1e6).round().unique()) > 4
        if graded and self._grows(part, model, live):
            yield Departure("bias_grows_with_distance", "bias", adding)
        elif graded:
            evidence = "it depends on the positions alone" if _by_distance(part, model, live) else ""
            yield Departure("bias_added", "bias", adding, evidence=evidence)

    def _grows(self, part: Part, model: WeightsModel, live: Tensor) -> bool:
        """Whether what is added is the greater the farther a key is from the query, before it or behind it.

        Between the patches of an image it is the least for the query's own: distances there have other orders.
        Where a mask argument may hide later keys, what is added for those keys is no evidence.
        """
        query, key, queries, keys = ranks_of(part)
        apart = [key - query - shift for shift in {0, keys - queries}]
        signs = (-1,) if self._takes_a_mask() else (-1, 1)
        in_a_row = any(_rises(model, live & (sign * x >= 0), sign * x) for x in apart for sign in signs)
        return in_a_row or _is_least_for_itself(part, model, live)

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
        for operation in strange_operations(self.run, slot, before.index):
            if operation.name in MOVES or any(map(self.recorder.parameters, operation.origins)):
                yield operation

    # what stands around the attention: settings, and what its scores meet between the two products
    def _setting(self, wanted: float, named: Names, own: bool = False) -> str:
        """Say which number of a configuration, or of a module's own, is the one that is wanted; "" if none is."""
        held = (item for holder in [*self._holders(), *(self.modules if own else ())] for item in numbers_of(holder))
        found = ((name, x) for name, x in held if named(name) and abs(x - wanted) < 1e-4 * abs(wanted))
        return next((f"{name} says ({x:g})" for name, x in found), "")

    def _holders(self) -> list[Any]:
        """The configurations that the modules hold, each once."""
        values = (x for child in self.modules for x in vars(child).values() if hasattr(x, "__dict__"))
        others = (nn.Module, Tensor, str, int, float, dict, list, tuple, set)
        return list({id(x): x for x in values if not isinstance(x, others) and not callable(x)}.values())

    def _norms_before(self, operand: Operand) -> list[Source]:
        """What norms of tokens made of an operand, after its projection."""
        made_of = self._names.made_of(source.number for source in operand.sources)
        return [s for s in made_of if s.kind in NORMED and (s.operation is None or s.operation.name != "batch_norm")]

    def _parameters_between(self, functions: frozenset[str]) -> list[str]:
        """Parameters that such functions take between the two products, without those that the scores are made of."""
        between = ((one, part.product.operation) for one, part in self._between() if one.name in functions)
        pairs = ((one, self.recorder.origins_of(product.outputs[0].tensor)) for one, product in between)
        return [name for one, own in pairs for name in self._parameters_beside(one, but=own)]

    def _parameters_beside(self, operation: Operation, but: int = 0) -> list[str]:
        """The parameters, but for these, of which an operation takes something besides what has names."""
        return [name for _, bits in self._names.beside(operation) for name in self.recorder.parameters(bits & ~but)]

    def _between(self) -> Iterator[tuple[Operation, Part]]:
        for part in self.judgement.attention.parts:
            for operation, _, _ in list(part.steps(self.run))[1:]:
                yield operation, part

    def _beside_scores(self) -> Iterator[tuple[Operation, Slot, int, Part]]:
        """What the scores meet between the two products: the operation, the tensor, and what that was made of."""
        own = {part.number for part in self.judgement.attention.parts}
        for operation, part in self._between():
            pairs = zip(operation.inputs, operation.origins, self._names.before[operation.index], strict=True)
            yield from ((operation, slot, bits, part) for slot, bits, x in pairs if not is_of(x, own))

    def limit_named(self, what: str, limit: float) -> str:
        """Say which setting is the limit of the scores; "" if none is."""
        setting = self._setting(limit, CAP.search, own=True)
        return f"the {what} is what {setting}" if setting else ""

    def width_named(self, widths: Iterable[float]) -> str:
        """Say which setting is as wide as what is seen; "" if none is."""
        settings = (self._setting(width, WINDOW.search, own=True) for width in widths)
        return next((f"it is as wide as {setting}" for setting in settings if setting), "")

    def _takes_a_mask(self) -> bool:
        """Whether the module that holds the attention, or one around it, may be given a mask."""
        around = modules_around(self.module, self.judgement.attention.first.place)
        return not around or any(role_of_parameter(p.name) == "mask" for one in around for p in parameters_of(one))


def is_window_without_last(part: Part, hidden: Tensor, live: Tensor) -> bool:
    """Whether a window, or nothing, is hidden, and the last key from all queries."""
    query, key, queries, keys = ranks_of(part)
    apart, seen, last = (key - query).abs(), live & ~hidden, key == keys - 1
    others = live & ~last
    if queries != keys or not bool(seen.any()) or not bool(hidden[live & last].all()):
        return False
    outside = apart > apart[seen].max()
    return bool(others.any()) and torch.equal(hidden[others], outside[others])


def modules_around(module: nn.Module | None, place: str) -> list[nn.Module]:
    """Give what holds the module at a path, and that itself, the outermost first; nothing of a function."""
    held = module.named_modules() if module is not None else ()
    return [own for path, own in held if not path or f"{place}.".startswith(f"{path}.")]


def is_of(codes: Tensor | None, numbers: set[int]) -> bool:
    """Whether some names come from any of these sources."""
    return codes is not None and bool(set(sources_in(codes)) & numbers)


def numbers_of(holder: Any) -> Iterator[tuple[str, float]]:
    """List the finite numbers that an object holds, by their names; of pairs, as of sides, both."""
    for name, held in sorted(vars(holder).items(), key=lambda item: str(item[0])):
        for value in held if isinstance(held, tuple) and len(held) == 2 else (held,):
            plain = isinstance(value, int | float) and not isinstance(value, bool)
            if plain and math.isfinite(value) and not str(name).startswith("_"):
                yield str(name), float(value)


def _made_from(name: str) -> str:
    """Say what is made from a tensor with a name such as "arg:attention_mask"."""
    kind, _, own = name.partition(":")
    return f"it is made from the {KINDS[kind]} {own}"


def _rises(model: WeightsModel, live: Tensor, distance: Tensor) -> bool:
    """Whether what is added rises with these distances, in every row."""
    order = (model.rows[live] * (int(distance.max()) + 1) + distance[live]).argsort()
    rows, apart, bias = (x[live][order] for x in (model.rows, distance, model.bias))
    farther = (rows.diff() == 0) & (apart.diff() > 0)
    return bool((farther & (apart[1:] > 1)).any()) and bool((bias.diff()[farther] > MEASURED).all())


def _is_least_for_itself(part: Part, model: WeightsModel, live: Tensor) -> bool:
    """Whether each token adds the least to its own score, and more of several numbers to those of others."""
    query, key, queries, keys = ranks_of(part)
    own = live & (query == key)
    if queries != keys or not bool(own.any()):
        return False
    least = torch.full((int(model.rows.max()) + 1,), torch.nan, dtype=model.bias.dtype)
    least[model.rows[own]] = model.bias[own]
    more = (model.bias - least[model.rows])[live]
    return bool((more > -MEASURED).all()) and len((more * 1e6).round().unique()) > 4


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


def _is_whole(operand: Operand) -> bool:
    """Whether all of a head that is wide enough is rotated, in neighbours or in halves."""
    pairs, width = operand.pairs, operand.codes.size(-1)
    return pairs is not None and not pairs.start and width >= 8 and pairs.apart in (1, width // 2)


def _falls_as(turns: Tensor, base: float, power: int) -> bool:
    """Whether pair i turns by base ** (-power i / d) from one token to the next."""
    wanted = base ** (-power * torch.arange(len(turns), dtype=turns.dtype) / (2 * len(turns)))
    return len(turns) > 0 and torch.allclose(turns, wanted, rtol=1e-3, atol=0)


def _pace(turns: Tensor, bases: set[float]) -> str:
    """Say by how much pairs turn where it is not by a base that is known, to the power of -2i / d; "" where it is."""
    if turns.isnan().any():
        return "; they do not turn by the same angle from each token to the next"
    if not len(turns) or not turns[0]:
        return ""
    first = turns[0].item()
    said = f"; pair 1 turns by {first:.4g}, not by 1, from one token to the next" if abs(first - 1) > SINGLE else ""
    base = (1 / max((turns[1:2] / first).sum().item(), 1e-12)) ** len(turns)
    known = next((one for one in (*bases, base) if one > 0 and _falls_as(turns / first, one, 2)), None)
    if known is None:
        return f"{said}; pair i does not turn by base^(-2i / d)"
    return said if known in bases or len(turns) == 1 else f"{said}; the base is {base:.6g}"
