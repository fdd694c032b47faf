"""Attention whose scores a function may change: torch's flex attention, behind the checks of scratch.

Called as it is, it computes every score and then hides some; under ``torch.compile`` it becomes one kernel that leaves
hidden blocks out.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from torch.nn.attention.flex_attention import flex_attention as torchs  # as it is now, whatever takes its place

from builtin.block_masks import BlockMask, as_torchs, create_block_mask
from builtin.mask_functions import and_masks, create_mask, noop_mask, or_masks
from scratch import flex as by_hand
from scratch import validation
from scratch.documentation import documented_like
from scratch.mask_functions import ScoreMod

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]


@documented_like(by_hand.flex_attention)
def flex_attention(
    query: Float[Tensor, "batch num_heads query_len head_dim"],
    key: Float[Tensor, "key_batch num_key_heads key_len head_dim"],
    value: Float[Tensor, "key_batch num_key_heads key_len v_head_dim"],
    score_mod: ScoreMod | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: "AuxRequest | None" = None,
) -> Any:
    """In torch.nn: ``torch.nn.attention.flex_attention.flex_attention``. On CPU it gives neither gradients of its
    inputs nor ``max_scores``, and both are refused here with the reason. To compile it, compile the function that calls
    it.

    Traps:
        The CPU has no gradient, not even of parameters under ``torch.no_grad()``: see trap `flex_no_cpu_gradient`.
        A sink cannot be a ``score_mod``: see trap `flex_sink_in_score_mod`.
        Only compiled kernels obey the lists of a block mask: see trap `flex_eager_ignores_blocks`.
        One kernel option asks for more than it says: see trap `flex_rows_guaranteed_safe`.
        Keys of grouped heads are repeated one by one: see trap `grouped_heads_tiled`.

    >>> import torch
    >>> query, keys, values = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.eye(3)[None, None]
    >>> causal = create_block_mask(lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx, None, None, 3, 3, "cpu")
    >>> flex_attention(query, keys, values, block_mask=causal)  # equal scores: the weights are even
    tensor([[[[1.0000, 0.0000, 0.0000],
              [0.5000, 0.5000, 0.0000],
              [0.3333, 0.3333, 0.3333]]]])
    >>> flex_attention(query, keys, values, lambda score, batch, head, q_idx, kv_idx: score - (q_idx - kv_idx).abs())
    tensor([[[[0.6652, 0.2447, 0.0900],
              [0.2119, 0.5761, 0.2119],
              [0.0900, 0.2447, 0.6652]]]])
    """
    validation.check_flex_attention(query, key, value, score_mod, block_mask, enable_gqa)
    validation.check_request(return_aux, return_lse)
    validation.check_flex_on_device(query, key, value, return_aux)
    wanted = AuxRequest(lse=return_lse) if return_aux is None else AuxRequest(*return_aux)
    options: Any = kernel_options
    output, aux = torchs(
        query, key, value, score_mod, as_torchs(block_mask), scale, enable_gqa, False, options, return_aux=wanted
    )
    if return_aux is not None:
        return output, aux
    return (output, aux.lse) if return_lse else output
