"""Multi-head attention: project, attend head by head, put the heads together again."""

import math
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.init import constant_, xavier_normal_, xavier_uniform_
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from scratch import masks, tiling, validation
from scratch.functional import attention, merge_heads, split_heads
from scratch.rounding import sequence_first, unpack, upcast_half

__all__ = [
    "AttentionCache",
    "MultiheadAttention",
    "append_tokens",
    "attend",
    "head_dims",
    "project",
    "projection_weights",
    "resolve_masks",
    "score_scale",
]


class AttentionCache(Protocol):
    """Keys and values that one attention remembers between calls; see ``scratch.decoding``."""

    def extended_len(self, key_len: int) -> int:
        """Say how many keys ``extend`` will hand back when it is given ``key_len`` of them."""

    def extend(
        self, attention: "MultiheadAttention", query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project what is new, remember it, and return the queries with all keys and values."""


class MultiheadAttention(nn.Module):
    r"""Attend from several subspaces at once and mix what they found.

    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) Wᴼ with head_i = Attention(Q W_iᑫ, K W_iᴷ, V W_iⱽ)

    Args:
        embed_dim: Width of queries and of the output.
        num_heads: Number of heads; divides embed_dim unless both head sizes are given.
        dropout: Probability with which a weight is dropped in training.
        bias: Whether the projections have biases.
        add_bias_kv: Append one learnt token to the projected keys and values.
        add_zero_attn: Append one token of zeros to the projected keys and values.
        kdim: Width of ``key``; embed_dim if not given.
        vdim: Width of ``value``; embed_dim if not given.
        batch_first: Inputs and outputs are (batch, len, features) instead of (len, batch, features).
        device: Where the parameters live.
        dtype: Their dtype.
        qk_head_dim: d_k, the size of each head's queries and keys; embed_dim / num_heads if not given.
        v_head_dim: d_v, the size of each head's values; embed_dim / num_heads if not given.

    Raises:
        ValueError: For sizes that are not positive, or an embed_dim that the heads do not divide (also an
            AssertionError).

    In torch.nn: ``nn.MultiheadAttention``, with the same parameters under the same names, drawn in the same order.
    Differences: here ``out_proj`` is called as a module, so that hooks and adapters on it run; there is no fused fast
    path, so train and eval, with and without gradients, give the same numbers; masks of mixed dtypes are
    accepted without a warning; ``qk_head_dim``, ``v_head_dim`` and ``cache`` are extensions.

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
        # As in torch.nn, num_heads may be changed later: what is kept is the width of all heads together.
        self._given_widths = tuple(None if size is None else num_heads * size for size in (qk_head_dim, v_head_dim))
        self.add_zero_attn = add_zero_attn
        _register_parameters(self, bias, add_bias_kv, {"device": device, "dtype": dtype})
        self._reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.setdefault("_qkv_same_embed_dim", True)  # pickles of the first releases of torch are without it
        super().__setstate__(state)  # type: ignore[no-untyped-call]

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
            need_weights: Return the weights. A query that may look at no key is NaN then, and 0 (before
                ``out_proj``) otherwise.
            attn_mask: (query_len, key_len) or (batch * num_heads, query_len, key_len). Bool: True = may **not** look;
                float: added to the scores.
            average_attn_weights: Return the mean of the weights over heads instead of one map for each head.
            is_causal: A promise that ``attn_mask`` is causal. Without weights and padding mask it replaces the mask.
            cache: Keys and values of earlier calls, which this call extends. The masks then span the earlier keys too,
                and ``is_causal`` replaces nothing. Keyword only.

        Returns:
            The output in the shape of ``query``, and the weights, (batch, query_len, key_len) or
            (batch, num_heads, query_len, key_len), or None. They are taken after dropout.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError).
            TypeError: For masks that are neither bool nor float (also an AssertionError).
        """
        validation.check_attention_inputs(
            self, query, key, value, key_padding_mask, attn_mask, is_causal, need_weights, cache=cache
        )
        batched = query.dim() == 3
        query, key, value = sequence_first(query, key, value, self.batch_first)
        q, k, v = project(self, query, key, value) if cache is None else cache.extend(self, query, key, value)
        q = split_heads(q, self.num_heads)  # (b * h, q, d)
        k, v = append_tokens(self, k, v)  # (b * h, k, d)
        # With a cache the queries are not the first ones, as the promise has it: the mask itself is read.
        promised = is_causal and cache is None
        context, weights = attend(self, q, k, v, key_padding_mask, attn_mask, promised, need_weights)
        # One long row of tokens, as torch.nn lays it out: the gradient of the bias is summed in the same order.
        output = self.out_proj(merge_heads(context, self.num_heads).flatten(0, 1)).unflatten(0, query.shape[:2])

        if weights is not None:
            weights = weights.unflatten(0, (query.size(1), self.num_heads))  # (b, h, q, k)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if not batched:
            return output.squeeze(1), weights if weights is None else weights.squeeze(0)
        return output.transpose(0, 1) if self.batch_first else output, weights

    def merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> tuple[Tensor | None, int | None]:
        """Put both masks into the one form that torch's fast path takes.

        ``forward`` resolves masks itself; code written for torch.nn may ask for this form.

        Args:
            attn_mask: (len, len) or (batch * num_heads, len, len), float.
            key_padding_mask: (batch, len), float.
            query: (batch, len, embed_dim).

        Returns:
            Nothing twice without masks; the padding mask as it is, and 1; or their sum,
            (batch, num_heads, len, len), and 2.

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


def head_dims(module: MultiheadAttention) -> tuple[int, int]:
    """Give d_k and d_v, the sizes of one head, for as many heads as there are now.

    Args:
        module: Its ``embed_dim`` and ``num_heads`` are read, and the head sizes that it was built with.

    Returns:
        embed_dim / num_heads twice, unless head sizes were given.

    In torch.nn: ``head_dim`` of ``F.multi_head_attention_forward``, which reads both sizes at every call too.

    >>> attention = MultiheadAttention(embed_dim=12, num_heads=3, v_head_dim=6)
    >>> head_dims(attention)
    (4, 6)
    >>> attention.num_heads = 2
    >>> head_dims(attention)
    (6, 9)
    """
    d_k, d_v = ((module.embed_dim if width is None else width) // module.num_heads for width in module._given_widths)
    return d_k, d_v


def score_scale(module: MultiheadAttention) -> float:
    """Give 1 / sqrt(d_k), as torch.nn's module rounds it and puts it on the queries alone.

    Args:
        module: Whose head size is read.

    Returns:
        The factor.

    In torch.nn: ``q_scaled`` of ``F.multi_head_attention_forward``.
    """
    return math.sqrt(1.0 / float(head_dims(module)[0]))


def project(module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute Q Wᑫ, K Wᴷ and V Wⱽ, in one product where the inputs are the same object.

    Args:
        module: Whose projections are used.
        query: (query_len, batch, embed_dim).
        key: (key_len, batch, kdim).
        value: (key_len, batch, vdim).

    Returns:
        q and k, (len, batch, num_heads * head_dim), and v, (key_len, batch, num_heads * v_head_dim).

    In torch.nn: ``_in_projection_packed`` and ``_in_projection`` inside ``F.multi_head_attention_forward``.
    """
    qk_dim, v_dim = (module.num_heads * size for size in head_dims(module))
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if weight is not None and query is key and key is value:
        q, k, v = unpack(F.linear(query, weight, bias), [qk_dim, qk_dim, v_dim])
        return q, k, v
    if weight is not None and key is value:
        weight_q, weight_kv = weight.split([qk_dim, qk_dim + v_dim])
        bias_q, bias_kv = (None, None) if bias is None else bias.split([qk_dim, qk_dim + v_dim])
        k, v = unpack(F.linear(key, weight_kv, bias_kv), [qk_dim, v_dim])
        return F.linear(query, weight_q, bias_q), k, v
    weights = projection_weights(module)
    biases = (None, None, None) if bias is None else bias.split([qk_dim, qk_dim, v_dim])
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def projection_weights(module: MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Give Wᑫ, Wᴷ and Wⱽ, cut out of the packed matrix where there is one.

    Args:
        module: Whose projections are read.

    Returns:
        The three, (num_heads * head_dim, embed_dim or kdim) and (num_heads * v_head_dim, vdim).

    In torch.nn: the ``chunk(3)`` of ``F.multi_head_attention_forward``.
    """
    if module.in_proj_weight is None:
        assert module.q_proj_weight is not None  # separate weights come as three
        assert module.k_proj_weight is not None
        assert module.v_proj_weight is not None
        return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    qk_dim, v_dim = (module.num_heads * size for size in head_dims(module))
    q, k, v = module.in_proj_weight.split([qk_dim, qk_dim, v_dim])
    return q, k, v


def append_tokens(module: MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Split keys and values into heads, with the tokens of ``add_bias_kv`` and ``add_zero_attn`` where asked for.

    Args:
        module: Which says what is appended.
        k: Projected keys, (key_len, batch, num_heads * head_dim).
        v: Projected values, (key_len, batch, num_heads * v_head_dim).

    Returns:
        Both, (batch * num_heads, key_len, head_dim), up to two tokens longer.

    In torch.nn: ``bias_k``, ``bias_v`` and ``add_zero_attn`` of ``F.multi_head_attention_forward``.
    """
    batch = k.size(1)
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.repeat(1, batch, 1)])
        v = torch.cat([v, module.bias_v.repeat(1, batch, 1)])
    k, v = (split_heads(x, module.num_heads) for x in (k, v))
    if module.add_zero_attn:  # to the split ones, as torch.nn does: products round alike where strides are equal
        k, v = (torch.cat([x, x.new_zeros(x.size(0), 1, x.size(2))], dim=1) for x in (k, v))
    return k, v


def resolve_masks(
    module: MultiheadAttention,
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    need_weights: bool,
) -> Tensor | None:
    """Make one bias of all masks, as torch.nn's plain path does.

    Args:
        module: Which says how many heads there are.
        q: Queries split into heads, (batch * num_heads, query_len, head_dim).
        k: Keys split into heads, with the appended tokens, (batch * num_heads, key_len, head_dim).
        key_padding_mask: As ``forward`` takes it.
        attn_mask: As ``forward`` takes it.
        is_causal: Whether ``attn_mask`` is promised to be causal.
        need_weights: Whether weights are asked for: the promise then replaces nothing.

    Returns:
        (1 or batch, 1 or num_heads, 1 or query_len, key_len), -inf where a query may not look; None without masks.

    In torch.nn: "merge key padding and attention masks" in ``F.multi_head_attention_forward``.
    """
    query_len, key_len, heads = q.size(1), k.size(1), module.num_heads
    batch = q.size(0) // heads
    if is_causal and key_padding_mask is None and not need_weights:
        return masks.to_score_bias(masks.causal(query_len, key_len, device=q.device), q.dtype)[None, None]
    bias = masks.score_bias_from_module(attn_mask, q.dtype)
    if bias is not None:
        bias = F.pad(bias, (0, key_len - bias.size(-1)))  # the appended tokens are always seen
        bias = bias[None, None] if bias.dim() == 2 else bias.unflatten(0, (batch, heads))  # (b, h, q, k)
    padding = masks.score_bias_from_module(key_padding_mask, q.dtype)
    if padding is not None:
        padding = F.pad(padding, (0, key_len - padding.size(-1))).view(batch, 1, 1, key_len)
        # For each head apart, as torch.nn sums the gradient of a float mask; else once is enough.
        padding = padding.expand(-1, heads, -1, -1) if need_weights else padding
        bias = padding if bias is None else bias + padding
    return bias


def attend(
    module: MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Scale the queries and attend, in the layout and precision in which torch.nn does; in tiles at length.

    Args:
        module: Which says how many heads there are and what is dropped.
        q: Queries split into heads, (batch * num_heads, query_len, head_dim).
        k: Keys, (batch * num_heads, key_len, head_dim).
        v: Values, (batch * num_heads, key_len, v_head_dim).
        key_padding_mask: As ``resolve_masks`` takes it.
        attn_mask: As ``resolve_masks`` takes it.
        is_causal: As ``resolve_masks`` takes it.
        need_weights: Return the weights too.

    Returns:
        The context, (batch * num_heads, query_len, v_head_dim), and the weights, (batch * num_heads, query_len,
        key_len), or None.

    In torch.nn: with weights ``torch.bmm``, without ``F.scaled_dot_product_attention``, both inside
    ``F.multi_head_attention_forward``.
    """
    scale, dropout_p = score_scale(module), module.dropout if module.training else 0.0
    resolved = partial(resolve_masks, module, q, k, key_padding_mask, attn_mask, is_causal, need_weights)
    if need_weights:
        score_bias = resolved()
        folded = None if score_bias is None else score_bias.flatten(0, 1)
        return attention(q * scale, k, v, folded, dropout_p, need_weights)
    dtype, lead = q.dtype, (q.size(0) // module.num_heads, module.num_heads)
    diagonal = 0 if is_causal and key_padding_mask is None else None  # a mask that tiles need not see written down
    score_bias = resolved() if diagonal is None else None
    if tiling.take_over(q, k, v, score_bias, dropout_p):
        q, k, v = (x.unflatten(0, lead) for x in (q, k, v))  # (b, h, len, d)
        return tiling.KERNELS[q.device.type](q, k, v, score_bias, diagonal, scale).flatten(0, 1), None
    q, k, v = upcast_half(q, k, v)
    score_bias = resolved() if diagonal is not None else score_bias
    folded = None if score_bias is None else score_bias.expand(*lead, -1, -1).flatten(0, 1).to(q.dtype)
    context, _ = attention(q * scale, k, v, folded, dropout_p)
    return context.to(dtype), None


def _register_parameters(module: MultiheadAttention, bias: bool, add_bias_kv: bool, factory: dict[str, Any]) -> None:
    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, **factory))

    qk_dim, v_dim = (module.num_heads * size for size in head_dims(module))
    packed = module._qkv_same_embed_dim
    # Registered even if absent: a plain None would not be found among the parameters.
    register = module.register_parameter
    register("in_proj_weight", parameter(2 * qk_dim + v_dim, module.embed_dim) if packed else None)
    register("q_proj_weight", None if packed else parameter(qk_dim, module.embed_dim))
    register("k_proj_weight", None if packed else parameter(qk_dim, module.kdim))
    register("v_proj_weight", None if packed else parameter(v_dim, module.vdim))
    register("in_proj_bias", parameter(2 * qk_dim + v_dim) if bias else None)
    module.out_proj = NonDynamicallyQuantizableLinear(v_dim, module.embed_dim, bias=bias, **factory)
    register("bias_k", parameter(1, 1, qk_dim) if add_bias_kv else None)
    register("bias_v", parameter(1, 1, v_dim) if add_bias_kv else None)
