"""Mask functions: a mask as a function of four indices, for one query and one key, called for all of them at once.

Dimension letters: b batch, h num_heads, q query_len, k key_len.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scratch import validation

__all__ = ["and_masks", "create_mask", "noop_mask", "or_masks"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Device = torch.device | str | None


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """Let every query look at every key.

    Args:
        batch: Index of the sample.
        head: Index of the query's head.
        token_q: Index of the query.
        token_kv: Index of the key.

    Returns:
        True.

    In torch.nn: ``torch.nn.attention.flex_attention.noop_mask``.
    """
    return batch.new_ones((), dtype=torch.bool)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Let a query look where all of several mask functions let it.

    Args:
        *mask_mods: Functions of (batch, head, q_idx, kv_idx).

    Returns:
        One such function.

    Raises:
        TypeError: If one of them is not a function (also a RuntimeError).

    In torch.nn: ``torch.nn.attention.flex_attention.and_masks``.
    """
    validation.check_functions("mask_mods", mask_mods)

    def all_of_them(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        may_attend = noop_mask(batch, head, q_idx, kv_idx)
        for mask_mod in mask_mods:
            may_attend = may_attend & mask_mod(batch, head, q_idx, kv_idx)
        return may_attend

    return all_of_them


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Let a query look where at least one of several mask functions lets it.

    Args:
        *mask_mods: Functions of (batch, head, q_idx, kv_idx).

    Returns:
        One such function.

    Raises:
        TypeError: If one of them is not a function (also a RuntimeError).

    In torch.nn: ``torch.nn.attention.flex_attention.or_masks``.
    """
    validation.check_functions("mask_mods", mask_mods)

    def any_of_them(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        may_attend = ~noop_mask(batch, head, q_idx, kv_idx)
        for mask_mod in mask_mods:
            may_attend = may_attend | mask_mod(batch, head, q_idx, kv_idx)
        return may_attend

    return any_of_them


def create_mask(
    mod_fn: ScoreMod | MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device = None,
) -> Bool[Tensor, "batch num_heads query_len key_len"]:
    """Write out a mask function as a tensor.

    may_attend[b, h, i, j] = mask_mod(b, h, i, j)

    Args:
        mod_fn: A function of (batch, head, q_idx, kv_idx); or a score function, whose scores of -inf are hidden.
        B: Batch; 1 if None.
        H: Number of heads; 1 if None.
        Q_LEN: Number of queries.
        KV_LEN: Number of keys.
        device: Where to build it; the accelerator if there is one and None is given.

    Returns:
        (B, H, Q_LEN, KV_LEN), True = may look.

    Raises:
        ValueError: For a negative size.
        TypeError: If ``mod_fn`` is not a function of four or five arguments, or a mask function does not return bool.

    In torch.nn: ``torch.nn.attention.flex_attention.create_mask``.

    >>> create_mask(lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 3, "cpu").int()
    tensor([[[[1, 0, 0],
              [1, 1, 0]]]], dtype=torch.int32)
    """
    takes_scores = validation.check_create_mask(mod_fn, B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    sizes = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    indices = [torch.arange(size, device=device_or_accelerator(device)) for size in sizes]
    if takes_scores:
        scores = torch.zeros(sizes, device=indices[0].device)
        return at_every_place(mod_fn, indices, scores) != -math.inf
    may_attend = at_every_place(mod_fn, indices)
    validation.check_mask_mod_result(may_attend)
    return may_attend


def at_every_place(function: Callable[..., Tensor], indices: Sequence[Tensor], *scores: Tensor) -> Tensor:
    """Call a function of single indices, and of a score before them, for all places at once: (b, h, q, k)."""
    shape = tuple(map(len, indices))
    if 0 in shape:  # vmap needs at least one
        return scores[0] if scores else torch.zeros(shape, dtype=torch.bool, device=indices[0].device)
    for mapped in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *mapped))
    with IndexedByTensors():
        return function(*scores, *indices)


class IndexedByTensors(TorchFunctionMode):
    """Make ``table[q_idx]`` work where ``q_idx`` stands for many indices at once: vmap cannot turn it into a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Index by tensors alone where one stands among the indices."""
        if func is Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(x, Tensor | int) for x in indices) and any(isinstance(x, Tensor) for x in indices):
                return torch.ops.aten.index(args[0], [torch.as_tensor(x, device=args[0].device) for x in indices])
        return func(*args, **(kwargs or {}))


def device_or_accelerator(device: Device) -> torch.device:
    """Return the device that torch uses where none is named: on a CUDA build without a GPU, the CPU."""
    return torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
