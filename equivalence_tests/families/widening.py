"""A model of ``transformers`` computed in float64 throughout: the truth that ours is held to."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Widened"]


class Widened(TorchFunctionMode):
    """Read every cast to float32 as one to float64, and let numbers without a dtype be float64.

    A model in float64 still softmaxes, normalises and turns positions in float32, by casts in its code: its logits are
    then right to 1e-7 only. Built and called under this mode it is float64 throughout, frequencies included.

    >>> x = torch.tensor(1 / 3, dtype=torch.float64)
    >>> with Widened():
    ...     print(x.float().dtype, x.to(torch.float32).dtype, torch.softmax(x[None], dim=0, dtype=torch.float32).dtype)
    torch.float64 torch.float64 torch.float64
    """

    def __enter__(self) -> Any:
        self._default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default_dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with float64 in place of float32."""
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)
