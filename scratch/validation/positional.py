"""What positional encodings are given."""

from torch import Tensor

from scratch.validation.basics import (
    ArgumentValueError,
    check_choice,
    check_not_negative,
    check_positive,
    check_tensor,
    quiet_while_tracing,
    shape,
)

__all__ = [
    "check_positional_encoding",
    "check_positions",
]


def check_positional_encoding(max_len: int, d_model: int, layout: str, base: float) -> None:
    """Check what a table of positional encodings is built with."""
    check_not_negative(max_len=max_len)
    check_positive(d_model=d_model)
    check_choice("layout", layout, ("interleaved", "concatenated"))
    if not base > 0:
        raise ArgumentValueError(f"base must be greater than 0, got {base}")


@quiet_while_tracing
def check_positions(x: Tensor, offset: int, d_model: int, max_len: int) -> None:
    """Require that tokens have the width and lie within the positions of the table."""
    check_tensor("x", x)
    if x.dim() not in (2, 3) or x.size(-1) != d_model:
        raise ArgumentValueError(
            f"x must have shape (batch, len, d_model) or (len, d_model) with d_model = {d_model}, got shape {shape(x)}"
        )
    check_not_negative(offset=offset)
    if offset + x.size(-2) > max_len:
        raise ArgumentValueError(
            f"x must end within max_len = {max_len} positions, got {x.size(-2)} tokens from position {offset} on; "
            f"build the model with a greater max_len"
        )
