"""Attention over channels: its products sum over tokens, and features attend to features.

It is read as any other once tokens and features have exchanged their roles in the names of its queries, keys and
values: a feature of a sample is what attends, and its numbers at the tokens of that sample are its features.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import (
    FEATURES,
    coded,
    feature_of,
    known,
    looked_up,
    retagged,
    source_of,
    sources_in,
    token_of,
)
from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.names import Identities, Source
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS, WEIGHS
from equivalence_tests.checker.engine.watching import Operation, Slot

Key = tuple[str, int, int]
Exchange = tuple[Tensor, Tensor]  # names of one source, and what stands in their places; both as of source 1


def key_of(kind: str, operation: Operation | None, slot_key: int) -> Key:
    """Name a source alike in every reading of one run."""
    return kind, -1 if operation is None else operation.index, slot_key


def exchanged(codes: Tensor, exchange: Exchange) -> Tensor:
    """Names in which tokens and features have exchanged their roles, where they do."""
    found = looked_up(retagged(codes, 1), *exchange)
    return torch.where(found.isnan(), codes, found)


def exchanges_in(found: Identities, known_ones: dict[Key, Exchange]) -> dict[Key, Exchange]:
    """Exchange the roles of tokens and features in what meets in an attention over channels, beyond what is known.

    All exchanges are given by the sources in which they stand; as the same object where nothing is new.
    """
    exchanges = known_ones
    for codes in _meeting_by_features(found):
        source, names = _root(found, codes), retagged(codes, 1)
        if source is None:
            continue
        key = key_of(source.kind, source.operation, source.slot.key)
        before, others = exchanges.get(key, (names[:0].flatten(), names[:0].flatten()))
        attending = None if bool(torch.isin(names, before).any()) else _attending(names, others)
        if attending is not None:
            pair = torch.cat([before, names.flatten()]), torch.cat([others, attending.flatten()])
            exchanges = {**exchanges, key: pair}
    return exchanges


def _attending(names: Tensor, others: Tensor) -> Tensor | None:
    """Names in which each row, a feature at the tokens of a sample, is a token; None where rows do not lie so."""
    (_, channels, width), tokens = names.shape, token_of(names)  # (heads and samples, rows, tokens)
    ordered = tokens.sort(-1).values
    samples, sample = ordered[:, 0].unique(dim=0, return_inverse=True)
    heads, head = feature_of(names[..., 0]).sort(-1).values.unique(dim=0, return_inverse=True)
    taken = int(feature_of(others).max()) + 1 if len(others) else FEATURES // 2
    first = -(-taken // width) * width
    apart = all(len(found.unique()) == found.numel() for found in (samples, heads))
    if not apart or not bool((ordered == ordered[:, :1]).all()) or first + len(heads) * width > FEATURES:
        return None
    channel = feature_of(names[..., 0]).argsort(-1).argsort(-1)
    feature = first + head[:, None, None] * width + tokens.argsort(-1).argsort(-1)
    return coded(1, (sample[:, None] * channels + channel)[..., None].expand(feature.shape), feature)


def _meeting_by_features(found: Identities) -> Iterator[Tensor]:
    """The operands of products over tokens that are weighed, and values of which several features are averaged."""
    graph, weighing = Graph(found.operations), [op for op in found.operations if op.name in WEIGHS]
    for product in found.across:
        before = (graph.ancestors(op.inputs[0], op.index, _until_a_product) for op in weighing)
        if any(product.operation in made for made in before):
            yield from (product.left, product.right)
    for context in found.contexts:
        if context.source is None and by_features(context.values.mT):
            yield context.values.mT


def _until_a_product(operation: Operation) -> list[Slot]:
    return [] if operation.name in CONTRACTIONS else operation.inputs


def _root(found: Identities, codes: Tensor) -> Source | None:
    """What gave some names their places; None where that is not one source."""
    numbers = sources_in(codes)
    source = found.sources[numbers[0]] if len(numbers) == 1 else None
    while source is not None and source.kind in ("normed", "gain", "added") and len(source.parents) == 1:
        source = found.sources[source.parents[0]]
    return source


def features_of_rows(codes: Tensor) -> Tensor | None:
    """The one feature that each row holds; None where rows hold several."""
    has = known(codes)
    feature = (source_of(codes) * FEATURES + feature_of(codes)).masked_fill(~has, -1)
    lead = feature.amax(-1, keepdim=True)
    return lead.squeeze(-1) if bool(((feature == lead) | ~has).all()) else None


def by_features(codes: Tensor) -> bool:
    """Whether each row holds one feature of several tokens, and no other row the same one."""
    feature = features_of_rows(codes) if codes.size(-1) > 1 else None
    return feature is not None and all(len(rows.unique()) == len(rows) for rows in feature)
