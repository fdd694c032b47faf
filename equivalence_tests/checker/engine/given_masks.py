"""What the arguments of a call say about its masks: which keys each query may look at."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.anchors import Attention, Part
from equivalence_tests.checker.engine.contracts.scores import Expectation
from equivalence_tests.checker.engine.contracts.scores_table import future_of, ranks_of, with_some
from equivalence_tests.checker.engine.contracts.weights import read_weights
from equivalence_tests.checker.engine.intervening import ExpectedFor
from equivalence_tests.checker.engine.running import Call

__all__ = ["GivenMasks"]

HIDES = -1e3  # what is added to a score below this leaves nothing of it


class GivenMasks(ExpectedFor):
    """Reads the masks among the arguments of a call, and what a module says of itself with ``is_causal``.

    Args:
        call: The call.
    """

    def __init__(self, call: Call) -> None:
        self.masks = [mask for name, mask in _named_arguments(call) if "mask" in name and isinstance(mask, Tensor)]
        causal = call.kwargs.get("is_causal", getattr(call.module, "is_causal", None))
        self.causal = causal if isinstance(causal, bool) else None

    def of(self, attention: Attention) -> dict[int, Expectation]:
        """Give for each part what some mask of the call allows and the code lets be seen or hidden otherwise."""
        found = {}
        for part in attention.parts:
            may = self._broken_rule(attention, part) if part.contexts and part.contexts[0].source else None
            if may is not None:
                found[part.number] = Expectation(may, bool(self.masks))
        return found

    def _broken_rule(self, attention: Attention, part: Part) -> Tensor | None:
        """Which keys may be seen, where the code lets others be seen; None where a rule is kept, or none is given."""
        rules = [may for mask in self.masks for may in _readings(mask, part)] or list(self._by_the_module(part))
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
            return closest if self.causal is False and bool(future.any()) and torch.equal(own, future) else None
        return closest & ~own if _alike_for_all(part, own) else closest

    def _by_the_module(self, part: Part) -> Iterator[Tensor]:
        _, _, queries, keys = ranks_of(part)
        if not self.masks and queries == keys > 1 and self.causal is not None:
            future = future_of(part)
            yield ~future if self.causal else torch.ones_like(future)


def _named_arguments(call: Call) -> Iterator[tuple[str, Any]]:
    yield from call.kwargs.items()
    forward = call.function.forward if isinstance(call.function, nn.Module) else call.function
    try:
        names = [name for name, p in inspect.signature(forward).parameters.items() if p.kind != p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        return
    yield from zip(names, call.args, strict=False)


def _readings(mask: Tensor, part: Part) -> Iterator[Tensor]:
    """What a mask allows, flat as the scores are; in each way in which it can be meant."""
    laid = _laid_out(mask, part)
    if laid is None:
        return
    if laid.dtype == torch.bool:
        yield from (laid, ~laid)
    elif laid.is_floating_point() and bool((laid < HIDES).any()):
        yield laid >= HIDES


def _laid_out(mask: Tensor, part: Part) -> Tensor | None:
    """A mask at the place of each score; None where its shape is none of scores."""
    shape = part.product.operation.outputs[0].value.shape
    if mask.dim() == 4 and len(shape) == 3 and mask.size(0) > 0 and shape[0] % mask.size(0) == 0:
        heads = shape[0] // mask.size(0)
        if mask.size(1) not in (1, heads):
            return None
        mask = mask.expand(-1, heads, -1, -1).flatten(0, 1)
    elif mask.dim() == 3 and len(shape) == 4:
        mask = mask[:, None]
    elif mask.dim() == 2 and len(shape) == 4 and mask.size(0) == shape[0] != shape[2]:
        mask = mask[:, None, None]
    if mask.dim() != len(shape) or mask.size(-1) < shape[-1]:
        return None
    try:
        return mask[..., : shape[-1]].detach().expand(shape).reshape(-1)
    except RuntimeError:
        return None


def _alike_for_all(part: Part, own: Tensor) -> bool:
    """Whether what a code hides beyond a mask is the same for all samples: a window, or the future."""
    query, key, queries, keys = ranks_of(part)
    counts = torch.zeros(2, queries * keys, dtype=torch.float64)
    place = query * keys + key
    counts[0].index_add_(0, place, own.double())
    counts[1].index_add_(0, place, torch.ones_like(own, dtype=torch.float64))
    return bool(((counts[0] == 0) | (counts[0] == counts[1])).all())
