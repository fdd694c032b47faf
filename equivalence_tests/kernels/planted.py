"""A kernel in tiles with a switch for each mistake that people make in such kernels; it proves the judge."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import scratch

__all__ = ["LSE_MISTAKES", "MISTAKES", "RIGHT", "planted", "with_wrong_lse"]

ROWS, COLUMNS = 16, 8
LOG2_E = math.log2(math.e)

# Each mistake, and words by which it is named; "" where its numbers do not tell it apart.
MISTAKES = {
    "scale forgotten": "the scores are not scaled",
    "scale twice": "the scores are scaled twice",
    "root of the scale": "the root of the scale",
    "scale ignored": "the scale that was passed is ignored",
    "base 2 forgotten": "exp2 without log2(e)",
    "base 2 and exp": "log2(e) and go to exp",
    "padding scored 0": "padding of the last tile is scored 0",
    "last tile left out": "keys of the last tile are left out",
    "first tile only": "only the keys of the first tile",
    "accumulator not rescaled": "accumulator is not rescaled",
    "sum not rescaled": "the sum is not rescaled",
    "nothing rescaled": "neither sum nor accumulator",
    "maximum replaced": "the maximum of the last tile replaces",
    "not divided": "not divided by the sum",
    "each tile alone": "every tile is normalised by itself",
    "no maximum": "the maximum is not subtracted",
    "causal one ahead": "one key ahead",
    "causal without itself": "does not see its own key",
    "causal lower right": "aligned at the lower right",
    "causal by tiles": "within a tile nothing is hidden",
    "causal 0": "hidden scores are 0",
    "causal ignored": "causal: the mask is ignored",
    "mask ignored": "the mask is ignored",
    "mask inverted": "the other way round",
    "mask as numbers": "added as numbers",
    "mask scaled": "scaled like the scores",
    "blind rows NaN": "see no key get NaN",
    "blind rows mean": "the mean of all values",
    "key strides": "strides of k",
    "value strides": "strides of v",
    "groups alternate": "alternate, not side by side",
    "rows not written": "not all of the memory that",
    "dk scaled twice": "dk is scaled twice",
    "dq not scaled": "dq is not scaled",
    "dv negative": "dv is of the wrong sign",
    "delta forgotten": "row sum of output times its gradient is not subtracted",
    "delta added": "row sum of output times its gradient has the wrong sign",
    "lse without log": "without the log of their sum",
    "backward without mask": "without the mask",
    "weights forgotten": "not multiplied by the weights",
    "dq of the last tile": "dq: the last tile of keys is all",
    "dk of the last tile": "dk and dv: the last tile of queries is all",
    "dk without the last tile": "dk and dv: the last tile of queries is left out",
    "group not summed": "the last head of a group only",
    "writes into keys": "writes into its inputs",
}


class _Call(NamedTuple):
    """The arguments of a call that are not tensors, and the mistake that is made in it."""

    scale: float
    mistake: str
    causal: bool


class _Saved(NamedTuple):
    """What the forward keeps for the backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    out: Tensor
    lse: Tensor


def planted(mistake: str = "") -> Callable[..., Tensor]:
    """Make the kernel with one mistake, or none."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del enable_gqa
        own = q.shape[-1] ** -0.5
        scale = own if scale is None or mistake == "scale ignored" else scale
        bias = _bias(q, k, attn_mask, is_causal, mistake)
        if mistake == "mask scaled" and attn_mask is not None and attn_mask.is_floating_point():
            bias = bias * scale
        return _Tiles.apply(q, k, v, bias, _Call(scale, mistake, is_causal))  # type: ignore[no-untyped-call]

    return attention


def _bias(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, mistake: str) -> Tensor:
    shape = (*q.shape[:-1], k.shape[-2])
    if causal:
        ones = torch.ones(shape[-2:])
        seen = ones.tril(
            {"causal one ahead": 1, "causal without itself": -1, "causal lower right": shape[-1] - shape[-2]}.get(
                mistake, 0
            )
        ).bool()
        if mistake == "causal by tiles":
            seen = torch.arange(shape[-1]) // COLUMNS <= torch.arange(shape[-2])[:, None] // COLUMNS
        seen = ones.bool() if mistake == "causal ignored" else seen
        return torch.where(seen, 0.0, -math.inf).to(q).expand(shape)
    if mask is None or mistake == "mask ignored":
        return torch.zeros(shape).to(q)
    if mask.dtype == torch.bool:
        if mistake == "mask as numbers":
            return mask.to(q).expand(shape)
        mask = ~mask if mistake == "mask inverted" else mask
        return torch.where(mask, 0.0, -math.inf).to(q).expand(shape)
    return mask.to(q).expand(shape)


def _as_if_contiguous(x: Tensor) -> Tensor:
    flat = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage())
    return flat[x.storage_offset() : x.storage_offset() + x.numel()].view(x.shape) if flat.numel() >= x.numel() else x


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, call: _Call) -> Tensor:
        mistake = call.mistake
        if mistake == "writes into keys":
            k.detach().mul_(1.001)
        read_k = _as_if_contiguous(k) if mistake == "key strides" else k
        read_v = _as_if_contiguous(v) if mistake == "value strides" else v
        keys, values = (_repeated(x, q, mistake) for x in (read_k, read_v))
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        lse = torch.zeros(*q.shape[:-1], 1, dtype=q.dtype)
        for start in range(0, q.shape[-2], ROWS):
            rows = slice(start, start + ROWS)
            if mistake == "rows not written" and start + ROWS > q.shape[-2]:
                continue
            out[..., rows, :], lse[..., rows, :] = _rows(q[..., rows, :], keys, values, bias[..., rows, :], call)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        dq, dk, dv = _gradients(_Saved(*ctx.saved_tensors), grad, call)
        factor = {
            "dk scaled twice": (1, call.scale, 1),
            "dq not scaled": (1 / call.scale, 1, 1),
            "dv negative": (1, 1, -1),
        }
        of_q, of_k, of_v = factor.get(call.mistake, (1, 1, 1))
        return dq * of_q, dk * of_k, dv * of_v, None, None


def _repeated(x: Tensor, q: Tensor, mistake: str) -> Tensor:
    group = q.shape[1] // x.shape[1]
    return x.repeat(1, group, 1, 1) if mistake == "groups alternate" else x.repeat_interleave(group, 1)


def _tiles(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, call: _Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the scores and the values of each tile of keys."""
    length = k.shape[-2]
    for start in range(0, length, COLUMNS):
        if call.mistake == "first tile only" and start:
            break
        if call.mistake == "last tile left out" and 0 < length - start < COLUMNS:
            break
        tile = slice(start, start + COLUMNS)
        scores, values = _scores(q @ k[..., tile, :].mT, bias[..., tile], call), v[..., tile, :]
        if call.mistake == "padding scored 0" and scores.shape[-1] < COLUMNS:
            more = COLUMNS - scores.shape[-1]
            scores = torch.nn.functional.pad(scores, (0, more))
            values = torch.nn.functional.pad(values, (0, 0, 0, more))
        yield scores, values


def _rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """Go over the keys tile by tile for some rows."""
    mistake, greatest = call.mistake, torch.full_like(q[..., :1], -math.inf)
    total, mean = torch.zeros_like(greatest), torch.zeros_like(q[..., :1] * v[..., :1, :])
    alone = torch.zeros_like(mean)
    for scores, values in _tiles(q, k, v, bias, call):
        before, greatest = greatest, torch.maximum(greatest, scores.amax(-1, keepdim=True))
        shrink = (before - greatest).exp().nan_to_num()
        if mistake == "maximum replaced":
            greatest, shrink = scores.amax(-1, keepdim=True), torch.ones_like(shrink)
        if mistake == "no maximum":
            greatest, shrink = torch.zeros_like(greatest), torch.ones_like(shrink)
        weights = (scores - greatest).exp()
        weights = weights if mistake == "blind rows NaN" else weights.nan_to_num(posinf=math.inf)
        total = total * (1 if mistake in ("sum not rescaled", "nothing rescaled") else shrink) + weights.sum(
            -1, keepdim=True
        )
        mean = mean * (1 if mistake in ("accumulator not rescaled", "nothing rescaled") else shrink) + weights @ values
        alone = alone + (weights @ values / weights.sum(-1, keepdim=True)).nan_to_num()
    lse = greatest if mistake == "lse without log" else greatest + total.log()
    if mistake == "each tile alone":
        return alone, lse
    if mistake == "not divided":
        return mean, lse
    out = mean / total if mistake == "blind rows NaN" else torch.where(total > 0, mean / total, 0.0)
    if mistake == "blind rows mean":
        out = torch.where(total > 0, out, v.mean(-2, keepdim=True))
    return out, lse


def _scores(products: Tensor, bias: Tensor, call: _Call) -> Tensor:
    scale = call.scale
    factor = {
        "scale forgotten": 1.0,
        "scale twice": scale * scale,
        "root of the scale": math.sqrt(scale),
        "base 2 forgotten": scale / LOG2_E,
        "base 2 and exp": scale * LOG2_E,
    }.get(call.mistake, scale)
    if call.mistake == "causal 0" and call.causal:
        return (products * factor).masked_fill(bias == -math.inf, 0.0)
    return products * factor + bias


def _gradients(saved: _Saved, grad: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    (q, k, v, bias, out, lse), (scale, mistake, _) = saved, call
    keys, values = (_repeated(x, q, "") for x in (k, v))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    delta = (out * grad).sum(-1, keepdim=True) * {"delta forgotten": 0, "delta added": -1}.get(mistake, 1)
    last = (q.shape[-2] - 1) // ROWS * ROWS
    for start in range(0, q.shape[-2], ROWS):
        rows = slice(start, start + ROWS)
        scores = q[..., rows, :] @ keys.mT * scale + (0 if mistake == "backward without mask" else bias[..., rows, :])
        weights = (scores - lse[..., rows, :]).exp().nan_to_num(posinf=0.0)
        grad_weights = grad[..., rows, :] @ values.mT - delta[..., rows, :]
        grad_scores = grad_weights if mistake == "weights forgotten" else grad_weights * weights
        seen = slice((k.shape[-2] - 1) // COLUMNS * COLUMNS if mistake == "dq of the last tile" else 0, None)
        dq[..., rows, :] = grad_scores[..., seen] @ keys[..., seen, :] * scale
        if (mistake == "dk of the last tile" and start < last) or (
            mistake == "dk without the last tile" and 0 < start == last
        ):
            continue
        dk = dk + grad_scores.mT @ q[..., rows, :] * scale
        dv = dv + weights.mT @ grad[..., rows, :]
    group = q.shape[1] // k.shape[1]
    dk, dv = (x.unflatten(1, (-1, group)) for x in (dk, dv))
    if mistake == "group not summed":
        return dq, dk[:, :, -1], dv[:, :, -1]
    return dq, dk.sum(2), dv.sum(2)


def with_expanded_products(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Compute by broadcasting, without a product of matrices."""
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / math.sqrt(q.shape[-1])
    scores = scores if attn_mask is None or attn_mask.dtype == torch.bool else scores + attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    return (scores.softmax(-1).nan_to_num().unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def in_base_2(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sm_scale: float | None = None) -> Tensor:
    """Compute with exp2, as kernels on a GPU do."""
    scores = q @ k.mT * ((sm_scale or q.shape[-1] ** -0.5) * LOG2_E)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    scores = scores - scores.amax(-1, keepdim=True) if scores.numel() else scores
    weights = torch.exp2(scores)
    return (
        (weights @ v) / weights.sum(-1, keepdim=True)
        if scores.shape[-1]
        else (q[..., :1] * 0) @ v.new_zeros(1, v.shape[-1])
    )


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp too."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def with_wrong_lse(mistake: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make a kernel whose output is right and whose log-sum-exp is not."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = with_lse(q, k, v)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        greatest = scores.amax(-1) if k.shape[-2] else lse
        wrong = {
            "lse in base 2": lse * LOG2_E,
            "lse is the maximum": greatest,
            "lse without the maximum": lse - greatest,
            "lse not scaled": (q @ k.mT).logsumexp(-1),
        }
        return out, wrong[mistake].unsqueeze(-1)

    return attention


def by_einsum(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """Compute by einsum."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query / math.sqrt(query.shape[-1]), key)
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)


def head_by_head(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool = False) -> Tensor:
    """Compute one head after the other."""
    group = q.shape[1] // k.shape[1] if enable_gqa else 1
    heads = (
        torch.softmax(q[:, i] @ k[:, i // group].mT * q.shape[-1] ** -0.5, -1) @ v[:, i // group]
        for i in range(q.shape[1])
    )
    return torch.stack(list(heads), 1)


def of_torch(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """Hand on to torch."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, **options)


def forward_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute without gradients."""
    with torch.no_grad():
        return by_einsum(q, k, v)


def picky(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Refuse what the kernel is not made for."""
    if q.shape[-1] % 8 or not all(x.is_contiguous() for x in (q, k, v)):
        raise ValueError("head_dim must be a multiple of 8 and all tensors contiguous")
    return with_expanded_products(q, k, v, mask)


def of_scratch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Hand on to the tiles of this project."""
    return scratch.scaled_dot_product_attention(query, key, value, mask, scale=scale)


# Each mistake of the log-sum-exp alone, and words by which it is named.
LSE_MISTAKES = {
    "lse in base 2": "the log-sum-exp is in base 2",
    "lse is the maximum": "the log of the sum is not added",
    "lse without the maximum": "the maximum is not added",
    "lse not scaled": "scores that are not scaled",
}
RIGHT = (
    planted(),
    of_scratch,
    with_expanded_products,
    in_base_2,
    with_lse,
    by_einsum,
    head_by_head,
    of_torch,
    forward_only,
    picky,
)
