"""What one call of an attention is given."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Inputs"]


@dataclass(frozen=True)
class Inputs:
    """One call: batch-first tensors, and who may look at whom, (b, q, k) bool, or None for everyone."""

    query: Tensor
    key: Tensor
    value: Tensor
    may_attend: Tensor | None = None

    def changed(self, sample: int | slice | None = None, token: int | None = None) -> "Inputs":
        """Change one sample or token of every tensor, each feature by another amount, keeping equal tensors equal."""
        changed: dict[int, Tensor] = {}
        for x in (self.query, self.key, self.value):
            if id(x) not in changed:
                changed[id(x)] = x.clone()
                part = changed[id(x)][sample] if sample is not None else changed[id(x)][:, token]
                part += torch.linspace(0.5, 1.5, x.size(-1), dtype=x.dtype)  # a LayerNorm would take back a constant
        return Inputs(*(changed[id(x)] for x in (self.query, self.key, self.value)))
