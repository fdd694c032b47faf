"""The names of one recorded run: where each element comes from, its products, and the attentions found in it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import (
    FEATURES,
    Contraction,
    feature_of,
    looked_up,
    source_of,
    sources_in,
    token_of,
    unified,
)
from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot
from equivalence_tests.checker.reach.tracing import tensors_of


@dataclass(eq=False)
class Source:
    """Where names come from."""

    number: int
    kind: str  # "input", "projection", "added", "gain", "normed", "gated", "pooled", "given", "score" or "context"
    operation: Operation | None  # what made it; None for what was given to the run
    slot: Slot  # the tensor that carries its names first
    codes: Tensor  # those names
    parents: tuple[int, ...] = ()  # the sources that it was made from
    # Further tensors that carry names of the same source, with these names.
    others: list[tuple[Tensor, Slot]] = field(default_factory=list)


@dataclass(eq=False)
class Product:
    """A product of two activations: rows times columns."""

    operation: Operation
    contraction: Contraction
    left: Tensor  # names on the left, (n, i, d)
    right: Tensor  # names on the right, (n, j, d)
    source: Source | None = None  # the names of its result; None if it cannot be read
    trouble: str = ""  # why it cannot be read

    @property
    def width(self) -> int:
        """By whose root the scores should be divided: how many features are summed."""
        return self.left.size(-1)

    @property
    def operands(self) -> tuple[Slot, Slot]:
        """The left and the right operand."""
        left, right = (self.operation.inputs[side] for side in self.contraction.sides)
        return left, right

    @cached_property
    def table(self) -> "ScoreTable":
        """Who meets whom in it."""
        return ScoreTable(self)

    def turn(self) -> None:
        """Swap rows and columns in place: queries and keys change sides."""
        self.left, self.right, self.contraction = self.right, self.left, self.contraction.swapped()
        del self.table


@dataclass(eq=False)
class Context(Product):
    """A product of what came from scores, on the left, with values."""

    # The names of the result: of one source for all products of the same queries and values.
    codes: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def weights(self) -> Tensor:
        """Names of the weights, (n, i, k)."""
        return self.left

    @property
    def values(self) -> Tensor:
        """Names of the values, (n, f, k)."""
        return self.right

    @property
    def score_sources(self) -> list[int]:
        """The products that the weights come from."""
        return sources_in(self.weights)


@dataclass(eq=False)
class Identities:
    """All names of one run."""

    operations: list[Operation]
    sources: dict[int, Source] = field(default_factory=dict)  # by number
    products: list[Product] = field(default_factory=list)  # of two activations, none of which comes from scores
    contexts: list[Context] = field(default_factory=list)  # of what comes from scores with another activation
    across: list[Product] = field(default_factory=list)  # products that sum over tokens, each of one feature
    before: list[list[Tensor | None]] = field(default_factory=list)  # for each operation, the names of its inputs
    after: list[list[Tensor | None]] = field(default_factory=list)  # for each operation, the names of its outputs

    @cached_property
    def _given(self) -> list[tuple[frozenset[int], Operation, Tensor, Slot]]:
        """Each output with names: the sources of the names, its operation, the names and its slot."""
        pairs = zip(self.operations, self.after, strict=True)
        given = ((op, *pair) for op, names in pairs for pair in zip(op.outputs, names, strict=False))
        real = ((op, slot, codes) for op, slot, codes in given if codes is not None and not codes.is_complex())
        return [(frozenset(sources_in(codes)), op, codes, slot) for op, slot, codes in real]

    def carrying(
        self, numbers: Iterable[int], after: int = -1, before: int | None = None
    ) -> Iterator[tuple[Operation, Tensor, Tensor]]:
        """List outputs between two operations that hold names of these sources: (operation, names, values)."""
        wanted, end = set(numbers), len(self.operations) if before is None else before
        for sources, operation, codes, slot in self._given:
            if after < operation.index < end and not wanted.isdisjoint(sources):
                yield operation, codes, slot.value

    def last_of(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give the last recorded value of a tensor and its names; None if it has no names."""
        found = [(slot.value, codes) for _, _, codes, slot in self._given if slot.tensor is tensor]
        return found[-1] if found else None

    def taken(self, operation: Operation) -> list[tuple[Slot, Tensor]]:
        """List the inputs of an operation that have names: (slot, names)."""
        pairs = zip(operation.inputs, self.before[operation.index], strict=True)
        return [(slot, codes) for slot, codes in pairs if codes is not None and not codes.is_complex()]

    def beside(self, operation: Operation) -> list[tuple[Slot, int]]:
        """List the inputs without names: (slot, the parameters, buffers and arguments it was made from, as bits)."""
        found = zip(operation.inputs, operation.origins, self.before[operation.index], strict=True)
        return [(slot, bits) for slot, bits, codes in found if codes is None]

    def made_of(self, numbers: Iterable[int], beyond: bool = False) -> list[Source]:
        """List these sources and their parents, nearest first; stops at projections unless ``beyond``."""
        found: dict[int, Source] = {}
        left = list(numbers)
        while left:
            source = self.sources[left.pop(0)]
            if source.number not in found:
                found[source.number] = source
                left += source.parents if beyond or source.kind != "projection" else ()
        return list(found.values())


class ScoreTable:
    """Who meets whom in a product: the query, the head and the key of each score, by its place."""

    def __init__(self, product: Product) -> None:
        left, right = unified(product.left), unified(product.right)
        shape = (*left.shape[:2], right.size(1))

        def flat(x: Tensor) -> Tensor:
            return product.contraction.scattered(x.expand(shape).contiguous()).reshape(-1)

        query, key = token_of(left)[..., 0], token_of(right)[..., 0]
        sets = source_of(left) * FEATURES + feature_of(left)
        self.heads, head = numbered_rows(sets)
        self.place_of_head = _places_of_heads(sets, head)
        self.key_heads, key_head = numbered_rows(source_of(right) * FEATURES + feature_of(right))
        most = int(query.max()) + 1
        pairs, row = (head * most + query).unique(return_inverse=True)
        self.token_of_row, self.head_of_row = pairs % most, pairs // most
        self.row, self.query, self.head = (flat(x[:, :, None]) for x in (row, query, head))
        self.key, self.key_head = (flat(x[:, None, :]) for x in (key, key_head))
        same = head[:, :, None] == head[:, None, :]  # rows of one slice, (n, i, i)
        self.rank_query, self.rank_key = flat(same.tril(-1).sum(-1)[:, :, None]), flat(torch.arange(shape[-1]))


def _places_of_heads(sets: Tensor, head: Tensor) -> Tensor:
    """Where each head lies among the features of its source: the same number in every product that it takes part in."""
    width = sets.size(-1)
    flat, number = sets.reshape(-1, width) % FEATURES, head.reshape(-1)
    least = torch.full((int(number.max()) + 1,), FEATURES, dtype=torch.long)
    least = least.scatter_reduce(0, number, flat.amin(-1), "amin")
    together = bool((flat.amax(-1) - flat.amin(-1) == width - 1).all())
    return least // width if together else least


def numbered_rows(sets: Tensor) -> tuple[Tensor, Tensor]:
    """Number rows of features in the order of their least ones: a sum of each that differs, and each row's number."""
    flat = sets.reshape(-1, sets.size(-1))
    least = flat.amin(-1)
    total = (flat.double() * (1 + torch.arange(flat.size(-1), dtype=torch.float64).sqrt())).sum(-1)
    found, place = total.unique(return_inverse=True)
    first = torch.empty_like(found, dtype=torch.long).scatter_(0, place, least)
    order = first.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))[place]
    return found[order], place.view(sets.shape[:-1])


@dataclass(eq=False)
class Run:
    """One recorded run with the names of its elements."""

    recorder: Recorder
    names: Identities
    output: object = None  # what the call gave back

    @property
    def operations(self) -> list[Operation]:
        """All operations."""
        return self.recorder.operations

    @cached_property
    def graph(self) -> Graph:
        """Who made and used what."""
        return Graph(self.operations)

    def live(self, outputs: Iterable[Tensor] | None = None) -> set[int]:
        """Give the indices of the operations on which some outputs depend; all where nothing comes back.

        Without outputs, these are all that comes back, and all that the module gave whose call made it.
        """
        whole = (x for call in self.recorder.calls if not call.path for x in call.outputs)
        tensors = [*tensors_of(self.output), *whole] if outputs is None else list(outputs)
        return self.graph.live(tensors) if tensors else {operation.index for operation in self.operations}


@dataclass(eq=False)
class Part:
    """A product of queries and keys with the products of its weights and values."""

    product: Product  # queries times keys
    contexts: list[Context]  # weights times values; at least one

    @property
    def table(self) -> ScoreTable:
        """Who meets whom in its product."""
        return self.product.table

    @property
    def number(self) -> int:
        """Of the names of its scores."""
        assert self.product.source is not None  # every product that is kept has names
        return self.product.source.number

    @property
    def places_of_heads(self) -> Tensor:
        """Where each head lies: from which projection its queries come, and where among that one's features."""
        least = int(source_of(self.product.left).amin())
        return least * FEATURES + self.table.place_of_head

    @property
    def sides(self) -> dict[str, tuple[Tensor, Operation]]:
        """Queries, keys and values by their roles: their names, and the product that takes them."""
        product, context = self.product, self.contexts[0]
        sides = {"query": (product.left, product.operation), "key": (product.right, product.operation)}
        return sides | {"value": (context.values, context.operation)}

    def steps(self, run: Run) -> Iterator[tuple[Operation, Tensor, Tensor]]:
        """List the operations from its product to the last one with values: names and numbers of what they give."""
        return run.names.carrying([self.number], before=max(c.operation.index for c in self.contexts) + 1)

    @property
    def rows(self) -> Tensor:
        """Names the query and head of each score: the same in all parts that weigh keys for one query."""
        return self.places_of_heads[self.table.head] * FEATURES + self.table.query


@dataclass(eq=False)
class Attention:
    """One attention: all parts whose contexts end in one tensor."""

    run: Run
    parts: list[Part]  # one, or one for each head, tile or chunk
    end: Operation  # the last operation that carries its contexts
    names: Tensor | None = None  # the names of what that gives

    @property
    def first(self) -> Operation:
        """Its first product."""
        return self.parts[0].product.operation

    @property
    def last(self) -> Operation:
        """The last product of weights and values; of those that are read, where some are."""
        made = [c for p in self.parts for c in p.contexts]
        read = [c for c in made if c.source is not None]
        return max((c.operation for c in read or made), key=lambda operation: operation.index)

    @cached_property
    def tiled(self) -> bool:
        """Whether several parts add up to the weights of one query: tiles, or keys of two kinds."""
        rows = torch.cat([part.rows.unique() for part in self.parts])
        return len(rows.unique()) < len(rows)

    @cached_property
    def beside(self) -> bool:
        """Whether the scores of several parts lie beside one another in one softmax."""
        numbers = {part.number for part in self.parts}
        carried = self.run.names.carrying(numbers)
        return any(len(numbers & {*sources_in(codes)}) > 1 for op, codes, _ in carried if op.name in SOFTMAXES)

    @property
    def context_sources(self) -> list[int]:
        """The numbers of the names of its contexts."""
        found = {c.source.number for p in self.parts for c in p.contexts if c.source is not None}
        return sorted(found)

    @property
    def end_slot(self) -> Slot:
        """What holds the contexts last."""
        return self.end.outputs[0]


def values_at(sources: Iterable[Source], codes: Tensor, values: Iterable[Tensor] | None = None) -> Tensor:
    """Give the numbers that sources have under these names, in the run or as given; NaN where they have none."""
    sources = list(sources)
    held = [(codes, slot.value) for s in sources for codes, slot in ((s.codes, s.slot), *s.others)]
    if values is not None:
        held = [(source.codes, value) for source, value in zip(sources, values, strict=True)]
    names = torch.cat([torch.zeros(0, dtype=torch.float64), *(own.reshape(-1) for own, _ in held)])
    return looked_up(codes, names, torch.cat([torch.zeros(0), *(value.reshape(-1).double() for _, value in held)]))
