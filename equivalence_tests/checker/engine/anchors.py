"""Find every attention of a recorded run by its data flow: two products with something between that weighs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from equivalence_tests.checker.engine.codes import FEATURES, known, place_of, source_of, sources_in
from equivalence_tests.checker.engine.identities import Context, Identities, Product, ScoreTable, Source
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot, _storage

__all__ = ["Attention", "Part", "Run", "attentions_of", "live_operations", "values_at"]


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
        last = max((c.operation.index for c in part.contexts), default=len(self.run.operations))
        return list(self.run.names.carrying(part.number, last))


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
    last = max(context.operation.index for context in part.contexts)
    for operation, _, value in run.names.carrying(part.number, last):
        if operation.name in SOFTMAXES or operation.name in ("exp", "exp_", "sigmoid", "exp2", "sigmoid_"):
            return True
        del value
    return False


def _end_of(run: Run, part: Part) -> tuple[Operation, Tensor | None]:
    """The last operation that gives nothing but what the part's contexts gave, as far as the first weight."""
    numbers = {context.source.number for context in part.contexts if context.source is not None}
    last, names = part.contexts[-1].operation, None
    for operation, after in zip(run.operations, run.names.after, strict=True):
        for codes in after[:1]:
            if codes is None or codes.is_complex():
                continue
            sources = set(sources_in(codes))
            later = operation.index >= part.contexts[0].operation.index
            if sources & numbers and later and all(run.names.sources[x].kind == "context" for x in sources):
                last, names = operation, codes
    return last, names


def values_at(source: Source, codes: Tensor) -> Tensor:
    """Give the numbers that a source has under these names; NaN where it has none.

    Args:
        source: Where the names come from.
        codes: Names.
    """
    place, order = place_of(source.codes.reshape(-1)).sort()
    values = source.slot.value.reshape(-1)[order].double()
    asked = place_of(codes)
    at = torch.searchsorted(place, asked.contiguous()).clamp_max(len(place) - 1)
    right = (place[at] == asked) & known(codes) & (source_of(codes) == source.number)
    return torch.where(right, values[at], torch.nan)
