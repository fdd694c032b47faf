"""Several products that add up to the weights of one query, as in an online softmax: judged by what comes out."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import looked_up
from equivalence_tests.checker.engine.contracts.departure import Departure, near
from equivalence_tests.checker.engine.contracts.formula import context_by_formula
from equivalence_tests.checker.engine.judgement import Expectation, Operand
from equivalence_tests.checker.engine.names import Attention, Part

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
    factors = [[operand.factor for operand in own] for own in operands]
    have = attention.end_slot.value.double()
    for causal in (False, True):
        hidden = [_hidden(part, expected.get(part.number, Expectation()), causal) for part in attention.parts]
        names, shares = context_by_formula(attention.run.recorder, attention, factors, hidden)
        names, place = names.unique(return_inverse=True)
        sums = torch.zeros(len(names), dtype=torch.float64).index_add_(0, place, shares)
        want = looked_up(attention.names, names, sums)
        mine = torch.isin(attention.names, names)
        if near(have[mine], want[mine], 2e-4 if attention.end_slot.value.dtype != torch.float64 else 1e-7):
            return
    yield Departure("tiles_do_not_add_up", "softmax", attention.parts[-1].contexts[0].operation)


def _hidden(part: Part, expected: Expectation, causal: bool) -> Tensor:
    if expected.may is not None:
        return ~expected.may
    return (part.table.key > part.table.query) & causal
