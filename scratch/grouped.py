"""Attention as today's language models have it: few key heads for many query heads, and rotary positions.

Dimension letters: b batch, h num_heads, g num_key_heads, q query_len, k key_len, d head_dim, e embed_dim.
"""

import math
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from scratch import masks, validation
from scratch.decoding import KeyValueCache
from scratch.norms import RMSNorm
from scratch.paths import open_blind_rows, weigh
from scratch.rotary import RotaryEmbedding
from scratch.rounding import upcast_half

__all__ = [
    "GroupedQueryAttention",
    "Scoring",
    "grouped_attention",
    "grouped_scores",
    "who_may_attend",
    "with_sink_key",
]


class Scoring(NamedTuple):
    """How a query scores a key.

    score = cap(scale q · k)

    Args:
        scale: Factor on the scores.
        soft_cap: Keeps scores within -soft_cap ... soft_cap: cap(s) = soft_cap tanh(s / soft_cap). There is no cap if
            not given.
    """

    scale: float
    soft_cap: float | None = None


def grouped_attention(
    q: Float[Tensor, "batch num_heads query_len head_dim"],
    k: Float[Tensor, "batch num_key_heads key_len head_dim"],
    v: Float[Tensor, "batch num_key_heads key_len head_dim"],
    may_attend: Bool[Tensor, "..."] | None = None,
    *,
    scoring: Scoring,
    sinks: Float[Tensor, " num_heads"] | None = None,
) -> Float[Tensor, "batch num_heads query_len head_dim"]:
    """Let the query heads of a group share one head of keys and values.

    scores = cap(scale q kᵀ); weights = softmax([scores, sink]) without the sink; context = weights v

    Args:
        q: Queries. Head j belongs to group j // (num_heads / num_key_heads).
        k: Keys, one head for each group.
        v: Values, likewise.
        may_attend: True = may look; broadcastable to (batch, num_heads, query_len, key_len).
        scoring: The scale of the scores, and what caps them.
        sinks: For each head the score of a key that everyone sees and that has no value.

    Returns:
        (batch, num_heads, query_len, head_dim). A query that may look at no key gets 0.

    In torch.nn: ``F.scaled_dot_product_attention(..., enable_gqa=True)``, which knows neither caps nor sinks, and
    ``torch.nn.attention.flex_attention``.

    Source: Ainslie et al. 2023, section 2.2 (groups); Gemma Team 2024, section 2 (cap); Xiao et al. 2024, section 3.2,
    and OpenAI 2025, "gpt-oss" model card, section 2.2 (sinks).

    >>> q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    >>> context = grouped_attention(q, k, v, scoring=Scoring(scale=0.5))
    >>> torch.allclose(context[:, 4], torch.softmax(0.5 * q[:, 4] @ k[:, 1].mT, dim=-1) @ v[:, 1], atol=1e-6)
    True
    """
    scores = grouped_scores(q * scoring.scale, k)  # (b, h, q, k)
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    row_sees = None
    if may_attend is not None:
        score_bias, row_sees = open_blind_rows(masks.to_score_bias(may_attend, scores.dtype))
        scores = scores + score_bias
    if sinks is not None:
        scores, v = with_sink_key(scores, v, sinks)
    context, _ = weigh(stacked(scores, v.size(1)), v)
    context = unstacked(context, q.size(2))  # (b, h, q, d)
    return context if row_sees is None else context * row_sees


def grouped_scores(
    q: Float[Tensor, "batch num_heads query_len head_dim"], k: Float[Tensor, "batch num_key_heads key_len head_dim"]
) -> Float[Tensor, "batch num_heads query_len key_len"]:
    """Score every key of a group against the queries of all its heads: q kᵀ.

    The queries of a group stand below one another in one product, so that no key is copied.

    Args:
        q: Queries. Head j belongs to group j // (num_heads / num_key_heads).
        k: Keys, one head for each group.

    Returns:
        (batch, num_heads, query_len, key_len).

    In torch.nn: inside ``F.scaled_dot_product_attention(..., enable_gqa=True)``.

    Source: Ainslie et al. 2023, section 2.2.
    """
    q_of_group = stacked(q, k.size(1))  # (b, g, h / g * q, d)
    return unstacked(q_of_group @ k.mT, q.size(2))


def stacked(
    x: Float[Tensor, "batch num_heads query_len width"], num_key_heads: int
) -> Float[Tensor, "batch num_key_heads rows width"]:
    """Put the queries of a group below one another: (b, h, q, ...) -> (b, g, h / g * q, ...)."""
    return x.unflatten(1, (num_key_heads, -1)).flatten(2, 3)


def unstacked(
    x: Float[Tensor, "batch num_key_heads rows width"], query_len: int
) -> Float[Tensor, "batch num_heads query_len width"]:
    """Split the rows of a group into its heads again: the inverse of ``stacked``."""
    return x.unflatten(2, (-1, query_len)).flatten(1, 2)


def with_sink_key(
    scores: Float[Tensor, "batch num_heads query_len key_len"],
    v: Float[Tensor, "batch num_key_heads key_len head_dim"],
    sinks: Float[Tensor, " num_heads"],
) -> tuple[Float[Tensor, "batch num_heads query_len one_more"], Float[Tensor, "batch num_key_heads one_more head_dim"]]:
    """Let a query give a part of its weight to nobody: a sink is a key that everyone sees, with a value of zeros.

    weights_j = exp(s_j) / (exp(sink) + Σ_i exp(s_i))

    Args:
        scores: The scores of each head.
        v: Values, one head for each group.
        sinks: One more score for each head.

    Returns:
        Scores and values of one more key.

    A sink is not a ``score_mod``, which changes scores and cannot add a key.

    Source: Xiao et al. 2024, section 3.2; OpenAI 2025, "gpt-oss" model card, section 2.2.

    >>> scores, v = torch.tensor([0.0, 0.0]).view(1, 1, 1, 2), torch.tensor([4.0, 8.0]).view(1, 1, 2, 1)
    >>> scores, v = with_sink_key(scores, v, torch.tensor([2.0]).log())  # the sink weighs as much as both keys
    >>> scores.softmax(dim=-1) @ v
    tensor([[[[3.]]]])
    """
    sink_column = sinks.view(-1, 1, 1).expand(scores.size(0), -1, scores.size(2), 1)  # (b, h, q, 1)
    return torch.cat([scores, sink_column], dim=-1), F.pad(v, (0, 0, 0, 1))


def who_may_attend(
    query_len: int,
    key_len: int,
    is_causal: bool,
    window: int | None,
    may_attend: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Combine what hides keys, for queries that are the last of the keys.

    Args:
        query_len: Number of queries.
        key_len: Number of keys.
        is_causal: No query looks at a later key.
        window: A query looks at keys fewer than ``window`` positions away.
        may_attend: True = may look; the last of its keys are these.
        device: Where to build it.

    Returns:
        True = may look, broadcastable to (batch, num_heads, query_len, key_len); None if nothing is hidden.

    >>> print(masks.draw(who_may_attend(2, 4, is_causal=True, window=2)))
    0 1 1 0
    0 0 1 1
    """
    rules = []
    if is_causal and query_len > 1:
        rules.append(masks.causal(query_len, key_len, align="lower_right", device=device))
    if window is not None:
        rules.append(masks.sliding_window(query_len, key_len, window=window, align="lower_right", device=device))
    if may_attend is not None:
        rules.append(may_attend[..., -key_len:])
    return reduce(torch.logical_and, rules) if rules else None


class GroupedQueryAttention(nn.Module):
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
        qk_norm: Divide each head's queries and keys by their root mean square before they are rotated.
        norm_eps: Epsilon of those norms.
        window: A query looks at keys fewer than ``window`` positions away: with ``is_causal`` at the last ``window``
            tokens, its own included.
        soft_cap: Keeps scores within -soft_cap ... soft_cap by a tanh.
        sinks: Learn for each head a score that takes weight and gives nothing.
        rotary: Rotates queries and keys by their positions.
        scale: Factor on the scores; 1 / sqrt(head_dim) if not given.
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ValueError: For sizes that are not positive, heads that do not divide, a window below 1, a soft cap or a scale
            that is not positive, or a rotary embedding of another head_dim.

    In torch.nn: ``F.scaled_dot_product_attention`` groups heads with ``enable_gqa=True``.

    Source: Ainslie et al. 2023, section 2.2.

    >>> attention = GroupedQueryAttention(48, num_heads=6, num_key_heads=2, rotary=RotaryEmbedding(8))
    >>> attention(torch.randn(2, 5, 48)).shape
    torch.Size([2, 5, 48])
    >>> attention.k_proj
    Linear(in_features=48, out_features=16, bias=False)
    """

    norm_class: ClassVar[type[nn.Module]] = RMSNorm
    sinks: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_key_heads: int | None = None,
        bias: bool = False,
        *,
        head_dim: int | None = None,
        qk_norm: bool = False,
        norm_eps: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        rotary: RotaryEmbedding | None = None,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        validation.check_grouped_sizes(embed_dim, num_heads, num_key_heads, head_dim)
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        validation.check_grouped_options(head_dim, window, soft_cap, scale, rotary)
        super().__init__()
        self.embed_dim, self.head_dim = embed_dim, head_dim
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.window, self.soft_cap = window, soft_cap
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias, **factory)
        self.k_proj = nn.Linear(embed_dim, num_key_heads * head_dim, bias, **factory)
        self.v_proj = nn.Linear(embed_dim, num_key_heads * head_dim, bias, **factory)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias, **factory)
        self.q_norm = self.norm_class(head_dim, norm_eps, **factory) if qk_norm else nn.Identity()
        self.k_norm = self.norm_class(head_dim, norm_eps, **factory) if qk_norm else nn.Identity()
        self.rotary = rotary
        self.register_parameter("sinks", nn.Parameter(torch.zeros(num_heads, **factory)) if sinks else None)

    def forward(
        self,
        x: Tensor,
        may_attend: Tensor | None = None,
        *,
        is_causal: bool = True,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend from every token to the earlier ones.

        Args:
            x: (batch, len, embed_dim); with a cache the new tokens only.
            may_attend: True = may look; broadcastable to (batch, num_heads, len, key_len), where with a cache the keys
                are all tokens so far. Narrows what causality and window leave.
            is_causal: No token looks at a later one.
            cache: Keys and values of earlier calls, which this call extends.

        Returns:
            The shape of ``x``. A token that may look at no key gets the bias of ``out_proj``.

        Raises:
            ValueError: For shapes that do not fit together.
            TypeError: For a mask that is not bool.
        """
        validation.check_grouped_inputs(self, x, may_attend, cache)
        q, k, v = self.project(x, 0 if cache is None else cache.length)
        if cache is not None:
            k, v = cache.extend(k, v)
        context = self.attend(q, k, v, may_attend, is_causal)  # (b, h, q, d)
        return self.out_proj(context.transpose(1, 2).flatten(2))

    def project(self, x: Tensor, first_position: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values, normalised and rotated.

        Args:
            x: (batch, len, embed_dim).
            first_position: Position of the first token.

        Returns:
            q, (batch, num_heads, len, head_dim), and k and v, (batch, num_key_heads, len, head_dim).
        """
        # The features decide how many heads there are: under tensor parallelism fewer than num_heads.
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            positions = torch.arange(first_position, first_position + x.size(1), device=x.device)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None, is_causal: bool) -> Tensor:
        """Weigh the values.

        Half precision is computed in float32 and rounded once, at the end.

        Args:
            q: Queries, the last of the keys, (batch, num_heads, query_len, head_dim).
            k: (batch, num_key_heads, key_len, head_dim).
            v: Like the keys.
            may_attend: As ``forward`` takes it.
            is_causal: No query looks at a later key.

        Returns:
            The context, (batch, num_heads, query_len, head_dim).
        """
        dtype = q.dtype
        q, k, v = upcast_half(q, k, v)
        visible = who_may_attend(q.size(2), k.size(2), is_causal, self.window, may_attend, device=q.device)
        sinks = None if self.sinks is None else self.sinks.to(q.dtype)
        context = grouped_attention(q, k, v, visible, scoring=Scoring(self.scale, self.soft_cap), sinks=sinks)
        return context.to(dtype)
