"""torch's formula on what a recorded run multiplies: softmax(q kᵀ / sqrt(d)) v, with what is hidden left out."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import known, looked_up, place_of, source_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.scores_table import greatest_in, sum_in
from equivalence_tests.checker.engine.judgement import Expectation, Operand
from equivalence_tests.checker.engine.names import Attention, Part, Product
from equivalence_tests.checker.engine.same import LOOSE, ROUNDING, SINGLE, near
from equivalence_tests.checker.engine.watching import Operation, Recorder


def weights_by_formula(scores: Tensor, rows: Tensor, hidden: Tensor) -> Tensor:
    """Softmax over the keys of each row; 0 in rows that see none."""
    seen = scores.masked_fill(hidden, -torch.inf)
    powers = (seen - greatest_in(seen, rows)).exp()
    return (powers / sum_in(powers, rows)).nan_to_num(0.0)


def context_by_formula(
    recorder: Recorder,
    attention: Attention,
    factors: Sequence[Sequence[float]],
    hidden: list[Tensor],
    added: Sequence[Tensor | float] = (),
) -> tuple[Tensor, Tensor]:
    """Average the values as torch's formula does, and give the names of the averages and their numbers.

    The run may be going on; where the parts of the attention are tiles, each gives its share. Each part has its factors
    on the way of queries, keys and values, its hidden keys, and what is added to its scores, if anything is.
    """
    parts = attention.parts
    pairs = zip(parts, factors, added or [0.0] * len(parts), strict=True)
    scores = [_scores(recorder, part, own) + bias for part, own, bias in pairs]
    rows = _rows(attention)
    weights = weights_by_formula(torch.cat(scores), rows, torch.cat(hidden)).split([len(x) for x in scores])
    names, values = [], []
    for part, own, mine in zip(parts, factors, weights, strict=True):
        for context in part.contexts:
            if context.source is not None:
                value = context.contraction.columns(operand_of(recorder, context, 1)) / own[2]
                used = _at(context.weights, part, mine)
                values.append(torch.einsum("nik,nfk->nif", used, value).reshape(-1))
                names.append(context.contraction.result(context.codes).reshape(-1))
    named, shares = torch.cat(names), torch.cat(values)
    return (named, sum_in(shares, named.unique(return_inverse=True)[1])) if attention.tiled else (named, shares)


def _rows(attention: Attention) -> Tensor:
    """Number the rows of all parts: those of tiles go on in one another."""
    if attention.tiled:
        return torch.cat([part.rows for part in attention.parts]).unique(return_inverse=True)[1]
    counts = [0, *(int(part.table.row.max()) + 1 for part in attention.parts)]
    starts = itertools.accumulate(counts)
    return torch.cat([part.table.row + start for part, start in zip(attention.parts, starts, strict=False)])


def _scores(recorder: Recorder, part: Part, factors: Sequence[float]) -> Tensor:
    """The product of queries and keys, over sqrt(width), flat."""
    product = part.product
    query, key = (operand_of(recorder, product, side) for side in (0, 1))
    scores = torch.einsum("nid,njd->nij", product.contraction.rows(query), product.contraction.columns(key))
    factor = factors[0] * factors[1] * math.sqrt(product.width)
    return product.contraction.scattered(scores / factor).reshape(-1)


def _at(names: Tensor, part: Part, weights: Tensor) -> Tensor:
    """The weights of one part where they have these names, and 0 elsewhere."""
    own = source_of(names) == part.number
    return weights[place_of(names).masked_fill(~own, 0)].masked_fill(~own, 0.0)


def operand_of(recorder: Recorder, product: Product, side: int) -> Tensor:
    """Give the numbers of the left or the right operand of a product, in a run that may be going on."""
    return recorder.operations[product.operation.index].inputs[product.contraction.sides[side]].value.double()


def tile_departures(
    attention: Attention, operands: list[list[Operand]], expected: Mapping[int, Expectation]
) -> Iterator[Departure]:
    """Compare what comes out of all tiles with torch's formula on all keys, with a causal mask or without.

    What is known about the mask of each stands in ``expected``, by its number.
    """
    if attention.names is None:
        return
    factors = [[operand.factor for operand in each] for each in operands]
    have = attention.end_slot.value.double()
    expectations = [expected.get(part.number, Expectation()) for part in attention.parts]
    ways = ([*map(_hidden, attention.parts, expectations, itertools.repeat(causal))] for causal in (False, True))
    for hidden in ways:
        names, sums = context_by_formula(attention.run.recorder, attention, factors, hidden)
        want = looked_up(attention.names, names, sums)
        mine = torch.isin(attention.names, names)
        if near(have[mine], want[mine], SINGLE if attention.end_slot.value.dtype != torch.float64 else ROUNDING):
            return
    yield Departure("tiles_do_not_add_up", "softmax", attention.parts[-1].contexts[0].operation)


def _hidden(part: Part, expected: Expectation, causal: bool) -> Tensor:
    if expected.may is not None:
        return ~expected.may
    return (part.table.key > part.table.query) & causal


def right_weights(
    part: Part, names: Tensor, hidden: Tensor, factor: float, recorder: Recorder, operation: Operation
) -> Tensor:
    """Torch's weights in the place of what an operation gives."""
    scores = recorder.operations[part.product.operation.index].outputs[0].value.double().reshape(-1) * factor
    weights = weights_by_formula(scores, part.table.row, hidden)
    beside = known(names) & (source_of(names) != part.number)
    return torch.where(beside, operation.outputs[0].value.double(), _at(names, part, weights))


def scale_in_words(factor: float, sizes: Mapping[str, int]) -> str:
    """Write a scale by the size that it is made of; "" where it is made of none.

    >>> [scale_in_words(x, {"head_dim": 16, "embed_dim": 48, "key_len": 7}) for x in (48**-0.5, 7**-0.5, 4.0, 0.7)]
    ['/ sqrt(embed_dim)', '/ sqrt(key_len)', '* sqrt(head_dim)', '']
    """
    d = sizes["head_dim"]
    known = {f"/ sqrt({name})": size**-0.5 for name, size in sizes.items()}
    for name in ("head_dim", "embed_dim"):
        known |= {f"/ {name}": 1 / sizes[name], f"* sqrt({name})": sizes[name] ** 0.5}
    known |= {"/ head_dim^(1/4)": d**-0.25, "/ head_dim^2": d**-2.0}
    known |= {"/ (2 sqrt(head_dim))": 0.5 * d**-0.5, "/ sqrt(head_dim / 2)": (d / 2) ** -0.5}
    return next((words for words, value in known.items() if abs(factor / value - 1) < LOOSE), "")
