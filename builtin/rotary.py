"""Rotary position embeddings on torch's complex numbers: to rotate a pair is to multiply it by e^(i angle)."""

import torch
from jaxtyping import Float
from torch import Tensor

from scratch import rotary
from scratch.documentation import documented_like
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


@documented_like(rotary.rotate_adjacent)
def rotate_adjacent(
    x: Float[Tensor, "... head_dim"], cosines: Float[Tensor, "... pairs"], sines: Float[Tensor, "... pairs"]
) -> Float[Tensor, "... head_dim"]:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cosines, sines)).flatten(-2)


@documented_like(rotary.rotate_halves)
def rotate_halves(
    x: Float[Tensor, "... head_dim"], cosines: Float[Tensor, "... pairs"], sines: Float[Tensor, "... pairs"]
) -> Float[Tensor, "... head_dim"]:
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cosines, sines)
    return torch.cat([turned.real, turned.imag], dim=-1)


@documented_like(rotary.RotaryEmbedding)
class RotaryEmbedding(rotary.RotaryEmbedding):
    """In torch.nn: no class; ``torch.view_as_complex`` reads adjacent pairs as complex numbers without a copy.

    Traps:
        Weights work only with the pairing that they were trained with: see trap `rotary_pairings`.
    """

    def _rotate(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        rotate = rotate_adjacent if self.pairing == "adjacent" else rotate_halves
        return rotate(x, cosines, sines)
