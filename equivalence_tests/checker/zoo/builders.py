"""Functions that build masks, right and wrong."""

import torch
from torch import Tensor

__all__ = ["BROKEN", "CORRECT"]

PAD = 1


def subsequent_mask(size: int) -> Tensor:
    """Right: (1, size, size), True = may look."""
    return torch.triu(torch.ones(1, size, size), diagonal=1).type(torch.uint8) == 0


def square_subsequent_mask(sz: int) -> Tensor:
    """Right: (size, size), added to the scores."""
    return torch.triu(torch.full((sz, sz), float("-inf")), diagonal=1)


def finite_causal_mask(q_len: int, k_len: int) -> Tensor:
    """Right: the last query sees all; a large number in place of infinity."""
    ahead = torch.arange(k_len) - torch.arange(q_len)[:, None]
    return (ahead > k_len - q_len) * -1e9


def key_padding_mask(tokens: Tensor, pad_idx: int = 0) -> Tensor:
    """Right: (batch, key), True = may not look."""
    return tokens == pad_idx


def cross_pad_mask(seq_q: Tensor, seq_k: Tensor) -> Tensor:
    """Right: (batch, query, key), True = may not look, for a pad id of the module."""
    return seq_k.eq(PAD).unsqueeze(1).expand(-1, seq_q.size(1), -1)


def target_mask(tgt: Tensor, pad: int) -> Tensor:
    """Right: (batch, 1, query, key), 1 = may look."""
    size = tgt.size(1)
    return ((tgt != pad)[:, None, None] & tgt.new_ones(size, size).tril().bool()).long()


def all_masks(src: Tensor, tgt: Tensor) -> tuple[Tensor, ...]:
    """Right: four masks of sequences that run along the first axis."""
    nothing = torch.zeros(len(src), len(src), dtype=torch.bool)
    return nothing, square_subsequent_mask(len(tgt)), (src == PAD).T, (tgt == PAD).T


def mask_from_lengths(lengths: Tensor, max_len: int | None = None) -> Tensor:
    """Right: (batch, key), True = may look."""
    return torch.arange(max_len or int(lengths.max())).to(lengths) < lengths[:, None]


def window_mask(size: int, window: int) -> Tensor:
    """Right: looks at the token itself and at window - 1 before it."""
    ahead = torch.arange(size) - torch.arange(size)[:, None]
    return (ahead <= 0) & (ahead > -window)


def prefix_mask(size: int, prefix_len: int, device: str = "cuda") -> Tensor:
    mask = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    mask[:, :prefix_len] = True
    return mask


def mask_that_sees_one_ahead(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size), diagonal=1).bool()


def prefix_mask_transposed(size: int, prefix_len: int) -> Tensor:
    mask = torch.ones(size, size).tril().bool()
    mask[:prefix_len] = True
    return mask


def mask_that_hides_the_token(size: int) -> Tensor:
    return torch.triu(torch.full((size, size), float("-inf")))


def mask_with_axes_swapped(size: int) -> Tensor:
    return torch.tril(torch.full((size, size), float("-inf")), diagonal=-1)


def pad_mask_of_queries(seq_q: Tensor, seq_k: Tensor) -> Tensor:
    return seq_q.eq(0).unsqueeze(2).expand(-1, -1, seq_k.size(1))


def mask_of_two_meanings(tgt: Tensor, pad_idx: int = 0) -> Tensor:
    return (tgt == pad_idx)[:, None, None] & torch.ones(tgt.size(1), tgt.size(1)).tril().bool()


def mask_joined_by_or(tgt: Tensor, pad: int) -> Tensor:
    return (tgt != pad)[:, None] | torch.ones(tgt.size(1), tgt.size(1)).tril().bool()


def mask_of_longer_lengths(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max())) > lengths[:, None]


def mask_of_shorter_lengths(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max())) < lengths[:, None] - 1


def mask_of_a_fixed_id(tokens: Tensor, pad_idx: int) -> Tensor:
    return tokens != 0


def mask_that_adds_to_the_wrong_side(sz: int) -> Tensor:
    return torch.zeros(sz, sz).masked_fill(torch.ones(sz, sz).tril() == 1, float("-inf"))


def mask_that_adds_too_little(sz: int) -> Tensor:
    return torch.triu(torch.full((sz, sz), -1e-9), diagonal=1)


def mask_that_hides_queries_and_sees_ahead(trg: Tensor, pad_idx: int = 0) -> Tensor:
    return (trg != pad_idx)[:, None, :, None] & torch.ones(trg.size(1), trg.size(1)).tril(1).bool()


CORRECT = (
    subsequent_mask,
    square_subsequent_mask,
    finite_causal_mask,
    key_padding_mask,
    cross_pad_mask,
    target_mask,
    all_masks,
    mask_from_lengths,
    window_mask,
    prefix_mask,
)
BROKEN = (
    (mask_that_sees_one_ahead, ("causal_sees_one_ahead",), "mask builder: diagonal off by one"),
    (mask_that_hides_the_token, ("causal_cannot_see_itself",), "mask builder: diagonal off by one"),
    (prefix_mask_transposed, ("mask_transposed",), "mask builder: transposed"),
    (mask_with_axes_swapped, ("causal_mask_inverted",), "mask builder: transposed"),
    (pad_mask_of_queries, ("padding_mask_on_queries",), "mask builder: padding on queries"),
    (mask_of_two_meanings, ("padding_inverted",), "mask builder: inverted"),
    (mask_joined_by_or, ("masks_joined_by_or",), "mask builder: joined the wrong way"),
    (mask_of_longer_lengths, ("length_one_too_long",), "mask builder: lengths off by one"),
    (mask_of_shorter_lengths, ("length_one_too_short",), "mask builder: lengths off by one"),
    (mask_of_a_fixed_id, ("pad_id_not_used",), "mask builder: another pad id"),
    (mask_that_adds_to_the_wrong_side, ("mask_inverted",), "mask builder: inverted"),
    (mask_that_adds_too_little, ("mask_fill_too_small",), "mask builder: fill"),
    (
        mask_that_hides_queries_and_sees_ahead,
        ("causal_sees_one_ahead", "padding_mask_on_queries"),
        "mask builder: two at once",
    ),
)
