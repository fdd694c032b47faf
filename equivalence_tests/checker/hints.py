"""See what an attention does that no known reading has: rotated positions, a table of biases, tanh for a product.

What is seen ends a search early that could find nothing, and is said in the report. No verdict rests on it.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["NORMALISED", "ROTATED", "seen_inside"]

ROTATED = "positions are rotated inside (rotary)"
NAMES = (
    (r"rotary|\brope|inv_freq|\b(cos|sin)_?(cached|table|emb)?$|freqs_c", ROTATED),
    (r"rel(ative)?_?(pos|att|bias|emb|key|value|[hw]$)|bias_table|pos(ition)?_?bias", "a table of positions or biases"),
    (r"alibi|slopes?$", "a bias that grows with the distance (ALiBi)"),
)
NORMALISED = "norms without weights"
CALLS = (
    (("rms_norm",), NORMALISED),
    (("cos", "sin", "polar", "view_as_complex"), ROTATED),
    (("tanh",), "tanh, as additive attention has it"),
    (("conv1d", "conv2d", "conv3d"), "a convolution"),
    (("fft", "rfft", "fft_fft"), "a Fourier transform"),
    (("topk", "cumsum"), "topk or cumsum, as sparse or linear attention has it"),
)


class _Watch(TorchFunctionMode):
    """Notes the names of all functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if not (name.startswith("conv") and set(args[1].shape[2:]) == {1}):  # that is a projection
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def seen_inside(function: Any, call: Callable[[], Any]) -> list[str]:
    """List what takes part in a call that no known reading has.

    Args:
        function: The module or function.
        call: Calls it.

    Returns:
        In words; empty for plain attention.
    """
    with contextlib.suppress(Exception), torch.no_grad(), _Watch() as watch:
        call()
    found = [words for names, words in CALLS if watch.names & set(names)]
    if isinstance(function, nn.Module):
        kept = [*(n for n, _ in function.named_parameters()), *(n for n, _ in function.named_buffers())]
        kept += [path for path, _ in function.named_modules()]
        found += [words for pattern, words in NAMES if any(re.search(pattern, name.lower()) for name in kept)]
    return list(dict.fromkeys(found))
