"""Functions that rotate heads by the angles that are handed over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence_tests.checker.verify import verify


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Right: halves of each head."""
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, ...]:
    """Right: neighbours as complex numbers, heads behind the tokens."""
    pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (xq, xk))
    return tuple(torch.view_as_real(x * freqs_cis[:, None]).flatten(-2) for x in pairs)


def apply_rope(x: Tensor) -> Tensor:
    """Right: makes the angles itself, for (batch, len, heads, head_dim)."""
    steps = 10_000.0 ** (-torch.arange(0, x.size(-1), 2, device=x.device) / x.size(-1))
    angles = (torch.arange(x.size(1), device=x.device)[:, None] * steps).repeat(1, 2)[:, None]
    return x * angles.cos() + turned(x) * angles.sin()


def turns_keys_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + turned(q) * sin, k * cos - turned(k) * sin


def turns_queries_twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary_pos_emb(q, q, cos, sin)


def exchanges_them(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary_pos_emb(k, q, cos, sin)


def by_the_heads(x: Tensor) -> Tensor:
    """Takes the number of a head for that of a token."""
    return apply_rope(x.transpose(1, 2)).transpose(1, 2) + apply_rope(x)


def of_other_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns neighbours, and multiplies halves."""
    swapped = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
    return apply_rotary_pos_emb(q, k, cos, 0 * sin)[0] + swapped[0] * sin.flip(-1), swapped[1]


@pytest.mark.parametrize("made", [apply_rotary_pos_emb, apply_rotary_emb, apply_rope])
def test_a_function_that_rotates_is_torchs_rotation(made: Callable[..., Any]) -> None:
    report = verify(made)
    assert report.verdict == "equal", report
    assert report.equivalent is not None
    assert "RotaryEmbedding" in report.equivalent.source


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", [turns_queries_twice, exchanges_them, by_the_heads, turns_keys_back, of_other_pairs])
def test_another_rotation_is_not(made: Callable[..., Any]) -> None:
    assert verify(made, kind="positional_encoding").verdict == "unchecked"
