"""Right attentions and parts as text, for the changes that ``mistakes`` lists: each breaks one of them in one way."""

__all__ = ["RIGHT", "broken"]

HEAD = """
import math

import torch
from torch import nn
from torch.nn import functional as F

"""
CROSS = """
class Attention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(3))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(0.1)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (self.split(x) for x in (q, k, v))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        weights = scores.softmax(-1)
        dropped = self.dropout(weights)
        context = dropped @ v
        merged = context.transpose(1, 2).flatten(2)
        return self.out_proj(merged)
"""
ITSELF = (
    CROSS.replace("query, key, value, mask=None", "x")
    .replace(
        "self.q_proj(query), self.k_proj(key), self.v_proj(value)", "self.q_proj(x), self.k_proj(x), self.v_proj(x)"
    )
    .replace("        if mask is not None:\n            scores = scores.masked_fill(mask, -math.inf)\n", "")
)
SCORES = "scores = q @ k.mT / math.sqrt(q.size(-1))\n"
CAUSAL = ITSELF.replace(
    SCORES,
    SCORES
    + "        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)\n"
    + "        scores = scores.masked_fill(future, -math.inf)\n",
)
PADDED = CROSS.replace("mask=None", "key_padding_mask=None").replace(
    "if mask is not None:\n            scores = scores.masked_fill(mask, -math.inf)",
    "if key_padding_mask is not None:\n"
    "            scores = scores.masked_fill(key_padding_mask[:, None, None, :], -math.inf)",
)
LENGTHS = CROSS.replace("mask=None", "lengths=None").replace(
    "if mask is not None:\n            scores = scores.masked_fill(mask, -math.inf)",
    "if lengths is not None:\n"
    "            hidden = torch.arange(k.size(2), device=k.device) >= lengths[:, None]\n"
    "            scores = scores.masked_fill(hidden[:, None, None, :], -math.inf)",
)
PACKED = (
    ITSELF.replace(
        "self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(3))",
        "self.qkv = nn.Linear(embed_dim, 3 * embed_dim)",
    )
    .replace("q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)", "packed = self.qkv(x)")
    .replace(
        "q, k, v = (self.split(x) for x in (q, k, v))",
        "q, k, v = packed.view(x.size(0), x.size(1), 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)",
    )
)
GROUPED = (
    ITSELF.replace("embed_dim, num_heads):", "embed_dim, num_heads, num_kv_heads):")
    .replace("self.num_heads = num_heads", "self.num_heads, self.groups = num_heads, num_heads // num_kv_heads")
    .replace(
        "self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(3))",
        "width = embed_dim // num_heads\n"
        "        self.num_kv_heads, self.q_proj = num_kv_heads, nn.Linear(embed_dim, embed_dim)\n"
        "        self.k_proj, self.v_proj = (nn.Linear(embed_dim, num_kv_heads * width) for _ in range(2))",
    )
    .replace(
        "q, k, v = (self.split(x) for x in (q, k, v))",
        "q = self.split(q)\n"
        "        k, v = (self.shared(y.unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)) for y in (k, v))",
    )
    .replace(
        "    def forward",
        "    def shared(self, x):\n        return x.repeat_interleave(self.groups, dim=1)\n\n    def forward",
    )
)
ROTARY = ITSELF.replace(
    "q, k, v = (self.split(x) for x in (q, k, v))",
    "q, k, v = (self.split(x) for x in (q, k, v))\n        q, k = self.rotated(q), self.rotated(k)",
).replace(
    "    def forward",
    """    def rotated(self, x):
        steps = 10000.0 ** -(torch.arange(0, x.size(-1), 2, dtype=x.dtype, device=x.device) / x.size(-1))
        angles = torch.outer(torch.arange(x.size(-2), dtype=x.dtype, device=x.device), steps)
        angles = torch.cat((angles, angles), -1)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()

    def forward""",
)
TILED = ITSELF.replace(
    SCORES
    + "        weights = scores.softmax(-1)\n        dropped = self.dropout(weights)\n        context = dropped @ v\n",
    """best = q.new_full((*q.shape[:-1], 1), -math.inf)
        total, out = torch.zeros_like(best), torch.zeros_like(q)
        for start in range(0, k.size(2), 2):
            scores = q @ k[:, :, start : start + 2].mT / math.sqrt(q.size(-1))
            new = torch.maximum(best, scores.amax(-1, keepdim=True))
            e, shrink = (scores - new).exp(), (best - new).exp()
            total = total * shrink + e.sum(-1, keepdim=True)
            out = out * shrink + e @ v[:, :, start : start + 2]
            best = new
        context = out / total
""",
).replace("        self.dropout = nn.Dropout(0.1)\n", "")
NORMED = ITSELF.replace("self.num_heads = num_heads", "self.num_heads, self.norm = num_heads, nn.LayerNorm(embed_dim)")
POST_NORM = NORMED.replace(
    "return self.out_proj(merged)", "attended = self.out_proj(merged)\n        return self.norm(x + attended)"
)
PRE_NORM = NORMED.replace(
    "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)",
    "y = self.norm(x)\n        q, k, v = self.q_proj(y), self.k_proj(y), self.v_proj(y)",
).replace("return self.out_proj(merged)", "attended = self.out_proj(merged)\n        return x + attended")

LAYER_NORM = """
class LayerNorm(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        var, mean = torch.var_mean(x, -1, unbiased=False, keepdim=True)
        normal = (x - mean) / (var + self.eps).sqrt()
        return self.gain * normal + self.bias
"""
FEED_FORWARD = """
class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_2(F.relu(self.w_1(x)))
"""
POSITIONS = """
class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=64):
        super().__init__()
        pos, even = torch.arange(max_len, dtype=torch.float64)[:, None], torch.arange(0, d_model, 2)
        sines = even / d_model
        cosines = even / d_model
        pe = torch.zeros(max_len, d_model, dtype=torch.float64)
        pe[:, 0::2] = torch.sin(pos / 10000**sines)
        pe[:, 1::2] = torch.cos(pos / 10000**cosines)[:, : d_model // 2]
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(1)]
"""
LAYER = """
class EncoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), None

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.self_attn(y, y, y)[0]
        x = x + self.linear2(F.relu(self.linear1(self.norm2(x))))
        return x
"""

RIGHT = {
    "cross": CROSS,
    "itself": ITSELF,
    "causal": CAUSAL,
    "padded": PADDED,
    "lengths": LENGTHS,
    "packed": PACKED,
    "grouped": GROUPED,
    "rotary": ROTARY,
    "tiled": TILED,
    "post_norm": POST_NORM,
    "pre_norm": PRE_NORM,
    "layer_norm": LAYER_NORM,
    "feed_forward": FEED_FORWARD,
    "positions": POSITIONS,
    "layer": LAYER,
}


def broken(right: str, changes: tuple[tuple[str, str], ...] = ()) -> str:
    """Give the text of a module with a right class, changed.

    Args:
        right: Which of ``RIGHT``.
        changes: What to replace by what; each must be found.

    Raises:
        ValueError: If something to replace is not there.
    """
    text = RIGHT[right]
    for old, new in changes:
        if old not in text:
            raise ValueError(f"changes must be found in {right!r}, got {old!r}")
        text = text.replace(old, new)
    return HEAD + text
