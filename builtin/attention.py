"""Multi-head attention as torch.nn has it, behind the checks that both packages share."""

import torch
from torch import Tensor, nn

from scratch import attention as by_hand
from scratch import validation
from scratch.attention import AttentionCache
from scratch.documentation import documented_like

__all__ = ["MultiheadAttention"]


@documented_like(by_hand.MultiheadAttention)
class MultiheadAttention(nn.MultiheadAttention):
    """In torch.nn: ``nn.MultiheadAttention``, of which this is a subclass. Its ``forward`` takes one of three paths:
    ``torch._native_multi_head_attention`` (the fast path: eval, no gradients, self-attention with biases and without
    appended tokens, batch first, an even number of heads, no float mask), ``F.scaled_dot_product_attention``
    (need_weights=False), or ``torch.bmm`` (``torch.baddbmm`` with a mask), softmax and a second ``torch.bmm``.

    Raises:
        ValueError: For sizes that are not positive, or an embed_dim that num_heads does not divide (also an
            AssertionError); and if a head size is given, because torch.nn has no other than embed_dim / num_heads.

    Traps:
        Sequence first by default, and batch-first input raises no error: see trap `batch_first_default`.
        ``in_proj_weight`` is initialised as one (3 e, e) matrix, with smaller values than three (e, e) matrices get:
        see trap `packed_init`.
        ``kdim`` and ``vdim`` change the names in the state_dict: see trap `state_dict_forks`.
        ``add_bias_kv`` adds a token, not a bias: see trap `bias_kv_is_a_token`.
        A causal mask does not reach the zero token: see trap `zero_attn_after_causal`.
        Hooks and adapters on ``out_proj`` never run: see trap `out_proj_never_called`.
        The fast path treats padding in its own way: see trap `fast_path_padding`.
    """

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
        validation.check_no_head_dims(qk_head_dim, v_head_dim)
        validation.check_attention_sizes(embed_dim, num_heads, kdim, vdim, None, None)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

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
        """In torch.nn: ``nn.MultiheadAttention.forward``, called as it is.

        Raises:
            ValueError: For shapes that do not fit together (also a RuntimeError and an AssertionError), and for a
                cache, which torch.nn does not have.
            TypeError: For masks that are neither bool nor float (also an AssertionError).

        Traps:
            True means the opposite in ``F.scaled_dot_product_attention``: see trap `mask_polarity`.
            A query that may look at no key gets NaN, 0 or a bias, depending on the path: see trap `fully_masked_row`.
            ``is_causal`` masks nothing by itself: see trap `is_causal_is_a_hint`.
            The fast path accepts ``is_causal`` without a mask: see trap `is_causal_without_mask`.
            Where ``is_causal`` replaces the mask, the shape of the mask is not checked: see trap `promise_drops_mask`.
            With appended tokens the hint changes the output: see trap `is_causal_with_extra_tokens`.
            A mask of 0.0 and 1.0 hides nothing: see trap `float_mask_added`.
            A padding mask is (batch, key_len) even without batch_first: see trap `padding_mask_batch_first`.
            In a 3-D mask the heads of one sample follow one another: see trap `mask_3d_order`.
            The default need_weights=True is the slow path: see trap `need_weights_slow_path`.
            Without a batch dimension self-attention costs three projections: see trap `unbatched_projects_thrice`.
            The weights are averaged over heads, after dropout: see traps `weights_averaged`, `weights_after_dropout`.
            Padded queries carry numbers too: see trap `padded_queries_carry_numbers`.
            With need_weights=False there may be no second derivative: see trap `no_second_derivative`.
        """
        validation.check_no_cache(cache)
        given = (attn_mask, key_padding_mask, is_causal)
        validation.check_attention_inputs(self, (query, key, value), given, need_weights)
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
