"""An encoder whose attention is two modules: one that attends, one that projects, adds and norms."""

import math

import torch
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Attends, and does not project what comes out."""

    def __init__(self, hidden_size: int, num_attention_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query, self.key = nn.Linear(hidden_size, self.all_head_size), nn.Linear(hidden_size, self.all_head_size)
        self.value, self.dropout = nn.Linear(hidden_size, self.all_head_size), nn.Dropout(dropout)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """Put heads before tokens."""
        x = x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Attend."""
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            attention_scores = attention_scores + attention_mask
        attention_probs = self.dropout(nn.functional.softmax(attention_scores, dim=-1))
        context_layer = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3).contiguous()
        return context_layer.view(*context_layer.size()[:-2], self.all_head_size)


class SelfOutput(nn.Module):
    """Projects, adds and norms."""

    def __init__(self, hidden_size: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(hidden_size, hidden_size), nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Run it."""
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor)


class AttentionWithOutput(nn.Module):
    """Both together."""

    def __init__(self, hidden_size: int, num_attention_heads: int) -> None:
        super().__init__()
        self.self, self.output = SelfAttention(hidden_size, num_attention_heads), SelfOutput(hidden_size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Run both."""
        return self.output(self.self(hidden_states, attention_mask), hidden_states)
