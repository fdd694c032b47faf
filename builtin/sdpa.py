"""Attention as one call of torch, whose kernels contain every step that scratch writes out."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs  # as it is now, whatever takes its place

from scratch import sdpa as by_hand
from scratch import validation
from scratch.documentation import documented_like

__all__ = ["scaled_dot_product_attention"]


@documented_like(by_hand.scaled_dot_product_attention)
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
    """In torch.nn: ``F.scaled_dot_product_attention``. It picks one of several kernels;
    ``torch.nn.attention.sdpa_kernel`` restricts the choice.

    Traps:
        True means the opposite in torch.nn's modules: see trap `mask_polarity`.
        ``is_causal`` starts at the upper left corner, however many keys there are: see trap `sdpa_top_left`.
        On some paths torch accepts ``attn_mask`` together with ``is_causal``: see trap `sdpa_mask_and_causal`.
        On CPU torch accepts fewer values than keys: see trap `sdpa_lengths_unchecked`.
        Scores that overflow give zeros instead of NaN: see trap `overflow_becomes_zeros`.
        There is no training mode: see trap `sdpa_dropout_in_eval`.
        A mask of 0.0 and 1.0 hides nothing: see trap `float_mask_added`.
        A padding mask needs dimensions for heads and queries: see trap `sdpa_padding_mask_axes`.
        Heads come before tokens, (batch, heads, len, head_dim): see trap `sdpa_heads_before_length`.
        Queries that are scaled already are scaled again: see trap `sdpa_scaled_twice`.
        Only the MATH kernel has a second derivative: see trap `no_second_derivative`.
        Nothing says which kernel ran: see traps `sdpa_falls_back`, `sdpa_without_batch`.
        With ``enable_gqa`` in float32 it is the slow one on CUDA: see trap `gqa_falls_back`.
        Gradients on CUDA may differ from run to run: see trap `deterministic_by_kernel`.
        Compiled, attention by hand may become another call of it: see trap `compile_rewrites_attention`.
        Libraries may pass no mask: see traps `attention_function_without_mask`, `all_ones_mask_unpacks`.

    >>> query, keys, values = torch.randn(2, 3, 5, 11), torch.randn(2, 3, 7, 11), torch.randn(2, 3, 7, 13)
    >>> scaled_dot_product_attention(query, keys, values, is_causal=True).shape
    torch.Size([2, 3, 5, 13])
    """
    validation.check_scaled_dot_product_attention((query, key, value), attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and not validation.is_causal_bias(attn_mask):
        attn_mask = torch.atleast_2d(attn_mask)  # the fused kernel on CPU fails with fewer dimensions
    return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
