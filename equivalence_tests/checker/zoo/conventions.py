"""Right implementations in many conventions. They share one chain of small stages, so that a defect breaks one stage.

Inside, tensors are (batch, heads, len, head_dim); the classes differ in how they are built, called and laid out.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CONVENTIONS", "Stages"]


class Stages(nn.Module):
    """The stages that defects replace."""

    num_heads: int
    head_dim: int

    def split(self, x: Tensor) -> Tensor:
        """Cut into heads."""
        return x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare queries and keys."""
        return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))

    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        """Hide keys where ``hidden`` is True."""
        return scores.masked_fill(hidden, -1e9)

    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        """Mask and normalise."""
        return F.softmax(scores if hidden is None else self.hide(scores, hidden), dim=-1)

    def drop(self, weights: Tensor) -> Tensor:
        """Drop weights, where the class does."""
        return weights

    def merge(self, context: Tensor) -> Tensor:
        """Put the heads side by side."""
        batch, heads, length, width = context.shape
        return context.transpose(1, 2).reshape(batch, length, heads * width)

    def future(self, length: int) -> Tensor:
        """What a causal mask hides."""
        return next(self.parameters()).new_ones(length, length).triu(1).bool()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """The chain: split, compare, weigh, merge."""
        q, k, v = self.split(q), self.split(k), self.split(v)
        weights = self.weigh(self.scores(q, k), hidden)
        return self.merge(self.drop(weights) @ v), weights

    def join(self, x: Tensor, attended: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Residual and LayerNorm."""
        return norm(x + attended)


class SeparateLinears(Stages):
    """Four Linears, batch first, 1 = may look, as in tutorials of the paper."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads, self.head_dim = n_heads, d_model // n_heads
        self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model) for _ in range(3))
        self.w_o = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = None if mask is None else mask.unsqueeze(1) == 0
        q, k, v = self.project(query, key, value)
        return self.out(self.attend(q, k, v, hidden)[0])

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three input projections."""
        return self.w_q(query), self.w_k(key), self.w_v(value)

    def drop(self, weights: Tensor) -> Tensor:
        """Drop weights."""
        return self.dropout(weights)

    def out(self, merged: Tensor) -> Tensor:
        """The output projection."""
        return self.w_o(merged)


class ValuesFirst(SeparateLinears):
    """Arguments in the order value, key, query; a required mask; heads before width in the constructor."""

    def __init__(self, heads: int, embed_size: int) -> None:
        super().__init__(embed_size, heads)

    def forward(self, values: Tensor, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(queries, keys, values)
        return self.out(self.attend(q, k, v, None if mask is None else mask == 0)[0])


class FusedCausal(Stages):
    """One packed Linear, a config object, the causal mask built in."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.n_head, config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        return self.c_proj(self.attend(q, k, v, self.future(x.size(1)))[0])


class PackedByHead(Stages):
    """One packed Linear with q, k, v inside each head; the mask is added; weights come back."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        packed = self.qkv(x).view(batch, length, self.num_heads, 3, -1)
        q, k, v = (part.reshape(batch, length, width) for part in packed.unbind(3))
        hidden = None if attention_mask is None else attention_mask < 0
        merged, weights = self.attend(q, k, v, hidden)
        return self.proj(merged), weights


class SequenceFirst(SeparateLinears):
    """(len, batch, features), keyword-only arguments, True = may not look."""

    def forward(self, *, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        hidden = None if attn_mask is None else attn_mask[:, None]
        return self.out(self.attend(q, k, v, hidden)[0]).transpose(0, 1)


class PostNorm(SeparateLinears):
    """Residual and LayerNorm inside, sizes of key and value given, weights come back."""

    def __init__(self, n_head: int, d_model: int, d_k: int, d_v: int) -> None:
        super().__init__(n_head * d_k, n_head)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = None if mask is None else mask.bool()
        merged, weights = self.attend(*self.project(q, k, v), hidden)
        return self.join(q, self.out(merged), self.layer_norm), weights


class ParametersOnly(Stages):
    """Raw parameters and matrix products, no output bias, one tensor in."""

    def __init__(self, emb: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, emb // heads
        self.W_query, self.W_key, self.W_value, self.W_out = (nn.Parameter(torch.randn(emb, emb)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x @ self.W_query, x @ self.W_key, x @ self.W_value, None)[0] @ self.W_out


CONVENTIONS: tuple[type[Stages], ...] = (
    SeparateLinears,
    ValuesFirst,
    FusedCausal,
    PackedByHead,
    SequenceFirst,
    PostNorm,
    ParametersOnly,
)
