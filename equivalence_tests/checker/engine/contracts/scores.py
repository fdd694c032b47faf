"""Scale, mask and softmax of one part, held against torch's formula."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import known, place_of, source_of
from equivalence_tests.checker.engine.contracts.departure import Departure, as_it_was, changed_by, unmixed
from equivalence_tests.checker.engine.contracts.formula import right_weights, scale_in_words
from equivalence_tests.checker.engine.contracts.score_steps import Step, divided, fill_of, named_fill, ratio_of
from equivalence_tests.checker.engine.contracts.scores_table import (
    causal_pattern,
    hidden_by_formula,
    mask_name,
    padded_queries,
    ranks_of,
    spread,
    sum_in,
    two_levels,
    with_some,
)
from equivalence_tests.checker.engine.judgement import Expectation, Operand, WeightsModel
from equivalence_tests.checker.engine.names import Attention, Part
from equivalence_tests.checker.engine.products import contraction_of
from equivalence_tests.checker.engine.ran import drops
from equivalence_tests.checker.engine.same import HIDING, LOOSE, MEASURED, UNDERFLOW, constant_ratio, identical
from equivalence_tests.checker.engine.vocabulary import (
    ADDS,
    COMPARES,
    CONTRACTIONS,
    FILLS,
    MULTIPLIES,
    NORMS,
    SOFTMAXES,
    words,
)
from equivalence_tests.checker.engine.watching import Operation, Patch, Slot
from equivalence_tests.checker.mistakes import MISTAKES
from equivalence_tests.checker.reporting.lines import Frames

LAID_OVER = ADDS | FILLS | words("unsqueeze to")  # a bias and a mask, before both are added as one


@dataclass(eq=False)
class Scores:
    """What stands between a product of queries and keys and the weights that are used."""

    attention: Attention
    part: Part
    operands: list[Operand]
    model: WeightsModel
    expected: Expectation

    @cached_property
    def steps(self) -> list[Step]:
        """What happens from the product to the weights that are used."""
        names = self.attention.run.names
        found: list[Step] = []
        for operation, codes, value in self.part.steps(self.attention.run):
            taken = next((slot.value for slot, _ in names.taken(operation)), None)
            own = known(codes) & (source_of(codes) == self.part.number)  # another product may stand beside it
            step = Step(operation, place_of(codes).masked_fill(~own, -1), value, taken)
            if taken is not None and value.is_floating_point():
                step.ratio = ratio_of(value, operation.inputs[0].value if operation.inplace else taken)
            found.append(step)
        return found

    @property
    def width(self) -> int:
        """By whose root the scores are divided."""
        return self.part.product.width

    # ------------------------------------------------------------------------------------------ in order
    def departures(self) -> Iterator[Departure]:
        """The departures in the order of the formula."""
        unread = self._dropped() or self._mixed() or self._precision() or self._filled_up() or self._kind()
        if unread is not None:
            yield unread
            return
        after = self._after_softmax()
        late = after is not None and after.name == "scale_after_softmax"
        yield from filter(None, (after, None if late else self._scale()))
        yield from self._mask()
        yield from self._idle_biases()

    @property
    def total(self) -> float:
        """What the product of queries and keys is multiplied by, 1 where it is 1 / sqrt(width)."""
        return self.model.factor * self.operands[0].factor * self.operands[1].factor * math.sqrt(self.width)

    # ------------------------------------------------------------------------------------------ what keeps it unread
    def _dropped(self) -> Departure | None:
        """Dropout that drops, though the call is one of evaluation."""
        dropped = (s.operation for s in self.steps if s.operation.patch is None and drops(s.operation))
        return next((self._blocking("dropout_in_eval", "dropout", x, {x.index: as_it_was}) for x in dropped), None)

    def _mixed(self) -> Departure | None:
        """Scores or weights of different heads that are mixed by what is learnt, and normalised beside that."""
        run = self.attention.run
        own = [step.operation for step in self.steps[1:] if step.operation.patch is None]
        mixing = [one for one in own if one.name in CONTRACTIONS]
        if not mixing:
            return None
        patches: dict[int, Patch] = {one.index: unmixed for one in own if one in mixing or one.name in NORMS}
        if self._gives_weight_to_hidden(max(patches)):
            return self._blocking("hidden_keys_mixed_in", "mask", run.operations[max(patches)], patches)
        users = {name: run.graph.users(slot) for name, slot in zip(run.recorder.names, run.recorder.given, strict=True)}
        beside = [name for one in mixing for _, bits in run.names.beside(one) for name in run.recorder.parameters(bits)]
        names = [name for name in beside if all(one.index in patches for one in users[f"param:{name}"])]
        evidence = f"the parameter {names[0]} says how" if names else ""
        return replace(self._blocking("heads_mixed", "softmax", mixing[0], patches), evidence=evidence)

    def _gives_weight_to_hidden(self, index: int) -> bool:
        """Whether an operation behind the softmax gives keys a weight that have none in any head."""
        table, softmax = self.part.table, self._softmax_step().index
        laid = {step.operation.index: step.laid(len(table.row)).nan_to_num(0.0) for step in self.steps}
        if softmax not in laid or index < softmax:
            return False
        weight = sum_in(laid[softmax].abs(), table.query * (int(table.key.max()) + 1) + table.key)
        return bool((laid[index][weight == 0] != 0).any())

    def _precision(self) -> Departure | None:
        patched = any(step.operation.patch is not None for step in self.steps)
        wide = self.part.product.operation.outputs[0].value.dtype in (torch.float64, torch.float32)
        for step in self.steps if wide and not patched else ():
            if step.values.dtype in (torch.float16, torch.bfloat16):
                name = f"softmax_in_{str(step.values.dtype).removeprefix('torch.')}"
                return self._blocking(name, "softmax", step.operation, self._softmaxed())
        return None

    def _filled_up(self) -> Departure | None:
        """A large positive number in the place of scores: what should be hidden takes all."""
        for step in self.steps:
            fill = fill_of(step.operation)
            if fill is not None and fill > -UNDERFLOW and step.operation.patch is None:
                prefix = "mask" if self.expected.masked else "causal"
                facts, causal = {"fill": fill}, not self.expected.masked
                return self._put_right(f"{prefix}_fill_positive", "mask", step.operation, facts, causal=causal)
        return None

    # ------------------------------------------------------------------------------------------ softmax
    def _kind(self) -> Departure | None:
        model, named = self.model, f"{self._softmax_step().name}_for_softmax"
        if model.kind == "linear" or named in MISTAKES:
            context = self.part.contexts[0].operation
            return self._in_its_place() or self._put_right("softmax_missing", "softmax", context, rescaled=True)
        if model.axis not in ("keys", ""):
            return self._blocking(f"softmax_over_{model.axis}", "softmax", self._softmax_step(), self._softmaxed())
        return self._in_its_place() or self._unknown() if model.kind == "other" else None

    def _in_its_place(self) -> Departure | None:
        """Another function in the place of the softmax, as rows of ``mistakes`` name it; not beside one."""
        named = [(f"{step.operation.name}_for_softmax", step.operation) for step in self.steps]
        known = [(name, operation) for name, operation in named if name in MISTAKES]
        ours = {operation for _, operation in known}
        if not known or any(op.name in SOFTMAXES | {"exp", "exp2"} for _, op in named if op not in ours):
            return None
        name, operation = known[0]
        return self._put_right(name, "softmax", operation, rescaled=True)

    def _softmax_step(self) -> Operation:
        named = [s.operation for s in self.steps if s.operation.name in SOFTMAXES]
        exponentials = [s.operation for s in self.steps if s.operation.name == "exp"]
        return (named or exponentials or [self.part.contexts[0].operation])[-1]

    def _unknown(self) -> Departure:
        """What no reading explains: the first operation that does what no stage does."""
        softmax, table = self._softmax_step(), self.part.table
        columns = table.head * (int(table.key.max()) + 1) + table.key
        if softmax.name in SOFTMAXES and self._sum_to_one(columns) and not self._sum_to_one(table.row):
            return self._put_right("softmax_over_queries", "softmax", softmax)
        strange = [step for step in self.steps if self._is_odd(step)]
        strange.sort(key=lambda step: step.operation.name in MULTIPLIES | {"tanh"})  # learnt, or a cap
        if not strange and sum(step.operation.name in SOFTMAXES for step in self.steps) > 1:
            return self._put_right("softmax_twice", "softmax", softmax)
        context = self.part.contexts[0]
        if not strange and softmax.index not in self.attention.run.graph.live([context.operands[0].tensor]):
            return self._put_right("softmax_missing", "softmax", context.operation, rescaled=True)
        added = (s.operation for s in self.steps if s.operation.index > softmax.index and s.operation.name in ADDS)
        if not strange and softmax.name in SOFTMAXES and (late := next(added, None)) is not None:
            return changed_by(late, "softmax", "weights", patches=self._softmaxed())
        operation = strange[0].operation if strange else self.part.contexts[0].operation
        if operation.name in COMPARES:
            return self._put_right("keys_hidden_by_their_scores", "scores", operation)
        return changed_by(operation, "scores", "scores", patches=self._softmaxed())

    def _sum_to_one(self, groups: Tensor) -> bool:
        """Whether the scores of each group sum to one behind the softmax, whatever becomes of them then."""
        given = next(s.laid(len(groups)) for s in self.steps if s.operation is self._softmax_step()).nan_to_num(0.0)
        return bool(((sum_in(given, groups) - 1).abs() < LOOSE).all())

    def _is_odd(self, step: Step) -> bool:
        """Whether a step changes scores that are seen, in another way than by a factor, a sum or a softmax."""
        name = step.operation.name
        if step.ratio is not None or step.operation.index == self.part.product.operation.index:
            return False
        if name in SOFTMAXES or name in ("exp", "dropout", "exp2", "log", "nan_to_num") or name in ADDS | FILLS:
            return False
        if step.taken is None:
            return True
        moved = torch.equal(step.taken.flatten().sort().values, step.values.flatten().sort().values)
        return not identical(step.taken, step.values) and (not moved or name in ("roll", "flip"))

    def _after_softmax(self) -> Departure | None:
        """What happens to the weights after the softmax."""
        model = self.model
        if model.axis != "" or model.kind != "softmax":
            return None
        live = model.live
        sums = model.sums[live]
        ratio = constant_ratio(sums, torch.ones_like(sums), LOOSE if model.single else MEASURED)
        operation = self._weights_changed()
        if ratio is not None:
            after = abs(ratio * math.sqrt(self.width) - 1) < LOOSE
            scale_gone = abs(self.total / math.sqrt(self.width) - 1) < LOOSE
            name = "scale_after_softmax" if after and scale_gone else "weights_scaled"
            mixed = any(step.operation.patch is unmixed for step in self.steps)  # then rows sum to one nowhere
            patches = {} if mixed else self._softmaxed(rescaled=name != "weights_scaled")
            return Departure(name, "softmax", operation, {"factor": ratio}, patches)
        if bool(model.hidden.any()):
            name = "mask_after_softmax" if self.expected.masked else "causal_mask_after_softmax"
            return self._put_right(name, "mask", operation)
        return changed_by(operation, "softmax", "weights", patches=self._softmaxed())

    def _weights_changed(self) -> Operation:
        """The first operation after the softmax that gives something else."""
        after = False
        for step in self.steps:
            if after and step.ratio != 1.0:
                return step.operation
            after = after or step.operation is self._softmax_step()
        return self.part.contexts[0].operation

    # ------------------------------------------------------------------------------------------ scale
    def _scale(self) -> Departure | None:
        by_head, right, index = self.model.by_head, math.sqrt(self.width), self.part.product.operation.index
        if by_head is not None:  # heads whose scores are multiplied by different numbers
            several = [s.operation for s in self.steps if s.ratio is None and s.operation.name in MULTIPLIES]
            name, operation, factor = "scale_differs_by_head", next(iter(several), None), float(by_head.mean())
            total = by_head * (self.operands[0].factor * self.operands[1].factor * right)
        elif math.isnan(self.total) or abs(self.total - 1) < (LOOSE if self.model.single else MEASURED):
            return None
        else:
            total, factor = torch.tensor(self.total, dtype=torch.float64), self.total / right
            name, operation = "scale_missing" if abs(factor - 1) < LOOSE else "scale_wrong", self._scaling()
        words, patches = scale_in_words(factor, self._sizes()), {index: partial(divided, total)}
        scale = words or f"* {factor:.4g}"
        how = ("divided by" if scale[0] == "/" else "multiplied by") + scale[1:]
        facts = {"factor": factor, "width": self.width, "of_a_size": bool(words), "scale": scale, "how": how}
        return Departure(name, "scale", operation or self.part.product.operation, facts, patches)

    def _sizes(self) -> dict[str, int]:
        _, _, queries, keys = ranks_of(self.part)
        samples, heads = len(self.part.table.query.unique()) // queries, len(self.part.table.heads)
        sizes = {"head_dim": self.width, "embed_dim": self._width_of_input(), "num_heads": heads}
        sizes["num_heads * head_dim"] = heads * self.width
        return sizes | {"key_len": keys, "query_len": queries, "batch": samples}

    def _width_of_input(self) -> int:
        """How many features a token has; the width of all heads where nothing is projected, or each by itself."""
        made = [source.operation for source in self.operands[0].sources if source.operation is not None]
        contraction = contraction_of(made[0]) if made else None
        width = self.width if contraction is None else contraction.left.size(-1)
        return width if width != self.width else self.width * len(self.part.table.heads)

    def _scaling(self) -> Operation | None:
        """What multiplies all scores, or all of an operand, by one number: the one too many, or else the last."""
        softmax, run = self._softmax_step().index, self.attention.run
        found = [(s.operation, s.ratio) for s in self._outside_a_cap() if s.operation.index < softmax]
        ways = [(op, value) for operand in self.operands[:2] for op, _, value in operand.steps(run)]
        beside = [(op, ratio_of(value, op.inputs[0].value)) for op, value in ways if op.name in MULTIPLIES]
        before, operands = ([(op, r) for op, r in own if r and abs(r - 1) > MEASURED] for own in (found, beside))
        lines: dict[Frames, dict[Operation, float]] = {}
        for operation, ratio in (*before, *operands):
            lines.setdefault(operation.frames[:1], {})[operation] = ratio
        for line in lines.values():
            if len(lines) > 1 and abs(self.total / math.prod(line.values()) - 1) < LOOSE:
                return next(iter(line))
        return next((operation for operation, _ in (*before[-1:], *operands[:1])), None)

    def _outside_a_cap(self) -> list[Step]:
        """The steps without the factors right before and after a tanh, which undo one another."""
        bent = next((i for i, step in enumerate(self.steps) if step.operation.name == "tanh"), None)
        around = () if bent is None else (bent - 1, bent, bent + 1)
        return [step for i, step in enumerate(self.steps) if i not in around]

    # ------------------------------------------------------------------------------------------ mask
    def _mask(self) -> Iterator[Departure]:
        model, may = self.model, self.expected.may
        live = model.live
        soft = model.replaced & live
        if may is None:
            yield from self._own_mask(live, soft)
            return
        padding = model.dead[model.rows] & torch.isin(self.part.table.query, padded_queries(self.part, may))
        wanted, live = ~may, ~model.weights.isnan() & with_some(may, model.rows) & ~padding
        if bool((model.hidden | soft)[live].any()) or bool(wanted[live].any()):
            yield from self._given_mask(live, soft, wanted)

    def _own_mask(self, live: Tensor, soft: Tensor) -> Iterator[Departure]:
        """What the code hides by itself: causal masks that are shifted, reversed, or too weak."""
        hidden = self.model.hidden
        if bool(self.model.dead.all()):
            filling, run = self._replacing(torch.ones_like(hidden)), self.attention.run
            made_of = [name for _, bits in run.names.beside(filling) for name in run.recorder.named(bits)]
            if fill_of(filling) is not None and any(name.startswith("arg:") for name in made_of):
                yield self._put_right("mask_inverted", "mask", filling)
            return
        pattern = causal_pattern(self.part, hidden | soft, live)
        if bool(soft.any()):
            yield self._weak("causal" if pattern else "mask", soft)
            return
        if bool(hidden.any()) and pattern not in ("", "causal"):
            yield self._put_right(pattern, "mask", self._masking(hidden), causal=True)
        levels, operation = two_levels(self.model, live & ~hidden), self._adding()
        if levels is not None and abs(abs(levels) - 1) <= MEASURED and operation is not None:
            prefix = "" if self.expected.masked else "causal_"
            yield self._put_right(f"{prefix}mask_added_as_01", "mask", operation, causal=True)

    def _idle_biases(self) -> Iterator[Departure]:
        """What is added to the scores and is one number for all keys that a query sees: the softmax takes it away."""
        rows, recorder = self.model.rows, self.attention.run.recorder
        seen = self.model.live & ~self.model.hidden
        if not bool(seen.any()) or spread(self.part.table.rank_key.double()[seen], rows[seen]) == 0:
            return
        own = recorder.origins_of(self.part.product.operation.outputs[0].tensor)
        for step in self.steps:
            beside = self.attention.run.names.beside(step.operation) if step.operation.name in ADDS else []
            for slot, bits in beside:
                given = bool(bits & own) or any(name.startswith("arg:") for name in recorder.named(bits))
                summands = [] if given else self._summands(slot, step.operation.index)
                if any(self._changes_nothing(step.met_by(x, len(rows)), seen) for x in summands):
                    yield _idle_bias(step.operation, recorder.parameters(bits))

    def _summands(self, slot: Slot, before: int) -> list[Tensor]:
        """What is added to the scores, and what that is the sum of, or was before some of it was filled."""
        found, maker = [slot.value], self.attention.run.graph.maker(slot, before)
        if maker is not None and maker.name in LAID_OVER:
            alike = [taken for taken in maker.inputs if taken.value.shape[-2:] == slot.value.shape[-2:]]
            found += [x for taken in alike for x in self._summands(taken, maker.index)]
        return found

    def _changes_nothing(self, added: Tensor, seen: Tensor) -> bool:
        """Whether what hides nothing differs among scores, and not among those of the keys that a query sees."""
        hides_none = bool((added > UNDERFLOW).all())
        graded = hides_none and len((added / MEASURED).round().unique()) > 2  # a mask in the making is not
        return graded and spread(added[seen], self.model.rows[seen]) < MEASURED

    def _adding(self) -> Operation | None:
        """The first sum of scores with what hides some of them; without one, the first sum."""
        found = [step.operation for step in self.steps if step.operation.name in ADDS]
        return next((op for op in found if self._takes_a_mask(op)), next(iter(found), None))

    def _takes_a_mask(self, operation: Operation) -> bool:
        beside = (slot.value for slot, _ in self.attention.run.names.beside(operation))
        return any(x.is_floating_point() and bool((x.abs() > HIDING).any()) for x in beside)

    def _masking(self, hidden: Tensor) -> Operation:
        """The first operation that hides what is hidden."""
        held_down = (step.operation for step in self.steps if bool((step.laid(len(hidden))[hidden] < UNDERFLOW).any()))
        return next(held_down, self._softmax_step())

    def _weak(self, prefix: str, soft: Tensor) -> Departure:
        operation = self._replacing(soft)
        if operation.name == "mul":
            name = "mask_multiplied" if prefix == "mask" else "causal_mask_multiplied"
            return self._put_right(name, "mask", operation, causal=True)
        given = fill_of(operation)
        fill = float(self.model.fill[soft].median()) if given is None else given
        return self._put_right(f"{prefix}_{named_fill(fill)}", "mask", operation, {"fill": fill}, causal=True)

    def _replacing(self, soft: Tensor) -> Operation:
        """The operation that puts something else in the place of scores."""
        previous = self.part.product.operation.outputs[0].value.double().reshape(-1)
        for step in self.steps[1:]:
            given = step.laid(len(previous))
            here = soft & ~given.isnan()
            if step.ratio is None and step.operation.name not in SOFTMAXES and bool(here.any()):
                other = constant_ratio(given[here], previous[here])
                if other is None or abs(other) < 1e-12:
                    return step.operation
            previous = given if bool(here.any()) else previous
        return self._softmax_step()

    def _given_mask(self, live: Tensor, soft: Tensor, wanted: Tensor) -> Iterator[Departure]:
        model = self.model
        hidden = model.hidden
        levels = two_levels(model, live & ~hidden & ~soft)
        if torch.equal((hidden | soft)[live], wanted[live]):
            if bool(soft[live].any()):
                yield self._weak("mask", soft)
            return
        if levels is not None:
            word = "added_as_01" if abs(levels - 1) < MEASURED else named_fill(levels)
            yield self._put_right(f"mask_{word}", "mask", self._adding() or self._softmax_step(), {"fill": -levels})
            return
        dead = model.dead[model.rows]
        every = (~model.weights.isnan() | dead) & with_some(~wanted, model.rows)  # rows that see nothing tell too
        name = mask_name(self.part, hidden | soft, wanted, live)
        if name in ("mask_hides_other_entries", "mask_never_used"):
            hidden, live = hidden | dead, every
            name = mask_name(self.part, hidden | soft, wanted, live)
        operation = self._masking(hidden) if bool(hidden[live].any()) else self._softmax_step()
        if name == "mask_inverted" and operation is self._softmax_step():
            operation = self._adding() or operation
        yield self._put_right(name, "mask", operation)

    # ------------------------------------------------------------------------------------------ putting right
    def _blocking(self, name: str, stage: str, operation: Operation, patches: dict[int, Patch]) -> Departure:
        """What keeps the rest from being read; what is put right keeps its names."""
        names = {index: self.attention.run.names.after[index][0] for index in patches}
        kept = {index: codes for index, codes in names.items() if codes is not None}
        return Departure(name, stage, operation, {}, patches, kept, blocks=True)

    def _put_right(
        self, name: str, stage: str, operation: Operation, facts: Mapping[str, float] | None = None, **how: bool
    ) -> Departure:
        return Departure(name, stage, operation, facts or {}, self._softmaxed(**how))

    def _softmaxed(self, causal: bool = False, rescaled: bool = False) -> dict[int, Patch]:
        """The right weights in the place of those that are used."""
        part, model, expected = self.part, self.model, self.expected
        right = 1 / (self.operands[0].factor * self.operands[1].factor * math.sqrt(self.width))
        factor = right if math.isnan(model.factor) or model.kind == "other" or rescaled else model.factor
        hidden = hidden_by_formula(part, model.hidden, expected.may, "causal" if causal else "")
        patches: dict[int, Patch] = {}
        for context in part.contexts:
            maker = self._maker_of(context.operands[0], context.operation.index)
            names = None if maker is None else self.attention.run.names.after[maker.index][0]
            if maker is not None and names is not None:
                patches[maker.index] = partial(right_weights, part, names, hidden, factor)
        return patches

    def _maker_of(self, weights: Slot, before: int) -> Operation | None:
        """What gives the weights of each head, before they are mixed."""
        maker = self.attention.run.graph.maker(weights, before)
        while maker is not None and maker.patch is unmixed:
            taken = next(slot for slot in maker.inputs if slot.value.shape == weights.value.shape)
            maker = self.attention.run.graph.maker(taken, maker.index)
        return maker


def _idle_bias(operation: Operation, learnt: list[str]) -> Departure:
    if learnt:
        return Departure("bias_never_used", "project", operation, {"parameter": learnt[0]})
    return Departure("bias_without_effect", "bias", operation)
