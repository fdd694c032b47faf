"""From scores to weights: scale, bias, mask and softmax, read by what they do to other scores.

The recorded operations between the two products are run again on scores of our own. What comes out is
softmax(factor * score + bias) for some factor and bias, or it is something else.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import known, place_of, source_of
from equivalence_tests.checker.engine.contracts.scores_table import greatest_in, sum_in
from equivalence_tests.checker.engine.judgement import WeightsModel
from equivalence_tests.checker.engine.names import Context, Part, Run
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.same import HIDING, MEASURED, ROUNDING, SINGLE, SMALLEST, VANISHED, constant_ratio
from equivalence_tests.checker.engine.watching import Operation

STEP = 4.0
GENTLE = 1e-2


def read_weights(run: Run, part: Part, context: Context) -> WeightsModel:
    """Find the scale, bias, mask and kind of softmax between the scores of one product and their weights.

    Where no formula fits, the scores are too small for a tanh to bend them.
    """
    reader = _Reader(run, part, context)
    model = reader.read(1.0)
    if model.kind == "other":
        cap = reader.cap()
        gentle = reader.read(GENTLE, capped=bool(cap))
        return replace(gentle, cap=cap) if gentle.kind == "softmax" else model
    return model


# How the logarithms of weights moved, by how much the scores did, and where that counts; less the means of the rows.
_Seen = tuple[Tensor, Tensor, Tensor]


class _Reader:
    def __init__(self, run: Run, part: Part, context: Context) -> None:
        self.run, self.part, self.context = run, part, context
        self.raw = part.product.operation.outputs[0].value.double().reshape(-1)
        self.rows = part.table.row
        dtypes = {slot.value.dtype for operation, _, _ in self._steps() for slot in operation.outputs}
        self.capped = False
        self.single = bool(dtypes & {torch.float32, torch.float16, torch.bfloat16})
        self.tolerance = SINGLE if self.single else MEASURED

    def _steps(self) -> Iterator[tuple[Operation, Tensor, Tensor]]:
        return self.run.names.carrying([self.part.number], before=self.context.operation.index + 1)

    def weights_of(self, raw: Tensor) -> Tensor:
        """Give the attention weights, flat, that other raw scores would get; NaN where a score has no weight."""
        operation = self.part.product.operation
        slot = operation.outputs[0]
        given = raw.view(slot.value.shape).to(slot.value.dtype)
        asked, until = self.context.operands[0], self.context.operation.index - 1
        found = replayed(self.run.recorder, {slot.key: given}, operation.index, asked, until)
        values = asked.value if found is None else found
        laid = self.context.contraction.rows(values).double()
        flat = torch.full((len(self.raw),), torch.nan, dtype=torch.float64)
        has = known(self.context.weights)
        flat[place_of(self.context.weights)[has]] = laid[has]
        return flat

    def cap(self) -> float:
        """Give what the result of a tanh is multiplied by, as where scores are capped; 0 without a tanh."""
        held = False
        for operation, _, value in self._steps():
            if held and operation.inputs and operation.inputs[0].value.shape == value.shape:
                return constant_ratio(value, operation.inputs[0].value) or 0.0
            held = held or operation.name == "tanh"
        return 0.0

    def read(self, size: float, capped: bool = False) -> WeightsModel:
        """Read the weights of drawn scores of a size."""
        self.capped = capped
        used = self.weights_of(self.raw)
        spread = torch.randn(len(self.raw), generator=torch.Generator().manual_seed(3), dtype=torch.float64) * size
        none, some = self.weights_of(torch.zeros_like(self.raw)), self.weights_of(spread)
        nothing, sums = torch.zeros_like(used), sum_in(used.nan_to_num(0.0), self.rows)
        model = WeightsModel(torch.nan, nothing, used, nothing.bool(), nothing, sums, self.rows, single=self.single)
        seen = ~used.isnan()
        hidden = seen & (none.abs() <= SMALLEST) & (some.abs() <= SMALLEST)
        model.dead = self._dead_rows(none, some, seen, hidden)
        live = seen & ~hidden & ~model.dead[self.rows]
        if bool((none[live] <= 0).any()) or not bool(live.any()):
            return self._unexponential(model, none, some, spread, live)
        self._read_exponential(model, none, some, spread, live, hidden)
        return model

    def _dead_rows(self, none: Tensor, some: Tensor, seen: Tensor, hidden: Tensor) -> Tensor:
        """Which rows have NaN, or have the same weights whatever the scores are though several keys are visible."""
        cases = seen & (none.isnan() | some.isnan()), seen & ((none - some).abs() > 1e-12), seen & ~hidden
        count = int(self.rows.max()) + 1
        broken, moved, visible = (torch.bincount(self.rows[where], minlength=count) for where in cases)
        return (broken > 0) | ((moved == 0) & (visible != 1))

    def _read_exponential(
        self, model: WeightsModel, none: Tensor, some: Tensor, spread: Tensor, live: Tensor, hidden: Tensor
    ) -> None:
        """Add to the model the factor, bias and replaced scores of weights that are exponentials of scores."""
        axis, rows = self._axis(some, live)
        logs = _logs(none)
        rise = _logs(self.weights_of(torch.full_like(self.raw, STEP))) - logs
        model.replaced = live & (greatest_in(rise, rows, live) - rise > 0.05) & (not self.capped)
        follows = live & ~model.replaced
        bias = _centred(logs, rows, follows)
        model.fill = bias.masked_fill(~model.replaced, 0.0)
        model.bias = bias.masked_fill(hidden, -torch.inf).masked_fill(~live & ~hidden, 0.0)
        if int(torch.bincount(rows[follows], minlength=1).max()) < 2:
            whole = bool(((model.sums - 1)[live].abs() <= self.tolerance).all())
            model.axis = axis or ("keys" if whole else "")
            return  # a single key takes all, whatever its score
        model.axis = axis
        visible = follows & (model.weights > VANISHED)
        drawn = _centred(_logs(some) - logs, rows, follows), _centred(spread, rows, follows), follows
        own = _centred(_logs(model.weights) - logs, rows, visible), _centred(self.raw, rows, visible), visible
        factor, by_head = (self._slope(*drawn, groups) for groups in (torch.zeros_like(rows), self.part.table.head))
        model.factor = float(factor[0])
        if not self._fits(factor, drawn, own):
            model.by_head = by_head if self._fits(by_head, drawn, own) else None
            model.kind = "softmax" if model.by_head is not None else "other"
        elif model.factor == 0:  # only what is hidden follows the formula, as where scores are subtracted from weights
            model.kind = "other"

    def _fits(self, factor: Tensor, drawn: _Seen, own: _Seen) -> bool:
        """Whether log weights are a factor times the scores, both for the drawn scores and for those of the call."""
        tolerance = SINGLE if self.single else 10 * ROUNDING
        slack = tolerance * (1 + float(factor.abs().max())) * (0.1 if self.capped else 1)
        moved, spread, follows = drawn
        used, raw, visible = own
        if not bool(((moved - factor * spread)[follows].abs() <= slack).all()):
            return False
        scale = 1 + float((factor * raw)[visible].abs().max()) if bool(visible.any()) else 1.0
        return self.capped or bool(((used - factor * raw)[visible].abs() <= tolerance * scale).all())

    def _slope(self, moved: Tensor, spread: Tensor, where: Tensor, groups: Tensor) -> Tensor:
        """Fit what the scores of each group are multiplied by, one number per score; NaN where there are none."""
        both, under = (sum_in(x.masked_fill(~where, 0.0), groups) for x in (moved * spread, spread**2))
        return both / under

    def _axis(self, some: Tensor, live: Tensor) -> tuple[str, Tensor]:
        """Find the axis over which the weights sum to one ("" for none), and for each score the number of its sum."""
        table = self.part.table
        width = int(table.key.max()) + 1
        tall = int(table.query.max()) + 1
        groupings = {
            "keys": lambda: self.rows,
            "queries": lambda: table.head * width + table.key,
            "heads": lambda: table.query * width + table.key,
            "batch": lambda: (table.head * tall + table.rank_query) * width + table.rank_key,
        }
        for axis, grouped in groupings.items():
            _, place = torch.unique(grouped(), return_inverse=True)  # type: ignore[no-untyped-call]
            sums = sum_in(some.nan_to_num(0.0), place)
            if bool(((sums - 1)[live].abs() <= self.tolerance).all()) and int(place.max()) + 1 < len(place):
                return axis, place
        return "", self.rows

    def _unexponential(
        self, model: WeightsModel, none: Tensor, some: Tensor, spread: Tensor, live: Tensor
    ) -> WeightsModel:
        """Add to the model what weights that are no exponentials are: linear in the scores, all hidden, or other."""
        rise = (some - none)[live]
        if bool(live.any()) and bool(rise.isfinite().all()):
            factor = float((rise * spread[live]).sum() / (spread[live] ** 2).sum())
            if bool(((rise - factor * spread[live]).abs() <= MEASURED * (1 + rise.abs().max())).all()):
                model.kind, model.factor = "linear", factor
                return model
        model.kind = "softmax" if bool(model.dead.all() | none.isnan().all()) and self._all_held_down() else "other"
        model.axis = "keys" if model.kind == "softmax" else model.axis
        return model

    def _all_held_down(self) -> bool:
        """Whether a mask hides every key from every query, which leaves nothing to choose."""
        given = ((value, source_of(codes) == self.part.number) for _, codes, value in self._steps())
        own = (value[mine] for value, mine in given if value.is_floating_point() and bool(mine.any()))
        return any(bool((scores < -HIDING).all()) for scores in own)


def _logs(weights: Tensor) -> Tensor:
    return weights.clamp_min(SMALLEST).log()


def _centred(values: Tensor, rows: Tensor, where: Tensor) -> Tensor:
    """Subtract from each number the mean of its row, taken over the places where ``where`` is true."""
    return values - sum_in(values.masked_fill(~where, 0.0), rows) / sum_in(where, rows).clamp_min(1)
