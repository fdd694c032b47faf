"""Attention whose scores a function may change, and whose hidden blocks are never computed.

A ``score_mod`` changes one score, a ``mask_mod`` says whether one query may look at one key: both are functions of four
indices, written for a single place. ``create_block_mask`` finds out which blocks of keys a block of queries can see at
all, and ``flex_attention`` computes those and no others.

Dimension letters: b batch, h num_heads, q query_len, k key_len, d head_dim, r rows of blocks, c columns of blocks.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from scratch import validation
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

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Device = torch.device | str | None
Index = int | slice | Tensor

BLOCK_LENGTH = 128  # torch's default, on either side of a block
SHADES = {0.0: "  ", 1.0: "██"}


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
        TypeError: For what is no tensor, no function or no block mask.

    In torch.nn: ``torch.nn.attention.flex_attention.flex_attention``, which has no gradient on CPU and no
    ``max_scores`` there. Half precision is rounded to once, at the end; torch rounds the weights too.

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
    validation.check_flex_attention(query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux)
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
    """Give the rows of blocks in the order of samples, heads and queries."""
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
    """Give the places of the keys of the blocks that each row lists."""
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
    lengths = query.size(-2), key.size(-2)
    return BlockMask.from_kv_blocks(
        none, none[None], none + 1, none[None], (max(lengths[0], 1), lengths[1]), seq_lengths=lengths
    )


def working_copies(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give all three in one dtype, and keys and values for each sample and head of the queries."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(dtype) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1).expand(q.size(0), -1, -1, -1) for x in (k, v))
    return q, k, v


def cast_as_autocast_does(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Give floating tensors the dtype that autocast asks for, as torch's function does; float64 stays."""
    device = tensors[0].device
    if not validation.autocast_is_on(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Keep autocast from rounding inside a sum that is computed in float32."""
    return torch.autocast(device.type, enabled=False) if validation.autocast_is_on(device) else nullcontext()


class IndexedByTensors(TorchFunctionMode):
    """Make ``table[q_idx]`` work where ``q_idx`` stands for many indices at once: vmap cannot turn it into a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Index by tensors alone where one stands among the indices."""
        if func is Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(x, Tensor | int) for x in indices) and any(isinstance(x, Tensor) for x in indices):
                return torch.ops.aten.index(args[0], [torch.as_tensor(x, device=args[0].device) for x in indices])
        return func(*args, **(kwargs or {}))


def at_every_place(function: Callable[..., Tensor], indices: Sequence[Tensor], *scores: Tensor) -> Tensor:
    """Call a function of single indices, and of a score before them, for all places at once: (b, h, q, k)."""
    shape = tuple(map(len, indices))
    if 0 in shape:  # vmap needs at least one
        return scores[0] if scores else torch.zeros(shape, dtype=torch.bool, device=indices[0].device)
    for mapped in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *mapped))
    with IndexedByTensors():
        return function(*scores, *indices)


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
        TypeError: If one of them is no function (also a RuntimeError).

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
        TypeError: If one of them is no function (also a RuntimeError).

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
        TypeError: For what is no function of four or five arguments, or a mask function that gives no bool.

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

    In torch.nn: ``torch.nn.attention.flex_attention.create_block_mask``. The mask is written out as a whole there, and
    one row of blocks after the other here.

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
    validation.check_defaults(
        _compile=(_compile, False),
        compute_dq_write_order=(compute_dq_write_order, False),
        dq_kv_order=(dq_kv_order, True),
    )
    height, width = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    samples, heads, queries, keys = (
        torch.arange(size or 1, device=device_or_accelerator(device)) for size in (B, H, Q_LEN, KV_LEN)
    )
    some, every = [], []
    for row in queries.split(height):
        may_attend = at_every_place(mask_mod, (samples, heads, row, keys))  # (b, h, q, k)
        validation.check_mask_mod_result(may_attend)
        padded = F.pad(may_attend, (0, -KV_LEN % width, 0, height - len(row)))  # what is not there is not seen
        blocks = padded.unflatten(-1, (-1, width)).transpose(-3, -2).flatten(-2)  # (b, h, c, q * k)
        some.append(blocks.any(-1))
        every.append(blocks.all(-1) & separate_full_blocks)
    seen, full = torch.stack(some, 2), torch.stack(every, 2)  # (b, h, r, c)
    partial_counts, partial_columns = ordered(seen & ~full)
    full_counts, full_columns = ordered(full) if separate_full_blocks else (None, None)
    return BlockMask.from_kv_blocks(
        partial_counts, partial_columns, full_counts, full_columns, (height, width), mask_mod, (Q_LEN, KV_LEN)
    )


class BlockMask:
    """Say which blocks of keys each block of queries has to look at.

    Rows are blocks of queries, columns blocks of keys. Each row lists the columns that it sees in part, and apart from
    them those that it sees as a whole; what stands in neither list is not computed.

    Args:
        seq_lengths: Numbers of queries and keys.
        kv_num_blocks: (batch, num_heads, rows), how many columns each row sees in part.
        kv_indices: (batch, num_heads, rows, columns), which ones; only so many are read.
        full_kv_num_blocks: How many columns each row sees as a whole; None if such blocks are not listed apart.
        full_kv_indices: Which ones.
        q_num_blocks: (batch, num_heads, columns), how many rows see each column in part. For torch's kernels: only the
            lists above are read here.
        q_indices: Which ones.
        full_q_num_blocks: How many rows see each column as a whole.
        full_q_indices: Which ones.
        BLOCK_SIZE: Queries and keys of a block.
        mask_mod: Says within the blocks that are seen in part which query may look at which key.
        dq_write_order: Must be None: for one of torch's kernels, like the three that follow.
        dq_write_order_full: Must be None.
        dq_kv_order: Must be None.
        dq_kv_order_spt: Must be None.

    Raises:
        ValueError: For lists that do not fit together, or an argument that must be None.

    In torch.nn: ``torch.nn.attention.flex_attention.BlockMask``, with the same attributes. Each function that takes one
    takes the other's too, and ``from_kv_blocks`` of either makes one out of the other's lists.

    Source: Dong et al. 2024, section 4.2.

    >>> causal = create_block_mask(lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 6, 6, "cpu", 2)
    >>> print(causal)
    BlockMask(shape=(1, 1, 6, 6), sparsity=33.33%,
    (0, 0)
    ██
    ████
    ██████
    )
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: tuple[int, int] = (BLOCK_LENGTH, BLOCK_LENGTH),
        mask_mod: MaskMod = noop_mask,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        validation.check_block_lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        validation.check_defaults(
            dq_write_order=(dq_write_order, None),
            dq_write_order_full=(dq_write_order_full, None),
            dq_kv_order=(dq_kv_order, None),
            dq_kv_order_spt=(dq_kv_order_spt, None),
        )
        self.seq_lengths = seq_lengths
        self.kv_num_blocks, self.kv_indices = kv_num_blocks, kv_indices
        self.full_kv_num_blocks, self.full_kv_indices = full_kv_num_blocks, full_kv_indices
        self.q_num_blocks, self.q_indices = q_num_blocks, q_indices
        self.full_q_num_blocks, self.full_q_indices = full_q_num_blocks, full_q_indices
        self.BLOCK_SIZE = BLOCK_SIZE
        self.mask_mod = mask_mod

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = BLOCK_LENGTH,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> Self:
        """Make a block mask of the lists of columns that each row sees.

        Args:
            kv_num_blocks: As above.
            kv_indices: As above.
            full_kv_num_blocks: As above.
            full_kv_indices: As above.
            BLOCK_SIZE: Queries and keys of a block, as one number or two.
            mask_mod: As above; every query may look at every key if not given.
            seq_lengths: Numbers of queries and keys; those of whole blocks if not given.
            compute_q_blocks: Whether to list the rows that see each column, too.
            dq_write_order: Must be None.
            dq_write_order_full: Must be None.
            dq_kv_order: Must be None.

        Returns:
            A ``BlockMask``.

        Raises:
            ValueError: For lists that do not fit together, or an argument that must be None.
        """
        validation.check_block_lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        validation.check_defaults(
            dq_write_order=(dq_write_order, None),
            dq_write_order_full=(dq_write_order_full, None),
            dq_kv_order=(dq_kv_order, None),
        )
        height, width = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        rows, columns = kv_indices.shape[-2:]
        return cls(
            (rows * height, columns * width) if seq_lengths is None else seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            *(transposed(kv_num_blocks, kv_indices) if compute_q_blocks else (None, None)),
            *(transposed(full_kv_num_blocks, full_kv_indices) if compute_q_blocks else (None, None)),
            BLOCK_SIZE=(height, width),
            mask_mod=noop_mask if mask_mod is None else mask_mod,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, num_heads, query_len, key_len)."""
        return (*self.kv_indices.shape[:-2], *self.seq_lengths)

    def numel(self) -> int:
        """Count the places, seen or not."""
        return math.prod(self.shape)

    def sparsity(self) -> float:
        """Give the share of the places that is not computed, in percent; below 0 where the last blocks stand over."""
        computed = self.to_dense().sum().item() * math.prod(self.BLOCK_SIZE)
        return 100 * (1 - computed / self.numel())

    def to_dense(self) -> Int[Tensor, "batch num_heads rows columns"]:
        """Write out which blocks are computed: 1, and 0 for the others."""
        partial = listed(self.kv_num_blocks, self.kv_indices)
        if self.full_kv_num_blocks is None or self.full_kv_indices is None:
            return partial
        return partial | listed(self.full_kv_num_blocks, self.full_kv_indices)

    def to(self, device: torch.device | str) -> Self:
        """Give the same mask on another device; what ``mask_mod`` holds stays where it is."""
        moved: Any = (None if x is None else x.to(device) for x in self._lists())
        return type(self)(self.seq_lengths, *moved, BLOCK_SIZE=self.BLOCK_SIZE, mask_mod=self.mask_mod)  # type: ignore[misc]

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Give all attributes in torch's order.

        Args:
            flatten: Whether lengths and block size are two numbers each, and not a pair.

        Returns:
            Lengths, the eight lists, four of torch's that are None here, the block size and ``mask_mod``.
        """
        lengths, sides = (self.seq_lengths, self.BLOCK_SIZE) if flatten else ((self.seq_lengths,), (self.BLOCK_SIZE,))
        return (*lengths, *self._lists(), None, None, None, None, *sides, self.mask_mod)

    def _lists(self) -> tuple[Tensor | None, ...]:
        by_row = (self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices)
        return (*by_row, self.q_num_blocks, self.q_indices, self.full_q_num_blocks, self.full_q_indices)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Self:
        """Take samples, heads or rows of blocks. What is left needs a ``mask_mod`` for its own indices: set one.

        In torch.nn: before 2.15 the number of queries stays that of all rows.
        """
        given = index if isinstance(index, tuple) else (index,)
        # A single number keeps its axis: a block mask always has three.
        kept = tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in given)
        kv_num_blocks = self.kv_num_blocks[kept]
        query_len = self._queries_in(kept[2], kv_num_blocks.size(-1)) if len(kept) == 3 else self.seq_lengths[0]
        return self.from_kv_blocks(
            kv_num_blocks,
            self.kv_indices[kept],
            self.full_kv_num_blocks[kept] if self.full_kv_num_blocks is not None else None,
            self.full_kv_indices[kept] if self.full_kv_indices is not None else None,
            self.BLOCK_SIZE,
            validation.sliced_mask_mod,
            (query_len, self.seq_lengths[1]),
            self.q_indices is not None,
        )

    def _queries_in(self, rows: Index, count: int) -> int:
        """Count the queries in rows of blocks. Those of a tensor count as whole: its numbers are not read."""
        height = self.BLOCK_SIZE[0]
        if not isinstance(rows, slice):
            return count * height
        starts = (height * row for row in range(self.kv_num_blocks.size(-1))[rows])
        return sum(min(height, self.seq_lengths[0] - start) for start in starts)

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Draw the blocks of each sample and head: black where they are computed, grey where only some of several are.

        Args:
            grid_size: Greatest number of rows and columns to draw; several blocks share a place if there are more.
            limit: Greatest number of drawings.

        Returns:
            One drawing for each sample and head.
        """
        most = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        dense = self.to_dense().float()
        steps = [max(1, math.ceil(size / n)) for size, n in zip(dense.shape[-2:], most, strict=True)]
        shares = F.avg_pool2d(dense, steps, ceil_mode=True)
        drawings: list[str] = []
        for place in itertools.product(*map(range, shares.shape[:2])):
            if len(drawings) == limit:
                drawings += ["...", "To print out more, set BlockMask.to_string(limit=N)"]
                drawings.append("You can also index (BlockMask[batch, head]) to choose a specific batch or head")
                break
            rows = ["".join(SHADES.get(share, "░░") for share in row) for row in shares[place].tolist()]
            drawings.append("\n".join([str(place), *rows, ""]))
        return "\n".join(drawings)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{self.to_string().strip()}\n)"

    def __repr__(self) -> str:
        return str(self)


def listed(num_blocks: Tensor, indices: Tensor) -> Int[Tensor, "batch num_heads rows columns"]:
    """Write out lists of columns: 1 for each that its row lists."""
    counts = torch.arange(indices.size(-1), device=indices.device) < num_blocks.unsqueeze(-1)
    columns = indices.where(counts, 0).long()  # what lies behind the count may be anything
    return torch.zeros_like(indices).scatter_add(-1, columns, counts.to(indices.dtype))


def ordered(dense: Tensor) -> tuple[Int[Tensor, "batch num_heads rows"], Int[Tensor, "batch num_heads rows columns"]]:
    """List the columns in which each row has a 1: how many, and which ones, in front of all others."""
    dense = dense.to(torch.int32)
    return dense.sum(-1, dtype=torch.int32), dense.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def transposed(num_blocks: Tensor | None, indices: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """List the rows that see each column."""
    if num_blocks is None or indices is None:
        return None, None
    return ordered(listed(num_blocks, indices).transpose(-2, -1))


def device_or_accelerator(device: Device) -> torch.device:
    """Give the device that torch uses where none is named: on a CUDA build without a GPU, the CPU."""
    return torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
