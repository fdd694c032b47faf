"""What ``varlen_attn`` is given."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentUnsupportedError,
    ArgumentValueError,
    check_dim,
    check_tensor,
    check_whole,
    shape,
)
from scratch.validation.flex import check_grouped_heads, check_request

__all__ = ["check_varlen_attn", "check_varlen_on_device"]


def check_varlen_attn(
    inputs: tuple[Tensor, Tensor, Tensor],
    cu_seqs: tuple[Tensor, Tensor | None],
    longest: tuple[int, int],
    window_size: object,
    enable_gqa: bool,
    return_aux: object,
) -> None:
    """Check the call of ``varlen_attn``. This reads the lengths, and so waits for the device."""
    (query, key, value), (cu_seq_q, cu_seq_k), (max_q, max_k) = inputs, cu_seqs, longest
    _check_packed(query, key, value)
    check_grouped_heads(query, key, 1, enable_gqa)
    check_whole(max_q=max_q, max_k=max_k)
    check_request(return_aux)
    _check_window_size(window_size)
    for name, cu_seq in (("cu_seq_q", cu_seq_q), ("cu_seq_k", cu_seq_k)):
        _check_cu_seq_kind(name, cu_seq, query)
    assert cu_seq_k is not None
    if cu_seq_k.shape != cu_seq_q.shape:
        raise ArgumentValueError(
            f"cu_seq_q and cu_seq_k must be of as many sequences, got shapes {shape(cu_seq_q)} and {shape(cu_seq_k)}"
        )
    for name, cu_seq, tokens, max_name, most in (
        ("cu_seq_q", cu_seq_q, query.size(0), "max_q", max_q),
        ("cu_seq_k", cu_seq_k, key.size(0), "max_k", max_k),
    ):
        _check_lengths_of_sequences(name, cu_seq.tolist(), tokens, max_name, most)


def _check_packed(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() != 3:
            raise ArgumentValueError(f"{name} must be 3-D (tokens, num_heads, head_dim), got shape {shape(x)}")
        if 0 in x.shape[1:]:
            raise ArgumentValueError(f"{name} must have at least one head and one feature, got shape {shape(x)}")
        if not x.is_floating_point():
            raise ArgumentTypeError(f"{name} must be floating, got {x.dtype}")
        if x.dtype != query.dtype:
            raise ArgumentTypeError(
                f"query, key and value must have the same dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
            )
        if x.device != query.device:
            raise ArgumentValueError(
                f"query, key and value must be on the same device, got {query.device}, {key.device} and {value.device}"
            )
    if key.size(-1) != query.size(-1):
        raise ArgumentValueError(
            f"key must have the head_dim of query, {query.size(-1)}, got {key.size(-1)} from shape {shape(key)}"
        )
    if value.shape != key.shape:
        raise ArgumentValueError(f"value must have the shape of key, {shape(key)}, got {shape(value)}")


def _check_window_size(window_size: object) -> None:
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        raise ArgumentValueError(f"window_size must be two numbers, (left, right), got {window_size!r}")
    for size in window_size:
        check_whole(window_size=size)
        if size < -1:
            raise ArgumentValueError(f"window_size must hold numbers of keys, or -1 for all, got {window_size!r}")


def _check_cu_seq_kind(name: str, cu_seq: Tensor | None, query: Tensor) -> None:
    check_tensor(name, cu_seq)
    assert cu_seq is not None
    if cu_seq.dtype != torch.int32:
        raise ArgumentTypeError(f"{name} must hold integers as int32, got {cu_seq.dtype}")
    check_dim(name, cu_seq, 1)
    if cu_seq.device != query.device:
        raise ArgumentValueError(f"{name} must be on the device of query, {query.device}, got {cu_seq.device}")


def _check_lengths_of_sequences(name: str, cu_seq: list[int], tokens: int, max_name: str, most: int) -> None:
    if len(cu_seq) < 2 or cu_seq[0] != 0 or cu_seq[-1] != tokens or sorted(cu_seq) != cu_seq:
        raise ArgumentValueError(
            f"{name} must rise from 0 to the number of tokens, {tokens}, in one step for each sequence, got {cu_seq}"
        )
    longest = max(end - begin for begin, end in itertools.pairwise(cu_seq))
    if longest > most:
        raise ArgumentValueError(
            f"{max_name} must be at least the length of the longest sequence in {name}, {longest}, got {most}"
        )


def check_varlen_on_device(query: Tensor) -> None:
    """Refuse what torch's ``varlen_attn`` does not compute."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        raise ArgumentUnsupportedError(
            f"query must be float16 or bfloat16 on CUDA, where torch's varlen_attn calls flash attention, got "
            f"{query.dtype} on {query.device.type}: use scratch.varlen_attn"
        )
