"""One call of an attention function with one thing wrong in it: what a function that makes the mistake would give."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.models.calls import Call

__all__ = ["Problem", "mistakes"]

HIDDEN = -1e30
Told = tuple[str, Tensor]


@dataclass
class Problem:
    """One call, with what the model's own attention was given and gave.

    Args:
        own: The call with the model's own attention.
        given: The call with the function that is judged: the same queries, keys and values, but for padding.
    """

    own: Call
    given: Call

    def __post_init__(self) -> None:
        self.q, key, value = self.given.inputs
        self.key, self.value = key, value
        self.group = self.q.shape[1] // key.shape[1]
        self.k, self.v = (x.repeat_interleave(self.group, 1) for x in (key, value))
        options = self.own.options
        self.default = self.q.shape[-1] ** -0.5
        scale = options.get("scaling")
        self.scale = self.default if scale is None else float(scale)
        self.cap: float | None = options.get("softcap")
        self.window: int | None = options.get("sliding_window")
        self.sinks: Tensor | None = options.get("s_aux")
        bias: Tensor | None = options.get("position_bias")
        self.bias: Tensor = torch.zeros(()) if bias is None else bias.detach()
        self.may = self._visible()

    def _visible(self) -> Tensor:
        """Say who sees whom, (batch, 1, query, key); what a mask adds to visible scores goes to the bias."""
        queries, keys, mask = self.q.shape[2], self.k.shape[2], self.own.mask
        if not isinstance(mask, Tensor):
            return torch.ones(self.q.shape[0], 1, queries, keys, dtype=torch.bool)
        mask = mask[..., :keys].expand(self.q.shape[0], -1, queries, keys)
        seen = mask if mask.dtype == torch.bool else mask > HIDDEN
        if mask.dtype != torch.bool:
            self.bias = self.bias + mask.masked_fill(~seen, 0.0)
        return seen

    @property
    def right(self) -> Tensor:
        """What the model's own attention gives, (batch, query, heads, features)."""
        return self.own.output

    def output(self, may: Tensor | None = None, **changed: Any) -> Tensor:
        """Give the output, with other visible keys or something else changed; NaN where a query sees none."""
        p: dict[str, Any] = {
            "scale": self.scale,
            "cap": self.cap,
            "sinks": self.sinks,
            "bias": self.bias,
            "k": self.k,
            "v": self.v,
        }
        p |= changed
        scores = self.q @ p["k"].mT * p["scale"]
        if p["cap"] is not None:
            scores = p["cap"] * (scores / p["cap"]).tanh()
        if "added" in p:
            scores = scores + p["added"]
        else:
            scores = (scores + p["bias"]).masked_fill(~(self.may if may is None else may), p.get("hidden", -torch.inf))
        if p["sinks"] is not None:
            sinks = p["sinks"].detach().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sinks.to(scores)], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(p.get("axis", -1))
        return (weights @ p["v"]).transpose(1, 2)


def mistakes(p: Problem) -> Iterator[Told]:
    """Name every mistake that can be told by its numbers, each with what it gives."""
    yield from _scores(p)
    yield from _visible(p)
    yield from _masks(p)
    yield from _layouts(p)
    yield from _several(p)


def _scores(p: Problem) -> Iterator[Told]:
    if p.scale != 1:
        yield "scaling is ignored: the scores are not scaled", p.output(scale=1.0)
        yield "the scores are scaled twice", p.output(scale=p.scale**2)
    if abs(p.scale / p.default - 1) > 1e-9:
        yield "scaling is ignored: the scores are divided by the root of head_dim", p.output(scale=p.default)
    if p.cap is not None:
        yield "softcap is ignored", p.output(cap=None)
        yield "the scores are capped before they are scaled", p.output(cap=p.cap / p.scale)
    if p.sinks is not None:
        yield "s_aux is ignored: the sinks take no weight", p.output(sinks=None)
    if p.bias.abs().max() > 0:
        yield "position_bias is ignored", p.output(bias=torch.zeros(()))
        yield "position_bias is scaled like the scores", p.output(bias=p.bias * p.scale)
        yield "position_bias is added twice", p.output(bias=p.bias * 2)
    least = torch.finfo(p.q.dtype).min
    yield "the softmax runs over the queries", p.output(axis=-2, sinks=None, hidden=least)


def _several(p: Problem) -> Iterator[Told]:
    """Ignore two or more of what a function is given beside its mask."""
    without: dict[str, tuple[str, Any]] = {"scaling": ("scale", 1.0)} if p.scale != 1 else {}
    without |= {"softcap": ("cap", None)} if p.cap is not None else {}
    without |= {"s_aux": ("sinks", None)} if p.sinks is not None else {}
    without |= {"position_bias": ("bias", torch.zeros(()))} if p.bias.abs().max() > 0 else {}
    for names in (names for count in (2, 3) for names in itertools.combinations(without, count)):
        yield f"{' and '.join(names)} are ignored", p.output(**dict(without[name] for name in names))


def _visible(p: Problem) -> Iterator[Told]:
    """Change who sees whom."""
    batch, _, queries, keys = p.may.shape
    everything, real = torch.ones_like(p.may), p.may.any(2, keepdim=True)
    last = int(real.nonzero()[:, -1].max()) + 1 if p.may.any() else keys
    start = max(last - queries, 0)
    causal, unwindowed = everything.tril(start), _no_window(p, everything, start)
    if p.window is not None and last > p.window:
        yield "sliding_window is ignored", p.output(unwindowed)
        yield "the window is one key too wide", p.output(unwindowed & _inside(p, p.window + 1, start))
        yield "the window is one key too narrow", p.output(p.may & _inside(p, p.window - 1, start))
    yield "the mask is ignored" + (" where there is one query" if queries == 1 else ""), p.output(everything)
    yield "the mask is read the other way round", p.output(~p.may)
    yield from _causality(p, real, start)
    if last < keys:
        yield from _empty_slots(p, last)
    if not torch.equal(unwindowed, causal):
        yield "only the causal mask is applied: padding, or where packed rows begin, is ignored", p.output(causal)
    if not torch.equal(real, real.flip(-1)) and last == keys:
        for seen in (causal, everything):
            yield "the padding is looked for at the other end", p.output(real.flip(-1) & seen)
    yield "every sample takes the mask of the first", p.output(p.may[:1].expand(batch, -1, -1, -1))


def _causality(p: Problem, real: Tensor, start: int) -> Iterator[Told]:
    """Change which later keys are hidden, of those that are real, where the first query stands at ``start``."""
    everything = torch.ones_like(p.may)
    if p.may.shape[2] > 1:
        yield "the future is not hidden", p.output(real & everything)
        yield "a query does not see its own key", p.output(p.may & everything.tril(start - 1))
        yield "a query sees one key ahead", p.output(real & everything.tril(start + 1))
    if bool((p.may & ~everything.tril(start)).any()):
        yield "a causal mask is applied where the model has none", p.output(p.may & everything.tril())
    if start > 0:
        words = "the causal mask is aligned at the upper left, though keys are in the cache already"
        yield words, p.output(everything.tril())
        yield words, p.output(real & everything.tril())


def _empty_slots(p: Problem, last: int) -> Iterator[Told]:
    """Let the slots of a static cache be seen that hold no key, those from ``last`` on."""
    queries, keys = p.may.shape[2:]
    everything = torch.ones_like(p.may)
    yield "empty slots of the static cache are attended", p.output(p.may | (torch.arange(keys) >= last))
    yield "empty slots of the static cache are attended", p.output(everything)
    yield "the causal mask is aligned at the lower right of empty slots", p.output(everything.tril(keys - queries))


def _inside(p: Problem, window: int, start: int) -> Tensor:
    distance = torch.arange(p.may.shape[2])[:, None] + start - torch.arange(p.may.shape[3])
    return distance.abs() < window


def _no_window(p: Problem, everything: Tensor, start: int) -> Tensor:
    """Take the window out of what is visible: a key that any query sees is no padding."""
    causal = everything.tril(start)
    if p.window is None or p.may.shape[3] <= p.window:
        return p.may
    two_ways = bool((p.may & ~causal).any())
    return p.may.any(2, keepdim=True) & (everything if two_ways else causal)


def _masks(p: Problem) -> Iterator[Told]:
    """Do something else with the mask that the function was given."""
    mask = p.given.mask
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return
    mask = mask[..., : p.k.shape[2]]
    if mask.dtype == torch.bool:
        yield "the mask, True where a query may look, is added as numbers", p.output(added=mask.to(p.q.dtype))
        yield "hidden scores are 0, not -inf", p.output(hidden=0.0)
    else:
        yield "the mask is subtracted", p.output(~p.may)
        yield "hidden scores are 0, not -inf", p.output(hidden=0.0)


def _layouts(p: Problem) -> Iterator[Told]:
    if p.group > 1:
        k, v = (x.repeat(1, p.group, 1, 1) for x in (p.key, p.value))
        yield "grouped heads: key heads alternate, not side by side", p.output(k=k, v=v)
        k, v = (x[:, :1].expand(-1, p.q.shape[1], -1, -1) for x in (p.key, p.value))
        yield "grouped heads: every query takes the first key head", p.output(k=k, v=v)
    heads_first = p.right.transpose(1, 2)
    words = "the output is not transposed: it must be (batch, tokens, heads, features)"
    yield words, heads_first
    yield words, heads_first.reshape(p.right.shape)
