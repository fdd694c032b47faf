"""The program: an attention of torch's parts, with the user's own weights."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.contracts.projecting import OWN
from equivalence_tests.checker.equivalent.biases import Bias, Visible
from equivalence_tests.checker.equivalent.expressions import (
    Attended,
    Called,
    Evidence,
    Expression,
    Given,
    Learnt,
    Values,
    attends,
    of_kind,
)
from equivalence_tests.checker.equivalent.operands import Projection
from equivalence_tests.checker.equivalent.parameters import Affine, Parameters
from equivalence_tests.checker.equivalent.steps import Step
from equivalence_tests.checker.equivalent.sublayers import Sublayers, adds_its_queries, is_norm
from equivalence_tests.checker.reach.arguments import ROLES
from equivalence_tests.checker.reach.proposing import taken_apart

BLOCK = re.compile(r"block|resid", re.IGNORECASE)
ROUNDING = 1e-13  # of factors that are products of exact ones
ROUNDED = 1e-6  # of those that were measured
NO_MATRIX = "the module holds no matrix that could"


@dataclass(frozen=True)
class Output(Affine):
    """What is made of the averaged values of all heads, side by side."""

    around: Expression = field(kw_only=True)  # what is made of that: norms, gates, a residual connection


@dataclass(frozen=True)
class Program:
    """output = around(out_proj(softmax(scale · query keyᵀ + bias) value))."""

    query: Projection
    key: Projection
    value: Projection
    scale: float  # what the scores are multiplied by
    bias: Bias
    output: Output  # what is made of the averaged values
    cap: float = 0.0  # of a tanh that holds the scores; 0 if there is none
    gain: Expression | None = None  # what is learnt to multiply the scores of each head by as well
    sink: Expression | None = None  # a score of each head, learnt, that takes a share of every row and goes to no key
    mixes: tuple[Expression | None, Expression | None] = (None, None)  # of the heads of the scores, and of the weights
    mask_replaces: bool = False  # whether a mask that is handed over takes the place of what is hidden without one

    def __call__(self, values: Values, may_attend: Tensor | None = None) -> Tensor:
        """Give what comes back, (batch, tokens, features); a mask is (batch, query_len, key_len), True = may look."""
        output = self.output.of(self.merged(values, may_attend), values.parameters)
        return self.output.around(replace(values, output=output))

    def merged(self, values: Values, may_attend: Tensor | None = None) -> Tensor:
        """Give the averaged values of all heads side by side, (b, q, h * d)."""
        return self.averaged(values, may_attend).transpose(1, 2).flatten(2)

    def averaged(self, values: Values, may_attend: Tensor | None = None) -> Tensor:
        """Give the averaged values of all heads, (b, h, q, d)."""
        query, key, value = self._scaled_queries(values), self.key(values), self.value(values)
        if self.cap or self.sink is not None or any(self.mixes):
            return self.weights(values, may_attend) @ value
        bias = self._added(query, key, values, may_attend)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale)

    def weights(self, values: Values, may_attend: Tensor | None = None) -> Tensor:
        """Give what the values are averaged with, (b, h, q, k)."""
        scores, mix = self.scores(values, may_attend), self.mixes[1]
        if self.sink is None:
            weights = scores.softmax(-1)
            return weights if mix is None else mix(replace(values, output=weights))
        sink = self.sink(values).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]

    def _scaled_queries(self, values: Values) -> Tensor:
        query = self.query(values)
        return query if self.gain is None else query * self.gain(values).reshape(-1, 1, 1)

    def products(self, values: Values) -> Tensor:
        """Give the scores before anything is added to them, (b, h, q, k)."""
        scores = self.scale * self._scaled_queries(values) @ self.key(values).mT
        scores = self.cap * torch.tanh(scores / self.cap) if self.cap else scores
        return scores if self.mixes[0] is None else self.mixes[0](replace(values, output=scores))

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
        if not all(one.is_plain for _, one in self.roles) or self.output.bias is None or self.query.more is not None:
            return False
        heads, width, features = self.query.weight.shape
        alike = {one.weight.shape for _, one in self.roles} == {(heads, width, features)}
        whole = alike and features == heads * width and self.output.weight.shape == (features, features)
        factors = self.scale_of_scores * width**0.5, self.value.number, self.output.factor
        as_they_are = all(abs(factor - 1) <= ROUNDING for factor in factors)
        hides = not self.mask_replaces and (self.bias.is_none or self.bias.is_causal)
        scores = not self.cap and self.gain is self.sink is None and hides and not any(self.mixes)
        return whole and as_they_are and scores and self.output.around == Attended()

    @property
    def scale_of_scores(self) -> float:
        """What the product of projected queries and keys is multiplied by."""
        return self.scale * self.query.number * self.key.number

    def steps(self, parameters: Parameters) -> Iterator[Step]:
        """List what torch's formula does not have, each with the evidence that it is intended; "" without."""
        takes = dict.fromkeys(one.tokens for _, one in self.roles)
        asks_itself = len({*of_kind(Given, *takes)}) == 1
        evidence = Evidence(parameters, self.projections(parameters), asks_itself)
        yield from self._twice(parameters)
        yield from self._of_others(parameters)
        yield from self._in_part(parameters)
        yield from self._in_another_order(parameters)
        yield from self._in_their_own_order()
        for tokens in takes:
            yield from evidence.steps(tokens, "project", known=takes)
        yield from self._of_operands()
        yield from self._of_scores(parameters)
        yield from () if self.gain is None else evidence.steps(self.gain, "scale")
        yield from () if self.sink is None else evidence.steps(self.sink, "scores")
        for mix in filter(None, self.mixes):
            yield from evidence.steps(mix, "mixed")
        if abs(self.output.factor - 1) > ROUNDING:
            yield Step(f"the output times {self.output.factor:.6g}", "", "factor")
        if self.output.factor * self.value.number < 0:
            yield Step("the output changes its sign", "", "sign")
        yield from self._behind(evidence)

    def without(self, stage: str) -> "Program":
        """Give the program as torch has it at one stage; the same where it has nothing of its own there."""
        if stage in ("rotary", "rotated", "operand", "values"):
            gone: Any = {"rotation": None} if stage in ("rotary", "rotated") else {"norm": None}
            three: Any = {role: replace(one, change=replace(one.change, **gone)) for role, one in self.roles}
            return replace(self, **three)
        if stage == "context":
            return replace(self, value=replace(self.value, factor=1.0, change=replace(self.value.change, factor=1.0)))
        if stage == "mixed":
            return replace(self, mixes=(None, None))
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

    def _behind(self, evidence: Evidence) -> Iterator[Step]:
        around, module = self.output.around, evidence.parameters.module
        asks = frozenset(evidence.parameters.names_at(self.query.places))
        sublayers = Sublayers(around, self.query.tokens, module, asks)
        fed = "a feed-forward follows it" if sublayers.branches else _called_a_block(module)
        if unlike := sublayers.unlike():
            yield Step(unlike, "", "residual")
        called = [*of_kind(Called, around, *(one.tokens for _, one in self.roles))]
        normed = [x.path for x in called if is_norm(module.get_submodule(x.path))]
        projected = {f"{x.path} is called" for x in called if sublayers.projects_queries(x)}
        projected |= {f"{x.name} takes part" for x in of_kind(Learnt, self.query.tokens)}
        single = {name for name, x in module.named_parameters() if x.numel() == 1}
        gates = [x.name for x in of_kind(Learnt, around) if x.name in single]
        gated = f"{gates[0]} says how much is added to what comes in" if gates else ""
        projecting = None if self.output.bias is not None else _projecting(around, module)
        for step in evidence.steps(around, "output"):
            if step.evidence and step.words == f"{projecting} is called":
                continue
            if step.stage == "residual":
                said = f"{normed[0]} comes with it, as in a Transformer's sublayer" if normed else gated
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

    def _of_others(self, parameters: Parameters) -> Iterator[Step]:
        """A weight whose name says another role, and what is not projected where others are."""
        module = parameters.module
        made = {role: self._made_by(one.tokens, module) for role, one in self.roles if one.bias is None}
        bare = [role for role, path in made.items() if not path]
        behind = tuple(f"{x.path}." for x in of_kind(Called, self.output.around))
        matrices = {name for name, x in parameters.named.items() if x.dim() > 1 and not name.startswith(behind)}
        further = matrices - self.projections(parameters)
        for role in bare if len(bare) < len(self.roles) else ():
            yield Step(f"the {role} is not projected", "" if further else NO_MATRIX, "project")
        called = [one.tokens for _, one in self.roles if isinstance(one.tokens, Called)]
        normed = {x.inner for x in called if is_norm(module.get_submodule(x.path))}
        for role, one in self.roles:
            if (one.tokens,) in normed:
                yield Step(f"the {role} is made from the tokens, another role from their norm", "", "project")
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
    def _made_by(tokens: Expression, module: nn.Module) -> str:
        """Name the sub-module that makes the heads of a role; "" for none, and for a norm."""
        if not isinstance(tokens, Called) or is_norm(module.get_submodule(tokens.path)):
            return ""
        return tokens.path

    def _in_another_order(self, parameters: Parameters) -> Iterator[Step]:
        """Queries, keys and values that lie in one matrix, or one argument, in another order than the code says."""
        bare = [one.tokens for _, one in self.roles if one.bias is None]
        owners = dict.fromkeys(name for _, one in self.roles for name in parameters.names_at(one.weight))
        what = "the argument" if bare else next(iter(owners))
        said = ROLES if bare else taken_apart(type(parameters.module))
        first = {role: one.weight.flatten(1)[:, 0] for role, one in self.roles}
        packed = len(bare) == 3 and isinstance(bare[0], Given) and len({*bare}) == 1 if bare else len(owners) == 1
        if not packed or not said or torch.equal(first["query"], first["value"]):  # of one argument, all of it for each
            return
        pairs = ([*itertools.pairwise(order)] for order in (said, ROLES))  # names may be exchanged where they are used
        if not any(all(bool((first[one] < first[other]).all()) for one, other in order) for order in pairs):
            yield Step(f"{what} does not hold {', '.join(said)} in this order, as the code says", "", "project")

    def _in_their_own_order(self) -> Iterator[Step]:
        """Rows or columns of the weights that are taken in an order of their own, which nothing says is intended."""
        output, rows = self.output, {role: _rows(one) for role, one in self.roles}
        heads = rows["query"][:, 0].argsort(stable=True)
        rows = {role: found[heads] for role, found in rows.items()}
        for role, one in self.roles:
            taken = one.weight >= 0
            if one.bias is not None and bool(((one.weight.diff() <= 0) & taken[..., 1:] & taken[..., :-1]).any()):
                yield Step(f"the {role} takes the features of the tokens in another order", "", "again")
            if bool((rows[role][1:, 0] < rows[role][:-1, 0]).any()):
                yield Step(f"the heads of the {role} are paired with the wrong heads of the queries", "", "split")
            turned = one.change.rotation
            whole = rows[role].view(1, -1) if turned is not None and turned.whole else rows[role]
            if turned is not None and not turned.is_in_order(_ranks(whole)):
                yield Step(f"the features of a head of the {role} are rotated in another order", "", "again")
        if not torch.equal(_ranks(rows["query"]), _ranks(rows["key"])):
            yield Step("the features of queries and keys are paired in another order", "", "split")
        columns = output.weight.argsort() if output.bias is None else output.weight[0]  # of the averaged values
        if not _alike(columns.unflatten(0, self.value.weight.shape[:2])[heads], rows["value"]):
            yield Step("the heads are concatenated in another order than they were split in", "", "merge")
        if output.bias is not None:
            biased = bool((output.bias >= 0).all())
            if bool((output.weight[:, 0].diff() < 0).any()) or (biased and bool((output.bias.diff() < 0).any())):
                yield Step("the features of the output are put in another order", "", "output")

    def _in_part(self, parameters: Parameters) -> Iterator[Step]:
        """A weight, or what a sub-module makes, of which some elements take no part."""
        module = parameters.module
        made = defaultdict[str, list[Tensor]](list)
        for _, one in self.roles:
            made["" if one.bias is not None else self._made_by(one.tokens, module)].append(one.weight.flatten())
        for path, taken in ((path, torch.cat(found).unique()) for path, found in made.items() if path):
            if len(taken) < max(int(taken.max()) + 1, _width_of(path, module)):
                yield Step(f"only part of the output of {path} is used", "", "unused")
        used = self._places.unique()
        for name in sorted(self.projections(parameters)):
            if int(parameters.holds(name, used).sum()) < parameters.named[name].numel():
                yield Step(f"only part of {name} is used", "", "unused")

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
            yield Step(f"the scores times {scale:.6g} instead of 1/sqrt({width})", "", "scale")
        if self.bias.learnt is not None:
            name = parameters.name_at(int(self.bias.learnt.max()))
            what = f"the product of the queries and {name}" if self.bias.meets else name
            of_distance = ", a vector for each distance" * self.bias.is_of_distance
            plain = not self.bias.meets and not self.bias.mixes_distances
            said = f"the parameter {name}{of_distance}" if of_distance or plain else ""
            stage = "scores" if said else "again"  # that a parameter takes part says nothing for where
            shared = ", one element for distances in the image that differ" * self.bias.mixes_distances
            yield Step(f"{what} is added to the scores{shared}", said, stage)
        if self.bias.relative is not None or self.query.more is not None:
            yield self._relative(parameters)
        if self.bias.given is not None:
            yield Step("what the mask of this call adds to the scores", "the mask that is passed", "mask")
        if self.bias.slopes is not None:
            said = "the slopes of ALiBi" if self.bias.is_alibi else ""
            distance = f"the distance{self.bias.grid or ''}"
            yield Step(f"{distance} times a slope is subtracted from the scores", said, "scores")
        if self.cap:
            yield Step(f"the scores are capped at {self.cap:.6g} by a tanh", "", "cap")
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
        words = (
            f"the queries plus {here} are multiplied by the vector in {relative.table} of each distance, projected by "
        )
        words += f"{parameters.name_at(int(relative.weight.max()))}; the queries plus {there} by the keys"
        usual = abs(relative.factor / self.scale - 1) < ROUNDED and (here != there or not any(added))
        said = "Transformer-XL's relative positions" if usual and bool(added[0]) == bool(added[1]) else ""
        return Step(words, said, "scores" if said else "again")


def _width_of(path: str, module: nn.Module) -> int:
    """How many features a linear layer makes; 0 of anything else, which does not say."""
    called = module.get_submodule(path)
    return called.out_features if isinstance(called, nn.Linear) else 0


def _called_a_block(module: nn.Module) -> str:
    """Say that a class is called a block, which holds its residual connection; "" for none."""
    name = type(module).__name__
    return f"{name} is called a block, and blocks are added to what they are given" if BLOCK.search(name) else ""


def _projecting(around: Expression, module: nn.Module) -> str | None:
    """The linear layer that takes the averaged values behind a gate: the output projection."""
    called = (x.path for x in of_kind(Called, around) if attends(x))
    return next((path for path in called if isinstance(module.get_submodule(path), nn.Linear)), None)


def _rows(one: Projection) -> Tensor:
    """Where each row of a projection ends among the parameters, or lies among the features, (heads, head_dim)."""
    return one.weight if one.bias is None else one.weight.amax(-1)


def _alike(columns: Tensor, rows: Tensor) -> bool:
    """Whether heads are merged as they were split; where several share their values, head after head."""
    shared = len(rows[:, 0].unique()) < len(rows)
    if shared:
        return bool((columns.flatten().diff() > 0).all()) and torch.equal(_ranks(columns), _ranks(rows))
    return torch.equal(columns.flatten().argsort(), rows.flatten().argsort())


def _ranks(rows: Tensor) -> Tensor:
    return rows.argsort(-1).argsort(-1)
