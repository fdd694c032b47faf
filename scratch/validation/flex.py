"""What ``flex_attention`` and the makers of block masks are given."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentUnsupportedError,
    ArgumentValueError,
    check_not_negative,
    check_positive,
    check_tensor,
    check_whole,
    shape,
)
from scratch.validation.sdpa import check_head_dim_and_key_len

__all__ = [
    "check_block_lists",
    "check_create_block_mask",
    "check_create_mask",
    "check_defaults",
    "check_flex_attention",
    "check_flex_on_device",
    "check_functions",
    "check_grouped_heads",
    "check_mask_mod_result",
    "check_no_kernel_options",
    "check_request",
    "sliced_mask_mod",
]

FOUR_AXES = {
    "query": "(batch, num_heads, query_len, head_dim)",
    "key": "(batch, num_key_heads, key_len, head_dim)",
    "value": "(batch, num_key_heads, key_len, v_head_dim)",
}
MASK_MOD, SCORE_MOD = "(batch, head, q_idx, kv_idx)", "(score, batch, head, q_idx, kv_idx)"


def check_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    enable_gqa: bool,
) -> None:
    """Check what ``flex_attention`` computes with."""
    _check_kinds(query, key, value)
    check_head_dim_and_key_len(query, key, value)
    if value.shape[:2] != key.shape[:2]:
        raise ArgumentValueError(
            f"value must have the batch and the heads of key, {shape(key.shape[:2])}, got shape {shape(value)}"
        )
    check_grouped_heads(query, key, 1, enable_gqa)
    if score_mod is not None:
        _check_number_of_arguments("score_mod", score_mod, (5,))
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
    planned = block_mask is not None and block_mask.kv_num_blocks.size(0) == query.size(0)
    if key.size(0) != query.size(0) and not (planned and key.size(0) == 1):
        raise ArgumentValueError(
            f"key must have the batch of query, {query.size(0)}, or 1 beside a block_mask for each sample, "
            f"got shape {shape(key)}"
        )


def check_request(return_aux: Any, return_lse: bool = False) -> None:
    """Require an ``AuxRequest``, of either package or of torch, and no second way of asking beside it."""
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise ArgumentTypeError(f"return_aux must be an AuxRequest, got {type(return_aux).__name__}")
    if return_lse and return_aux is not None:
        raise ArgumentValueError("return_lse and return_aux exclude each other: ask by return_aux alone, got both")


def _check_kinds(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.is_nested or x.dim() != 4:
            got = "a nested tensor" if x.is_nested else f"shape {shape(x)}"
            raise ArgumentUnsupportedError(f"{name} must be 4-D {FOUR_AXES[name]}, got {got}")
        if not x.is_floating_point():
            raise ArgumentTypeError(f"{name} must be floating, got {x.dtype}")
        if x.device != query.device:
            raise ArgumentValueError(
                f"query, key and value must be on the same device, got {query.device}, {key.device} and {value.device}"
            )
        if 0 in x.shape[1:] and (name == "key" or 0 in (x.size(1), query.size(3))):
            raise ArgumentValueError(
                f"{name} must have at least one head, one key and one feature to compare, got shape {shape(x)}"
            )


def check_grouped_heads(query: Tensor, key: Tensor, heads_dim: int, enable_gqa: bool) -> None:
    """Require as many heads of keys as of queries, or a number that divides it where heads are grouped."""
    heads, key_heads = query.size(heads_dim), key.size(heads_dim)
    if not enable_gqa and heads != key_heads:
        raise ArgumentValueError(
            f"key must have the heads of query, {heads}, got {key_heads} from shape {shape(key)}; enable_gqa=True lets "
            f"a head of keys serve several of queries"
        )
    if heads % key_heads:
        raise ArgumentValueError(
            f"the heads of key must divide the heads of query, got {key_heads} and {heads} from shapes {shape(key)} "
            f"and {shape(query)}"
        )


def _check_block_mask(block_mask: Any, query: Tensor, key: Tensor) -> None:
    if not all(hasattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "mask_mod")):
        raise ArgumentTypeError(
            f"block_mask must be a BlockMask, as create_block_mask makes it, got {type(block_mask).__name__}"
        )
    expected = query.size(0), query.size(1), query.size(2), key.size(2)
    found = tuple(block_mask.shape)
    if found[2:] != expected[2:]:
        raise ArgumentValueError(
            f"block_mask must be made for (query_len, key_len) = {expected[2:]}, got one for {found[2:]}: make another "
            f"with create_block_mask"
        )
    if any(size not in (1, most) for size, most in zip(found[:2], expected[:2], strict=True)):
        raise ArgumentValueError(
            f"block_mask must be made for (batch, num_heads) = {expected[:2]}, or 1 in their place, got {found[:2]}"
        )
    if block_mask.kv_num_blocks.device != query.device:
        raise ArgumentValueError(
            f"block_mask must be on the device of query, {query.device}, got {block_mask.kv_num_blocks.device}: move "
            f"it with block_mask.to"
        )


def sliced_mask_mod(*_indices: Tensor) -> NoReturn:
    """Stand where the mask function of a sliced block mask has to be set anew, and refuse."""
    raise ArgumentValueError(
        "block_mask was sliced, and the indices of what is left are not those that its mask_mod was written for: set "
        "mask_mod to a function of the new indices (Cannot use mask_mod from a sliced BlockMask)"
    )


def check_no_kernel_options(kernel_options: object) -> None:
    """Refuse options of kernels that are not called."""
    if kernel_options:
        raise ArgumentValueError(
            f"kernel_options are for torch's compiled kernels, which scratch does not call: leave them out, or use "
            f"builtin.flex_attention; got {kernel_options!r}"
        )


def check_flex_on_device(query: Tensor, key: Tensor, value: Tensor, return_aux: Any) -> None:
    """Refuse what torch's ``flex_attention`` does not do on the CPU."""
    if query.device.type != "cpu":
        return
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.requires_grad:
            raise ArgumentUnsupportedError(
                f"{name} must not require a gradient on the CPU, where torch's flex_attention has none, not even "
                f"under torch.no_grad: use scratch.flex_attention, or detach it"
            )
    if return_aux is not None and return_aux.max_scores:
        raise ArgumentUnsupportedError(
            "return_aux must not ask for max_scores on the CPU, where torch's flex_attention does not give them: use "
            "scratch.flex_attention"
        )


def check_functions(name: str, functions: Sequence[Any]) -> None:
    """Require functions."""
    for function in functions:
        if not callable(function):
            raise ArgumentTypeError(f"{name} must be functions of {MASK_MOD}, got {function!r}")


def _check_number_of_arguments(name: str, function: Callable[..., Tensor], counts: Sequence[int]) -> int:
    """Require a function that takes the indices, with or without a score; give how many arguments it takes."""
    expected = " or ".join({4: MASK_MOD, 5: SCORE_MOD}[count] for count in counts)
    if not callable(function):
        raise ArgumentTypeError(f"{name} must be a function of {expected}, got {type(function).__name__}")
    taken = [x for x in inspect.signature(function).parameters.values() if x.default is inspect.Parameter.empty]
    if len(taken) not in counts:
        raise ArgumentTypeError(
            f"{name} must be a function of {expected}, got one of ({', '.join(x.name for x in taken)})"
        )
    return len(taken)


def check_create_mask(mod_fn: Callable[..., Tensor], **sizes: int | None) -> bool:
    """Check what ``create_mask`` is given, and say whether it is a function of a score."""
    check_not_negative(**sizes)
    return _check_number_of_arguments("mod_fn", mod_fn, (4, 5)) == 5


def check_create_block_mask(mask_mod: Callable[..., Tensor], block_size: object, **sizes: int | None) -> None:
    """Check what ``create_block_mask`` is given."""
    _check_number_of_arguments("mask_mod", mask_mod, (4,))
    check_positive(**{name: size for name, size in sizes.items() if size is not None})
    sides = (block_size, block_size) if isinstance(block_size, int) else block_size
    if not isinstance(sides, Sequence) or len(sides) != 2:
        raise ArgumentValueError(f"BLOCK_SIZE must be one number or two, for queries and keys, got {block_size!r}")
    for side in sides:
        check_whole(BLOCK_SIZE=side)
        if side < 1:
            raise ArgumentValueError(f"BLOCK_SIZE must be greater than 0, got {block_size!r}")


def check_mask_mod_result(may_attend: Tensor) -> None:
    """Require that a mask function has given bools."""
    if may_attend.dtype != torch.bool:
        raise ArgumentTypeError(f"mask_mod must give bool (True = may look), got {may_attend.dtype}")


def check_defaults(**given: tuple[object, object]) -> None:
    """Require that arguments for torch's kernels are left at their defaults: each comes with its default."""
    for name, (value, default) in given.items():
        if value is not default:
            raise ArgumentValueError(
                f"{name} is for torch's compiled kernels, which scratch does not call: leave it at {default}, "
                f"got {value!r}"
            )


def check_block_lists(
    num_blocks: Tensor, indices: Tensor, full_num_blocks: Tensor | None, full_indices: Tensor | None
) -> None:
    """Require lists of blocks that fit together."""
    check_tensor("kv_num_blocks", num_blocks)
    check_tensor("kv_indices", indices)
    if indices.dim() != 4 or num_blocks.shape != indices.shape[:-1]:
        raise ArgumentValueError(
            f"kv_num_blocks and kv_indices must have shapes (batch, num_heads, rows) and (batch, num_heads, rows, "
            f"columns), got {shape(num_blocks)} and {shape(indices)}"
        )
    if (full_num_blocks is None) != (full_indices is None):
        raise ArgumentValueError(
            "full_kv_num_blocks and full_kv_indices must be given together or not at all, got one of them"
        )
    if full_num_blocks is not None and full_indices is not None and full_num_blocks.shape != full_indices.shape[:-1]:
        raise ArgumentValueError(
            f"full_kv_num_blocks and full_kv_indices must fit together, got shapes {shape(full_num_blocks)} and "
            f"{shape(full_indices)}"
        )
