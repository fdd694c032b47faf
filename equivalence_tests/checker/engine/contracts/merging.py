"""How heads are merged: the features of each token side by side, in the order in which they were split."""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import (
    feature_of,
    source_of,
    sources_in,
    token_of,
)
from equivalence_tests.checker.engine.contracts.changing import shuffling
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.layout import MERGED, are_followed, exchange, laid_elsewhere, within
from equivalence_tests.checker.engine.names import Attention, Source
from equivalence_tests.checker.engine.products import contraction_of
from equivalence_tests.checker.engine.watching import Operation


def merge_departures(attention: Attention) -> Iterator[Departure]:
    """Hold the order in which the heads are merged against the order of their features."""
    numbers = attention.context_sources
    consumer = _consumer(attention) or _returned(attention)
    if consumer is None or not are_followed(attention):
        return
    operation, codes, lead = consumer
    ours = torch.isin(source_of(codes), torch.tensor(numbers))
    token = token_of(codes).masked_fill(~ours, -1)
    if not bool((token == token.amax(-1, keepdim=True))[ours].all()):
        yield _unmerged(attention, numbers, operation)
        return
    if not bool(ours.all()):  # what stands beside the heads says nothing about their order
        return
    moved = shuffling(attention.run, numbers, attention.parts[0].contexts[0].operation.index, operation.index + 1)
    if _tokens_elsewhere(attention, token[..., 0], lead):
        yield exchange("output_tokens_moved", "merge", moved, attention.end, blocks=True)
        return
    if len(numbers) > 1 or codes.size(-1) < 2:
        return
    yield from _order_of_features(attention, feature_of(codes), moved, operation)


def _order_of_features(
    attention: Attention, feature: Tensor, moved: Operation | None, operation: Operation
) -> Iterator[Departure]:
    """Each feature of each head stands once in every row, in the order of the heads, or of the features."""
    own = feature[:1, :1]
    total = len(torch.cat([feature_of(c.codes).unique() for p in attention.parts for c in p.contexts]).unique())
    if not bool((feature == own).all()):
        matrix_each = bool((feature == feature[:, :1]).all()) and len(feature[:, 0].unique()) == total
        if not matrix_each:
            yield Departure("heads_merged_in_another_order", "merge", moved or operation, blocks=True)
        return
    order = own.reshape(-1)
    if len(order.unique()) < len(order) or len(order) < total:
        yield Departure("heads_missing_or_repeated", "merge", attention.end, blocks=True)
    elif not bool((order.diff() > 0).all()) and not _by_features(attention, order):
        turned = moved if moved is not None and moved.name in ("roll", "flip") else None
        yield exchange("heads_merged_in_another_order", "merge", turned, moved or attention.end, blocks=True)


def _returned(attention: Attention) -> tuple[Operation, Tensor, torch.Size] | None:
    """What is merged, where no weight takes it: laid out as the queries were projected."""
    codes, projected = attention.names, _projection(attention)
    if codes is None or projected is None or codes.shape[:-1] != projected.slot.value.shape[:-1]:
        return None
    token = token_of(projected.codes)
    if not bool((token == token[..., :1]).all()):  # channels come first
        return None
    return attention.end, codes.reshape(1, -1, codes.size(-1)), codes.shape[:-1]


def _projection(attention: Attention) -> Source | None:
    """What the queries were before they were normed, rotated or split; None if that is not one tensor."""
    made_of = attention.run.names.made_of(sources_in(attention.parts[0].product.left))
    ends = [source for source in made_of if source.kind == "projection" or not source.parents]
    return ends[0] if [source.kind for source in ends] == ["projection"] else None


def _tokens_elsewhere(attention: Attention, tokens: Tensor, lead: torch.Size) -> bool:
    """Whether the same tokens as at the projection of the queries lie in axes of the same sizes in another order."""
    source = _projection(attention)
    if source is None or source.slot.value.shape[:-1] != lead or len(attention.parts) > 1:
        return False
    before = token_of(source.codes)[..., 0].reshape(-1)
    after = tokens.reshape(-1)
    return not torch.equal(before, after) and torch.equal(before.sort().values, after.sort().values)


def _by_features(attention: Attention, order: Tensor) -> bool:
    """Whether the columns come out in the order in which the values had them: heads lie inside, everywhere."""
    pairs = []
    read = (context for part in attention.parts for context in part.contexts if context.source is not None)
    for context in read:
        out = feature_of(context.contraction.result(context.codes))  # (n, i, f)
        value = within(context.values).amax(-1)[:, None, :].expand(out.shape)
        pairs.append(torch.stack([out.reshape(-1), value.reshape(-1)]))
    features, values = torch.cat(pairs, -1)
    table = torch.zeros(int(features.max()) + 1, dtype=torch.long)
    table[features] = values
    return bool((table[order].diff() > 0).all())


def _consumer(attention: Attention) -> tuple[Operation, Tensor, torch.Size] | None:
    """The weight that takes what is merged, with the names of its rows, and the sizes of the axes that they lie in."""
    run, numbers = attention.run, set(attention.context_sources)
    for operation in run.operations[attention.end.index + 1 :]:
        for slot, codes in run.names.taken(operation):
            contraction = contraction_of(operation) if not numbers.isdisjoint(sources_in(codes)) else None
            if contraction is not None:
                if operation.inputs[contraction.sides[0]] is not slot:
                    contraction = contraction.swapped()
                return operation, contraction.rows(codes), codes.shape[:-1]
    return None


def _unmerged(attention: Attention, numbers: list[int], consumer: Operation) -> Departure:
    """The first operation after the context that leaves tokens where they should not be."""
    run = attention.run
    context = attention.parts[0].contexts[0].operation
    reshaping = shuffling(run, numbers, context.index, consumer.index, reshaped=True)
    queries = _projection(attention) or run.names.sources[int(source_of(attention.parts[0].product.left).max())]
    departure = laid_elsewhere(attention, numbers[0], queries, MERGED, consumer)
    carried = [operation for operation, _, _ in run.names.carrying(numbers, context.index, consumer.index)]
    return departure or Departure(MERGED, "merge", reshaping or [consumer, *carried][-1], blocks=True)
