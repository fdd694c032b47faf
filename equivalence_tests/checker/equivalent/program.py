"""The program: an attention of torch's parts, with the user's own weights."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.contracts.projecting import OWN
from equivalence_tests.checker.equivalent.biases import Bias, Visible
from equivalence_tests.checker.equivalent.ending import Output
from equivalence_tests.checker.equivalent.expressions import (
    Attended,
    Called,
    Evidence,
    Expression,
    Given,
    Learnt,
    Values,
    added_twice,
    all_of,
)
from equivalence_tests.checker.equivalent.operands import Projection
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.steps import Step
from equivalence_tests.checker.equivalent.sublayers import Sublayers, adds_its_queries, is_norm
from equivalence_tests.checker.reach.arguments import ROLES
from equivalence_tests.checker.reach.proposing import taken_apart

BLOCK = re.compile(r"block|resid", re.IGNORECASE)
ROUNDING = 1e-13  # of factors that are products of exact ones
ROUNDED = 1e-6  # of those that were measured


@dataclass(frozen=True)
class Program:
    """output = around(out_proj(softmax(scale · query keyᵀ + bias) value)).

    Args:
        query: The projection of the queries.
        key: Of the keys.
        value: Of the values.
        scale: What the scores are multiplied by.
        bias: What is added to them.
        output: What is made of the averaged values.
        cap: Of a tanh, or a clamp, that holds the scores; 0 if there is none.
        mask_replaces: Whether a mask that is handed over takes the place of what is hidden without one.
        cuts: Whether it is a clamp.
        gain: What the scores of each head are multiplied by as well, where that is learnt; None for nothing.
        sink: A score of each head, learnt, that takes a share of every row and goes to no key; None for none.
    """

    query: Projection
    key: Projection
    value: Projection
    scale: float
    bias: Bias
    output: Output
    cap: float = 0.0
    mask_replaces: bool = False
    cuts: bool = False
    gain: Expression | None = None
    sink: Expression | None = None

    def __call__(
        self,
        given: Mapping[str, Tensor],
        module: nn.Module | None,
        parameters: Parameters,
        may_attend: Tensor | None = None,
    ) -> Tensor:
        """Run it.

        Args:
            given: The arguments by name, each as (batch, tokens, features).
            module: The user's, whose sub-modules are called where the program has steps.
            parameters: Its parameters.
            may_attend: (batch, query_len, key_len) bool, True = may look; None for everyone.

        Returns:
            What comes back, (batch, tokens, features).
        """
        values = Values(given, module, parameters)
        averaged = self.averaged(values, may_attend).transpose(1, 2).flatten(2)
        values.output = self.output.of(averaged, parameters)
        return self.output.around(values)

    def averaged(self, values: Values, may_attend: Tensor | None = None) -> Tensor:
        """Give the averaged values of all heads, (b, h, q, d)."""
        query, key, value = self._scaled_queries(values), self.key(values), self.value(values)
        if self.cap or self.sink is not None:
            return self.weights(values, may_attend) @ value
        bias = self._added(query, key, values, may_attend)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale)

    def weights(self, values: Values, may_attend: Tensor | None = None) -> Tensor:
        """Give what the values are averaged with, (b, h, q, k)."""
        scores = self.scores(values, may_attend)
        if self.sink is None:
            return scores.softmax(-1)
        sink = self.sink(values).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]

    def _scaled_queries(self, values: Values) -> Tensor:
        query = self.query(values)
        return query if self.gain is None else query * self.gain(values).reshape(-1, 1, 1)

    def products(self, values: Values) -> Tensor:
        """Give the scores before anything is added to them, (b, h, q, k)."""
        scores = self.scale * self._scaled_queries(values) @ self.key(values).mT
        if self.cuts:
            return scores.clamp(-self.cap, self.cap)
        return self.cap * torch.tanh(scores / self.cap) if self.cap else scores

    def scores(self, values: Values, may_attend: Tensor | None = None) -> Tensor:
        """Give what the softmax is of, (b, h, q, k)."""
        added = self._added(self.query(values), self.key(values), values, may_attend)
        return self.products(values) if added is None else self.products(values) + added

    def _added(self, query: Tensor, key: Tensor, values: Values, may_attend: Tensor | None = None) -> Tensor | None:
        """Give what is added to the scores; None for nothing."""
        replaced = self.mask_replaces and may_attend is not None
        own = replace(self.bias, visible=Visible()) if replaced else self.bias
        bias = own(query, key.size(-2), values)
        if may_attend is not None:
            hidden = torch.zeros(may_attend.shape, dtype=query.dtype).masked_fill(~may_attend, -torch.inf)[:, None]
            bias = hidden if bias is None else bias + hidden
        return None if bias is None else bias.to(query.dtype)

    @property
    def roles(self) -> tuple[tuple[str, Projection], ...]:
        """The three projections by name."""
        return ("query", self.query), ("key", self.key), ("value", self.value)

    @property
    def is_multi_head_attention(self) -> bool:
        """Whether ``nn.MultiheadAttention`` suffices."""
        plain = all(
            one.bias is not None
            and isinstance(one.tokens, Given)
            and (one.change.norm, one.change.rotation) == (None, None)
            for _, one in self.roles
        )
        heads, width, features = self.query.weight.shape if self.query.bias is not None else (0, 0, 0)
        plain = plain and self.query.more is None
        alike = self.query.weight.shape == self.key.weight.shape == self.value.weight.shape
        whole = plain and alike and features == heads * width
        out = self.output.bias is not None and self.output.weight.shape == (features, features)
        factors = self.scale_of_scores * width**0.5, self.value.number, self.output.factor
        as_they_are = all(abs(factor - 1) <= ROUNDING for factor in factors)
        bias = (
            not self.cap
            and not self.mask_replaces
            and self.gain is self.sink is None
            and (self.bias.is_none or self.bias.is_causal)
        )
        return whole and out and bias and as_they_are and self.output.around == Attended()

    @property
    def scale_of_scores(self) -> float:
        """What the product of projected queries and keys is multiplied by."""
        return self.scale * self.query.number * self.key.number

    def steps(self, module: nn.Module | None, parameters: Parameters) -> Iterator[Step]:
        """List what torch's formula does not have, each with the evidence that it is intended; "" without."""
        evidence = Evidence(module, parameters, self.projections(parameters))
        yield from self._twice(parameters)
        yield from self._of_others(parameters, module)
        yield from self._in_part(parameters, module)
        yield from self._in_another_order(parameters, module)
        yield from order_steps(self.query, self.key, self.value, self.output)
        for tokens in dict.fromkeys(one.tokens for _, one in self.roles):
            yield from evidence.steps(tokens, "project")
        yield from self._of_operands()
        yield from self._of_scores(parameters)
        yield from () if self.gain is None else evidence.steps(self.gain, "scale")
        yield from () if self.sink is None else evidence.steps(self.sink, "scores")
        if abs(self.output.factor - 1) > ROUNDING:
            yield Step(f"the output times {self.output.factor:.6g}", "", "factor")
        if self.output.factor * self.value.number < 0:
            yield Step("the output changes its sign", "", "sign")
        yield from self._behind(evidence, module)

    def without(self, stage: str) -> "Program":
        """Give the program as torch has it at one stage; the same where it has nothing of its own there."""
        if stage in ("rotary", "rotated", "operand", "values"):
            changes, rotates = [one.change for _, one in self.roles], stage in ("rotary", "rotated")
            bare = [replace(x, rotation=None) if rotates else replace(x, norm=None) for x in changes]
            three = [replace(one, change=x) for (_, one), x in zip(self.roles, bare, strict=True)]
            return replace(self, query=three[0], key=three[1], value=three[2])
        if stage == "context":
            return replace(self, value=replace(self.value, factor=1.0, change=replace(self.value.change, factor=1.0)))
        if stage == "factor":
            return replace(self, output=replace(self.output, factor=1.0))
        if stage in ("scale", "cap"):
            usual = self.query.weight.size(1) ** -0.5 / self.query.number / self.key.number
            return replace(self, scale=usual, gain=None) if stage == "scale" else replace(self, cap=0.0)
        if stage == "scores":
            return replace(self, bias=Bias(self.bias.visible), sink=None)
        return replace(self, bias=replace(self.bias, visible=Visible())) if stage == "mask" else self

    def hiding_by(self, evidence: str) -> "Program":
        """Give the program with what says that the keys which it hides by their distance are meant to be hidden."""
        return replace(self, bias=replace(self.bias, visible=replace(self.bias.visible, evidence=evidence)))

    def projections(self, parameters: Parameters) -> set[str]:
        """Name the parameters that its projections use."""
        return set(parameters.names_at(self._places))

    @property
    def _places(self) -> Tensor:
        """The parameter elements that its projections use."""
        return torch.cat([*(one.places for _, one in self.roles), self.output.places])

    def _behind(self, evidence: Evidence, module: nn.Module | None) -> Iterator[Step]:
        around = self.output.around
        asks = frozenset(evidence.parameters.names_at(self.query.places))
        sublayers = Sublayers(around, self.query.tokens, module, asks)
        fed = "a feed-forward follows it" if sublayers.branches else _called_a_block(module)
        if unlike := sublayers.unlike():
            yield Step(unlike, "", "residual")
        for name in dict.fromkeys(name for one in all_of(around) for name in added_twice(one)):
            yield Step(f"{name} is added more than once", "", "residual")
        tokens = [one.tokens for _, one in self.roles]
        called = [x for one in (around, *tokens) for x in all_of(one) if isinstance(x, Called)]
        normed = [x.path for x in called if module is not None and is_norm(module.get_submodule(x.path))]
        projected = {f"{x.path} is called" for x in called if sublayers.projects_queries(x)}
        projected |= {f"{x.name} takes part" for x in all_of(self.query.tokens) if isinstance(x, Learnt)}
        single = {name for name, x in module.named_parameters() if x.numel() == 1} if module is not None else set()
        gates = [x.name for x in all_of(around) if isinstance(x, Learnt) and x.name in single]
        gated = f"{gates[0]} says how much is added to what comes in" if gates else ""
        projecting = None if self.output.bias is not None or module is None else _projecting(around, module)
        for step in evidence.steps(around, "output"):
            if step.evidence and step.words == f"{projecting} is called":
                continue
            if step.stage == "residual":
                said = f"{normed[0]} stands with it, as in a Transformer's sublayer" if normed else gated
                yield Step(step.words, said or fed, "residual")
            elif step.stage == "again" and step.words in projected:
                yield replace(step, evidence=adds_its_queries(module))
            else:
                yield step

    def _twice(self, parameters: Parameters) -> Iterator[Step]:
        """A weight that takes two parts."""
        for (first, one), (second, other) in itertools.combinations((*self.roles, ("output", self.output)), 2):
            both = one.places[torch.isin(one.places, other.places)]
            if len(both):
                named = parameters.name_at(int(both[0]))
                yield Step(f"{named} projects both the {first} and the {second}", "", "project")

    def _of_others(self, parameters: Parameters, module: nn.Module | None) -> Iterator[Step]:
        """A weight whose name says another role, and what is not projected where others are."""
        made = {role: self._made_by(one.tokens, module) for role, one in self.roles if one.bias is None}
        bare = [role for role, path in made.items() if not path]
        behind = tuple(f"{x.path}." for x in all_of(self.output.around) if isinstance(x, Called))
        matrices = {name for name, x in parameters.named.items() if x.dim() > 1 and not name.startswith(behind)}
        further = matrices - self.projections(parameters)
        for role in bare if len(bare) < len(self.roles) else ():
            why = "" if module is None or further else "the module holds no matrix that could"
            yield Step(f"the {role} is not projected", why, "project")
        called = [one.tokens for _, one in self.roles if isinstance(one.tokens, Called)]
        normed = {x.inner for x in called if module is not None and is_norm(module.get_submodule(x.path))}
        for role, one in self.roles:
            if (one.tokens,) in normed:
                yield Step(f"the {role} is made of what another one takes behind a norm", "", "project")
        places = [(role, one.weight) for role, one in self.roles]
        places += [("output", self.output.weight)] if self.output.bias is not None else []
        names = {role: [made[role]] if role in made else parameters.names_at(x.reshape(-1)) for role, x in places}
        packed = set.intersection(*(set(names[role]) for role, _ in self.roles))  # all three, whatever it is called
        if any(pattern.search(name) for name in further for pattern in OWN.values()):
            packed = set()  # a matrix of another name is there, and takes no part
        for role, name in ((one, name) for one, own in names.items() for name in own if name not in packed):
            said = [other for other, pattern in OWN.items() if pattern.search(name)]
            if len(said) == 1 and said != [role]:
                yield Step(f"{name} projects the {role}", "", "project")

    @staticmethod
    def _made_by(tokens: Expression, module: nn.Module | None) -> str:
        """Name the sub-module that makes the heads of a role; "" for none, and for a norm."""
        if module is None or not isinstance(tokens, Called) or is_norm(module.get_submodule(tokens.path)):
            return ""
        return tokens.path

    def _in_another_order(self, parameters: Parameters, module: nn.Module | None) -> Iterator[Step]:
        """Queries, keys and values that lie in one matrix, or one argument, in another order than the code says."""
        bare = [one.tokens for _, one in self.roles if one.bias is None]
        owners = dict.fromkeys(name for _, one in self.roles for name in parameters.names_at(one.weight))
        what = "the argument" if bare else next(iter(owners))
        said = ROLES if bare else taken_apart(type(module))
        first = {role: one.weight.flatten(1)[:, 0] for role, one in self.roles}
        packed = len(bare) == 3 and isinstance(bare[0], Given) and len({*bare}) == 1 if bare else len(owners) == 1
        if not packed or not said or torch.equal(first["query"], first["value"]):  # of one argument, all of it for each
            return
        pairs = ([*itertools.pairwise(order)] for order in (said, ROLES))  # names may be exchanged where they are used
        if not any(all(bool((first[one] < first[other]).all()) for one, other in order) for order in pairs):
            yield Step(f"{what} does not hold {', '.join(said)} in this order, as the code says", "", "project")

    def _in_part(self, parameters: Parameters, module: nn.Module | None) -> Iterator[Step]:
        """A weight, or what a sub-module makes, of which some elements take no part."""
        made = defaultdict[str, list[Tensor]](list)
        for _, one in self.roles:
            made["" if one.bias is not None else self._made_by(one.tokens, module)].append(one.weight.flatten())
        for path, taken in ((path, torch.cat(found).unique()) for path, found in made.items() if path):
            if len(taken) < max(int(taken.max()) + 1, _width_of(path, module)):
                yield Step(f"only a part of what {path} makes takes part", "", "unused")
        used = self._places.unique()
        for name in sorted(self.projections(parameters)):
            start, count = parameters.start[name], parameters.named[name].numel()
            if int(((used >= start) & (used < start + count)).sum()) < count:
                yield Step(f"only a part of {name} takes part", "", "unused")

    def _of_operands(self) -> Iterator[Step]:
        both = [one.change for one in (self.query, self.key)]
        if any(one.bias is not None and bool((one.weight < 0).any()) for _, one in self.roles):
            yield Step("each head takes features of its own", "each has a matrix that is no wider", "project")
        for role, one in self.roles:
            norm, rotation = one.change.norm, one.change.rotation
            if norm is not None:
                said = f"the parameter {norm.gain}" if norm.gain else ""
                what = f"the {role}, all heads side by side," if norm.whole else f"each head of the {role}"
                stage = "values" if role == "value" else "operand"
                yield Step(f"{what} is normalised ({norm.kind})", said, stage)
            if rotation is not None:
                alike = role != "value" and rotation.grows and all(rotation.is_like(one.rotation) for one in both)
                said = "queries and keys are both rotated, by angles that grow with the position" if alike else ""
                what = f"the {role}, all heads side by side, is" if rotation.whole else f"the {role} is"
                yield Step(f"{what} rotated by its position", said, "rotary" if said else "rotated")
        if abs(self.value.number - 1) > ROUNDING:
            yield Step(f"the values times {self.value.number:.6g}", "", "context")

    def _of_scores(self, parameters: Parameters) -> Iterator[Step]:
        width = self.query.weight.size(1)
        scale = self.scale_of_scores
        if abs(scale * width**0.5 - 1) > ROUNDING:
            yield Step(f"the scores times {scale:.6g} in the place of 1/sqrt({width})", "", "scale")
        if self.bias.learnt is not None:
            name = parameters.name_at(int(self.bias.learnt.max()))
            what = f"what the queries and {name} say together" if self.bias.meets else name
            of_distance = ", a vector for each distance" * self.bias.is_of_distance
            plain = not self.bias.meets and not self.bias.mixes_distances
            said = f"the parameter {name}{of_distance}" if of_distance or plain else ""
            stage = "scores" if said else "again"  # that a parameter takes part says nothing for where
            shared = ", one element for distances in the image that differ" * self.bias.mixes_distances
            yield Step(f"{what} is added to the scores{shared}", said, stage)
        if self.bias.relative is not None or self.query.more is not None:
            yield self._relative(parameters)
        if self.bias.given is not None:
            yield Step("what the mask of this call adds to the scores", "the mask that is handed over", "mask")
        if self.bias.slopes is not None:
            said = "the slopes of ALiBi" if self.bias.is_alibi else ""
            yield Step(
                f"the distance{self.bias.grid or ''} times a slope is subtracted from the scores", said, "scores"
            )
        if self.cap:
            yield Step(f"the scores are capped at {self.cap:.6g} by a {'clamp' if self.cuts else 'tanh'}", "", "cap")
        if self.bias.visible not in (Visible(), Visible(0), Visible(0, from_end=True)):
            yield Step(str(self.bias.visible), self.bias.visible.evidence, "mask")

    def _relative(self, parameters: Parameters) -> Step:
        """What queries say to distances, and the biases that they have there and where they meet keys."""
        relative = self.bias.relative
        if relative is None:
            name = parameters.name_at(int(self.query.biases.max()))
            return Step(f"{name} is added to the queries", f"the parameter {name}", "again")
        added = relative.added(self.query, parameters)
        here, there = (", ".join(names) or "nothing" for names in added)
        met = f"the vector in {relative.table}" if relative.table else "a sinusoid"
        words = f"the queries plus {here} meet {met} of each distance, projected by "
        words += f"{parameters.name_at(int(relative.weight.max()))}; the queries plus {there} meet the keys"
        usual = abs(relative.factor / self.scale - 1) < ROUNDED and (here != there or not any(added))
        said = "Transformer-XL's relative positions" if usual and bool(added[0]) == bool(added[1]) else ""
        return Step(words, said, "scores" if said else "again")


def _width_of(path: str, module: nn.Module | None) -> int:
    """How many features a linear layer makes; 0 of anything else, which does not say."""
    called = module.get_submodule(path) if module is not None else None
    return called.out_features if isinstance(called, nn.Linear) else 0


def _called_a_block(module: nn.Module | None) -> str:
    """Say that a class is called a block, which holds its residual connection; "" for none."""
    name = type(module).__name__
    return f"{name} is called a block, and blocks are added to what they are given" if BLOCK.search(name) else ""


def _projecting(around: Expression, module: nn.Module) -> str | None:
    """The linear layer that takes the averaged values behind a gate: the output projection."""
    called = [x for x in all_of(around) if isinstance(x, Called) and any(isinstance(y, Attended) for y in all_of(x))]
    return next((x.path for x in called if isinstance(module.get_submodule(x.path), nn.Linear)), None)


def order_steps(query: Projection, key: Projection, value: Projection, output: Output) -> Iterator[Step]:
    """List where rows or columns of the weights are taken in an order of their own, which nothing says is intended."""
    rows = {"query": _rows(query), "key": _rows(key), "value": _rows(value)}
    heads = rows["query"][:, 0].argsort(stable=True)
    rows = {role: found[heads] for role, found in rows.items()}
    for role, one in (("query", query), ("key", key), ("value", value)):
        taken = one.weight >= 0
        if one.bias is not None and bool(((one.weight.diff() <= 0) & taken[..., 1:] & taken[..., :-1]).any()):
            yield Step(f"the {role} takes the features of the tokens in another order", "", "again")
        if bool((rows[role][1:, 0] < rows[role][:-1, 0]).any()):
            yield Step(f"the heads of the {role} are paired with others than those of the queries", "", "split")
        turned = one.change.rotation
        if turned is not None and not turned.is_in_order(
            _ranks(rows[role].view(1, -1) if turned.whole else rows[role])
        ):
            yield Step(f"the features of a head of the {role} are rotated in another order", "", "again")
    if not torch.equal(_ranks(rows["query"]), _ranks(rows["key"])):
        yield Step("the features of queries and keys are paired in another order", "", "split")
    columns = _columns(output, *value.weight.shape[:2])[heads]
    if not _alike(columns, rows["value"]):
        yield Step("the heads are put side by side in another order than they were split in", "", "merge")
    if output.bias is not None:
        order = output.weight[:, 0]
        biased = bool((output.bias >= 0).all())
        if bool((order.diff() < 0).any()) or (biased and bool((output.bias.diff() < 0).any())):
            yield Step("the features of the output are put in another order", "", "output")


def _rows(one: Projection) -> Tensor:
    """Where each row of a projection ends among the parameters, or lies among the features, (heads, head_dim)."""
    return one.weight if one.bias is None else one.weight.amax(-1)


def _columns(output: Output, heads: int, width: int) -> Tensor:
    """Where each averaged value meets the output projection, or lies in the output, (heads, head_dim)."""
    columns = output.weight.argsort() if output.bias is None else output.weight[0]
    return columns.unflatten(0, (heads, width))


def _alike(columns: Tensor, rows: Tensor) -> bool:
    """Whether heads are merged as they were split; where several share their values, head after head."""
    shared = len(rows[:, 0].unique()) < len(rows)
    if shared:
        return bool((columns.flatten().diff() > 0).all()) and torch.equal(_ranks(columns), _ranks(rows))
    return torch.equal(columns.flatten().argsort(), rows.flatten().argsort())


def _ranks(rows: Tensor) -> Tensor:
    return rows.argsort(-1).argsort(-1)
