"""Code that returns the weights of an attention alone: what they make of the tokens that they weigh is checked."""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reach.tracing import tensors_in

TOKENS = 3  # how many axes tokens have: batch, length, features
ALONE = "it returns the weights alone; they were compared by what they make of the tokens that they weigh"


def averaging(subject: Subject) -> Subject | None:
    """Give code with the product of its weights and the tokens behind it; None where that cannot be."""
    if sum(p.default is p.empty for p in parameters_of(subject.function)) < 2:
        return None
    if subject.module is None:
        return replace(subject, function=functools.wraps(subject.function)(_averaging(subject.function)))
    module = attempt(functools.partial(copy.deepcopy, subject.module))
    if module is None:  # some modules cannot be copied
        return None
    forward: Callable[..., Any] = type(module).forward
    module.forward = MethodType(functools.wraps(forward)(_averaging(forward)), module)
    return replace(subject, function=module)


def _averaging(weigh: Callable[..., Any]) -> Callable[..., Tensor]:
    known = False  # what was once seen to give weights may give others in training, or where a mask is wrong

    def averaged(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal known
        (weights,) = tensors_in((weigh(*args, **kwargs),))
        if not known and not _are_weights(weights):
            raise ValueError("what it returns are not weights")
        given = [x for x in args if not isinstance(x, nn.Module)]
        average = next(_averages(weights, [*tensors_in((given, kwargs))]))
        known = True
        return average

    return averaged


def _are_weights(x: Tensor) -> bool:
    """Whether numbers are none below zero, and add up to one along some axis, be it the wrong one."""
    sums = (x.sum(axis) for axis in range(x.dim()) if x.size(axis) > 1)
    return not bool((x < 0).any()) and any(near(one, torch.ones_like(one), MEASURED) for one in sums)


def _averages(weights: Tensor, given: list[Tensor]) -> Iterator[Tensor]:
    """Give the averages of all tokens that the weights may be of, of the last that were handed over first."""
    weights = weights[:, None] if weights.dim() == 2 else weights.mT if weights.size(-1) == 1 else weights
    batch, keys, lengths = len(weights), weights.size(-1), {n for x in given if x.dim() == TOKENS for n in x.shape[:2]}
    if weights.dim() == TOKENS + 1 and weights.size(1) in lengths and weights.size(2) not in lengths:
        weights = weights.transpose(1, 2)  # heads behind the queries
    for x in given[::-1]:
        if x.is_floating_point() and x.dim() == TOKENS and sorted((batch, keys)) == sorted(x.shape[:2]):
            tokens = x if x.shape[:2] == (batch, keys) else x.transpose(0, 1)
            if weights.dim() == TOKENS:
                yield weights @ tokens
            heads = tokens.unflatten(-1, (weights.size(1), -1)).transpose(1, 2)
            yield (weights @ heads).transpose(1, 2).flatten(2)
