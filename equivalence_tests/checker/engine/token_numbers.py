"""Try optional arguments that number tokens: position ids, an offset of positions, or ids of packed sequences."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.engine.visibility import probed
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


def numbers_exercised(trial: Trial, name: str, beside: Beside = lambda _: {}) -> Exercise | None:
    """Call the code with numbers for such an argument, and say whether it does what its name says.

    Args:
        trial: A way to call it that was judged, without the argument.
        name: The argument.
        beside: Gives other arguments for these inputs, such as the tables that positions are looked up in.

    Returns:
        What was seen; None if its name promises none of these, or if it takes something else.
    """
    if not trial.plan.self_attention or trial.plan.positional:
        return None
    inputs, counted = trial.inputs(LENGTH, LENGTH), torch.arange(LENGTH)
    tables = beside(inputs)

    def output(given: Any) -> Tensor | None:
        return attempt(partial(trial.output, inputs, {**tables, name: given}))

    plain = attempt(partial(trial.output, inputs, tables))
    if plain is not None and POSITIONS.search(name):
        for laid_out in (counted.expand(len(inputs.query), -1).clone(), counted):
            given, others = output(laid_out), output(laid_out.flip(-1))
            if given is not None and others is not None:
                return _positions(name, plain, given, others)
    if plain is not None and OFFSET.search(name):
        later = output(LATER)  # where all tokens stand later by the same number, their distances are as before
        if later is None or not near(later, plain, MEASURED):
            return None
        same = torch.equal(later, plain)
        words = (
            f"{LATER} gives the same as 0, to the last bit",
            f"tokens that begin at {LATER} give what those from 0 on give",
        )
        return Exercise(name, not same, words[not same])
    return _packed(trial, name) if PACKED.search(name) else None


def _positions(name: str, plain: Tensor, given: Tensor, others: Tensor) -> Exercise:
    """Positions 0, 1, 2, ... must give what no positions give, and reversed ones must give something else."""
    if not near(given, plain, MEASURED):
        return Exercise(name, False, "0, 1, 2, ... give something else than no positions do")
    if torch.equal(others, plain):
        return Exercise(name, False, "other positions than 0, 1, 2, ... give the same")
    return Exercise(name, True, "0, 1, 2, ... give what comes out without it")


def _packed(trial: Trial, name: str) -> Exercise | None:
    """With ids of two packed sequences, each token must see its own sequence only; None if nothing ran."""
    numbers = torch.arange(LENGTH) // (LENGTH // 2)
    for ids in (numbers.expand(len(trial.inputs().query), -1).clone(), numbers):
        seen = attempt(partial(probed, trial, LENGTH, {name: ids}))
        if seen is not None:
            plain = probed(trial, LENGTH)
            if torch.equal(seen, plain & (numbers[:, None] == numbers)):
                return Exercise(name, True, "of two sequences in one, each token sees those of its own")
            effect = (
                "has no effect on what is seen" if torch.equal(seen, plain) else "does not keep two sequences apart"
            )
            return Exercise(name, False, f"it {effect}")
    return None
