"""Exact attention in tiles: what FlashAttention does, forward and backward, from plain tensor operations.

The textbook keeps every score in memory, query_len * key_len of them for each head. Here only one tile of them exists
at a time, and the next one uses the same memory: memory grows with the length and not with its square, and the numbers
in use stay in the cache. Three ideas make that possible:

1. **A softmax can be summed block by block.** For each query keep the greatest score so far, m, and two sums so far: of
   the weights, l = Σ exp(s - m), and of the weighted values, Σ exp(s - m) v. Where a block raises m to m', both sums
   shrink by exp(m - m'). At the end the context is the sum of the weighted values, divided by l. See
   ``_attend_rows`` and ``_raise_maximum``.
2. **The backward computes the weights again** instead of keeping them: from q, k and the two numbers m and l of a row
   they are one product and one exponential away, weights = exp(s - m) / l. (FlashAttention keeps one number, the
   log-sum-exp m + log l, and takes exp(s - lse). Two numbers lose nothing, even if a bias is so large that log l would
   be rounded away.) The gradient of a softmax needs the sum of weights * grad_weights over a whole row, which no tile
   has; but it equals grad_context · context, known before the first tile. See ``_row_gradients``, and
   ``_textbook_gradients`` for the same equations without tiles.
3. **What no query of a tile may see is not computed**: keys later than all of them, keys outside of their window,
   padding at the end. See ``_Mask``. It is not read either, so a NaN there goes unnoticed.

Dimension letters: b batch, h num_heads, q query_len, k key_len, d head_dim; g = query heads for each key head, whose
queries are stacked, as they share the keys: q * g rows; n key heads that are computed at once; c columns (keys) of a
tile.

Source: Dao et al. 2022, "FlashAttention", algorithms 1 and 4; Milakov and Gimelshein 2018 for the sum block by block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scratch.rounding import upcast_half

__all__ = ["TILES_FROM", "aligned", "tiled_attention"]

# From this many scores for each head, tiles take over from the textbook where nobody asks for weights. Below it they
# save no time: at 8 heads of 64, float32, they take up to 1.25 times the textbook's at length 256, 0.4 to 1.1 times at
# 512, and 0.25 to 0.6 times at 1024, the least with a causal mask.
TILES_FROM = 512 * 512

# Rows and columns of a tile: enough for the products to run at full speed. The backward, which needs room for two tiles
# at once, takes half the rows. With a mask there are fewer, as fewer rows have more keys that none of them sees.
ROWS, MASKED_ROWS, COLUMNS = 1024, 256, 256
# Scores that a thread computes at once, 1 MiB of float32, which stays in its cache: one tile for each of several heads.
SCORES_AT_ONCE = 1024 * 256
# The exponentials of scores this near to 0 neither overflow nor vanish: the greatest score need not be subtracted.
# Where it must be, as in many trained models, forward and backward take about a tenth longer.
SAFE_SCORE = 32.0
# Weights are powers of 2, of scores times log2(e): where results underflow, torch.exp is a hundred times slower.
LOG2E = math.log2(math.e)


def is_transformed(x: Tensor) -> bool:
    """Return whether this runs under ``torch.func``, or x is a batch of gradients (``is_grads_batched=True``)."""
    return torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(x)


def tiled_attention(
    q: Float[Tensor, "*heads query_len head_dim"],
    k: Float[Tensor, "*key_heads key_len head_dim"],
    v: Float[Tensor, "*value_heads key_len v_head_dim"],
    score_bias: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    diagonal: int | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "... query_len v_head_dim"]:
    """Compute ``functional.attention`` in memory that grows with the length and not with its square.

    context = softmax(q kᵀ * scale + score_bias) v

    Args:
        q: Queries, (batch, heads, query_len, head_dim); the batch, or the batch and the heads, may be missing.
        k: Keys, likewise, of as many heads as the queries or of fewer that divide them: grouped heads.
        v: Values, likewise.
        score_bias: Broadcastable to (batch, heads, query_len, key_len). Float: added to the scores, -inf hides a key;
            it gets no gradient. Bool: True = the query may look at the key.
        diagonal: Query i may look at keys 0 ... i + diagonal; at all of them if not given.
        scale: Factor on the scores.

    Returns:
        The context. A query that may look at no key gets 0, with gradient 0.

    In torch.nn: the fused kernels of ``F.scaled_dot_product_attention``.

    Source: Dao et al. 2022, section 3.1.

    >>> q, k, v = torch.randn(3, 2, 6, 700, 16).unbind()
    >>> textbook = torch.softmax(q @ k.mT, dim=-1) @ v
    >>> torch.allclose(tiled_attention(q, k, v), textbook, atol=1e-5)
    True
    """
    missing, dtype = 4 - max(q.dim(), k.dim(), v.dim()), q.dtype
    q, k, v = aligned(*upcast_half(q, k, v))
    key_heads = k.size(1)
    group = q.size(1) // key_heads
    q = q.unflatten(1, (key_heads, group)).transpose(2, 3).flatten(2, 3)  # (b, h / g, q * g, d)
    if score_bias is not None:
        score_bias = score_bias[(None,) * (4 - score_bias.dim())]
        score_bias = score_bias.unflatten(1, (key_heads, group) if score_bias.size(1) > 1 else (1, 1)).transpose(2, 3)
    call = _Call(diagonal, group, scale, torch.empty_like(q, device="meta").stride())
    # A packed projection gives views with large strides: copied once, the training of a module takes a tenth less time.
    q, k, v = (x.contiguous() for x in (q, k, v))
    context: Tensor = _TiledAttention.apply(q, k, v, score_bias, call)  # type: ignore[no-untyped-call]
    context = context.unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2)
    return context[(0,) * missing].to(dtype)


def aligned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bring all three to four dimensions and the same batch, and keys and values to the same heads.

    Args:
        q: (..., query_len, head_dim), as ``tiled_attention`` takes it.
        k: (..., key_len, head_dim).
        v: (..., key_len, v_head_dim).

    Returns:
        (batch, heads, query_len, head_dim), (batch, key_heads, key_len, head_dim) and (batch, key_heads, key_len,
        v_head_dim), where key_heads divides heads.

    In torch.nn: the broadcasting inside ``F.scaled_dot_product_attention``.
    """
    if q.dim() == 4 and q.shape[:2] == k.shape[:-2] == v.shape[:-2]:
        return q, k, v
    q, k, v = (x[(None,) * (4 - x.dim())] for x in (q, k, v))
    batch = max(q.size(0), k.size(0), v.size(0))
    key_heads = max(k.size(1), v.size(1))
    k, v = (x.expand(batch, key_heads, -1, -1) for x in (k, v))
    return q.expand(batch, max(q.size(1), key_heads), -1, -1), k, v


class _Call(NamedTuple):
    """The arguments that are not tensors: the diagonal, g, the scale, and the strides of q, which the context gets."""

    diagonal: int | None
    group: int
    scale: float
    strides: tuple[int, ...]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, score_bias: Tensor | None, call: _Call) -> Tensor:
        ctx.mask_arguments = call.diagonal, call.group, q.size(2) // call.group, k.size(2)
        ctx.scale, ctx.safe = call.scale, _scores_are_safe(q, k, score_bias, call.scale)
        inputs = _Inputs(q, k, v, _Mask(score_bias, *ctx.mask_arguments), ctx.scale, ctx.safe)
        context = q.new_empty(*q.shape[:3], v.size(-1))
        if context.shape == q.shape:
            context = torch.empty_strided(q.shape, call.strides, dtype=q.dtype)
        ctx.save_for_backward(q, k, v, score_bias, context, *_attend(inputs, context))
        return context

    @staticmethod
    def backward(ctx: Any, grad_context: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, score_bias, context, row_max, row_sum = ctx.saved_tensors
        inputs = _Inputs(q, k, v, _Mask(score_bias, *ctx.mask_arguments), ctx.scale, ctx.safe)
        if torch.is_grad_enabled() or is_transformed(grad_context):
            return *_textbook_gradients(inputs, grad_context), None, None
        return *_gradients(inputs, context, row_max, row_sum, grad_context), None, None


@dataclass(frozen=True)
class _Inputs:
    """What attention in tiles is computed from.

    Args:
        q: (b, h / g, q * g, d).
        k: (b, h / g, k, d).
        v: (b, h / g, k, v_head_dim).
        mask: Which keys each query may look at.
        scale: Factor on the scores.
        safe: Whether no score is so far from 0 that a maximum must be subtracted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: "_Mask"
    scale: float
    safe: bool

    def blocks(self, buffers: int) -> Iterator[tuple["_Block", "_Mask"]]:
        """Return the heads of a sample that are computed at once, one or more for each thread, with their mask."""
        for sample in range(self.k.size(0)):
            for heads in _pieces(0, self.k.size(1), self._heads_at_once(buffers)):
                yield (sample, heads), self.mask.of(sample, heads)

    def buffers(self, count: int) -> list[Tensor]:
        """Allocate room for one tile of each of the heads that are computed at once."""
        size = self._heads_at_once(count) * self._rows(count) * min(COLUMNS, self.k.size(2))
        return [self.q.new_empty(size) for _ in range(count)]

    def pieces(self, x: Tensor) -> list[Tensor]:
        """Allocate a gradient of keys or values, in contiguous pieces to which products of several heads are added."""
        count = self._heads_at_once(2)
        return [x.new_empty(count, *piece.shape[2:]) for piece in x.split(COLUMNS, dim=2)]

    def _heads_at_once(self, buffers: int) -> int:
        each = SCORES_AT_ONCE // buffers // (self._rows(buffers) * COLUMNS)
        return min(torch.get_num_threads() * max(each, 1), self.k.size(1))

    def _rows(self, buffers: int) -> int:
        return min(self.mask.queries_at_once(buffers) * self.mask.group, self.q.size(2))


_Block = tuple[int, slice]


def _attend(x: _Inputs, context: Tensor) -> tuple[Tensor, Tensor]:
    """Write the context, and return m and l of every row."""
    # The least finite number, not -inf: in a row that sees no key, exp(-inf - m) is then 0 and not NaN.
    row_max = x.q.new_full((*x.q.shape[:3], 1), 0.0 if x.safe else torch.finfo(x.q.dtype).min)
    row_sum = torch.zeros_like(row_max)
    (buffer,) = x.buffers(1)
    for block, mask in x.blocks(1):
        k, v = x.k[block], x.v[block]
        for rows, tiles in mask.row_tiles(x.q.dtype, x.safe, 1):
            place = (*block, rows)
            q = x.q[place] * (x.scale * LOG2E)
            sums = _Sums(None if x.safe else row_max[place], row_sum[place], q.new_zeros(*q.shape[:2], v.size(-1)))
            _attend_rows(q, k, v, tiles, sums, buffer)
            sums.row_sum.masked_fill_(sums.row_sum == 0, 1.0)  # a row that sees no key has gathered 0
            torch.div(sums.gathered, sums.row_sum, out=context[place])
    return row_max, row_sum


@dataclass(frozen=True)
class _Sums:
    """The running sums of some rows: m if it is subtracted, l, and the weighted values Σ exp(s - m) v."""

    row_max: Tensor | None
    row_sum: Tensor
    gathered: Tensor


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, tiles: list["_Tile"], sums: _Sums, buffer: Tensor) -> None:
    """Sum up some rows, tile by tile."""
    for tile in tiles:
        scores = _scores(q, k[:, tile.columns], tile.bias, buffer)  # (n, q * g, c)
        if sums.row_max is not None:
            _raise_maximum(scores, sums.row_max, sums)
        weights = tile.without_later(scores.exp2_())
        sums.row_sum.add_(weights.sum(dim=-1, keepdim=True))
        sums.gathered.baddbmm_(weights, v[:, tile.columns])


def _raise_maximum(scores: Tensor, row_max: Tensor, sums: _Sums) -> None:
    """Subtract the greatest score of each row so far, and rescale the sums so far to it."""
    raised = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
    shrink = (row_max - raised).exp2_()
    sums.row_sum.mul_(shrink)
    sums.gathered.mul_(shrink)
    row_max.copy_(raised)
    _drop_negligible(scores.sub_(raised))


def _drop_negligible(exponents: Tensor) -> None:
    """Set weights to 0 that are too small to change any sum: denormal numbers make products a hundred times slower."""
    torch.threshold_(exponents, math.log2(torch.finfo(exponents.dtype).tiny) / 2, -math.inf)


def _gradients(
    x: _Inputs, context: Tensor, row_max: Tensor, row_sum: Tensor, grad_context: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    grad_q, grad_k, grad_v = (torch.empty_like(y) for y in (x.q, x.k, x.v))
    buffers, pieces = x.buffers(2), (x.pieces(x.k), x.pieces(x.v))
    for block, mask in x.blocks(2):
        k, v = x.k[block], x.v[block]
        keys = _Keys(k, v, *([piece[: k.size(0)].zero_() for piece in y] for y in pieces))
        for rows, tiles in mask.row_tiles(k.dtype, x.safe, 2):
            place = (*block, rows)
            of_rows = (y[place] for y in (x.q, context, row_max, row_sum, grad_context))
            grad_q[place] = _row_gradients(_Rows.of(x, *of_rows), keys, tiles, buffers).mul_(x.scale)
        _put_together(keys.grad_k, grad_k[block], 1 / LOG2E)
        _put_together(keys.grad_v, grad_v[block], 1.0)
    return grad_q, grad_k, grad_v


def _put_together(pieces: list[Tensor], whole: Tensor, factor: float) -> None:
    """Concatenate pieces of keys into the whole, each times the factor."""
    for piece, part in zip(pieces, whole.split(COLUMNS, dim=1), strict=True):
        torch.mul(piece, factor, out=part)


@dataclass(frozen=True)
class _Rows:
    """Some queries times scale * log2(e), their m if it is subtracted, grad_context · context / l, grad_context / l."""

    q: Tensor
    row_max: Tensor | None
    row_term: Tensor
    grad_context: Tensor

    @classmethod
    def of(
        cls, x: _Inputs, q: Tensor, context: Tensor, row_max: Tensor, row_sum: Tensor, grad_context: Tensor
    ) -> "_Rows":
        # Divided by l here once, so that exp(s - m) can stand for the weights in every tile.
        grad_rows = (grad_context / row_sum).contiguous()
        row_term = (grad_rows * context).sum(dim=-1, keepdim=True)
        return cls(q * (x.scale * LOG2E), None if x.safe else row_max, row_term, grad_rows)


@dataclass(frozen=True)
class _Keys:
    """The keys and values of some heads, and their gradients so far: in contiguous pieces, one for each tile of keys.

    The products of several heads are added to such a piece in one call.
    """

    k: Tensor
    v: Tensor
    grad_k: list[Tensor]
    grad_v: list[Tensor]


def _row_gradients(rows: _Rows, keys: _Keys, tiles: list["_Tile"], buffers: list[Tensor]) -> Tensor:
    """Return the gradient of some rows, and add their share to those of keys and values, tile by tile."""
    grad_q = torch.zeros_like(rows.q)
    for tile in tiles:
        k, v = keys.k[:, tile.columns], keys.v[:, tile.columns]
        scores = _scores(rows.q, k, tile.bias, buffers[0])  # (n, q * g, c)
        if rows.row_max is not None:
            _drop_negligible(scores.sub_(rows.row_max))
        weights = tile.without_later(scores.exp2_())
        tile.of(keys.grad_v).baddbmm_(weights.mT, rows.grad_context)
        grad_weights = _scores(rows.grad_context, v, None, buffers[1])
        grad_scores = grad_weights.sub_(rows.row_term).mul_(weights)
        grad_q.baddbmm_(grad_scores, k)
        tile.of(keys.grad_k).baddbmm_(grad_scores.mT, rows.q)
    return grad_q


def _textbook_gradients(x: _Inputs, grad_context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v without tiles, from operations that have gradients themselves."""
    q, k, v, mask = x.q, x.k, x.v, x.mask
    queries, columns = slice(0, mask.query_len), slice(0, mask.key_len)
    bias = mask.bias(queries, columns, q.dtype, mask.diagonal_of(queries, columns))
    scores = q * (x.scale * LOG2E) @ k.mT  # (b, h / g, q * g, k)
    if bias is not None:
        scores = (scores.unflatten(2, bias.shape[-3:-1]) + bias).flatten(2, 3)
    row_max = scores.detach().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
    weights = (scores - row_max).exp2()
    row_sum = weights.sum(dim=-1, keepdim=True)
    weights = weights / row_sum.masked_fill(row_sum == 0, 1.0)
    grad_weights = grad_context @ v.mT
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(dim=-1, keepdim=True)) * x.scale
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad_context


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Compute q kᵀ + bias in existing memory: allocating it anew for every tile would take most of the time."""
    shape = (q.size(0), q.size(1), k.size(1))
    scores = torch.bmm(q, k.mT, out=buffer[: math.prod(shape)].view(shape))
    if bias is not None:
        scores.unflatten(1, bias.shape[1:3]).add_(bias)
    return scores


def _scores_are_safe(q: Tensor, k: Tensor, score_bias: Tensor | None, scale: float) -> bool:
    """Return whether no score can be far from 0, unless it is -inf: |q · k| <= |q| |k|."""
    longest_q, longest_k = (torch.linalg.vector_norm(x, dim=-1).amax(dim=-1) for x in (q, k))  # (b, h / g)
    farthest = (longest_q * longest_k).max() * abs(scale)
    if score_bias is not None and score_bias.is_floating_point():
        if score_bias.numel() > q.numel():  # reading it would take longer than it can save
            return False
        farthest = farthest + score_bias.masked_fill(score_bias == -math.inf, 0.0).abs().amax()
    return bool(farthest <= SAFE_SCORE)


@dataclass(frozen=True)
class _Tile:
    """Some of the keys, and which of them the queries of a row of tiles may look at.

    Args:
        columns: The keys.
        bias: Added to their scores, (n or 1, q, g, c); None where nothing is.
        diagonal: Query i of the row of tiles may look at keys 0 ... i + diagonal of these; at all of them if None.
        group: g, the rows of each query.
    """

    columns: slice
    bias: Tensor | None
    diagonal: int | None
    group: int

    def of(self, pieces: list[Tensor]) -> Tensor:
        """Return the part of these pieces of ``COLUMNS`` keys that belongs to this tile."""
        number, start = divmod(self.columns.start, COLUMNS)
        return pieces[number].narrow(1, start, self.columns.stop - self.columns.start)

    def without_later(self, weights: Tensor) -> Tensor:
        """Set the weights of keys beyond the diagonal to 0, in place."""
        if self.diagonal is not None:
            weights.unflatten(1, (-1, self.group)).transpose(1, 2).squeeze(1).tril_(self.diagonal)  # (n, g, q, c)
        return weights


@dataclass(frozen=True)
class _Mask:
    """The masks, tile by tile: which keys each query may look at.

    Args:
        score_bias: (b, h / g, q, g, k), or (n, q, g, k) of the heads of a block, each of them or 1; bool (True = may
            look) or float.
        diagonal: Query i may look at keys 0 ... i + diagonal; at all of them if None.
        group: g, the rows of each query.
        query_len: Number of queries.
        key_len: Number of keys.
    """

    score_bias: Tensor | None
    diagonal: int | None
    group: int
    query_len: int
    key_len: int

    def queries_at_once(self, buffers: int) -> int:
        """Return the number of queries of a tile, if room for so many tiles is needed at once."""
        masked = self.score_bias is not None or self.diagonal is not None
        return max((MASKED_ROWS if masked else ROWS // buffers) // self.group, 1)

    def of(self, sample: int, heads: slice) -> "_Mask":
        """Return the mask of some heads, (n or 1, q, g, k); one that all heads share stays whole."""
        if self.score_bias is None:
            return self
        of_sample = self.score_bias[sample if self.score_bias.size(0) > 1 else 0]
        return replace(self, score_bias=_part(of_sample, 0, heads))

    def row_tiles(self, dtype: torch.dtype, safe: bool, buffers: int) -> Iterator[tuple[slice, list[_Tile]]]:
        """Cut the queries into tiles, and for each of them the keys."""
        for queries in _pieces(0, self.query_len, self.queries_at_once(buffers)):
            rows = slice(queries.start * self.group, queries.stop * self.group)
            yield rows, list(self.column_tiles(queries, dtype, safe))

    def column_tiles(self, queries: slice, dtype: torch.dtype, safe: bool) -> Iterator[_Tile]:
        """Cut the keys that any of the queries may look at into tiles.

        If no maximum is subtracted, weights beyond the diagonal are set to 0; else their scores must be -inf first.
        """
        for columns in self._visible_columns(queries):
            diagonal = self.diagonal_of(queries, columns)
            bias = self.bias(queries, columns, dtype, None if safe else diagonal)
            yield _Tile(columns, bias, diagonal if safe else None, self.group)

    def _visible_columns(self, queries: slice) -> list[slice]:
        """Cut the keys into blocks, without those that none of the queries may look at."""
        stop = self.key_len if self.diagonal is None else min(max(queries.stop + self.diagonal, 0), self.key_len)
        if self.score_bias is None:
            return _pieces(0, stop, COLUMNS)
        bias = _part(_part(self.score_bias, -3, queries), -1, slice(0, stop))
        least: float = -math.inf
        if bias.dtype == torch.bool:
            bias, least = bias.view(torch.uint8), 0
        seen = (bias.amax(dim=(0, 1, 2)) != least).expand(stop)
        places = seen.nonzero()
        if not len(places):
            return []
        first = int(places[0])
        pieces = _pieces(first - first % COLUMNS, int(places[-1]) + 1, COLUMNS)
        return [slice(max(x.start, first), x.stop) for x in pieces if seen[x].any()]

    def diagonal_of(self, queries: slice, columns: slice) -> int | None:
        """Say where the diagonal lies in a tile; None where every query may look at all of its keys."""
        if self.diagonal is None:
            return None
        diagonal = queries.start - columns.start + self.diagonal
        return None if diagonal >= columns.stop - columns.start - 1 else diagonal

    def bias(self, queries: slice, columns: slice, dtype: torch.dtype, diagonal: int | None) -> Tensor | None:
        """Return the bias of a tile, (n or 1, q, g, c); None if every query may look at all of its keys."""
        tile = None
        if self.score_bias is not None:
            tile = _part(_part(self.score_bias, -3, queries), -1, columns)
            if tile.dtype == torch.bool:
                tile = None if tile.all() else torch.zeros_like(tile, dtype=dtype).masked_fill_(~tile, -math.inf)
            else:  # the lowest number stays finite: a row full of it averages all values
                least = torch.finfo(dtype).min
                tile = (tile.to(dtype) * LOG2E).clamp_(min=least).masked_fill_(tile == -math.inf, -math.inf)
        query_len, key_len = (x.stop - x.start for x in (queries, columns))
        if diagonal is not None:
            later = torch.full((query_len, key_len), -math.inf, dtype=dtype).triu_(diagonal + 1).unsqueeze(1)
            tile = later.unsqueeze(0) if tile is None else tile + later
        return None if tile is None else tile.expand(*tile.shape[:-3], query_len, self.group, -1)


def _part(x: Tensor, dim: int, places: slice) -> Tensor:
    """Slice a dimension, unless it has size 1 and broadcasts."""
    return x if x.size(dim) == 1 else x.narrow(dim, places.start, places.stop - places.start)


def _pieces(start: int, stop: int, size: int) -> list[slice]:
    """Cut a range into pieces of a size, the last of them shorter.

    >>> _pieces(2, 9, 3)
    [slice(2, 5, None), slice(5, 8, None), slice(8, 9, None)]
    """
    return [slice(a, min(a + size, stop)) for a in range(start, stop, size)]
