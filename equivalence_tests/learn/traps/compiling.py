"""torch.compile: what it makes of right attention."""

import torch
from torch import Tensor

from equivalence_tests.kernels.rewriting import rewritten
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from scratch import functional

__all__ = ["TRAPS"]


class CompileRewritesAttention(Trap):
    """torch.compile takes permuted keys for transposed ones, and attends to something else."""

    number = 69
    name = "compile_rewrites_attention"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.key",)
    expects = "Compiled code computes what the same code computes without the compiler, to rounding."
    happens = (
        "The output is wrong. This happens with as many tokens as heads; with other lengths the compiler stops with "
        "an error. Code with gradients is rewritten less, and came out right. (The backend used here rewrites as "
        "torch.compile does by default and compiles nothing afterwards, so no C++ compiler is needed.)"
    )
    why = (
        "The compiler looks for query @ key.transpose(-2, -1), scaled and followed by a softmax, and replaces it by "
        "scaled_dot_product_attention. Its pattern accepts any permutation of the key, including this one, which "
        "moves the heads as well."
    )
    places = (Place(functional.attention, "k.transpose"),)
    instead = (
        "Move the heads first, then transpose the last two axes; `sidebyside verify --compile` tries your own code."
    )
    issues = ("pytorch/pytorch#195320", "pytorch/pytorch#195383")
    since = "2.13"
    mended_in = "2.15"

    def wrong(self) -> float:
        query, key, value = (torch.randn(2, 4, 4, 8) for _ in range(3))  # (batch, tokens, heads, features)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1) * 8**-0.5
            return scores.softmax(-1) @ value.transpose(1, 2)

        with torch.no_grad():
            compiled = torch.compile(attend, backend=rewritten)(query, key, value)
            difference = (compiled - attend(query, key, value)).abs().max().item()
        print(f"greatest difference from the code as written: {difference:.1g}")
        return difference

    def right(self) -> float:
        query, key, value = (torch.randn(2, 4, 4, 8) for _ in range(3))  # (batch, tokens, heads, features)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scores = query.transpose(1, 2) @ key.transpose(1, 2).transpose(-2, -1) * 8**-0.5
            return scores.softmax(-1) @ value.transpose(1, 2)

        with torch.no_grad():
            compiled = torch.compile(attend, backend=rewritten)(query, key, value)
            difference = (compiled - attend(query, key, value)).abs().max().item()
        print(f"greatest difference from the code as written: {difference:.1g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 0.1

    def helps(self, right: float) -> bool:
        return right < 1e-5


TRAPS = (CompileRewritesAttention,)
