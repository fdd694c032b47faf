"""The family: attention with every known mistake as a switch.

``attend`` computes multi-head attention as it should be when ``choices`` is empty. Each entry of ``choices`` puts one
stage wrong in one known way (``mistakes`` says what each is called), or in one of the ways that are mere convention.

Inputs and output are batch first, (b, len, e). Letters: b batch, h heads, l length (q or k), d head_dim.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from equivalence_tests.checker.inner import BASE, normalise, rms_norm, rotate

__all__ = ["Choices", "Inputs", "Projection", "Projections", "Setting", "attend", "attention_weights", "key_heads"]

Choices = Mapping[str, str]
Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Projection:
    """x -> x weightᵀ + bias; no weight means x itself."""

    weight: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor, with_bias: bool = True) -> Tensor:
        """Apply it in the precision of x."""
        if self.weight is None:
            return x
        return F.linear(
            x, self.weight.to(x.dtype), self.bias.to(x.dtype) if with_bias and self.bias is not None else None
        )


@dataclass(frozen=True)
class Projections:
    """The matrices of one attention; output None where the class has none."""

    query: Projection
    key: Projection
    value: Projection
    output: Projection | None
    norms: tuple[Norm, Norm] | None = None  # of queries and of keys
    own_bias: Callable[[int, int], Tensor] | None = None  # of the scores, (h or 1, q, k) for these lengths


@dataclass(frozen=True)
class Inputs:
    """One call: batch-first tensors, and who may look at whom, (b, q, k) bool, or None for everyone."""

    query: Tensor
    key: Tensor
    value: Tensor
    may_attend: Tensor | None = None

    def changed(self, sample: int | slice | None = None, token: int | None = None) -> "Inputs":
        """Change one sample or token of every tensor, each feature by another amount, keeping equal tensors equal."""
        changed: dict[int, Tensor] = {}
        for x in (self.query, self.key, self.value):
            if id(x) not in changed:
                changed[id(x)] = x.clone()
                part = changed[id(x)][sample] if sample is not None else changed[id(x)][:, token]
                part += torch.linspace(0.5, 1.5, x.size(-1), dtype=x.dtype)  # a LayerNorm would take back a constant
        return Inputs(*(changed[id(x)] for x in (self.query, self.key, self.value)))

    def alike(self) -> "Inputs":
        """Put the first token of every tensor in the place of all."""
        return self._each(lambda x: x[:, :1].expand_as(x).clone())

    def reversed(self) -> "Inputs":
        """Put the tokens of every tensor in reverse."""
        return self._each(lambda x: x.flip(1))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """Change every tensor, keeping equal tensors equal."""
        changed = {id(x): change(x) for x in (self.query, self.key, self.value)}
        return Inputs(*(changed[id(x)] for x in (self.query, self.key, self.value)))


@dataclass(frozen=True)
class Setting:
    """What has been found out about the user's class.

    Args:
        num_heads: Number of heads.
        sequence_first: Whether the user's tensors are (len, b, e): wrong reshapes then give other numbers.
        channels_first: Whether they are (b, e, len).
        norm: The LayerNorm inside, called as it is.
        rotary_base: Base of the angles by which positions turn queries and keys.
        key_norm: The one for keys and values, where there are two.
    """

    num_heads: int
    sequence_first: bool = False
    norm: Norm | None = None
    rotary_base: float = BASE
    key_norm: Norm | None = None
    channels_first: bool = False


def attend(setting: Setting, projections: Projections, inputs: Inputs, choices: Choices) -> Tensor:
    """Compute the output, (b, q, e), with these choices."""
    inputs = _reorder_arguments(inputs, choices.get("arguments", "qkv"))
    wrap = choices.get("wrap", "none")
    q, k, v = _project(setting, projections, _normalise_before(setting, inputs, wrap), choices)
    q, k, v = _heads(q, k, v, setting, projections, choices)  # (b, h, l, d)
    if choices.get("split") == "whole":
        q = q * math.sqrt(setting.num_heads)  # the scale is still that of one head
    k, v = (_repeat_heads(x, q.size(1), choices.get("grouped", "interleaved")) for x in (k, v))
    q, k, v = (_attended_axis(x, choices) for x in (q, k, v))
    context = _context(q, k, v, inputs, choices, _bias(projections, q, k))
    merged = _merge(_attended_axis(context, choices), setting, choices.get("merge", "lh"))
    merged = setting.norm(merged) if setting.norm is not None and wrap == "merged_norm" else merged
    output = merged
    if projections.output is not None and choices.get("output") != "skipped":
        output = projections.output(merged, choices.get("output_bias") != "dropped")
    return _wrap(setting, inputs.query, output, wrap)


def attention_weights(setting: Setting, projections: Projections, inputs: Inputs, choices: Choices) -> Tensor:
    """Compute the weights, (b, h, q, k), with these choices."""
    inputs = _reorder_arguments(inputs, choices.get("arguments", "qkv"))
    before = _normalise_before(setting, inputs, choices.get("wrap", "none"))
    q, k, v = _project(setting, projections, before, choices)
    q, k, v = _heads(q, k, v, setting, projections, choices)
    k = _repeat_heads(k, q.size(1), choices.get("grouped", "interleaved"))
    return _weights(q, k, inputs, choices, _bias(projections, q, k))


def _bias(projections: Projections, q: Tensor, k: Tensor) -> Tensor | None:
    own = projections.own_bias
    return None if own is None else own(q.size(-2), k.size(-2)).to(q.dtype)


def _reorder_arguments(inputs: Inputs, order: str) -> Inputs:
    """Give each role the argument that the letters name: "qvk" uses the value as keys."""
    named = {"q": inputs.query, "k": inputs.key, "v": inputs.value}
    return Inputs(named[order[0]], named[order[1]], named[order[2]], inputs.may_attend)


def _normalise_before(setting: Setting, inputs: Inputs, wrap: str) -> Inputs:
    if setting.norm is None or wrap not in PRE_NORM_WRAPS:
        return inputs
    key_norm = setting.key_norm or setting.norm
    query = inputs.query if wrap.endswith("keys_only") else setting.norm(inputs.query)
    if wrap.endswith("query_only"):
        return Inputs(query, inputs.key, inputs.value, inputs.may_attend)
    return Inputs(query, key_norm(inputs.key), key_norm(inputs.value), inputs.may_attend)


def _project(
    setting: Setting, projections: Projections, inputs: Inputs, choices: Choices
) -> tuple[Tensor, Tensor, Tensor]:
    own = {"q": projections.query, "k": projections.key, "v": projections.value, "-": Projection()}
    letters = choices.get("matrices", "qkv")
    rows = (("query", inputs.query), ("key", inputs.key), ("value", inputs.value))
    q, k, v = (
        own[letter](x, choices.get(f"{role}_bias") != "dropped")
        for letter, (role, x) in zip(letters, rows, strict=True)
    )
    return q, k, v


def key_heads(query_width: int, key_width: int, num_heads: int) -> int:
    """Count the heads of keys and values: fewer than those of the queries where groups of them share one.

    >>> key_heads(66, 66, num_heads=6), key_heads(66, 22, num_heads=6)
    (6, 2)
    """
    heads, rest = divmod(key_width * num_heads, max(query_width, 1))
    return heads if heads and not rest and num_heads % heads == 0 else num_heads


def _heads(
    q: Tensor, k: Tensor, v: Tensor, setting: Setting, projections: Projections, choices: Choices
) -> tuple[Tensor, Tensor, Tensor]:
    """Split what is projected, and do what the class does before it scores: normalise, rotate."""
    order, normed, rotary = choices.get("split", "lh"), choices.get("qk_norm", "no"), choices.get("rotary", "no")
    if "3" in order:
        return _mixed_parts(torch.cat((q, k, v), -1), setting, order)
    q, k = normalise(q, k, projections.norms if normed == "width" else None)
    shared = key_heads(q.size(-1), k.size(-1), setting.num_heads)
    q, k, v = (_split(x, n, setting, order) for x, n in ((q, setting.num_heads), (k, shared), (v, shared)))
    q, k = normalise(q, k, {"heads": projections.norms, "rms": (rms_norm, rms_norm)}.get(normed))
    q, k, v = (rotate(x, role, rotary, setting.rotary_base) for x, role in ((q, "q"), (k, "k"), (v, "v")))
    return q, k, v


def _mixed_parts(packed: Tensor, setting: Setting, order: str) -> tuple[Tensor, Tensor, Tensor]:
    """Cut (b, l, 3 * h * d) by a reshape to these axes alone."""
    batch, length, width = packed.shape
    sizes = {"3": 3, "b": batch, "l": length, "h": setting.num_heads, "d": width // (3 * setting.num_heads)}
    x = packed.transpose(0, 1) if setting.sequence_first else packed
    q, k, v = x.reshape([sizes[a] for a in order]).permute([order.index(a) for a in "3bhld"])
    return q, k, v


def _split(x: Tensor, heads: int, setting: Setting, order: str) -> Tensor:
    """Cut the features into heads: (b, l, h * d) -> (b, h, l, d).

    "lh" and "ld" read the features as (h, d) or (d, h), both right. Any other order is that of the axes to which the
    user's tensor was reshaped without a transpose; "whole" leaves all features in one head.
    """
    batch, length, width = x.shape
    if order == "whole":
        return x.unsqueeze(1)
    sizes = {"b": batch, "l": length, "h": heads, "d": width // heads}
    if order in ("lh", "ld"):
        axes = "blhd" if order == "lh" else "bldh"
    else:
        axes = order
        x = x.transpose(0, 1) if setting.sequence_first else x.mT if setting.channels_first else x
    return x.reshape([sizes[a] for a in axes]).permute([axes.index(a) for a in "bhld"])


def _merge(context: Tensor, setting: Setting, order: str) -> Tensor:
    """Put the heads side by side: (b, h, l, d) -> (b, l, h * d); orders as in ``_split``."""
    batch, heads, length, width = context.shape
    if order in ("lh", "ld"):
        axes = "blhd" if order == "lh" else "bldh"
        return context.permute(["bhld".index(a) for a in axes]).reshape(batch, length, heads * width)
    laid_out = context.permute(["bhld".index(a) for a in order])
    if setting.sequence_first:
        return laid_out.reshape(length, batch, heads * width).transpose(0, 1)
    if setting.channels_first:
        return laid_out.reshape(batch, heads * width, length).mT
    return laid_out.reshape(batch, length, heads * width)


def _repeat_heads(x: Tensor, heads: int, how: str) -> Tensor:
    """Share grouped keys and values among the heads: [0, 0, 1, 1], or [0, 1, 0, 1] where they are tiled."""
    times = heads // x.size(1)
    if times == 1:
        return x
    return x.repeat_interleave(times, 1) if how == "interleaved" else x.repeat(1, times, 1, 1)


def _attended_axis(x: Tensor, choices: Choices) -> Tensor:
    """Put another axis in the place of the sequence; its own inverse."""
    over = choices.get("attend_over", "tokens")
    return x if over == "tokens" else x.transpose(1, 2) if over == "heads" else x.transpose(0, 2)


def _context(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, choices: Choices, bias: Tensor | None) -> Tensor:
    if choices.get("attend_over", "tokens") != "tokens":
        inputs = Inputs(inputs.query, inputs.key, inputs.value)
        choices = {slot: choice for slot, choice in choices.items() if slot != "causal"}
    return _weights(q, k, inputs, choices, bias) @ v


SCALES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "right": lambda q, k: 1 / math.sqrt(q.size(-1)),
    "sqrt_model": lambda q, k: 1 / math.sqrt(q.size(-1) * q.size(1)),
    "none": lambda q, k: 1.0,
    "twice": lambda q, k: 1 / q.size(-1),
    "multiplied": lambda q, k: math.sqrt(q.size(-1)),
    "by_model": lambda q, k: 1 / (q.size(-1) * q.size(1)),
    "quartic_root": lambda q, k: q.size(-1) ** -0.25,
    "sqrt_heads": lambda q, k: 1 / math.sqrt(q.size(1)),
    "sqrt_key_len": lambda q, k: 1 / math.sqrt(k.size(-2)),
    "sqrt_query_len": lambda q, k: 1 / math.sqrt(q.size(-2)),
    "sqrt_batch": lambda q, k: 1 / math.sqrt(q.size(0)),
    "squared": lambda q, k: 1 / q.size(-1) ** 2,
    "halved": lambda q, k: 1 / (2 * math.sqrt(q.size(-1))),
    "root_of_half": lambda q, k: 1 / math.sqrt(q.size(-1) / 2),
    "sqrt_model_multiplied": lambda q, k: math.sqrt(q.size(-1) * q.size(1)),
    "after_softmax": lambda q, k: 1.0,
}


def _weights(q: Tensor, k: Tensor, inputs: Inputs, choices: Choices, bias: Tensor | None) -> Tensor:
    scale = choices.get("scale", "right")
    transposed = k.reshape(*k.shape[:-2], k.size(-1), k.size(-2)) if "key_transpose" in choices else k.transpose(-2, -1)
    factor = inputs.query.size(-1) ** -0.5 if scale == "sqrt_input" else SCALES[scale](q, k)
    scores = q @ transposed * factor  # (b, h, q, k)
    scores = scores if bias is None else scores + bias
    scores, blocked, built_in = _masked(scores, factor, inputs.may_attend, choices)
    weights = _softmax(scores, choices)
    if choices.get("mask") == "after_softmax":
        weights = weights.masked_fill(blocked, 0.0)
    if choices.get("mask") == "after_softmax_inf":
        weights = weights.masked_fill(blocked, -math.inf)
    if choices.get("causal") == "after_softmax":
        weights = weights.masked_fill(built_in, 0.0)
    return weights / math.sqrt(q.size(-1)) if scale == "after_softmax" else weights


def _softmax(scores: Tensor, choices: Choices) -> Tensor:
    dim = {"keys": -1, "queries": -2, "heads": 1, "batch": 0}.get(choices.get("softmax", "keys"))
    if dim is None:
        return scores if choices["softmax"] == "missing" else torch.sigmoid(scores)
    precision = choices.get("softmax_precision", "same")
    if precision == "same":
        return torch.softmax(scores, dim)
    dtype = cast(torch.dtype, getattr(torch, precision))
    return torch.softmax(scores.to(dtype), dim).to(scores.dtype)


CAUSAL_OFFSETS = {"yes": 0, "sees_next": 1, "not_itself": -1}
FILLS: dict[str, float] = {
    "right": -math.inf,
    "fill_large": -1e9,
    "fill_-1": -1.0,
    "fill_-5": -5.0,
    "fill_-10": -10.0,
    "fill_-20": -20.0,
    "fill_1e-9": 1e-9,
    "fill_-1e-9": -1e-9,
    "fill_1e-12": 1e-12,
    "fill_-1e-12": -1e-12,
    "fill_0": 0.0,
    "fill_tiny32": torch.finfo(torch.float32).tiny,
    "fill_+inf": 1e9,
}


def _masked(
    scores: Tensor, factor: float, may_attend: Tensor | None, choices: Choices
) -> tuple[Tensor, Tensor, Tensor]:
    """Hide keys; also give what the mask argument and the built-in causal mask block."""
    blocked = torch.zeros_like(scores, dtype=torch.bool) if may_attend is None else ~may_attend.unsqueeze(1)
    built_in = _built_in_blocked(scores, choices.get("causal", "no"))
    how = choices.get("causal_use", "right")
    if choices.get("causal") != "after_softmax":
        scores = _hide(scores, built_in, factor, how)
    if may_attend is None:
        return scores, blocked, built_in
    use = choices.get("mask", "right")
    blocked = _misread(blocked, scores, use)
    return _hide(scores, blocked, factor, use), blocked, built_in


def _built_in_blocked(scores: Tensor, causal: str) -> Tensor:
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    offset = scores.size(-1) - scores.size(-2)
    if causal in CAUSAL_OFFSETS:
        visible = visible.tril(CAUSAL_OFFSETS[causal])
    elif causal == "lower_right":
        visible = visible.tril(offset)
    elif causal == "reversed":
        visible = visible.triu()
    elif causal == "strictly_reversed":
        visible = visible.triu(1)
    elif causal == "after_softmax":
        visible = visible.tril()
    return ~visible


def _misread(blocked: Tensor, scores: Tensor, use: str) -> Tensor:
    """Put the mask on other axes than (b, 1, q, k)."""
    if use == "inverted":
        return ~blocked
    if use == "transposed":
        return blocked.transpose(-2, -1)
    if use == "first_sample":
        return blocked[:1]
    if use in ("head_order", "heads_first_order"):
        batch, heads = scores.shape[:2]
        mask = blocked.expand(batch, 1, *scores.shape[-2:]).squeeze(1)
        if use == "head_order":  # repeated (h, b) where heads are folded as (b, h)
            return mask.repeat(heads, 1, 1).unflatten(0, (batch, heads))
        return mask.repeat_interleave(heads, 0).unflatten(0, (heads, batch)).transpose(0, 1)
    return blocked


def _hide(scores: Tensor, blocked: Tensor, factor: float, use: str) -> Tensor:
    if use in FILLS:
        return scores.masked_fill(blocked, FILLS[use])
    if use in ("ignored", "after_softmax", "after_softmax_inf"):
        return scores
    if use == "added_visible":
        return scores + (~blocked).to(scores.dtype)
    if use == "added_blocked":
        return scores + blocked.to(scores.dtype)
    if use == "subtracted_blocked":
        return scores - blocked.to(scores.dtype)
    if use == "subtracted_10":
        return scores - 10.0 * blocked.to(scores.dtype)
    if use == "multiplied_visible":
        return scores * (~blocked).to(scores.dtype)
    if use == "multiplied_blocked":
        return scores * blocked.to(scores.dtype)
    if use == "fill_scaled":  # filled with -10 ... before the scale
        return scores.masked_fill(blocked, -10.0 * factor)
    if use == "query_rows":
        hidden_rows = blocked.all(dim=-2) if blocked.size(-2) != 1 else blocked.squeeze(-2)
        return scores.masked_fill(hidden_rows.unsqueeze(-1), -1e9) if scores.size(-2) == scores.size(-1) else scores
    return scores.masked_fill(blocked, -math.inf)


PRE_NORM_WRAPS = (
    "pre_norm",
    "pre_norm_residual",
    "pre_norm_query_only",
    "pre_norm_residual_query_only",
    "residual_from_norm",
    "pre_norm_keys_only",
    "pre_norm_residual_keys_only",
)


def _wrap(setting: Setting, x: Tensor, y: Tensor, wrap: str) -> Tensor:
    norm = setting.norm or (lambda tensor: tensor)
    fresh = (y.size(-1),)
    outcomes: dict[str, Callable[[], Tensor]] = {
        "residual": lambda: x + y,
        "post_norm": lambda: norm(x + y),
        "pre_norm_residual": lambda: x + y,
        "pre_norm_residual_query_only": lambda: x + y,
        "pre_norm_residual_keys_only": lambda: x + y,
        "residual_from_norm": lambda: norm(x) + y,
        "residual_twice": lambda: x + x + y,
        "post_norm_residual_twice": lambda: norm(x + x + y),
        "norm_without_residual": lambda: norm(y),
        "residual_after_norm": lambda: x + norm(y),
        "fresh_norm": lambda: F.layer_norm(x + y, fresh),
        "residual_subtracted": lambda: x - y,
    }
    return outcomes.get(wrap, lambda: y)()
