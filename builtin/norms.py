"""Normalisation by the root mean square as torch has it, behind the checks that both packages share."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import rms_norm as torchs_rms_norm  # as it is now, whatever takes its place

from scratch import norms as by_hand
from scratch import validation
from scratch.documentation import documented_like

__all__ = ["RMSNorm", "rms_norm"]


@documented_like(by_hand.rms_norm)
def rms_norm(
    input: Float[Tensor, "..."],  # noqa: A002  torch's name
    normalized_shape: Sequence[int],
    weight: Float[Tensor, "..."] | None = None,
    eps: float | None = None,
) -> Float[Tensor, "..."]:
    """In torch.nn: ``F.rms_norm``, called as it is. It warns about a ``weight`` of another dtype."""
    validation.check_rms_norm(input, normalized_shape, weight)
    return torchs_rms_norm(input, list(normalized_shape), weight, eps)


@documented_like(by_hand.RMSNorm)
class RMSNorm(nn.RMSNorm):
    """In torch.nn: ``nn.RMSNorm``, of which this is a subclass."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        validation.check_normalized_shape(normalized_shape)
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """In torch.nn: ``nn.RMSNorm.forward``, called as it is."""
        validation.check_rms_norm(x, self.normalized_shape, self.weight)
        return super().forward(x)
