"""Operations that put elements elsewhere where nothing of the kind is called for."""

from collections.abc import Iterable

import torch
from torch import Tensor

from equivalence_tests.checker.engine.anchors import Run
from equivalence_tests.checker.engine.codes import place_of
from equivalence_tests.checker.engine.vocabulary import words
from equivalence_tests.checker.engine.watching import Operation

__all__ = ["reshaped_for_transposed", "shuffling"]

VIEWS = words("view reshape unflatten flatten")


def shuffling(run: Run, numbers: Iterable[int], after: int, before: int, of: Tensor | None = None) -> Operation | None:
    """Give the first operation that keeps the shape of what it takes and exchanges elements in it.

    Args:
        run: The recorded run.
        numbers: The sources whose elements are followed.
        after: The last operation that is not looked at.
        before: The first one that is not looked at again.
        of: The elements that matter, of whichever source; None for all.
    """
    for operation, taken, given in _moves(run, numbers, after, before):
        if of is not None and not bool(torch.isin(place_of(given), place_of(of)).any()):
            continue
        same = taken.shape == given.shape and not torch.equal(taken, given)
        if same and torch.equal(taken.reshape(-1).sort().values, given.reshape(-1).sort().values):
            return operation
    return None


def reshaped_for_transposed(run: Run, numbers: Iterable[int], after: int, before: int) -> Operation | None:
    """Give the first view that exchanges the sizes of two axes, as a transpose would, and leaves the elements.

    Args:
        run: The recorded run.
        numbers: The sources whose elements are followed.
        after: The last operation that is not looked at.
        before: The first one that is not looked at again.
    """
    for operation, taken, given in _moves(run, numbers, after, before):
        exchanged = taken.shape != given.shape and sorted(taken.shape) == sorted(given.shape)
        if operation.name in VIEWS and exchanged and max(taken.dim(), 2) > 2:
            return operation
    return None


def _moves(run: Run, numbers: Iterable[int], after: int, before: int) -> Iterable[tuple[Operation, Tensor, Tensor]]:
    for number in numbers:
        for operation, codes, _ in run.names.carrying(number, before - 1):
            taken = next((c for c in run.names.before[operation.index] if c is not None), None)
            if operation.index > after and taken is not None and not taken.is_complex():
                yield operation, taken, codes
