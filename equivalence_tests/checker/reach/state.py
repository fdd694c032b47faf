"""Leave the global state of Python and torch as it was found, whatever the user's code does to it."""

import contextlib
import io
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._tensor_str import PRINT_OPTS
from torch.backends import mha

__all__ = ["default_dtype", "preserved_global_state"]


def _set_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


# How each setting is looked up, and put back.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, _set_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    (np.geterr, lambda errors: np.seterr(**errors)),
    (lambda: vars(PRINT_OPTS).copy(), lambda options: torch.set_printoptions(**options)),
    (np.get_printoptions, lambda options: np.set_printoptions(**options)),
    (os.environ.copy, _set_environment),
    (sys.path.copy, lambda folders: setattr(sys, "path", folders)),
    (os.getcwd, os.chdir),
)


@contextlib.contextmanager
def preserved_global_state(quiet: bool = True) -> Iterator[io.StringIO]:
    """Restore seeds, default dtype and device and all of ``SETTINGS``, and keep what is printed.

    Args:
        quiet: Catch what is written to the standard output.

    Returns:
        A context manager that gives the buffer of what was printed.

    >>> with preserved_global_state():
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.get_default_dtype()
    torch.float32
    """
    device = torch.get_default_device()
    before = [(put_back, look()) for look, put_back in SETTINGS]
    printed = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if quiet:
                stack.enter_context(contextlib.redirect_stdout(printed))
            if device.type != "cpu":  # what is checked here is checked on the CPU
                stack.enter_context(torch.device("cpu"))
            yield printed
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)  # None takes the mode away
        for put_back, value in before:
            put_back(value)


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
