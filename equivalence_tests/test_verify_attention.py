"""verify on ways to write attention that the zoo does not have: each was read wrongly once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests import verify


class Plain(nn.Module):
    """Right attention in small stages; each case below changes one."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        q, k = self.split(self.q(query)), self.split(self.k(key))
        return (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)

    def mixed(self, weights: Tensor, value: Tensor) -> Tensor:
        return self.out((weights @ self.split(self.v(value))).transpose(1, 2).flatten(2))


class SharedMask(Plain):
    """The mask is (query, key): every sample has the same."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key = self.split(self.q(q)), self.split(self.k(k))
        scores = query @ key.mT / query.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask[None, None] == 0, -1e9)
        return self.mixed(scores.softmax(-1), v)


class MapsOfHeadsFirst(Plain):
    """The maps come back as (heads * batch, query, key)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights(q, k)
        return self.mixed(weights, v), weights.transpose(0, 1).flatten(0, 1)


@pytest.mark.parametrize("right", [SharedMask, MapsOfHeadsFirst])
def test_right_attention_is_not_blamed(right: Callable[..., Any]) -> None:
    report = verify(right)
    assert report.verdict == "equal", str(report)
