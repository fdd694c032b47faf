"""The attention that README and the guide check, with its mistake: ``sidebyside verify --example`` prints it."""

EXAMPLE = """\
import math

from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, q, k, v, mask=None):
        b, l, e = q.shape
        q, k, v = self.q_proj(q), self.k_proj(k), self.v_proj(v)
        q, k, v = (x.view(b, -1, self.num_heads, e // self.num_heads).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(e)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        context = scores.softmax(dim=-1) @ v
        return self.out_proj(context.transpose(1, 2).reshape(b, l, e))
"""
