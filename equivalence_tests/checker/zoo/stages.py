"""Right attentions in small stages, for the tests: each replaces the stage that it is about."""

import math

from torch import Tensor, nn
from torch.nn import functional as F

Operands = tuple[Tensor, Tensor, Tensor]


class Attention(nn.Module):
    """Heads, the formula and the output projection; the classes below have the matrices."""

    out: nn.Linear

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def split(self, x: Tensor) -> Tensor:
        """Give each head its features."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare queries and keys."""
        return q @ k.mT / math.sqrt(q.size(-1))

    def weigh(self, scores: Tensor) -> Tensor:
        """Turn the scores into weights."""
        return scores.softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Average the values."""
        return self.weigh(self.scores(q, k)) @ v

    def merge(self, context: Tensor) -> Tensor:
        """Put the features of the heads side by side."""
        return context.transpose(1, 2).flatten(2)

    def finish(self, context: Tensor) -> Tensor:
        """Merge the heads and project."""
        return self.out(self.merge(context))


class ThreeMatrices(Attention):
    """A matrix each for queries, keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(heads)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> Operands:
        """Project each and split it."""
        return self.split(self.q(query)), self.split(self.k(key)), self.split(self.v(value))

    def operands(self, x: Tensor) -> Operands:
        """Make queries, keys and values of the same tokens."""
        return self.projected(x, x, x)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Go from the tokens to the output."""
        return self.finish(self.attend(*self.projected(query, key, value)))


class SelfAttention(ThreeMatrices):
    """A sequence attends to itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        return self.finish(self.attend(*self.operands(x)))


class OneMatrix(Attention):
    """The same with one matrix for queries, keys and values, and torch's own function."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(heads)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def operands(self, x: Tensor) -> Operands:
        """Make queries, keys and values of the tokens."""
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Average the values."""
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        return self.finish(self.attend(*self.operands(x)))
