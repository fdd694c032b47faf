"""Which recorded operations are products of two tensors, and which of their elements meet: rows times columns."""

from math import prod

import numpy as np
import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import Contraction
from equivalence_tests.checker.engine.watching import Operation, letters_of


def contraction_of(operation: Operation) -> Contraction | None:
    """Read a product; None for what is no product of two tensors, or one that is not read."""
    name = operation.name
    if len(operation.inputs) < 2:
        return None
    first, second = (torch.arange(x.value.numel()).view(x.value.shape) for x in operation.inputs[:2])
    if name in ("matmul", "bmm", "mm", "mv", "dot"):
        return _matmul(first, second)
    if name == "linear":
        return _einsum("...d,jd->...j", first, second) if second.dim() == 2 else None
    if name in ("conv1d", "conv2d", "conv3d"):
        whole = first.dim() == second.dim() and first.size(1) == second.size(1) == second[0].numel()
        kept = first.shape[2:] == operation.outputs[0].value.shape[2:]
        return _einsum("bd...,jd->bj...", first, second.flatten(1)) if whole and kept else None
    equation = operation.argument(0, "equation") if name == "einsum" and len(operation.inputs) == 2 else None
    return _einsum(equation, first, second) if isinstance(equation, str) else None


def _matmul(first: Tensor, second: Tensor) -> Contraction | None:
    """Read first @ second; None where the second is no matrix."""
    if first.dim() < 1 or second.dim() < 2:
        return None
    lead, row = np.broadcast_shapes(first.shape[:-2], second.shape[:-2]), "i" if first.dim() > 1 else ""
    first, second = (x.expand(*lead, *x.shape[-2:]) for x in (first, second))
    return _einsum(f"...{row}d,...dj->...{row}j", first, second)


def _einsum(equation: str, first: Tensor, second: Tensor) -> Contraction | None:
    """Read a sum over letters, of which the operands are given as the places in their memory; None where one repeats.

    >>> found = _einsum("qd,kd", torch.zeros(2, 5).long(), torch.zeros(3, 5).long())
    >>> found.shape, found.left.shape, found.right.shape
    ((3, 2), torch.Size([1, 2, 5]), torch.Size([1, 3, 5]))
    """
    read = letters_of(equation, first.dim(), second.dim())
    if read is None or any(len(set(letters)) < len(letters) for letters in read):
        return None
    one, two, given = read
    sizes = dict(zip(one, first.shape, strict=True))
    sizes |= {x: max(size, sizes.get(x, size)) for x, size in zip(two, second.shape, strict=True)}  # 1 is broadcast
    two, apart = _joined(equation, one, two, given, sizes)
    shared = [x for x in given if x in one and x in two]
    summed = [x for x in dict.fromkeys(one + two) if x not in given]
    rows, columns = ([x for x in given if x in side and x not in other] for side, other in ((one, two), (two, one)))
    count = [prod(sizes[x] for x in group) for group in (shared, rows, columns, summed)]

    def laid(places: Tensor, letters: str, apart: list[str]) -> Tensor:
        whole = _repeated(places, letters, [*shared, *apart, *summed], sizes)
        return whole.reshape(count[0], prod(sizes[letter] for letter in apart), count[3])

    shape = tuple(sizes[x] for x in given)
    out = torch.arange(prod(shape)).view(shape).permute([given.index(x) for x in (*shared, *rows, *columns)])
    left, right = laid(first, one, rows), laid(second, two, columns)
    return Contraction(left, right, out.reshape(count[:3]), (0, 1), shape, apart)


def _repeated(places: Tensor, letters: str, order: list[str], sizes: dict[str, int]) -> Tensor:
    """Lay places out by letters, and repeat what is summed alone for each element that it is multiplied with."""
    places = places.permute([letters.index(letter) for letter in order if letter in letters])
    for axis, letter in enumerate(order):
        places = places if letter in letters else places.unsqueeze(axis)
    return places.expand([sizes[letter] for letter in order])


def _joined(equation: str, one: str, two: str, given: str, sizes: dict[str, int]) -> tuple[str, str]:
    """Give the second operand the letter of the first for an axis that each sums by itself, and say the equation."""
    mine, other = ([x for x in side if x not in rest + given] for side, rest in ((one, two), (two, one)))
    if len(mine) != 1 or len(other) != 1 or sizes[mine[0]] != sizes[other[0]]:
        return two, ""
    inside, arrow, out = equation.partition("->")
    first, _, second = inside.partition(",")
    return two.replace(other[0], mine[0]), f"{first},{second.replace(other[0], mine[0])}{arrow}{out}"
