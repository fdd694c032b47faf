"""Queries, keys and values: which parameter elements make each of their elements, of which tokens, and what follows."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.codes import feature_of, place_of, source_of, sources_in, token_of
from equivalence_tests.checker.engine.names import Context, Part, Source
from equivalence_tests.checker.engine.same import SINGLE, near
from equivalence_tests.checker.engine.watching import storage_of
from equivalence_tests.checker.equivalent.expressions import (
    Called,
    Expression,
    Given,
    Joined,
    Learnt,
    Made,
    Values,
    of_kind,
)
from equivalence_tests.checker.equivalent.parameters import Affine, Parameters, factor_between, order_of
from equivalence_tests.checker.equivalent.rotation import Change, Met, change_between
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.watched import Tracer, Watched, places_in

Head = tuple[tuple[int, ...], tuple[int, ...]]
NEAR = 1e-5  # of sines in float32
Gradients = list[tuple[Tensor, Tensor]]  # of one score of each head: the parameter elements, and the numbers


@dataclass(frozen=True)
class Slice:
    """One slice of a product of queries and keys, and of that of its weights and values."""

    head: Head  # names the head, by the features of its queries
    part: Part
    number: int  # of the slice in it
    context: Context
    place: int
    rows: Tensor  # those of the slice whose queries are of this head: heads that share their keys may be queries of one


@dataclass(frozen=True)
class Projection(Affine):
    """Heads of queries, keys or values: weight (heads, head_dim, features) and bias (heads, head_dim)."""

    tokens: Expression = field(kw_only=True)
    change: Change = field(default_factory=Change, kw_only=True)  # what is done to each head until the product

    def projected(self, values: Values) -> Tensor:
        """Give the heads, (b, h, l, d), as they are projected."""
        x = in_each_sample(self.tokens, values)
        return self.of(x, values.parameters).unflatten(-1, self.weight.shape[:2]).transpose(1, 2)

    def __call__(self, values: Values) -> Tensor:
        """Give the heads as they meet."""
        return self.change(self.projected(values), values)

    @property
    def is_plain(self) -> bool:
        """Whether it projects an argument, and heads meet as they are projected, times a number."""
        changed = self.change.norm is not None or self.change.rotation is not None
        return self.bias is not None and isinstance(self.tokens, Given) and not changed

    @property
    def number(self) -> float:
        """What the heads are multiplied by; a norm takes away what stands before it."""
        return self.change.factor * (self.factor if self.change.norm is None else 1.0)


class OperandReader:
    """Reads the operands of one attention."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.values = watched.values
        self.slices: list[Slice] = list(_slices(watched))
        self.heads: list[Head] = list(dict.fromkeys(one.head for one in self.slices))
        self.found: dict[str, Projection] = {}
        self.gain: Expression | None = None  # what the code learns to multiply the scores of each head by
        self.sink: Expression | None = None  # what it learns to put beside them, which goes to no key
        self.traced: dict[int, Expression] = {}
        self.numbers: dict[str, dict[int, int]] = {}  # by role, the row of each token among those that are projected

    def read(self, role: str) -> Projection:
        """Read queries, keys or values."""
        try:
            found = self._changed(self._projected(role), role)
        except UnreadError:
            made = self._made_by_a_part(role)
            if made is None:
                raise
            found = self._changed(made, role)
        self.found[role] = found
        return found

    def _made_by_a_part(self, role: str) -> Projection | None:
        """Read heads that a sub-module of the user's own makes of each token, as LoRA does; None where none does."""
        every = [_side(next(one for one in self.slices if one.head == head), role) for head in self.heads]
        made = self.watched.sources(sources_in(every[0][0]))[0].operation
        call = None if made is None else self.watched.call_around(made.index)
        if call is None or not call.outputs:
            return None
        part = self.values.parameters.module.get_submodule(call.path)
        mixes = isinstance(part, nn.modules.conv._ConvNd) and part.groups == part.in_channels > 1
        if type(part).__module__.startswith("torch.") and next(part.children(), None) is None and not mixes:
            return None  # a matrix alone is read as one, or not at all
        try:
            tokens = Tracer(self.watched).read(call.outputs[0], self.watched.judgement.attention.first.index)
        except UnreadError:
            return None
        if not isinstance(tokens, Called) or not (mixes or _takes_tokens_apart(tokens, self.values)):
            return None
        flat, heads = self._flat(tokens), list[Tensor]()
        for codes, places, at, own in every:
            rows = self.rows_of(role, token_of(codes[:, 0])) % len(flat)
            numbers = self.watched.operations[at].inputs[own].value.reshape(-1)[places].double()
            heads.append(order_of(numbers, flat[rows], len(heads) * numbers.size(-1)))
        return Projection(torch.stack(heads), None, tokens=tokens) if len({len(x) for x in heads}) == 1 else None

    def _projected(self, role: str) -> Projection:
        """Read heads that a matrix makes, or that are features of the tokens as they are."""
        heads = [self._head(next(one for one in self.slices if one.head == head), role) for head in self.heads]
        heads = _of_slices(heads, self.values)
        first = heads[0]
        if any(one.tokens != first.tokens or (one.bias is None) != (first.bias is None) for one in heads):
            raise UnreadError(f"the {role} of each head is projected from other tokens or features")
        if any(abs(one.factor / first.factor - 1) > 10 * self.watched.tolerance for one in heads):
            raise UnreadError(f"the rows of the {role} projection are multiplied by different numbers")
        biases = [one.bias for one in heads if one.bias is not None]
        more = [one.more for one in heads if one.more is not None]
        return replace(
            first,
            weight=torch.stack([one.weight for one in heads]),
            bias=torch.stack(biases) if biases else None,
            more=torch.stack(more) if more else None,
        )

    @property
    def own_places(self) -> Tensor:
        """The parameter elements that the products of queries and keys are made with."""
        norms = [one.change.norm for one in self.found.values() if one.change.norm is not None]
        parameters = self.watched.parameters
        named = [name for norm in norms for name in (norm.gain, norm.bias) if name]
        named += [] if self.gain is None else [one.name for one in of_kind(Learnt, self.gain)]
        gains = [parameters.places(name).flatten() for name in named]
        return torch.cat([torch.zeros(0, dtype=torch.long), *(one.places for one in self.found.values()), *gains])

    def _changed(self, found: Projection, role: str) -> Projection:
        """Read what is done to each head between projection and product, beside it."""
        with torch.no_grad():
            projected = found.projected(self.values)
            met = self._all_met(role)
            if int(met.rows.max()) >= projected.size(0) * projected.size(2):
                raise UnreadError(f"there are other tokens among the {role}s than those passed in")
            return replace(found, change=change_between(projected, met, self.watched))

    def rows_of(self, role: str, tokens: Tensor) -> Tensor:
        """Say which rows of all that is projected some tokens are."""
        rows = self.numbers.get(role, {})
        return torch.tensor([rows.get(int(token), int(token)) for token in tokens.reshape(-1)]).view(tokens.shape)

    def _all_met(self, role: str) -> Met:
        """Give the rows of all slices as they meet."""
        tokens, heads, numbers = list[Tensor](), list[Tensor](), list[Tensor]()
        for one in self.slices:
            codes, places, index, side = _side(one, role)
            token = token_of(codes)
            if bool((token != token[:, :1]).any()):
                raise UnreadError(f"a row of the {role}s holds features of different tokens")
            tokens.append(token[:, 0])
            heads.append(torch.full_like(token[:, 0], self.heads.index(one.head)))
            numbers.append(self.watched.operations[index].inputs[side].value.reshape(-1)[places].double())
        return Met(self.rows_of(role, torch.cat(tokens)), torch.cat(heads), torch.cat(numbers))

    def _head(self, one: Slice, role: str) -> Projection:
        """Read the projection of one head: weight (head_dim, features) and bias (head_dim)."""
        codes = _side(one, role)[0]
        sources = self.watched.sources(sources_in(codes[:1]))
        if len(sources) != 1:
            raise UnreadError(f"the {role}s of one head come from {len(sources)} projections")
        source, wanted = sources[0], codes[0]
        taken = self.watched.taken_by(source)
        if taken is None and (name := self._argument(source)):
            return Projection(feature_of(wanted), None, tokens=Given(name))
        if taken is None:
            raise UnreadError("an operand is neither an argument nor made by a projection")
        tensor, operation = taken
        tokens = self._tokens(tensor, operation.index, source, role)
        flat = self._flat(tokens)
        token = int(self.rows_of(role, token_of(wanted[:1])))
        if token >= len(flat):
            raise UnreadError("what is projected has other tokens than what is passed in")
        made, where = operation.outputs[0].tensor.reshape(-1), places_in(source.codes)
        elements = made[[where[int(place)] for place in place_of(wanted)]]
        learnt = {one.name for one in of_kind(Learnt, tokens)}
        parameters, biases = self.watched.parameters, 2 if role == "query" else 1
        learnt = learnt.union(*(parameters.inside(one.path) for one in of_kind(Called, tokens)))
        found = parameters.projection(elements, flat[token], self.watched.tolerance, learnt, biases)
        if found is None or found.bias is None:
            raise UnreadError(f"the {role} is not a linear projection of what is passed in")
        own, more = found.bias, found.more
        if more is not None and parameters.is_beside(more, found.weight):
            own, more = more, own
        return Projection(found.weight, own, found.factor, more, tokens=tokens)

    def _tokens(self, tensor: Tensor, before: int, source: Source, role: str) -> Expression:
        """Trace what is projected, and number its tokens where they are other ones than those of an argument."""
        if id(tensor) not in self.traced:
            self.traced[id(tensor)] = Tracer(self.watched).read(tensor, before)
        tokens = self.traced[id(tensor)]
        flat = self._flat(tokens)
        alike = any(len(self._flat(one)) == len(flat) for one in of_kind(Given, tokens))
        if not alike or int(token_of(source.codes).max()) >= len(flat) or any(of_kind(Joined, tokens)):
            made = tensor.detach().double().flatten(0, -2)
            rows = torch.arange(len(flat)) if near(made, flat, SINGLE) else torch.cdist(flat, made).argmin(0)
            self.numbers.setdefault(role, _row_numbers(source.codes, rows))
        return tokens

    def _argument(self, source: Source) -> str:
        """Name the argument that some tokens are."""
        recorder = self.watched.found.run.recorder
        given = zip(recorder.names, recorder.given, strict=True)
        memory = storage_of(source.slot.tensor)
        found = (name.partition(":")[2] for name, slot in given if storage_of(slot.tensor) == memory)
        return next((name for name in found if name in self.values.given), "")

    def _flat(self, tokens: Expression) -> Tensor:
        """The tokens of all samples, (tokens, features)."""
        with torch.no_grad():
            return in_each_sample(tokens, self.values).flatten(0, -2).double()


def _of_slices(heads: list[Projection], values: Values) -> list[Projection]:
    """Let heads that each project a slice of the features, one after the other, project all, with zeros beside it."""
    cuts = [one.tokens for one in heads if isinstance(one.tokens, Made) and one.tokens.name == "cut"]
    count = heads[0].weight.size(-1)
    places = [(2, count * number, count) for number in range(len(heads))]
    if [x.numbers for x in cuts] != places or len({x.inner for x in cuts}) > 1:
        return heads
    whole = cuts[0].inner[0]
    with torch.no_grad():
        rest = whole(values).size(-1) - count
    pads = [(x[1], rest - x[1]) for x in places]
    both = zip(heads, pads, strict=True)
    wide = [replace(one, weight=F.pad(one.weight, pad, value=-1), tokens=whole) for one, pad in both]
    return wide if pads[-1][1] == 0 else heads


def in_each_sample(tokens: Expression, values: Values) -> Tensor:
    """Give tokens of all samples, (b, l, features): learnt ones are the same in each."""
    x, batch = tokens(values), values.size(0)
    return x if (x.dim(), x.size(0)) == (3, batch) else x.expand(batch, *x.shape[-2:])


def _takes_tokens_apart(one: Called, values: Values) -> bool:
    """Whether a sub-module makes something of each token by itself."""
    if one.transposed or len(one.inner) > 1:
        return False
    with torch.no_grad():
        x = one.inner[0](values)
        y = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
        every, *ends = (values.called(one.path, (part,), dict(one.numbers)) for part in (y, y[:, :1], y[:, -1:]))
        return near(torch.cat(ends, 1), every[:, [0, -1]], SINGLE)


def first_alike(weight: Tensor) -> Tensor:
    """For each head, (h, ...), the first that has the same weights."""
    rows = weight.flatten(1)
    return (rows[:, None] == rows).all(-1).long().argmax(-1)


def _row_numbers(codes: Tensor, rows: Tensor) -> dict[int, int]:
    """Say in which row each token lies, the first of several that are alike, by where they lie in memory."""
    flat = codes.reshape(-1)
    tokens = token_of(flat)[feature_of(flat) == feature_of(flat[:1])]
    return {token: place for place, token in reversed([*zip(rows.tolist(), tokens.tolist(), strict=False)])}


def _side(one: Slice, role: str) -> tuple[Tensor, Tensor, int, int]:
    """Give the names and places of the rows of an operand in a slice, (tokens, d), the operation, and its side."""
    product, number = (one.context, one.place) if role == "value" else (one.part.product, one.number)
    left, contraction = role == "query", product.contraction
    codes, places = (product.left, contraction.left) if left else (product.right, contraction.right)
    if role == "value":
        codes, places = codes.mT, places.mT
    rows = one.rows if left else slice(None)
    return codes[number][rows], places[number][rows], product.operation.index, contraction.sides[0 if left else 1]


def _slices(watched: Watched) -> Iterator[Slice]:
    """List the slices of all parts, each with that of its weights and values."""
    for part in watched.judgement.attention.parts:
        if not part.contexts:
            raise UnreadError("there are no weights times values")
        context, out = part.contexts[0], part.product.contraction.out
        slice_of, row_of = (torch.empty(out.numel(), dtype=torch.long) for _ in range(2))
        slice_of[out.reshape(-1)] = torch.arange(len(out)).repeat_interleave(out[0].numel())
        row_of[out.reshape(-1)] = torch.arange(out.size(1)).repeat_interleave(out.size(2)).repeat(len(out))
        for place, weights in enumerate(context.weights):
            mine = place_of(weights[source_of(weights) == part.number])
            for number in slice_of[mine].unique().tolist():
                rows = row_of[mine[slice_of[mine] == number]].unique()
                for head, own in _heads_in(part.product.left[number], rows):
                    yield Slice(head, part, number, context, place, own)


def _heads_in(left: Tensor, rows: Tensor) -> Iterator[tuple[Head, Tensor]]:
    """Tell the heads of some rows of queries apart, by their features."""
    sources, features = source_of(left)[rows], feature_of(left)[rows]
    while len(rows):
        mine = ((sources == sources[:1]) & (features == features[:1])).all(-1)
        yield (tuple(sources[0].tolist()), tuple(features[0].tolist())), rows[mine]
        sources, features, rows = sources[~mine], features[~mine], rows[~mine]


@dataclass(frozen=True)
class Relative:
    """What is added to the scores: factor * (query · (weight · vector(query's place - key's place) + bias))."""

    query: Projection  # of those that meet the vectors; the second bias is what these have alone
    weight: Tensor  # the places of the projection of the vectors, (h, d, features)
    table: str  # the argument that holds the vectors
    factor: float = 1.0  # what the products are multiplied by
    backwards: bool = False  # whether the distance is counted from the query to the key
    of_pairs: bool = False  # whether it holds one for each query and key, (q, k, features); else one for each distance
    bias: Tensor | None = None  # the places of what the projection adds, (h, d); None for nothing

    def __call__(self, values: Values, key_len: int) -> Tensor:
        """Give what is added, (b, h, q, k)."""
        query, taken = self.query(values), values.parameters.taken
        bias = None if self.bias is None else taken(self.bias).flatten()
        vectors = F.linear(self.positions(values, query.size(-2), key_len), taken(self.weight).flatten(0, 1), bias)
        vectors = vectors.unflatten(-1, self.weight.shape[:2])
        return self.factor * torch.einsum("bhqd,bqkhd->bhqk", query, vectors)

    def positions(self, values: Values, queries: int, keys: int) -> Tensor:
        """Give the vectors of all distances, (b, q, k, features), of one sample where they are those of all."""
        apart, given = torch.arange(queries)[:, None] - torch.arange(keys), values.given[self.table]
        return given[None] if self.of_pairs else given[:, keys - 1 + (-apart if self.backwards else apart)]

    def split(self, query: Projection) -> Projection:
        """Give the queries that meet keys with what only these have added as their second bias."""
        assert query.bias is not None  # it is projected, and so is that of these
        assert self.query.bias is not None
        alone = query.more is None and not torch.equal(query.bias, self.query.bias)
        return replace(query, bias=self.query.bias, more=query.bias if alone else query.more)

    def added(self, query: Projection, parameters: Parameters) -> tuple[list[str], list[str]]:
        """Name what is added to these queries, and to those that meet keys, beside the bias of their projection."""
        none = torch.zeros(0, dtype=torch.long)
        own, here = (parameters.names_at(none if x is None else x) for x in (self.query.bias, self.query.more))
        return here, [name for name in parameters.names_at(query.biases) if name not in own]


def read_relative(
    query: Projection, gradients: Gradients, values: Values, lengths: tuple[int, int], tables: Sequence[str]
) -> Relative | None:
    """Read relative positions off the score of the second query and the first key in each head; None for anything else.

    The gradients are without those of what projects queries and keys; the tables are arguments that may hold vectors.
    """
    matrices, vectors = _by_parameter(gradients, values.parameters, query.weight.shape[1])
    if query.bias is None or query.change != Change() or len(matrices) != 1:
        return None
    ((weight, numbers),) = matrices
    for one in _with_other_biases(query, [places for places, _ in vectors], values.parameters):
        with torch.no_grad():
            met = one.projected(values)[0, :, 1]
        for backwards, table in itertools.product((False, True), tables):
            found = Relative(one, weight, table, 1.0, backwards, values.given[table].shape[:2] == lengths)
            wanted = met[..., None] * found.positions(values, lengths[0], lengths[1])[0, 1, 0]
            factor = factor_between(wanted, numbers, NEAR)
            if factor is not None:
                usual = (x for x in (met.size(-1) ** -0.5, 1.0) if abs(factor / x - 1) < NEAR)
                biases = [places for places, of_bias in vectors if factor_between(met, of_bias, NEAR) is not None]
                return replace(found, factor=next(usual, factor), bias=biases[0] if biases else None)
    return None


def _by_parameter(
    gradients: Gradients, parameters: Parameters, width: int
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Take apart what each head is made with: matrices, (h, d, features), and vectors, (h, d), with their gradients."""
    matrices, vectors = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    for name in parameters.names_at(torch.cat([places for places, _ in gradients])):
        every = [(x[kept], y[kept]) for x, y in gradients for kept in [parameters.holds(name, x)]]
        if len({len(x) for x, _ in every}) > 1 or len(every[0][0]) % width:
            return [], []
        places, numbers = (torch.stack(one).view(len(every), width, -1) for one in zip(*every, strict=True))
        if places.size(-1) == 1:
            vectors.append((places[..., 0], numbers[..., 0]))
        else:
            matrices.append((places, numbers))
    return matrices, vectors


def _with_other_biases(query: Projection, vectors: list[Tensor], parameters: Parameters) -> Iterator[Projection]:
    """Give the queries with other vectors in the place of the one that is added to those that meet the keys."""
    assert query.bias is not None  # it is projected
    own, more = query.bias, query.more
    if more is None and not parameters.is_beside(own, query.weight):
        own, more = torch.full_like(own, -1), own
    for other in (None, *vectors, more):
        yield replace(query, bias=own, more=other)
