"""Attention whose scores a function may change: torch's flex attention, behind the checks of scratch.

Called as it is, it computes every score and then hides some; under ``torch.compile`` it becomes one kernel that leaves
hidden blocks out.
"""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from scratch import flex as by_hand
from scratch import validation
from scratch.documentation import documented_like
from scratch.flex import BLOCK_LENGTH, Device, MaskMod, ScoreMod, device_or_accelerator

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
    validation.check_flex_attention(query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux)
    validation.check_flex_on_device(query, key, value, return_aux)
    wanted = AuxRequest(lse=return_lse) if return_aux is None else AuxRequest(*return_aux)
    options: Any = kernel_options
    output, aux = torch_flex.flex_attention(
        query, key, value, score_mod, as_torchs(block_mask), scale, enable_gqa, False, options, return_aux=wanted
    )
    if return_aux is not None:
        return output, aux
    return (output, aux.lse) if return_lse else output


def as_torchs(block_mask: Any) -> BlockMask | None:
    """Make torch's block mask of one of scratch, and leave others as they are."""
    if not isinstance(block_mask, by_hand.BlockMask):
        return block_mask
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return BlockMask.from_kv_blocks(*lists, block_mask.BLOCK_SIZE, block_mask.mask_mod, block_mask.seq_lengths)


@documented_like(by_hand.and_masks)
def and_masks(*mask_mods: MaskMod) -> MaskMod:
    validation.check_functions("mask_mods", mask_mods)
    return torch_flex.and_masks(*mask_mods)


@documented_like(by_hand.or_masks)
def or_masks(*mask_mods: MaskMod) -> MaskMod:
    validation.check_functions("mask_mods", mask_mods)
    return torch_flex.or_masks(*mask_mods)


@documented_like(by_hand.create_mask)
def create_mask(
    mod_fn: ScoreMod | MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device = None,
) -> Bool[Tensor, "batch num_heads query_len key_len"]:
    validation.check_create_mask(mod_fn, B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    may_attend = torch_flex.create_mask(mod_fn, B, H, Q_LEN, KV_LEN, device_or_accelerator(device))
    validation.check_mask_mod_result(may_attend)
    return may_attend


@documented_like(by_hand.create_block_mask)
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device = None,
    BLOCK_SIZE: int | tuple[int, int] = BLOCK_LENGTH,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> "BlockMask":
    """In torch.nn: ``torch.nn.attention.flex_attention.create_block_mask``, which writes the mask out as a whole first.

    Traps:
        Without B a plan is made for one sample and serves all: see trap `flex_plan_of_one_sample`.
        Indices count from 0, also those of queries behind a cache: see trap `flex_index_from_zero`.
    """
    validation.check_create_block_mask(mask_mod, BLOCK_SIZE, B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    place = device_or_accelerator(device)
    validation.check_mask_mod_result(torch_flex.create_mask(mask_mod, 1, 1, 1, 1, place))
    given = {"separate_full_blocks": separate_full_blocks, "compute_dq_write_order": compute_dq_write_order}
    given |= {"dq_kv_order": dq_kv_order}
    usual = {"separate_full_blocks": True, "compute_dq_write_order": False, "dq_kv_order": True}
    # torch 2.11 does not have these three.
    options: dict[str, Any] = {name: x for name, x in given.items() if x is not usual[name]}
    validation.check_known_to_torch(torch_flex.create_block_mask, options)
    return torch_flex.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, place, BLOCK_SIZE, _compile, **options)
