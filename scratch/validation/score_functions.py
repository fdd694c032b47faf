"""What score and mask functions are made from."""

from torch import Tensor

from scratch.validation.basics import (
    ArgumentTypeError,
    ArgumentValueError,
    check_dim,
    check_integer,
    check_not_negative,
    check_positive_number,
    check_tensor,
    shape,
)

__all__ = [
    "check_cap",
    "check_document_ids",
    "check_prefix_len",
    "check_relative_bias",
    "check_sinks",
    "check_slopes",
]


def check_document_ids(document_ids: Tensor) -> None:
    """Require a whole number for each token."""
    check_integer("document_ids", document_ids)
    if document_ids.dim() not in (1, 2):
        raise ArgumentValueError(
            f"document_ids must have shape (len) or (batch, len), got {document_ids.dim()}-D of shape "
            f"{shape(document_ids)}"
        )


def check_prefix_len(prefix_len: int | Tensor) -> None:
    """Require one length, or one for each sample."""
    if isinstance(prefix_len, Tensor):
        check_integer("prefix_len", prefix_len)
        check_dim("prefix_len", prefix_len, 1)
    else:
        check_not_negative(prefix_len=prefix_len)


def check_slopes(slopes: Tensor) -> None:
    """Require a floating number for each head."""
    _check_floating_tensor("slopes", slopes)
    check_dim("slopes", slopes, 1)


def check_cap(cap: float) -> None:
    """Require a finite bound above 0."""
    check_positive_number("cap", cap)


def check_relative_bias(table: Tensor) -> None:
    """Require a floating number for each head and each distance, on both sides of 0."""
    _check_floating_tensor("table", table)
    check_dim("table", table, 2)
    if table.size(1) % 2 == 0:
        raise ArgumentValueError(
            f"table must have 2 * m + 1 columns, one for each distance from -m to m, got shape {shape(table)}"
        )


def check_sinks(context: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Require that each query of each head has its sum of scores, and each head its sink."""
    for name, x in (("context", context), ("lse", lse), ("sinks", sinks)):
        _check_floating_tensor(name, x)
    if lse.shape != context.shape[:-1]:
        raise ArgumentValueError(
            f"lse must have the shape of context without its last axis, {shape(context.shape[:-1])}, got {shape(lse)}"
        )
    if sinks.dim() != 1 or sinks.shape != lse.shape[-2:-1]:
        raise ArgumentValueError(
            f"sinks must have one number for each head, as lse has them in front of the queries in {shape(lse)}, got "
            f"shape {shape(sinks)}"
        )


def _check_floating_tensor(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if not x.is_floating_point():
        raise ArgumentTypeError(f"{name} must be floating, got {x.dtype}")
