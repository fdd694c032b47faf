"""The four real defects of the source documents, in words of our own."""

import math

import torch
from torch import Tensor, nn

__all__ = ["BROKEN"]


class ReshapingAttention(nn.Module):
    """Cuts (batch, len, width) straight into (batch, heads, len, head_dim): tokens and heads mix."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.query, self.key, self.value = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.output = nn.Linear(d_model, d_model, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        batch = q.size(0)
        queries = self.query(q).reshape(batch, self.n_heads, -1, self.d_head)
        keys = self.key(k).reshape(batch, self.n_heads, -1, self.d_head)
        values = self.value(v).reshape(batch, self.n_heads, -1, self.d_head)
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        context = (scores.softmax(-1) @ values).transpose(1, 2).reshape(batch, -1, self.n_heads * self.d_head)
        return self.output(context)


class SlowPositionalEncoding(nn.Module):
    """Divides the exponent by two once too often."""

    def __init__(self, d_model: int, max_len: int = 100) -> None:
        super().__init__()
        table = torch.zeros(max_len, d_model)
        position = torch.arange(max_len).unsqueeze(1)
        even = torch.arange(0, d_model, 2)
        angle = position / 10000 ** (even / d_model / 2)
        table[:, 0::2] = angle.sin()
        table[:, 1::2] = angle.cos()[:, : d_model // 2]
        self.register_buffer("table", table.double())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.size(1)]


class CrossAttention(nn.Module):
    """Right: hands back its output and its maps."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.num_heads = n_heads
        self.attention = nn.MultiheadAttention(d_model, n_heads, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(query, key, value)


class ForgetfulDecoderLayer(nn.Module):
    """Hands back the self-attention maps in the place of the cross-attention maps."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.self_attention = CrossAttention(d_model, n_heads)
        self.cross_attention = CrossAttention(d_model, n_heads)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attended, self_maps = self.self_attention(x, x, x)
        x = self.norm1(x + attended)
        attended, _ = self.cross_attention(x, memory, memory)
        return self.norm2(x + attended), self_maps, self_maps


class LengthFirstPositionalEncoding(nn.Module):
    """Adds its table along axis 0: right for (len, batch, features)."""

    def __init__(self, d_model: int, max_len: int = 100) -> None:
        super().__init__()
        position, even = torch.arange(max_len).unsqueeze(1), torch.arange(0, d_model, 2)
        angle = (position / 10000 ** (even / d_model)).double()
        table = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :d_model]
        self.register_buffer("table", table.unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.size(0)]


class BatchIndexedTransformerModel(nn.Module):
    """Feeds batch-first tensors to a positional encoding that is length first."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.positional_encoding = LengthFirstPositionalEncoding(d_model)
        self.transformer = nn.Transformer(d_model, n_heads, 1, 1, 37, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.transformer(self.positional_encoding(src), self.positional_encoding(tgt))


BROKEN = (
    (ReshapingAttention, ("heads_split_without_transpose",), "source: heads split by reshape"),
    (SlowPositionalEncoding, ("position_exponent_wrong",), "source: positional frequencies halved"),
    (ForgetfulDecoderLayer, ("cross_maps_are_self_maps",), "source: self-attention maps as cross-attention maps"),
    (BatchIndexedTransformerModel, ("position_indexed_by_batch",), "source: positional table indexed by the batch"),
)
