"""Two masks that are handed over together, or one beside a causal switch: what each hides alone must stay hidden."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.ran import operations_of, unused_fill
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.visibility import probed
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.masking import draw_masks
from equivalence_tests.checker.reach.state import ask

TOKENS = 5
TOGETHER = f"tokens changed one at a time, {TOKENS} tokens: given alone, each of the two hides its keys"
HIDE_KEYS = ("keys", "lengths", "shared", "full")  # patterns of masks


class _Hiding(NamedTuple):
    """An argument that hides keys: its name, what it is given, and who may look at whom then, (b, q, k) bool."""

    name: str
    given: Any
    may: Tensor


def hidden_together(situations: Sequence[Situation]) -> list[Departure]:
    """Give the masks that were understood, and a causal switch, two at a time: what one hides must stay hidden."""
    first, plan = situations[0], situations[0].plan
    trial = replace(first.trial, plan=replace(plan, roles=tuple(x for x in plan.roles if x[1] != "mask")))
    if plan.positional or first.subject.adapter.call is not None:
        return []
    for pair in itertools.combinations(_hiding(situations, trial), 2):
        lost = ask(partial(_lost, trial, *pair)).value  # the code may refuse the two together
        if lost is not None:
            facts = {"argument": lost.name, "other": pair[lost is pair[0]].name, "claim": TOGETHER}
            extra = {one.name: one.given for one in pair}
            unused = unused_fill(operations_of(partial(trial.output, trial.inputs(TOKENS, TOKENS), extra)))
            return [Departure("mask_lost_beside_another", "mask", unused or first.first, facts)]
    return []


def _hiding(situations: Sequence[Situation], trial: Trial) -> Iterator[_Hiding]:
    """List the arguments that hide keys, each with another pattern."""
    sizes, causal = trial.sizes, torch.ones(TOKENS, TOKENS).tril().bool()
    for place, one in enumerate(situations):
        form = one.understood
        if form is not None and form.pattern in HIDE_KEYS and not form.held:
            may = draw_masks(form.pattern, sizes.batch, TOKENS, TOKENS, seed=3 + place)
            yield _Hiding(one.plan.mask_parameter, form.build(may, sizes.num_heads, trial.dtype), may)
    for name in trial.causal_switches if trial.plan.self_attention else ():
        yield _Hiding(name, True, causal.expand(sizes.batch, -1, -1))


def _lost(trial: Trial, *pair: _Hiding) -> _Hiding | None:
    """Say which of two is lost beside the other; None where both are kept, or one does nothing alone."""
    first, second = pair
    if second.given is True and bool((first.may != first.may[:, :1]).any()):  # it may stand for a causal mask
        return None
    asked = (first.may & second.may).any(-1, keepdim=True)
    asked = asked & ~torch.eye(TOKENS, dtype=torch.bool)  # a query's own token is always there
    alone = ((one.may, probed(trial, TOKENS, {one.name: one.given})) for one in pair)
    if any(not torch.equal(seen & asked, may & asked) for may, seen in alone):
        return None
    both = probed(trial, TOKENS, {one.name: one.given for one in pair}) & asked
    return next((one for one in (second, first) if bool((both & ~one.may).any())), None)
