"""The error types and the plain checks: kinds, dtypes, ranges."""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning, is_tracing

__all__ = [
    "ArgumentTypeError",
    "ArgumentUnsupportedError",
    "ArgumentUnsupportedTypeError",
    "ArgumentValueError",
    "NoTensorError",
    "autocast_dtype",
    "autocast_is_on",
    "check_bool",
    "check_choice",
    "check_dim",
    "check_dropout",
    "check_floating",
    "check_integer",
    "check_known_to_torch",
    "check_mask_dtype",
    "check_function",
    "check_module",
    "check_not_negative",
    "check_number",
    "check_positive",
    "check_positive_number",
    "check_tensor",
    "check_whole",
    "check_width",
    "quiet_while_tracing",
    "shape",
]

P = ParamSpec("P")
T = TypeVar("T")


class ArgumentValueError(ValueError, RuntimeError, AssertionError):
    """An argument has a shape or a value that does not fit."""


class ArgumentUnsupportedError(ArgumentValueError, NotImplementedError):
    """An argument asks for what torch has not implemented."""


class ArgumentTypeError(TypeError, RuntimeError, AssertionError):
    """An argument has a dtype or a kind that does not fit."""


class NoTensorError(ArgumentTypeError, AttributeError):
    """An argument is no tensor; torch.nn's own asks it for an attribute that only tensors have."""


class ArgumentUnsupportedTypeError(ArgumentTypeError, NotImplementedError):
    """An argument has a dtype for which torch has implemented nothing."""


def quiet_while_tracing(check: Callable[P, T]) -> Callable[P, T]:
    """Keep ``torch.jit.trace`` from warning that a check reads sizes, as torch keeps it quiet about its own code."""

    @functools.wraps(check)
    def quietly(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_tracing():
            return check(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TracerWarning)
            return check(*args, **kwargs)

    return quietly


def shape(x: Tensor | Sequence[int]) -> str:
    """Write a shape as a tuple: (2, 3)."""
    return str(tuple(x.shape if isinstance(x, Tensor) else x))


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Require that a value is one of a few."""
    if value not in choices:
        raise ArgumentValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_known_to_torch(function: Callable[..., object], given: Mapping[str, object]) -> None:
    """Require that the installed torch has these arguments: older versions lack some."""
    for name in given.keys() - inspect.signature(function).parameters.keys():
        raise ArgumentUnsupportedError(
            f"{name} must be left at its default: {function.__name__} of torch {torch.__version__} does not have it"
        )


def check_bool(name: str, x: Tensor) -> None:
    """Require a bool tensor."""
    check_tensor(name, x)
    if x.dtype != torch.bool:
        raise ArgumentTypeError(f"{name} must be a bool tensor (True = may look), got {x.dtype}")


def check_integer(name: str, x: Tensor) -> None:
    """Require a tensor of integers."""
    check_tensor(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ArgumentTypeError(f"{name} must hold integers, got {x.dtype}")


def check_dim(name: str, x: Tensor, dim: int) -> None:
    """Require a number of dimensions."""
    if x.dim() != dim:
        raise ArgumentValueError(f"{name} must be {dim}-D, got {x.dim()}-D of shape {shape(x)}")


def check_tensor(name: str, x: object) -> None:
    """Require a tensor."""
    if not isinstance(x, Tensor):
        raise NoTensorError(f"{name} must be a tensor, got {type(x).__name__}")


def check_mask_dtype(name: str, mask: Tensor) -> None:
    """Require a bool or floating mask."""
    check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ArgumentTypeError(
            f"{name} must be bool or floating (only bool and floating types of {name} are supported), "
            f"got {mask.dtype}; turn 0/1 masks into bool with {name}.bool()"
        )


def check_dropout(name: str, probability: float) -> None:
    """Require a probability."""
    if not 0.0 <= probability <= 1.0:
        raise ArgumentValueError(f"dropout probability has to be between 0 and 1, but got {name}={probability}")


def check_whole(**sizes: object) -> None:
    """Require whole numbers."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer | torch.SymInt) and not _is_whole_tensor(size):
            raise ArgumentTypeError(f"{name} must be a whole number, got {size!r}")


def _is_whole_tensor(size: object) -> bool:
    """A size may come as a tensor without dimensions: ``torch.jit.trace`` hands out all sizes so."""
    return isinstance(size, Tensor) and size.dim() == 0 and not (size.is_floating_point() or size.is_complex())


@quiet_while_tracing
def check_not_negative(**sizes: int | None) -> None:
    """Require that sizes which are given are whole numbers and not negative."""
    check_whole(**{name: size for name, size in sizes.items() if size is not None})
    for name, size in sizes.items():
        if size is not None and size < 0:
            raise ArgumentValueError(f"{name} must not be negative, got {size}")


def check_number(**numbers: object) -> None:
    """Require real numbers."""
    for name, number in numbers.items():
        is_scalar = isinstance(number, Tensor) and number.dim() == 0
        if not is_scalar and not isinstance(number, Real | torch.SymFloat | torch.SymInt):
            raise ArgumentTypeError(f"{name} must be a number, got {number!r}")


def check_positive_number(name: str, number: float) -> None:
    """Require a number that a score can be multiplied with, or divided by."""
    check_number(**{name: number})
    if not 0 < number < math.inf:
        raise ArgumentValueError(f"{name} must be greater than 0 and finite, got {number}")


def check_floating(name: str, dtype: torch.dtype) -> None:
    """Require a floating dtype, which has -inf."""
    if not dtype.is_floating_point:
        raise ArgumentTypeError(f"{name} must be a floating dtype, got {dtype}")


def check_positive(**sizes: int) -> None:
    """Require whole numbers of at least 1."""
    check_whole(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentValueError(f"{name} must be greater than 0, got {name}={size}")


def check_function(name: str, x: object) -> None:
    """Require a function."""
    if not callable(x):
        raise ArgumentTypeError(f"{name} must be a function, got {type(x).__name__}")


def check_width(name: str, x: Tensor, size_name: str, size: int) -> None:
    """Require a number of features."""
    check_tensor(name, x)
    if x.dim() == 0 or x.size(-1) != size:
        raise ArgumentValueError(f"{name} must have shape (..., {size_name}) with {size_name} = {size}, got {shape(x)}")


def check_module(name: str, x: object) -> None:
    """Require a module."""
    if not isinstance(x, nn.Module):
        raise ArgumentTypeError(f"{name} must be a torch.nn.Module, got {type(x).__name__}")


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which autocast hands a tensor to torch's own function: its own, without autocast."""
    if not autocast_is_on(x.device) or not x.is_floating_point() or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def autocast_is_on(device: torch.device) -> bool:
    """Return whether operations choose their dtype themselves."""
    # torch.is_autocast_enabled raises for device types that have no autocast, such as meta.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
