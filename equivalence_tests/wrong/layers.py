"""Right layers, stacks and models, in the ways in which they are usually written: what is edited beside attentions."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Classifier", "CrossLayer", "Encoder", "Gpt", "GatedBlock", "PostNormLayer", "PreNormBlock", "ScaledBlock"]


class Attends(nn.Module):
    """Attention of a sequence with itself."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if self.causal:
            future = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return self.to_out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class RootMeanSquareNorm(nn.Module):
    """RMSNorm by hand."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class GatedFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.Linear(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PostNormLayer(nn.Module):
    """The encoder layer of the paper, around torch's attention."""

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=0.1, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.Dropout(0.1)

    def forward(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        attended = self.self_attn(src, src, src, attn_mask=src_mask, need_weights=False)[0]
        x = self.norm1(src + self.dropout(attended))
        hidden = self.dropout(F.relu(self.linear1(x)))
        return self.norm2(x + self.dropout(self.linear2(hidden)))


class PreNormBlock(nn.Module):
    """A block with the norms first, around an attention of its own."""

    def __init__(self, dim: int, heads: int, hidden: int, causal: bool = False) -> None:
        super().__init__()
        self.attn = Attends(dim, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GatedBlock(nn.Module):
    """A block of today: RMSNorm and SwiGLU."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attends(dim, heads, causal=True), GatedFeedForward(dim, hidden)
        self.attention_norm, self.ffn_norm = RootMeanSquareNorm(dim), RootMeanSquareNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class ScaledBlock(nn.Module):
    """A block of an image model, with a learnt scale on each branch."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = Attends(dim, heads), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.gamma_1, self.gamma_2 = nn.Parameter(0.1 * torch.ones(dim)), nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.norm1(x))
        return x + self.gamma_2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class CrossLayer(nn.Module):
    """The decoder layer of the paper."""

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None) -> Tensor:
        x = self.norm1(tgt + self.self_attn(tgt, tgt, tgt, attn_mask=tgt_mask)[0])
        x = self.norm2(x + self.multihead_attn(x, memory, memory)[0])
        return self.norm3(x + self.linear2(F.relu(self.linear1(x))))


class Encoder(nn.Module):
    """A stack with a norm at its end."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PreNormBlock(dim, heads, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Gpt(nn.Module):
    """A language model."""

    def __init__(self, vocab_size: int, dim: int, heads: int, hidden: int, max_len: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(PreNormBlock(dim, heads, hidden, causal=True) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Classifier(nn.Module):
    """A model that says one thing of a sentence: scaled embeddings, learnt positions, and the mean of the tokens."""

    def __init__(self, vocab_size: int, dim: int, heads: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.dim, self.embedding = dim, nn.Embedding(vocab_size, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 32, dim))
        self.encoder, self.head = Encoder(dim, heads, hidden), nn.Linear(dim, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * math.sqrt(self.dim)
        x = x + self.positions[:, : ids.size(1)]
        return self.head(self.encoder(x).mean(dim=1))
