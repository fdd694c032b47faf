"""Attention as free functions: each equation of the paper is one line here.

Dimension letters: b batch, h num_heads, n = b * h (heads folded into the batch), q query_len, k key_len,
d head_dim, e embed_dim.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from scratch import masks, tiling, validation
from scratch.rounding import HALF_PRECISION, halve_the_scale, laid_out_like, upcast_half

__all__ = [
    "attention",
    "masked_scores",
    "merge_heads",
    "open_blind_rows",
    "scaled_dot_product_attention",
    "split_heads",
    "weigh",
]


def scaled_dot_product_attention(
    query: Float[Tensor, "*heads query_len head_dim"],
    key: Float[Tensor, "*key_heads key_len head_dim"],
    value: Float[Tensor, "*value_heads key_len v_head_dim"],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "... query_len v_head_dim"]:
    r"""Let every query take the mean of the values, weighted by how well their keys match it.

    Attention(Q, K, V) = softmax(Q Kᵀ / sqrt(d_k)) V

    Args:
        query: (..., query_len, head_dim).
        key: (..., key_len, head_dim).
        value: (..., key_len, v_head_dim).
        attn_mask: Broadcastable to (..., query_len, key_len). Bool: True = the query **may look** at the key;
            float: added to the scores. A causal bias of ``torch.nn.attention.bias`` is accepted too.
        dropout_p: Probability with which a weight is dropped. Applied whenever it is above 0.
        is_causal: Query i may look at keys 0 ... i (upper-left alignment). Excludes ``attn_mask``.
        scale: Factor on the scores; 1 / sqrt(head_dim) if not given. May be negative.
        enable_gqa: Grouped heads: dimension -3 of key and value is repeated to that of query.

    Returns:
        (..., query_len, v_head_dim). A query that may look at no key gets 0, with gradient 0.

    Raises:
        ValueError: For shapes that do not fit together, or a mask beside ``is_causal`` (also a RuntimeError).
        TypeError: For dtypes that do not fit together (also a RuntimeError).

    In torch.nn: ``F.scaled_dot_product_attention``. Its MATH backend is followed to the last bit (but where one key or
    value is broadcast over 3-D queries); its fused kernels round in another order, and so do the tiles that take over
    at length (``scratch.tiling``). ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` keeps both to the textbook.

    Source: Vaswani et al. 2017, section 3.2.1, equation 1;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

    >>> query = torch.tensor([[1.0, 0.0, 2.0]])
    >>> keys = torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, 1.0]])
    >>> masked_scores(query, keys)
    tensor([[2., 4., 4.]])
    >>> values = torch.tensor([[1.0, 2.0, 3.0], [2.0, 8.0, 0.0], [2.0, 6.0, 3.0]])
    >>> scaled_dot_product_attention(query, keys, values, scale=1000.0)  # the two best keys share the weight
    tensor([[2.0000, 7.0000, 1.5000]])
    """
    validation.check_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    query, key, value = (x.to(validation.autocast_dtype(x)) for x in (query, key, value))
    scale = 1 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale
    attn_mask, diagonal = masks.diagonal_from_sdpa(attn_mask, is_causal, query.size(-2), key.size(-2))
    if tiling.take_over(query, key, value, attn_mask, dropout_p):
        return laid_out_like(query, tiling.KERNELS[query.device.type](query, key, value, attn_mask, diagonal, scale))
    q, k, v = upcast_half(query, key, value)
    if enable_gqa and not query.size(-3) == key.size(-3) == value.size(-3):
        # After the upcast, so that the gradients of a group are summed in float32.
        k, v = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (k, v))
    score_bias = masks.score_bias_from_sdpa(attn_mask, diagonal, q, key.size(-2))
    q, k = halve_the_scale(q, k, scale)
    # A fourth dimension keeps product and bias apart, as the MATH backend rounds them: see masked_scores.
    context, _ = attention(q.unsqueeze(0) if q.dim() == 3 else q, k, v, score_bias, dropout_p)
    context = context.squeeze(0) if q.dim() == 3 and max(k.dim(), v.dim()) <= 3 else context
    context = laid_out_like(query, context)
    return context.to(query.dtype) if query.dtype in HALF_PRECISION else context  # autocast chooses by itself


def attention(
    q: Float[Tensor, "*#heads query_len head_dim"],
    k: Float[Tensor, "*#heads key_len head_dim"],
    v: Float[Tensor, "*#heads key_len v_head_dim"],
    score_bias: Float[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
) -> tuple[Float[Tensor, "*#heads query_len v_head_dim"], Float[Tensor, "*#heads query_len key_len"] | None]:
    """Weigh the values: the one place where attention is computed, for queries that already carry the scale.

    weights = softmax(q kᵀ + score_bias); context = dropout(weights) v

    Args:
        q: Scaled queries.
        k: Keys.
        v: Values.
        score_bias: Added to the scores, broadcastable to (..., query_len, key_len); -inf hides a key.
        dropout_p: Probability with which a weight is dropped.
        need_weights: Return the weights too. A query that may look at no key has no weights: it is then NaN,
            and 0 otherwise.

    Returns:
        The context, and the weights (after dropout, as torch.nn returns them) or None.

    In torch.nn: the middle of ``F.multi_head_attention_forward``.

    Source: Vaswani et al. 2017, section 3.2.1, equation 1.
    """
    row_sees = None
    if score_bias is not None and not need_weights:
        score_bias, row_sees = open_blind_rows(score_bias)
        if row_sees.device.type == "cpu" and tiling.are_plain(row_sees) and row_sees.all():
            row_sees = None  # spares a product with all weights
    context, weights = weigh(masked_scores(q, k, score_bias), v, row_sees, dropout_p, overwrite=True)
    return context, weights if need_weights else None


def masked_scores(
    q: Float[Tensor, "*#heads query_len head_dim"],
    k: Float[Tensor, "*#heads key_len head_dim"],
    score_bias: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "*#heads query_len key_len"]:
    """Score every key against every query and add the bias: q kᵀ + score_bias.

    Args:
        q: Scaled queries.
        k: Keys.
        score_bias: Broadcastable to (..., query_len, key_len).

    Returns:
        (..., query_len, key_len).

    In torch.nn: ``torch.baddbmm`` or ``torch.bmm`` inside ``F.multi_head_attention_forward``.

    Source: Vaswani et al. 2017, section 3.2.1.
    """
    k = k.transpose(-2, -1)
    if q.dim() == 3:  # heads folded into the batch: the kernels of torch.nn's module, which round as it does
        return torch.bmm(q, k) if score_bias is None else torch.baddbmm(score_bias, q, k)
    return q @ k if score_bias is None else q @ k + score_bias


def weigh(
    scores: Float[Tensor, "*#heads query_len key_len"],
    v: Float[Tensor, "*#heads key_len v_head_dim"],
    row_sees: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    *,
    overwrite: bool = False,
) -> tuple[Float[Tensor, "*#heads query_len v_head_dim"], Float[Tensor, "*#heads query_len key_len"]]:
    """Turn scores into weights, and take the mean of the values that they give.

    weights = softmax(scores); context = dropout(weights) v

    Args:
        scores: With the bias added.
        v: Values.
        row_sees: Which queries may look at any key; the others get weights of 0. None if all may.
        dropout_p: Probability with which a weight is dropped.
        overwrite: Nobody else reads the scores: without gradients, the weights take their memory.

    Returns:
        The context, and the weights after dropout.

    In torch.nn: the end of ``torch.ops.aten._scaled_dot_product_attention_math``.

    Source: Vaswani et al. 2017, section 3.2.1, equation 1.
    """
    # Fresh memory for as many numbers costs as much time as the softmax itself.
    reused = overwrite and not (scores.requires_grad and torch.is_grad_enabled()) and tiling.are_plain(scores)
    weights = torch.softmax(scores, dim=-1, out=scores if reused else None)  # (..., q, k)
    if row_sees is not None:
        weights = weights * row_sees
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p)
    context = weights @ v  # (..., q, d)
    return context, weights


def open_blind_rows(
    score_bias: Float[Tensor, "*lead key_len"],
) -> tuple[Float[Tensor, "*lead key_len"], Bool[Tensor, "*lead 1"]]:
    """Lift the bias of queries that may look at no key, so that their softmax and its gradient stay finite.

    Their weights are then multiplied by the second result, which is False for them: 0 times a finite number is 0, and
    a NaN in the inputs stays a NaN.

    Args:
        score_bias: -inf hides a key.

    Returns:
        The bias with 0 in rows that were -inf throughout, and whether each row sees any key.

    In torch.nn: ``torch._safe_softmax`` inside ``F.scaled_dot_product_attention``.

    >>> open_blind_rows(torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]]))
    (tensor([[0., -inf],
            [0., 0.]]), tensor([[ True],
            [False]]))
    """
    row_sees = (score_bias != -math.inf).any(dim=-1, keepdim=True)
    return score_bias.masked_fill(~row_sees, 0.0), row_sees


def split_heads(x: Float[Tensor, "len batch width"], num_heads: int) -> Float[Tensor, "folded len head_dim"]:
    """Cut the features into heads and fold the heads into the batch: (q, b, h * d) -> (b * h, q, d).

    Args:
        x: Projected queries, keys or values, sequence first.
        num_heads: Number of heads.

    Returns:
        Head j of sample i is row i * num_heads + j.

    In torch.nn: the ``view(...).transpose(0, 1)`` of ``F.multi_head_attention_forward``.

    Source: Vaswani et al. 2017, section 3.2.2.

    >>> split_heads(torch.arange(8.0).view(2, 1, 4), num_heads=2)  # 2 tokens, 1 sample, 2 heads of 2
    tensor([[[0., 1.],
             [4., 5.]],
    <BLANKLINE>
            [[2., 3.],
             [6., 7.]]])
    """
    length, batch, width = x.shape
    return x.reshape(length, batch * num_heads, width // num_heads).transpose(0, 1)


def merge_heads(context: Float[Tensor, "folded len head_dim"], num_heads: int) -> Float[Tensor, "len batch width"]:
    """Put the heads side by side again: (b * h, q, d) -> (q, b, h * d), the inverse of ``split_heads``.

    Args:
        context: One row for each head of each sample.
        num_heads: Number of heads.

    Returns:
        Sequence first.

    In torch.nn: the ``transpose(0, 1).reshape(...)`` of ``F.multi_head_attention_forward``.

    Source: Vaswani et al. 2017, section 3.2.2, "Concat".

    >>> x = torch.randn(5, 2, 12)
    >>> torch.equal(merge_heads(split_heads(x, num_heads=3), num_heads=3), x)
    True
    """
    folded, length, head_dim = context.shape
    return context.transpose(0, 1).reshape(length, folded // num_heads, num_heads * head_dim)
