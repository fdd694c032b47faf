"""Rotary position embeddings on torch's complex numbers: to turn a pair is to multiply it by e^(i angle)."""

import torch
from jaxtyping import Float
from torch import Tensor

from scratch import rotary
from scratch.rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Pairing,
    RotaryScaling,
    YaRNScaling,
    adjacent_to_halves,
    halves_to_adjacent,
    rotary_angles,
    rotary_frequencies,
)

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "Pairing",
    "RotaryEmbedding",
    "RotaryScaling",
    "YaRNScaling",
    "adjacent_to_halves",
    "halves_to_adjacent",
    "rotary_angles",
    "rotary_frequencies",
    "rotate_adjacent",
    "rotate_halves",
]


def rotate_adjacent(
    x: Float[Tensor, "... head_dim"], cosines: Float[Tensor, "... pairs"], sines: Float[Tensor, "... pairs"]
) -> Float[Tensor, "... head_dim"]:
    """Turn pairs of features that are next to each other.

    (x_2i, x_2i+1) -> (x_2i cos - x_2i+1 sin, x_2i sin + x_2i+1 cos)

    Args:
        x: (..., head_dim).
        cosines: Of the angles, broadcastable to (..., head_dim / 2).
        sines: Of the same angles, in the same shape.

    Returns:
        The shape of ``x``.

    Source: Su et al. 2021, section 3.4.2, equation 34.

    >>> quarter = torch.tensor([0.0]), torch.tensor([1.0])  # cosine and sine of 90 degrees
    >>> rotate_adjacent(torch.tensor([1.0, 2.0, 3.0, 4.0]), *quarter)
    tensor([-2.,  1., -4.,  3.])
    """
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cosines, sines)).flatten(-2)


def rotate_halves(
    x: Float[Tensor, "... head_dim"], cosines: Float[Tensor, "... pairs"], sines: Float[Tensor, "... pairs"]
) -> Float[Tensor, "... head_dim"]:
    """Turn pairs of features of which one is in the first half and the other in the second.

    (x_i, x_i+d/2) -> (x_i cos - x_i+d/2 sin, x_i sin + x_i+d/2 cos)

    Args:
        x: (..., head_dim).
        cosines: Of the angles, broadcastable to (..., head_dim / 2).
        sines: Of the same angles, in the same shape.

    Returns:
        The shape of ``x``.

    Source: GPT-NeoX, https://github.com/EleutherAI/gpt-neox, and from there the Llama of ``transformers``.

    >>> quarter = torch.tensor([0.0]), torch.tensor([1.0])  # cosine and sine of 90 degrees
    >>> rotate_halves(torch.tensor([1.0, 2.0, 3.0, 4.0]), *quarter)
    tensor([-3., -4.,  1.,  2.])
    """
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cosines, sines)
    return torch.cat([turned.real, turned.imag], dim=-1)


class RotaryEmbedding(rotary.RotaryEmbedding):
    """Turn queries and keys by their positions, so that a score depends on how far the two are apart.

    f(x, m) = R(m) x, so that f(q, m)ᵀ f(k, n) = qᵀ R(n - m) k

    There are no parameters and no greatest length. The frequencies stay in float64 whatever the module is moved to, and
    half precision is turned in float32.

    Args:
        head_dim: Number of features of each head; even.
        base: The wavelengths grow from 2π towards 2π * base.
        pairing: "adjacent": features 2i and 2i + 1 form a pair (the paper; Meta's Llama; GPT-J); "halves": i and
            i + head_dim / 2 do (GPT-NeoX; Llama and its kin in ``transformers``). ``adjacent_to_halves`` converts
            weights.
        scaling: How positions beyond those of the training are read; as all others if not given.
        device: Where the frequencies live.

    Raises:
        ValueError: For a head_dim that is odd or below 2, a base that is not greater than 1, or an unknown pairing.
        TypeError: For a scaling that is not a function.

    In torch.nn: no class; ``torch.view_as_complex`` reads adjacent pairs as complex numbers without a copy.

    Traps:
        Weights serve with the pairing of their training alone: see trap `rotary_pairings`.

    Source: Su et al. 2021, section 3.2.

    >>> rotary = RotaryEmbedding(head_dim=6)
    >>> q, k = torch.randn(2, 1, 6)
    >>> def score(query_position, key_position):
    ...     q_turned = rotary(q, torch.tensor([query_position]))
    ...     return (q_turned @ rotary(k, torch.tensor([key_position])).mT).item()
    >>> abs(score(9, 7) - score(2, 0)) < 1e-4
    True
    """

    def _rotate(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        rotate = rotate_adjacent if self.pairing == "adjacent" else rotate_halves
        return rotate(x, cosines, sines)
