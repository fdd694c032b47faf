"""What an exercise is: a solution, the calls that it is tried in, and the mistakes that its numbers give away."""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from equivalence_tests.learn.excerpts import Place

__all__ = ["Call", "Exercise", "Mistake"]

IMPORTS = """\
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
"""


@dataclass(frozen=True)
class Call:
    """One call of the function.

    Args:
        what: What is special about it, in words.
        arguments: By name.
        is_random: Whether it drops something: the checker asks of an attention that two calls agree.
    """

    what: str
    arguments: dict[str, Any]
    is_random: bool = False


@dataclass(frozen=True)
class Mistake:
    """A common wrong solution, as a change of the right one.

    Args:
        old: A piece of the solution, which occurs in it once.
        new: What stands there in the wrong one.
        why: What is wrong with that.
        trap: The name of the trap of torch.nn that it fell into; "" if it is none.
    """

    old: str
    new: str
    why: str
    trap: str = ""


@dataclass(frozen=True)
class Exercise:
    """One function to write.

    Args:
        solution: The function, which shows one way to write it. The first line of its docstring is the title, the rest
            is the task.
        calls: Gives the calls that are compared with the solution, in float64.
        mistakes: What people write instead.
        textbook: Where the same stands in this project.
        blank: The piece of the solution that is to be filled in; "" is the whole body.
        outputs: The names of what the function returns.
        use: What is done with what the function returned, before it is compared.
    """

    solution: Callable[..., Any]
    calls: Callable[[], Iterator[Call]]
    mistakes: tuple[Mistake, ...]
    textbook: tuple[Place, ...]
    blank: str = ""
    outputs: tuple[str, ...] = ("output",)
    use: Callable[[Any], Any] = lambda returned: returned

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.solution.__name__

    @property
    def is_built_in(self) -> bool:
        """Whether it asks for torch's own way, and not for the formula."""
        return self.name.endswith("_builtin")

    @property
    def title(self) -> str:
        """The task in a line."""
        return (inspect.getdoc(self.solution) or "").splitlines()[0]

    @property
    def task(self) -> str:
        """The task, after its title."""
        return (inspect.getdoc(self.solution) or "").partition("\n")[2].strip()

    @property
    def source(self) -> str:
        """The solution without its docstring."""
        return inspect.getsource(self.solution).replace(_docstring(self.solution), "")

    @property
    def blanked(self) -> str:
        """The function with the blank in it."""
        if self.blank:
            return self.source.replace(self.blank, "...")
        return f"{_head(self.solution)}\n    ...\n"

    def with_mistake(self, mistake: Mistake) -> str:
        """Write the wrong solution."""
        return self.source.replace(mistake.old, mistake.new)


def _docstring(function: Callable[..., Any]) -> str:
    """Give the lines of the docstring as they stand in the source."""
    lines = inspect.getsource(function).splitlines(keepends=True)
    text = _definition(function).body[0]
    return "".join(lines[text.lineno - 1 : text.end_lineno])


def _head(function: Callable[..., Any]) -> str:
    lines = inspect.getsource(function).splitlines()
    return "\n".join(lines[: _definition(function).body[0].lineno - 1])


def _definition(function: Callable[..., Any]) -> ast.FunctionDef:
    definition = ast.parse(inspect.getsource(function)).body[0]
    assert isinstance(definition, ast.FunctionDef)  # solutions are functions
    return definition


def drawn(*shape: int, seed: int) -> torch.Tensor:
    """Give random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
