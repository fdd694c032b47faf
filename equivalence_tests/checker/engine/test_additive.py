"""Attention whose scores are sums is no attention of torch's, and no mistake."""

import torch
from torch import Tensor, nn

from equivalence_tests.checker.verify import verify


class GraphAttention(nn.Module):
    """Right: each score is a number of the one node plus a number of the other."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.W = nn.Linear(in_features, out_features, bias=False)
        self.a1, self.a2 = (nn.Parameter(torch.randn(out_features, 1)) for _ in range(2))

    def forward(self, h: Tensor, adj: Tensor) -> Tensor:
        wh = self.W(h)
        e = nn.functional.leaky_relu(wh @ self.a1 + (wh @ self.a2).T)
        weights = torch.where(adj > 0, e, -9e15).softmax(dim=1)
        return nn.functional.elu(weights @ wh)


class BiasedAttention(nn.Module):
    """Right: what is added to the scores changes nothing about their being products."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor, attn_bias: Tensor | None = None) -> Tensor:
        scores = self.q(x) @ self.k(x).mT / x.size(-1) ** 0.5
        scores = scores if attn_bias is None else scores + attn_bias
        return scores.softmax(-1) @ self.v(x)


def test_scores_that_are_sums_are_named_with_their_line() -> None:
    report = verify(GraphAttention)
    assert report.verdict == "unchecked", str(report)
    assert "It is additive attention: line" in report.reason


def test_a_bias_makes_no_additive_attention() -> None:
    assert verify(BiasedAttention).verdict == "equal"
