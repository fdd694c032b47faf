"""What somebody's callable may want: its parameters, what their names say, and every choice, the likeliest first."""

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["parameters_of", "ranked", "scripted_signature", "told_by"]

T = TypeVar("T")


def parameters_of(target: Any) -> list[inspect.Parameter]:
    """List the arguments of a callable, or of the forward of a module, that have names of their own.

    >>> [p.name for p in parameters_of(nn.ReLU())]
    ['input']
    """
    if isinstance(target, nn.Module) and getattr(type(target), "forward", None) is not nn.Module.forward:
        target = target.forward  # some override __call__ instead
    if isinstance(target, torch.ScriptMethod):
        return list(scripted_signature(target.schema).parameters.values())[1:]
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # what is written in C may not say
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in signature.parameters.values() if p.kind not in variadic]


def scripted_signature(schema: Any) -> inspect.Signature:
    """Give the arguments of what TorchScript has compiled."""
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(x.name, kind, default=x.default_value if x.has_default_value() else none)
            for x in schema.arguments
        ]
    )


def told_by(name: str, table: Sequence[tuple[str, T]], unknown: T) -> T:
    """Say what the first pattern that occurs in a name stands for, whatever the case of its letters.

    >>> told_by("Src_Mask", [("mask", "a mask"), ("src", "the source")], "")
    'a mask'
    """
    return next((meaning for pattern, meaning in table if re.search(pattern, name.lower())), unknown)


def ranked(choices: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    """Choose one from each, first choices first: the sum of their places rises.

    >>> ["".join(chosen) for chosen in ranked(["ab", "xyz"])]
    ['ax', 'ay', 'bx', 'az', 'by', 'bz']
    """

    def of_sum(total: int, rest: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
        if not rest and not total:
            yield ()
        for place, one in enumerate(rest[0][: total + 1] if rest else ()):
            yield from ((one, *others) for others in of_sum(total - place, rest[1:]))

    for total in range(1 + sum(len(options) - 1 for options in choices)):
        yield from of_sum(total, choices)
