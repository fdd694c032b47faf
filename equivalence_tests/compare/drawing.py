"""What ``sidebyside compare`` compares, described: components, and the tensors that they are called with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from equivalence_tests.instruments.inputs import Case, Mask, MaskForm, Normal, Part

__all__ = [
    "BATCH",
    "EMBED_DIM",
    "FF_DIM",
    "HEAD_DIM",
    "KEY_LEN",
    "NUM_HEADS",
    "QUERY_LEN",
    "Component",
    "Drawing",
]

BATCH, NUM_HEADS, QUERY_LEN, KEY_LEN, HEAD_DIM, FF_DIM = 2, 3, 5, 7, 11, 13
EMBED_DIM = NUM_HEADS * HEAD_DIM


@dataclass(frozen=True)
class Component:
    """What is compared.

    Args:
        name: As the table shows it.
        case: What is built and called.
        identical: Whether identity to the last bit is promised, on the CPU.
        backend: The kernel that torch's ``scaled_dot_product_attention`` is held to; None lets torch choose.
        trusted: What torch computes in place of the function of builtin, where that does not run or has no gradient.
        differentiable: Whether gradients are compared.
    """

    name: str
    case: Case
    identical: bool = False
    backend: SDPBackend | None = None
    trusted: Callable[..., Any] | None = None
    differentiable: bool = True


class Drawing:
    """Describe cases and their tensors, each with a seed of its own."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)
        # ReLU's gradient jumps at 0. In low precision hidden units fall on either side of it by rounding alone, and
        # the gradients then say nothing; in float64 they do not.
        self.activation = "relu" if dtype == torch.float64 else "gelu"

    def case(self, class_name: str, built_with: Mapping[str, Any], called_with: Mapping[str, Any]) -> Case:
        """Describe what is built and called."""
        return Case(Part(class_name, built_with), called_with, self.dtype, self.seed())

    def seed(self) -> int:
        """Draw the seed of one tensor."""
        return int(torch.randint(2**31, (), generator=self.generator))

    def normal(self, *shape: int) -> Normal:
        """Describe normal numbers."""
        return Normal(shape, self.seed())

    def holes(self, *shape: int, form: MaskForm = "bool", true_means_hidden: bool = True) -> Mask:
        """Hide about a third of the places, but not the first: under a causal mask it is all that some query sees."""
        hidden = torch.rand(shape, generator=self.generator) < 1 / 3
        hidden[..., 0] = False
        return Mask("arbitrary", shape, tuple(hidden.flatten().tolist()), form, self.seed(), true_means_hidden)

    def causal(self, length: int) -> Mask:
        """Hide later keys."""
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        return Mask("causal", (length, length), tuple(hidden.flatten().tolist()))
