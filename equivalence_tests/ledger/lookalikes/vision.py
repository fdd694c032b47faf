"""Attentions of images: of patches with a token of their class, of windows with a table of biases, of feature maps."""

import torch
from torch import Tensor, nn


class PatchAttention(nn.Module):
    """One projection for all three, cut by a reshape."""

    def __init__(self, dim: int, num_heads: int = 4, qkv_bias: bool = True, proj_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj, self.proj_drop = nn.Linear(dim, dim), nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(batch, length, width)
        return self.proj_drop(self.proj(x))


class PatchBlock(nn.Module):
    """A block that norms first and scales what it adds."""

    def __init__(self, dim: int, num_heads: int = 4, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), PatchAttention(dim, num_heads), nn.LayerNorm(dim)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class WindowAttention(nn.Module):
    """Attends inside a window; a table holds a bias for each distance."""

    def __init__(self, dim: int, window_size: int = 3, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.bias_table = nn.Parameter(torch.zeros((2 * window_size - 1) ** 2, num_heads))
        places = torch.stack(torch.meshgrid(torch.arange(window_size), torch.arange(window_size), indexing="ij"))
        apart = (places.flatten(1)[:, :, None] - places.flatten(1)[:, None]).permute(1, 2, 0) + window_size - 1
        self.register_buffer("index", apart[..., 0] * (2 * window_size - 1) + apart[..., 1])
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend inside each window; x holds windows first."""
        windows, area, width = x.shape
        qkv = self.qkv(x).reshape(windows, area, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = q * self.scale @ k.transpose(-2, -1)
        bias = self.bias_table[self.index.view(-1)].view(area, area, -1)  # type: ignore[operator]
        attn = attn + bias.permute(2, 0, 1).unsqueeze(0)
        attn = attn.softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(windows, area, width))


class MapAttention(nn.Module):
    """Attends between the places of a feature map, and adds the map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        h_ = self.norm(x)
        q, k, v = self.q(h_), self.k(h_), self.v(h_)
        b, c, h, w = q.shape
        q = q.reshape(b, c, h * w).permute(0, 2, 1)
        k, v = k.reshape(b, c, h * w), v.reshape(b, c, h * w)
        w_ = torch.bmm(q, k) * (int(c) ** (-0.5))
        w_ = torch.nn.functional.softmax(w_, dim=2)
        w_ = w_.permute(0, 2, 1)
        h_ = torch.bmm(v, w_).reshape(b, c, h, w)
        return x + self.proj_out(h_)
