"""From scores to weights: scale, bias, mask and softmax, read by what they do to other scores.

The recorded operations between the two products are run again on scores of our own. What comes out is
softmax(factor * score + bias) for some factor and bias, or it is something else.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import known, place_of, source_of
from equivalence_tests.checker.engine.contracts.departure import SINGLE, TOLERANCE, constant_ratio
from equivalence_tests.checker.engine.judgement import WeightsModel
from equivalence_tests.checker.engine.names import Context, Part, Run
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.watching import Operation

__all__ = ["read_weights"]

SMALLEST = 1e-30
VISIBLE = 1e-25
STEP = 4.0
GENTLE = 1e-2
HELD_DOWN = -1e3


def read_weights(run: Run, part: Part, context: Context) -> WeightsModel:
    """Find out what stands between a product and the weights that are used.

    Args:
        run: The recorded run.
        part: Holds the product.
        context: Uses the weights.
    """
    return _Reader(run, part, context).read()


class _Reader:
    def __init__(self, run: Run, part: Part, context: Context) -> None:
        self.run, self.part, self.context = run, part, context
        self.raw = part.product.operation.outputs[0].value.double().reshape(-1)
        self.rows = part.table.row
        self.count = int(self.rows.max()) + 1
        dtypes = {slot.value.dtype for operation, _, _ in self._steps() for slot in operation.outputs}
        self.capped = False
        self.single = bool(dtypes & {torch.float32, torch.float16, torch.bfloat16})

    def _steps(self) -> Iterator[tuple[Operation, Tensor, Tensor]]:
        return self.run.names.carrying([self.part.number], before=self.context.operation.index + 1)

    def weights_of(self, raw: Tensor) -> Tensor:
        """Run the stages between on other scores."""
        operation = self.part.product.operation
        slot = operation.outputs[0]
        given = raw.view(slot.value.shape).to(slot.value.dtype)
        found = replayed(
            self.run.recorder,
            {slot.key: given},
            operation.index,
            self.context.operands[0],
            self.context.operation.index - 1,
        )
        values = self.context.operands[0].value if found is None else found
        laid = self.context.contraction.rows(values).double()
        flat = torch.full((len(self.raw),), torch.nan, dtype=torch.float64)
        has = known(self.context.weights)
        flat[place_of(self.context.weights)[has]] = laid[has]
        return flat

    def read(self) -> WeightsModel:
        """Read the stages; where they run into limits, by scores so small that a tanh and exp let them be."""
        model = self._read(1.0)
        cap = self._cap()
        if model.kind == "other":
            gentle = self._read(GENTLE, capped=bool(cap))
            if gentle.kind == "softmax":
                gentle.cap = cap
                return gentle
        return model

    def _cap(self) -> float:
        """What a tanh is multiplied by."""
        held = False
        for operation, _, value in self._steps():
            if held and operation.inputs and operation.inputs[0].value.shape == value.shape:
                return constant_ratio(value, operation.inputs[0].value) or 0.0
            held = held or operation.name.startswith("tanh")
        return 0.0

    def _read(self, size: float, capped: bool = False) -> WeightsModel:
        self.capped = capped
        used = self.weights_of(self.raw)
        spread = torch.randn(len(self.raw), generator=torch.Generator().manual_seed(3), dtype=torch.float64) * size
        none, some = self.weights_of(torch.zeros_like(self.raw)), self.weights_of(spread)
        model = WeightsModel(
            torch.nan,
            torch.zeros_like(used),
            used,
            torch.zeros(len(used), dtype=torch.bool),
            torch.zeros_like(used),
            self._row_sums(used),
            self.rows,
            single=self.single,
        )
        seen = ~used.isnan()
        hidden = seen & (none.abs() <= SMALLEST) & (some.abs() <= SMALLEST)
        model.dead = self._dead_rows(none, some, seen)
        live = seen & ~hidden & ~model.dead[self.rows]
        if bool((none[live] <= 0).any()) or not bool(live.any()):
            return self._unexponential(model, none, some, spread, live)
        self._read_exponential(model, none, some, spread, live, hidden)
        return model

    def _dead_rows(self, none: Tensor, some: Tensor, seen: Tensor) -> Tensor:
        """Rows that are the same for all scores, all keys alike, or without a number."""
        broken = torch.zeros(self.count, dtype=torch.bool)
        broken[self.rows[seen & (none.isnan() | some.isnan())]] = True
        moved = torch.zeros(self.count, dtype=torch.bool)
        moved[self.rows[seen & ((none - some).abs() > 1e-12)]] = True
        several = torch.bincount(self.rows[seen], minlength=self.count) > 1
        return broken | (~moved & several)

    def _row_sums(self, weights: Tensor) -> Tensor:
        sums = torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.rows, weights.nan_to_num(0.0))
        return sums[self.rows]

    def _row_mean(self, values: Tensor, where: Tensor) -> Tensor:
        total = torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.rows[where], values[where])
        count = torch.bincount(self.rows[where], minlength=self.count).clamp_min(1)
        return (total / count)[self.rows]

    def _row_median(self, values: Tensor, where: Tensor) -> Tensor:
        """The greatest of each row: what follows the scores moves up, what was replaced stays behind."""
        best = torch.full((self.count,), -torch.inf, dtype=torch.float64)
        best = best.scatter_reduce(0, self.rows[where], values[where], "amax")
        return best[self.rows]

    def _read_exponential(
        self, model: WeightsModel, none: Tensor, some: Tensor, spread: Tensor, live: Tensor, hidden: Tensor
    ) -> None:
        """Factor, bias and replaced scores of weights that are exponentials, whatever they are divided by."""
        axis, groups = self._axis(model, some, live)
        model.axis = axis
        rows, count = self.rows, self.count
        if axis not in ("keys", "") and groups is not None:
            self.rows, self.count = groups, int(groups.max()) + 1
        lifted = self.weights_of(torch.full_like(self.raw, STEP))
        logs = none.clamp_min(SMALLEST).log()
        rise = lifted.clamp_min(SMALLEST).log() - logs
        ahead = self._row_median(rise, live) - rise
        model.replaced = live & (ahead > 0.05) & (not self.capped)
        follows = live & ~model.replaced
        moved = some.clamp_min(SMALLEST).log() - logs
        centred = moved - self._row_mean(moved, follows)
        against = spread - self._row_mean(spread, follows)
        bias = logs - self._row_mean(logs, follows)
        model.fill = bias.masked_fill(~model.replaced, 0.0)
        model.bias = bias.masked_fill(hidden, -torch.inf).masked_fill(~live & ~hidden, 0.0)
        used = model.weights.clamp_min(SMALLEST).log() - logs

        def fits(factor: Tensor) -> bool:
            tolerance = SINGLE if self.single else 10 * TOLERANCE
            slack = tolerance * (1 + float(factor.abs().max())) * (0.1 if self.capped else 1)
            if not bool(((centred - factor * against)[follows].abs() <= slack).all()):
                return False
            visible = follows & (model.weights > VISIBLE)
            moved_raw = used - self._row_mean(used, visible)
            raw = factor * (self.raw - self._row_mean(self.raw, visible))
            scale = 1 + float(raw[visible].abs().max()) if bool(visible.any()) else 1.0
            return self.capped or bool(((moved_raw - raw)[visible].abs() <= tolerance * scale).all())

        if int(torch.bincount(self.rows[follows], minlength=self.count).max()) < 2:
            model.axis, self.rows, self.count = "keys", rows, count
            return  # a single key takes all, whatever its score
        one = torch.zeros_like(self.rows)
        factor = self._slope(centred, against, follows, one)
        if not fits(factor):
            by_head = self._slope(centred, against, follows, self.part.table.head)
            if fits(by_head):
                model.by_head = by_head
            else:
                model.kind = "other"
        model.factor = float(factor[0])
        self.rows, self.count = rows, count

    def _slope(self, moved: Tensor, spread: Tensor, where: Tensor, groups: Tensor) -> Tensor:
        """What the scores of each group are multiplied by, one number for each score; NaN where none moved."""
        sums = torch.zeros(2, int(groups.max()) + 1, dtype=torch.float64)
        products = torch.stack([(moved * spread)[where], (spread**2)[where]])
        both, under = sums.index_add_(1, groups[where], products)
        return (both / under)[groups]

    def _axis(self, model: WeightsModel, some: Tensor, live: Tensor) -> tuple[str, Tensor | None]:
        """Over what the weights sum to one."""
        tolerance = SINGLE if self.single else 1e-6
        table = self.part.table
        width = int(table.key.max()) + 1
        tall = int(table.query.max()) + 1
        groupings = {
            "keys": lambda: self.rows,
            "queries": lambda: table.head * width + table.key,
            "heads": lambda: table.query * width + table.key,
            "samples": lambda: (table.head * tall + table.rank_query) * width + table.rank_key,
        }
        for axis, grouped in groupings.items():
            _, place = torch.unique(grouped(), return_inverse=True)  # type: ignore[no-untyped-call]
            sums = torch.zeros(int(place.max()) + 1, dtype=torch.float64).index_add_(0, place, some.nan_to_num(0.0))
            if bool(((sums[place] - 1)[live].abs() <= tolerance).all()) and int(place.max()) + 1 < len(place):
                return axis, place
        return "", None

    def _unexponential(
        self, model: WeightsModel, none: Tensor, some: Tensor, spread: Tensor, live: Tensor
    ) -> WeightsModel:
        """Weights that are no exponentials: the scores themselves, or a sigmoid of them."""
        rise = (some - none)[live]
        if bool(live.any()) and bool(rise.isfinite().all()):
            factor = float((rise * spread[live]).sum() / (spread[live] ** 2).sum())
            if bool(((rise - factor * spread[live]).abs() <= 1e-6 * (1 + rise.abs().max())).all()):
                model.kind, model.factor = "linear", factor
                return model
        model.kind = "softmax" if bool(model.dead.all() | none.isnan().all()) and self._all_held_down() else "other"
        model.axis = "keys" if model.kind == "softmax" else model.axis
        return model

    def _all_held_down(self) -> bool:
        """Whether a mask hides every key from every query, which leaves nothing to choose."""
        for _, codes, value in self._steps():
            mine = known(codes) & (source_of(codes) == self.part.number)
            if value.is_floating_point() and bool(mine.any()) and bool((value[mine] < HELD_DOWN).all()):
                return True
        return False
