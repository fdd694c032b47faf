"""``scaled_dot_product_attention``, with torch's signature: check the arguments, choose a path, take it."""

import math

from jaxtyping import Float
from torch import Tensor

from scratch import masks, validation
from scratch.functional import attention
from scratch.masks import Visible
from scratch.paths import chosen_kernel, open_blind_rows
from scratch.rounding import halve_the_scale, laid_out_like, upcast_half

__all__ = ["scaled_dot_product_attention"]


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
    r"""Average the values for every query, weighted by how well their keys match it.

    Attention(Q, K, V) = softmax(Q Kᵀ / sqrt(d_k)) V

    Args:
        query: (..., query_len, head_dim).
        key: (..., key_len, head_dim).
        value: (..., key_len, v_head_dim).
        attn_mask: Broadcastable to (..., query_len, key_len). Bool: True = the query **may look** at the key;
            float: added to the scores. A causal bias of ``torch.nn.attention.bias`` is accepted too.
        dropout_p: Probability of dropping each attention weight. Applied in eval mode too: a function has no mode.
        is_causal: Query i may look at keys 0 ... i (upper-left alignment). Not together with ``attn_mask``.
        scale: Factor on the scores; 1 / sqrt(head_dim) if not given. May be negative.
        enable_gqa: Grouped-query attention: key and value may have fewer heads (dimension -3) than query, and are
            repeated.

    Returns:
        (..., query_len, v_head_dim). A query that may look at no key gets 0, with gradient 0.

    Raises:
        ValueError: For shapes that do not fit together, or a mask beside ``is_causal`` (also a RuntimeError).
        TypeError: For dtypes that do not fit together (also a RuntimeError).

    In torch.nn: ``F.scaled_dot_product_attention``. The result equals that of its MATH backend to the last bit. Its
    fused kernels round in another order, and so do the tiles that take over for long inputs (``scratch.tiling``);
    inside ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` neither is used, here and in torch. A query whose scores
    are all -inf because of its inputs, not because of a mask, gets NaN here, unless tiles run, and 0 there. With no
    keys, a query of NaN gets 0 here and NaN there.

    Source: Vaswani et al. 2017, section 3.2.1, equation 1;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

    >>> import torch
    >>> query, keys, values = torch.randn(2, 3, 5, 11), torch.randn(2, 3, 7, 11), torch.randn(2, 3, 7, 13)
    >>> scaled_dot_product_attention(query, keys, values, is_causal=True).shape
    torch.Size([2, 3, 5, 13])
    """
    validation.check_scaled_dot_product_attention((query, key, value), attn_mask, dropout_p, is_causal, enable_gqa)
    query, key, value = (x.to(validation.autocast_dtype(x)) for x in (query, key, value))
    scale = usual_scale(query) if scale is None else scale
    visible = masks.visible_from_sdpa(attn_mask, is_causal, query.size(-2), key.size(-2), query.device)
    kernel = chosen_kernel(query, key, value, visible, dropout_p)
    if kernel is not None:
        return laid_out_like(query, kernel(query, key, value, visible.score_bias, visible.diagonal, scale))
    q, k, v = upcast_half(query, key, value)
    if enable_gqa and not query.size(-3) == key.size(-3) == value.size(-3):
        # After the upcast, so that the gradients of a group are summed in float32.
        k, v = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (k, v))
    return laid_out_like(query, textbook_attention(q, k, v, visible, scale, dropout_p)).to(query.dtype)


@validation.quiet_while_tracing
def usual_scale(query: Tensor) -> float:
    """Return 1 / sqrt(head_dim): a number in a trace too, as torch's own function has it."""
    return 1 / math.sqrt(max(query.size(-1), 1))


def textbook_attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout_p: float) -> Tensor:
    """Compute ``functional.attention`` rounded as by torch's MATH backend, with 0 for a query that sees no key."""
    score_bias = visible.as_bias(q, k)
    k, scale_of_q = halve_the_scale(k, scale)
    if score_bias is None or not visible.may_blind:
        return attention(q, k, v, score_bias, scale_of_q, dropout_p)[0]
    score_bias, row_sees = open_blind_rows(score_bias)
    context, _ = attention(q, k, v, score_bias, scale_of_q, dropout_p)
    return context * row_sees
