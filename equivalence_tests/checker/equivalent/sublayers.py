"""The sublayers of a layer that is written in one forward: what is added to what, beside a Transformer's layer.

    x = x + attention(norm1(x)); x = x + feed_forward(norm2(x)), or norm1(x + attention(x)) and so on

Source: Vaswani et al. 2017, section 3.1; Xiong et al. 2020 for the norms in front.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from equivalence_tests.checker.engine.meaning import SET_TRANSFORMER
from equivalence_tests.checker.equivalent.expressions import (
    NORMS,
    Called,
    Expression,
    Learnt,
    Made,
    Mapped,
    all_of,
    attends,
    inner_of,
    is_sum,
    terms_of,
)


def adds_its_queries(module: nn.Module) -> str:
    """Say that an attention is one of the Set Transformer's, which adds the projected queries; "" if it is none."""
    names = (type(one).__name__ for one in module.modules())
    named = next(filter(SET_TRANSFORMER.search, names), "")
    return f"{named} is a block of the Set Transformer, which adds the projected queries" if named else ""


@dataclass(frozen=True)
class Sublayers:
    """Compares what stands behind an attention with a Transformer's layer."""

    around: Expression  # what is made of what attends
    tokens: Expression  # what the queries are projected from
    module: nn.Module  # the user's, whose sub-modules are called
    asks: frozenset[str] = frozenset()  # the parameters that project the queries

    @property
    def branches(self) -> list[Expression]:
        """What matrices make of the stream behind the attention: feed-forwards."""
        sums = [[*terms_of(one)] for one in all_of(self.around) if is_sum(one)]
        held = [x for terms in sums for x in terms if any(y in all_of(x) and y != x for y in terms if attends(y))]
        whole = [x for x in terms_of(self._bare(self.around)) if any(is_sum(y) and attends(y) for y in all_of(x))]
        return [x for x in dict.fromkeys([*held, *whole]) if self._is_branch(x)]

    def unlike(self) -> str:
        """Say what is unlike a Transformer's layer; "" for nothing, or where there is no feed-forward."""
        branches = self.branches
        if not branches:
            return ""
        terms = list(terms_of(self._bare(self.around)))
        branch, name = branches[0], self._name(branches[0])
        stream = [x for x in terms if x != branch]
        if len(branches) > 1 or branch not in terms:
            return f"{' and '.join(map(self._name, branches))} are not a feed-forward after the attention"
        if not stream:
            return f"{name} has no residual connection"
        if not any(map(attends, stream)) or not any({*terms_of(x)} == {*stream} for x in all_of(branch)):
            return f"{name} is added to something other than what it takes"
        return self._of_attention(stream) or self._without_activation(branch)

    def _of_attention(self, stream: list[Expression]) -> str:
        """Say what is unlike it in the sum of the stream and the attention."""
        pre_norm = self._bare(self.tokens) != self.tokens
        behind = len(stream) == 1 and self._bare(stream[0]) != stream[0]
        terms = list(terms_of(self._bare(stream[0]))) if behind else stream
        added = [x for x in terms if not attends(x)]
        if not added:
            return "the attention has no residual connection"
        if adds_its_queries(self.module) and [*map(self.projects_queries, added)] == [True]:
            return ""
        if {*added} != {*terms_of(self._bare(self.tokens))} or len(added) == len(terms):
            return "the attention is added to something other than its input"
        return "a norm is applied before one sublayer, and after it on the stream" if pre_norm and behind else ""

    def projects_queries(self, one: Expression) -> bool:
        """Whether it is what the queries are: the same matrix of the same tokens."""
        if not isinstance(one, Called) or one.inner != (self.tokens,):
            return False
        return self._is_linear(one) and f"{one.path}.weight" in self.asks

    def _without_activation(self, branch: Expression) -> str:
        """Name two linear layers that follow each other."""
        for one in all_of(branch):
            inner = one.inner[0] if isinstance(one, Called) and self._is_linear(one) else None
            if isinstance(inner, Called) and self._is_linear(inner):
                return f"there is no activation between {inner.path} and what follows it"
        return ""

    def _bare(self, one: Expression) -> Expression:
        """Leave out the norms around something."""
        while isinstance(one, Called | Made) and len(one.inner) == 1 and self._is_norm(one):
            one = one.inner[0]
        return one

    def _is_norm(self, one: Called | Made) -> bool:
        if isinstance(one, Made):
            return one.name in NORMS
        return is_norm(self.module.get_submodule(one.path))

    def _is_linear(self, one: Called) -> bool:
        return isinstance(self.module.get_submodule(one.path), nn.Linear)

    def _is_branch(self, one: Expression) -> bool:
        """Whether it is made by matrices."""
        made = (x for x in _outside_of_sums(one) if isinstance(x, Called | Mapped))
        return any(isinstance(x, Mapped) or not self._is_norm(x) for x in made)

    def _name(self, branch: Expression) -> str:
        called = (x for x in _outside_of_sums(branch) if isinstance(x, Called | Mapped))
        return next((x.path if isinstance(x, Called) else x.name for x in called), "what follows the attention")


def is_norm(module: nn.Module) -> bool:
    """Whether all that it learns is a number for each feature."""
    learnt = list(module.parameters())
    return bool(learnt) and all(sum(n > 1 for n in x.shape) <= 1 for x in learnt)  # of images too: (1, features, 1, 1)


def _outside_of_sums(one: Expression) -> Iterator[Expression]:
    """List an expression and what it is made of, but for sums and what these are made of."""
    if not is_sum(one) and not isinstance(one, Learnt):
        yield one
        for inner in inner_of(one):
            yield from _outside_of_sums(inner)
