"""Where a token stands: sinusoidal positional encodings."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scratch import validation

__all__ = ["PositionalEncoding", "sinusoidal_encoding"]

Layout = Literal["interleaved", "concatenated"]


def sinusoidal_encoding(
    max_len: int,
    d_model: int,
    layout: Layout = "interleaved",
    *,
    base: float = 10000.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "max_len d_model"]:
    """Tabulate the sines and cosines that tell one position from another.

    PE(pos, 2i) = sin(pos / base^(2i / d_model)); PE(pos, 2i + 1) = cos(pos / base^(2i / d_model))

    Args:
        max_len: Number of positions.
        d_model: Number of features. If it is odd, the last sine has no cosine beside it.
        layout: "interleaved" puts each cosine after its sine, as the formula says; "concatenated" has the same
            columns in another order, all sines before all cosines.
        base: The wavelengths grow from 2π towards 2π * base.
        dtype: The dtype of the table; the default dtype if not given. The values are computed in float64 in any case.
        device: Where the table lives.

    Returns:
        (max_len, d_model).

    Raises:
        ValueError: For a negative max_len, a d_model below 1, an unknown layout or a base that is not positive.

    Source: Vaswani et al. 2017, section 3.5 (interleaved). tensor2tensor, ``get_timing_signal_1d``, concatenates;
    its frequencies, base^(-i / (d_model / 2 - 1)), differ a little from the paper's, which both layouts have here.

    >>> sinusoidal_encoding(3, 4, base=100.0)
    tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
            [ 0.8415,  0.5403,  0.0998,  0.9950],
            [ 0.9093, -0.4161,  0.1987,  0.9801]])
    >>> sinusoidal_encoding(3, 4, "concatenated", base=100.0)
    tensor([[ 0.0000,  0.0000,  1.0000,  1.0000],
            [ 0.8415,  0.0998,  0.5403,  0.9950],
            [ 0.9093,  0.1987, -0.4161,  0.9801]])
    """
    validation.check_positional_encoding(max_len, d_model, layout, base)
    # On the CPU, whose float64 every machine has; the same numbers then reach every device.
    position = torch.arange(max_len, dtype=torch.float64, device="cpu").unsqueeze(1)  # (max_len, 1)
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu") / d_model
    angle = position / base**exponent  # (max_len, d_model / 2, rounded up)
    sine, cosine = angle.sin(), angle.cos()
    if layout == "concatenated":
        table = torch.cat([sine, cosine], dim=1)
    else:
        table = torch.stack([sine, cosine], dim=2).flatten(1)
    return table[:, :d_model].to(torch.empty(0, dtype=dtype, device=device))


class PositionalEncoding(nn.Module):
    """Add to each token the sinusoidal encoding of its position, then apply dropout.

    output = dropout(x + PE(offset ... offset + len - 1))

    The table follows the module to any device and dtype (it is recomputed there, so that a detour through half
    precision costs no accuracy) and is not part of the state_dict.

    Args:
        d_model: Number of features.
        max_len: Number of positions.
        dropout: Probability of dropping in training.
        layout: "interleaved" or "concatenated"; see ``sinusoidal_encoding``.
        device: Where the table lives.
        dtype: Its dtype.

    Raises:
        ValueError: For a negative max_len, a d_model below 1, an unknown layout or an impossible dropout.

    Source: Vaswani et al. 2017, sections 3.5 and 5.4.

    >>> encoding = PositionalEncoding(d_model=12, max_len=10)
    >>> x = torch.randn(2, 5, 12)
    >>> encoding(x).shape
    torch.Size([2, 5, 12])
    >>> torch.equal(encoding(x[:, 3:], offset=3), encoding(x)[:, 3:])
    True
    """

    table: Tensor

    def __init__(
        self,
        d_model: int,
        max_len: int = 5000,
        dropout: float = 0.0,
        layout: Layout = "interleaved",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.max_len = max_len
        self.layout: Layout = layout
        validation.check_dropout("dropout", dropout)
        self.dropout = nn.Dropout(dropout)
        table = sinusoidal_encoding(max_len, d_model, layout, dtype=dtype, device=device)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Add the encodings of position ``offset`` and those that follow.

        Args:
            x: (batch, len, d_model), or (len, d_model) without a batch.
            offset: Position of the first token: the number of those before it, when decoding goes step by step.

        Returns:
            The shape and dtype of ``x``.

        Raises:
            ValueError: If ``x`` has another width, or goes beyond max_len.
        """
        validation.check_positions(x, offset, self.d_model, self.max_len)
        table = self.table[offset : offset + x.size(-2)]  # (len, d_model)
        return self.dropout(x + table.to(x.dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> "PositionalEncoding":
        """Recompute the table after ``.to()``, ``.half()``, ``.to_empty()`` and the like."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.table
        self.table = sinusoidal_encoding(
            self.max_len, self.d_model, self.layout, dtype=moved.dtype, device=moved.device
        )
        return self
