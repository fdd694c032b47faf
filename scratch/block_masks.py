"""Which blocks of keys each block of queries has to look at: a mask function, asked once and kept as lists of blocks.

Dimension letters: b batch, h num_heads, q query_len, k key_len, r rows of blocks, c columns of blocks.
"""

import itertools
import math
from typing import Any, Self

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from scratch import validation
from scratch.mask_functions import Device, MaskMod, at_every_place, device_or_accelerator, noop_mask

__all__ = ["BlockMask", "create_block_mask"]

BLOCK_LENGTH = 128  # torch's default, on either side of a block
Index = int | slice | Tensor
SHADES = {0.0: "  ", 1.0: "██"}


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
        B: Batch; None if the function does not depend on the sample: one block mask then serves them all.
        H: Number of query heads; None if the function does not depend on the head.
        Q_LEN: Number of queries.
        KV_LEN: Number of keys.
        device: Where to build it; the accelerator if there is one and None is given.
        BLOCK_SIZE: Queries and keys of a block, as one number or two.
        _compile: For torch alone, which calls it deprecated.
        separate_full_blocks: Give blocks that are seen as a whole a list of their own, where ``mask_mod`` is not asked.
        compute_dq_write_order: For one of torch's kernels.
        dq_kv_order: For the same kernel.

    Returns:
        A ``BlockMask``.

    Raises:
        ValueError: For a size below 1, or an argument that must stay at its default.
        TypeError: If ``mask_mod`` is not a function of four arguments, or does not return bool.

    In torch.nn: ``torch.nn.attention.flex_attention.create_block_mask``. There the whole mask is written out; here
    one row of blocks at a time. A ``B`` or ``H`` of 0 is refused here: None serves an empty batch.

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

    Rows are blocks of queries, columns blocks of keys. Each row lists the columns that it sees in part, and
    separately those that it sees as a whole; what stands in neither list is not computed.

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
        """Return the share of the places that is not computed, in percent; negative where blocks reach too far."""
        computed = self.to_dense().sum().item() * math.prod(self.BLOCK_SIZE)
        return 100 * (1 - computed / self.numel())

    def to_dense(self) -> Int[Tensor, "batch num_heads rows columns"]:
        """Write out which blocks are computed: 1, and 0 for the others."""
        partial = listed(self.kv_num_blocks, self.kv_indices)
        if self.full_kv_num_blocks is None or self.full_kv_indices is None:
            return partial
        return partial | listed(self.full_kv_num_blocks, self.full_kv_indices)

    def to(self, device: torch.device | str) -> Self:
        """Return the same mask on another device; what ``mask_mod`` holds stays where it is."""
        moved: Any = (None if x is None else x.to(device) for x in self._lists())
        return type(self)(self.seq_lengths, *moved, BLOCK_SIZE=self.BLOCK_SIZE, mask_mod=self.mask_mod)  # type: ignore[misc]

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Return all attributes in torch's order.

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
