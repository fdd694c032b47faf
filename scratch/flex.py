"""Attention whose scores a function may change, and whose hidden blocks are never computed.

A ``score_mod`` changes one score, a ``mask_mod`` says whether one query may look at one key: both are functions of four
indices, written for a single place. ``create_block_mask`` finds out which blocks of keys a block of queries can see at
all, and ``flex_attention`` computes those and no others.

Dimension letters: b batch, h num_heads, q query_len, k key_len, d head_dim, r rows of blocks, c columns of blocks.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from scratch import validation
from scratch.block_masks import BlockMask, create_block_mask
from scratch.mask_functions import MaskMod, ScoreMod, and_masks, at_every_place, create_mask, noop_mask, or_masks
from scratch.paths import open_blind_rows, weigh

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


class AuxRequest(NamedTuple):
    """Ask ``flex_attention`` for more than its output.

    Args:
        lse: Whether to return the log-sum-exp of the scores of each query.
        max_scores: Whether to return the greatest score of each query.

    In torch.nn: ``torch.nn.attention.flex_attention.AuxRequest``.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Hold what ``flex_attention`` returns beside its output, and None for what was not asked for.

    Args:
        lse: (batch, num_heads, query_len); -inf for a query that may look at no key.
        max_scores: The same shape, without gradient.

    In torch.nn: ``torch.nn.attention.flex_attention.AuxOutput``.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


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
        TypeError: If an argument is not the tensor, function or block mask that it should be.

    In torch.nn: ``torch.nn.attention.flex_attention.flex_attention``, which has no gradient on CPU and no
    ``max_scores`` there. Half precision is rounded to once, at the end; torch rounds the weights too. The log-sum-exp
    is float32 here; there it has the dtype that ``score_mod`` gives. A block mask made for another batch is refused
    here; there it runs unless it is compiled.

    Source: Dong et al. 2024, section 3; https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html

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
    validation.check_no_kernel_options(kernel_options)
    wanted = AuxRequest(lse=return_lse) if return_aux is None else return_aux
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    if block_mask is None or query.size(-2) == 0:  # no query makes no row of blocks
        block_mask = one_block(query, key)
    query, key, value = cast_as_autocast_does(query, key, value)
    with without_autocast(query.device):
        q, k, v = working_copies(query, key, value)
        pieces = []
        for row in block_rows(block_mask, q.size(-2), k.size(-2)):
            scores = row_scores(q, k, row, score_mod, block_mask.mask_mod, scale)
            pieces.append(attend(scores, row.of_keys(v), wanted))
    output, lse, max_scores = (assemble(parts, block_mask.kv_num_blocks) for parts in zip(*pieces, strict=True))
    output = output.to(query.dtype)
    if return_aux is not None:
        return output, AuxOutput(lse, max_scores)
    return (output, lse) if return_lse else output


class BlockRow(NamedTuple):
    """A row of blocks: some queries, the keys that ``mask_mod`` is asked about, and the keys that they all see."""

    batch: slice
    heads: slice
    queries: slice
    asked: Tensor
    seen: Tensor

    def of_queries(self, q: Tensor) -> Tensor:
        """Take its queries: (b, h, q, d)."""
        return q[self.batch, self.heads, self.queries]

    def of_keys(self, k: Tensor) -> Tensor:
        """Take the keys or values of its blocks: (b, h, k, d)."""
        return k[self.batch, self.heads].index_select(-2, torch.cat([self.asked, self.seen]))


def block_rows(block_mask: "BlockMask", query_len: int, key_len: int) -> Iterator[BlockRow]:
    """Return the rows of blocks in the order of samples, heads and queries."""
    batch, heads, rows = block_mask.kv_num_blocks.shape
    height, width = block_mask.BLOCK_SIZE
    asked = places_of_keys(block_mask.kv_num_blocks, block_mask.kv_indices, width, key_len)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        seen = [places[:0] for places in asked]
    else:
        seen = places_of_keys(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, width, key_len)
    for (b, h, r), *keys in zip(itertools.product(range(batch), range(heads), range(rows)), asked, seen, strict=True):
        yield BlockRow(
            slice(b, b + 1) if batch > 1 else slice(None),  # one plan serves all samples
            slice(h, h + 1) if heads > 1 else slice(None),
            slice(r * height, min((r + 1) * height, query_len)),
            *keys,
        )


def places_of_keys(num_blocks: Tensor, indices: Tensor, width: int, key_len: int) -> list[Tensor]:
    """Return the places of the keys of the blocks that each row lists."""
    inside = torch.arange(width, device=indices.device)
    listed = zip(num_blocks.flatten().tolist(), indices.flatten(0, -2), strict=True)
    places = [(blocks[:count, None] * width + inside).flatten() for count, blocks in listed]
    return [x[x < key_len] for x in places]  # the last block may be cut off


def row_scores(
    q: Float[Tensor, "batch num_heads query_len head_dim"],
    k: Float[Tensor, "batch num_heads key_len head_dim"],
    row: BlockRow,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod,
    scale: float,
) -> Float[Tensor, "rows_batch rows_heads rows_queries rows_keys"]:
    """Score the keys of the blocks that a row sees, and hide those that its queries may not look at."""
    scores = row.of_queries(q) @ row.of_keys(k).transpose(-2, -1) * scale  # (b, h, q, k)
    b, h, i = (torch.arange(size, device=q.device)[part] for size, part in zip(q.shape, row[:3], strict=False))
    if score_mod is not None:
        keys = torch.cat([row.asked, row.seen])
        scores = at_every_place(score_mod, (b, h, i, keys), scores).to(scores.dtype)
    may_attend = at_every_place(mask_mod, (b, h, i, row.asked))
    asked, seen = scores.split([len(row.asked), len(row.seen)], dim=-1)
    return torch.cat([torch.where(may_attend, asked, -math.inf), seen], dim=-1)


def attend(
    scores: Float[Tensor, "*heads query_len key_len"],
    v: Float[Tensor, "*heads key_len v_head_dim"],
    wanted: AuxRequest,
) -> tuple[Float[Tensor, "*heads query_len v_head_dim"], Tensor | None, Tensor | None]:
    """Weigh the values: softmax(scores) v; and log Σ exp(scores) and max(scores) where they are wanted."""
    open_scores, row_sees = open_blind_rows(scores)
    lse = max_scores = None
    if wanted.lse:
        lse = torch.logsumexp(open_scores, dim=-1).masked_fill(~row_sees.squeeze(-1), -math.inf)
    if wanted.max_scores:
        max_scores = F.pad(scores.detach(), (0, 1), value=-math.inf).amax(dim=-1)  # of no scores at all, too
    context, _ = weigh(open_scores, v)
    return context * row_sees, lse, max_scores


def assemble(pieces: Sequence[Any], num_blocks: Tensor) -> Any:
    """Put together what the rows of blocks have given: first the queries, then the heads, then the samples."""
    if pieces[0] is None:
        return None
    for dim, count in zip((2, 1, 0), reversed(num_blocks.shape), strict=True):
        pieces = [torch.cat(list(pieces[i : i + count]), dim) for i in range(0, len(pieces), count)]
    return pieces[0]


def one_block(query: Tensor, key: Tensor) -> "BlockMask":
    """Let every query see every key, in one block that no mask function is asked about."""
    none = torch.zeros(1, 1, 1, dtype=torch.int32, device=query.device)
    size = max(query.size(-2), 1), key.size(-2)
    return BlockMask.from_kv_blocks(none, none[None], none + 1, none[None], size)


def working_copies(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three in one dtype, with keys and values expanded to the samples and heads of the queries."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(dtype) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1).expand(q.size(0), -1, -1, -1) for x in (k, v))
    return q, k, v


def cast_as_autocast_does(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast floating tensors to the dtype that autocast asks for, as torch's function does; float64 stays."""
    device = tensors[0].device
    if not validation.autocast_is_on(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Keep autocast from rounding inside a sum that is computed in float32."""
    return torch.autocast(device.type, enabled=False) if validation.autocast_is_on(device) else nullcontext()
