"""An attention that may read another sequence and keeps a dictionary, and one that takes its context with a mask."""

import math

import torch
from torch import Tensor, nn


class CrossOrSelf(nn.Module):
    """Keys without a bias, scaled by the fourth root on both sides."""

    def __init__(self, n_state: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.query, self.key = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state, bias=False)
        self.value, self.out = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend to x itself, or to another sequence."""
        q = self.query(x)
        k, v = self.key(x if xa is None else xa), self.value(x if xa is None else xa)
        return self.out(self.qkv_attention(q, k, v, mask))

    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Weigh values."""
        scale = (q.shape[-1] // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk + mask[: q.shape[2], : q.shape[2]]
        w = torch.softmax(qk, dim=-1)
        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2)


class ContextAttention(nn.Module):
    """Queries of one width, a context of another, and a mask of the context."""

    def __init__(self, query_dim: int, context_dim: int, heads: int = 4, dim_head: int = 8) -> None:
        super().__init__()
        inner_dim = dim_head * heads
        self.scale, self.heads = dim_head**-0.5, heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k, self.to_v = (nn.Linear(context_dim, inner_dim, bias=False) for _ in range(2))
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(0.0))

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend to the context."""
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = (y.view(y.size(0), y.size(1), self.heads, -1).transpose(1, 2) for y in (q, k, v))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class ValuesKeysQuery(nn.Module):
    """The three arguments in another order, and einsum throughout."""

    def __init__(self, embed_size: int, heads: int) -> None:
        super().__init__()
        self.embed_size, self.heads, self.head_dim = embed_size, heads, embed_size // heads
        self.values, self.keys = nn.Linear(embed_size, embed_size), nn.Linear(embed_size, embed_size)
        self.queries, self.fc_out = nn.Linear(embed_size, embed_size), nn.Linear(embed_size, embed_size)

    def forward(self, values: Tensor, keys: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend."""
        count, query_len = query.shape[0], query.shape[1]
        value = self.values(values).reshape(count, -1, self.heads, self.head_dim)
        key = self.keys(keys).reshape(count, -1, self.heads, self.head_dim)
        queries = self.queries(query).reshape(count, query_len, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, key])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        weights = torch.softmax(energy / math.sqrt(self.head_dim), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [weights, value]).reshape(count, query_len, self.embed_size)
        return self.fc_out(out)
