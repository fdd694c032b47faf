"""What stands between a projection and the product: a norm of each head, a rotation by the position, a number."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from equivalence_tests.checker.equivalent.expressions import NORMS, Values
from equivalence_tests.checker.equivalent.parameters import factor_between, snapped
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.watched import Watched

HEAD_NORMS = {**NORMS, "normalize": lambda x, width, eps: F.normalize(x, dim=-1, eps=eps)}
EPS = {
    "layer_norm": (1e-5, 1e-6, 1e-12),
    "rms_norm": (1e-5, 1e-6, 1e-8, torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps),
    "normalize": (1e-12, 1e-6, 1e-8),
}
EPS_NAMES = ("eps", "epsilon", "variance_epsilon")
LOOSE, MEASURED = 1e-5, 1e-10  # angles of tables in float32, and of exact ones
SLOWEST = 1e-3  # a thousand tokens turn no pair by more than one radian: that says nothing of a position


@dataclass(frozen=True)
class HeadNorm:
    """A norm over the features of each head, with a gain and a bias that are learnt."""

    kind: str  # in ``HEAD_NORMS``
    eps: float  # what keeps it from dividing by 0
    gain: str = ""  # the name of its gain; "" for none
    bias: str = ""  # the name of its bias; "" for none
    added: float = 0.0  # what is added to the gain: 1 where it is kept as a difference from 1
    whole: bool = False  # whether it is over the features of all heads

    def __call__(self, x: Any, values: Values) -> Any:
        """Normalise heads, (b, h, l, d), or write that down."""
        rows = x.transpose(1, 2).flatten(2) if self.whole else x
        y = HEAD_NORMS[self.kind](rows, rows.size(-1), self.eps)
        if self.gain:
            gain = values.vector(self.gain)
            y = y * (gain + self.added if self.added else gain)
        y = y + values.vector(self.bias) if self.bias else y
        return y.unflatten(-1, (x.size(1), -1)).transpose(1, 2) if self.whole else y


@dataclass(frozen=True)
class Rotation:
    """A rotation of pairs of features by an angle that grows with the position."""

    start: int  # the first feature of the head that is rotated
    width: int  # how many are
    apart: int  # how far the two features of a pair are from one another
    steps: Tensor  # by how much each pair turns from one token to the next, (pairs,)
    first: int = 0  # the position of the first token
    angles: Tensor | None = None  # those of each position, (positions, pairs), where they do not grow evenly
    single: bool = False  # whether its tables are kept in float32
    whole: bool = False  # whether it is of the features of all heads side by side, before they are split

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate heads, (b, h, l, d)."""
        rows = x.transpose(1, 2).flatten(2) if self.whole else x
        rows = self.by(rows, self.angles_of(x.size(-2)).to(x.dtype))
        return rows.unflatten(-1, (x.size(1), -1)).transpose(1, 2) if self.whole else rows

    def by(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate rows by angles of their own, (..., d) by (..., pairs)."""
        rotated = x[..., self.start : self.start + self.width]
        first, second = paired(rotated, self.apart)
        both = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        whole = torch.stack(both, -1).flatten(-2) if self.apart == 1 else torch.cat(both, -1)
        return torch.cat([x[..., : self.start], whole, x[..., self.start + self.width :]], -1)

    def angles_of(self, length: int) -> Tensor:
        """Give the angles of the first tokens, (length, pairs)."""
        if self.angles is None:
            return torch.outer(torch.arange(length, dtype=torch.float64) + self.first, self.steps)
        if length > len(self.angles):
            raise UnreadError("the angles of its rotations were seen for one length only")
        return self.angles[:length]

    @property
    def grows(self) -> bool:
        """Whether the angles grow with the position, visibly and no two pairs alike; whether uneven ones change."""
        if self.angles is not None:
            return bool(((self.angles - self.angles[:1]).abs() > LOOSE).any())
        rounding = LOOSE if self.single else MEASURED
        turning = self.steps[self.steps > rounding].sort().values
        apart = bool((turning.diff() > LOOSE * turning[1:]).all())
        return bool((self.steps > -rounding).all()) and apart and float(self.steps.max()) > SLOWEST

    def is_in_order(self, ranks: Tensor) -> bool:
        """Whether it takes the features of heads, (heads, head_dim) by rank, as they come or with neighbours apart."""
        own = ranks[:, self.start : self.start + self.width]
        own, come = own - own.min(-1, keepdim=True).values, torch.arange(self.width)
        return any(bool((own == order).all()) for order in (come, torch.cat([come[::2], come[1::2]])))

    def is_like(self, other: "Rotation | None") -> bool:
        """Whether another one turns the same features by the same angles."""
        own = (self.start, self.width, self.apart, self.whole)
        if other is None or own != (other.start, other.width, other.apart, other.whole):
            return False
        most = min((len(one.angles) for one in (self, other) if one.angles is not None), default=3)
        return torch.allclose(_on_circle(self.angles_of(most)), _on_circle(other.angles_of(most)), atol=LOOSE)

    @property
    def base(self) -> float:
        """The base of which the steps are powers, base^(-2i / width); 0 if they are not."""
        pairs = torch.arange(len(self.steps), dtype=torch.float64)
        if self.angles is not None or len(pairs) < 2 or float(self.steps[1]) <= 0:
            return 0.0
        base = float(round(float(self.steps[1]) ** (-self.width / 2)))
        return base if base > 0 and torch.allclose(self.steps, base ** (-2 * pairs / self.width), rtol=1e-5) else 0.0


@dataclass(frozen=True)
class Change:
    """What is done to each head between projection and product: a norm, a rotation, and a number."""

    norm: HeadNorm | None = None
    rotation: Rotation | None = None
    factor: float = 1.0

    def __call__(self, x: Tensor, values: Values) -> Tensor:
        """Change heads, (b, h, l, d)."""
        x = x if self.norm is None else self.norm(x, values)
        return self.factor * (x if self.rotation is None else self.rotation(x))


def paired(x: Tensor, apart: int) -> tuple[Tensor, Tensor]:
    """Give the first and the second features of pairs, (..., pairs) each."""
    return (x[..., 0::2], x[..., 1::2]) if apart == 1 else (x[..., :apart], x[..., apart:])


@dataclass(frozen=True)
class Met:
    """Rows of heads as they meet in a product, and which rows of the projection they are."""

    rows: Tensor  # each token's place among all of the projection, (n,)
    heads: Tensor  # each one's head, (n,)
    numbers: Tensor  # their features, (n, d)

    def of(self, x: Tensor) -> Tensor:
        """Take the same rows of heads, (b, h, l, d)."""
        return x.transpose(1, 2).flatten(0, 1)[self.rows, self.heads]

    def side_by_side(self, numbers: Tensor) -> Tensor | None:
        """Put the heads of each token, (n, d), side by side, (tokens, h * d); None where a token lacks some."""
        order = (self.rows * (int(self.heads.max()) + 1) + self.heads).argsort()
        tokens, counts = self.rows.unique(return_counts=True)
        even = bool((counts == int(self.heads.max()) + 1).all()) and int(counts[0]) > 1
        return numbers[order].reshape(len(tokens), -1) if even else None


def change_between(projected: Tensor, met: Met, watched: Watched) -> Change:
    """Find the norm or rotation that turns projected heads, (b, h, l, d), into those that meet."""
    if projected.size(-1) != met.numbers.size(-1):
        raise UnreadError("heads have another width in the product than after their projection")
    bare = _behind(None, projected, met, watched)
    norms = _norms(projected, watched) if bare is None else ()
    found = [one for one in (bare, *(_behind(x, projected, met, watched) for x in norms)) if one is not None]
    if not found:
        raise UnreadError(
            "what is done to a head between its projection and the product is neither a norm nor a rotation"
        )
    near = 10 * min(gap for gap, _ in found)  # of several that differ by rounding, the one without a number beside it
    return min((one for one in found if one[0] <= near), key=lambda one: (one[1].factor != 1.0, one[0]))[1]


def _behind(norm: HeadNorm | None, projected: Tensor, met: Met, watched: Watched) -> tuple[float, Change] | None:
    """Find what follows a norm, and how far that is from what meets; None if it is no number and no rotation."""
    x = met.of(projected if norm is None else norm(projected, watched.values))
    rotation, factor = None, factor_between(x, met.numbers, watched.tolerance)
    if factor is None:
        positions = met.rows % projected.size(2)
        have = met.numbers
        rotation, factor = _rotation(x, have, positions) or (None, 0.0)
        wide, both = met.side_by_side(x), met.side_by_side(have)
        if rotation is None and wide is not None and both is not None:
            x, have, positions = wide, both, met.rows.unique() % projected.size(2)
            rotation, factor = _rotation(x, have, positions) or (None, 0.0)
            rotation = None if rotation is None else replace(rotation, whole=True)
        if rotation is None:
            return None
        x = rotation.by(x, rotation.angles_of(int(positions.max()) + 1)[positions])
        met = replace(met, numbers=have)
    gap = float((factor * x - met.numbers).abs().max())
    return gap, Change(norm, rotation, snapped(factor, 1.0, watched.tolerance))


def _norms(projected: Tensor, watched: Watched) -> Iterator[HeadNorm]:
    """List the norms that it could be: of each head, and of all heads side by side."""
    module = watched.call.module
    own = {getattr(m, name) for m in (module.modules() if module else ()) for name in EPS_NAMES if hasattr(m, name)}
    numbers = sorted(x for x in own if isinstance(x, float))
    for kind, usual in EPS.items():
        for eps in dict.fromkeys([*numbers, *usual]):
            for whole, width in ((False, projected.size(-1)), (True, projected.size(1) * projected.size(-1))):
                yield from _with_gains(HeadNorm(kind, eps, whole=whole), width, watched)


def _with_gains(plain: HeadNorm, width: int, watched: Watched) -> Iterator[HeadNorm]:
    named = watched.parameters.named
    vectors = [name for name, x in named.items() if x.numel() == width == max(x.shape, default=0)]
    yield plain
    for gain in vectors:
        yield replace(plain, gain=gain)
        yield replace(plain, gain=gain, added=1.0)
        for bias in vectors if plain.kind == "layer_norm" else ():
            if bias != gain:
                yield replace(plain, gain=gain, bias=bias)


def _rotation(x: Tensor, have: Tensor, positions: Tensor) -> tuple[Rotation, float] | None:
    """Find the rotation that turns one into the other, and the number beside it."""
    scale = float((have.square().sum() / x.square().sum()).sqrt())
    if not math.isfinite(scale) or scale == 0:
        return None
    turning = ((x * scale - have).abs().amax(0) > LOOSE * float(have.abs().max())).nonzero()[:, 0].tolist()
    ends = [(turning[0], turning[-1] + 1 - turning[0]), (0, x.size(-1))] if turning else []
    for start, width in dict.fromkeys(ends):
        for apart in (1, width // 2) if width % 2 == 0 else ():
            form = Rotation(start, width, apart, torch.zeros(width // 2, dtype=torch.float64))
            angles = _angles(form, x, have / scale, positions)
            if angles is not None:
                return _with_angles(form, angles), scale
    return None


def _angles(form: Rotation, x: Tensor, have: Tensor, positions: Tensor) -> Tensor | None:
    """Measure the angles of all pairs at each position; None if the pairs are others."""
    part = slice(form.start, form.start + form.width)
    before, after = (torch.complex(*paired(rows[:, part].contiguous(), form.apart)) for rows in (x, have))
    turns, lengths = after * before.conj(), before.abs().square()  # short pairs say little where float32 rounds them
    seen, shape = torch.bincount(positions), (int(positions.max()) + 1, before.size(1))
    total = torch.zeros(shape, dtype=turns.dtype).index_add(0, positions, turns)
    mean = total / torch.zeros(shape, dtype=lengths.dtype).index_add(0, positions, lengths)
    near, whole = float(before.abs().max()), torch.allclose(mean.abs(), torch.ones(()).double(), rtol=1e-6)
    uneven = float((mean[positions] * before - after).abs().max()) > LOOSE * near
    return mean.angle() if whole and not uneven and bool((seen > 0).all()) else None


def _with_angles(form: Rotation, angles: Tensor) -> Rotation:
    """Write the angles as multiples of the position, where they are; the multiples as powers of a base."""
    steps = torch.remainder(angles.diff(dim=0)[:1] + math.pi, 2 * math.pi).sub(math.pi).flatten()
    for first in (0, 1) if len(steps) else ():
        even = replace(form, steps=steps, first=first)
        gap = float((_on_circle(angles) - _on_circle(even.angles_of(len(angles)))).abs().max())
        if gap < LOOSE and even.base:
            exact = even.base ** (-2 * torch.arange(len(steps), dtype=torch.float64) / form.width)
            return replace(even, steps=exact, single=not torch.allclose(exact, steps, rtol=0, atol=MEASURED))
        if gap < LOOSE:
            return replace(even, single=gap > MEASURED)
    return replace(form, angles=angles, single=True)


def _on_circle(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles)
