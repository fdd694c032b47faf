"""Linear attention and pooling have no twin in torch.nn: that is said."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify


class LinearAttention(nn.Module):
    """Keys meet values first, and the queries their sums."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.elu(self.query(x)) + 1, F.elu(self.key(x)) + 1

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.features(x)
        sums = torch.einsum("bnd,bne->bde", k, self.value(x))
        return torch.einsum("bnd,bde->bne", q, sums) / (q @ k.sum(1)[..., None])


class CausalLinearAttention(LinearAttention):
    """The sums run on."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.features(x)
        sums = (k[..., None] * self.value(x)[..., None, :]).cumsum(1)
        return (q[..., None, :] @ sums)[..., 0, :] / (q * k.cumsum(1)).sum(-1, keepdim=True)


class AttentionPooling(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).softmax(1) * x).sum(1)


@pytest.mark.parametrize(
    ("right", "said"),
    [
        (LinearAttention, "no weights that sum to one over the tokens are made from that"),
        (CausalLinearAttention, "no weights that sum to one over the tokens are made from that"),
        (AttentionPooling, "no output of the query's length came back"),
    ],
)
def test_what_has_no_twin_is_said_to_have_none(right: type[nn.Module], said: str) -> None:
    report = verify(right)
    assert report.verdict == "unchecked", str(report)
    assert said in report.reason


class WithABackwardToCome(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context.save_for_backward(q, k, v)
        return (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError


def test_a_function_with_a_backward_of_its_own_is_applied() -> None:
    report = verify(WithABackwardToCome)
    assert (report.verdict, report.mistakes) == ("unchecked", ()), str(report)
    assert "it cannot be called with gradients (NotImplementedError" in report.reason
