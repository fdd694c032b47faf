"""Who may look at whom: builders, and conversions between the three conventions.

Inside this package a mask is ``may_attend`` (bool, True = the query may look at the key) or ``score_bias`` (float,
added to the scores). The arguments of torch.nn's modules say the opposite (True = may **not** look): convert once, at
the door. Masks combine by ``&`` and ``|``; ``draw`` prints them.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scratch import validation

__all__ = [
    "causal",
    "draw",
    "from_lengths",
    "from_module_mask",
    "from_score_bias",
    "from_token_ids",
    "sliding_window",
    "to_module_mask",
    "to_score_bias",
]

Alignment = Literal["upper_left", "lower_right"]


def causal(
    query_len: int,
    key_len: int | None = None,
    *,
    align: Alignment = "upper_left",
    device: torch.device | str | None = None,
) -> Bool[Tensor, "query_len key_len"]:
    """Let no query look at a later key.

    may_attend[i, j] = j <= i + offset, with offset 0 (upper_left) or key_len - query_len (lower_right)

    Args:
        query_len: Number of queries.
        key_len: Number of keys; as many as queries if not given.
        align: Which corner the diagonal of a non-square mask runs through. ``lower_right`` is right when the queries
            are the last of the keys, as in decoding with a cache.
        device: Where to build it.

    Returns:
        (query_len, key_len), True = may look.

    Raises:
        ValueError: For a negative length or an unknown alignment.

    In torch.nn: ``nn.Transformer.generate_square_subsequent_mask`` (square, float) and
    ``torch.nn.attention.bias.causal_upper_left`` / ``causal_lower_right``.

    Source: Vaswani et al. 2017, section 3.2.3.

    >>> print(draw(causal(3)))
    1 0 0
    1 1 0
    1 1 1
    >>> print(draw(causal(2, 4)))
    1 0 0 0
    1 1 0 0
    >>> print(draw(causal(2, 4, align="lower_right")))
    1 1 1 0
    1 1 1 1
    """
    key_len = query_len if key_len is None else key_len
    validation.check_not_negative(query_len=query_len, key_len=key_len)
    validation.check_choice("align", align, ("upper_left", "lower_right"))
    offset = key_len - query_len if align == "lower_right" else 0
    return torch.ones(query_len, key_len, dtype=torch.bool, device=device).tril(offset)


def sliding_window(
    query_len: int,
    key_len: int | None = None,
    *,
    window: int,
    align: Alignment = "upper_left",
    device: torch.device | str | None = None,
) -> Bool[Tensor, "query_len key_len"]:
    """Let a query look at keys that are fewer than ``window`` positions away, on either side.

    may_attend[i, j] = |i + offset - j| < window

    Args:
        query_len: Number of queries.
        key_len: Number of keys; as many as queries if not given.
        window: 1 lets a query see its own position only. With ``& causal(...)`` it sees the last ``window`` positions.
        align: As in ``causal``.
        device: Where to build it.

    Returns:
        (query_len, key_len), True = may look.

    Raises:
        ValueError: For a negative length, a window below 1 or an unknown alignment.

    In torch.nn: a ``mask_mod`` for ``torch.nn.attention.flex_attention``; no module has it.

    Source: Beltagy et al. 2020, section 3.1.

    >>> print(draw(sliding_window(4, window=2)))
    1 1 0 0
    1 1 1 0
    0 1 1 1
    0 0 1 1
    >>> print(draw(sliding_window(4, window=2) & causal(4)))
    1 0 0 0
    1 1 0 0
    0 1 1 0
    0 0 1 1
    """
    key_len = query_len if key_len is None else key_len
    validation.check_not_negative(query_len=query_len, key_len=key_len)
    validation.check_window(window)
    validation.check_choice("align", align, ("upper_left", "lower_right"))
    offset = key_len - query_len if align == "lower_right" else 0
    places = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
    return places.tril(offset + window - 1) & places.triu(offset - window + 1)


def from_lengths(lengths: Int[Tensor, " batch"], max_len: int | None = None) -> Bool[Tensor, "batch key_len"]:
    """Let all queries look at the first ``lengths[i]`` keys of sample i; the rest is padding.

    may_attend[i, j] = j < lengths[i]

    Args:
        lengths: Number of real tokens of each sample.
        max_len: Number of keys; the greatest length if not given (which waits for the device).

    Returns:
        (batch, key_len), True = may look. ``[:, None, None, :]`` broadcasts it over heads and queries.

    Raises:
        ValueError: If ``lengths`` is not one-dimensional, or max_len negative.
        TypeError: If it does not hold integers.

    In torch.nn: ``key_padding_mask`` is the opposite of this (``to_module_mask``).

    >>> print(draw(from_lengths(torch.tensor([2, 3, 0]))))
    1 1 0
    1 1 1
    0 0 0
    """
    validation.check_lengths(lengths, max_len)
    if max_len is None:
        max_len = int(lengths.max()) if lengths.numel() else 0
    return torch.arange(max_len, device=lengths.device) < lengths[:, None]


def from_token_ids(token_ids: Int[Tensor, "*batch key_len"], pad_id: int) -> Bool[Tensor, "*batch key_len"]:
    """Let all queries look at each token that is not padding.

    may_attend[i, j] = token_ids[i, j] != pad_id

    Args:
        token_ids: Integer ids.
        pad_id: The id of the padding token.

    Returns:
        The shape of ``token_ids``, True = may look.

    Raises:
        TypeError: If ``token_ids`` does not hold integers.

    In torch.nn: ``key_padding_mask`` is the opposite of this (``to_module_mask``).

    >>> print(draw(from_token_ids(torch.tensor([[7, 4, 0], [5, 0, 0]]), pad_id=0)))
    1 1 0
    1 0 0
    """
    validation.check_integer("token_ids", token_ids)
    return token_ids != pad_id


def from_module_mask(module_mask: Tensor) -> Bool[Tensor, "..."]:
    """Read a mask of torch.nn's modules, bool (True = may not look) or float (0 / -inf), as ``may_attend``.

    Args:
        module_mask: An ``attn_mask`` or ``key_padding_mask`` as ``nn.MultiheadAttention`` takes it.

    Returns:
        The same shape, True = may look.

    Raises:
        TypeError: For a mask that is neither bool nor float.
        ValueError: For a float mask with other values than 0 and -inf: that is a bias, not a mask.

    In torch.nn: the argument itself.

    >>> print(draw(from_module_mask(torch.tensor([[False, True]]))))
    1 0
    """
    validation.check_mask_dtype("module_mask", module_mask)
    return from_score_bias(module_mask) if module_mask.is_floating_point() else ~module_mask


def to_module_mask(may_attend: Bool[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Turn ``may_attend`` into what torch.nn's modules take: True = may **not** look.

    Args:
        may_attend: True = may look; as ``F.scaled_dot_product_attention`` takes it.

    Returns:
        The same shape, negated.

    Raises:
        TypeError: If ``may_attend`` is not bool.

    In torch.nn: ``attn_mask``, ``key_padding_mask``, ``src_mask``, ... of the modules.

    >>> print(draw(to_module_mask(causal(2))))
    0 1
    0 0
    """
    validation.check_bool("may_attend", may_attend)
    return ~may_attend


def to_score_bias(may_attend: Bool[Tensor, "*shape"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "*shape"]:
    """Turn ``may_attend`` into a bias on the scores: 0 where the query may look, -inf elsewhere.

    Args:
        may_attend: True = may look.
        dtype: A floating dtype.

    Returns:
        The same shape.

    Raises:
        TypeError: If ``may_attend`` is not bool, or ``dtype`` not floating.

    In torch.nn: ``nn.Transformer.generate_square_subsequent_mask`` builds this form, always in float32 by default.

    >>> to_score_bias(causal(2))
    tensor([[0., -inf],
            [0., 0.]])
    """
    validation.check_bool("may_attend", may_attend)
    validation.check_floating("dtype", dtype)
    return torch.zeros_like(may_attend, dtype=dtype).masked_fill_(~may_attend, -math.inf)


def from_score_bias(score_bias: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Read a float mask of 0 and -inf as ``may_attend``.

    Args:
        score_bias: 0 = may look, -inf = may not.

    Returns:
        The same shape, True = may look.

    Raises:
        TypeError: If ``score_bias`` is not floating.
        ValueError: If it holds other values than 0 and -inf.

    In torch.nn: the float form of every mask argument.

    >>> print(draw(from_score_bias(torch.tensor([[0.0, -torch.inf]]))))
    1 0
    """
    validation.check_score_bias(score_bias)
    return score_bias == 0


def draw(may_attend: Bool[Tensor, "rows columns"]) -> str:
    """Draw a mask, one row a line: 1 = may look, 0 = may not.

    Args:
        may_attend: Two-dimensional.

    Returns:
        The picture as text.

    Raises:
        ValueError: If it is not two-dimensional.
        TypeError: If it is not bool.

    >>> print(draw(causal(2)))
    1 0
    1 1
    """
    validation.check_bool("may_attend", may_attend)
    validation.check_dim("may_attend", may_attend, 2)
    return "\n".join(" ".join(str(int(cell)) for cell in row) for row in may_attend.tolist())


def score_bias_from_module(module_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Read an argument of torch.nn's modules (True = may not look, or a float bias) as ``score_bias``."""
    if module_mask is None or module_mask.is_floating_point():
        return module_mask
    return torch.zeros_like(module_mask, dtype=dtype).masked_fill_(module_mask, -math.inf)


class Visible(NamedTuple):
    """All masks of a call in one value: a score bias, a causal diagonal, or neither (every query sees every key).

    Args:
        score_bias: Broadcastable to (..., query_len, key_len). Float: added to the scores; bool: True = may look.
        diagonal: Query i may look at keys 0 ... i + diagonal. Never together with ``score_bias``; takes no memory
            until ``as_bias`` builds the mask.

    >>> Visible(diagonal=0).as_bias(torch.zeros(2, 4), torch.zeros(3, 4))
    tensor([[0., -inf, -inf],
            [0., 0., -inf]])
    """

    score_bias: Tensor | None = None
    diagonal: int | None = None

    def as_bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Build the bias on the scores; None if every query may look at every key."""
        if self.diagonal is not None:
            hidden = torch.full((q.size(-2), k.size(-2)), -math.inf, dtype=q.dtype, device=q.device)
            return hidden.triu(self.diagonal + 1)
        if self.score_bias is None or self.score_bias.is_floating_point():
            return self.score_bias
        return to_score_bias(self.score_bias, q.dtype)

    @property
    def may_blind(self) -> bool:
        """Whether there may be a query that sees no key: none where query i sees key 0, at least."""
        return self.score_bias is not None or (self.diagonal is not None and self.diagonal < 0)


def visible_from_sdpa(
    attn_mask: Any, is_causal: bool, query_len: int, key_len: int, device: torch.device | None = None
) -> Visible:
    """Read the masks of ``scaled_dot_product_attention`` (True = may look, a float bias, or a causal bias)."""
    if not validation.is_causal_bias(attn_mask):
        return Visible(attn_mask, 0 if is_causal else None)
    sizes = validation.lower_right_sizes(attn_mask)
    if sizes is None or sizes == (query_len, key_len):
        return Visible(diagonal=0 if sizes is None else key_len - query_len)
    return Visible(causal(*sizes, align="lower_right", device=device))  # it broadcasts, as any mask does
