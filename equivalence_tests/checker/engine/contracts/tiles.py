"""Several products that add up to the weights of one query, as in an online softmax: judged by what comes out."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from equivalence_tests.checker.engine.anchors import Attention
from equivalence_tests.checker.engine.codes import known, place_of, source_of
from equivalence_tests.checker.engine.contracts.departure import Departure, near
from equivalence_tests.checker.engine.contracts.expectation import Expectation
from equivalence_tests.checker.engine.contracts.operands import Operand

__all__ = ["tile_departures"]


def tile_departures(
    attention: Attention, operands: list[list[Operand]], expected: Mapping[int, Expectation]
) -> Iterator[Departure]:
    """Compare what comes out of all tiles with torch's formula on all keys, with a causal mask or without.

    Args:
        attention: Whose.
        operands: Queries, keys and values of each part.
        expected: What is known about the masks.
    """
    if attention.names is None:
        return
    have = attention.end_slot.value.double()
    codes = attention.names
    for causal in (False, True):
        names, values = _context(attention, operands, expected, causal)
        mine = known(codes) & torch.isin(codes, names)
        want = values[torch.searchsorted(names, codes[mine].contiguous()).clamp_max(len(names) - 1)]
        if near(have[mine], want, 2e-4 if attention.end_slot.value.dtype != torch.float64 else 1e-7):
            return
    yield Departure("tiles_do_not_add_up", "softmax", attention.parts[-1].contexts[0].operation)


def _context(
    attention: Attention, operands: list[list[Operand]], expected: Mapping[int, Expectation], causal: bool
) -> tuple[Tensor, Tensor]:
    """Names and numbers of what should come out."""
    rows = [part.rows for part in attention.parts]
    every = torch.cat(rows)
    _, row = every.unique(return_inverse=True)
    scores, hidden = [], []
    for part, own in zip(attention.parts, operands, strict=True):
        factor = own[0].factor * own[1].factor * math.sqrt(part.product.left.size(-1))
        scores.append(part.product.operation.outputs[0].value.double().reshape(-1) / factor)
        known_mask = expected.get(part.number)
        if known_mask is not None and known_mask.may is not None:
            hidden.append(~known_mask.may)
        else:
            hidden.append(
                part.table.key > part.table.query if causal else torch.zeros(len(scores[-1]), dtype=torch.bool)
            )
    flat = torch.cat(scores).masked_fill(torch.cat(hidden), -torch.inf)
    count = int(row.max()) + 1
    best = torch.full((count,), -torch.inf, dtype=torch.float64).scatter_reduce(0, row, flat, "amax")
    e = (flat - best[row]).exp().nan_to_num(0.0)
    weights = e / torch.zeros(count, dtype=torch.float64).index_add_(0, row, e)[row]
    return _averaged(attention, operands, weights.split([len(x) for x in rows]))


def _averaged(
    attention: Attention, operands: list[list[Operand]], weights: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    names, values = [], []
    for part, own, mine in zip(attention.parts, operands, weights, strict=True):
        for context in part.contexts:
            if context.source is None:
                continue
            here = known(context.weights) & (source_of(context.weights) == part.number)
            used = mine[place_of(context.weights).clamp_min(0).clamp_max(len(mine) - 1)].masked_fill(~here, 0.0)
            value = context.contraction.columns(context.operands[1].value).double() / own[2].factor
            values.append(torch.einsum("nik,nfk->nif", used, value).reshape(-1))
            names.append(context.contraction.result(context.codes).reshape(-1))
    flat, place = torch.cat(names).unique(return_inverse=True)
    return flat, torch.zeros(len(flat), dtype=torch.float64).index_add_(0, place, torch.cat(values))
