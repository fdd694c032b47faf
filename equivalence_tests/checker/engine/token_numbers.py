"""Optional arguments that number the tokens: their positions, or the sequences that are packed into one."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reporting.findings import Exercise

POSITIONS = re.compile(r"^(input_|token_)?pos(ition)?s?(_?(ids?|idx|indices))?$", re.IGNORECASE)
PACKED = re.compile(
    r"(seg(ment)?|doc(ument)?|seq(uence)?|sample|pack(ed)?|example)s?_?(ids?|idx|indices)$", re.IGNORECASE
)
OFFSET = re.compile(r"(^|_)offset$|^start_?pos(ition)?$", re.IGNORECASE)
LENGTH, LATER = 6, 3
Beside = Callable[[Inputs], dict[str, Any]]


def no_others(inputs: Inputs) -> dict[str, Any]:
    """Give no other arguments."""
    return {}


def numbers_exercised(trial: Trial, name: str, beside: Beside = no_others) -> Exercise | None:
    """Hand over the numbers that such an argument takes.

    Args:
        trial: A way to call it that was judged, without the argument.
        name: The argument.
        beside: Gives other arguments for these inputs, such as the tables that positions are looked up in.

    Returns:
        Whether it does what its name says; None if that is something else, or if it takes no such numbers.
    """
    if not trial.plan.self_attention or trial.plan.positional:
        return None
    if POSITIONS.search(name):
        return _positions(trial, name, beside)
    if OFFSET.search(name):
        return _offset(trial, name)
    return _packed(trial, name) if PACKED.search(name) else None


def _positions(trial: Trial, name: str, beside: Beside) -> Exercise | None:
    """The positions that are counted where none are given are 0, 1, 2, ..."""
    inputs = trial.inputs(LENGTH, LENGTH)
    tables = beside(inputs)
    plain = trial.output(inputs, tables)
    for counted in _for_each_layout(torch.arange(LENGTH), len(inputs.query)):
        given = attempt(partial(trial.output, inputs, {**tables, name: counted}))
        others = attempt(partial(trial.output, inputs, {**tables, name: counted.flip(-1)}))
        if given is None or others is None:
            continue
        if not near(given, plain, MEASURED):
            return Exercise(name, False, "0, 1, 2, ... give something else than no positions do")
        if torch.equal(others, plain):
            return Exercise(name, False, "other positions than 0, 1, 2, ... give the same")
        return Exercise(name, True, "0, 1, 2, ... give what comes out without it")
    return None


def _offset(trial: Trial, name: str) -> Exercise | None:
    """Where all tokens stand later by the same number, their distances are as before."""
    inputs = trial.inputs(LENGTH, LENGTH)
    plain, later = trial.output(inputs), attempt(partial(trial.output, inputs, {name: LATER}))
    if later is None or not near(later, plain, MEASURED):
        return None
    if torch.equal(later, plain):
        return Exercise(name, False, f"{LATER} gives the same as 0, to the last bit")
    return Exercise(name, True, f"tokens that begin at {LATER} give what those from 0 on give")


def _packed(trial: Trial, name: str) -> Exercise | None:
    """Of two sequences in one, each token sees those of its own."""
    numbers = torch.arange(LENGTH) // (LENGTH // 2)
    alone = numbers[:, None] == numbers
    for ids in _for_each_layout(numbers, len(trial.inputs(LENGTH, LENGTH).query)):
        seen = attempt(partial(trial.reach, LENGTH, {name: ids}))
        if seen is None:
            continue
        plain = trial.reach(LENGTH, {})
        if torch.equal(seen, plain & alone):
            return Exercise(name, True, "of two sequences in one, each token sees those of its own")
        effect = "has no effect on what is seen" if torch.equal(seen, plain) else "does not keep two sequences apart"
        return Exercise(name, False, f"it {effect}")
    return None


def _for_each_layout(numbers: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """The same for each sample, and once for all."""
    return numbers.expand(batch, -1).clone(), numbers
