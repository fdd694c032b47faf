"""Grouped heads on torch: its fused function, which repeats no key, and flex attention for capped scores.

Dimension letters: b batch, h num_heads, g num_key_heads, q query_len, k key_len, d head_dim, e embed_dim.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from builtin import masks
from builtin.norms import RMSNorm
from scratch import grouped, score_functions, validation
from scratch.grouped import who_may_attend

__all__ = [
    "GroupedQueryAttention",
    "grouped_attention",
]


def grouped_attention(
    q: Float[Tensor, "batch num_heads query_len head_dim"],
    k: Float[Tensor, "batch num_key_heads key_len head_dim"],
    v: Float[Tensor, "batch num_key_heads key_len head_dim"],
    may_attend: Bool[Tensor, "..."] | None = None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Tensor, " num_heads"] | None = None,
) -> Float[Tensor, "batch num_heads query_len head_dim"]:
    """Let the query heads of a group share one head of keys and values.

    scores = cap(scale q kᵀ); weights = softmax([scores, sink]) without the sink; context = weights v

    Args:
        q: Queries. Head j belongs to group j // (num_heads / num_key_heads).
        k: Keys, one head for each group.
        v: Values, likewise.
        may_attend: True = may look; broadcastable to (batch, num_heads, query_len, key_len).
        scale: Factor on the scores.
        soft_cap: Keeps scores within -soft_cap ... soft_cap: cap(s) = soft_cap tanh(s / soft_cap).
        sinks: For each head the score of a key that everyone sees and that has no value.

    Returns:
        (batch, num_heads, query_len, head_dim). A query that may look at no key gets 0.

    In torch.nn: ``F.scaled_dot_product_attention(..., enable_gqa=True)``. It knows no sinks: each becomes, by a float
    mask, the score of a key and a value of zeros. It knows no caps either: they are a ``score_mod`` of
    ``torch.nn.attention.flex_attention``, and sinks then scale its output by the log-sum-exp that it returns. Flex
    attention has no gradient on the CPU, and asks to be compiled.

    Source: Ainslie et al. 2023, section 2.2 (groups); Gemma Team 2024, section 2 (cap); Xiao et al. 2024, section 3.2,
    and OpenAI 2025, "gpt-oss" model card, section 2.2 (sinks).

    >>> q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    >>> context = grouped_attention(q, k, v, scale=0.5)
    >>> torch.allclose(context[:, 4], torch.softmax(0.5 * q[:, 4] @ k[:, 1].mT, dim=-1) @ v[:, 1], atol=1e-6)
    True
    """
    if soft_cap is not None:
        return _capped_attention(q, k, v, may_attend, scale, soft_cap, sinks)
    if sinks is not None:
        k, v, may_attend = _with_sink_key(q, k, v, may_attend, sinks)
    return F.scaled_dot_product_attention(q, k, v, may_attend, scale=scale, enable_gqa=True)


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key and a value of zeros, and give its scores to them by a float mask."""
    score_bias = q.new_zeros(q.size(2), k.size(2)) if may_attend is None else masks.to_score_bias(may_attend, q.dtype)
    shape = (*q.shape[:3], k.size(2))
    sink_column = sinks.to(q.dtype).view(-1, 1, 1).expand(*q.shape[:3], 1)
    score_bias = torch.cat([score_bias.expand(shape), sink_column], dim=-1)  # (b, h, q, k + 1)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), score_bias


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None, scale: float, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    block_mask = None
    if may_attend is not None:
        visible = may_attend.expand(*q.shape[:3], k.size(2))

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return visible[b, h, i, j]

        batch, num_heads, query_len, key_len = visible.shape
        block_mask = create_block_mask(mask_mod, batch, num_heads, query_len, key_len, device=q.device.type)
    cap = score_functions.soft_cap(soft_cap)
    context, aux = flex_attention(q, k, v, cap, block_mask, scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
    if sinks is None:
        return context
    assert aux.lse is not None  # asked for
    # exp(lse) / (exp(lse) + exp(sink)): what the sink leaves to the keys.
    return context * torch.sigmoid(aux.lse - sinks.view(-1, 1)).unsqueeze(-1).to(context.dtype)


class GroupedQueryAttention(grouped.GroupedQueryAttention):
    """Attend from many query heads to few key heads, as today's language models do.

    q, k = rotary(norm(x Wᑫ)), rotary(norm(x Wᴷ)); v = x Wⱽ; output = Concat(head_1, ..., head_h) Wᴼ with
    head_j = softmax(q_j k_gᵀ / sqrt(d)) v_g, g = j // (num_heads / num_key_heads)

    Args:
        embed_dim: Width of input and output.
        num_heads: Number of query heads.
        num_key_heads: Number of key and value heads; divides num_heads. As many if not given (plain multi-head
            attention); with 1 it is multi-query attention.
        bias: Whether the projections have biases.
        head_dim: Size of each head; embed_dim / num_heads if not given.
        qk_norm: Divide each head's queries and keys by their root mean square before they are turned.
        norm_eps: Epsilon of those norms.
        window: A query looks at keys fewer than ``window`` places away: with ``is_causal`` at the last ``window``
            tokens, its own included.
        soft_cap: Keeps scores within -soft_cap ... soft_cap by a tanh.
        sinks: Learn for each head a score that takes weight and gives nothing.
        rotary: Turns queries and keys by their positions.
        scale: Factor on the scores; 1 / sqrt(head_dim) if not given.
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ValueError: For sizes that are not positive, heads that do not divide, a window below 1, a soft cap or a scale
            that is not positive, or a rotary embedding of another head_dim.

    In torch.nn: ``F.scaled_dot_product_attention`` groups heads with ``enable_gqa=True``.

    Source: Ainslie et al. 2023, section 2.2.

    >>> from builtin import RotaryEmbedding
    >>> attention = GroupedQueryAttention(48, num_heads=6, num_key_heads=2, rotary=RotaryEmbedding(8))
    >>> attention(torch.randn(2, 5, 48)).shape
    torch.Size([2, 5, 48])
    >>> attention.k_proj
    Linear(in_features=48, out_features=16, bias=False)
    """

    norm_class = RMSNorm

    def project(self, x: Tensor, first_position: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values, normalised and turned.

        Args:
            x: (batch, len, embed_dim).
            first_position: Position of the first token.

        Returns:
            q, (batch, num_heads, len, head_dim), and k and v, (batch, num_key_heads, len, head_dim).

        Raises:
            ValueError: For a soft cap where a gradient is wanted on the CPU, which torch's flex attention does not have
                there.
        """
        validation.check_flex_has_gradient(self, x)
        return super().project(x, first_position)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None, is_causal: bool) -> Tensor:
        """Weigh the values.

        Args:
            q: Queries, the last of the keys, (batch, num_heads, query_len, head_dim).
            k: (batch, num_key_heads, key_len, head_dim).
            v: Like the keys.
            may_attend: As ``forward`` takes it.
            is_causal: No query looks at a later key.

        Returns:
            The context, (batch, num_heads, query_len, head_dim).
        """
        causal_alone = is_causal and self.window is None and may_attend is None and q.size(2) == k.size(2)
        if causal_alone and self.soft_cap is None and self.sinks is None:  # no mask: the kernels skip what is hidden
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        visible = who_may_attend(q.size(2), k.size(2), is_causal, self.window, may_attend, device=q.device)
        return grouped_attention(q, k, v, visible, scale=self.scale, soft_cap=self.soft_cap, sinks=self.sinks)
