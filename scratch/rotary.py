"""Rotary position embeddings: queries and keys are rotated by an angle that grows with their position.

The features of a head form pairs, and each pair is rotated by its own angle times the position. A score then depends on
how far query and key are apart, not on where they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from scratch import validation
from scratch.rounding import upcast_half

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

Pairing = Literal["adjacent", "halves"]


# From head_dim and base to the frequencies, (head_dim / 2), and the factor on rotated queries and keys.
RotaryScaling = Callable[[int, float], tuple[Tensor, float]]


def rotary_frequencies(head_dim: int, base: float = 10000.0) -> Float[Tensor, " pairs"]:
    """Say by which angle each pair of features rotates from one position to the next.

    θ_i = base^(-2i / head_dim)

    Args:
        head_dim: Number of features; even.
        base: The wavelengths grow from 2π towards 2π * base.

    Returns:
        (head_dim / 2), in float64 and on the CPU, whose float64 every machine has.

    Raises:
        ValueError: For a head_dim that is odd or below 2, or a base that is not greater than 1.

    Source: Su et al. 2021, section 3.2.2, equation 15.

    >>> rotary_frequencies(6, base=1000.0)
    tensor([1.0000, 0.1000, 0.0100], dtype=torch.float64)
    """
    validation.check_rotary_sizes(head_dim, base)
    return 1 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)


@dataclass(frozen=True)
class LinearScaling:
    """Squeeze all positions into those of the training.

    θ'_i = θ_i / factor

    Args:
        factor: How many times longer texts may be than in training.

    Raises:
        ValueError: For a factor below 1.

    Source: Chen et al. 2023, section 2.3.

    >>> LinearScaling(4.0)(6, base=1000.0)
    (tensor([0.2500, 0.0250, 0.0025], dtype=torch.float64), 1.0)
    """

    factor: float

    def __post_init__(self) -> None:
        validation.check_rotary_factor(self.factor)

    def __call__(self, head_dim: int, base: float) -> tuple[Tensor, float]:
        """Return the frequencies and a factor of 1."""
        return rotary_frequencies(head_dim, base) / self.factor, 1.0


@dataclass(frozen=True)
class NTKScaling:
    """Squeeze the slowest pair by the whole factor, the fastest not at all, and the others in between.

    base' = base * factor^(head_dim / (head_dim - 2))

    Args:
        factor: How many times longer texts may be than in training.

    Raises:
        ValueError: For a factor below 1.

    Source: "NTK-aware scaled RoPE" by the author bloc97, 2023; Peng et al. 2023, section 3.1, equation 16.

    >>> NTKScaling(4.0)(6, base=1000.0)
    (tensor([1.0000, 0.0500, 0.0025], dtype=torch.float64), 1.0)
    """

    factor: float

    def __post_init__(self) -> None:
        validation.check_rotary_factor(self.factor)

    def __call__(self, head_dim: int, base: float) -> tuple[Tensor, float]:
        """Return the frequencies and a factor of 1; a head of one pair, which is the fastest, stays as it is."""
        exponent = head_dim / (head_dim - 2) if head_dim != 2 else 1.0
        return rotary_frequencies(head_dim, base * self.factor**exponent), 1.0


@dataclass(frozen=True)
class YaRNScaling:
    """Squeeze the slow pairs, leave the fast ones, blend in between, and sharpen attention.

    θ'_i = γ_i θ_i / factor + (1 - γ_i) θ_i with γ_i = clamp((i - fast) / (slow - fast), 0, 1)

    Pair ``fast`` rotates ``beta_fast`` times within ``original_max_len``, pair ``slow`` rotates ``beta_slow`` times.
    Rotated queries and keys are multiplied by 0.1 ln(factor) + 1.

    Args:
        factor: How many times longer texts may be than in training.
        original_max_len: Length of the texts in training.
        beta_fast: Pairs that rotate more often than this stay as they are.
        beta_slow: Pairs that rotate less often than this are squeezed by the whole factor.
        truncate: Round the two bounds to whole pairs, away from each other.
        attention_factor: Multiplies rotated queries and keys; by the formula if not given.

    Raises:
        ValueError: For a factor below 1, an original_max_len or attention_factor that is not positive, or a beta_slow
            that is not between 0 and beta_fast.

    Source: Peng et al. 2023, sections 3.2 to 3.4. There γ is linear in the number of turns. Here it is linear in the
    index of the pair, as in the authors' code and in the models that were trained with it.

    >>> YaRNScaling(4.0, original_max_len=128)(8, base=10000.0)
    (tensor([1.0000e+00, 6.2500e-02, 2.5000e-03, 2.5000e-04], dtype=torch.float64), 1.1386...)
    """

    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        validation.check_yarn(self)

    def __call__(self, head_dim: int, base: float) -> tuple[Tensor, float]:
        """Return the frequencies and the factor that sharpens attention."""
        frequencies = rotary_frequencies(head_dim, base)
        fast, slow = (self._pair_that_turns(times, head_dim, base) for times in (self.beta_fast, self.beta_slow))
        if self.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, head_dim - 1)
        pair = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
        squeezed = ((pair - fast) / max(slow - fast, 0.001)).clamp(0, 1)  # γ
        sharpened = 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor
        return squeezed * frequencies / self.factor + (1 - squeezed) * frequencies, sharpened

    def _pair_that_turns(self, times: float, head_dim: int, base: float) -> float:
        """Solve original_max_len * base^(-2i / head_dim) = 2π * times for i."""
        return head_dim * math.log(self.original_max_len / (2 * math.pi * times)) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3Scaling:
    """Squeeze the pairs of long wavelength, leave those of short, and blend in between.

    θ'_i = (1 - σ_i) θ_i / factor + σ_i θ_i with
    σ_i = clamp((original_max_len θ_i / 2π - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)

    Args:
        factor: How many times longer texts may be than in training.
        original_max_len: Length of the texts in training.
        low_freq_factor: Pairs that rotate less often than this within that length are squeezed by the whole factor.
        high_freq_factor: Pairs that rotate more often than this stay as they are.

    Raises:
        ValueError: For a factor below 1, an original_max_len that is not positive, or a low_freq_factor that is not
            between 0 and high_freq_factor.

    Source: the code of Llama 3.1, https://github.com/meta-llama/llama-models, ``apply_scaling``.

    >>> Llama3Scaling(8.0, original_max_len=64)(6, base=1000.0)
    (tensor([1.0000, 0.0130, 0.0013], dtype=torch.float64), 1.0)
    """

    factor: float
    original_max_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        validation.check_llama3(self)

    def __call__(self, head_dim: int, base: float) -> tuple[Tensor, float]:
        """Return the frequencies and a factor of 1."""
        frequencies = rotary_frequencies(head_dim, base)
        turns = self.original_max_len * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)  # σ
        return (1 - kept) * frequencies / self.factor + kept * frequencies, 1.0


def rotary_angles(
    positions: Int[Tensor, "*shape"], frequencies: Float[Tensor, " pairs"]
) -> Float[Tensor, "*shape pairs"]:
    """Say how far each pair is rotated at each position.

    angle[m, i] = m θ_i

    Args:
        positions: Whole numbers.
        frequencies: θ_i, by ``rotary_frequencies`` or a scaling.

    Returns:
        One angle for each pair, in the dtype of ``frequencies``.

    Source: Su et al. 2021, section 3.2.2, equation 15.

    >>> rotary_angles(torch.arange(3), rotary_frequencies(4, base=100.0))
    tensor([[0.0000, 0.0000],
            [1.0000, 0.1000],
            [2.0000, 0.2000]], dtype=torch.float64)
    """
    return positions.to(frequencies.dtype).unsqueeze(-1) * frequencies


def rotate_adjacent(
    x: Float[Tensor, "... head_dim"], cosines: Float[Tensor, "... pairs"], sines: Float[Tensor, "... pairs"]
) -> Float[Tensor, "... head_dim"]:
    """Rotate pairs of features that are next to each other.

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
    first, second = x[..., 0::2], x[..., 1::2]
    turned = first * cosines - second * sines, first * sines + second * cosines
    return torch.stack(turned, dim=-1).flatten(-2)


def rotate_halves(
    x: Float[Tensor, "... head_dim"], cosines: Float[Tensor, "... pairs"], sines: Float[Tensor, "... pairs"]
) -> Float[Tensor, "... head_dim"]:
    """Rotate pairs of features of which one is in the first half and the other in the second.

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
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


def adjacent_to_halves(weight: Shaped[Tensor, "width ..."], head_dim: int) -> Shaped[Tensor, "width ..."]:
    """Reorder a projection that was trained with adjacent pairs, so that it serves with halves.

    Features 0, 1, 2, 3, ... of each head go to 0, d/2, 1, d/2 + 1, ... Done to queries and keys alike it leaves their
    products, and so the scores, as they are. Values are not rotated, and stay.

    Args:
        weight: The weight or the bias of a projection of queries or of keys, (num_heads * head_dim, ...), or the gains
            of a norm of them, (head_dim).
        head_dim: Number of features of each head.

    Returns:
        The same shape.

    Raises:
        ValueError: If head_dim is odd, or does not divide the first dimension of ``weight``.

    >>> adjacent_to_halves(torch.arange(8), head_dim=4)
    tensor([0, 2, 1, 3, 4, 6, 5, 7])
    """
    validation.check_pairing_conversion(weight, head_dim)
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def halves_to_adjacent(weight: Shaped[Tensor, "width ..."], head_dim: int) -> Shaped[Tensor, "width ..."]:
    """Reorder a projection that was trained with halves, so that it serves with adjacent pairs.

    The inverse of ``adjacent_to_halves``.

    Args:
        weight: The weight or the bias of a projection of queries or of keys, (num_heads * head_dim, ...), or the gains
            of a norm of them, (head_dim).
        head_dim: Number of features of each head.

    Returns:
        The same shape.

    Raises:
        ValueError: If head_dim is odd, or does not divide the first dimension of ``weight``.

    >>> halves_to_adjacent(torch.arange(8), head_dim=4)
    tensor([0, 2, 1, 3, 4, 6, 5, 7])
    >>> halves_to_adjacent(adjacent_to_halves(torch.arange(6), head_dim=6), head_dim=6)
    tensor([0, 1, 2, 3, 4, 5])
    """
    validation.check_pairing_conversion(weight, head_dim)
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


class RotaryEmbedding(nn.Module):
    """Rotate queries and keys by their positions, so that a score depends on how far the two are apart.

    f(x, m) = R(m) x, so that f(q, m)ᵀ f(k, n) = qᵀ R(n - m) k

    There are no parameters and no greatest length. The frequencies stay in float64 whatever the module is moved to, and
    half precision is rotated in float32.

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

    Source: Su et al. 2021, section 3.2.

    >>> rotary = RotaryEmbedding(head_dim=6)
    >>> q, k = torch.randn(2, 1, 6)
    >>> def score(query_position, key_position):
    ...     q_turned = rotary(q, torch.tensor([query_position]))
    ...     return (q_turned @ rotary(k, torch.tensor([key_position])).mT).item()
    >>> abs(score(9, 7) - score(2, 0)) < 1e-4
    True
    """

    frequencies: Tensor

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        pairing: Pairing = "adjacent",
        scaling: RotaryScaling | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        validation.check_rotary_sizes(head_dim, base)
        validation.check_choice("pairing", pairing, ("adjacent", "halves"))
        if scaling is not None:
            validation.check_function("scaling", scaling)
        super().__init__()
        self.head_dim, self.base, self.pairing, self.scaling = head_dim, base, pairing, scaling
        frequencies, self.attention_factor = self._frequencies()
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def _frequencies(self) -> tuple[Tensor, float]:
        if self.scaling is None:
            return rotary_frequencies(self.head_dim, self.base), 1.0
        return self.scaling(self.head_dim, self.base)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate the features of each token by its position.

        Args:
            x: (..., len, head_dim): queries or keys.
            positions: Whole numbers, broadcastable to (..., len); 0, 1, 2, ... if not given.

        Returns:
            The shape and dtype of ``x``.

        Raises:
            ValueError: If ``x`` has another width, or the positions another shape.
            TypeError: For positions that are not whole numbers.
        """
        validation.check_rotary_inputs(x, positions, self.head_dim)
        if positions is None:
            positions = torch.arange(x.size(-2), device=x.device)
        angles = rotary_angles(positions, self.frequencies)  # (..., l, d / 2)
        (turned,) = upcast_half(x)
        cosines, sines = (self.attention_factor * y.to(turned.dtype) for y in (angles.cos(), angles.sin()))
        return self._rotate(turned, cosines, sines).to(x.dtype)

    def _rotate(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        rotate = rotate_adjacent if self.pairing == "adjacent" else rotate_halves
        return rotate(x, cosines, sines)

    def extra_repr(self) -> str:
        """Say how it was built.

        Returns:
            What stands between the parentheses when the module is printed.
        """
        return f"{self.head_dim}, base={self.base}, pairing={self.pairing!r}, scaling={self.scaling}"

    def _apply(self, fn: Any, recurse: bool = True) -> "RotaryEmbedding":
        """Follow ``.to()``, ``.half()``, ``.to_empty()`` and the like to another device, but not to another dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = self._frequencies()[0].to(self.frequencies.device)
        return self
