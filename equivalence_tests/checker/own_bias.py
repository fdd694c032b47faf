"""Read the bias that an attention adds to its scores by itself: by distance (ALiBi), from a table (T5, BERT-like), ...

Where all tokens are alike, all keys match a query alike, and what is left of the scores is the bias. It depends on
nothing but the positions, so it is taken as it is and the rest compared with torch.nn's.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from equivalence_tests.checker.calling import Caller, CallPlan
from equivalence_tests.checker.reference import Inputs

__all__ = ["OwnBias", "is_graded", "own_bias"]

OwnBias = Callable[[int, int], Tensor]
LEAST_FINITE = -1e3  # what is below hides a key


class _ScoreWatch(TorchFunctionMode):
    """Keeps the scores that go into the last softmax, or the mask that the fused kernel adds."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("softmax", "_softmax", "_safe_softmax"):
            self.scores = args[0] if args else kwargs["input"]
        elif name == "scaled_dot_product_attention":
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            self.scores = mask if mask is None or mask.is_floating_point() else None
        return func(*args, **kwargs)


def own_bias(caller: Caller, plan: CallPlan, embed_dim: int) -> OwnBias:
    """Give what reads the bias, (h or 1, q, k), for given lengths, 0 at the key that each query likes best.

    Args:
        caller: Holds the code.
        plan: How it is called.
        embed_dim: Width of the tokens.
    """

    def bias(query_len: int, key_len: int) -> Tensor:
        query = torch.zeros(1, query_len, embed_dim, dtype=caller.dtype)
        key = query if plan.self_attention else query.new_zeros(1, key_len, embed_dim)
        with torch.no_grad(), _ScoreWatch() as watch:
            caller.returned(plan, Inputs(query, key, key))
        scores = query.new_zeros(query_len, key_len) if watch.scores is None else watch.scores
        if scores.shape[-2:] != (query_len, key_len):
            raise RuntimeError(f"scores of {tuple(scores.shape)} are not of ({query_len}, {key_len})")
        scores = scores.double().reshape(-1, query_len, key_len)
        return (scores - scores.amax(-1, keepdim=True)).masked_fill(scores < LEAST_FINITE, -math.inf)

    return bias


def is_graded(bias: Tensor) -> bool:
    """Whether a bias does more than to hide keys.

    >>> is_graded(torch.tensor([[0.0, -math.inf], [0.0, 0.0]])), is_graded(torch.tensor([[0.0, -0.5], [-0.5, 0.0]]))
    (False, True)
    """
    seen = bias[bias.isfinite()]
    return bool((seen.abs() > 1e-6).any())
