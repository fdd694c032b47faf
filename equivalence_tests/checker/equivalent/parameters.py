"""All parameters laid end to end: which of them make a number, and what parts of them are as Python expressions."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.same import near

NEARER = 1e-9  # so much farther off is each place


class Layer(NamedTuple):
    """A linear layer, as places of parameter elements: (out, in), and (out,) of the bias, -1 for none."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Affine:
    """A projection, ``factor * (weight · x + bias)``, by the places of its numbers in ``Parameters.end_to_end``."""

    # (..., features), -1 for what takes no part; without a bias nothing is projected: (...), which features are taken
    weight: Tensor
    bias: Tensor | None  # (...); -1 for none
    factor: float = 1.0  # what all of it is multiplied by
    more: Tensor | None = None  # a second bias, as queries may have one for each head; None for none

    def of(self, x: Tensor, parameters: "Parameters") -> Tensor:
        """Project tokens, (..., features), all that it makes side by side."""
        if self.bias is None:
            return self.factor * x[..., self.weight.flatten()]
        weight, bias = parameters.taken(self.weight), parameters.taken(self.bias)
        bias = bias if self.more is None else bias + parameters.taken(self.more)
        return self.factor * F.linear(x, weight.flatten(0, -2), bias.flatten())

    @property
    def biases(self) -> Tensor:
        """The parameter elements of its biases."""
        every = [torch.zeros(0, dtype=torch.long), *(x.flatten() for x in (self.bias, self.more) if x is not None)]
        return torch.cat([x[x >= 0] for x in every])

    @property
    def places(self) -> Tensor:
        """The parameter elements that it uses."""
        if self.bias is None:
            return torch.zeros(0, dtype=torch.long)
        return torch.cat([self.weight[self.weight >= 0], self.biases])


class Parameters:
    """The parameters of a module, or the matrices that a function is given, each element with a place."""

    def __init__(self, named: Mapping[str, Tensor], module: nn.Module | None = None) -> None:
        self.named = dict(named)
        self.module = nn.Module() if module is None else module  # an empty one for a function
        sizes = (parameter.numel() for parameter in self.named.values())
        self.start = dict(zip(self.named, itertools.accumulate(sizes, initial=0), strict=False))

    @classmethod
    def of(cls, module: nn.Module | None) -> "Parameters":
        """Take those of a module; none of a plain function."""
        return cls({} if module is None else dict(module.named_parameters()), module)

    def end_to_end(self) -> Tensor:
        """Lay the parameters end to end, with their gradients."""
        pieces = [parameter.reshape(-1).double() for parameter in self.named.values()]
        return torch.cat(pieces) if pieces else torch.zeros(1, dtype=torch.float64)

    def places(self, name: str) -> Tensor:
        """Give the places of the elements of a parameter, in its shape."""
        shape = self.named[name].shape
        return torch.arange(shape.numel()).view(shape) + self.start[name]

    def layer(self, name: str) -> Layer:
        """Give the places of a weight, (out, in), or one row, and of the bias that stands beside it."""
        weight = self.places(name).view(1, -1) if self.named[name].dim() == 1 else self.places(name)
        bias = f"{name.removesuffix('weight')}bias"
        fits = bias in self.named and self.named[bias].shape == weight.shape[:1]
        return Layer(weight, self.places(bias) if fits else torch.full(weight.shape[:1], -1))

    def taken(self, places: Tensor) -> Tensor:
        """Give the elements at some places; 0 where the place is -1."""
        return torch.where(places >= 0, self.end_to_end()[places.clamp_min(0)], 0.0)

    def name_at(self, place: int) -> str:
        """Name the parameter that an element belongs to."""
        return self.names_at(torch.tensor(place))[0]

    def names_at(self, places: Tensor) -> list[str]:
        """Name the parameters that elements belong to, in the order of the state_dict."""
        return [name for name in self.named if bool(self.holds(name, places).any())]

    def holds(self, name: str, places: Tensor) -> Tensor:
        """Say which places are those of a parameter's elements."""
        start = self.start[name]
        return (places >= start) & (places < start + self.named[name].numel())

    def inside(self, path: str) -> set[str]:
        """Name the parameters of a sub-module."""
        return {f"{path}.{name}" for name, _ in self.module.get_submodule(path).named_parameters()}

    def is_beside(self, bias: Tensor, weight: Tensor) -> bool:
        """Whether a bias, which may be none, belongs to the module that the weight belongs to."""
        owners = {name.rpartition(".")[0] for x in (weight, bias[bias >= 0]) for name in self.names_at(x)}
        return len(owners) == 1

    def gradient(self, element: Tensor, without: Collection[str] = ()) -> tuple[Tensor, Tensor]:
        """Differentiate one number of a run with gradients: the places whose gradient is not 0, and these gradients."""
        asked = [name for name, x in self.named.items() if x.requires_grad and name not in without]
        if not asked or not element.requires_grad:
            return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.float64)
        wanted = [self.named[name] for name in asked]
        found = torch.autograd.grad(element, wanted, retain_graph=True, allow_unused=True)
        places, numbers = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.float64)]
        for name, gradient in zip(asked, found, strict=True):
            if gradient is not None:
                there = gradient.reshape(-1).nonzero()[:, 0]
                places.append(there + self.start[name])
                numbers.append(gradient.reshape(-1)[there].double())
        return torch.cat(places), torch.cat(numbers)

    def gradients(self, elements: Tensor, without: Collection[str] = ()) -> list[tuple[Tensor, Tensor]]:
        """Differentiate some numbers, each on its own; at once if no parameter element is in two of them.

        Then the gradient of a weighted sum is, at each place, that of the sum times the weight of one number.
        """
        weights = torch.rand(len(elements), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        (places, numbers), (others, weighted) = (self.gradient((elements * x).sum(), without) for x in (1, weights))
        if torch.equal(places, others):
            off, row = ((weighted / numbers)[:, None] - weights).abs().min(1)
            if bool((off < NEARER).all()):
                return [(places[row == one], numbers[row == one]) for one in range(len(elements))]
        return [self.gradient(one, without) for one in elements]

    def projection(
        self, elements: Tensor, features: Tensor, tolerance: float, without: Collection[str] = (), biases: int = 1
    ) -> Affine | None:
        """Read which projection makes some elements of one token, one row for each; None if none makes these numbers.

        d element / d weight is the input of the projection, (e,), and d element / d bias is 1, each times the factor:
        that says which parameter element multiplies which feature. A sum in which each element counts as often as its
        number says says whose each is. There are as many biases at most; some parameters belong to something else.
        """
        counts = torch.arange(1, len(elements) + 1)
        (places, numbers), (_, counted) = (self.gradient((elements * x).sum(), without) for x in (1, counts))
        width = len(numbers) // len(elements)
        if len(counted) != len(numbers) or width - len(features) not in range(biases + 1):
            return None
        row, order = (counted / numbers).round().sort(stable=True)
        if not torch.equal(row.long(), counts.repeat_interleave(width)):
            return None
        places, numbers = places[order].view(-1, width), numbers[order].view(-1, width)
        both = (paired(places, numbers, features, sign, tolerance) for sign in (1.0, -1.0))
        return next((one for one in both if one is not None and self._gives(one, features, elements, tolerance)), None)

    def _gives(self, found: Affine, features: Tensor, elements: Tensor, tolerance: float) -> bool:
        assert found.bias is not None  # it projects
        with torch.no_grad():
            added = self.taken(found.bias).abs() + (0.0 if found.more is None else self.taken(found.more).abs())
            size = abs(found.factor) * (self.taken(found.weight).abs() @ features.abs() + added)
            return bool(((found.of(features, self) - elements).abs() <= 10 * tolerance * size.clamp_min(1e-30)).all())


def order_of(have: Tensor, want: Tensor, first: int = 0) -> Tensor:
    """Say which column of one table each column of another is; of some that are alike, that at its place.

    >>> table = torch.tensor([[0.0, 3.0, 0.0], [0.0, 5.0, 0.0]])
    >>> order_of(table, table), order_of(table[:, 1:], table)
    (tensor([0, 1, 2]), tensor([1, 0]))
    """
    usual, places = torch.arange(have.size(-1)) + first, torch.arange(want.size(-1))
    apart = (have[..., None] - want[..., None, :]).abs().amax(0)
    return (apart + NEARER * (usual[:, None] - places).abs()).argmin(-1)


def snapped(measured: float, exact: float, tolerance: float) -> float:
    """Take an exact number in the place of one that was measured, where they differ by rounding alone."""
    return exact if abs(measured - exact) <= 1e-2 * tolerance * abs(exact) else measured


def factor_between(x: Tensor, have: Tensor, tolerance: float) -> float | None:
    """Give the number that turns one into the other, up to rounding; None if none does."""
    factor = float((x * have).sum() / x.square().sum())
    return snapped(factor, 1.0, tolerance) if factor != 0 and near(x * factor, have, tolerance) else None


def paired(places: Tensor, numbers: Tensor, features: Tensor, sign: float, tolerance: float) -> Affine | None:
    """Pair gradients with features by value: numbers = factor * features in some order, and factor for a bias.

    The places, of the gradients of each row, are (rows, features), or one or two more; the factor has a sign.
    """
    biased, bias = numbers.size(1) - len(features), torch.full((len(numbers), 1), -1)
    factor = sign * float((numbers[0].square().sum() / (features.square().sum() + biased)).sqrt())
    numbers = numbers / factor
    if biased:
        at = (numbers - 1).abs().topk(biased, 1, largest=False).indices.sort().values
        rest = torch.ones_like(numbers, dtype=torch.bool).scatter(1, at, False)
        if bool(((numbers - 1).abs().gather(1, at) >= 10 * tolerance).any()):
            return None
        bias, places, numbers = places.gather(1, at), *(x[rest].view(len(x), -1) for x in (places, numbers))
    have, want = numbers.sort(), features.sort()
    close = 10 * tolerance * want.values.abs() + tolerance * features.abs().max()
    if bool(((have.values - want.values).abs() > close).any()):
        return None
    weight = torch.empty_like(places)
    weight[:, want.indices] = places.gather(1, have.indices)
    return Affine(weight, bias[:, 0], snapped(factor, 1.0, tolerance), bias[:, 1] if biased > 1 else None)


@dataclass(frozen=True)
class Block:
    """A part of one parameter, as ``Tensor.as_strided`` takes it."""

    name: str  # the parameter; "" for zeros
    shape: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]  # by how many elements of the parameter each axis of the part goes on
    offset: int
    folded: bool = False  # whether its last two axes are one of the part, as where the features of heads lie apart

    def read(self, state: str) -> str:
        """Write the expression that takes it out of what is called ``state``, a state_dict."""
        if not self.name:
            return f"torch.zeros({', '.join(map(str, self.size))})"
        whole = f'{state}["{self.name}"]'
        rows, features = self.shape if len(self.shape) == 2 else (0, 0)
        if self.size[1:] == (features,) and self.stride == (features, 1):
            return whole + self._rows(self.offset // features, rows)
        if self.size[1:] == (rows,) and self.stride == (1, features):
            return whole + ".T" + self._rows(self.offset, features)
        if len(self.shape) == len(self.size) == 1 and self.stride == (1,):
            return whole + self._rows(self.offset, self.shape[0])
        folded = ".flatten(-2)" if self.folded else ""
        return f"{whole}.as_strided({self.size}, {self.stride}, {self.offset}){folded}"

    def write(self, state: str, source: str) -> str:
        """Write the line that puts an expression of the part back into a state_dict."""
        if self.folded:
            return f"{replace(self, folded=False).read(state)}.copy_({source}.unflatten(-1, {self.size[-2:]}))"
        return f"{self.read(state)}.copy_({source})"

    def _rows(self, start: int, every: int) -> str:
        return "" if (start, self.size[0]) == (0, every) else f"[{start}:{start + self.size[0]}]"


def blocks_of(places: Tensor, parameters: Parameters) -> list[Block] | None:
    """Write places of parameter elements, (rows, features) or (rows,), -1 for zeros, as parts one after the other.

    Returns:
        As few parts as there are; None where some place is not an even step from the one before.
    """
    found: list[Block] = []
    start = 0
    while start < len(places):
        count = _even_rows(places[start:], parameters)
        block = _block(places[start : start + count], parameters)
        if block is None:
            return None
        found.append(block)
        start += count
    return found


def _even_rows(places: Tensor, parameters: Parameters) -> int:
    """Count the first rows that follow one another by even steps, in one parameter."""
    first = places.reshape(len(places), -1)[:, 0]
    if first[0] < 0:
        return int((first < 0).long().cumprod(0).sum())
    name = parameters.name_at(int(first[0]))
    count = int(parameters.holds(name, first).long().cumprod(0).sum())
    if count < 3:
        return count if count < 2 or _block(places[:count], parameters) is not None else 1
    steps = first[1:count] - first[: count - 1]
    return int((steps == steps[0]).long().cumprod(0).sum()) + 1


def _block(places: Tensor, parameters: Parameters) -> Block | None:
    if bool((places < 0).any()):
        return Block("", (), tuple(places.shape), (), 0) if bool((places < 0).all()) else None
    name = parameters.name_at(int(places.reshape(-1)[0]))
    shape, offset = tuple(parameters.named[name].shape), int(places.reshape(-1)[0]) - parameters.start[name]
    stride = tuple(_step(places, axis) for axis in range(places.dim()))
    want = torch.tensor(offset + parameters.start[name])
    for axis, step in enumerate(stride):
        along = torch.arange(places.size(axis)) * step
        want = want + along.view([-1 if axis == other else 1 for other in range(places.dim())])
    if torch.equal(want.expand(places.shape), places) and all(step >= 0 for step in stride):
        return Block(name, shape, tuple(places.shape), stride, offset)
    return _folded(places, parameters) if places.dim() == 2 else None


def _folded(places: Tensor, parameters: Parameters) -> Block | None:
    """A part whose columns go on by even steps of two kinds."""
    width = places.size(-1)
    for count in (count for count in range(2, width) if width % count == 0):
        block = _block(places.unflatten(-1, (count, -1)), parameters)
        if block is not None:
            return replace(block, folded=True)
    return None


def _step(places: Tensor, axis: int) -> int:
    if places.size(axis) == 1:
        return int(places.size(-1)) if axis == 0 and places.dim() == 2 else 1
    return int(places.select(axis, 1).reshape(-1)[0] - places.select(axis, 0).reshape(-1)[0])


def joined(blocks: list[Block], state: str) -> str:
    """Write the expression that takes parts out of a state_dict, one after the other."""
    pieces = [block.read(state) for block in blocks]
    return pieces[0] if len(pieces) == 1 else f"torch.cat([{', '.join(pieces)}])"


def written_back(blocks: list[Block], target: str, source: str) -> list[str]:
    """Write the lines that put parts back into a state_dict; the source holds them one after the other."""
    lines, start = [], 0
    for block in blocks:
        rows = "" if len(blocks) == 1 else f"[{start}:{start + block.size[0]}]"
        lines += [block.write(target, source + rows)] if block.name else []
        start += block.size[0]
    return lines


def index_of(places: Tensor, image: int = 1, width: str = "") -> str:
    """Write which element of a table each head, query and key takes, (h, q, k), -1 where hidden: by steps, or each.

    The tokens may be the rows of an image so wide; its width has a name.
    """
    steps = steps_to(places, image)
    if steps is None:
        return f"torch.tensor({places.clamp_min(0).tolist()})"
    width, hidden = width or str(image), bool((places < 0).any())
    names = ["torch.arange(query.size(-2))[:, None]", "torch.arange(key.size(-2))"]
    names = [f"(queries[:, None] {x} {width} - keys {x} {width})" for x in ("//", "%")] if image > 1 else names
    names = [f"torch.arange({len(places)})[:, None, None]", *names]
    written = " + ".join([str(steps[0]), *(f"{step} * {name}" for step, name in zip(steps[1:], names, strict=True))])
    return f"({written}).clamp(0, {int(places.max())})" if hidden else written


def steps_to(places: Tensor, image: int = 1) -> list[int] | None:
    """Find the first place, and the steps by head, query and key, or by head and distance in an image.

    None where no such steps lead to all places, (h, q, k), but those of hidden scores, -1.
    """
    heads, queries, keys = places.shape
    line = torch.arange(queries)[:, None], torch.arange(keys)[None]
    axes = torch.ones(1, 1), torch.arange(heads)[:, None, None], *(apart_in(image, keys) if image > 1 else line)
    seen = places >= 0
    every = torch.stack([x.expand(places.shape)[seen] for x in axes], -1).double()
    wanted = places[seen][:, None].double()
    found = torch.linalg.lstsq(every, wanted, driver="gelsd").solution.round()
    return found[:, 0].int().tolist() if torch.equal(every @ found, wanted) else None


def apart_in(image: int, length: int) -> tuple[Tensor, Tensor]:
    """Give how many rows and columns lie from each key to each query, in an image so wide, (l, l)."""
    places = torch.arange(length)
    down, right = ((x[:, None] - x) for x in (places // image, places % image))
    return down, right
