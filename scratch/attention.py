"""Multi-head attention: project, split into heads, attend, merge the heads, project once more."""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.init import constant_, xavier_normal_, xavier_uniform_
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from scratch import masks, validation
from scratch.functional import merge_heads, split_heads
from scratch.masks import Visible
from scratch.paths import chosen_kernel, weigh
from scratch.rounding import folded_scores, sequence_first, unpack, upcast_half
from scratch.sdpa import textbook_attention

__all__ = [
    "AttentionCache",
    "InProjection",
    "MultiheadAttention",
    "attend",
    "attend_with_weights",
    "project",
    "resolve_masks",
]


class AttentionCache(Protocol):
    """Keys and values that one attention remembers between calls; see ``scratch.caches``."""

    def extended_len(self, key_len: int) -> int:
        """Return the number of keys that ``extend`` will return for ``key_len`` new ones."""

    def extend(
        self, attention: "MultiheadAttention", query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the new tokens, remember them, and return the queries with all keys and values."""


class MultiheadAttention(nn.Module):
    r"""Attend with several heads in parallel, and combine their results by a linear layer.

    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) Wᴼ with head_i = Attention(Q W_iᑫ, K W_iᴷ, V W_iⱽ)

    Args:
        embed_dim: Width of queries and of the output.
        num_heads: Number of heads; divides embed_dim unless both head sizes are given.
        dropout: Probability of dropping each attention weight, in training.
        bias: Whether the projections have biases.
        add_bias_kv: Append one learned token to the projected keys and values.
        add_zero_attn: Append one token of zeros to the projected keys and values.
        kdim: Width of ``key``; embed_dim if not given.
        vdim: Width of ``value``; embed_dim if not given.
        batch_first: Inputs and outputs are (batch, len, features) instead of (len, batch, features).
        device: Where the parameters live.
        dtype: Their dtype.
        qk_head_dim: d_k, the size of each head's queries and keys; embed_dim / num_heads if not given.
        v_head_dim: d_v, the size of each head's values; embed_dim / num_heads if not given.

    Raises:
        ValueError: For sizes that are not positive, or an embed_dim that num_heads does not divide (also an
            AssertionError).

    In torch.nn: ``nn.MultiheadAttention``, with the same parameters under the same names, drawn in the same order.
    Differences: here ``out_proj`` is called as a module, so that hooks and adapters on it run; there is no fused fast
    path, so that train mode (without dropout) and eval mode give the same numbers, with and without gradients; masks of
    mixed dtypes are accepted without a warning; a padding mask for no samples or no keys is accepted without
    ``need_weights`` too; ``qk_head_dim``, ``v_head_dim`` and ``cache`` are extensions.

    Source: Vaswani et al. 2017, section 3.2.2;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html

    >>> _ = torch.manual_seed(0)
    >>> attention = MultiheadAttention(embed_dim=12, num_heads=3, batch_first=True)
    >>> query, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    >>> output, weights = attention(query, memory, memory)
    >>> output.shape, weights.shape
    (torch.Size([2, 5, 12]), torch.Size([2, 5, 7]))
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        qk_head_dim: int | None = None,
        v_head_dim: int | None = None,
    ) -> None:
        validation.check_attention_sizes(embed_dim, num_heads, kdim, vdim, qk_head_dim, v_head_dim)
        super().__init__()
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.head_dim = embed_dim // num_heads if qk_head_dim is None else qk_head_dim
        # num_heads may be reassigned later, as in torch.nn, so store total widths (None: embed_dim) and divide by
        # num_heads at each call. Nothing here reads head_dim; other programs may.
        self._given_widths = tuple(None if size is None else num_heads * size for size in (qk_head_dim, v_head_dim))
        self.add_zero_attn = add_zero_attn
        self._register_parameters(bias, add_bias_kv, {"device": device, "dtype": dtype})
        self._reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.setdefault("_qkv_same_embed_dim", True)  # models pickled by the first releases of torch lack it
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def _register_parameters(self, bias: bool, add_bias_kv: bool, factory: dict[str, Any]) -> None:
        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **factory))

        qk_dim, v_dim = (self.num_heads * size for size in self._head_dims())
        packed = self._qkv_same_embed_dim
        # Registered even if absent, so that the name is listed among the parameters, as in torch.nn.
        register = self.register_parameter
        register("in_proj_weight", parameter(2 * qk_dim + v_dim, self.embed_dim) if packed else None)
        register("q_proj_weight", None if packed else parameter(qk_dim, self.embed_dim))
        register("k_proj_weight", None if packed else parameter(qk_dim, self.kdim))
        register("v_proj_weight", None if packed else parameter(v_dim, self.vdim))
        register("in_proj_bias", parameter(2 * qk_dim + v_dim) if bias else None)
        self.out_proj = NonDynamicallyQuantizableLinear(v_dim, self.embed_dim, bias=bias, **factory)
        register("bias_k", parameter(1, 1, qk_dim) if add_bias_kv else None)
        register("bias_v", parameter(1, 1, v_dim) if add_bias_kv else None)

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            constant_(self.in_proj_bias, 0.0)
            constant_(self.out_proj.bias, 0.0)
        for token in (self.bias_k, self.bias_v):
            if token is not None:
                xavier_normal_(token)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: AttentionCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``.

        Args:
            query: (query_len, batch, embed_dim); (batch, query_len, embed_dim) if batch_first; (query_len, embed_dim).
            key: (key_len, batch, kdim), likewise.
            value: (key_len, batch, vdim), likewise.
            key_padding_mask: (batch, key_len), or (key_len) without a batch. Bool: True = **not** looked at;
                float: added to the scores.
            need_weights: Return the weights. For a query that may look at no key, output and weights are then NaN;
                without weights its context is 0, so that the output is the bias of ``out_proj``.
            attn_mask: (query_len, key_len) or (batch * num_heads, query_len, key_len). Bool: True = may **not** look;
                float: added to the scores.
            average_attn_weights: Return the mean of the weights over heads instead of one map for each head.
            is_causal: Promises that ``attn_mask``, which must still be given, is causal. If ``need_weights`` is False
                and there is neither a padding mask nor a cache, query i then sees keys 0 ... i, and the values of
                ``attn_mask`` are not read. The tokens that ``add_bias_kv`` and ``add_zero_attn`` append are ordinary
                keys then, at positions key_len and key_len + 1; in all other cases every query sees them.
            cache: Keys and values of earlier calls, which this call extends. The masks then span the earlier keys too,
                and ``attn_mask`` is read whatever ``is_causal`` promises. Keyword only.

        Returns:
            The output in the shape of ``query``, and the weights, (batch, query_len, key_len) or
            (batch, num_heads, query_len, key_len), or None. They are the weights after dropout; key_len
            counts appended tokens and cached keys too.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError).
            TypeError: For masks that are neither bool nor float (also an AssertionError).
        """
        given = (attn_mask, key_padding_mask, is_causal)
        validation.check_attention_inputs(self, (query, key, value), given, need_weights, cache=cache)
        batched = query.dim() == 3
        query, key, value = sequence_first(query, key, value, self.batch_first)  # (len, batch, features)
        if cache is None:
            q, k, v = project(query, key, value, self._in_projection())
        else:
            q, k, v = cache.extend(self, query, key, value)
        q, k, v = self._split(q, k, v)  # (b, h, len, d)
        # With a cache, is_causal would misplace the diagonal, so the mask itself is read.
        visible = resolve_masks(attn_mask, key_padding_mask, q, k, is_causal and cache is None, need_weights)
        context, weights = self._attend(q, k, v, visible, need_weights)  # (b, h, q, d), (b, h, q, k)
        # All tokens of all samples in one dimension: the gradient of the bias is then summed as in torch.nn.
        output = self.out_proj(merge_heads(context).flatten(0, 1)).unflatten(0, query.shape[:2])

        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output.squeeze(1), weights if weights is None else weights.squeeze(0)
        return output.transpose(0, 1) if self.batch_first else output, weights

    def _split(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split into heads, (b, h, len, d), and append the tokens of ``add_bias_kv`` and ``add_zero_attn``."""
        if self.bias_k is not None and self.bias_v is not None:
            k, v = append_token(k, self.bias_k), append_token(v, self.bias_v)
        q, k, v = (split_heads(x, self.num_heads) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = append_zeros(k), append_zeros(v)
        return q, k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        scale, dropout_p = score_scale(self._head_dims()[0]), self.dropout if self.training else 0.0
        if need_weights:
            return attend_with_weights(q, k, v, visible.score_bias, scale, dropout_p)
        return attend(q, k, v, visible, scale, dropout_p), None

    def _head_dims(self) -> tuple[int, int]:
        """Return d_k and d_v for the current num_heads, which torch.nn reads at every call too."""
        d_k, d_v = ((self.embed_dim if width is None else width) // self.num_heads for width in self._given_widths)
        return d_k, d_v

    def _in_projection(self) -> "InProjection":
        d_k, d_v = self._head_dims()
        packed = self.in_proj_weight
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else (packed,)
        widths = self.num_heads * d_k, self.num_heads * d_k, self.num_heads * d_v
        return InProjection(tuple(x for x in weights if x is not None), self.in_proj_bias, widths)

    def merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> tuple[Tensor | None, int | None]:
        """Merge both masks into the form that torch's fast path takes.

        ``forward`` resolves masks itself; code written for torch.nn may ask for this form.

        Args:
            attn_mask: (len, len) or (batch * num_heads, len, len), float.
            key_padding_mask: (batch, len), float.
            query: (batch, len, embed_dim).

        Returns:
            The merged mask and its type: (None, None) without masks; the padding mask as it is and 1 if it is the only
            one; else ``attn_mask``, plus the padding mask if there is one, (batch, num_heads, len, len), and 2.

        In torch.nn: ``nn.MultiheadAttention.merge_masks``.

        >>> attention = MultiheadAttention(embed_dim=12, num_heads=3, batch_first=True)
        >>> merged, mask_type = attention.merge_masks(torch.zeros(5, 5), torch.zeros(2, 5), torch.randn(2, 5, 12))
        >>> merged.shape, mask_type
        (torch.Size([2, 3, 5, 5]), 2)
        """
        if attn_mask is None:
            return key_padding_mask, None if key_padding_mask is None else 1
        batch, length, _ = query.shape
        merged = attn_mask.view(batch if attn_mask.dim() == 3 else 1, -1, length, length)
        merged = merged.expand(batch, self.num_heads, -1, -1)
        return merged if key_padding_mask is None else merged + key_padding_mask.view(batch, 1, 1, length), 2


class InProjection(NamedTuple):
    """Wᑫ, Wᴷ and Wⱽ with their biases.

    Args:
        weights: One packed matrix if kdim and vdim are embed_dim, else three.
        bias: The three biases in one vector, or None.
        widths: Number of features of q, k and v, all heads together.

    In torch.nn: ``in_proj_weight``, or ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``; ``in_proj_bias``.
    """

    weights: tuple[Tensor, ...]
    bias: Tensor | None
    widths: tuple[int, int, int]

    def each(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """Return the weight and the bias of each of the three."""
        weights = self.weights if len(self.weights) == 3 else self.weights[0].split(self.widths)
        biases = (None, None, None) if self.bias is None else self.bias.split(self.widths)
        return tuple(zip(weights, biases, strict=True))


def project(query: Tensor, key: Tensor, value: Tensor, projection: InProjection) -> tuple[Tensor, Tensor, Tensor]:
    """Compute Q Wᑫ, K Wᴷ and V Wⱽ, with as few matrix products as the inputs allow.

    With a packed weight one product if all three are the same tensor object, two if only key and value are; else three.

    Args:
        query: (query_len, batch, embed_dim).
        key: (key_len, batch, kdim).
        value: (key_len, batch, vdim).
        projection: The three projections.

    Returns:
        q and k, (len, batch, num_heads * head_dim), and v, (key_len, batch, num_heads * v_head_dim).

    In torch.nn: ``_in_projection_packed`` and ``_in_projection`` inside ``F.multi_head_attention_forward``.
    """
    (weight, *others), bias, (qk_dim, _, v_dim) = projection
    if not others and query is key and key is value:
        q, k, v = unpack(F.linear(query, weight, bias), projection.widths)
        return q, k, v
    if not others and key is value:
        weight_q, weight_kv = weight.split([qk_dim, qk_dim + v_dim])
        bias_q, bias_kv = (None, None) if bias is None else bias.split([qk_dim, qk_dim + v_dim])
        k, v = unpack(F.linear(key, weight_kv, bias_kv), [qk_dim, v_dim])
        return F.linear(query, weight_q, bias_q), k, v
    q, k, v = (F.linear(x, w, b) for x, (w, b) in zip((query, key, value), projection.each(), strict=True))
    return q, k, v


def append_token(x: Tensor, token: Tensor) -> Tensor:
    """Append one learned token, (1, 1, width), to the keys or values of every sample, (key_len, batch, width)."""
    return torch.cat([x, token.repeat(1, x.size(1), 1)])


def append_zeros(x: Tensor) -> Tensor:
    """Append one token of zeros to keys or values, (batch, num_heads, key_len, head_dim)."""
    return torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.size(3))], dim=2)


def resolve_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    q: Tensor,
    k: Tensor,
    is_causal: bool,
    need_weights: bool,
) -> Visible:
    """Combine the masks into one value, as torch.nn's plain path does.

    Args:
        attn_mask: As ``forward`` takes it.
        key_padding_mask: As ``forward`` takes it.
        q: Queries, (batch, num_heads, query_len, head_dim).
        k: Keys, with the appended tokens, (batch, num_heads, key_len, head_dim).
        is_causal: Whether ``attn_mask`` is promised to be causal.
        need_weights: Whether weights are asked for; ``attn_mask`` is then read even if it is promised to be causal.

    Returns:
        A causal diagonal if the promise replaces the mask; else a score bias, -inf where a query may not look,
        (1 or batch, 1 or num_heads, 1 or query_len, key_len); without masks, neither.

    In torch.nn: "merge key padding and attention masks" in ``F.multi_head_attention_forward``.
    """
    if is_causal and key_padding_mask is None and not need_weights:  # the promise replaces the mask
        return Visible(diagonal=0)
    (batch, heads), key_len = q.shape[:2], k.size(2)
    bias = masks.score_bias_from_module(attn_mask, q.dtype)
    if bias is not None:
        bias = F.pad(bias, (0, key_len - bias.size(-1)))  # the appended tokens are always seen
        bias = bias[None, None] if bias.dim() == 2 else bias.unflatten(0, (batch, heads))  # (b, h, q, k)
    padding = masks.score_bias_from_module(key_padding_mask, q.dtype)
    if padding is not None:
        padding = F.pad(padding, (0, key_len - padding.size(-1))).view(batch, 1, 1, key_len)
        # With weights, expanded to every head: the gradient of a float mask is then summed as in torch.nn.
        padding = padding.expand(-1, heads, -1, -1) if need_weights else padding
        bias = padding if bias is None else bias + padding
    return Visible(bias)


def score_scale(d_k: int) -> float:
    """Return 1 / sqrt(d_k), rounded as by torch.nn's module."""
    return math.sqrt(1.0 / float(d_k))


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout_p: float) -> Tensor:
    """Attend without returning the weights.

    Long inputs are computed in tiles (see ``paths.chosen_kernel``), others by ``sdpa.textbook_attention``:
    ``functional.attention``, but with 0 instead of NaN for a query that may look at no key.

    Args:
        q: Queries, (batch, num_heads, query_len, head_dim).
        k: Keys, (batch, num_heads, key_len, head_dim).
        v: Values, (batch, num_heads, key_len, v_head_dim).
        visible: The masks as (score_bias, diagonal): a bias, or the offset of a causal diagonal, or None for both.
        scale: Factor on the scores.
        dropout_p: Probability of dropping each attention weight.

    Returns:
        The context, (batch, num_heads, query_len, v_head_dim). A query that may look at no key gets 0.

    In torch.nn: ``F.scaled_dot_product_attention`` inside ``F.multi_head_attention_forward``.
    """
    kernel = chosen_kernel(q, k, v, visible, dropout_p)
    if kernel is not None:
        return kernel(q, k, v, visible.score_bias, visible.diagonal, scale)
    dtype = q.dtype
    q, k, v = upcast_half(q, k, v)
    return textbook_attention(q, k, v, visible, scale, dropout_p).to(dtype)


def attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, score_bias: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Attend and return the weights too, both equal to those of torch.nn's module to the last bit.

    This is ``functional.attention`` with batch and heads folded into one dimension as in torch.nn:
    ``folded_scores`` gives q kᵀ · scale + score_bias, and ``weigh`` the softmax, the dropout and the product with v.

    Args:
        q: Queries, (batch, num_heads, query_len, head_dim).
        k: Keys, (batch, num_heads, key_len, head_dim).
        v: Values, (batch, num_heads, key_len, v_head_dim).
        score_bias: Added to the scores.
        scale: Factor on the scores.
        dropout_p: Probability of dropping each attention weight.

    Returns:
        The context, (batch, num_heads, query_len, v_head_dim), and the weights, (batch, num_heads, query_len, key_len),
        after dropout. Both are NaN for a query that may look at no key.

    In torch.nn: ``torch.bmm``, or ``torch.baddbmm`` with masks, inside ``F.multi_head_attention_forward``.
    """
    masked_scores = folded_scores(q, k, score_bias, scale)  # (b * h, q, k)
    context, weights = weigh(masked_scores, v.flatten(0, 1), dropout_p)
    return context.unflatten(0, q.shape[:2]), weights.unflatten(0, q.shape[:2])
