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
from scratch.documentation import documented_like
from scratch.grouped import Scoring, who_may_attend

__all__ = [
    "GroupedQueryAttention",
    "Scoring",
    "grouped_attention",
]


@documented_like(grouped.grouped_attention)
def grouped_attention(
    q: Float[Tensor, "batch num_heads query_len head_dim"],
    k: Float[Tensor, "batch num_key_heads key_len head_dim"],
    v: Float[Tensor, "batch num_key_heads key_len head_dim"],
    may_attend: Bool[Tensor, "..."] | None = None,
    *,
    scoring: Scoring,
    sinks: Float[Tensor, " num_heads"] | None = None,
) -> Float[Tensor, "batch num_heads query_len head_dim"]:
    """In torch.nn: ``F.scaled_dot_product_attention(..., enable_gqa=True)``. It knows no sinks: each becomes, by a
    float mask, the score of a key and a value of zeros. It knows no caps either: they are a ``score_mod`` of
    ``torch.nn.attention.flex_attention``, and sinks then scale its output by the log-sum-exp that it returns. Flex
    attention has no gradient on the CPU, and asks to be compiled.
    """
    if scoring.soft_cap is not None:
        context, lse = _capped_attention(q, k, v, may_attend, scoring.scale, scoring.soft_cap)
        if sinks is None:
            return context
        # exp(lse) / (exp(lse) + exp(sink)): what the sink leaves to the keys.
        return context * torch.sigmoid(lse - sinks.view(-1, 1)).unsqueeze(-1).to(context.dtype)
    if sinks is not None:
        k, v, may_attend = _with_sink_key(q, k, v, may_attend, sinks)
    return F.scaled_dot_product_attention(q, k, v, may_attend, scale=scoring.scale, enable_gqa=True)


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
    q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None, scale: float, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """Attend with capped scores, without sinks; and give the log-sum-exp of each query's scores."""
    block_mask = None
    if may_attend is not None:
        visible = may_attend.expand(*q.shape[:3], k.size(2))

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return visible[b, h, i, j]

        batch, num_heads, query_len, key_len = visible.shape
        block_mask = create_block_mask(mask_mod, batch, num_heads, query_len, key_len, device=q.device.type)
    cap = score_functions.soft_cap(soft_cap)
    context, aux = flex_attention(q, k, v, cap, block_mask, scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None  # asked for
    return context, aux.lse


@documented_like(grouped.GroupedQueryAttention)
class GroupedQueryAttention(grouped.GroupedQueryAttention):
    """>>> from builtin import RotaryEmbedding
    >>> attention = GroupedQueryAttention(48, num_heads=6, num_key_heads=2, rotary=RotaryEmbedding(8))
    >>> attention(torch.randn(2, 5, 48)).shape
    torch.Size([2, 5, 48])
    >>> attention.k_proj
    Linear(in_features=48, out_features=16, bias=False)
    """

    norm_class = RMSNorm

    def project(self, x: Tensor, first_position: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """In torch.nn: ``nn.Linear`` and ``nn.RMSNorm``; rotary positions have no class there.

        Raises:
            ValueError: For a soft cap where a gradient is wanted on the CPU, which torch's flex attention does not
                have there.
        """
        validation.check_flex_has_gradient(self, x)
        return super().project(x, first_position)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None, is_causal: bool) -> Tensor:
        """In torch.nn: ``F.scaled_dot_product_attention``, without a mask where causality alone hides keys."""
        causal_alone = is_causal and self.window is None and may_attend is None and q.size(2) == k.size(2)
        if causal_alone and self.soft_cap is None and self.sinks is None:  # no mask: the kernels skip what is hidden
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        visible = who_may_attend(q.size(2), k.size(2), is_causal, self.window, may_attend, device=q.device)
        return grouped_attention(q, k, v, visible, scoring=Scoring(self.scale, self.soft_cap), sinks=self.sinks)
