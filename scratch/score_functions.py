"""What today's models do to their scores: masks and biases as functions of one place, for ``flex_attention``.

A mask function says whether a query may look at a key, and is given to ``create_block_mask``. A score function gives
another score, and is given to ``flex_attention`` as ``score_mod``. Both are called with (batch, head, q_idx, kv_idx),
which may be single indices or tensors of them that broadcast. Mask functions combine by ``&`` and ``|``. A sink is
neither of the two: it joins the sum below the softmax, which no single score can do (``add_sinks``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratch import validation

__all__ = [
    "MaskFunction",
    "add_sinks",
    "alibi",
    "alibi_slopes",
    "causal",
    "document",
    "prefix",
    "relative_bias",
    "sliding_window",
    "soft_cap",
]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class MaskFunction:
    """Say of one place whether the query may look at the key, and combine with others by ``&``, ``|`` and ``~``.

    Args:
        may_attend: A function of (batch, head, q_idx, kv_idx) that gives a bool tensor.

    In torch.nn: ``and_masks`` and ``or_masks`` of ``torch.nn.attention.flex_attention``, which take these too.

    >>> diagonal = causal() & ~causal(-1)
    >>> diagonal(0, 0, torch.arange(3)[:, None], torch.arange(3)).int()
    tensor([[1, 0, 0],
            [0, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """

    may_attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __call__(self, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Ask the function."""
        return self.may_attend(batch, head, q_idx, kv_idx)

    def __and__(self, other: Callable[..., Tensor]) -> "MaskFunction":
        return MaskFunction(lambda *place: self(*place) & other(*place))

    def __or__(self, other: Callable[..., Tensor]) -> "MaskFunction":
        return MaskFunction(lambda *place: self(*place) | other(*place))

    def __invert__(self) -> "MaskFunction":
        return MaskFunction(lambda *place: ~self(*place))


def causal(offset: int = 0) -> MaskFunction:
    """Let no query look at a later key.

    may_attend(i, j) = j <= i + offset

    Args:
        offset: How many keys there are before the first query: key_len - query_len when the queries are the last of
            the keys, as in decoding with a cache.

    Returns:
        A mask function.

    Raises:
        TypeError: If the offset is no whole number.

    In torch.nn: written out in each program.

    Source: Vaswani et al. 2017, section 3.2.3.

    >>> from scratch.masks import draw
    >>> i, j = torch.arange(2)[:, None], torch.arange(4)
    >>> print(draw(causal()(0, 0, i, j)))
    1 0 0 0
    1 1 0 0
    >>> print(draw(causal(offset=2)(0, 0, i, j)))
    1 1 1 0
    1 1 1 1
    """
    validation.check_whole(offset=offset)
    return MaskFunction(lambda batch, head, q_idx, kv_idx: kv_idx <= q_idx + offset)


def sliding_window(window: int, offset: int = 0) -> MaskFunction:
    """Let a query look at keys that are fewer than ``window`` positions away, on either side.

    may_attend(i, j) = |i + offset - j| < window

    Args:
        window: 1 lets a query see its own place only. With ``& causal()`` it sees the last ``window`` places.
        offset: As in ``causal``.

    Returns:
        A mask function.

    Raises:
        ValueError: For a window below 1.
        TypeError: If window or offset is no whole number.

    In torch.nn: written out in each program. ``window_size`` of ``varlen_attn`` counts the keys beside the query, so
    that its (2, 0) is 3 here.

    Source: Beltagy et al. 2020, section 3.1.

    >>> from scratch.masks import draw
    >>> i, j = torch.arange(5)[:, None], torch.arange(5)
    >>> print(draw((sliding_window(3) & causal())(0, 0, i, j)))
    1 0 0 0 0
    1 1 0 0 0
    1 1 1 0 0
    0 1 1 1 0
    0 0 1 1 1
    """
    validation.check_window(window)
    validation.check_whole(offset=offset)
    return MaskFunction(lambda batch, head, q_idx, kv_idx: (q_idx + offset - kv_idx).abs() < window)


def document(document_ids: Int[Tensor, "*batch len"]) -> MaskFunction:
    """Let tokens look only at tokens of the same document, where several are packed into one sequence.

    may_attend(b, i, j) = document_ids[b, i] == document_ids[b, j]

    Args:
        document_ids: For each token the number of its document; (len) if it is the same in every sample.

    Returns:
        A mask function.

    Raises:
        ValueError: If there are more than two dimensions, or none.
        TypeError: If the ids are no integers.

    In torch.nn: written out in each program.

    >>> from scratch.masks import draw
    >>> i, j = torch.arange(5)[:, None], torch.arange(5)
    >>> packed = document(torch.tensor([0, 0, 0, 1, 1]))
    >>> print(draw((packed & causal())(0, 0, i, j)))
    1 0 0 0 0
    1 1 0 0 0
    1 1 1 0 0
    0 0 0 1 0
    0 0 0 1 1
    """
    validation.check_document_ids(document_ids)
    if document_ids.dim() == 1:
        return MaskFunction(lambda batch, head, q_idx, kv_idx: document_ids[q_idx] == document_ids[kv_idx])
    return MaskFunction(lambda batch, head, q_idx, kv_idx: document_ids[batch, q_idx] == document_ids[batch, kv_idx])


def prefix(prefix_len: int | Int[Tensor, " batch"]) -> MaskFunction:
    """Let every query look at the first tokens: a question that is read as a whole, before an answer in order.

    may_attend(b, i, j) = j < prefix_len[b]

    Args:
        prefix_len: Number of tokens, for all samples or for each.

    Returns:
        A mask function.

    Raises:
        ValueError: For a negative number, or a tensor that is not one-dimensional.
        TypeError: If it holds no integers.

    In torch.nn: written out in each program.

    Source: Raffel et al. 2020, section 3.2.1.

    >>> from scratch.masks import draw
    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> print(draw((prefix(2) | causal())(0, 0, i, j)))
    1 1 0 0
    1 1 0 0
    1 1 1 0
    1 1 1 1
    """
    validation.check_prefix_len(prefix_len)
    if isinstance(prefix_len, Tensor):
        return MaskFunction(lambda batch, head, q_idx, kv_idx: kv_idx < prefix_len[batch])
    return MaskFunction(lambda batch, head, q_idx, kv_idx: kv_idx < prefix_len)


def alibi(slopes: Float[Tensor, " num_heads"]) -> ScoreMod:
    """Take from each score what grows with the distance, in each head at another rate.

    score - slopes[h] * |i - j|

    Args:
        slopes: One for each head of the queries; ``alibi_slopes`` gives those of the paper.

    Returns:
        A score function.

    Raises:
        ValueError: If the slopes are not one-dimensional.
        TypeError: If they are no floating tensor.

    In torch.nn: written out in each program.

    Source: Press et al. 2022, section 3, for causal attention, where j <= i.

    >>> i, j = torch.arange(3)[:, None], torch.arange(3)
    >>> alibi(torch.tensor([0.5]))(torch.zeros(3, 3), 0, 0, i, j)
    tensor([[ 0.0000, -0.5000, -1.0000],
            [-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])
    """
    validation.check_slopes(slopes)
    return lambda score, batch, head, q_idx, kv_idx: score - slopes[head] * (q_idx - kv_idx).abs()


def alibi_slopes(num_heads: int) -> Float[Tensor, " num_heads"]:
    """Return the slopes of ALiBi: powers of 2, evenly spaced in the exponent.

    slopes[h] = 2^(-8 (h + 1) / num_heads), for a power of 2; other numbers of heads take the slopes of the power below
    and fill up with those of the power above, every second one.

    Args:
        num_heads: Number of heads.

    Returns:
        (num_heads).

    Raises:
        ValueError: For a number below 1.

    Source: Press et al. 2022, section 3; the authors' code for other numbers of heads.

    >>> alibi_slopes(4), alibi_slopes(3)
    (tensor([0.2500, 0.0625, 0.0156, 0.0039]), tensor([0.0625, 0.0039, 0.2500]))
    """
    validation.check_positive(num_heads=num_heads)
    below = 2 ** (num_heads.bit_length() - 1)
    heads = torch.arange(num_heads)
    exponents = torch.where(heads < below, heads + 1, heads - below + 0.5)
    return 2 ** (-8 * exponents / below)


def soft_cap(cap: float) -> ScoreMod:
    """Keep scores between -cap and cap, without a corner.

    cap * tanh(score / cap)

    Args:
        cap: What no score reaches.

    Returns:
        A score function.

    Raises:
        ValueError: For a cap that is not positive and finite.

    In torch.nn: written out in each program.

    Source: Gemma Team 2024, "Gemma 2", section 2.

    >>> soft_cap(20.0)(torch.tensor([-100.0, 0.0, 1.0, 20.0, 100.0]), 0, 0, 0, 0)
    tensor([-19.9982,   0.0000,   0.9992,  15.2319,  19.9982])
    """
    validation.check_cap(cap)
    # Torch 2.15 refuses a score function around which a number is another than in the call before, unless it is whole.
    above, below = float(cap).as_integer_ratio()
    return lambda score, batch, head, q_idx, kv_idx: above / below * torch.tanh(score / (above / below))


def relative_bias(table: Float[Tensor, "num_heads distances"]) -> ScoreMod:
    """Add what was learnt for the distance between query and key, in each head.

    score + table[h, clip(j - i, -m, m) + m]

    Args:
        table: For each head one number for each distance from -m to m; what is farther away counts as m.

    Returns:
        A score function, through which the table gets its gradient.

    Raises:
        ValueError: If the table is not two-dimensional, or has an even number of distances.
        TypeError: If it is no floating tensor.

    In torch.nn: written out in each program.

    Source: Shaw et al. 2018, section 3.2, for the clipped distances; Raffel et al. 2020, section 2.1, for one number
    added to the score.

    >>> i, j = torch.arange(3)[:, None], torch.arange(3)
    >>> relative_bias(torch.tensor([[1.0, 5.0, 9.0]]))(torch.zeros(3, 3), 0, 0, i, j)
    tensor([[5., 9., 9.],
            [1., 5., 9.],
            [1., 1., 5.]])
    """
    validation.check_relative_bias(table)
    farthest = table.size(1) // 2
    return lambda score, batch, head, q_idx, kv_idx: (
        score + table[head, (kv_idx - q_idx).clamp(-farthest, farthest) + farthest]
    )


def add_sinks(
    context: Float[Tensor, "*batch num_heads query_len v_head_dim"],
    lse: Float[Tensor, "*batch num_heads query_len"],
    sinks: Float[Tensor, " num_heads"],
) -> Float[Tensor, "*batch num_heads query_len v_head_dim"]:
    """Let each head keep back weight: a sink takes part in the softmax like a key, and has no value.

    context Σ exp(scores) / (Σ exp(scores) + exp(sinks[h])) = context sigmoid(lse - sinks[h])

    Args:
        context: What ``flex_attention`` returns.
        lse: The log-sum-exp that it returns beside it.
        sinks: The score of the sink of each head.

    Returns:
        The shape of the context.

    Raises:
        ValueError: For shapes that do not fit together.

    It cannot be a ``score_mod``, which sees one score at a time and not their sum.

    Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2; Miller 2023, "Attention is off by one".

    >>> context, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    >>> add_sinks(context, lse, torch.tensor([0.0]))  # one key and one sink of the same score
    tensor([[[[0.5000, 0.5000]]]])
    """
    validation.check_sinks(context, lse, sinks)
    return context * torch.sigmoid(lse - sinks[:, None])[..., None].to(context.dtype)
