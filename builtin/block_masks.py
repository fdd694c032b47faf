"""The block masks of torch's flex attention, behind the checks of scratch."""

from typing import Any

from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.attention.flex_attention import create_block_mask as torchs  # as it is now, whatever takes its place

from scratch import block_masks as by_hand
from scratch import validation
from scratch.block_masks import BLOCK_LENGTH
from scratch.documentation import documented_like
from scratch.mask_functions import Device, MaskMod, device_or_accelerator

__all__ = ["BlockMask", "create_block_mask"]


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
        Without B the blocks are found for one sample, and used for all: see trap `flex_plan_of_one_sample`.
        Indices count from 0, those of queries after a cache too: see trap `flex_index_from_zero`.
        Building it takes the memory of the whole mask: see trap `block_mask_written_out`.
        A table that the function reads must reach to the end of the last block: see trap `mask_mod_asked_beyond_end`.
    """
    validation.check_create_block_mask(mask_mod, BLOCK_SIZE, B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    place = device_or_accelerator(device)
    validation.check_mask_mod_result(create_mask(mask_mod, 1, 1, 1, 1, place))
    given = {"separate_full_blocks": separate_full_blocks, "compute_dq_write_order": compute_dq_write_order}
    given |= {"dq_kv_order": dq_kv_order}
    usual = {"separate_full_blocks": True, "compute_dq_write_order": False, "dq_kv_order": True}
    # torch 2.11 does not have these three.
    options: dict[str, Any] = {name: x for name, x in given.items() if x is not usual[name]}
    validation.check_known_to_torch(torchs, options)
    return torchs(mask_mod, B, H, Q_LEN, KV_LEN, place, BLOCK_SIZE, _compile, **options)


def as_torchs(block_mask: Any) -> BlockMask | None:
    """Make torch's block mask of one of scratch, and leave others as they are."""
    if not isinstance(block_mask, by_hand.BlockMask):
        return block_mask
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return BlockMask.from_kv_blocks(*lists, block_mask.BLOCK_SIZE, block_mask.mask_mod, block_mask.seq_lengths)
