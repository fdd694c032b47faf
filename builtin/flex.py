"""Attention whose scores a function may change: torch's flex attention, behind the checks of scratch.

Called as it is, it computes every score and then hides some; under ``torch.compile`` it becomes one kernel that leaves
hidden blocks out.
"""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from scratch import flex as scratch_flex
from scratch import validation
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
    """Attend with scores that a function may change, over the blocks of keys that a mask leaves.

    Attention(Q, K, V) = softmax(score_mod(Q Kᵀ * scale)) V

    Args:
        query: (batch, num_heads, query_len, head_dim).
        key: (batch, num_key_heads, key_len, head_dim). Beside a block mask for each sample, one sample of keys may
            serve them all.
        value: (batch, num_key_heads, key_len, v_head_dim).
        score_mod: Called with (score, batch, head, q_idx, kv_idx), each of them a single number, and gives the score
            that takes its place. It may index tensors of its own, which then get gradients.
        block_mask: Made by ``create_block_mask``, in either package or in torch.
        scale: Factor on the scores, before ``score_mod``; 1 / sqrt(head_dim) if not given.
        enable_gqa: Grouped heads: each head of keys serves num_heads / num_key_heads heads of queries that follow one
            another.
        return_lse: Return the log-sum-exp too. ``return_aux`` says the same, and torch calls this one deprecated.
        kernel_options: For torch's compiled kernels.
        return_aux: What to return beside the output.

    Returns:
        (batch, num_heads, query_len, v_head_dim), in the dtype of the query. A query that may look at no key gets 0,
        with gradient 0. With ``return_aux`` or ``return_lse`` a pair: the output and an ``AuxOutput``, or the output
        and (batch, num_heads, query_len).

    Raises:
        ValueError: For shapes that do not fit together, a block mask of other lengths, or kernel options.
        TypeError: For what is no tensor, no function or no block mask.

    In torch.nn: ``torch.nn.attention.flex_attention.flex_attention``. On CPU it gives neither gradients of its inputs
    nor ``max_scores``, and both are refused here with the reason. To compile it, compile the function that calls it.

    Traps:
        The CPU has no gradient, not even of parameters under ``torch.no_grad()``: see trap `flex_no_cpu_gradient`.
        A sink cannot be a ``score_mod``: see trap `flex_sink_in_score_mod`.
        Only compiled kernels obey the lists of a block mask: see trap `flex_eager_ignores_blocks`.
        One kernel option asks for more than it says: see trap `flex_rows_guaranteed_safe`.
        Keys of grouped heads are repeated one by one: see trap `grouped_heads_tiled`.

    Source: Dong et al. 2024, section 3; https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html

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
    if not isinstance(block_mask, scratch_flex.BlockMask):
        return block_mask
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return BlockMask.from_kv_blocks(*lists, block_mask.BLOCK_SIZE, block_mask.mask_mod, block_mask.seq_lengths)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Let a query look where all of several mask functions let it.

    Args:
        *mask_mods: Functions of (batch, head, q_idx, kv_idx).

    Returns:
        One such function.

    Raises:
        TypeError: If one of them is no function (also a RuntimeError).

    In torch.nn: ``torch.nn.attention.flex_attention.and_masks``.
    """
    validation.check_functions("mask_mods", mask_mods)
    return torch_flex.and_masks(*mask_mods)


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Let a query look where at least one of several mask functions lets it.

    Args:
        *mask_mods: Functions of (batch, head, q_idx, kv_idx).

    Returns:
        One such function.

    Raises:
        TypeError: If one of them is no function (also a RuntimeError).

    In torch.nn: ``torch.nn.attention.flex_attention.or_masks``.
    """
    validation.check_functions("mask_mods", mask_mods)
    return torch_flex.or_masks(*mask_mods)


def create_mask(
    mod_fn: ScoreMod | MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device = None,
) -> Bool[Tensor, "batch num_heads query_len key_len"]:
    """Write a mask function out as a tensor.

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
        TypeError: For what is no function of four or five arguments, or a mask function that gives no bool.

    In torch.nn: ``torch.nn.attention.flex_attention.create_mask``.

    >>> create_mask(lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 3, "cpu").int()
    tensor([[[[1, 0, 0],
              [1, 1, 0]]]], dtype=torch.int32)
    """
    validation.check_create_mask(mod_fn, B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    may_attend = torch_flex.create_mask(mod_fn, B, H, Q_LEN, KV_LEN, device_or_accelerator(device))
    validation.check_mask_mod_result(may_attend)
    return may_attend


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
    """Find out which blocks of keys each block of queries can see: some of their keys, or all.

    Args:
        mask_mod: A function of (batch, head, q_idx, kv_idx) that gives True where the query may look at the key.
        B: Batch; None if the function does not look at the sample: one plan then serves them all.
        H: Number of query heads; None if the function does not look at the head.
        Q_LEN: Number of queries.
        KV_LEN: Number of keys.
        device: Where to build it; the accelerator if there is one and None is given.
        BLOCK_SIZE: Queries and keys of a block, as one number or two.
        _compile: For torch alone, which calls it deprecated.
        separate_full_blocks: List blocks that are seen as a whole apart, so that ``mask_mod`` is not asked there.
        compute_dq_write_order: For one of torch's kernels.
        dq_kv_order: Of the order before.

    Returns:
        A ``BlockMask``.

    Raises:
        ValueError: For a size below 1, or an argument that must stay at its default.
        TypeError: For what is no function of four arguments, or one that gives no bool.

    In torch.nn: ``torch.nn.attention.flex_attention.create_block_mask``, which writes the mask out as a whole first.

    Traps:
        Without B a plan is made for one sample and serves all: see trap `flex_plan_of_one_sample`.
        Indices count from 0, also those of queries behind a cache: see trap `flex_index_from_zero`.

    Source: Dong et al. 2024, section 4.2.

    >>> causal = create_block_mask(lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx, None, None, 6, 6, "cpu", 2)
    >>> causal.to_dense()
    tensor([[[[1, 0, 0],
              [1, 1, 0],
              [1, 1, 1]]]], dtype=torch.int32)
    >>> causal.kv_num_blocks, causal.full_kv_num_blocks  # the diagonal is masked, what lies below is seen as a whole
    (tensor([[[1, 1, 1]]], dtype=torch.int32), tensor([[[0, 1, 2]]], dtype=torch.int32))
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
