"""Two things that hide keys, given in one call: what either hides must stay hidden."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.ran import operations_of, unused_fill
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.visibility import probed
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.masking import draw_masks
from equivalence_tests.checker.reach.plans import causal_switches
from equivalence_tests.checker.reach.state import ask

TOKENS = 5
CLAIM = f"tokens changed one at a time, {TOKENS} tokens: given alone, each of the two hides its keys"
PATTERNS = ("keys", "lengths", "shared", "full")  # of masks that hide keys


@dataclass(frozen=True)
class _Hiding:
    """An argument that hides keys.

    Args:
        name: The argument.
        given: What it is given.
        may: Who may look at whom then, (b, q, k) bool.
        stands_for: Whether it can hide the future as well, and so may take the place of a causal switch.
    """

    name: str
    given: Any
    may: Tensor
    stands_for: bool


def hidden_together(situations: Sequence[Situation]) -> list[Departure]:
    """Give the masks that were understood, and a causal switch, two at a time.

    Args:
        situations: The same code, called with each of its masks.

    Returns:
        What one of two hides alone, and no longer beside the other.
    """
    plan = situations[0].plan
    trial = replace(situations[0].trial, plan=replace(plan, roles=tuple(x for x in plan.roles if x[1] != "mask")))
    if plan.positional or situations[0].subject.adapter.call is not None:
        return []
    for pair in itertools.combinations(_hiding(situations, trial), 2):
        found = ask(partial(_forgotten, trial, *pair)).value  # the code may refuse the two together
        if found is not None:
            kept, lost = found
            words = {"argument": lost.name, "other": kept.name, "claim": CLAIM}
            extra = {one.name: one.given for one in pair}
            unused = unused_fill(operations_of(partial(trial.output, trial.inputs(TOKENS, TOKENS), extra)))
            judgement = situations[0].judgement
            place = unused or (None if judgement is None else judgement.attention.first)
            return [Departure("mask_lost_beside_another", "mask", place, words)]
    return []


def _hiding(situations: Sequence[Situation], trial: Trial) -> Iterator[_Hiding]:
    """List the arguments that hide keys, each with another pattern."""
    sizes, causal = trial.sizes, torch.ones(TOKENS, TOKENS).tril().bool()
    for place, one in enumerate(situations):
        form = one.understood
        if form is not None and form.pattern in PATTERNS and not form.held:
            may = draw_masks(form.pattern, sizes.batch, TOKENS, TOKENS, seed=3 + place)
            given = form.build(may, sizes.num_heads, trial.dtype)
            yield _Hiding(one.plan.mask_parameter, given, may, form.pattern in ("shared", "full"))
    for name in causal_switches(trial) if trial.plan.self_attention else ():
        yield _Hiding(name, True, causal.expand(sizes.batch, -1, -1), False)


def _forgotten(trial: Trial, first: _Hiding, second: _Hiding) -> tuple[_Hiding, _Hiding] | None:
    """Say which of two is kept, and which is lost beside it; None where both are kept, or one does nothing alone."""
    if first.stands_for and second.given is True:
        return None
    allowed = first.may & second.may
    asked = allowed.any(-1, keepdim=True) & ~torch.eye(TOKENS, dtype=torch.bool)  # a query's own token is always there
    alone = ((one, probed(trial, TOKENS, {one.name: one.given})) for one in (first, second))
    if any(not torch.equal(seen & asked, one.may & asked) for one, seen in alone):
        return None
    both = probed(trial, TOKENS, {one.name: one.given for one in (first, second)}) & asked
    pairs = ((first, second), (second, first))
    return next(((kept, lost) for kept, lost in pairs if bool((both & ~lost.may).any())), None)
