"""Draw what a function of tokens may take, ids, vectors, sizes and masks, and call it with them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equivalence_tests.checker.reach.arguments import Sizes, value_for

OF_BOOLS = " of bools"
# What is no tensor, by what it is.
KINDS = dict.fromkeys(("pad_id", "size", "key_size", "samples", "heads", "window", "prefix", "width"), "int")
KINDS |= {"shape": "tuple[int, int]", "device": "str", "dtype": "torch.dtype"}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "(batch, len)": lambda ids: ids,
    "(len, batch)": lambda ids: ids.T,
    "(len,)": lambda ids: ids[0],
    "(batch, 1, len)": lambda ids: ids[:, None],
    "(batch, 1, 1, len)": lambda ids: ids[:, None, None],
}


@dataclass(frozen=True, eq=False)
class Drawn:
    """What one call is about."""

    first: Tensor  # token ids (b, n)
    second: Tensor  # token ids (b, m) of another sequence
    lengths: Tensor  # (b,), at most n
    pad_id: int
    window: int = 5  # how far a window reaches, or a prefix
    width: int = 13  # number of features of the vectors

    def value(self, role: str, layout: str) -> Any:
        """Give what a role asks for, in new memory; "=base" asks for what an argument called base usually is."""
        if role.startswith("="):
            return value_for(role[1:], Sizes())[1]
        (batch, length), keep = self.first.shape, self.first != self.pad_id
        ids = {"ids": self.first, "key_ids": self.second, "keep": keep if layout.endswith(OF_BOOLS) else keep.long()}
        if role in ids:
            return LAYOUTS[layout.removesuffix(OF_BOOLS)](ids[role]).clone()
        if role == "vectors":
            return torch.randn(batch, length, self.width, generator=torch.Generator().manual_seed(length))
        positions = torch.arange(length)
        others: dict[str, Any] = {"size": length, "key_size": self.second.size(1), "samples": batch, "heads": 2}
        others |= {"window": self.window, "prefix": self.window}
        others |= {"pad_id": self.pad_id, "lengths": self.lengths, "shape": (batch, length), "width": self.width}
        others |= {"positions": positions, "positions of each sample": positions.expand(batch, -1), "padding": ~keep}
        return (others | {"device": "cpu", "dtype": torch.float32})[role]


@dataclass(frozen=True)
class CallOfRoles:
    """A way to call a function: the role of each parameter, "" for a name that is not needed, and the layout of ids."""

    roles: tuple[tuple[str, str], ...]
    layout: str = "(batch, len)"

    def call(self, function: Callable[..., Any], drawn: Drawn) -> list[Tensor]:
        """Call it and list the tensors that come back."""
        values = [(name, drawn.value(role, self.layout)) for name, role in self.roles]
        returned = function(*(x for name, x in values if not name), **{name: x for name, x in values if name})
        several = returned if isinstance(returned, tuple | list) else (returned,)
        tensors = (torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in several)
        return [x for x in tensors if isinstance(x, Tensor) and x.dim() >= 1]

    def named(self, role: str) -> str:
        """Name the parameter that has a role; "" if none has."""
        return next((name for name, given in self.roles if given == role), "")
