"""Attention over sequences that lie one behind the other: torch's call of flash attention, which needs CUDA."""

from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor

from scratch import validation
from scratch import varlen as by_hand
from scratch.documentation import documented_like

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest

__all__ = ["AuxRequest", "varlen_attn"]


def __getattr__(name: str) -> Any:
    """Hand on torch's ``AuxRequest`` when it is asked for: its module takes two seconds to import."""
    if name != "AuxRequest":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.nn.attention.varlen import AuxRequest

    return AuxRequest


@documented_like(by_hand.varlen_attn)
def varlen_attn(
    query: Float[Tensor, "query_tokens num_heads head_dim"],
    key: Float[Tensor, "key_tokens num_key_heads head_dim"],
    value: Float[Tensor, "key_tokens num_key_heads head_dim"],
    cu_seq_q: Int[Tensor, " sequences_and_1"],
    cu_seq_k: Int[Tensor, " sequences_and_1"] | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: "AuxRequest | None" = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """In torch.nn: ``torch.nn.attention.varlen.varlen_attn``, which computes half precision on CUDA, and nothing else.
    The lengths are read and checked here before the call, which waits for the device.

    Traps:
        The log-sum-exp has the heads first, whatever the documents say: see trap `varlen_lse_heads_first`.
        A window counts the keys beside the query: see trap `window_of_neighbours`.
        Causal is aligned to the lower right corner: see trap `varlen_lower_right`.
        Tokens behind the last sequence spoil the gradients: see trap `varlen_tail_tokens`.

    >>> import torch
    >>> x, cu_seq = torch.zeros(5, 1, 8).half(), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> varlen_attn(x, x, x, cu_seq, cu_seq, 3, 3)
    Traceback (most recent call last):
    ...
    scratch.validation.basics.ArgumentUnsupportedError: query must be float16 or bfloat16 on CUDA, ...

    Source: Dao et al. 2022, section 3, for the kernel behind it;
    https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
    """
    from torch.nn.attention import varlen

    inputs, cu_seqs, longest = (query, key, value), (cu_seq_q, cu_seq_k), (max_q, max_k)
    validation.check_varlen_attn(inputs, cu_seqs, longest, window_size, enable_gqa, return_aux)
    validation.check_varlen_on_device(query)
    given = {"enable_gqa": enable_gqa, "seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits}
    # torch 2.11 does not have these four.
    options: dict[str, Any] = {name: x for name, x in given.items() if x is not None and x is not False}
    validation.check_known_to_torch(varlen.varlen_attn, options)
    return varlen.varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        return_aux=return_aux,
        scale=scale,
        window_size=window_size,
        **options,
    )
