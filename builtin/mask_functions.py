"""Mask functions for torch's flex attention, behind the checks of scratch."""

from jaxtyping import Bool
from torch import Tensor

# As they are now, whatever takes their place.
from torch.nn.attention.flex_attention import and_masks as torchs_and_masks
from torch.nn.attention.flex_attention import create_mask as torchs_create_mask
from torch.nn.attention.flex_attention import noop_mask
from torch.nn.attention.flex_attention import or_masks as torchs_or_masks

from scratch import mask_functions as by_hand
from scratch import validation
from scratch.documentation import documented_like
from scratch.mask_functions import Device, MaskMod, ScoreMod, device_or_accelerator

__all__ = ["and_masks", "create_mask", "noop_mask", "or_masks"]


@documented_like(by_hand.and_masks)
def and_masks(*mask_mods: MaskMod) -> MaskMod:
    validation.check_functions("mask_mods", mask_mods)
    return torchs_and_masks(*mask_mods)


@documented_like(by_hand.or_masks)
def or_masks(*mask_mods: MaskMod) -> MaskMod:
    validation.check_functions("mask_mods", mask_mods)
    return torchs_or_masks(*mask_mods)


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
    may_attend = torchs_create_mask(mod_fn, B, H, Q_LEN, KV_LEN, device_or_accelerator(device))
    validation.check_mask_mod_result(may_attend)
    return may_attend
