"""Who may look at whom, built with torch's own tools where it has them.

A mask of this module is ``may_attend`` (bool, True = the query may look at the key), as
``F.scaled_dot_product_attention`` takes it. The arguments of torch.nn's modules say the opposite (see trap
`mask_polarity`): ``to_module_mask`` turns one into the other. torch builds causal masks and, through a ``mask_mod``,
masks of any pattern; padding, conversions and pictures come from ``scratch.masks``.
"""

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from scratch import masks as by_hand
from scratch import validation
from scratch.documentation import documented_like
from scratch.masks import (
    Alignment,
    draw,
    from_lengths,
    from_module_mask,
    from_score_bias,
    from_token_ids,
    to_module_mask,
    to_score_bias,
)

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


@documented_like(by_hand.causal)
def causal(
    query_len: int,
    key_len: int | None = None,
    *,
    align: Alignment = "upper_left",
    device: torch.device | str | None = None,
) -> Bool[Tensor, "query_len key_len"]:
    """In torch.nn: ``nn.Transformer.generate_square_subsequent_mask``, of which this is a corner, made bool.
    ``torch.nn.attention.bias.causal_upper_left`` and ``causal_lower_right`` say the same to
    ``F.scaled_dot_product_attention`` without building it.

    Traps:
        torch's function builds float32 whatever the model's dtype: see trap `square_subsequent_float32`.
        ``is_causal=True`` always means ``upper_left``: see trap `sdpa_top_left`.

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
    size = max(query_len, key_len)
    may_attend = nn.Transformer.generate_square_subsequent_mask(size, device) == 0  # type: ignore[arg-type]
    if align == "lower_right":
        return may_attend[size - query_len :, size - key_len :]
    return may_attend[:query_len, :key_len]


@documented_like(by_hand.sliding_window)
def sliding_window(
    query_len: int,
    key_len: int | None = None,
    *,
    window: int,
    align: Alignment = "upper_left",
    device: torch.device | str | None = None,
) -> Bool[Tensor, "query_len key_len"]:
    """In torch.nn: ``torch.nn.attention.flex_attention.create_mask`` with a ``mask_mod``, a function of the indices
    that says True = may look. Given to ``create_block_mask`` instead, the same function lets ``flex_attention`` skip
    whole blocks.

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
    device = torch.empty(0, device=device).device  # left to itself, create_mask takes the accelerator
    may_attend = create_mask(
        lambda _batch, _head, i, j: (i + offset - j).abs() < window,
        None,
        None,
        max(query_len, 1),  # create_mask cannot count to 0: build at least one place, then cut it off
        max(key_len, 1),
        device=device,
    )
    return may_attend[0, 0, :query_len, :key_len]
