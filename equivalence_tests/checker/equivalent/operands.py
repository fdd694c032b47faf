"""Queries, keys and values: which parameter elements make each of their elements, of which tokens, and what follows."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import feature_of, place_of, source_of, sources_in, token_of
from equivalence_tests.checker.engine.names import Context, Part
from equivalence_tests.checker.equivalent.expressions import Expression, Given, Joined, Learnt, Values, all_of
from equivalence_tests.checker.equivalent.parameters import Row
from equivalence_tests.checker.equivalent.rotation import Change, Met, change_between
from equivalence_tests.checker.equivalent.tracing import Tracer
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.watched import Watched, places_in

Head = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Slice:
    """One slice of a product of queries and keys, and of that of its weights and values.

    Args:
        head: Names the head, by the features of its queries.
        part: The product of queries and keys.
        number: Of the slice in it.
        context: The product of weights and values.
        place: Of the slice in that.
    """

    head: Head
    part: Part
    number: int
    context: Context
    place: int


@dataclass(frozen=True)
class Projection:
    """heads of factor * (weight · tokens + bias): where each of their elements is among the parameters.

    Args:
        tokens: What is projected.
        weight: (heads, head_dim, features), places of parameter elements; features of the tokens themselves where
            ``bias`` is None: nothing is projected then.
        bias: (heads, head_dim); -1 for none.
        factor: What all of it is multiplied by.
        change: What is done to each head until the product.
    """

    tokens: Expression
    weight: Tensor
    bias: Tensor | None
    factor: float = 1.0
    change: Change = field(default_factory=Change)

    def projected(self, values: Values) -> Tensor:
        """Give the heads, (b, h, l, d), as they are projected."""
        x = self.tokens(values)
        batch = next(iter(values.given.values())).size(0)
        x = x if (x.dim(), x.size(0)) == (3, batch) else x.expand(batch, *x.shape[-2:])  # learnt, in each sample
        if self.bias is None:
            return self.factor * x[..., self.weight.flatten()].unflatten(-1, self.weight.shape[:2]).transpose(1, 2)
        weight, bias = (values.parameters.taken(index) for index in (self.weight, self.bias))
        return self.factor * (torch.einsum("ble,hde->bhld", x, weight) + bias[:, None])

    def __call__(self, values: Values) -> Tensor:
        """Give the heads as they meet."""
        return self.change(self.projected(values), values.parameters)

    @property
    def number(self) -> float:
        """What the heads are multiplied by; a norm takes away what stands before it."""
        return self.change.factor * (self.factor if self.change.norm is None else 1.0)

    @property
    def places(self) -> Tensor:
        """The parameter elements that it uses."""
        if self.bias is None:
            return torch.zeros(0, dtype=torch.long)
        every = torch.cat([self.weight.reshape(-1), self.bias.reshape(-1)])
        return every[every >= 0]


class OperandReader:
    """Reads the operands of one attention.

    Args:
        watched: The run.
    """

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.values = watched.values
        self.slices: list[Slice] = list(_slices(watched))
        self.heads: list[Head] = list(dict.fromkeys(one.head for one in self.slices))
        self.found: dict[str, Projection] = {}
        self.numbers: dict[str, dict[int, int]] = {}  # by role, the row of each token among those that are projected

    def read(self, role: str) -> Projection:
        """Read one operand.

        Args:
            role: "query", "key" or "value".
        """
        first = [next(one for one in self.slices if one.head == head) for head in self.heads]
        rows = [self._rows(one, role) for one in first]
        tokens = rows[0][0]
        if any(one[0] != tokens or one[2] != rows[0][2] for one in rows):
            raise UnreadError(f"the {role}s of different heads are projected from different tokens")
        plain = rows[0][2]
        weight = torch.stack([one[1][0] for one in rows])
        bias = None if plain else torch.stack([one[1][1] for one in rows])
        factors = torch.cat([one[1][2] for one in rows])
        if float((factors / factors[0] - 1).abs().max()) > 10 * self.watched.tolerance:
            raise UnreadError(f"the rows of the {role} projection are multiplied by different numbers")
        found = Projection(tokens, weight, bias, float(factors[0]))
        self.found[role] = self._finished(found, role)
        return self.found[role]

    @property
    def own_places(self) -> Tensor:
        """The parameter elements that queries and keys are made with."""
        norms = [one.change.norm for one in self.found.values() if one.change.norm is not None]
        parameters = self.watched.parameters
        named = [name for norm in norms for name in (norm.gain, norm.bias) if name]
        gains = [torch.arange(parameters.named[name].numel()) + parameters.start[name] for name in named]
        return torch.cat([torch.zeros(0, dtype=torch.long), *(one.places for one in self.found.values()), *gains])

    def _finished(self, found: Projection, role: str) -> Projection:
        """Add what is done to each head between projection and product."""
        with torch.no_grad():
            projected = found.projected(self.values)
            met = self._all_met(role)
            if int(met.rows.max()) >= projected.size(0) * projected.size(2):
                raise UnreadError(f"there are other tokens among the {role}s than those that are handed over")
            change = change_between(projected, met, self.watched)
        return replace(found, change=change)

    def rows_of(self, role: str, tokens: Tensor) -> Tensor:
        """Say which rows of all that is projected some tokens are.

        Args:
            role: "query", "key" or "value".
            tokens: Their numbers.
        """
        rows = self.numbers.get(role, {})
        return torch.tensor([rows.get(int(token), int(token)) for token in tokens.reshape(-1)]).view(tokens.shape)

    def _all_met(self, role: str) -> Met:
        pieces = [(self._met(one, role), self.heads.index(one.head)) for one in self.slices]
        rows = self.rows_of(role, torch.cat([tokens for (tokens, _), _ in pieces]))
        heads = torch.cat([torch.full_like(tokens, head) for (tokens, _), head in pieces])
        return Met(rows, heads, torch.cat([numbers for (_, numbers), _ in pieces]))

    def _met(self, one: Slice, role: str) -> tuple[Tensor, Tensor]:
        """Give the tokens of one slice, and its elements as they meet, (tokens, d)."""
        codes, places, index, side = _side(one, role)
        tensor = self.watched.operations[index].inputs[side].value.reshape(-1)
        token = token_of(codes)
        if bool((token != token[:, :1]).any()):
            raise UnreadError(f"a row of the {role}s holds features of different tokens")
        return token[:, 0], tensor[places].double()

    def _rows(self, one: Slice, role: str) -> tuple[Expression, tuple[Tensor, Tensor, Tensor], bool]:
        """Read the projection of one head: its tokens, (weight, bias, factors), and whether it is none at all."""
        codes = _side(one, role)[0]
        sources = self.watched.sources(sources_in(codes[:1]))
        if len(sources) != 1:
            raise UnreadError(f"the {role}s of one head come from {len(sources)} projections")
        source = sources[0]
        taken = self.watched.taken_by(source)
        wanted = codes[0]
        if taken is None:
            name = self.watched.arguments.get(id(self._argument(source.slot.value)), "")
            return (
                Given(name or self._name_of(source.number)),
                (feature_of(wanted), torch.tensor(0), torch.ones(1)),
                True,
            )
        tensor, operation = taken
        tokens = Tracer(self.watched).read(tensor, operation.index)
        flat, every = self._flat(tokens), list(all_of(tokens))
        alike = any(isinstance(one, Given) and len(self._flat(one)) == len(flat) for one in every)
        if not alike or int(token_of(source.codes).max()) >= len(flat) or any(isinstance(one, Joined) for one in every):
            self.numbers.setdefault(role, _row_numbers(source.codes))  # other tokens than those of an argument
        token = int(self.rows_of(role, token_of(wanted[:1])))
        if token >= len(flat):
            raise UnreadError("what is projected has different tokens from what is handed over")
        made = operation.outputs[0].tensor.reshape(-1)
        where = places_in(source.codes)
        found = [self._row(made[where[int(place)]], flat[token], tokens, role) for place in place_of(wanted)]
        weight = torch.stack([row.weight for row in found])
        bias = torch.tensor([row.bias for row in found])
        return tokens, (weight, bias, torch.tensor([row.factor for row in found])), False

    def _argument(self, value: Tensor) -> Tensor:
        return next((s.tensor for s in self.watched.recorder.given if s.value.data_ptr() == value.data_ptr()), value)

    def _name_of(self, number: int) -> str:
        """Name the argument with this number: sources are numbered in the order of the arguments."""
        names = list(self.watched.given)
        if number > len(names):
            raise UnreadError("an operand is no argument and made by no projection")
        return names[number - 1]

    def _flat(self, tokens: Expression) -> Tensor:
        """The tokens of all samples, (tokens, features)."""
        with torch.no_grad():
            return tokens(self.values).flatten(0, -2).double()

    def _row(self, element: Tensor, features: Tensor, tokens: Expression, role: str) -> Row:
        without = {one.name for one in all_of(tokens) if isinstance(one, Learnt)}
        row = self.watched.parameters.row(element, features, self.watched.tolerance, without)
        if row is None:
            raise UnreadError(f"the {role} is no linear projection of what is handed over")
        return row


def first_alike(weight: Tensor) -> Tensor:
    """For each head, (h, ...), the first that has the same weights."""
    rows = weight.flatten(1)
    return (rows[:, None] == rows).all(-1).long().argmax(-1)


def _row_numbers(codes: Tensor) -> dict[int, int]:
    """Say in which row each token lies, the first of several that are alike; rows are numbered in memory order."""
    flat = codes.reshape(-1)
    rows = token_of(flat)[feature_of(flat) == feature_of(flat[:1])]
    return {token: place for place, token in reversed(list(enumerate(rows.tolist())))}


def _side(one: Slice, role: str) -> tuple[Tensor, Tensor, int, int]:
    """Give the names and places of the rows of an operand in a slice, (tokens, d), the operation, and its side."""
    product = one.part.product
    if role == "value":
        context = one.context
        codes, places = context.values.mT[one.place], context.contraction.right.mT[one.place]
        return codes, places, (context.factors or context.operation).index, context.contraction.sides[1]
    index = (product.factors or product.operation).index
    if role == "query":
        return product.left[one.number], product.contraction.left[one.number], index, product.contraction.sides[0]
    return product.right[one.number], product.contraction.right[one.number], index, product.contraction.sides[1]


def _slices(watched: Watched) -> Iterator[Slice]:
    """List the slices of all parts, each with that of its weights and values."""
    for part in watched.judgement.attention.parts:
        if not part.contexts:
            raise UnreadError("there are no weights times values")
        context, out = part.contexts[0], part.product.contraction.out
        slice_of = torch.empty(out.numel(), dtype=torch.long)
        slice_of[out.reshape(-1)] = torch.arange(len(out)).repeat_interleave(out[0].numel())
        for place, weights in enumerate(context.weights):
            mine = weights[source_of(weights) == part.number]
            for number in slice_of[place_of(mine)].unique().tolist():
                first = part.product.left[number, 0]
                head = tuple(source_of(first).tolist()), tuple(feature_of(first).tolist())
                yield Slice(head, part, number, context, place)
