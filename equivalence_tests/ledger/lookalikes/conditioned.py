"""Blocks that each sample's vector, of its time step or its class, shifts and scales; and terse constructors."""

import torch
from torch import Tensor, nn
from torch.nn import functional


def shifted(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Change all tokens of a sample alike."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TokenAttention(nn.Module):
    """Self-attention."""

    def __init__(self, dim: int, num_heads: int = 8) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = num_heads, nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class ConditionedBlock(nn.Module):
    """Norms without weights: what shifts, scales and gates is made of a vector c, (batch, features)."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        inner = int(hidden_size * mlp_ratio)
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = TokenAttention(hidden_size, num_heads)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, inner), nn.GELU(), nn.Linear(inner, hidden_size))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Run both."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(shifted(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(shifted(self.norm2(x), shift2, scale2))


class TimedBlock(nn.Module):
    """Adds what it makes of the time step, whose embedding has a width of its own; reads a text in between."""

    def __init__(self, d_model: int, n_heads: int, time_dim: int = 48) -> None:
        super().__init__()
        self.time = nn.Linear(time_dim, d_model)
        self.n1, self.n2, self.n3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.own = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.cross = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor, context: Tensor, t_emb: Tensor) -> Tensor:
        """Run all three."""
        x = x + self.time(t_emb)[:, None]
        h = self.n1(x)
        x = x + self.own(h, h, h, need_weights=False)[0]
        x = x + self.cross(self.n2(x), context, context)[0]
        return x + self.ff(self.n3(x))


class TerseAttention(nn.Module):
    """Arguments of one letter, of which n is no number of layers."""

    def __init__(self, d: int, n: int) -> None:
        super().__init__()
        self.n, self.d_k = n, d // n
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend."""
        q, k, v = (
            f(x).view(len(x), -1, self.n, self.d_k).transpose(1, 2) for f, x in ((self.q, q), (self.k, k), (self.v, v))
        )
        w = torch.softmax(q @ k.transpose(-1, -2) / self.d_k**0.5, dim=-1)
        return self.o((w @ v).transpose(1, 2).reshape(len(q), -1, self.n * self.d_k))


class SharingAttention(TerseAttention):
    """Groups of heads share their keys, so many groups that the heads can be cut into them."""

    def __init__(self, d_model: int, num_heads: int, num_groups: int) -> None:
        assert num_heads % num_groups == 0
        super().__init__(d_model, num_heads)
        self.k, self.v = (nn.Linear(d_model, num_groups * self.d_k) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Attend."""
        q, k, v = (f(x).view(*x.shape[:2], -1, self.d_k).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.n // t.size(1), 1) for t in (k, v))
        w = torch.softmax(q @ k.transpose(-1, -2) / self.d_k**0.5, dim=-1)
        return self.o((w @ v).transpose(1, 2).flatten(2))


class WholeTriangle(TerseAttention):
    """Hides the future by a plain tensor, which it adds whole: other lengths fail."""

    def __init__(self, dim: int, heads: int, n_tokens: int) -> None:
        super().__init__(dim, heads)
        self.hidden = torch.triu(torch.full((n_tokens, n_tokens), -torch.inf), 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Attend."""
        q, k, v = (f(x).view(*x.shape[:2], self.n, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        w = torch.softmax(q @ k.transpose(-1, -2) / self.d_k**0.5 + self.hidden, dim=-1)
        return self.o((w @ v).transpose(1, 2).flatten(2))


class TimedModel(nn.Module):
    """Takes an image with the time step and the class of each sample, and gives tokens of pixels."""

    def __init__(
        self, img_size: int, in_channels: int, patch_size: int, dim: int, n_heads: int, num_classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_channels, dim, patch_size, patch_size)
        self.positions = nn.Parameter(torch.randn(1, (img_size // patch_size) ** 2, dim))
        self.time, self.label = (
            nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, dim)),
            nn.Embedding(num_classes, dim),
        )
        self.block, self.out = ConditionedBlock(dim, n_heads), nn.Linear(dim, in_channels * patch_size**2)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Run the block on the patches."""
        angles = t[:, None].to(x.dtype) * torch.exp(-torch.arange(8, dtype=x.dtype, device=x.device))
        condition = self.time(torch.cat((angles.cos(), angles.sin()), -1)) + self.label(y)
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.out(self.block(tokens, condition))


class InlineBlock(ConditionedBlock):
    """Computes its attention in its own forward."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads)
        del self.attn
        self.num_heads, self.qkv = num_heads, nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Run both."""
        b, n, d = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=-1)
        q, k, v = self.qkv(shifted(self.norm1(x), shift1, scale1)).chunk(3, dim=-1)
        q, k, v = (t.view(b, n, self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + gate1.unsqueeze(1) * self.proj(mixed)
        return x + gate2.unsqueeze(1) * self.mlp(shifted(self.norm2(x), shift2, scale2))
