"""Names of elements, each one float64: the number of the source tensor, the token and the feature; and contractions."""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UNKNOWN = -1.0
FEATURES = 1 << 20  # of one token; also tokens of one source
SPAN = FEATURES * FEATURES


def coded(source: int, token: Tensor, feature: Tensor) -> Tensor:
    """Encode source, token and feature as one float64 each, exact, so that any operation that moves data moves names.

    >>> code = coded(3, torch.tensor(5), torch.tensor(7))
    >>> source_of(code).item(), token_of(code).item(), feature_of(code).item()
    (3, 5, 7)
    """
    return source * float(SPAN) + token.double() * FEATURES + feature.double()


def numbered(shape: torch.Size) -> Tensor:
    """Name the elements of a tensor in which each row holds the features of a token.

    >>> place_of(numbered(torch.Size((2, 2)))).tolist() == [[0, 1], [FEATURES, FEATURES + 1]]
    True
    """
    token = torch.arange(shape[:-1].numel()).view(*shape[:-1], 1)
    return coded(1, token.expand(shape), torch.arange(shape[-1]).expand(shape))


def known(codes: Tensor) -> Tensor:
    """Say which elements have a name."""
    return codes >= SPAN


def source_of(codes: Tensor) -> Tensor:
    """Give the numbers of the sources; -1 where there is no name."""
    return (codes * (1.0 / SPAN)).floor().long().clamp_min(-1)


def sources_in(codes: Tensor | None) -> list[int]:
    """List the numbers of the sources, the least first; none where there are no names, pairs of them, or NaN.

    >>> sources_in(torch.cat([coded(3, torch.tensor([0, 1]), torch.tensor(7)), torch.tensor([UNKNOWN])]))
    [3]
    >>> sources_in(torch.tensor([torch.nan, 1e13]))
    []
    """
    if codes is None or codes.is_complex() or not codes.numel():
        return []
    least, most = (int(x.nan_to_num(UNKNOWN).item() // SPAN) for x in codes.aminmax())
    if least == most:
        return [least] * (least > 0)
    counts = torch.bincount(source_of(codes).reshape(-1).clamp_min(0))
    return counts[1:].nonzero().add(1).flatten().tolist()


def numbered_pairs(first: Tensor, second: Tensor) -> Tensor:
    """List which small numbers stand at the same place in two tensors, each pair once.

    >>> numbered_pairs(torch.tensor([2, 0, 2]), torch.tensor([1, 3, 1])).tolist()
    [[0, 3], [2, 1]]
    """
    width = int(second.max()) + 1
    found = torch.bincount((first * width + second).reshape(-1)).nonzero()
    return torch.cat([found // width, found % width], -1)


def looked_up(asked: Tensor, names: Tensor, values: Tensor) -> Tensor:
    """Give the numbers that belong to some names; NaN where a name is not known.

    >>> names = coded(3, torch.tensor(5), torch.arange(2))
    >>> looked_up(coded(3, torch.tensor(5), torch.tensor([1, 2])), names, torch.tensor([0.5, 0.25])).tolist()
    [0.25, nan]
    """
    if not names.numel():
        return torch.full(asked.shape, torch.nan, dtype=torch.float64)
    ordered, order = names.reshape(-1).sort()
    at = torch.searchsorted(ordered, asked.contiguous()).clamp_max(len(ordered) - 1)
    found = values.reshape(-1)[order[at]].double()
    return torch.where((ordered[at] == asked) & known(asked), found, torch.nan)


def place_of(codes: Tensor) -> Tensor:
    """Give token and feature of a name as one number, or the flat index of a score: the name without its source."""
    return (codes - (codes * (1.0 / SPAN)).floor() * SPAN).long()


def place_or_first(codes: Tensor) -> Tensor:
    """Give the same where there is a name, and 0 elsewhere, to look something up by."""
    return place_of(codes).masked_fill(~known(codes), 0)


def token_of(codes: Tensor) -> Tensor:
    """Give the tokens."""
    return place_of(codes) // FEATURES


def feature_of(codes: Tensor) -> Tensor:
    """Give the features."""
    return place_of(codes) % FEATURES


def retagged(codes: Tensor, source: int) -> Tensor:
    """Replace the source in names, and keep the tokens and features."""
    return torch.where(known(codes), torch.remainder(codes, SPAN) + source * float(SPAN), codes)


def unified(codes: Tensor) -> Tensor:
    """Give one source to names of other tokens with as many features, as where two streams are joined.

    >>> two = torch.stack([coded(1, torch.tensor(0), torch.arange(2)), coded(2, torch.tensor(1), torch.arange(2))])
    >>> source_of(unified(two)).unique().tolist()
    [1]
    """
    while True:
        numbers = sources_in(codes)
        if len(numbers) < 2:
            return codes
        mine = {number: codes[source_of(codes) == number] for number in numbers}
        apart = _each_row_of_one_source(codes)
        pairs = [(a, b) for a, b in itertools.combinations(mine, 2) if _are_streams(mine[a], mine[b], apart)]
        if not pairs:
            return codes
        first, second = max(pairs, key=lambda pair: _axes_shared(codes, *pair))
        others, own = (feature_of(mine[number]).unique() for number in (first, second))
        place = torch.searchsorted(own, feature_of(codes).contiguous()).clamp_max(len(own) - 1)
        tokens, its = (token_of(mine[number]) for number in (first, second))
        later = int(tokens.max()) + 1 if bool(torch.isin(its, tokens).any()) else 0  # each input counts from 0
        codes = torch.where(source_of(codes) == second, coded(first, token_of(codes) + later, others[place]), codes)


def squares_by(groups: Tensor, values: Tensor) -> Tensor:
    """Sum the squares of each group, such as of each token, in the order of their numbers.

    >>> squares_by(torch.tensor([7, 3, 7]), torch.tensor([1.0, 2.0, 3.0])).tolist()
    [4.0, 10.0]
    """
    numbers, place = groups.reshape(-1).unique(return_inverse=True)
    return torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, place, values.double().reshape(-1) ** 2)


def _are_streams(one: Tensor, other: Tensor, apart: bool) -> bool:
    """Whether two sets of names have equally many features, and no token in common unless ``apart``."""
    same = len(feature_of(one).unique()) == len(feature_of(other).unique())
    return same and (apart or not bool(torch.isin(token_of(one).unique(), token_of(other).unique()).any()))


def _each_row_of_one_source(codes: Tensor) -> bool:
    """Whether each head has tokens of several sources side by side, each token whole and of one source."""
    for axis in (1, 2) if codes.dim() == 3 else ():
        token, source = (x.movedim(axis, -1) for x in (token_of(codes), source_of(codes)))
        whole = bool((token == token[..., :1]).all()) and bool((source == source[..., :1]).all())
        if codes.size(axis) > 1 and whole:
            return bool((source[..., 0].amin(1) != source[..., 0].amax(1)).all())
    return False


def _axes_shared(codes: Tensor, one: int, other: int) -> int:
    """Count the axes along which the names of two sources stand at the same indices; two streams differ along one."""
    own, its = ((source_of(codes) == number).nonzero().unbind(-1) for number in (one, other))
    return sum(torch.equal(x.unique(), y.unique()) for x, y in zip(own, its, strict=True))


@dataclass(frozen=True)
class Contraction:
    """out[n, i, j] = sum over d of left[n, i, d] * right[n, j, d]."""

    left: Tensor  # (n, i, d): which element of the left operand each term takes, counted in the order of its memory
    right: Tensor  # (n, j, d): the same of the right operand
    out: Tensor  # (n, i, j): which element of the result
    sides: tuple[int, int]  # which of the operation's inputs the left and the right operand are
    shape: tuple[int, ...]  # of the result
    # The equation that would be this product, where an einsum multiplies sums of each operand; "" where it is one.
    apart: str = ""

    def swapped(self) -> "Contraction":
        """Give the same contraction with its left and right operand exchanged."""
        return replace(self, left=self.right, right=self.left, out=self.out.transpose(1, 2), sides=self.sides[::-1])

    def rows(self, values: Tensor) -> Tensor:
        """Gather values of the left operand's shape as (n, i, d)."""
        return values.reshape(-1)[self.left]

    def columns(self, values: Tensor) -> Tensor:
        """Gather values of the right operand's shape as (n, j, d)."""
        return values.reshape(-1)[self.right]

    def result(self, values: Tensor) -> Tensor:
        """Gather values of the result's shape as (n, i, j)."""
        return values.reshape(-1)[self.out]

    def scattered(self, values: Tensor) -> Tensor:
        """Put values (n, i, j) back into the shape of the result; the inverse of ``result``."""
        flat = values.new_empty(values.numel())
        flat[self.out.reshape(-1)] = values.reshape(-1)
        return flat.view(self.shape)
