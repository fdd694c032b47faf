"""Normalisation by the root mean square alone: LayerNorm without its mean and its bias."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scratch import validation
from scratch.rounding import upcast_half

__all__ = ["RMSNorm", "rms_norm"]


def rms_norm(
    input: Float[Tensor, "..."],  # noqa: A002  torch's name
    normalized_shape: Sequence[int],
    weight: Float[Tensor, "..."] | None = None,
    eps: float | None = None,
) -> Float[Tensor, "..."]:
    """Divide features by their root mean square, and scale each by its gain.

    RMSNorm(x) = x / sqrt(mean(x²) + eps) * weight

    Args:
        input: (..., *normalized_shape).
        normalized_shape: The trailing dimensions over which the mean is taken.
        weight: The gains, of shape ``normalized_shape``; 1 if not given.
        eps: Keeps the root away from 0. The distance from 1 to the next larger number if not given; that of float32
            where the input is float16 or bfloat16.

    Returns:
        The shape and dtype of ``input``. Half precision is computed in float32 and rounded once, at the end.

    Raises:
        ValueError: If ``input`` does not end in ``normalized_shape``, or ``weight`` has another shape (also a
            RuntimeError).
        TypeError: For an input that is not floating (also a RuntimeError).

    In torch.nn: ``F.rms_norm``, followed to the last bit on the CPU. Differences: a ``weight`` of another dtype is
    accepted without a warning.

    Source: Zhang and Sennrich 2019, equation 4;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.rms_norm.html

    >>> rms_norm(torch.tensor([[3.0, -4.0, 0.0, 0.0]]), [4])  # the mean square is 25 / 4
    tensor([[ 1.2000, -1.6000,  0.0000,  0.0000]])
    """
    validation.check_rms_norm(input, normalized_shape, weight)
    (x,) = upcast_half(input)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    mean_square = x.pow(2).mean([-i for i in range(1, len(normalized_shape) + 1)], keepdim=True)
    normalized = x * torch.rsqrt(mean_square + eps)
    return (normalized if weight is None else normalized * weight).to(input.dtype)


class RMSNorm(nn.Module):
    """Divide features by their root mean square, and scale each by a learnt gain.

    RMSNorm(x) = x / sqrt(mean(x²) + eps) * weight

    Args:
        normalized_shape: The trailing dimensions over which the mean is taken; a number stands for one dimension.
        eps: Keeps the root away from 0; the distance from 1 to the next larger number if not given.
        elementwise_affine: Whether there are gains.
        device: Where they live.
        dtype: Their dtype.

    Raises:
        ValueError: For a negative size.
        TypeError: For a size that is not a whole number.

    In torch.nn: ``nn.RMSNorm``.

    Source: Zhang and Sennrich 2019; https://docs.pytorch.org/docs/stable/generated/torch.nn.RMSNorm.html

    >>> norm = RMSNorm(12, elementwise_affine=False)
    >>> norm(torch.randn(2, 5, 12)).pow(2).mean(-1)
    tensor([[1.0000, 1.0000, 1.0000, 1.0000, 1.0000],
            [1.0000, 1.0000, 1.0000, 1.0000, 1.0000]])
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        validation.check_normalized_shape(normalized_shape)
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        gains = torch.ones(self.normalized_shape, device=device, dtype=dtype)
        self.register_parameter("weight", nn.Parameter(gains) if elementwise_affine else None)

    def reset_parameters(self) -> None:
        """Set every gain to 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise.

        Args:
            x: (..., *normalized_shape).

        Returns:
            The shape and dtype of ``x``.

        Raises:
            ValueError: If ``x`` does not end in ``normalized_shape`` (also a RuntimeError).
            TypeError: For an input that is not floating (also a RuntimeError).
        """
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Say how it was built, as torch.nn does."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
