"""Find every attention of a recorded run by its data flow: two products with something between that weighs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from equivalence_tests.checker.engine.codes import FEATURES, looked_up, source_of, sources_in
from equivalence_tests.checker.engine.identities import Context, Identities, Product, ScoreTable, Source
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES, words
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot, _storage

__all__ = ["Attention", "Part", "Run", "attentions_of", "live_operations", "values_at"]

WEIGHS = SOFTMAXES | words("exp exp_ exp2 sigmoid sigmoid_")


@dataclass(eq=False)
class Run:
    """One recorded run with the names of its elements.

    Args:
        recorder: Holds the operations.
        names: Their names.
        output: What the call gave back.
    """

    recorder: Recorder
    names: Identities
    output: object = None

    @property
    def operations(self) -> list[Operation]:
        """All operations."""
        return self.recorder.operations


@dataclass(eq=False)
class Part:
    """A product of queries and keys with the products of its weights and values.

    Args:
        product: Queries times keys.
        contexts: Weights times values.
    """

    product: Product
    contexts: list[Context]
    table: ScoreTable = field(init=False)

    def __post_init__(self) -> None:
        self.table = ScoreTable(self.product)

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
        product = self.product
        sides = {"query": (product.left, product.operation), "key": (product.right, product.operation)}
        if self.contexts:
            sides["value"] = self.contexts[0].values, self.contexts[0].operation
        return sides

    @property
    def rows(self) -> Tensor:
        """Names the query and head of each score: the same in all parts that weigh keys for one query."""
        return self.places_of_heads[self.table.head] * FEATURES + self.table.query


@dataclass(eq=False)
class Attention:
    """One attention: all parts whose contexts end in one tensor.

    Args:
        run: Where it was seen.
        parts: One, or one for each head, tile or chunk.
        end: The last operation that carries its contexts.
        names: The names of what that gives.
    """

    run: Run
    parts: list[Part]
    end: Operation
    names: Tensor | None = None

    @property
    def first(self) -> Operation:
        """Its first product."""
        return self.parts[0].product.operation

    @property
    def last(self) -> Operation:
        """The last product of weights and values."""
        return max((c.operation for p in self.parts for c in p.contexts), key=lambda operation: operation.index)

    @cached_property
    def tiled(self) -> bool:
        """Whether several parts add up to the weights of one query: tiles, or keys of two kinds."""
        rows = torch.cat([part.rows.unique() for part in self.parts])
        return len(rows.unique()) < len(rows)

    @property
    def context_sources(self) -> list[int]:
        """The numbers of the names of its contexts."""
        found = {c.source.number for p in self.parts for c in p.contexts if c.source is not None}
        return sorted(found)

    @property
    def end_slot(self) -> Slot:
        """What holds the contexts last."""
        return self.end.outputs[0]

    def chain(self, part: Part) -> list[tuple[Operation, Tensor, Tensor]]:
        """List the operations between the two products of a part: names and numbers of what they give."""
        return list(_between(self.run, part))


def _between(run: Run, part: Part) -> Iterator[tuple[Operation, Tensor, Tensor]]:
    last = max(context.operation.index for context in part.contexts)
    return run.names.carrying([part.number], before=last + 1)


def live_operations(run: Run) -> set[int]:
    """Give the indices of the operations on which what comes back depends.

    Args:
        run: A recorded run.
    """
    needed = {_storage(x) for x in tree_leaves(run.output) if isinstance(x, Tensor)}
    live: set[int] = set()
    if not needed:
        return {operation.index for operation in run.operations}
    for operation in reversed(run.operations):
        if any(_storage(slot.tensor) in needed for slot in operation.outputs):
            live.add(operation.index)
            needed |= {_storage(slot.tensor) for slot in operation.inputs}
    return live


def attentions_of(run: Run) -> list[Attention]:
    """Find the attentions of a run, in the order in which they end.

    Args:
        run: A recorded run.

    Returns:
        Products of activations that nothing weighs, or that are never multiplied with values, are left out.
    """
    parts = [part for part in (_part(run, product) for product in run.names.products) if part.contexts]
    parts = [part for part in parts if _is_weighed(run, part)]
    ends = {id(part): _end_of(run, part) for part in parts}
    found: dict[int, Attention] = {}
    for part in parts:
        operation, names = ends[id(part)]
        known_one = found.get(operation.index)
        if known_one is None:
            found[operation.index] = Attention(run, [part], operation, names)
        else:
            known_one.parts.append(part)
    return [found[index] for index in sorted(found)]


def _part(run: Run, product: Product) -> Part:
    number = product.source.number if product.source is not None else -1
    return Part(product, [context for context in run.names.contexts if number in context.score_sources])


def _is_weighed(run: Run, part: Part) -> bool:
    """Whether an exponential or a norm of rows stands between the products."""
    return any(operation.name in WEIGHS for operation, _, _ in _between(run, part))


def _end_of(run: Run, part: Part) -> tuple[Operation, Tensor | None]:
    """The last operation that gives nothing but what the part's contexts gave, as far as the first weight."""
    numbers = {context.source.number for context in part.contexts if context.source is not None}
    last, names = part.contexts[-1].operation, None
    for operation, codes, _ in run.names.carrying(numbers, part.contexts[0].operation.index - 1):
        first = codes is run.names.after[operation.index][0]
        if first and all(run.names.sources[x].kind == "context" for x in sources_in(codes)):
            last, names = operation, codes
    return last, names


def values_at(sources: Iterable[Source], codes: Tensor, values: Iterable[Tensor] | None = None) -> Tensor:
    """Give the numbers that sources have under these names; NaN where they have none.

    Args:
        sources: Where the names come from.
        codes: Names.
        values: The numbers of each source; None for those of the run.
    """
    sources = list(sources)
    held = [source.slot.value for source in sources] if values is None else values
    names = torch.cat([torch.zeros(0, dtype=torch.float64), *(source.codes.reshape(-1) for source in sources)])
    return looked_up(codes, names, torch.cat([torch.zeros(0), *(x.reshape(-1).double() for x in held)]))
