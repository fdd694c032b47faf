"""Leave the global state of Python and torch as it was found, whatever the user's code does to it."""

import contextlib
import io
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["default_dtype", "preserved_global_state"]


@contextlib.contextmanager
def preserved_global_state(quiet: bool = True) -> Iterator[io.StringIO]:
    """Restore seeds, default dtype and device, grad mode, threads and deterministic flags, and keep what is printed.

    Args:
        quiet: Catch what is written to the standard output.

    Returns:
        A context manager that gives the buffer of what was printed.

    >>> with preserved_global_state():
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.get_default_dtype()
    torch.float32
    """
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    dtype, grad, threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    device = torch.get_default_device()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed) if quiet else contextlib.nullcontext():
            warnings.simplefilter("ignore")
            yield printed
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)  # None takes the mode away
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let code that makes tensors without saying their dtype make them in this one.

    >>> with default_dtype(torch.float64):
    ...     torch.zeros(1).dtype
    torch.float64
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
