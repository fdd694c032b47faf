"""What is done to tokens outside of the attention itself: a small tree of named parts, each a step of the program."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.steps import Step

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "softplus": F.softplus,
}


@dataclass
class Values:
    """What an expression is computed from.

    Args:
        given: The arguments by name, each as (batch, tokens, features).
        module: The user's module, whose sub-modules are called as they are.
        parameters: Its parameters.
        output: What the attention gives, behind its projection.
    """

    given: Mapping[str, Tensor]
    module: nn.Module | None
    parameters: Parameters
    output: Tensor | None = None


@dataclass(frozen=True)
class Given:
    """An argument as it is."""

    name: str

    def __call__(self, values: Values) -> Tensor:
        """Give the argument."""
        return values.given[self.name]


@dataclass(frozen=True)
class Attended:
    """What the attention gives."""

    def __call__(self, values: Values) -> Tensor:
        """Give it."""
        assert values.output is not None  # only what stands behind the attention asks for it
        return values.output


@dataclass(frozen=True)
class Learnt:
    """A parameter as it is, such as a gain or a table of positions.

    Args:
        name: Of the parameter.
        rows: Whether only as many of its rows take part as there are tokens.
    """

    name: str
    rows: bool = False

    def __call__(self, values: Values) -> Tensor:
        """Give the parameter."""
        whole = values.parameters.named[self.name]
        return whole[..., : next(iter(values.given.values())).size(1), :] if self.rows else whole


@dataclass(frozen=True)
class Called:
    """A sub-module of the user's, called as it is.

    Args:
        path: Of the sub-module.
        inner: What it is given.
        transposed: Whether it is given the features first, (batch, features, tokens).
        grid: The rows and columns of the image that the tokens are, where it is given one, features first.
        numbers: What else it is given by name, such as the height and the width of an image.
    """

    path: str
    inner: tuple["Expression", ...]
    transposed: bool = False
    grid: tuple[int, int] | None = None
    numbers: tuple[tuple[str, float], ...] = ()

    def __call__(self, values: Values) -> Tensor:
        """Call it, in its own precision."""
        assert values.module is not None  # it has a path in one
        module = values.module.get_submodule(self.path)
        dtype = next((x.dtype for x in module.parameters()), torch.float64)
        given = [inner(values) for inner in self.inner]
        transposed = [x.mT if self.transposed else x for x in given]
        laid = [x if self.grid is None else x.unflatten(-1, self.grid) for x in transposed]
        result = module(*(x.to(dtype) for x in laid), **dict(self.numbers))
        found: Tensor = (result if isinstance(result, Tensor) else result[0]).to(given[0].dtype)
        found = found if self.grid is None else found.flatten(2)
        return found.mT if self.transposed else found


@dataclass(frozen=True)
class Sum:
    """A sum of two."""

    first: "Expression"
    second: "Expression"

    def __call__(self, values: Values) -> Tensor:
        """Compute it."""
        return self.first(values) + self.second(values)


@dataclass(frozen=True)
class Times:
    """A product of two, such as with a gate or a gain."""

    first: "Expression"
    second: "Expression"

    def __call__(self, values: Values) -> Tensor:
        """Compute it."""
        return self.first(values) * self.second(values)


@dataclass(frozen=True)
class Scaled:
    """Something times a number that nothing learns."""

    factor: float
    inner: "Expression"

    def __call__(self, values: Values) -> Tensor:
        """Compute it."""
        return self.factor * self.inner(values)


@dataclass(frozen=True)
class Acted:
    """An activation, element by element."""

    name: str
    inner: "Expression"

    def __call__(self, values: Values) -> Tensor:
        """Compute it."""
        return ACTIVATIONS[self.name](self.inner(values))


@dataclass(frozen=True)
class Mapped:
    """Something multiplied by a matrix that is a parameter.

    Args:
        name: Of the parameter.
        inner: What is multiplied.
        transposed: Whether by its transpose, as a linear layer does.
    """

    name: str
    inner: "Expression"
    transposed: bool = False

    def __call__(self, values: Values) -> Tensor:
        """Compute it."""
        matrix = values.parameters.named[self.name].to(torch.float64)
        return self.inner(values) @ (matrix.mT if self.transposed else matrix)


@dataclass(frozen=True)
class Spread:
    """A number for each head, or for each token, given to all of its features."""

    inner: "Expression"
    count: int

    def __call__(self, values: Values) -> Tensor:
        """Repeat each."""
        return self.inner(values).repeat_interleave(self.count, -1)


@dataclass(frozen=True)
class Cut:
    """Some of the tokens, or of their features, one after the other.

    Args:
        inner: What is cut.
        axis: 1 for tokens, 2 for features.
        start: The first that is kept.
        count: How many are.
    """

    inner: "Expression"
    axis: int
    start: int
    count: int

    def __call__(self, values: Values) -> Tensor:
        """Cut it."""
        return self.inner(values).narrow(self.axis, self.start, self.count)


@dataclass(frozen=True)
class Joined:
    """Tokens beside one another, first those of the first."""

    inner: tuple["Expression", ...]

    def __call__(self, values: Values) -> Tensor:
        """Put them side by side, what is learnt in each sample."""
        found = [x(values) for x in self.inner]
        found = [x[None] if x.dim() == 2 else x for x in found]
        batch = max(x.size(0) for x in found)
        return torch.cat([x.expand(batch, -1, -1) for x in found], 1)


OfOne: TypeAlias = Scaled | Acted | Mapped | Spread | Cut
Expression: TypeAlias = Given | Attended | Learnt | Called | Sum | Times | Joined | OfOne


def inner_of(expression: Expression) -> tuple[Expression, ...]:
    """List what an expression is made of."""
    if isinstance(expression, Called | Joined):
        return expression.inner
    if isinstance(expression, Sum | Times):
        return expression.first, expression.second
    return (expression.inner,) if isinstance(expression, OfOne) else ()


def all_of(expression: Expression) -> Iterator[Expression]:
    """List an expression and all that it is made of."""
    yield expression
    for inner in inner_of(expression):
        yield from all_of(inner)


def terms_of(expression: Expression) -> Iterator[Expression]:
    """List what a sum adds up; anything else is its only term."""
    if isinstance(expression, Sum):
        yield from terms_of(expression.first)
        yield from terms_of(expression.second)
    else:
        yield expression


def added_twice(expression: Expression) -> list[str]:
    """Name the arguments that one sum adds more than once.

    >>> x = Given("x")
    >>> added_twice(Sum(Sum(x, Attended()), x)), added_twice(Sum(x, Called("norm", (Sum(x, Attended()),))))
    (['x'], [])
    """
    given = [one.name for one in terms_of(expression) if isinstance(one, Given)]
    return [name for name in dict.fromkeys(given) if given.count(name) > 1]


@dataclass
class Evidence:
    """Says what is intended by the rules: a sub-module with a name, a parameter that has no other use.

    Args:
        module: The user's module.
        parameters: Its parameters.
        used: The parameters that the attention itself uses.
    """

    module: nn.Module | None
    parameters: Parameters
    used: set[str] = field(default_factory=set)

    def steps(self, expression: Expression, stage: str) -> Iterator[Step]:
        """List the steps of an expression; each parameter speaks for one step only."""
        for one in all_of(expression):
            if isinstance(one, Called):
                said = self._of_module(one.path)
                yield Step(f"{one.path} is called", said, stage if said else "again")
            elif isinstance(one, Learnt | Mapped):
                said = self._once({one.name}, f"the parameter {one.name}")
                yield Step(f"{one.name} takes part", said, stage if said else "again")
            elif isinstance(one, Joined):
                twice = len(set(one.inner)) < len(one.inner) or len(_leaves(one)) < len(one.inner)
                yield Step("tokens are put side by side", "" if twice else "each are an argument or a parameter", stage)
            elif isinstance(one, Cut):
                yield Step(f"a part of the {'tokens' if one.axis == 1 else 'features'}", self._of_class(one), "cut")
            elif isinstance(one, Scaled) and not isinstance(one.inner, Mapped | Learnt):  # such take the number in
                yield Step(f"times {one.factor:.6g}", "", "factor")
            elif isinstance(one, Acted) and not any(isinstance(x, Called | Learnt | Mapped) for x in all_of(one)):
                yield Step(one.name, "", "gate")
            elif isinstance(one, Times) and any(map(_is_given, (one.first, one.second))):
                yield Step("an argument as it is multiplies something", "", "gate")
        if stage == "output" and any(
            isinstance(one, Sum) and any(map(_is_given, (one.first, one.second))) for one in all_of(expression)
        ):
            yield Step("a residual connection", "what is added is an argument as it is", "residual")

    def _of_class(self, one: Cut) -> str:
        """A class token stands first, and may ask alone."""
        name = type(self.module).__name__
        first = (one.axis, one.start, one.count) == (1, 0, 1) and re.search("class|cls|pool", name, re.IGNORECASE)
        return f"the first token alone, as the name {name} says" if first else ""

    def _of_module(self, path: str) -> str:
        assert self.module is not None  # it has a path in one
        inside = {f"{path}.{name}" for name, _ in self.module.get_submodule(path).named_parameters()}
        named = f"the sub-module {path}, a {type(self.module.get_submodule(path)).__name__}"
        return self._once(inside, named) if inside else named

    def _once(self, names: set[str], evidence: str) -> str:
        if names & self.used:
            return ""
        self.used |= names
        return evidence


def _leaves(expression: Expression) -> set[Expression]:
    """The arguments and parameters that an expression is made of."""
    return {one for one in all_of(expression) if isinstance(one, Given | Learnt)}


def _is_given(one: Expression) -> bool:
    """Whether something is made of arguments alone, without anything that is learnt."""
    return not any(isinstance(x, Attended | Called | Learnt | Mapped) for x in all_of(one))
