"""What is read of an attention before it is judged, what is known about the call, and the judgement itself."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.names import Attention, Run, Source
from equivalence_tests.checker.engine.same import ROUNDING
from equivalence_tests.checker.engine.watching import Operation, Slot


@dataclass(frozen=True)
class RotaryPairs:
    """Which elements of a token a rotary embedding rotates together."""

    start: int  # the first element that is rotated
    apart: int  # how far the two elements of a pair are from one another

    def __str__(self) -> str:
        return "pairs of neighbours" if self.apart == 1 else "halves of a head"

    def first(self, width: int) -> list[int]:
        """List the first element of each pair of a token of so many."""
        places = range(self.start, width - self.apart)
        return [place for place in places if (place - self.start) // self.apart % 2 == 0]


@dataclass(eq=False)
class Operand:
    """One operand of a product, and how it came from its projection."""

    role: str  # "query", "key" or "value"
    sources: list[Source]  # where its names come from
    slot: Slot  # as it is used
    codes: Tensor  # the names of its rows, (n, i, d)
    places: Tensor  # which of its elements these are
    until: Operation  # uses it
    factor: float = 1.0  # what it is multiplied by on the way
    change: str = ""  # "" (a factor), "rotated", "normed" or "other"
    single: bool = False  # whether a part is computed in float32
    tolerance: float = ROUNDING  # what differs by less is rounding
    pairs: "RotaryPairs | None" = None  # which elements are rotated together, where a token is rotated; None elsewhere
    across: bool = False  # whether a token is rotated before its heads are split, so that two heads share each pair

    @property
    def rotated(self) -> bool:
        """Whether its tokens are rotated by their positions, with or without a norm before."""
        return self.change == "rotated" or (self.change == "normed" and self.pairs is not None)

    @property
    def start(self) -> int:
        """The first operation that gave it names."""
        return min((s.operation.index if s.operation is not None else -1 for s in self.sources), default=-1)

    def steps(self, run: Run) -> Iterator[tuple[Operation, Tensor, Tensor]]:
        """List the operations on its way from there to the product, with the names and numbers of what they give."""
        return run.names.carrying((source.number for source in self.sources), self.start, self.until.index)


@dataclass(eq=False)
class WeightsModel:
    """weights = softmax(factor * score + bias) over the keys of each row, as far as that is what happens.

    All tensors are flat, one entry for each score of the part.
    """

    factor: float  # what the scores are multiplied by; NaN if nothing of the kind is seen
    bias: Tensor  # what is added, up to a constant of each row; -inf where a key is hidden
    weights: Tensor  # what is multiplied with the values; NaN where a score meets none
    replaced: Tensor  # where the score itself has no influence, though the key is not hidden
    fill: Tensor  # what stands there instead of the score
    sums: Tensor  # the sum of the weights of each score's row
    rows: Tensor  # which row each score belongs to
    axis: str = "keys"  # over which scores the weights sum to one: "keys", "queries", "heads", "batch" or ""
    kind: str = "softmax"  # "softmax", "linear", "sigmoid" or "other"
    single: bool = False  # whether a part is computed in float32
    cap: float = 0.0  # of a tanh that holds the scores; 0 if there is none
    # What the scores of each head are multiplied by, where that is not the same; else None.
    by_head: Tensor | None = None
    dead: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # rows that see no key

    @property
    def hidden(self) -> Tensor:
        """Keys whose weight is nothing."""
        return self.bias == -torch.inf

    @property
    def live(self) -> Tensor:
        """What meets a value, in rows that see some key."""
        return ~self.weights.isnan() & ~self.dead[self.rows]

    @property
    def has_choice(self) -> bool:
        """Whether some query had keys to choose from."""
        return self.kind != "softmax" or not math.isnan(self.factor)


@dataclass(frozen=True)
class Expectation:
    """What is known about a call from outside."""

    # Which key each score's query may look at, flat as the scores are; None if nothing is known.
    may: Tensor | None = None
    masked: bool = False  # whether a mask was handed over that hides something


# Says what is known about the mask of an attention, by the number of each part.
Expecting = Callable[[Attention], Mapping[int, Expectation]]


@dataclass(eq=False)
class Judgement:
    """What was found out about one attention."""

    attention: Attention
    departures: list[Departure] = field(default_factory=list)  # what departs, in the order of the stages
    operands: list[list[Operand]] = field(default_factory=list)  # its queries, keys and values, by part
    models: list[WeightsModel] = field(default_factory=list)  # what happens to its scores, by part
    hidden: list[Tensor] = field(default_factory=list)  # which scores should be hidden, by part
    values_rotated: bool = False  # whether values are rotated by their positions, and their averages are rotated back

    @property
    def first_operands(self) -> list[Operand]:
        """Queries, keys and values of its first part; none where they were not read."""
        return self.operands[0] if self.operands else []

    def blocked(self) -> bool:
        """Whether what departs keeps later stages from being read."""
        return any(departure.blocks for departure in self.departures)
