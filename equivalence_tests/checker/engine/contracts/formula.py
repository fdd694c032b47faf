"""torch's formula on what a recorded run multiplies: softmax(q kᵀ / sqrt(d)) v, with what is hidden left out."""

import math

import torch
from torch import Tensor

from equivalence_tests.checker.engine.anchors import Part
from equivalence_tests.checker.engine.codes import known, place_of
from equivalence_tests.checker.engine.contracts.operands import Operand
from equivalence_tests.checker.engine.contracts.scores_table import future_of
from equivalence_tests.checker.engine.contracts.weights import WeightsModel
from equivalence_tests.checker.engine.identities import Context, Product, ScoreTable
from equivalence_tests.checker.engine.watching import Recorder

__all__ = ["context_by_formula", "hidden_by_formula", "weights_by_formula"]


def weights_by_formula(scores: Tensor, table: ScoreTable, hidden: Tensor) -> Tensor:
    """Softmax over the keys of each row.

    Args:
        scores: Scaled, flat.
        table: Which row each belongs to.
        hidden: Which keys are hidden.
    """
    order = table.row.argsort(stable=True)
    row = table.row[order]
    start = torch.searchsorted(row, row)
    column = torch.arange(len(row)) - start
    dense = torch.full((int(row.max()) + 1, int(column.max()) + 1), -torch.inf, dtype=scores.dtype)
    dense[row, column] = scores.masked_fill(hidden, -torch.inf)[order]
    weights = torch.softmax(dense, -1).nan_to_num(0.0)
    flat = torch.empty_like(scores)
    flat[order] = weights[row, column]
    return flat


def context_by_formula(
    recorder: Recorder,
    part: Part,
    operands: list[Operand],
    hidden: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """What the values are averaged to, with the places of the names of the results.

    Args:
        recorder: A run; it may be going on.
        part: Whose products.
        operands: What the queries and keys of that part carry as a factor.
        hidden: Which keys are hidden.
        bias: What is meant to be added to the scores.
        dtype: In which it is computed.
    """
    product = part.product
    query, key = (_operand(recorder, product, side).to(dtype) for side in (0, 1))
    scores = torch.einsum("nid,njd->nij", product.contraction.rows(query), product.contraction.columns(key))
    factor = operands[0].factor * operands[1].factor * math.sqrt(product.left.size(-1))
    flat = product.contraction.scattered(scores / factor).reshape(-1)
    if bias is not None:
        flat = flat + bias
    weights = weights_by_formula(flat, part.table, hidden)
    places, values = [], []
    for context in part.contexts:
        if context.source is None:
            continue
        used = weights[place_of(context.weights).clamp_min(0)].masked_fill(~known(context.weights), 0.0)
        value = context.contraction.columns(_operand(recorder, context, 1).to(dtype)) / operands[2].factor
        result = torch.einsum("nik,nfk->nif", used, value)
        places.append(context.contraction.result(place_of(context.codes)).reshape(-1))
        values.append(result.reshape(-1))
    return torch.cat(places), torch.cat(values)


def _operand(recorder: Recorder, product: Product | Context, side: int) -> Tensor:
    index = (product.factors or product.operation).index
    return recorder.operations[index].inputs[product.contraction.sides[side]].value


def hidden_by_formula(part: Part, model: WeightsModel, may: Tensor | None, pattern: str) -> Tensor:
    """What should be hidden: what is not allowed; the future, where a causal mask is wrong; else what is hidden.

    Args:
        part: Whose scores.
        model: What happens to them.
        may: What is allowed, where that is known.
        pattern: Which causal mask the code has.
    """
    if may is not None:
        return ~may
    return future_of(part) if pattern.startswith("causal") else model.hidden
