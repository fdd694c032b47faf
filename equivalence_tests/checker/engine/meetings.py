"""Names for what products, sums and pools give: where tokens meet a weight, one another, or weights meet values."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import (
    FEATURES,
    SPAN,
    UNKNOWN,
    Contraction,
    coded,
    feature_of,
    known,
    place_of,
    place_or_first,
    retagged,
    source_of,
    sources_in,
    token_of,
    unified,
)
from equivalence_tests.checker.engine.graph import elements_of
from equivalence_tests.checker.engine.names import Context, Identities, Product, Source
from equivalence_tests.checker.engine.products import contraction_of
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES, words
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot, storage_of

POOLS = words("max amax mean min amin")


class Meetings:
    """Names what products give: of tokens and a weight, of queries and keys, and of attention weights and values."""

    def __init__(self, recorder: Recorder, seeds: Mapping[int, Tensor], data: list[Tensor]) -> None:
        self.found = Identities(recorder.operations)
        self.codes: dict[int, Tensor] = {}
        self.others: dict[int, Tensor] = {}  # second names of what two elements were added to
        self.data = {storage_of(tensor) for tensor in data}
        given = zip(recorder.names, recorder.given, strict=False)
        self.weights = {slot.key for name, slot in given if name.startswith(("param:", "buffer:"))}
        self.patched: Mapping[int, Tensor] = {}
        self.learnt: frozenset[int] = frozenset()  # products of keys with queries that are parameters
        self.parameters, self.arguments = (
            sum(1 << i for i, name in enumerate(recorder.names) if name.startswith(kind)) for kind in ("param:", "arg:")
        )
        self.siblings: dict[int, dict[int, Tensor]] = {}
        self.contexts: dict[tuple[Any, ...], Source] = {}
        self.bases: dict[int, int] = {}  # the first token of each tensor that had no names
        self.rows: dict[tuple[int, int], int] = {}  # the token of each row of such a tensor, by where it begins
        self.tokens = 0
        for slot in recorder.given:
            self._met(slot.tensor)
            if slot.key in seeds and slot.value.numel():  # a state may hold no tokens yet
                source = self._new("input", None, slot, seeds[slot.key])
                self.codes[slot.key] = source.codes
                self.tokens = max(self.tokens, int(token_of(source.codes).max()) + 1)

    def _met(self, tensor: Tensor) -> None:
        self.siblings.setdefault(storage_of(tensor), {})[id(tensor)] = tensor

    def _new(
        self, kind: str, operation: Operation | None, slot: Slot, codes: Tensor, parents: tuple[int, ...] = ()
    ) -> Source:
        number = len(self.found.sources) + 1
        self.found.sources[number] = Source(number, kind, operation, slot, retagged(codes, number), parents)
        return self.found.sources[number]

    def _retag(self, kind: str, operation: Operation, slot: Slot, codes: Tensor, rest: list[Tensor]) -> Tensor:
        parents = {x for names in (codes, *rest) for x in sources_in(names)}
        return self._new(kind, operation, slot, unified(codes), tuple(sorted(parents))).codes

    def _rank(self, codes: Tensor) -> int:
        """Which names a result takes first: 0 for scores, 2 where all elements are named or complex, 3 for the rest."""
        if codes.is_complex():
            return 2
        if any(self.found.sources[number].kind == "score" for number in sources_in(codes)):
            return 0
        return 2 if bool(known(codes).all()) else 3

    def _isdata(self, slot: Slot) -> bool:
        return storage_of(slot.tensor) in self.data or slot.key in self.codes

    def _contracted(self, operation: Operation) -> Tensor | None:
        contraction = contraction_of(operation)
        if contraction is None:
            return self._convolved(operation) if operation.name.startswith("conv") else None
        slots = [operation.inputs[side] for side in contraction.sides]
        if operation.index in self.learnt:
            return self._multiplied(operation, contraction)
        heavy = [slot.key in self.weights for slot in slots]
        if heavy[0] and not heavy[1]:
            contraction, slots, heavy = contraction.swapped(), slots[::-1], heavy[::-1]
        live = [self._isdata(slot) for slot in slots]
        if heavy[1]:
            return self._projected(operation, contraction) if live[0] or operation.name == "linear" else None
        if not all(live):  # a product with what is neither data nor a weight, such as a learnt query that was projected
            contraction = contraction if live[0] else contraction.swapped()
            return self._projected(operation, contraction) if any(live) else None
        return self._multiplied(operation, contraction)

    def _projected(self, operation: Operation, contraction: Contraction) -> Tensor:
        """Name the output of a projection: the token is that of the input, the feature is the column of the weight.

        Where one weight is applied to each head's part of a token, the columns of later parts count on.
        """
        slot = operation.inputs[contraction.sides[0]]
        codes = self._names_of(slot)
        if codes is not None and slot.value.shape == contraction.shape and self._is_over_heads(contraction.rows(codes)):
            return codes  # each head's are those of the head in its place
        tokens = None if codes is None else _tokens_of_rows(contraction.rows(codes))
        if tokens is None:
            tokens = self._seeded(contraction, slot, codes)
        elif codes is not None:
            tokens = self._numbered_apart(tokens, source_of(contraction.rows(codes)[..., 0]), slot.tensor)
        parents = tuple(sources_in(self.codes.get(slot.key)))
        weight = operation.inputs[contraction.sides[1]].value.flatten()[contraction.right]
        repeated = bool((weight == weight[:1]).all())  # one matrix for each sample, all the same
        right = contraction.right[:1].expand_as(contraction.right) if repeated else contraction.right
        _, column = right[:, :, 0].unique(return_inverse=True)
        parts = _parts_of_rows(contraction, codes)
        if _share_names(tokens, parts, contraction, slot.value):  # as pieces of one token, of which one is filled up
            tokens = self.tokens + torch.arange(tokens.numel()).view_as(tokens)
            self.tokens += tokens.numel()
        feature = column[:, None, :] + parts[:, :, None] * (int(column.max()) + 1)
        names = coded(0, tokens[:, :, None].expand(feature.shape), feature)
        names = contraction.scattered(names) + SPAN
        return self._new("projection", operation, operation.outputs[0], names, parents).codes

    def _is_over_heads(self, rows: Tensor) -> bool:
        """Whether each row holds the scores of one query and key, of all heads: what a matrix mixes is the heads."""
        numbers = sources_in(rows)
        products = [x for x in self.found.products if x.source is not None and [x.source.number] == numbers]
        if not products or not bool(known(rows).all()):
            return False
        table, places = products[0].table, place_of(rows)
        alike = all(bool((x[places] == x[places][..., :1]).all()) for x in (table.query, table.key))
        return alike and rows.size(-1) == len(table.heads) > 1

    def _numbered_apart(self, tokens: Tensor, sources: Tensor, tensor: Tensor) -> Tensor:
        """Give tokens of a second source new numbers, where two sources that are concatenated use the same numbers."""
        pairs = sources * (tokens.max() + 1) + tokens
        if len(pairs.unique()) == len(tokens.unique()):
            return tokens
        kinds, order = pairs.unique(return_inverse=True)
        return torch.where(sources == sources.min(), tokens, order + self._base(tensor, len(kinds)))

    def _seeded(self, contraction: Contraction, slot: Slot, codes: Tensor | None) -> Tensor:
        """Name a tensor by numbering its tokens in memory order; rows that have names keep their token."""
        token = self._rows_in_memory(slot.tensor, contraction.left)
        if codes is not None:
            rows = contraction.rows(codes)
            empty, own = ~known(rows).any(-1), token_of(rows[..., 0])
            if bool((empty | (known(rows) & (token_of(rows) == own[..., None])).all(-1)).all()):
                token = torch.where(empty, token, own)
        names = torch.full((slot.value.numel(),), UNKNOWN, dtype=torch.float64)
        width = torch.arange(contraction.left.size(-1))
        names[contraction.left] = coded(1, token[:, :, None], width)
        names = names.view(slot.value.shape)
        self.codes[slot.key] = self._new("input", None, slot, names).codes
        return token

    def _rows_in_memory(self, tensor: Tensor, places: Tensor) -> Tensor:
        """Number rows in memory order; a row that another view of the same storage has gets the same number."""
        starts, token = places[:, :, 0].unique(return_inverse=True)
        base, memory, start = self._base(tensor, len(starts)), storage_of(tensor), elements_of(tensor)[starts]
        apart = start.sort().values.diff()
        if not len(apart) or bool((apart == 0).any()) or tensor.stride(-1) != 1:
            return token + base
        width = int(apart.min())
        first = not any(known == memory for known, _ in self.rows)
        for order, row in enumerate((start // width * width).tolist()):
            if (memory, row) not in self.rows:
                self.rows[memory, row] = base + order if first else self.tokens
                self.tokens += not first
        return torch.tensor([self.rows[memory, row] for row in (start // width * width).tolist()])[token]

    def _base(self, tensor: Tensor, count: int) -> int:
        """The number of the first token of a tensor, the same for all views of one storage."""
        place = storage_of(tensor)
        if place not in self.bases:
            self.bases[place] = self.tokens
            self.tokens += count
        return self.bases[place]

    def _convolved(self, operation: Operation) -> Tensor | None:
        """Name the output of a convolution: new features, with the token of the position."""
        out = operation.outputs[0].value
        if not self._isdata(operation.inputs[0]):
            return None
        axis = 1 if out.dim() == operation.inputs[1].value.dim() else 0
        feature = torch.arange(out.size(axis)).view([-1 if i == axis else 1 for i in range(out.dim())])
        return self._at_places("projection", operation, axis, feature)

    def _at_places(self, kind: str, operation: Operation, axis: int, feature: Tensor) -> Tensor:
        """Name an output by position: the tokens of the input, or new ones where the axes beside channels changed."""
        taken, out = operation.inputs[0], operation.outputs[0]
        shape = out.value.shape
        codes = self._names_of(taken)
        if codes is not None and taken.value.shape[axis + 1 :] == shape[axis + 1 :]:
            token = token_of(codes).select(axis, 0)
        else:
            lead = [size for i, size in enumerate(shape) if i != axis]
            token = torch.arange(math.prod(lead)).view(lead) + self._base(taken.tensor, math.prod(lead))
        names = coded(1, token.unsqueeze(axis).expand(shape), feature.expand(shape))
        return self._new(kind, operation, out, names, tuple(sources_in(codes))).codes

    def _pooled(self, operation: Operation, before: list[Tensor | None]) -> Tensor | None:
        """Name what a pooling gives: by the first of the tokens that it reduces, or new tokens for each position."""
        codes = before[0] if before else None
        if codes is None or codes.is_complex() or self._rank(codes) == 0:
            return None
        if operation.name not in POOLS:  # channels come first
            axis = codes.dim() - (2 if "2d" in operation.name else 1) - 1
            rows = feature_of(codes).movedim(axis, -1).flatten(0, -2)
            alike = operation.outputs[0].value.dim() == codes.dim() and bool((rows == rows[0]).all())
            feature = rows[0].view(-1, *[1] * (codes.dim() - axis - 1))
            return self._at_places("pooled", operation, axis, feature) if axis >= 0 and alike else None
        pooled, axis = _over_one_axis(operation, before)
        if pooled is None:
            return None
        first, out = pooled.narrow(axis, 0, 1), operation.outputs[0]
        if not bool((feature_of(pooled) == feature_of(first)).all()) or bool((pooled == first).all()):
            return None
        named = first if out.value.dim() == pooled.dim() else first.squeeze(axis)
        return self._retag("pooled", operation, out, named, [])

    def _rotated_by_matrices(self, operation: Operation, before: list[Tensor | None]) -> Tensor | None:
        """Name sums that are a small matrix times a part of a token, such as 2 x 2 rotations; None for others."""
        codes, axis = _over_one_axis(operation, before)
        if codes is None:
            return None
        summed = codes.movedim(axis, -1).sort(-1).values
        taken = summed.reshape(-1, summed.size(-1))
        of_one_token = bool((token_of(taken) == token_of(taken[:, :1])).all())
        if not of_one_token or len(taken[:, 0].unique()) * taken.size(1) != len(taken):
            return None
        return taken.gather(1, _occurrences(taken[:, 0])[:, None]).view(operation.outputs[0].value.shape)

    def _multiplied(self, operation: Operation, contraction: Contraction) -> Tensor | None:
        """Read a product of two activations: of queries and keys, or of attention weights and values."""
        slots = [operation.inputs[side] for side in contraction.sides]
        sides = [self._names_of(slot) for slot in slots]
        scores = [side is not None and self._rank(side) == 0 for side in sides]
        if all(scores):
            return None
        if scores[1]:
            contraction, slots, sides = contraction.swapped(), slots[::-1], sides[::-1]
        if sides[0] is None or not any(scores):
            left = self._completed(slots[0], sides[0], contraction.left)
            right = self._completed(slots[1], sides[1], contraction.right)
            rows, columns = contraction.rows(left), contraction.columns(right)
            return self._product(Product(operation, contraction, rows, columns))
        values = contraction.columns(self._completed(slots[1], sides[1], contraction.right.mT))
        return self._context(Context(operation, contraction, contraction.rows(sides[0]), values))

    def _names_of(self, slot: Slot) -> Tensor | None:
        """The names of real numbers; None where there are none."""
        codes = self.codes.get(slot.key)
        return None if codes is None or codes.is_complex() else codes

    def _product(self, product: Product) -> Tensor | None:
        if _tokens_of_rows(product.left) is None or _tokens_of_rows(product.right) is None:
            if _by_features(product.left) and _by_features(product.right):
                self.found.across.append(product)
                return None
            product.trouble = "one score is computed from several tokens"
        slot = product.operation.outputs[0]
        by_place = torch.arange(slot.value.numel(), dtype=torch.float64).view(slot.value.shape) + SPAN
        product.source = self._new("score", product.operation, slot, by_place)
        self.found.products.append(product)
        return product.source.codes

    def _completed(self, slot: Slot, codes: Tensor | None, places: Tensor) -> Tensor:
        """Complete the names of an operand: each row of the contraction is a token, where elements have no name."""
        if codes is not None and bool(known(codes).all()):
            return codes
        n, rows, _ = places.shape
        order = torch.arange(n * rows).view(n, rows, 1) + self._base(slot.tensor, n * rows)
        names = torch.full((slot.value.numel(),), UNKNOWN, dtype=torch.float64)
        names[places] = coded(1, order, _features_beside(codes, places))
        given = self._new("given", None, slot, names.view(slot.value.shape))
        if codes is not None:
            return torch.where(known(codes), codes, given.codes)
        self.codes[slot.key] = given.codes
        return given.codes

    def _context(self, context: Context) -> Tensor | None:
        self.found.contexts.append(context)
        read = self._read_context(context)
        if read is None:
            return None
        names, key = read
        shaped = context.contraction.scattered(names) + SPAN
        if key not in self.contexts:
            self.contexts[key] = self._new("context", context.operation, context.operation.outputs[0], shaped)
        context.source = self.contexts[key]
        context.codes = retagged(shaped, context.source.number)
        if context.operation is not context.source.operation:
            context.source.others.append((context.codes, context.operation.outputs[0]))
        return context.codes

    def _read_context(self, context: Context) -> tuple[Tensor, tuple[Any, ...]] | None:
        """Name the average: the query's token, and the feature of the value, counted on from head to head."""
        numbers = context.score_sources
        found = [p for p in self.found.products if p.source is not None and p.source.number in numbers]
        columns = _features_of_rows(unified(context.values))  # none where one column holds several features
        if len(found) != 1 or columns is None:
            return None
        product = found[0]
        if self._sums_over_rows(product, context):
            product.turn()
        table, weights = product.table, context.weights
        has = known(weights)
        place = place_or_first(weights)
        row = table.row[place].masked_fill(~has, -1)
        first = row.amax(-1, keepdim=True)
        if not bool(((row == first) | ~has).all()):  # what is summed belongs to several queries or heads
            return None
        together = self._weighed_with(product) or tuple(sources_in(context.values))
        rank = _by_appearance(columns).argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
        head = table.place_of_head[table.head_of_row[first.squeeze(-1).clamp_min(0)]]
        token = table.token_of_row[first.squeeze(-1).clamp_min(0)]
        width = int(rank.max()) + 1
        shape = (*head.shape, rank.size(-1))
        combined = head[:, :, None] * width + rank[:, None, :]
        meeting = together, tuple(sources_in(product.left))
        return coded(0, token[:, :, None].expand(shape), combined.expand(shape)), meeting

    def _weighed_with(self, product: Product) -> tuple[int, ...]:
        """The sources of all scores that share a softmax with this product's; empty where it has one to itself."""
        pairs = zip(self.found.operations, self.found.after, strict=False)  # as far as it is named
        given = (sources_in(after[0]) for operation, after in pairs if operation.name in SOFTMAXES)
        shared = (tuple(numbers) for numbers in given if len(numbers) > 1)
        return next((numbers for numbers in shared if product.source and product.source.number in numbers), ())

    def _sums_over_rows(self, product: Product, context: Context) -> bool:
        """Whether keys stand on the left of a product: values are of their tokens, or the weights sum to one there."""
        table, has = product.table, known(context.weights)
        row, column = (of[place_or_first(context.weights)] for of in (table.row, table.key))
        across, along = (bool(((x == x.amax(-1, keepdim=True)) | ~has).all()) for x in (row, column))
        earlier = any(set(context.score_sources) & set(c.score_sources) for c in self.found.contexts[:-1])
        if across or not along or earlier:
            return False
        values = token_of(context.values)
        of_rows, of_columns = (bool(torch.isin(values, token_of(x)).all()) for x in (product.left, product.right))
        if of_rows != of_columns:
            return of_rows
        weights = context.contraction.rows(context.operands[0].value)
        summed, other = (float((weights.sum(axis) - 1).abs().max()) for axis in (-1, 1))
        return summed < other


def _over_one_axis(operation: Operation, before: list[Tensor | None]) -> tuple[Tensor | None, int]:
    """The names of what is summed, or pooled, over one axis, and which; None where it is not all named, or more."""
    codes, axis = before[0] if before else None, operation.argument(1, "dim", operation.argument(1, "axis"))
    if codes is None or codes.is_complex() or not isinstance(axis, int) or not bool(known(codes).all()):
        return None, 0
    return codes, axis


def _occurrences(values: Tensor) -> Tensor:
    """How often each value stood before."""
    order = values.argsort(stable=True)
    ordered = values[order]
    counted = torch.arange(len(values)) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(counted).index_copy_(0, order, counted)


def _tokens_of_rows(codes: Tensor) -> Tensor | None:
    """The token of each row; None where rows mix tokens, or have no names."""
    if codes.size(-1) == 0 or not bool(known(codes).all()):
        return None
    token = token_of(codes)
    return token[..., 0] if bool((token == token[..., :1]).all()) else None


def _features_of_rows(codes: Tensor) -> Tensor | None:
    """The one feature that each row holds; None where rows hold several."""
    has = known(codes)
    feature = (source_of(codes) * FEATURES + feature_of(codes)).masked_fill(~has, -1)
    lead = feature.amax(-1, keepdim=True)
    return lead.squeeze(-1) if bool(((feature == lead) | ~has).all()) else None


def _by_features(codes: Tensor) -> bool:
    """Whether each row holds a feature of its own, of several tokens."""
    feature = _features_of_rows(codes) if codes.size(-1) > 1 else None
    return feature is not None and all(len(rows.unique()) == len(rows) for rows in feature)


def _parts_of_rows(contraction: Contraction, codes: Tensor | None) -> Tensor:
    """Which part of its token each row holds: 0 where all hold the same features."""
    if codes is None or _tokens_of_rows(contraction.rows(codes)) is None:
        return torch.zeros(contraction.left.shape[:2], dtype=torch.long)
    return feature_of(contraction.rows(codes)).amin(-1).unique(return_inverse=True)[1]


def _share_names(tokens: Tensor, parts: Tensor, contraction: Contraction, value: Tensor) -> bool:
    """Whether rows of different numbers would get the same names."""
    kinds, order = (tokens * (int(parts.max()) + 1) + parts).reshape(-1).unique(return_inverse=True)
    if len(kinds) == tokens.numel():
        return False
    first = torch.full((len(kinds),), tokens.numel()).scatter_reduce(0, order, torch.arange(len(order)), "amin")
    flat = contraction.rows(value).reshape(len(order), -1)
    return not torch.equal(flat, flat[first[order]])


def _by_appearance(columns: Tensor) -> Tensor:
    """Columns of several sources side by side, these numbered in the order in which they lie there."""
    sources, place = (columns // FEATURES).reshape(-1).unique(return_inverse=True)
    first = torch.full((len(sources),), len(place)).scatter_reduce(0, place, torch.arange(len(place)), "amin")
    return first[place].view(columns.shape) * FEATURES + columns % FEATURES


def _features_beside(codes: Tensor | None, places: Tensor) -> Tensor:
    """The features of rows that have none: those of the rows beside them, or their order."""
    plain = torch.arange(places.size(-1))
    if codes is None:
        return plain
    laid = codes.reshape(-1)[places]
    most = feature_of(laid).masked_fill(~known(laid), -1).amax(1, keepdim=True)
    return torch.where(most >= 0, most, plain)
