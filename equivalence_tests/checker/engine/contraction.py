"""Write a product of two tensors as batched rows times columns, by the places of their elements."""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

__all__ = ["Contraction", "einsum", "matmul", "multiplied_and_summed", "pointwise"]


@dataclass(frozen=True)
class Contraction:
    """out[n, i, j] = sum over d of left[n, i, d] * right[n, j, d].

    Args:
        left: (n, i, d): for each term, which element of the left operand, counted through its memory order.
        right: (n, j, d): the same of the right operand.
        out: (n, i, j): which element of the result.
        sides: Which of the operation's inputs the left and the right operand are.
        shape: Shape of the result.
        apart: The equation that would be this product, where an einsum sums each operand by itself and multiplies the
            sums; "" where it is this product.
    """

    left: Tensor
    right: Tensor
    out: Tensor
    sides: tuple[int, int]
    shape: tuple[int, ...]
    apart: str = ""

    def swapped(self) -> "Contraction":
        """Exchange rows and columns."""
        return replace(self, left=self.right, right=self.left, out=self.out.transpose(1, 2), sides=self.sides[::-1])

    def rows(self, values: Tensor) -> Tensor:
        """Lay out what belongs to the left operand's elements as (n, i, d)."""
        return values.reshape(-1)[self.left]

    def columns(self, values: Tensor) -> Tensor:
        """Lay out what belongs to the right operand's elements as (n, j, d)."""
        return values.reshape(-1)[self.right]

    def result(self, values: Tensor) -> Tensor:
        """Lay out what belongs to the result's elements as (n, i, j)."""
        return values.reshape(-1)[self.out]

    def scattered(self, values: Tensor) -> Tensor:
        """Turn (n, i, j) into the shape of the result."""
        flat = values.new_empty(values.numel())
        flat[self.out.reshape(-1)] = values.reshape(-1)
        return flat.view(self.shape)


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.numel()).view(x.shape)


def matmul(first: Tensor, second: Tensor, turned: bool = False) -> Contraction | None:
    """Read first @ second, or first @ secondᵀ; None where the second is no matrix.

    Args:
        first: The rows.
        second: The columns.
        turned: Whether the second holds its columns as rows, as a weight does.
    """
    if first.dim() < 1 or second.dim() < 2:
        return None
    left = _places(first)[None] if first.dim() == 1 else _places(first)
    right = _places(second).mT if turned else _places(second)
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left = left.expand(*lead, *left.shape[-2:]).reshape(-1, *left.shape[-2:])
    right = right.mT.expand(*lead, *right.mT.shape[-2:]).reshape(-1, *right.mT.shape[-2:])
    out = torch.arange(left.size(0) * left.size(1) * right.size(1)).view(left.size(0), left.size(1), right.size(1))
    shape = (*lead, left.size(1), right.size(1)) if first.dim() > 1 else (*lead, right.size(1))
    return Contraction(left, right, out, (0, 1), shape)


def pointwise(first: Tensor, second: Tensor, out: Tensor) -> Contraction | None:
    """Read a convolution that looks at one place at a time: a matrix for each of them.

    Args:
        first: What is convolved.
        second: The kernel.
        out: What comes out.
    """
    unread = first.dim() != second.dim() or any(size != 1 for size in second.shape[2:])
    if unread or first.size(1) != second.size(1) or out.shape[2:] != first.shape[2:]:
        return None
    left, result = (_places(x).flatten(2).mT.reshape(1, -1, x.size(1)) for x in (first, out))
    return Contraction(left, _places(second).view(1, *second.shape[:2]), result, (0, 1), tuple(out.shape))


def einsum(equation: str, first: Tensor, second: Tensor) -> Contraction | None:
    """Read a sum over letters; None where one operand is summed or repeats a letter by itself.

    Args:
        equation: As torch.einsum has it.
        first: The operand before the comma.
        second: The operand behind it.

    >>> found = einsum("qd,kd", torch.ones(2, 5), torch.ones(3, 5))
    >>> found.shape, found.left.shape, found.right.shape
    ((3, 2), torch.Size([1, 2, 5]), torch.Size([1, 3, 5]))
    """
    read = _letters(equation, first.dim(), second.dim())
    if read is None:
        return None
    one, two, given = read
    if len(set(one)) < len(one) or len(set(two)) < len(two) or len(set(given)) < len(given):
        return None
    sizes = dict(zip(one, first.shape, strict=True)) | dict(zip(two, second.shape, strict=True))
    two, apart = _joined(equation, one, two, given, sizes)
    shared = [x for x in given if x in one and x in two]
    summed = [x for x in dict.fromkeys(one + two) if x not in given]
    rows, columns = ([x for x in given if x in side and x not in other] for side, other in ((one, two), (two, one)))
    count = [prod(sizes[x] for x in group) for group in (shared, rows, columns, summed)]

    def laid(x: Tensor, letters: str, order: list[str]) -> Tensor:
        """Repeat what is summed alone for each element that it is then multiplied with."""
        places = _places(x).permute([letters.index(letter) for letter in order if letter in letters])
        for axis, letter in enumerate(order):
            places = places if letter in letters else places.unsqueeze(axis)
        return places.expand([sizes[letter] for letter in order]).reshape(count[0], -1, count[3])

    shape = tuple(sizes[x] for x in given)
    out = torch.arange(prod(shape)).view(shape).permute([given.index(x) for x in (*shared, *rows, *columns)])
    return Contraction(
        laid(first, one, [*shared, *rows, *summed]),
        laid(second, two, [*shared, *columns, *summed]),
        out.reshape(count[0], count[1], count[2]),
        (0, 1),
        shape,
        apart,
    )


def _joined(equation: str, one: str, two: str, given: str, sizes: dict[str, int]) -> tuple[str, str]:
    """Give the second operand the letter of the first for an axis that each sums by itself, and say the equation."""
    mine, other = ([x for x in side if x not in rest + given] for side, rest in ((one, two), (two, one)))
    if len(mine) != 1 or len(other) != 1 or sizes[mine[0]] != sizes[other[0]]:
        return two, ""
    inside, arrow, out = equation.partition("->")
    first, _, second = inside.partition(",")
    return two.replace(other[0], mine[0]), f"{first},{second.replace(other[0], mine[0])}{arrow}{out}"


def _letters(equation: str, first: int, second: int) -> tuple[str, str, str] | None:
    """Give the letters of both operands and of the result, with letters for what the dots stand for."""
    inside, arrow, given = equation.replace(" ", "").partition("->")
    one, comma, two = inside.partition(",")
    if not comma or "," in two:
        return None
    dots = max(first - len(one.replace("...", "")), second - len(two.replace("...", "")), 0)
    stand = [chr(0x100 + i) for i in range(dots)]

    def filled(text: str, count: int) -> str:
        return text.replace("...", "".join(stand[dots - (count - len(text.replace("...", ""))) :]) if count else "")

    one, two = filled(one, first), filled(two, second)
    if not arrow:
        given = "".join(sorted(x for x in set(one + two) if (one + two).count(x) == 1))
    given = given.replace("...", "".join(x for x in stand if x in one + two))
    return one, two, given


def multiplied_and_summed(first: Tensor, second: Tensor, axis: int, shape: torch.Size) -> Contraction:
    """Read (first * second).sum(axis) as a product.

    Args:
        first: One factor.
        second: The other.
        axis: Over which is summed.
        shape: Of what comes out.
    """
    wide = torch.broadcast_shapes(first.shape, second.shape)
    left, right = (_places(x).expand(wide).movedim(axis, -1) for x in (first, second))
    width = left.size(-1)
    out = torch.arange(left.numel() // width).view(-1, 1, 1)
    return Contraction(left.reshape(-1, 1, width), right.reshape(-1, 1, width), out, (0, 1), tuple(shape))
