"""Exact attention in tiles as a Triton kernel: on a GPU what ``tiling`` does on the CPU, forward and backward.

The equations are those of ``tiling``; what differs is who loops. There Python goes from tile to tile, and each product
is an operation of torch. Here one program computes one tile of rows from beginning to end, thousands of programs run at
once, and a tile never leaves the chip: scores and weights are not even written down once.

1. ``_attend_tile``: one program for each tile of queries. It goes over the keys that they may look at, block by block,
   and keeps the log-sum-exp of each row for the backward.
2. ``_query_gradients``: likewise, with the weights computed again: weights = exp(scores - log-sum-exp).
3. ``_key_gradients``: one program for each tile of keys, which goes over the queries that may look at them. It is a
   kernel of its own, since two programs that add to the same gradient would have to wait for each other.

Nothing takes this path unless it is switched on. On an H200 in bfloat16, with 8 heads of 64 and length 4096, a call
takes 0.35 ms, and 0.38 with a causal mask, where the textbook takes 1.34 and 1.94, and torch's flash kernel 0.12.
Causal training takes 1.29 ms, 4.55 and 0.45, with 24 MiB where the textbook needs 2 GiB (benchmarks/results/gpu). Most
of a call is its launch from Python: the forward kernel alone takes 0.13 ms, and 0.09 with a causal mask
(``triton.testing.do_bench``). It is meant for half precision: float32 is multiplied exactly, not in TF32, which takes
several times as long as torch's memory-efficient kernel.

Triton is the extra ``triton``; with ``TRITON_INTERPRET=1`` in the environment its interpreter runs the kernels on the
CPU, slowly.

Dimension letters: n batch * heads, q query_len, k key_len, d head_dim; r rows (queries) and c columns (keys) of a tile.

Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2; Tillet et al. 2019 for Triton.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from scratch import paths, tiling, validation
from scratch.masks import Visible
from scratch.sdpa import textbook_attention

__all__ = ["switched_on", "triton_attention"]

# Rows and columns of a tile: powers of 2, and 16 at least, as the units that multiply matrices demand. Of float32 fewer
# rows, since the backward would have more at hand than the registers hold.
ROWS, ROWS_OF_FLOAT32, COLUMNS = 64, 32, 64
LEAST_WIDTH = 16
# A maximum to begin with: the least number, and not -inf, whose difference to itself is NaN.
LEAST = tl.constexpr(torch.finfo(torch.float32).min)


@contextmanager
def switched_on() -> Iterator[None]:
    """Let attention on CUDA take this kernel, in the modules and in the function, where tiles take over on the CPU.

    That is without dropout, weights and a written mask: with none, or a causal one that is named.

    In torch.nn: ``torch.nn.attention.sdpa_kernel``.
    """
    with paths.switched_on("cuda", as_kernel):
        yield


def as_kernel(
    q: Tensor, k: Tensor, v: Tensor, score_bias: None = None, diagonal: int | None = None, scale: float = 1.0
) -> Tensor:
    """Take what ``paths`` calls a kernel with, as ``tiling.tiled_attention`` does, less the written mask."""
    return triton_attention(q, k, v, score_bias, (None, diagonal), scale)


def triton_attention(
    q: Float[Tensor, "*heads query_len head_dim"],
    k: Float[Tensor, "*key_heads key_len head_dim"],
    v: Float[Tensor, "*value_heads key_len v_head_dim"],
    score_bias: Callable[..., Any] | None = None,
    reach: tuple[int | None, int | None] = (None, None),
    scale: float = 1.0,
) -> Float[Tensor, "... query_len v_head_dim"]:
    """Weigh the values as ``tiling.tiled_attention`` does, in one kernel.

    context = softmax(q kᵀ * scale + score_bias) v

    Args:
        q: Queries, (batch, heads, query_len, head_dim), or less the batch, or less the heads.
        k: Keys, likewise, of as many heads as the queries or of fewer that divide them: grouped heads.
        v: Values, likewise.
        score_bias: A function decorated with ``triton.jit``, called with the numbers of sample and head and, for a
            tile, those of the queries (r, 1) and keys (1, c). What it returns is added to the scores, -inf hides a key.
        reach: Query i may look at keys i + reach[0] ... i + reach[1], without a bound where it is None: (None, 0) is
            causal, (-2, 0) a window of three keys.
        scale: Factor on the scores.

    Returns:
        The context, in the dtype of the queries. A query that may look at no key gets 0, with gradient 0.

    Raises:
        ValueError: For tensors where the kernel cannot run, more than four dimensions, or a reach that ends before it
            begins.

    In torch.nn: the fused kernels of ``F.scaled_dot_product_attention``, and what ``torch.compile`` makes of
    ``flex_attention``.

    Source: Dao 2023, section 3.1.

    >>> q, k, v = torch.randn(3, 2, 6, 40, 16, device="cuda" if torch.cuda.is_available() else "cpu").unbind()
    >>> textbook = torch.softmax(q @ k.mT, dim=-1) @ v
    >>> torch.allclose(triton_attention(q, k, v), textbook, atol=1e-5)
    True
    """
    validation.check_triton_attention(q, k, v, reach, interpreted=triton.knobs.runtime.interpret)
    missing = 4 - max(q.dim(), k.dim(), v.dim())
    q, k, v = tiling.aligned(q, k, v)
    lead = q.shape[:2]
    beyond = q.size(-2) + k.size(-2)  # farther than any key
    earliest, latest = (end if x is None else x for x, end in zip(reach, (-beyond, beyond), strict=True))
    sees = _Sees(earliest, latest, q.size(1), score_bias)
    folded = (x.flatten(0, 1).contiguous() for x in (q, k, v))  # (n, len, d)
    context: Tensor = _TritonAttention.apply(*folded, scale, sees)
    return context.unflatten(0, lead)[(0,) * missing]


@dataclass(frozen=True)
class _Sees:
    """Who may look at whom: query i at keys i + earliest ... i + latest, with a bias on their scores.

    Args:
        earliest: The first key, counted from the query's own place; may be negative.
        latest: The last key, counted likewise.
        num_heads: Of queries, so that the bias can tell samples from heads.
        score_bias: As ``triton_attention`` takes it.
    """

    earliest: int
    latest: int
    num_heads: int
    score_bias: Callable[..., Any] | None


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, sees: _Sees) -> Tensor:
        context = q.new_empty(*q.shape[:2], v.size(-1))
        log_sum_exp = torch.empty(q.shape[:2], dtype=_summed_in(q), device=q.device)
        arguments = _arguments(q, k, v, scale, sees)
        with torch.cuda.device_of(q):
            _attend_tile[_grid(q, _rows(q))](q, k, v, context, log_sum_exp, **arguments)
        ctx.scale, ctx.sees = scale, sees
        ctx.save_for_backward(q, k, v, context, log_sum_exp)
        return context

    @staticmethod
    def backward(ctx: Any, grad_context: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, log_sum_exp = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_textbook_gradients(q, k, v, ctx.scale, ctx.sees, grad_context), None, None
        grad_context = grad_context.contiguous()
        # The sum of weights * grad_weights over a row, which no tile has: tiling.py, idea 2.
        row_term = (grad_context * context.to(log_sum_exp.dtype)).sum(dim=-1)
        inputs = q, k, v, grad_context, log_sum_exp, row_term
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        arguments = _arguments(q, k, v, ctx.scale, ctx.sees)
        with torch.cuda.device_of(q):
            _query_gradients[_grid(q, _rows(q))](*inputs, grad_q, **arguments)
            _key_gradients[_grid(k, COLUMNS)](*inputs, grad_k, grad_v, **arguments)
        return grad_q, grad_k, grad_v, None, None


def _summed_in(q: Tensor) -> torch.dtype:
    """Name the dtype of sums: float32, in which half precision is multiplied too, unless the inputs are better."""
    return torch.promote_types(q.dtype, torch.float32)


def _rows(q: Tensor) -> int:
    """Count the rows of a tile."""
    return ROWS if _is_half(q) else ROWS_OF_FLOAT32


def _is_half(q: Tensor) -> bool:
    return q.element_size() == 2


def _grid(x: Tensor, size: int) -> tuple[int]:
    """Count the programs: one for each tile of each head."""
    return (x.size(0) * triton.cdiv(x.size(1), size),)


def _arguments(q: Tensor, k: Tensor, v: Tensor, scale: float, sees: _Sees) -> dict[str, Any]:
    """Name the arguments that all kernels take besides their tensors; those in capitals are compile-time constants."""
    return {
        "query_len": q.size(1),
        "key_len": k.size(1),
        "earliest": sees.earliest,
        "latest": sees.latest,
        "num_heads": sees.num_heads,
        "HEAD_DIM": q.size(-1),
        "V_HEAD_DIM": v.size(-1),
        "GROUP": q.size(0) // k.size(0),
        "SCALE": scale,
        "BIAS": sees.score_bias,
        "ROWS": _rows(q),
        "COLUMNS": COLUMNS,
        "num_warps": 4 if _is_half(q) else 8,
        "num_stages": _stages(q, v),
    }


def _stages(q: Tensor, v: Tensor) -> int:
    """Count the tiles of keys and values that are on the chip at once: as many as fit there, wide as they are."""
    if not _is_half(q):
        return 1
    return 3 if max(q.size(-1), v.size(-1)) <= 64 else 2


def _textbook_gradients(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sees: _Sees, grad_context: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and v, as far as they want one, from operations that have gradients themselves."""
    validation.check_differentiable_twice(sees.score_bias)
    places = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device)
    visible = Visible(places.tril(sees.latest).triu(sees.earliest))
    keys, values = (x.repeat_interleave(q.size(0) // x.size(0), 0) for x in (k, v))
    context = textbook_attention(q, keys, values, visible, scale, dropout_p=0.0)
    wanted = [x for x in (q, k, v) if x.requires_grad]
    found = iter(torch.autograd.grad(context, wanted, grad_context, create_graph=True))
    return tuple(next(found) if x.requires_grad else None for x in (q, k, v))


@triton.jit
def _attend_tile(
    q, k, v, context, log_sum_exp,
    query_len, key_len, earliest, latest, num_heads,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of queries: FlashAttention-2, algorithm 1."""
    tiles = tl.cdiv(query_len, ROWS)
    head, first_row = tl.program_id(0) // tiles, (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    exact = log_sum_exp.dtype.element_ty
    q_tile = _load(q, head, first_row, query_len, HEAD_DIM, ROWS, True)  # (r, d)
    row_max = tl.full((ROWS,), LEAST, exact)
    row_sum = tl.zeros((ROWS,), exact)
    gathered = tl.zeros((ROWS, _padded(V_HEAD_DIM)), exact)
    spans = _spans(first_row, ROWS, query_len, earliest, latest, COLUMNS, key_len)
    for part in tl.static_range(3):
        for start in range(spans[part], spans[part + 1], COLUMNS):
            k_tile = _load(k, head // GROUP, start, key_len, HEAD_DIM, COLUMNS, part != 1)  # (c, d)
            v_tile = _load(v, head // GROUP, start, key_len, V_HEAD_DIM, COLUMNS, part != 1)
            scores = _scores(
                q_tile, k_tile, first_row, start, head, query_len, key_len, earliest, latest, num_heads,
                SCALE, BIAS, part != 1,
            )  # fmt: skip
            raised = tl.maximum(row_max, tl.max(scores, 1))
            weights = tl.exp(scores - raised[:, None])  # (r, c)
            shrink = tl.exp(row_max - raised)
            row_sum = row_sum * shrink + tl.sum(weights, 1)
            gathered = _product(weights.to(v_tile.dtype), v_tile, gathered * shrink[:, None])
            row_max = raised
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)  # a row that sees no key has gathered 0
    _store(context, gathered / row_sum[:, None], head, first_row, query_len, V_HEAD_DIM)
    rows = first_row + tl.arange(0, ROWS)
    tl.store(log_sum_exp + head * query_len + rows, row_max + tl.log(row_sum), mask=rows < query_len)


@triton.jit
def _query_gradients(
    q, k, v, grad_context, log_sum_exp, row_term, grad_q,
    query_len, key_len, earliest, latest, num_heads,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of one tile of queries, which collects from the keys that they look at."""
    tiles = tl.cdiv(query_len, ROWS)
    head, first_row = tl.program_id(0) // tiles, (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    q_tile = _load(q, head, first_row, query_len, HEAD_DIM, ROWS, True)
    grad_rows = _load(grad_context, head, first_row, query_len, V_HEAD_DIM, ROWS, True)
    sums = _row(log_sum_exp, head, first_row, query_len, ROWS)
    terms = _row(row_term, head, first_row, query_len, ROWS)
    collected = tl.zeros((ROWS, _padded(HEAD_DIM)), log_sum_exp.dtype.element_ty)
    spans = _spans(first_row, ROWS, query_len, earliest, latest, COLUMNS, key_len)
    for part in tl.static_range(3):
        for start in range(spans[part], spans[part + 1], COLUMNS):
            k_tile = _load(k, head // GROUP, start, key_len, HEAD_DIM, COLUMNS, part != 1)
            v_tile = _load(v, head // GROUP, start, key_len, V_HEAD_DIM, COLUMNS, part != 1)
            scores = _scores(
                q_tile, k_tile, first_row, start, head, query_len, key_len, earliest, latest, num_heads,
                SCALE, BIAS, part != 1,
            )  # fmt: skip
            _, grad_scores = _grad_scores(scores, grad_rows, v_tile, sums, terms)
            collected = _product(grad_scores.to(k_tile.dtype), k_tile, collected)
    _store(grad_q, collected * SCALE, head, first_row, query_len, HEAD_DIM)


@triton.jit
def _key_gradients(
    q, k, v, grad_context, log_sum_exp, row_term, grad_k, grad_v,
    query_len, key_len, earliest, latest, num_heads,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the gradients of one tile of keys and values, which collect from the queries that look at them."""
    tiles = tl.cdiv(key_len, COLUMNS)
    key_head, first_column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * COLUMNS
    k_tile = _load(k, key_head, first_column, key_len, HEAD_DIM, COLUMNS, True)
    v_tile = _load(v, key_head, first_column, key_len, V_HEAD_DIM, COLUMNS, True)
    of_keys = tl.zeros((COLUMNS, _padded(HEAD_DIM)), log_sum_exp.dtype.element_ty)
    of_values = tl.zeros((COLUMNS, _padded(V_HEAD_DIM)), log_sum_exp.dtype.element_ty)
    spans = _spans(first_column, COLUMNS, key_len, -latest, -earliest, ROWS, query_len)
    for head in range(key_head * GROUP, key_head * GROUP + GROUP):
        for part in tl.static_range(3):
            for start in range(spans[part], spans[part + 1], ROWS):
                q_tile = _load(q, head, start, query_len, HEAD_DIM, ROWS, part != 1)
                grad_rows = _load(grad_context, head, start, query_len, V_HEAD_DIM, ROWS, part != 1)
                sums = _row(log_sum_exp, head, start, query_len, ROWS)
                terms = _row(row_term, head, start, query_len, ROWS)
                scores = _scores(
                    q_tile, k_tile, start, first_column, head, query_len, key_len, earliest, latest, num_heads,
                    SCALE, BIAS, part != 1,
                )  # fmt: skip
                weights, grad_scores = _grad_scores(scores, grad_rows, v_tile, sums, terms)
                of_values = _product(tl.trans(weights.to(grad_rows.dtype)), grad_rows, of_values)
                of_keys = _product(tl.trans(grad_scores.to(q_tile.dtype)), q_tile, of_keys)
    _store(grad_k, of_keys * SCALE, key_head, first_column, key_len, HEAD_DIM)
    _store(grad_v, of_values, key_head, first_column, key_len, V_HEAD_DIM)


@triton.jit
def _spans(first, SIZE: tl.constexpr, length, earliest, latest, OTHER_SIZE: tl.constexpr, other_length):
    """Cut the places that a tile looks at in three: those before and after the middle hide some of the scores.

    Place i of the tile looks at the places i + earliest ... i + latest of the others. In the middle all scores count,
    and none needs to be asked.
    """
    start = tl.maximum(first + earliest, 0) // OTHER_SIZE * OTHER_SIZE
    stop = tl.maximum(tl.minimum(tl.minimum(first + SIZE, length) + latest, other_length), start)
    whole = tl.minimum(tl.cdiv(tl.maximum(first + SIZE - 1 + earliest, 0), OTHER_SIZE) * OTHER_SIZE, stop)
    seen_by_all = tl.where(first + SIZE <= length, tl.minimum(first + latest + 1, other_length), 0)
    return start, whole, tl.maximum(whole, seen_by_all // OTHER_SIZE * OTHER_SIZE), stop


@triton.jit
def _scores(
    q_tile, k_tile, first_row, first_column, head,
    query_len, key_len, earliest, latest, num_heads,
    SCALE: tl.constexpr, BIAS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Score a tile, (r, c): q kᵀ * scale + bias; at an edge -inf where the query may not look or there is none."""
    scores = _product(q_tile, tl.trans(k_tile)) * SCALE
    num_rows: tl.constexpr = q_tile.shape[0]
    num_columns: tl.constexpr = k_tile.shape[0]
    queries, keys = first_row + tl.arange(0, num_rows)[:, None], first_column + tl.arange(0, num_columns)[None, :]
    if BIAS is not None:
        scores += BIAS(head // num_heads, head % num_heads, queries, keys)
    if EDGE:
        in_reach = (keys - queries >= earliest) & (keys - queries <= latest)
        scores = tl.where(in_reach & (queries < query_len) & (keys < key_len), scores, float("-inf"))
    return scores


@triton.jit
def _grad_scores(scores, grad_rows, v_tile, sums, terms):
    """Compute the weights again, and give them and the gradient of the scores: weights * (grad_weights - row_term)."""
    weights = tl.exp(scores - sums[:, None])
    grad_weights = _product(grad_rows, tl.trans(v_tile))
    return weights, weights * (grad_weights - terms[:, None])


@triton.jit
def _product(left, right, added=None):
    """Multiply without first rounding float32 to 10 bits of mantissa, as tensor cores do by default."""
    exact: tl.constexpr = tl.float64 if left.dtype == tl.float64 else tl.float32
    return tl.dot(left, right, added, input_precision="ieee", out_dtype=exact)


@triton.constexpr_function
def _padded(width):
    """Round a width up to a power of 2 that the units take."""
    return max(LEAST_WIDTH, triton.next_power_of_2(width))


@triton.jit
def _row(x, head, first, length, SIZE: tl.constexpr):
    """Load one number for each row of one head of x (n, length), and 0 beyond its end: (r)."""
    rows = first + tl.arange(0, SIZE)
    return tl.load(x + head * length + rows, mask=rows < length, other=0.0)


@triton.jit
def _load(x, head, first, length, WIDTH: tl.constexpr, SIZE: tl.constexpr, EDGE: tl.constexpr):
    """Load rows of one head of x (n, length, width), and 0 beyond its ends: (r, d)."""
    rows, dims = first + tl.arange(0, SIZE)[:, None], tl.arange(0, _padded(WIDTH))[None, :]
    places = x + (head * length).to(tl.int64) * WIDTH + rows * WIDTH + dims
    if EDGE or _padded(WIDTH) != WIDTH:
        return tl.load(places, mask=(rows < length) & (dims < WIDTH), other=0.0)
    return tl.load(places)


@triton.jit
def _store(x, values, head, first, length, WIDTH: tl.constexpr):
    """Store rows of one head of x (n, length, width), but for what lies beyond its ends."""
    rows, dims = first + tl.arange(0, values.shape[0])[:, None], tl.arange(0, values.shape[1])[None, :]
    places = x + (head * length).to(tl.int64) * WIDTH + rows * WIDTH + dims
    tl.store(places, values.to(x.dtype.element_ty), mask=(rows < length) & (dims < WIDTH))
