"""What can go wrong before there is a verdict, and what the code said to it."""

import re
from bdb import BdbQuit

# What torch says where there is no GPU, and where tensors of the code lie on one: those that it is given do not.
ASKED_FOR = re.compile(
    r"not compiled with (CUDA|XPU)|no NVIDIA driver|No CUDA GPUs|support for mps|'MPS' backend|"
    r"on the same device.*(cuda|mps|xpu)"
)


class CannotCheckError(Exception):
    """The code could not be read, built or called; the message says what is missing and how to give it."""


def said(error: BaseException) -> str:
    """Give the first line of what an exception says, with its type.

    >>> said(ValueError("no heads"))
    'ValueError: no heads'
    """
    if isinstance(error, BdbQuit):
        return "BdbQuit: it starts a debugger, which nobody can answer here"
    if wanted := re.search(r"tried to allocate (\d+) bytes", str(error)):
        return f"{type(error).__name__}: can't allocate memory: {int(wanted[1]) / 2**30:,.1f} GiB (--memory)"
    if ASKED_FOR.search(str(error)):
        return "it needs a GPU; take the device from the input, as in x.device"
    if re.search(r"\bHalf without overflow", str(error)):
        return "RuntimeError: too large for float16; use torch.finfo(x.dtype).min or -inf for hidden scores"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
