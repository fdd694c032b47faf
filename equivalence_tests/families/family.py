"""A family of models as data: what their configuration says in our words, and which weight goes where."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from scratch.validation import ArgumentValueError

__all__ = ["DoesNotFitError", "Family", "Rule", "from_theirs", "in_our_names", "in_their_names", "into_theirs"]


class DoesNotFitError(ArgumentValueError):
    """A model holds or asks for something that ours does not have."""


@dataclass(frozen=True)
class Rule:
    """Where a weight goes. A ``*`` in the names stands for the number of the layer.

    Args:
        ours: Our name.
        theirs: Their name, or several that stand below one another in ours.
        transposed: Whether theirs is (in, out), as in GPT-2's Conv1D.
        offset: What ours has more: 1 where they keep gains as the difference from 1.
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class Family:
    """Models that differ in sizes and options only.

    Args:
        name: As people call it.
        build: Builds ours from a package and the settings.
        settings: Reads a configuration of theirs: what ``build`` takes by name.
        rules: Where each weight goes.
        must_be: Values of their configuration that ours can be built for; what differs is refused by name.
    """

    name: str
    build: Callable[..., nn.Module]
    settings: Callable[[Any], dict[str, Any]]
    rules: tuple[Rule, ...]
    must_be: Mapping[str, Any] = field(default_factory=dict)


def from_theirs(family: Family, theirs: nn.Module, package: Any) -> nn.Module:
    """Build our model for one of theirs, with its weights.

    Args:
        family: What it belongs to.
        theirs: The model of ``transformers``.
        package: ``scratch`` or ``builtin``.

    Returns:
        Our model, in the dtype and on the device of theirs.

    Raises:
        DoesNotFitError: If its configuration asks for what ours does not have, or a weight has no place: a ValueError
            that lists the names.
    """
    config: Any = theirs.config
    unlike = [
        f"{name}={found!r} (only {wanted!r})"
        for name, wanted in family.must_be.items()
        if (found := getattr(config, name, wanted)) != wanted
    ]
    if unlike:
        raise DoesNotFitError(f"{family.name} with {', '.join(unlike)} does not fit")
    first = next(theirs.parameters())
    ours = family.build(package, **family.settings(config)).to(first.device, first.dtype)
    _copy(in_our_names(family, dict(theirs.named_parameters())), ours, family)
    return ours


def into_theirs(family: Family, ours: nn.Module, theirs: nn.Module) -> None:
    """Put the weights of our model into one of theirs.

    Args:
        family: What it belongs to.
        ours: Our model.
        theirs: Theirs, whose weights are overwritten.

    Raises:
        DoesNotFitError: If a weight of either has no place: a ValueError that lists the names.
    """
    _copy(in_their_names(family, dict(ours.named_parameters())), theirs, family)


def in_our_names(family: Family, theirs: Mapping[str, Tensor], *, gradients: bool = False) -> dict[str, Tensor]:
    """Give their tensors under our names.

    Args:
        family: What they belong to.
        theirs: Weights or gradients by their names.
        gradients: Whether they are gradients, which have no offset.

    Returns:
        As many as the rules make of them.

    Raises:
        DoesNotFitError: If a name stands in no rule.
    """
    converted = {}
    for rule, number in _matches(family, theirs, lambda rule: rule.theirs):
        parts = [theirs[_numbered(name, number)] for name in rule.theirs]
        x = torch.cat([part.mT if rule.transposed and part.dim() > 1 else part for part in parts])
        converted[_numbered(rule.ours, number)] = x if gradients else x + rule.offset
    return converted


def in_their_names(family: Family, ours: Mapping[str, Tensor], *, gradients: bool = False) -> dict[str, Tensor]:
    """Give our tensors under their names: the inverse of ``in_our_names``.

    Args:
        family: What they belong to.
        ours: Weights or gradients by our names.
        gradients: Whether they are gradients, which have no offset.

    Returns:
        As many as the rules make of them.

    Raises:
        DoesNotFitError: If a name stands in no rule.
    """
    converted = {}
    for rule, number in _matches(family, ours, lambda rule: (rule.ours,)):
        x = ours[_numbered(rule.ours, number)]
        x = x if gradients else x - rule.offset
        for name, part in zip(rule.theirs, x.chunk(len(rule.theirs)), strict=True):
            converted[_numbered(name, number)] = part.mT if rule.transposed and part.dim() > 1 else part
    return converted


def _matches(
    family: Family, tensors: Mapping[str, Tensor], side: Callable[[Rule], tuple[str, ...]]
) -> Iterator[tuple[Rule, str]]:
    """Give each rule with each number of a layer for which all its names are there, and account for every name."""
    left_over = set(tensors)
    for rule in family.rules:
        pattern = re.escape(side(rule)[0]).replace(r"\*", r"(\d+)")
        for found in filter(None, (re.fullmatch(pattern, name) for name in tensors)):
            number = found[1] if found.groups() else ""
            names = {_numbered(name, number) for name in side(rule)}
            if names <= tensors.keys():
                left_over -= names
                yield rule, number
    if left_over:
        raise DoesNotFitError(f"no rule of {family.name} says where to put {', '.join(sorted(left_over))}")


def _numbered(name: str, number: str) -> str:
    return name.replace("*", number)


def _copy(values: Mapping[str, Tensor], target: nn.Module, family: Family) -> None:
    parameters = dict(target.named_parameters())
    problems = [f"{name} is missing" for name in parameters if name not in values]
    problems += [f"{name} has no place" for name in values if name not in parameters]
    problems += [
        f"{name} has shape {tuple(x.shape)} instead of {tuple(parameters[name].shape)}"
        for name, x in values.items()
        if name in parameters and x.shape != parameters[name].shape
    ]
    if problems:
        raise DoesNotFitError(f"the weights of {family.name} do not fit, nothing was copied: {'; '.join(problems)}")
    with torch.no_grad():
        for name, x in values.items():
            parameters[name].copy_(x)
