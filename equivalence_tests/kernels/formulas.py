"""Attention with one thing wrong in it, in float64: what a kernel that makes the mistake would give."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.kernels.situations import Inputs

__all__ = ["TILES", "Problem", "backward_formulas", "forward_formulas", "lse_formulas"]

TILES = (8, 16, 32, 64, 128)
LOG2_E = math.log2(math.e)
Formula = dict[str, Tensor]


@dataclass
class Problem:
    """One call in float64, with its scores at hand.

    Args:
        inputs: Contiguous, in float64.
        laid_out: The same as the kernel got them.
    """

    inputs: Inputs
    laid_out: Inputs

    def __post_init__(self) -> None:
        x = self.inputs
        self.group = x.q.shape[1] // max(x.k.shape[1], 1)
        self.scale = x.q.shape[-1] ** -0.5 if x.scale is None else x.scale
        self.k, self.v = (y.repeat_interleave(self.group, 1) for y in (x.k, x.v))
        self.scores = x.q @ self.k.mT * self.scale
        self.bias = torch.zeros_like(self.scores)
        if x.causal:
            self.bias = self.seen(torch.ones(self.scores.shape[-2:]).tril().bool())
        elif x.mask is not None:
            written = self.seen(x.mask) if x.mask.dtype == torch.bool else x.mask
            self.bias = written.expand_as(self.scores)

    def seen(self, may_attend: Tensor) -> Tensor:
        """Turn what may be looked at into a bias."""
        return torch.where(may_attend, 0.0, -math.inf).double()

    def weights(self) -> Tensor:
        """Give the right weights; 0 in rows that see nothing."""
        return (self.scores + self.bias).softmax(-1).nan_to_num()

    def softmax(self, scores: Tensor) -> dict[str, Tensor]:
        """Give the output for other scores."""
        return {"output": scores.softmax(-1).nan_to_num() @ self.v}


def forward_formulas(p: Problem) -> Iterator[tuple[str, Formula]]:
    """Name every mistake in the forward that can be told by its numbers, each with what it gives."""
    yield from _scales(p)
    if p.inputs.causal:
        yield from _causal(p)
    elif p.inputs.mask is not None:
        yield from _masks(p)
    yield from _orders(p)
    for tile in TILES:
        if p.scores.shape[-1]:
            yield from _tiles(p, tile)


def _scales(p: Problem) -> Iterator[tuple[str, Formula]]:
    for name, factor in (
        ("the scores are not scaled", 1 / p.scale),
        ("the scores are scaled twice", p.scale),
        ("the scores go to exp2 without log2(e)", 1 / LOG2_E),
        ("the scores are multiplied by log2(e) and go to exp, not exp2", LOG2_E),
        ("the root of the scale is applied, not the scale", p.scale**-0.5),
        ("the scale that was passed is ignored", p.inputs.q.shape[-1] ** -0.5 / p.scale),
        ("the scores have the wrong sign", -1.0),
    ):
        if factor != 1:
            yield name, p.softmax(p.scores * factor + p.bias)
    unnormalised = (p.scores + p.bias - (p.scores + p.bias).amax(-1, keepdim=True)).exp().nan_to_num()
    yield "the output is not divided by the sum of the weights", {"output": unnormalised @ p.v}
    yield "the softmax runs over the queries", {"output": (p.scores + p.bias).softmax(-2).nan_to_num() @ p.v}


def _causal(p: Problem) -> Iterator[tuple[str, Formula]]:
    queries, keys = p.scores.shape[-2:]
    ones = torch.ones(queries, keys)
    for name, seen in (
        ("causal: a query does not see its own key", ones.tril(-1)),
        ("causal: a query sees one key ahead", ones.tril(1)),
        ("causal: aligned at the lower right, not the upper left", ones.tril(keys - queries)),
        ("causal: the mask is ignored", ones),
        ("causal: the past is hidden, not the future", ones.triu()),
        *(_by_tiles(queries, keys, tile) for tile in TILES if tile < queries),
        *(_without_diagonal(queries, keys, tile) for tile in TILES if tile < queries),
    ):
        yield name, p.softmax(p.scores + p.seen(seen.bool()))
    yield "causal: hidden scores are 0, not -inf", p.softmax(p.scores * ones.tril())


def _by_tiles(queries: int, keys: int, tile: int) -> tuple[str, Tensor]:
    rows, columns = torch.arange(queries)[:, None] // tile, torch.arange(keys) // tile
    return "causal: within a tile nothing is hidden", columns <= rows


def _without_diagonal(queries: int, keys: int, tile: int) -> tuple[str, Tensor]:
    rows, columns = torch.arange(queries)[:, None] // tile, torch.arange(keys) // tile
    return "causal: the tiles on the diagonal are left out", columns < rows


def _masks(p: Problem) -> Iterator[tuple[str, Formula]]:
    mask = p.inputs.mask
    assert mask is not None
    yield "the mask is ignored", p.softmax(p.scores)
    if mask.dtype == torch.bool:
        yield "the mask is read the other way round: True hides", p.softmax(p.scores + p.seen(~mask))
        yield "the mask is added as numbers", p.softmax(p.scores + mask)
        yield "hidden scores are 0, not -inf", p.softmax(p.scores * mask)
    else:
        yield "the mask is scaled like the scores", p.softmax(p.scores + p.bias * p.scale)
        yield "the mask is subtracted", p.softmax(p.scores - p.bias)
        yield "the mask is added to scores in base 2", p.softmax(p.scores + p.bias / LOG2_E)
    yield "every sample takes the mask of the first", p.softmax(p.scores + p.bias[:1])
    if mask.shape[-1] == mask.shape[-2]:
        yield "the mask is transposed", p.softmax(p.scores + p.bias.mT)
    mean = p.v.mean(-2, keepdim=True)
    blind = (p.bias == -math.inf).all(-1, keepdim=True)
    if blind.any():
        right = p.weights() @ p.v
        yield "queries that see no key get NaN", {"output": right.masked_fill(blind, math.nan)}
        yield "queries that see no key get the mean of all values", {"output": torch.where(blind, mean, right)}


def _orders(p: Problem) -> Iterator[tuple[str, Formula]]:
    x, laid = p.inputs, p.laid_out
    if p.group > 1:
        k, v = (y.repeat(1, p.group, 1, 1) for y in (x.k, x.v))
        yield "grouped heads: key heads alternate, not side by side", _attend(p, x.q, k, v)
        k0, v0 = (y[:, :1].expand(-1, x.q.shape[1], -1, -1) for y in (x.k, x.v))
        yield "grouped heads: every query takes the first key head", _attend(p, x.q, k0, v0)
    for name in "qkv":
        got = getattr(laid, name)
        if not got.is_contiguous() and got.numel() <= got.untyped_storage().nbytes() // got.element_size():
            flat = torch.empty(0, dtype=got.dtype).set_(
                got.untyped_storage().cpu(), got.storage_offset(), got.shape, torch.empty(got.shape).stride()
            )
            read = {"q": x.q, "k": p.k, "v": p.v} | {name: flat.double()}
            yield f"the strides of {name} are not respected", _attend(p, **read)


def _attend(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    return {"output": (q @ k.mT * p.scale + p.bias).softmax(-1).nan_to_num() @ v}


def _tiles(p: Problem, tile: int) -> Iterator[tuple[str, Formula]]:
    keys = p.scores.shape[-1]
    scores, padding = p.scores + p.bias, -keys % tile
    if padding:
        padded = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], padding)], -1).softmax(-1)[..., :keys]
        yield "the padding of the last tile is scored 0, not -inf", {"output": padded @ p.v}
        if keys > tile:
            whole = keys - keys % tile
            yield (
                "the keys of the last tile are left out",
                {"output": scores[..., :whole].softmax(-1).nan_to_num() @ p.v[..., :whole, :]},
            )
    if keys > tile:
        yield (
            "only the keys of the first tile are seen",
            {"output": scores[..., :tile].softmax(-1).nan_to_num() @ p.v[..., :tile, :]},
        )
        for name, of_sum, of_mean in (
            ("the accumulator is not rescaled when the maximum grows", True, False),
            ("the sum is not rescaled when the maximum grows", False, True),
            ("neither sum nor accumulator is rescaled when the maximum grows", False, False),
        ):
            yield name, _online(p, tile, of_sum, of_mean)
        yield (
            "the maximum of the last tile replaces the running one",
            _online(p, tile, True, True, forgets=True),
        )
        yield "every tile is normalised by itself", _each_alone(p, tile)


def _online(p: Problem, tile: int, of_sum: bool, of_mean: bool, forgets: bool = False) -> dict[str, Tensor]:
    """Go over the keys tile by tile, and rescale only what is named."""
    scores = p.scores + p.bias
    greatest = torch.full_like(scores[..., :1], -math.inf)
    total, mean = torch.zeros_like(greatest), torch.zeros_like(p.inputs.q[..., :1] * p.v[..., :1, :])
    for start in range(0, scores.shape[-1], tile):
        here, v = scores[..., start : start + tile], p.v[..., start : start + tile, :]
        before, greatest = greatest, torch.maximum(greatest, here.amax(-1, keepdim=True))
        shrink = torch.ones_like(greatest) if forgets else (before - greatest).exp().nan_to_num()
        if forgets:
            greatest = here.amax(-1, keepdim=True)
        weights = (here - greatest).exp().nan_to_num()
        total = total * (shrink if of_sum else 1) + weights.sum(-1, keepdim=True)
        mean = mean * (shrink if of_mean else 1) + weights @ v
    return {"output": (mean / total).nan_to_num()}


def _each_alone(p: Problem, tile: int) -> dict[str, Tensor]:
    scores = (p.scores + p.bias).split(tile, -1)
    return {"output": sum(s.softmax(-1).nan_to_num() @ v for s, v in zip(scores, p.v.split(tile, -2), strict=True))}


def backward_formulas(p: Problem) -> Iterator[tuple[str, Formula]]:
    """Name every mistake in the backward likewise, where the output is right; each gives the parts that it spoils."""
    weights, grad = p.weights(), p.inputs.grad
    grad_weights = grad @ p.v.mT
    delta = (grad_weights * weights).sum(-1, keepdim=True)
    plain = (p.scores + p.bias - (p.scores + p.bias).amax(-1, keepdim=True)).exp().nan_to_num()
    for name, w, d in (
        ("the row sum of output times its gradient is not subtracted", weights, torch.zeros_like(delta)),
        ("the row sum of output times its gradient has the wrong sign", weights, -delta),
        ("the weights are computed again without the log of their sum", plain, delta),
        (
            "the weights are computed again without the mask",
            (p.scores - (p.scores + p.bias).logsumexp(-1, True)).exp(),
            delta,
        ),
        (
            "the weights are computed again without their scale",
            (p.scores / p.scale + p.bias).softmax(-1).nan_to_num(),
            delta,
        ),
        ("the weights are computed again with exp2 and a log-sum-exp in base e", _in_base_2(p), delta),
    ):
        yield name, _gradients(p, w, w * (grad_weights - d))
    grad_scores = weights * (grad_weights - delta)
    yield "the gradient is not multiplied by the weights", _gradients(p, weights, grad_weights - delta)
    yield from _groups(p, weights, grad_scores)
    for tile in TILES:
        yield from _backward_tiles(p, weights, grad_scores, tile)


def lse_formulas(p: Problem) -> Iterator[tuple[str, Formula]]:
    """Name every mistake in the log-sum-exp alone."""
    scores = p.scores + p.bias
    right, greatest = scores.logsumexp(-1), scores.amax(-1) if scores.shape[-1] else scores.sum(-1)
    for name, given in (
        ("the log-sum-exp is in base 2", right * LOG2_E),
        ("the log-sum-exp is multiplied by ln 2", right / LOG2_E),
        ("the log-sum-exp is the maximum: the log of the sum is not added", greatest),
        ("the log-sum-exp is the log of the sum: the maximum is not added", right - greatest),
        ("the log-sum-exp is the sum, without the log", right.exp()),
        ("the log-sum-exp has the wrong sign", -right),
        ("the log-sum-exp is of scores that are not scaled", (p.scores / p.scale + p.bias).logsumexp(-1)),
        ("the log-sum-exp is of scores without the mask", p.scores.logsumexp(-1)),
    ):
        yield name, {"lse": given}


def _in_base_2(p: Problem) -> Tensor:
    scores = p.scores + p.bias
    return torch.exp2(scores * LOG2_E - scores.logsumexp(-1, keepdim=True)).nan_to_num()


def _gradients(p: Problem, weights: Tensor, grad_scores: Tensor) -> dict[str, Tensor]:
    return {
        "dq": grad_scores @ p.k * p.scale,
        "dk": _summed(p, grad_scores.mT @ p.inputs.q * p.scale),
        "dv": _summed(p, weights.mT @ p.inputs.grad),
    }


def _summed(p: Problem, x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, p.group)).sum(2)


def _groups(p: Problem, weights: Tensor, grad_scores: Tensor) -> Iterator[tuple[str, Formula]]:
    if p.group == 1:
        return
    k, v = grad_scores.mT @ p.inputs.q * p.scale, weights.mT @ p.inputs.grad
    for name, place in (("first", 0), ("last", -1)):
        yield (
            f"grouped heads: dk and dv hold the {name} head of a group only",
            {
                "dk": k.unflatten(1, (-1, p.group))[:, :, place],
                "dv": v.unflatten(1, (-1, p.group))[:, :, place],
            },
        )
    yield (
        "grouped heads: dk and dv are means, not sums",
        {"dk": _summed(p, k) / p.group, "dv": _summed(p, v) / p.group},
    )


def _backward_tiles(p: Problem, weights: Tensor, grad_scores: Tensor, tile: int) -> Iterator[tuple[str, Formula]]:
    queries, keys = p.scores.shape[-2:]
    for name, length, cut in (("queries", queries, queries - queries % tile), ("keys", keys, keys - keys % tile)):
        if length <= tile:
            continue
        cut = cut if cut < length else length - tile
        for what, part in (("left out", slice(0, cut)), ("all that is kept", slice(cut, None))):
            if name == "queries":
                w, s = weights[..., part, :], grad_scores[..., part, :]
                dk, dv = s.mT @ p.inputs.q[..., part, :] * p.scale, w.mT @ p.inputs.grad[..., part, :]
                gives = {"dk": _summed(p, dk), "dv": _summed(p, dv)}
            else:
                gives = {"dq": grad_scores[..., part] @ p.k[..., part, :] * p.scale}
            yield f"{' and '.join(gives)}: the last tile of {name} is {what}", gives
