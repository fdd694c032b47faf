"""A decoder's attention as it is written today: rotary positions as complex numbers, fewer heads of keys, a cache."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Arguments:
    """Sizes."""

    dim: int = 32
    n_heads: int = 4
    n_kv_heads: int = 2
    norm_eps: float = 1e-5
    max_seq_len: int = 32


class RMSNorm(nn.Module):
    """Divides by the root of the mean of squares."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Norm."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    """Give the angles of each position, as complex numbers."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].double() / dim))
    angles = torch.outer(torch.arange(end).double(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys."""
    xq_ = torch.view_as_complex(xq.reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis[None, :, None, :]
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """Give each head of queries its keys."""
    batch, length, heads, width = x.shape
    if n_rep == 1:
        return x
    return x[:, :, :, None, :].expand(batch, length, heads, n_rep, width).reshape(batch, length, heads * n_rep, width)


class Attention(nn.Module):
    """Attends with fewer heads of keys and values."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = args.n_heads, args.n_kv_heads
        self.n_rep, self.head_dim = self.n_heads // self.n_kv_heads, args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)
        self.register_buffer("freqs", precompute_freqs_cis(self.head_dim, args.max_seq_len), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        batch, length, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(batch, length, self.n_heads, self.head_dim)
        xk = xk.view(batch, length, self.n_kv_heads, self.head_dim)
        xv = xv.view(batch, length, self.n_kv_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, self.freqs[:length])  # type: ignore[index]
        keys, values = repeat_kv(xk, self.n_rep), repeat_kv(xv, self.n_rep)
        xq, keys, values = (y.transpose(1, 2) for y in (xq, keys, values))
        output = F.scaled_dot_product_attention(xq, keys, values, is_causal=True)
        return self.wo(output.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    """A gate and two projections."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden_dim, bias=False), nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Both, each behind a norm."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(args), FeedForward(args.dim, 4 * args.dim)
        self.attention_norm, self.ffn_norm = RMSNorm(args.dim, args.norm_eps), RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))
