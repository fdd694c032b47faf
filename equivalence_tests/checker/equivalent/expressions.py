"""What is done to tokens outside of the attention itself: a small tree of named parts, each a step of the program."""

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.steps import RESIDUAL, Step
from equivalence_tests.checker.reach.calling import columns_of
from equivalence_tests.checker.reach.state import ask

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    name: getattr(F, name) for name in ("sigmoid", "silu", "tanh", "relu", "gelu", "softplus")
}
OWN_NORM = "torch's own norm of each token, called by its name"
# Of the features of each token, without a parameter.
NORMS: Mapping[str, Callable[..., Tensor]] = {
    "layer_norm": lambda x, width, eps: F.layer_norm(x, (width,), eps=eps),
    "rms_norm": lambda x, width, eps: F.rms_norm(x, (width,), eps=eps),
}
# What expressions are made by: a gate or a gain is a product; spread, a number of each head is given to its features;
# of what is cut, only some tokens (axis 1) or features (axis 2) are kept, so many from the first on.
FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    **ACTIVATIONS,
    **NORMS,
    "sum": operator.add,
    "product": operator.mul,
    "scaled": lambda x, factor: factor * x,
    "spread": lambda x, count: x.repeat_interleave(count, -1),
    "cut": lambda x, axis, start, count: x.narrow(axis, start, count),
    "exp": torch.exp,
    "reciprocal": torch.reciprocal,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
}


@dataclass
class Values:
    """What an expression is computed from."""

    given: Mapping[str, Tensor]  # the arguments by name, each as (batch, tokens, features)
    parameters: Parameters  # of the user's module, whose sub-modules are called as they are
    output: Tensor | None = None  # what the attention gives, behind its projection

    def size(self, axis: int) -> int:
        """Say how many samples there are, or tokens."""
        return next(iter(self.given.values())).size(axis)

    def learnt(self, name: str) -> Tensor:
        """Give a parameter."""
        found = self.parameters.named[name]
        return found if found.is_complex() else found.double()

    def vector(self, name: str) -> Tensor:
        """Give a parameter as a vector."""
        return self.learnt(name).flatten()

    def called(self, path: str, given: Sequence[Tensor], numbers: Mapping[str, float]) -> Tensor:
        """Call a sub-module, in its own precision."""
        module = self.parameters.module.get_submodule(path)
        dtype = next((x.dtype for x in module.parameters()), torch.float64)
        result = module(*(x.to(dtype) for x in given), **numbers)
        return (result if isinstance(result, Tensor) else result[0]).to(given[0].dtype)


class Expression(ABC):
    """A step outside of the attention itself; given values that are text, it is written down."""

    def __call__(self, values: Values) -> Tensor:
        """Compute it, or write it down."""
        return self._of(values)

    @abstractmethod
    def _of(self, values: Values) -> Tensor: ...


E = TypeVar("E", bound=Expression)


@dataclass(frozen=True)
class Given(Expression):
    """An argument as it is."""

    name: str

    def _of(self, values: Values) -> Tensor:
        return values.given[self.name]


@dataclass(frozen=True)
class Attended(Expression):
    """What the attention gives."""

    def _of(self, values: Values) -> Tensor:
        assert values.output is not None  # only what stands behind the attention asks for it
        return values.output


@dataclass(frozen=True)
class Learnt(Expression):
    """A parameter as it is, such as a gain or a table of positions."""

    name: str

    def _of(self, values: Values) -> Tensor:
        return values.learnt(self.name)


@dataclass(frozen=True)
class Called(Expression):
    """A sub-module of the user's, called as it is."""

    path: str
    inner: tuple[Expression, ...]
    transposed: bool = False  # whether it is given the features first, (batch, features, tokens)
    grid: tuple[int, int] | None = None  # the rows and columns of the image that it is given, features first
    numbers: tuple[tuple[str, float], ...] = ()  # what else it is given by name, as the height and the width

    def _of(self, values: Values) -> Tensor:
        given = [inner(values).mT if self.transposed else inner(values) for inner in self.inner]
        given = given if self.grid is None else [x.unflatten(-1, self._grid_for(x.size(-1))) for x in given]
        found = values.called(self.path, given, dict(self.numbers))
        found = found if self.grid is None else found.flatten(2)
        return found.mT if self.transposed else found

    def _grid_for(self, pixels: int) -> tuple[int, int]:
        assert self.grid is not None
        return self.grid if math.prod(self.grid) == pixels else (-1, columns_of(pixels))


@dataclass(frozen=True)
class Made(Expression):
    """What a function without parameters makes."""

    name: str  # of the function, in ``FUNCTIONS``
    inner: tuple[Expression, ...]
    numbers: tuple[float | None, ...] = ()  # what else it is given

    def _of(self, values: Values) -> Tensor:
        return FUNCTIONS[self.name](*(x(values) for x in self.inner), *self.numbers)


@dataclass(frozen=True)
class Mapped(Expression):
    """Something multiplied by a matrix that is a parameter."""

    name: str
    inner: Expression
    transposed: bool = False  # whether by its transpose, as a linear layer does

    def _of(self, values: Values) -> Tensor:
        matrix = values.learnt(self.name)
        return self.inner(values) @ (matrix.mT if self.transposed else matrix)


@dataclass(frozen=True)
class Joined(Expression):
    """Tokens, or features, beside one another, first those of the first; what is learnt stands in each sample."""

    inner: tuple[Expression, ...]
    axis: int = 1

    def _of(self, values: Values) -> Tensor:
        made = ((x(values), any(of_kind(Given, x)) or attends(x)) for x in self.inner)
        laid = [x if of_samples else x.expand(values.size(0), -1, -1) for x, of_samples in made]
        return torch.cat(laid, self.axis)


def own_norm(operation: Operation) -> str:
    """Say that an operation is a norm of torch's without a parameter, of the features of each token; "" if not."""
    if operation.name not in NORMS or len(operation.inputs) > 1:
        return ""
    shape = operation.argument(1, "normalized_shape")
    return OWN_NORM if tuple(shape) == operation.outputs[0].value.shape[-1:] else ""


def inner_of(expression: Expression) -> tuple[Expression, ...]:
    """List what an expression is made of."""
    found = (x for one in vars(expression).values() for x in (one if isinstance(one, tuple) else (one,)))
    return tuple(x for x in found if isinstance(x, Expression))


def all_of(expression: Expression) -> Iterator[Expression]:
    """List an expression and all that it is made of."""
    yield expression
    for inner in inner_of(expression):
        yield from all_of(inner)


def of_kind(kind: type[E], *expressions: Expression) -> Iterator[E]:
    """List those of one kind among expressions and all that they are made of."""
    return (x for one in expressions for x in all_of(one) if isinstance(x, kind))


def attends(expression: Expression) -> bool:
    """Whether it is made of what the attention gives."""
    return any(of_kind(Attended, expression))


def is_sum(expression: Expression) -> bool:
    """Whether it adds up others."""
    return isinstance(expression, Made) and expression.name == "sum"


def terms_of(expression: Expression) -> Iterator[Expression]:
    """List what a sum adds up; anything else is its only term."""
    if is_sum(expression):
        yield from (term for inner in inner_of(expression) for term in terms_of(inner))
    else:
        yield expression


def added_twice(expression: Expression) -> list[str]:
    """Name what one sum adds more than once: the arguments, the sub-modules, or else the function.

    >>> x, both = Given("x"), Made("sum", (Given("x"), Attended()))
    >>> added_twice(Made("sum", (both, x))), added_twice(Made("sum", (x, Called("norm", (both,)))))
    (['x'], [])
    >>> added_twice(Made("sum", (Called("mlp", (x,)), Called("mlp", (x,)))))
    ['mlp']
    """
    terms = list(terms_of(expression))
    twice = (one for one in dict.fromkeys(terms) if terms.count(one) > 1)
    return [getattr(one, "name", getattr(one, "path", "the attention")) for one in twice]


@dataclass
class Evidence:
    """Says what is intended by the rules: a sub-module with a name, a parameter that has no other use."""

    parameters: Parameters
    used: set[str] = field(default_factory=set)  # the parameters that the attention itself uses
    asks_itself: bool = False  # queries, keys and values are made of one argument

    def steps(self, expression: Expression, stage: str, known: Collection[Expression] = ()) -> Iterator[Step]:
        """List the steps of an expression; each parameter speaks for one step only, whatever takes what it gives.

        Of what is known whole elsewhere, a part is no further step.
        """
        part = isinstance(expression, Made) and expression.name == "cut" and expression.inner[0] in known
        for one in [expression] if part else dict.fromkeys(all_of(expression)):
            if isinstance(one, Called):
                said = self._of_module(one.path)
                yield Step(f"{one.path} is called", said, stage if said else "again")
            elif isinstance(one, Learnt | Mapped):
                said = self._once({one.name}, f"the parameter {one.name}")
                yield Step(f"{one.name} takes part", said, stage if said else "again")
            elif isinstance(one, Joined) and one.axis == -1:
                beside = [x for x in one.inner if isinstance(x, Attended | Given)]
                said = "context and query, as in Luong's attention" if len({*beside}) == 2 else ""
                yield Step("features are concatenated", said if Attended() in beside else "", stage)
            elif isinstance(one, Joined):
                leaves = {*of_kind(Given, one), *of_kind(Learnt, one)}
                twice = len(set(one.inner)) < len(one.inner) or len(leaves) < len(one.inner)
                yield Step("tokens are concatenated", "" if twice else "each are an argument or a parameter", stage)
            elif isinstance(one, Made):
                yield from self._made(one, stage)
        for name in dict.fromkeys(name for one in all_of(expression) for name in added_twice(one)):
            yield Step(f"{name} is added more than once", "", "again")
        added = (x for one in all_of(expression) if is_sum(one) for x in inner_of(one))
        if stage == "output" and any(map(_is_given, added)):
            yield Step(RESIDUAL, "what is added is an argument as it is", "residual")

    def _made(self, one: Made, stage: str) -> Iterator[Step]:
        """List what speaks for itself in no name."""
        if one.name == "cut":
            yield Step(f"a part of the {'tokens' if one.numbers[0] == 1 else 'features'}", self._of_class(one), "cut")
        elif one.name == "scaled" and not isinstance(one.inner[0], Mapped | Learnt):  # such take the number in
            yield Step(f"times {one.numbers[0]:.6g}", "", "factor")
        elif one.name in NORMS:
            yield Step(f"{one.name} without a parameter", OWN_NORM, stage)
        elif one.name in ACTIVATIONS and (
            getattr(one.inner[0], "name", "") in ACTIVATIONS or not _is_learnt(one.inner[0])
        ):
            yield Step(one.name, "", "gate")
        elif one.name == "product" and len({*one.inner}) < len(one.inner):
            yield Step("something is multiplied by itself", "", "gate")
        elif one.name == "product" and any(map(_is_given, one.inner)):
            yield Step("an argument as it is multiplies something", "", "gate")

    def _of_class(self, one: Made) -> str:
        """A class token stands first, and may ask alone, as it does in CrossViT."""
        name = type(self.parameters.module).__name__
        asks = "class|cls|pool|cross" if self.asks_itself else "class|cls|pool"
        first = [*one.numbers] == [1, 0, 1] and re.search(asks, name, re.IGNORECASE)
        return f"the first token alone, as the name {name} says" if first else ""

    def _of_module(self, path: str) -> str:
        called, inside = self.parameters.module.get_submodule(path), self.parameters.inside(path)
        named = f"the sub-module {path}, a {type(called).__name__}"
        if isinstance(called, nn.Linear) and not _is_linear(called):
            return ""
        return self._once(inside, named) if inside else named

    def _once(self, names: set[str], evidence: str) -> str:
        if names & self.used:
            return ""
        self.used |= names
        return evidence


def _is_learnt(expression: Expression) -> bool:
    """Whether all that something is made of has gone through what is learnt."""
    if isinstance(expression, Called | Learnt | Mapped):
        return True
    inner = inner_of(expression)
    return bool(inner) and all(map(_is_learnt, inner))


@torch.no_grad()
def _is_linear(layer: nn.Linear) -> bool:
    """Whether what is called a linear layer is one: (f(x) + f(y)) / 2 = f((x + y) / 2), far from 0 too.

    >>> _is_linear(nn.Linear(3, 2)), _is_linear(type("Bent", (nn.Linear,), {"forward": lambda _, x: x.relu()})(3, 2))
    (True, False)
    """
    x, y = torch.linspace(-9, 9, 2 * layer.in_features).to(layer.weight).view(2, 1, 1, -1)
    made = ask(lambda: (layer((x + y) / 2), (layer(x) + layer(y)) / 2)).value
    return made is None or torch.allclose(*made, atol=1e-4)  # one that takes more was called with more


def _is_given(one: Expression) -> bool:
    """Whether something is made of arguments alone, without anything that is learnt."""
    return not any(isinstance(x, Attended | Called | Learnt | Mapped) for x in all_of(one))
