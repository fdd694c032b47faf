"""What the arguments of a call say about its masks: which keys each query may look at."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.scores_table import future_of, ranks_of, with_some
from equivalence_tests.checker.engine.contracts.weights import read_weights
from equivalence_tests.checker.engine.judgement import Expectation
from equivalence_tests.checker.engine.names import Attention, Part
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import HIDING
from equivalence_tests.checker.engine.vocabulary import ELEMENTWISE

ALL = slice(None)
# How a mask may stand over (samples, heads, queries, keys), by the number of its axes.
AXES: dict[int, list[tuple[slice | None, ...]]] = {
    2: [(ALL, None, None), (None, None)],
    3: [(ALL, None), (None,)],
    4: [(ALL,)],
}
OF_PADDING = "key_padding_mask"  # True hides, as its name says


class GivenMasks:
    """Reads the masks that a call is given, and what a module, or a function in it, says with ``is_causal``."""

    def __init__(self, call: Call) -> None:
        given = _arguments(call)
        masks = ((name, x) for name, x in given.items() if "mask" in name)
        self.masks = [(mask, name == OF_PADDING) for name, mask in masks if isinstance(mask, Tensor)]
        causal = call.kwargs.get("is_causal", getattr(call.module, "is_causal", given.get("is_causal")))
        self.causal = causal if isinstance(causal, bool) else None

    def __call__(self, attention: Attention) -> dict[int, Expectation]:
        """Give for each part what some mask of the call allows and the code lets be seen or hidden otherwise."""
        read = (part for part in attention.parts if part.contexts[0].source is not None)
        known = ((part.number, self._broken_rule(attention, part)) for part in read)
        return {number: Expectation(may, bool(self.masks)) for number, may in known if may is not None}

    def _broken_rule(self, attention: Attention, part: Part) -> Tensor | None:
        """Which keys may be seen, where the code lets others be seen; None where a rule is kept, or none is given."""
        rules = [may for mask, hides in self.masks for may in _readings(mask, part, hides)]
        unasked = any(step.unasked for step, _, _ in part.steps(attention.run))
        rules = rules or list(self._by_what_is_said(part, unasked))
        if not rules:
            return None
        model = read_weights(attention.run, part, part.contexts[0])
        live = [~model.weights.isnan() & with_some(may, model.rows) for may in rules]
        hidden = model.hidden | model.replaced
        seen = [int((~may & ~hidden & mine).sum()) for may, mine in zip(rules, live, strict=True)]
        place = seen.index(min(seen))
        closest, own = rules[place], hidden & rules[place] & live[place]
        if model.kind != "softmax":
            return None
        if min(seen) == 0:
            future = future_of(part) & closest & live[place]
            too_much = unasked or (self.causal is False and torch.equal(own, future))
            return closest if too_much and bool(own.any()) else None
        window = _alike_for_all(part, own) and bool(with_some(closest & ~own, model.rows)[live[place]].all())
        return closest & ~own if window else closest

    def _by_what_is_said(self, part: Part, unasked: bool) -> Iterator[Tensor]:
        _, _, queries, keys = ranks_of(part)
        if (not self.masks or self.causal is False) and (unasked or (queries == keys > 1 and self.causal is not None)):
            future = future_of(part)
            yield ~future if self.causal and not unasked else torch.ones_like(future)


def _arguments(call: Call) -> dict[str, Any]:
    """The arguments by name, those that are left out too."""
    forward = call.function.forward if isinstance(call.function, nn.Module) else call.function
    try:
        bound = inspect.signature(forward).bind(*call.args, **call.kwargs)
    except (TypeError, ValueError):
        return call.kwargs
    bound.apply_defaults()
    return {**bound.arguments, **call.kwargs}


def _readings(mask: Tensor, part: Part, hides: bool) -> Iterator[Tensor]:
    """What a mask allows, flat as the scores are; in each way in which it can be read."""
    for laid in _laid_out(mask, part):
        if laid.dtype == torch.bool:
            yield from (~laid,) if hides else (laid, ~laid)
        elif bool(((laid == 0) | (laid == 1)).all()) and bool(laid.any()):
            yield (laid == 0) == hides  # of numbers, 1 is what is there
        elif laid.is_floating_point() and bool((laid < -HIDING).any()):
            yield laid >= -HIDING


def _laid_out(mask: Tensor, part: Part) -> Iterator[Tensor]:
    """A mask at the place of each score, for each meaning that its axes can have."""
    shape = part.product.operation.outputs[0].value.shape
    if mask.dim() not in AXES or mask.size(-1) < shape[-1] or 0 in mask.shape:
        return
    for axes in AXES[mask.dim()]:
        whole = mask[axes][..., : shape[-1]].detach()
        heads = shape[0] // len(whole) if len(shape) == 3 else 1
        scores = (len(whole), heads, *shape[1:]) if len(shape) == 3 else shape
        if len(shape) == 3 and len(whole) * heads != shape[0]:
            continue
        with contextlib.suppress(RuntimeError):  # sizes that are others
            yield whole.expand(scores).reshape(-1)


def _alike_for_all(part: Part, own: Tensor) -> bool:
    """Whether what a code hides beyond a mask is the same for all samples: a window, or the future."""
    query, key, queries, keys = ranks_of(part)
    place = query * keys + key
    hidden, scores = (torch.bincount(where, minlength=queries * keys) for where in (place[own], place))
    return bool(((hidden == 0) | (hidden == scores)).all())


def further_axes(attention: Attention) -> torch.Size | None:
    """Give the shape of scores that get more axes from a mask that they meet; None where none do."""
    for part in attention.parts:
        for step, codes, _ in list(part.steps(attention.run))[1:]:
            taken = [own.dim() for _, own in attention.run.names.taken(step) if part.number in sources_in(own)]
            if step.name in ELEMENTWISE and max(taken, default=codes.dim()) < codes.dim():
                return codes.shape
    return None
