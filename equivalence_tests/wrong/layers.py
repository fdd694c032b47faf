"""Right layers, stacks and models, in the ways in which they are usually written: what is edited beside attentions."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Bert", "Classifier", "CrossLayer", "Decoder", "Encoder", "Gpt", "GatedBlock", "PostNormLayer", "PreNormBlock",
    "ScaledBlock", "Translator", "Vision",
]  # fmt: skip


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
            future = x.new_ones(x.size(1), x.size(1)).triu(1).bool()
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


class Decoder(nn.Module):
    """A stack of decoder layers, which read the same memory."""

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossLayer(d_model, nhead, dim_feedforward) for _ in range(2))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None) -> Tensor:
        x = tgt
        for layer in self.layers:
            x = layer(x, memory, tgt_mask)
        return self.norm(x)


class SinusoidalPositions(nn.Module):
    """The positions of the paper."""

    pe: Tensor

    def __init__(self, d_model: int, max_len: int) -> None:
        super().__init__()
        angles = torch.arange(max_len)[:, None] * 10000.0 ** (-torch.arange(0, d_model, 2) / d_model)
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2], pe[:, 1::2] = angles.sin(), angles.cos()[:, : d_model // 2]
        self.register_buffer("pe", pe[None])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[:, : x.size(1)]


class Translator(nn.Module):
    """The model of the paper, around torch's layers."""

    def __init__(self, vocab_size: int, d_model: int, nhead: int, dim_feedforward: int, max_len: int) -> None:
        super().__init__()
        self.d_model, self.embedding = d_model, nn.Embedding(vocab_size, d_model)
        self.positions, self.generator = SinusoidalPositions(d_model, max_len), nn.Linear(d_model, vocab_size)
        self.encoder_layers = nn.ModuleList(PostNormLayer(d_model, nhead, dim_feedforward) for _ in range(2))
        self.decoder_layers = nn.ModuleList(CrossLayer(d_model, nhead, dim_feedforward) for _ in range(2))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory = self.positions(self.embedding(src) * math.sqrt(self.d_model))
        for layer in self.encoder_layers:
            memory = layer(memory)
        x = self.positions(self.embedding(tgt) * math.sqrt(self.d_model))
        future = tgt.new_ones(tgt.size(1), tgt.size(1)).triu(1).bool()
        for layer in self.decoder_layers:
            x = layer(x, memory, future)
        return self.generator(x)


class Bert(nn.Module):
    """An encoder with a norm behind its embeddings, and a pooler."""

    def __init__(self, vocab_size: int, d_model: int, nhead: int, dim_feedforward: int, max_len: int) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = (
            nn.Embedding(vocab_size, d_model),
            nn.Embedding(max_len, d_model),
        )
        self.LayerNorm, self.pooler = nn.LayerNorm(d_model), nn.Linear(d_model, d_model)
        self.layers = nn.ModuleList(PostNormLayer(d_model, nhead, dim_feedforward) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(positions))
        for layer in self.layers:
            x = layer(x)
        return self.pooler(x[:, 0]).tanh()


class Vision(nn.Module):
    """An image model: patches, a token for the class, learnt positions."""

    def __init__(self, image_size: int, patch_size: int, dim: int, heads: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch_size, stride=patch_size)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (image_size // patch_size) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(PreNormBlock(dim, heads, hidden) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.size(0), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
