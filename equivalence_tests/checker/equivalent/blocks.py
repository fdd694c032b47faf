"""Parts of parameters, as Python expressions: which rows of which weight are those of which head."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivalence_tests.checker.equivalent.parameters import Parameters


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
