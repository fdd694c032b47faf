"""What is added to the scores, and what is hidden: a causal mask, a window, slopes, a table that is learnt."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from equivalence_tests.checker.engine.codes import token_of
from equivalence_tests.checker.engine.names import Part
from equivalence_tests.checker.engine.visibility import Windows, read_windows
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.operands import OperandReader, Relative, Slice, read_relative
from equivalence_tests.checker.equivalent.parameters import apart_in, paired, steps_to
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.watched import EXACT, SINGLE, places_in

CLOSE = 1e-6


@dataclass(frozen=True)
class Visible:
    """Which keys a query sees by their distance alone: query - key lies between two numbers."""

    least: int | None = None  # of the distance; 0 hides the future
    most: int | None = None  # the length of a window
    from_end: bool = False  # the last query stands beside the last key; else the first beside the first
    windows: Windows | None = None  # into which the tokens are cut; None for one of all
    not_own: bool = False  # whether a query does not see the key of its own place
    evidence: str = field(default="", compare=False)  # what says that it is intended, if that is known

    @property
    def is_everything(self) -> bool:
        """Whether nothing is hidden."""
        return self == Visible()

    def __str__(self) -> str:
        if self.windows is not None:
            return str(self.windows)
        if self.not_own:
            return "a query does not see its own key"
        if self.least == 0 and self.most is None:
            return "the future is hidden" + (", counted from the last key" if self.from_end else "")
        return f"a query sees keys at distances from {self.least} to {self.most} only"

    def hidden(self, gap: Tensor) -> Tensor:
        """Say which distances, query - key, (q, k), are hidden."""
        if self.windows is not None:
            return self.windows.hidden(*gap.shape)
        gap = gap + gap.size(1) - gap.size(0) if self.from_end else gap
        low = gap == 0 if self.not_own else torch.zeros_like(gap, dtype=torch.bool)
        low = low if self.least is None else gap < self.least
        return low if self.most is None else low | (gap > self.most)


@dataclass(frozen=True)
class Grid:
    """The places of tokens that are the patches of an image, row after row."""

    rows: int
    columns: int
    first: int = 0  # how many other tokens stand before them, each at no distance from any

    def __str__(self) -> str:
        before = f" behind {self.first} other" if self.first else ""
        return f" in a grid of {self.rows} x {self.columns} patches{before}"

    def distances(self) -> Tensor:
        """Give the distance of each token from each, (l, l)."""
        places = torch.cartesian_prod(torch.arange(self.rows), torch.arange(self.columns)).double()
        return F.pad(torch.cdist(places, places), (self.first, 0, self.first, 0))

    @classmethod
    def all_of(cls, length: int) -> Iterator["Grid"]:
        """List those that have so many tokens."""
        for first in (0, 1):
            places = length - first
            sides = (rows for rows in range(2, places // 2 + 1) if places % rows == 0)
            yield from (cls(rows, places // rows, first) for rows in sides)


@dataclass(frozen=True)
class Bias:
    """What is added to the scores."""

    visible: Visible = Visible()
    slopes: Tensor | None = None  # what each head subtracts for each step of distance, (h,); None for nothing
    grid: Grid | None = None  # in which that distance is; None for that in the row of tokens
    learnt: Tensor | None = None  # parameter elements that are added, (h, q, k, 1), or met by queries, (h, q, k, d)
    factor: float = 1.0  # what these elements are multiplied by
    meets: bool = False  # whether the queries meet them
    rows: Tensor | None = None  # which query meets each vector, (q, k), where a later key's is another one's
    given: Tensor | None = None  # what a mask that is handed over adds, (b, h, q, k), where samples differ in that
    relative: Relative | None = None  # what queries say to the distance of a key; None for nothing

    def __call__(self, query: Tensor, key_len: int, values: Values) -> Tensor | None:
        """Give what is added for queries (b, h, q, d): (h, q, k), (1, q, k) or (b, h, q, k); None for nothing."""
        query_len = query.size(-2)
        if self.given is not None:
            if self.given.shape[-2:] != (query_len, key_len):
                raise UnreadError("what a mask adds was read for one length only")
            return self.given
        gap = torch.arange(query_len)[:, None] - torch.arange(key_len)
        hidden = self.visible.hidden(gap)
        bias = torch.zeros(1, query_len, key_len, dtype=torch.float64)
        if self.slopes is not None:
            far = gap.abs() if self.grid is None else self.grid.distances()
            if far.shape != gap.shape:
                raise UnreadError("a grid was read for one length only")
            bias = -self.slopes[:, None, None] * far
        if self.learnt is not None:
            if self.learnt.shape[1:3] != (query_len, key_len):
                raise UnreadError("what is added to the scores was read for one length only")
            met = query if self.meets else torch.ones_like(query[..., :1])
            met = met[:, :, :, None] if self.rows is None else met[:, :, self.rows]
            bias = bias + self.factor * (met * values.parameters.taken(self.learnt)).sum(-1)
        if self.relative is not None:
            bias = bias + self.relative(values, key_len)
        return None if self.is_none else bias.masked_fill(hidden, -torch.inf)

    @property
    def is_none(self) -> bool:
        """Whether nothing is added and nothing hidden."""
        return self.visible.is_everything and self._adds_nothing

    @property
    def is_causal(self) -> bool:
        """Whether it hides the future, and that is all."""
        return self.visible == Visible(0) and self._adds_nothing

    @property
    def _adds_nothing(self) -> bool:
        return all(x is None for x in (self.slopes, self.learnt, self.given, self.relative))

    @property
    def is_of_distance(self) -> bool:
        """Whether the queries meet one vector for each distance."""
        return self.meets and all(len(found) == 1 for found in self._of_each_distance.values())

    @property
    def _of_each_distance(self) -> dict[int, Tensor]:
        """The first elements of the vectors that the queries meet themselves, by the distance: (found, h)."""
        if self.learnt is None:
            return {}
        rows = self.learnt[..., 0]
        gap = torch.arange(rows.size(1))[:, None] - torch.arange(rows.size(2))
        own = (rows >= 0).all(0) if self.rows is None else self.rows == torch.arange(rows.size(1))[:, None]
        return {int(one): rows[:, (gap == one) & own].mT.unique(dim=0) for one in gap[own].unique()}

    @property
    def mixes_distances(self) -> bool:
        """Whether places of an image that lie apart otherwise share elements of a table, as where its width is off."""
        if self.learnt is None or self.meets:
            return False
        rows = torch.where(self.learnt < 0, -1, self.learnt)[..., 0]
        if steps_to(rows) is not None or rows.size(1) != rows.size(2):
            return False
        sides = (width for width in range(2, rows.size(1)) if rows.size(1) % width == 0)
        return any(_shares(steps, rows, width) for width in sides if (steps := steps_to(rows, width)) is not None)

    def is_continued_by(self, other: "Bias") -> bool:
        """Whether a distance has the same vector at other lengths."""
        mine, theirs = self._of_each_distance, other._of_each_distance
        return not self.is_of_distance or all(torch.equal(mine[one], theirs[one]) for one in mine.keys() & theirs)

    @property
    def is_alibi(self) -> bool:
        """Whether the slopes are those of ALiBi: the powers of one number, or as its paper has them.

        The paper has 2^(-8 i / heads); where heads are no power of two, those of the next lower one and, behind
        them, every second of twice as many. Which head has which is all the same.
        """
        if self.slopes is None or bool((self.slopes <= 0).any()):
            return False
        heads = len(self.slopes)
        numbers = torch.arange(1.0, heads + 1, dtype=torch.float64)
        lower = 2 ** (heads.bit_length() - 1)
        paper = torch.cat([2 ** (-8 * numbers[:lower] / lower), 2 ** (-4 * (2 * numbers[: heads - lower] - 1) / lower)])
        slopes, paper = (x.sort(descending=True).values for x in (self.slopes, paper))
        powers = slopes[0] ** numbers
        return any(torch.allclose(slopes, one, rtol=1e-5) for one in (powers, paper)) and float(slopes[0]) < 1


def read_bias(reader: OperandReader, lengths: tuple[int, int]) -> Bias:
    """Read what is added to the scores of so many queries and keys.

    Raises:
        UnreadError: If it follows no rule that is known.
    """
    every = _added(reader, lengths)
    bias, hidden = every[0], every[0].isinf()
    gap = torch.arange(lengths[0])[:, None] - torch.arange(lengths[1])
    alike = all(torch.allclose(every[0], one, atol=CLOSE) for one in every)
    visible = _visible(hidden, gap) if alike else Visible()
    if alike and bool((bias[~hidden].abs() < CLOSE).all()):
        return Bias(visible)
    slopes = _slopes(bias, hidden, gap) if alike else None
    if slopes is not None:
        return Bias(visible, slopes)
    for grid in Grid.all_of(lengths[0]) if alike and lengths[0] == lengths[1] else ():
        found = Bias(visible, _slopes(bias, hidden, grid.distances()), grid)
        if found.is_alibi:  # by other numbers, a buffer alone would say that it is intended
            reader.watched.tolerance = SINGLE  # roots of tables that were made in float32
            return found
    query = reader.found["query"](reader.values)[0].detach()
    met = torch.ones_like(query[..., :1]) if alike else query
    learnt = _learnt(reader, lengths, ~hidden, met) if bool((every.isinf() == hidden).all()) else None
    if learnt is None and alike:
        raise UnreadError("what is added to the scores is not an element of a table times a number")
    if learnt is not None:
        places, factor, rows = learnt
        return Bias(_visible(hidden, gap), None, None, places, factor, not alike, rows)
    relative = _relative(reader, lengths, ~hidden) if bool((every.isinf() == hidden).all()) else None
    return Bias(given=every) if relative is None else Bias(_visible(hidden, gap), relative=relative)


def _added(reader: OperandReader, lengths: tuple[int, int]) -> Tensor:
    """What is added to the scores of each sample and head, -inf for hidden keys; a constant of a row is left out."""
    judgement = reader.watched.judgement
    models = dict(zip((part.number for part in judgement.attention.parts), judgement.models, strict=False))
    if any(one.part.number not in models for one in reader.slices):
        raise UnreadError("what is added to the scores cannot be read")

    def added(one: Slice) -> Tensor:
        every = one.part.product.contraction.result(models[one.part.number].bias)
        return _without_constant(every[one.number][one.rows])

    every = _laid_out(reader, lengths, added)
    return torch.where(every.isnan(), -torch.inf, every)


def _laid_out(reader: OperandReader, lengths: tuple[int, int], of: Callable[[Slice], Tensor]) -> Tensor:
    """Lay numbers of the scores of each slice, (q, k), out by sample, head, query and key; NaN where there are none."""
    laid = torch.full((reader.values.size(0), len(reader.heads), *lengths), torch.nan, dtype=torch.float64)
    for one in reader.slices:
        product = one.part.product
        token = reader.rows_of("query", token_of(product.left[one.number][one.rows, 0]))
        key = reader.rows_of("key", token_of(product.right[one.number][:, 0]))
        sample = max(int(token[0]) // lengths[0], int(key[0]) // lengths[1])  # learnt ones are those of the first
        own = laid[sample, reader.heads.index(one.head)]
        own[(token % lengths[0])[:, None], key % lengths[1]] = of(one).double()
    return laid


def _without_constant(bias: Tensor) -> Tensor:
    top = bias.amax(-1, keepdim=True)
    return bias - torch.where(top.isinf(), 0.0, top)


def _shares(steps: list[int], rows: Tensor, image: int) -> bool:
    """Whether two distances that are seen in an image lead to one element."""
    down, right = apart_in(image, rows.size(1))
    seen = torch.stack([down, right], -1)[rows[0] >= 0].unique(dim=0)
    return len((seen @ torch.tensor(steps[2:])).unique()) < len(seen)


def _visible(hidden: Tensor, gap: Tensor) -> Visible:
    """Find the distances that are seen."""
    if not bool(hidden.any()):
        return Visible()
    if bool((hidden != hidden[0]).any()) or bool(hidden[0].all()):
        raise UnreadError("heads differ in what they hide")
    least, most = (int(x) for x in gap[~hidden[0]].aminmax())
    tried = [Visible(0), Visible(0, from_end=True), Visible(least), Visible(least, most), Visible(None, most)]
    tried += [Visible(not_own=True), Visible(windows=read_windows(~hidden[0]))]
    found = next((one for one in tried if torch.equal(one.hidden(gap), hidden[0])), None)
    if found is None:
        raise UnreadError("what is hidden follows no rule of the distance")
    return found


def _slopes(bias: Tensor, hidden: Tensor, gap: Tensor) -> Tensor | None:
    """Find what each head subtracts for each step of distance, (q, k); None if it is something else."""
    steps = -gap.abs().double().expand_as(bias)
    count = (~hidden).sum(-1, keepdim=True).clamp_min(1)
    seen = (torch.where(hidden, 0.0, x) for x in (bias, steps))
    centred = [torch.where(hidden, 0.0, x - x.sum(-1, keepdim=True) / count) for x in seen]
    slopes = (centred[0] * centred[1]).sum((1, 2)) / centred[1].square().sum((1, 2))
    close = torch.allclose(centred[1] * slopes[:, None, None], centred[0], atol=CLOSE)
    return slopes if close else None


def _learnt(
    reader: OperandReader, lengths: tuple[int, int], seen: Tensor, met: Tensor
) -> tuple[Tensor, float, Tensor | None] | None:
    """Find for each score which parameter elements meet a vector, (h, q, d), their factor, and by which query.

    Skewing leaves later keys the vectors that the next query meets, or none. Where each is its own, no query is given.
    """
    places, factors = torch.full((*seen.shape, met.size(-1)), -1), list[float]()
    rows = torch.arange(lengths[0])[:, None].repeat(1, lengths[1])
    for at, found, numbers in _gradients(reader, lengths, seen):
        head, query, key = at
        later = met.size(-1) > 1 and key > query
        if later and not len(found):
            continue
        for row in range(query, min(query + 1 + later, met.size(1))):
            both = (paired(found[None], numbers[None], met[head, row], sign, EXACT) for sign in (1.0, -1.0))
            one = next((x for x in both if x is not None), None) if len(found) == met.size(-1) else None
            if one is not None:
                places[at], rows[query, key] = one.weight[0], row
                factors.append(one.factor)
                break
        else:
            return None
    usual = (1.0, met.size(-1) ** -0.5, factors[0])
    factor = next(x for x in usual if abs(factors[0] / x - 1) < EXACT)
    own = torch.equal(rows, torch.arange(lengths[0])[:, None].expand_as(rows))
    return (places, factor, None if own else rows) if all(abs(x / factor - 1) < EXACT for x in factors) else None


def _relative(reader: OperandReader, lengths: tuple[int, int], seen: Tensor) -> Relative | None:
    """Read relative positions off one score of each head."""
    one = torch.zeros_like(seen)
    one[:, 1:2, 0] = seen[:, 1:2, 0]
    gradients = [
        (found.sort().values, numbers[found.argsort()]) for _, found, numbers in _gradients(reader, lengths, one)
    ]
    tables, query = reader.watched.layout.tables, reader.found["query"]
    return read_relative(query, gradients, reader.values, lengths, tables) if len(gradients) == len(seen) else None


def _gradients(
    reader: OperandReader, lengths: tuple[int, int], seen: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Give for each score of the first sample its place, the parameter elements of no projection, and gradients."""
    parameters, taken = reader.watched.parameters, {one.part.number: one.part for one in reader.slices}
    inputs = {number: _into_softmax(reader, part) for number, part in taken.items()}
    starts = dict(zip(inputs, itertools.accumulate(map(len, inputs.values()), initial=0), strict=False))
    elements = torch.cat([*inputs.values()])

    def numbered(one: Slice) -> Tensor:
        return one.part.product.contraction.out[one.number][one.rows] + starts[one.part.number]

    laid = _laid_out(reader, lengths, numbered)
    first = torch.where(laid.isnan(), torch.inf, laid).amin(0)
    added = torch.ones_like(parameters.end_to_end(), dtype=torch.bool)
    added[reader.own_places] = False
    every, _ = parameters.gradient(elements @ torch.arange(1, len(elements) + 1).to(elements))
    without = parameters.named.keys() - {*parameters.names_at(every[added[every]])}
    for head, query in itertools.product(*map(range, seen.shape[:2])):
        keys = seen[head, query].nonzero()[:, 0]
        row = parameters.gradients(elements[first[head, query, keys].long()], without) if len(keys) else []
        for key, (found, numbers) in zip(keys.tolist(), row, strict=True):
            yield (head, query, key), found[added[found]], numbers[added[found]]


def _into_softmax(reader: OperandReader, part: Part) -> Tensor:
    """Give the scores of a part as a softmax takes them, in the order of its product."""
    watched = reader.watched
    taken = (operation.index for operation, _, _ in part.steps(watched.found.run) if operation.name == "softmax")
    for index in taken:
        codes = watched.found.run.names.before[index][0]
        if codes is not None:
            where = places_in(codes)
            order = [where[place] for place in range(part.product.contraction.out.numel())]
            return watched.operations[index].inputs[0].tensor.reshape(-1)[order]
    raise UnreadError("what is added to the scores cannot be followed to a softmax")
