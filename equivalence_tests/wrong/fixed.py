"""Twenty-four wrong versions of one attention, each one edit: a first look that takes a minute."""

from equivalence_tests.wrong.editing import Version
from equivalence_tests.wrong.sources import HEADS, WIDTH, Right, call_of, sizes_of

__all__ = ["ATTENTION", "EDITS", "versions"]

TEXT = '''"""Attention of a sequence with itself."""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) * self.scale
        attn = scores.softmax(dim=-1)
        context = attn @ v
        merged = context.transpose(1, 2).flatten(2)
        return self.to_out(merged)
'''
SIZES = {"dim": WIDTH, "heads": HEADS}
ATTENTION = Right("fixed", "Attention", TEXT, "Attention", SIZES, (call_of("x:tokens"),), sizes_of(SIZES, TEXT))
SCORES, CONTEXT, OUT = "        scores =", "attn @ v", "self.to_out(merged)"
# What is done, what it is done to, and what stands there then.
EDITS = (
    ("values subtracted", CONTEXT, "attn @ v - v"),
    ("output projected twice", OUT, "self.to_out(self.to_out(merged))"),
    ("last key left out", CONTEXT, "attn[..., :-1] @ v[:, :, :-1]"),
    ("context gated by the input", OUT, "self.to_out(merged * x.sigmoid())"),
    ("values rolled along tokens", CONTEXT, "attn @ v.roll(1, 2)"),
    ("scale forgotten", "k.transpose(-2, -1) * self.scale", "k.transpose(-2, -1)"),
    ("scale of embed_dim", "(dim // heads) ** -0.5", "dim**-0.5"),
    ("softmax over queries", "softmax(dim=-1)", "softmax(dim=-2)"),
    ("heads of values reversed", CONTEXT, "attn @ v.flip(1)"),
    ("input added to the context", OUT, "self.to_out(merged + x)"),
    ("last channel zeroed", OUT, "self.to_out(F.pad(merged[..., :-1], (0, 1)))"),
    ("weights squared and normalised", CONTEXT, "(attn**2 / (attn**2).sum(-1, keepdim=True)) @ v"),
    ("queries layer-normed", SCORES, f"        q = F.layer_norm(q, q.shape[-1:])\n{SCORES}"),
    ("keys less their mean", "k.transpose(-2, -1)", "(k - k.mean(-1, keepdim=True)).transpose(-2, -1)"),
    ("scores clamped", "scores.softmax", "scores.clamp(-0.3, 0.3).softmax"),
    ("output doubled", OUT, "2 * self.to_out(merged)"),
    ("output without bias", OUT, "F.linear(merged, self.to_out.weight)"),
    ("input bent", "self.to_qkv(x)", "self.to_qkv(x.tanh())"),
    ("input centred over tokens", "self.to_qkv(x)", "self.to_qkv(x - x.mean(1, keepdim=True))"),
    ("positions added to the input", "self.to_qkv(x)", "self.to_qkv(x + 0.1 * torch.arange(x.size(1))[:, None])"),
    ("halves of the output exchanged", OUT, "torch.cat(self.to_out(merged).chunk(2, -1)[::-1], -1)"),
    ("bias of the output added to the context", OUT, "self.to_out(merged + self.to_out.bias)"),
    ("context gated by a projection of the input", OUT, "self.to_out(merged * self.to_out(x).sigmoid())"),
    ("mean of the values added", CONTEXT, "attn @ v + v.mean(2, keepdim=True)"),
)


def versions() -> list[Version]:
    """Make all of them."""
    return [_version(*edit) for edit in EDITS]


def _version(name: str, old: str, new: str) -> Version:
    before, found, after = TEXT.partition(old)
    assert found, name
    first = before.count("\n") + 1
    return Version(ATTENTION, name, before + new + after, tuple(range(first, first + new.count("\n") + 1)))
