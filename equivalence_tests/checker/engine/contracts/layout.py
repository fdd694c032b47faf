"""Whether heads are split and paired correctly, decided by where elements lie and not by their values."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import (
    FEATURES,
    coded,
    feature_of,
    known,
    looked_up,
    numbered_pairs,
    place_or_first,
    source_of,
    sources_in,
    token_of,
    unified,
)
from equivalence_tests.checker.engine.contracts.changing import shuffling
from equivalence_tests.checker.engine.contracts.departure import Departure, changed_by
from equivalence_tests.checker.engine.names import Attention, Context, Part, Product, Source, numbered_rows
from equivalence_tests.checker.engine.vocabulary import MOVES, words
from equivalence_tests.checker.engine.watching import Operation, Patch, Recorder

REPEATS = words("repeat expand tile repeat_interleave cat getitem expand_as")
LAYS = words("view reshape unflatten split chunk")
SPLIT, MERGED = "heads_split_without_transpose", "heads_merged_without_transpose"
MOVED_ALONE = words("roll flip")
STAGES = {SPLIT: "split", MERGED: "merge"}


def layout_departures(attention: Attention) -> Iterator[Departure]:
    """Hold what meets in the products against what should meet; the first departure that blocks comes last."""
    products = [product for part in attention.parts for product in (part.product, *part.contexts)]
    apart = [product for product in products if product.contraction.apart and product.operation.patch is None]
    if apart:
        yield from map(_summed_apart, apart)
        return
    for part in attention.parts:
        if part.product.trouble:
            yield from _misplaced_operand(attention, part, "product_pairs_wrong_axes")
            return
    exchanged = next(filter(None, (_exchanged_alone(attention, part) for part in attention.parts)), None)
    if exchanged is not None:
        yield exchanged
        return  # whatever else is elsewhere follows from it
    for part in attention.parts:
        among = list(_among_heads(attention, part))
        yield from among
        if among:
            return
        paired = list(_paired_heads(attention, part))
        yield from paired
        if any(departure.blocks for departure in paired):
            return
        reversed_contexts = contexts_over_queries(part)
        for context in (context for context in part.contexts if context not in reversed_contexts):
            if context.source is None:
                yield from _unread_context(attention, part, context)
                return
            yield from _paired_tokens(attention, part, context)
            yield from _paired_values(attention, part, context)


def _summed_apart(product: Product) -> Departure:
    """An einsum whose letters do not say that both operands have the axis that is summed over."""
    operation, contraction = product.operation, product.contraction

    def patch(recorder: Recorder, operation: Operation) -> Tensor:
        left, right = (operation.inputs[side].value for side in contraction.sides)
        return contraction.scattered(contraction.rows(left) @ contraction.columns(right).mT)

    facts = {"have": operation.argument(0, "equation"), "want": contraction.apart}
    return Departure("operands_summed_apart", "product", operation, facts, {operation.index: patch}, blocks=True)


# ---------------------------------------------------------------------------------------------- operands
def _misplaced_operand(attention: Attention, part: Part, otherwise: str) -> Iterator[Departure]:
    """Rows of an operand mix what belongs apart: the first operation after which that is so."""
    found = list(_misplaced_operands(attention, part))
    plain = Departure(otherwise, "product", part.product.operation, blocks=True)
    yield from found or [_or_exchanged(attention, part, plain)]


def _or_exchanged(attention: Attention, part: Part, otherwise: Departure) -> Departure:
    """A view that exchanges axes, where sizes do not tell which; what else it is where there is none."""
    operation = _exchanging(attention, part)
    return otherwise if operation is None else Departure(SPLIT, "split", operation, blocks=True)


def _misplaced_operands(attention: Attention, part: Part) -> Iterator[Departure]:
    """For queries, keys and values: the first operation after which elements are elsewhere than their axes say."""
    seen: set[Operation | None] = set()
    names = attention.run.names
    for role, (codes, until) in part.sides.items():
        apart = (laid_elsewhere(attention, n, names.sources[n], SPLIT, until, codes) for n in sources_in(codes))
        departure = next(filter(None, apart), None)
        if departure is None or departure.operation is None or departure.operation in seen:
            continue
        seen.add(departure.operation)
        before = names.taken(departure.operation)[0][1]
        if role == "key" and len(seen) == 1 and before.dim() == departure.operation.outputs[0].value.dim():
            departure = replace(departure, name="key_viewed_for_transposed")
        yield departure


def laid_elsewhere(
    attention: Attention, number: int, source: Source, name: str, until: Operation, of: Tensor | None = None
) -> Departure | None:
    """Give the first move after which tokens lie elsewhere than axes of the sizes that their projection has say.

    The numbered source is followed, the other one has the axes of the tokens; with ``of``, the move must give some of
    these names.
    """
    names = attention.run.names
    for operation, codes, _ in names.carrying([number], before=until.index):
        taken, wanted = names.taken(operation), _as_axes_say(codes, source.slot.value.shape[:-1])
        mine = operation.name in MOVES and bool(taken) and (of is None or _shares(codes, of))
        if mine and wanted is not None and not torch.equal(token_of(wanted), token_of(codes)):
            patch, index = partial(_gathered, taken[0][1], wanted), operation.index
            return Departure(name, STAGES[name], operation, {}, {index: patch}, {index: wanted}, blocks=True)
    return None


def _as_axes_say(codes: Tensor, lead: torch.Size) -> Tensor | None:
    """Names as they should lie: tokens in the axes of their sizes, features in order; None where sizes do not tell.

    Of several axes that may hold the samples, it is the first, as in what is projected.
    """
    tokens, features = token_of(codes).unique(), feature_of(codes).unique()
    whole = len(tokens) == lead.numel() and len(tokens) * len(features) == codes.numel()
    if len(lead) != 2 or lead[0] not in codes.shape or not whole:
        return None
    first = codes.shape.index(lead[0])
    others = [i for i, size in enumerate(codes.shape) if size == lead[1] and i != first]
    if len(others) != 1:
        return None
    second = others[0]
    order = [first, second, *(i for i in range(codes.dim()) if i not in (first, second))]
    inner = [codes.size(axis) for axis in order[2:]]
    plain = coded(sources_in(codes)[0], tokens.view(*lead, 1), features).expand(*lead, -1).reshape(*lead, *inner)
    return plain.permute([order.index(axis) for axis in range(codes.dim())])


def _gathered(before: Tensor, wanted: Tensor, recorder: Recorder, operation: Operation) -> Tensor:
    """Take each element from where it is in the operation's own argument."""
    source = next(slot for slot in operation.inputs if slot.value.numel() == before.numel())
    return looked_up(wanted, before, source.value)


def _exchanged_alone(attention: Attention, part: Part) -> Departure | None:
    """One of queries, keys and values that is rolled or flipped where the others are not."""
    found = {}
    if not any(operation.name in MOVED_ALONE for operation in attention.run.operations):
        return None
    for role, (codes, until) in part.sides.items():
        made = attention.run.names.made_of(sources_in(codes))
        numbers = [source.number for source in made if source.kind != "given"]  # that is what they are padded with
        moved = shuffling(attention.run, numbers, -1, until.index, codes)
        found[role] = moved if moved is not None and moved.name in MOVED_ALONE else None
    alone = {role: moved for role, moved in found.items() if moved is not None}
    role, moved = next(iter(alone.items()), ("", None))
    alike = len({(one.name, one.frames[:1]) for one in alone.values()}) == 1
    one_side = len(alone) == 1 or (len(alone) == 2 and "value" in alone and alike)
    return None if moved is None or not one_side else changed_by(moved, "split", role, blocks=True)


# ---------------------------------------------------------------------------------------------- heads
def _among_heads(attention: Attention, part: Part) -> Iterator[Departure]:
    table = part.table
    same = bool((table.query == table.key).all()) and len(table.query.unique()) > 1
    if same and len(numbered_pairs(table.head, table.key_head)) > max(len(table.heads), len(table.key_heads)):
        laying = _exchanging(attention, part) or _laying(attention, part.product.left, part.product.operation)
        yield Departure("attention_among_heads", "product", laying, blocks=True)


def _exchanging(attention: Attention, part: Part) -> Operation | None:
    """A view of queries, keys or values that exchanges the sizes of two axes, as a transpose would."""
    run = attention.run
    for codes, until in part.sides.values():
        numbers = [source.number for source in reversed(run.names.made_of(sources_in(codes)))]
        if view := shuffling(run, numbers, -1, until.index, reshaped=True):
            return view
    return None


def _laying(attention: Attention, codes: Tensor, until: Operation, repeats: bool = False) -> Operation:
    """The last operation that laid out an operand, or repeated it; else what takes it."""
    carried = attention.run.names.carrying(sources_in(codes), before=until.index)
    found = [op for op, given, _ in carried if _shares(given, codes)]
    wider = [op for op in found if op.name in REPEATS and op.outputs[0].value.numel() > op.inputs[0].value.numel()]
    laid = [op for op in found if op.name in LAYS]
    return [until, *laid, *(wider if repeats else ())][-1]


def _shares(given: Tensor, codes: Tensor) -> bool:
    """Whether some names stand in both."""
    return bool(torch.isin(given.contiguous(), codes.contiguous()).any())


def within(codes: Tensor) -> Tensor:
    """Name the source and the feature of each element of each row, (n, i, d)."""
    codes = unified(codes)
    return source_of(codes) * FEATURES + feature_of(codes)


def _paired_heads(attention: Attention, part: Part) -> Iterator[Departure]:
    """Each head of queries meets its own head of keys, element by element."""
    table = part.table
    heads, key_heads = len(table.heads), len(table.key_heads)
    if not _are_apart(part.product.left, heads) or not _are_apart(part.product.right, key_heads):
        return
    pairing = _pairing(table.head, table.key_head)
    if pairing == "several":
        yield from _misplaced_operand(attention, part, "heads_paired_wrongly")
    elif pairing:
        repeater = _laying(attention, part.product.right, part.product.operation, repeats=True)
        tiled = Departure("grouped_heads_tiled", "split", repeater, patches=_interleaving(repeater, heads))
        wrong = Departure("heads_paired_wrongly", "split", repeater)
        yield tiled if pairing == "tiled" else _or_exchanged(attention, part, wrong)


def _interleaving(repeater: Operation, heads: int) -> dict[int, Patch]:
    """Give the patch by which groups that were tiled, 0 1 0 1, come in the order of repeat_interleave, 0 0 1 1."""
    taken, given = repeater.inputs[0].value.shape, repeater.outputs[0].value.shape
    pairs = enumerate(zip(taken, given, strict=True)) if len(taken) == len(given) else ()
    axes = [axis for axis, (groups, all_heads) in pairs if groups < all_heads == heads]
    if repeater.name not in ("repeat", "tile") or len(axes) != 1:
        return {}
    order = torch.arange(heads) // (heads // taken[axes[0]])

    def patch(recorder: Recorder, operation: Operation) -> Tensor:
        return operation.outputs[0].value.index_select(axes[0], order)

    return {repeater.index: patch}


def _pairing(heads: Tensor, others: Tensor) -> str:
    """How heads of queries meet those of keys or values: "several" of them, groups "tiled", or "wrong"; "" if right."""
    pairs, count, groups = numbered_pairs(heads, others), int(heads.max()) + 1, int(others.max()) + 1
    if count % groups or groups == 1:
        return ""
    head, other = pairs.unbind(-1)
    if len(pairs) > count:
        return "several"
    if torch.equal(head // (count // groups), other):
        return ""
    return "tiled" if count > groups and torch.equal(head % groups, other) else "wrong"


def _are_apart(codes: Tensor, heads: int) -> bool:
    """Whether heads are of one source, and share no features."""
    rows = within(codes)
    return len(rows.unique()) == heads * rows.size(-1) and len(sources_in(unified(codes))) == 1


# ---------------------------------------------------------------------------------------------- weights and values
def contexts_over_queries(part: Part) -> list[Context]:
    """Give the contexts that average over queries for each key, with scores that average over keys as well."""
    read = any(context.source is not None for context in part.contexts)
    return [c for c in part.contexts if read and c.source is None and _sums_over_queries(part, c)]


def _sums_over_queries(part: Part, context: Context) -> bool:
    if len(context.score_sources) > 1:  # the table is that of one product
        return False
    place = place_or_first(context.weights)
    has = known(context.weights)
    query = part.table.query[place].masked_fill(~has, -1)
    key = part.table.key[place].masked_fill(~has, -1)
    across = not bool((query == query.amax(-1, keepdim=True)).all())
    return across and bool(((key == key.amax(-1, keepdim=True)) | ~has).all())


def _unread_context(attention: Attention, part: Part, context: Context) -> Iterator[Departure]:
    name = "context_sums_over_queries" if _sums_over_queries(part, context) else "context_mixes_tokens"
    yield _or_exchanged(attention, part, Departure(name, "context", context.operation, blocks=True))


def _paired_tokens(attention: Attention, part: Part, context: Context) -> Iterator[Departure]:
    """Each weight meets the value of its own key."""
    has = known(context.weights)
    key = part.table.key[place_or_first(context.weights)]
    sources = [attention.run.names.sources[x] for x in sources_in(context.values)]
    if any(source.kind in ("given",) for source in sources):
        return
    value = token_of(unified(context.values))
    value = value[:, :1] if bool((value == value[:, :1]).all()) else value  # (n, f or 1, k): features go together
    followed = torch.isin(value, key)  # what is pooled has tokens of its own
    met = has[:, :, None, :] & followed[:, None] & (key[:, :, None, :] != value[:, None, :, :])
    if bool(met.any()):
        shifted = _sources_shifted(context, met)
        moved = _shuffled(attention, part, context)
        found = exchange("values_meet_other_keys", "context", moved, context.operation, blocks=not shifted)
        yield replace(found, evidence="a separate projection makes what comes from other tokens" if shifted else "")


def _sources_shifted(context: Context, met: Tensor) -> bool:
    """Whether values of other tokens have a projection of their own, beside another that stays with its keys."""
    shifted = met.any(1).expand(context.values.shape)
    moved, kept = (source_of(context.values[where]) for where in (shifted, ~shifted & known(context.values)))
    return bool(kept.numel()) and not bool(torch.isin(moved.unique(), kept.unique()).any())


def _paired_values(attention: Attention, part: Part, context: Context) -> Iterator[Departure]:
    """Each head of weights meets its own head of values."""
    head = part.table.head[place_or_first(context.weights)].amax(-1)  # (n, i)
    features = within(context.values).amax(-1)  # (n, f)
    value_heads, value_head = numbered_rows(features)
    apart = len(features.unique()) == len(value_heads) * features.size(-1)
    pairing = _pairing(head, value_head[:, None].expand(head.shape)) if apart else ""
    several = len(sources_in(unified(context.values))) > 1  # in no order
    if pairing == "tiled" or (pairing == "wrong" and not several):
        laying = _laying(attention, context.values, context.operation, True)
        if pairing == "tiled":
            yield Departure("grouped_heads_tiled", "context", laying, {}, _interleaving(laying, len(part.table.heads)))
        else:
            moved = _shuffled(attention, part, context)
            yield exchange("heads_of_values_paired_wrongly", "context", moved, laying, blocks=False)


def exchange(name: str, stage: str, moved: Operation | None, otherwise: Operation, blocks: bool) -> Departure:
    """Name an exchange of elements by the function that does it, where one is found; else as is said."""
    if moved is not None:
        return changed_by(moved, stage, "order of tokens or features", blocks=blocks)
    return Departure(name, stage, otherwise, blocks=blocks)


def _shuffled(attention: Attention, part: Part, context: Context) -> Operation | None:
    """What exchanges weights, or else values, before they meet."""
    run, until = attention.run, context.operation.index
    weights = shuffling(run, [part.number], part.product.operation.index, until)
    return weights or shuffling(run, sources_in(context.values), -1, until)


def are_followed(attention: Attention) -> bool:
    """Whether the tokens of queries and keys are known from where they were one beside the other, before the heads."""
    names = attention.run.names
    sides = (codes for part in attention.parts for codes in (part.product.left, part.product.right))
    sources = [names.sources[number] for codes in sides for number in sources_in(codes)]
    return not any(source.kind == "given" and source.slot.value.dim() > 3 for source in sources)
