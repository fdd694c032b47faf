"""Files of single people: what their constructors ask for, and what they compute in their own ways."""

from pathlib import Path

import pytest

from equivalence_tests.checker.helpers_for_tests import report_on, saved
from equivalence_tests.checker.verify import verify

HEAD = """
import math
import torch
from torch import nn
from torch.nn import functional as F
"""
CONFIG = """
class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, places = config.n_head, 3 * (config.num_cities - 1)
        self.flash = True if config.speedy else False
        self.qkv, self.out = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.register_buffer("mask", torch.ones(places, places).tril().view(1, 1, places, places))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        weights = F.softmax(scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))
"""
SQUARE = """
class SelfAttention(nn.Module):
    def __init__(self, channels, size):
        super().__init__()
        self.channels, self.size = channels, size
        self.mha = nn.MultiheadAttention(channels, 4, batch_first=True)
        self.ln = nn.LayerNorm([channels])

    def forward(self, x):
        x = x.view(-1, self.channels, self.size * self.size).swapaxes(1, 2)
        y = self.ln(x)
        y = x + self.mha(y, y, y)[0]
        return y.swapaxes(2, 1).view(-1, self.channels, self.size, self.size)
"""
ROTARY = """
class Rotary(nn.Module):
    def __init__(self, theta: float, d_k: int, max_seq_len: int):
        super().__init__()
        angles = torch.arange(max_seq_len)[:, None] / theta ** (2 * torch.arange(d_k // 2) / d_k)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x, positions):
        one, two, cos, sin = x[..., ::2], x[..., 1::2], self.cos[positions], self.sin[positions]
        return torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, d_model: int, num_heads: int, rope_class: Rotary):
        super().__init__()
        self.heads, self.rope = num_heads, rope_class
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, token_positions):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for y in self.qkv(x).chunk(3, -1))
        q, k = self.rope(q, token_positions), self.rope(k, token_positions)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2))
"""
LOCAL = """
class LSA(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(0.5 * dim**0.5))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT / self.temperature
        own = torch.eye(x.size(1), dtype=torch.bool)
        return scores.masked_fill(own, torch.finfo(x.dtype).min).softmax(-1) @ self.value(x)
"""
FROZEN = """
class PositionalEmbedding(nn.Module):
    def __init__(self, d_model, max_len=50):
        super().__init__()
        table = torch.arange(max_len)[:, None] * torch.pow(10000, -2 * torch.arange(d_model) / d_model)
        table[:, 0::2], table[:, 1::2] = table[:, 0::2].sin(), table[:, 1::2].cos()
        self.embedding = nn.Embedding.from_pretrained(table, freeze=True)

    def forward(self, x):
        return self.embedding(torch.arange(x.size(1), device=x.device))
"""
BANDED = """
class WindowAttention(nn.Module):
    def __init__(self, embed_dim, n_head=8, window_size=3):
        super().__init__()
        self.heads, self.window = n_head, window_size
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        n, scores = x.size(1), torch.zeros(len(x), self.heads, x.size(1), x.size(1))
        for i, apart in enumerate(range(-(self.window // 2), self.window // 2 + 1)):
            rows = torch.arange(max(0, -apart), min(n, n - apart))
            met = torch.einsum("bhid,bhid->bhi", q[:, :, rows], k[:, :, rows + apart])
            scores[:, :, rows, i] = met / q.size(-1) ** 0.5
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""
CACHED = """
class Attention(nn.Module):
    def __init__(self, dim, n_heads, max_seq_len=64):
        super().__init__()
        self.heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.cache_k = torch.zeros(16, max_seq_len, n_heads, dim // n_heads)
        self.cache_v = torch.zeros(16, max_seq_len, n_heads, dim // n_heads)

    def forward(self, x, start_pos: int):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1) for f in (self.wq, self.wk, self.wv))
        self.cache_k[:b, FIRST : FIRST + n] = k
        self.cache_v[:b, FIRST : FIRST + n] = v
        k, v = self.cache_k[:b, : start_pos + n].to(x), self.cache_v[:b, : start_pos + n].to(x)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        weights = (q @ k.transpose(2, 3) / q.size(-1) ** 0.5).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).reshape(b, n, -1))
"""
LOGS = """
import lightning_that_nobody_has as pl
from log_that_nobody_has import logger


class Attention(pl.LightningModule):
    def __init__(self, dim, heads, dropout_rate):
        super().__init__()
        self.save_hyperparameters()
        self.heads, self.drop = heads, nn.Dropout(p=dropout_rate, inplace=INPLACE)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        logger.debug(f"queries of {tuple(q.shape)}")
        weights = self.drop((q @ k.mT / q.size(-1) ** 0.5).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))
"""
TEMPERED = """
class Inner(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, q, k, v):
        return (q @ k.mT * self.temperature).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, d_model, n_head, temp):
        super().__init__()
        self.heads, self.inner = n_head, Inner(temperature=temp)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(self.inner(q, k, v).transpose(1, 2).flatten(2))
"""
SETS = """
class MAB(nn.Module):
    def __init__(self, dim_Q, dim_K, dim_V, num_heads):
        super().__init__()
        self.dim_V, self.num_heads = dim_V, num_heads
        self.fc_q, self.fc_k, self.fc_v = nn.Linear(dim_Q, dim_V), nn.Linear(dim_K, dim_V), nn.Linear(dim_K, dim_V)
        self.fc_o = nn.Linear(dim_V, dim_V)

    def forward(self, Q, K):
        Q, K, V = self.fc_q(Q), self.fc_k(K), self.fc_v(K)
        q, k, v = (torch.cat(x.split(self.dim_V // self.num_heads, 2), 0) for x in (Q, K, V))
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(self.dim_V), 2)
        out = torch.cat((q + weights.bmm(v)).split(Q.size(0), 0), 2)
        return out + F.relu(self.fc_o(out))


class ISAB(nn.Module):
    def __init__(self, dim_in, dim_out, num_heads, num_inds):
        super().__init__()
        self.I = nn.Parameter(torch.randn(1, num_inds, dim_out))
        self.mab0, self.mab1 = MAB(dim_out, dim_in, dim_out, num_heads), MAB(dim_in, dim_out, dim_out, num_heads)

    def forward(self, X):
        return self.mab1(X, self.mab0(self.I.repeat(X.size(0), 1, 1), X))
"""
WINDOWS = """
class WindowedAttention(nn.Module):
    def __init__(self, d_model, n_heads, window_size=2):
        super().__init__()
        self.heads, self.window_size = n_heads, window_size
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        seen = torch.zeros(x.size(1), x.size(1), dtype=torch.bool)
        for i in range(x.size(1)):
            seen[i, max(0, i - self.window_size) : min(END, i + self.window_size + 1)] = True
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~seen, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""
INLINE = """
def rotated(x, y, angles):
    both = (torch.view_as_complex(z.float().reshape(*z.shape[:-1], -1, 2)) * angles[: z.size(1), None] for z in (x, y))
    return [torch.view_as_real(z).flatten(3).type_as(x) for z in both]


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim, self.heads = config.d_model, config.nhead
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, freqs_cis, mask):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)) for f in (self.wq, self.wk, self.wv))
        q, KEYS = rotated(q, k, freqs_cis)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.w2(F.silu(self.w1(self.norm2(x))))
"""
SEQUENCES = """
class SASRec(nn.Module):
    def __init__(self, item_num, args):
        super().__init__()
        dim, self.dev = args.hidden_units, args.device
        self.item_emb = nn.Embedding(item_num + 1, dim, padding_idx=0)
        self.pos_emb, self.drop = nn.Embedding(args.maxlen + 1, dim, padding_idx=0), nn.Dropout(p=args.dropout_rate)
        layers = range(args.num_blocks)
        self.norms1, self.norms2 = (nn.ModuleList(nn.LayerNorm(dim, eps=1e-8) for _ in layers) for _ in range(2))
        self.attention = nn.ModuleList(nn.MultiheadAttention(dim, args.num_heads, batch_first=True) for _ in layers)
        self.forwards = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in layers
        )
        self.last_norm = nn.LayerNorm(dim, eps=1e-8)

    def log2feats(self, log_seqs):
        seqs = self.item_emb(log_seqs.to(self.dev))
        seqs *= self.item_emb.embedding_dim ** 0.5
        places = torch.arange(1, log_seqs.shape[1] + 1).unsqueeze(0).expand(len(log_seqs), -1)
        seqs = self.drop(seqs + self.pos_emb(places * (log_seqs != 0).long()))
        hidden = ~torch.tril(torch.ones(seqs.shape[1], seqs.shape[1], dtype=torch.bool)DIAGONAL)
        for norm1, attend, norm2, forward in zip(self.norms1, self.attention, self.norms2, self.forwards):
            y = norm1(seqs)
            seqs = seqs + attend(y, y, y, attn_mask=hidden)[0]
            seqs = seqs + forward(norm2(seqs))
        return self.last_norm(seqs)

    def forward(self, log_seqs, pos_seqs, neg_seqs):
        features = self.log2feats(log_seqs)
        positive, negative = self.item_emb(pos_seqs.to(self.dev)), self.item_emb(neg_seqs.to(self.dev))
        return (features * positive).sum(dim=-1), (features * negative).sum(dim=-1)
"""
WIDE = """
class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, d_model, 2).float() / d_model))

    def rotated(self, x):
        angles = torch.arange(x.size(1))[:, None] * self.inv_freq
        one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
        both = one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()
        return torch.stack(both, -1).flatten(-2)

    def forward(self, x):
        q, k, v = self.rotated(self.q(x)), KEYS, self.v(x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))
"""
NEVER = """
class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        future = (x.new_ones(x.size(1), x.size(1)) == 0).triu(1)
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(future, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


# Positions for all patches and for a token before them, which are no fewer for shorter images.
PATCHES = """
class Model(nn.Module):
    def __init__(self, input_dim=12, d_model=24, n_heads=2, max_len=15):
        super().__init__()
        self.embed, self.head = nn.Linear(input_dim, d_model), nn.Linear(d_model, 5)
        self.first = nn.Parameter(torch.zeros(1, 1, d_model))
        self.places = nn.Parameter(torch.zeros(1, max_len + 1, d_model))
        self.layer = nn.TransformerEncoderLayer(d_model, n_heads, 2 * d_model, batch_first=True)

    def forward(self, x):
        x = torch.cat((self.first.expand(len(x), -1, -1), self.embed(x)), dim=1) + self.places
        return self.head(self.layer(x)[:, 0])
"""

EMBEDDED = """
class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width, self.embed = config.hidden_size, nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(self.width, config.num_attention_heads, 2 * self.width, batch_first=True)
            for _ in range(config.num_hidden_layers)
        )

    def get_input_embeddings(self):
        return self.embed

    def forward(self, attention_mask=None, position_ids=None, inputs_embeds=None, cache=None):
        x = inputs_embeds
        x = x * self.width**0.5 + self.places(position_ids)
        for layer in self.layers:
            x = layer(TAKEN, attention_mask)
        return x
"""

HANDED = """
class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x, memory, mask):
        x = self.norms[0](x + self.attention(x, x, x, attn_mask=mask)[0])
        x = self.norms[1](x + self.cross(x, memory, memory)[0])
        return self.norms[2](x + self.feed_forward(x))


class Stack(nn.Module):
    def __init__(self, width: int, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks, self.norm = blocks, nn.LayerNorm(width)

    def forward(self, x, memory, mask):
        for block in self.blocks:
            x = block(x, memory, mask)
        return LAST


class Translator(nn.Module):
    def __init__(self, encoder: nn.TransformerEncoder, stack: Stack, source, target, head: nn.Linear) -> None:
        super().__init__()
        self.encoder, self.stack, self.source, self.target, self.head = encoder, stack, source, target, head

    def encode(self, src):
        return self.encoder(self.source(src))

    def decode(self, encoder_output, tgt, tgt_mask):
        return self.stack(self.target(tgt), encoder_output, tgt_mask)

    def project(self, x):
        return self.head(x)


def assemble(words: int, width: int = 512, layers: int = 6, heads: int = 8) -> Translator:
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True)
    stack = Stack(width, nn.ModuleList(Block(width, heads) for _ in range(layers)))
    embeds = (nn.Embedding(words, width) for _ in range(2))
    return Translator(nn.TransformerEncoder(layer, layers), stack, *embeds, nn.Linear(width, words))
"""
TURNED = """
class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(width, heads), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y)[0]
        return x + self.feed_forward(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self, vocab_size, width, heads, classes):
        super().__init__()
        self.embed, self.layer, self.head = (
            nn.Embedding(vocab_size, width), Layer(width, heads), nn.Linear(width, classes)
        )

    def forward(self, ids):
        return self.head(CALLED.mean(1))
"""
TURNS = TURNED.replace("CALLED", "self.layer(self.embed(ids).transpose(0, 1)).transpose(0, 1)")
UNREAD = "tgt_mask: The mask is accepted but never"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((CONFIG, "Attention"), (SQUARE, "SelfAttention"), (ROTARY, "Attention"), (LOCAL, "LSA")),
        *((LOGS.replace("INPLACE", "False"), "Attention"), (TEMPERED, "Attention"), (SETS, "ISAB")),
        (WINDOWS.replace("END", "x.size(1)"), "WindowedAttention"),
        *((INLINE.replace("KEYS", "k"), "Layer"), (SEQUENCES.replace("DIAGONAL", ""), "SASRec")),
        (WIDE.replace("KEYS", "self.rotated(self.k(x))"), "Attention"),
        (PATCHES, "Model"),
        (EMBEDDED.replace("TAKEN", "x"), "Model"),
        (HANDED.replace("LAST", "self.norm(x)"), "Stack"),
        (TURNS, "Layer"),
    ],
    ids=[
        *("a config with a size of its own", "the side of an image", "a part called a class", "its own key is hidden"),
        *("a log and a trainer that are not installed", "a scale that is handed on", "sets of another width"),
        *("a window", "a layer that attends itself", "items that are scored"),
        *("all heads rotated together", "a token before the patches", "what may be left out is needed"),
        *("layers that are handed over", "the length comes first"),
    ],
)
def test_it_is_built_called_and_read(text: str, name: str, tmp_path: Path) -> None:
    said = report_on(HEAD + text, name, tmp_path)
    assert said.startswith(("equal", "partial")), said


@pytest.mark.parametrize(
    ("text", "name", "shown"),
    [
        (CONFIG.replace("/ math.sqrt(k.size(-1))", "/ math.sqrt(c)"), "Attention", "divided by sqrt(embed_dim)"),
        (ROTARY.replace(", self.rope(k, token_positions)", ", k"), "Attention", "the queries but not the keys"),
        (FROZEN, "PositionalEmbedding", "the exponent of the frequencies"),
        (BANDED, "WindowAttention", "mixes tokens"),
        (CACHED.replace("FIRST", "start_pos + 1"), "Attention", "[:b, start_pos + 1 : start_pos + 1 + n] = k"),
        (LOGS.replace("INPLACE", "True"), "Attention", "backward raises"),
        (WINDOWS.replace("END", "x.size(1) - 1"), "WindowedAttention", "hides the last key"),
        (INLINE.replace("KEYS", "_"), "Layer", "rotate the queries but not the keys"),
        (SEQUENCES.replace("DIAGONAL", ", diagonal=1"), "SASRec", "sees the token after it"),
        (NEVER, "Attention", "a triangle out of a mask that hides nothing"),
        (WIDE.replace("KEYS", "self.k(x)"), "Attention", "all heads side by side, is rotated by its position"),
        (TEMPERED.replace("self.temperature).softmax", "3.7).softmax"), "Attention", "multiplied by 3.7"),
        (EMBEDDED.replace("TAKEN", "inputs_embeds"), "Model", "every layer gets the same input"),
        (HANDED.replace("LAST", "x"), "Stack", "self.blocks, self.norm"),
        (HANDED.replace("LAST", "self.norm(x)").replace("_output, tgt_mask)", "_output, None)"), "Translator", UNREAD),
        (TURNED.replace("CALLED", "self.layer(self.embed(ids))"), "Layer", "seen in Classifier, which builds"),
    ],
    ids=[
        *("the scale", "the keys stay", "a frozen table", "columns of a window", "places of a cache"),
        *("a dropout in place", "a window that ends too early", "keys of a layer stay"),
        *("items one ahead", "a mask of nothing", "keys of all heads stay", "a scale that nobody chose"),
        *("layers side by side", "the norm behind handed layers", "no forward", "batch and length"),
    ],
)  # fmt: skip
def test_its_mistake_is_found(text: str, name: str, shown: str, tmp_path: Path) -> None:
    said = report_on(HEAD + text, name, tmp_path)
    assert said.startswith("deviates"), said
    assert shown.lower() in said.lower(), said


def test_a_frozen_table_and_a_cache_may_be_right(tmp_path: Path) -> None:
    table = FROZEN.replace("torch.arange(d_model) / d_model", "(torch.arange(d_model) // 2) / d_model")
    assert report_on(HEAD + table, "PositionalEmbedding", tmp_path).startswith("equal")
    assert not report_on(HEAD + CACHED.replace("FIRST", "start_pos"), "Attention", tmp_path).startswith("deviates")


SWITCHED = """
class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads, self.use_rope, width = cfg.n_head, cfg.use_rope, cfg.n_embd // cfg.n_head
        self.qkv, self.out = nn.Linear(cfg.n_embd, 3 * cfg.n_embd), nn.Linear(cfg.n_embd, cfg.n_embd)
        if self.use_rope:
            angles = torch.outer(torch.arange(64.0), 10000.0 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

    def rotated(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cos[: x.size(2)] + torch.cat((-second, first), -1) * self.sin[: x.size(2)]

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.use_rope:
            q = self.rotated(q)
            k = self.rotated(k)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
"""
DECODED = """
class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads, self.use_rope = cfg.n_head, getattr(cfg, "use_rope", False)
        self.qkv, self.out = nn.Linear(cfg.n_embd, 3 * cfg.n_embd), nn.Linear(cfg.n_embd, cfg.n_embd)

    def rotated(self, x, start):
        steps = torch.arange(0, x.size(-1), 2).to(x) / x.size(-1)
        angles = torch.outer(torch.arange(start, start + x.size(2)).to(x), 10000.0**-steps).repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def forward(self, x, layer_past=None):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        past = 0 if layer_past is None else layer_past[0].size(2)
        if self.use_rope:
            q, k = self.rotated(q, START), self.rotated(k, START)
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), 2), torch.cat((layer_past[1], v), 2)
        future = q.new_ones(q.size(2), k.size(2)).triu(1 + past).bool()
        scores = (q @ k.mT / math.sqrt(k.size(-1))).masked_fill(future, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), (k, v)
"""
BY_HAND = """
class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.asked = config
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.asked.n_head, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.asked.use_flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = x.new_ones(x.size(1), x.size(1)).triu(1).bool()
            scores = q @ k.mT / math.sqrt(k.size(-1))
            y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Config:
    def __init__(self, n_embd=24, n_head=2, use_flash=True):
        self.n_embd, self.n_head, self.use_flash = n_embd, n_head, use_flash
"""
FIELDS = """
class Config:
    def __init__(self, n_embd=24, n_head=2, use_rope=False):
        self.n_embd, self.n_head, self.use_rope = n_embd, n_head, use_rope
"""


@pytest.mark.parametrize("config", ["", FIELDS], ids=["imitated", "of the file"])
@pytest.mark.parametrize("keys", ["self.rotated(k)", "k"])
def test_a_switch_of_a_config_is_tried_the_other_way_round(tmp_path: Path, config: str, keys: str) -> None:
    text = SWITCHED.replace("k = self.rotated(k)", f"k = {keys}")
    report = verify(saved(tmp_path, HEAD + config + text, "Attention"))
    assert report.mistakes == (("rotary_queries",) if keys == "k" else ()), str(report)
    assert report.verdict == ("deviates" if keys == "k" else "equal"), str(report)


@pytest.mark.parametrize("start", ["past", "0"])
def test_a_cache_is_decoded_with_each_switch_that_a_config_may_have(tmp_path: Path, start: str) -> None:
    report = verify(saved(tmp_path, HEAD + FIELDS + DECODED.replace("START", start), "Attention"))
    assert report.verdict == ("equal" if start == "past" else "deviates"), str(report)
    assert [one.evidence.endswith("built with cfg.use_rope=True") for one in report.findings] == [True] * (start == "0")


@pytest.mark.parametrize(("width", "found"), [("k.size(-1)", ()), ("x.size(-1)", ("scale_wrong",))])
def test_a_switch_between_two_ways_to_compute_asks_for_no_other_numbers(
    tmp_path: Path, width: str, found: tuple[str, ...]
) -> None:
    text = BY_HAND.replace("math.sqrt(k.size(-1))", f"math.sqrt({width})")
    report = verify(saved(tmp_path, HEAD + text, "Attention"))
    assert (report.mistakes, report.verdict) == (found, "deviates" if found else "equal"), str(report)


WORDED = """
class Config:
    def __init__(self, n_embd=24, n_head=2, norm_position="pre"):
        self.n_embd, self.n_head, self.norm_position = n_embd, n_head, norm_position


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = getattr(config, "norm_position", "pre")
        assert self.first in ("pre", "post")
        self.attn = nn.MultiheadAttention(config.n_embd, config.n_head, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(config.n_embd, 96), nn.ReLU(), nn.Linear(96, config.n_embd))
        self.norm = nn.LayerNorm(config.n_embd)
        self.norm2 = nn.LayerNorm(config.n_embd)

    def forward(self, x):
        if self.first == "pre":
            y = self.norm(x)
            x = x + self.attn(y, y, y)[0]
            return x + self.mlp(self.norm2(x))
        y = self.norm(x + self.attn(x, x, x)[0])
        return self.norm2(STREAM + self.mlp(y))
"""


@pytest.mark.parametrize(("stream", "is_right"), [("y", True), ("x", False)])
def test_a_word_of_a_config_is_exchanged_for_the_other_that_a_layer_takes(
    tmp_path: Path, stream: str, is_right: bool
) -> None:
    report = verify(saved(tmp_path, HEAD + WORDED.replace("STREAM", stream), "Block"))
    assert (report.verdict == "equal") == is_right, str(report)
    assert is_right or "config.norm_position=post" in str(report)


KEPT = """
class Model(nn.Module):
    def __init__(self, vocab_size=23, d_model=24, n_heads=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(64, d_model)
        self.norm, self.attn = nn.LayerNorm(d_model), nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids, y=None, start=None):
        places = torch.arange(ids.size(1), device=ids.device) + (0 if start is None else start - 1)
        x = self.tokens(ids) + self.places(places)
        hidden = ids.new_ones(ids.size(1), ids.size(1)).triu(1).bool()
        z = self.norm(x)
        logits = self.head(x + self.attn(z, z, z, attn_mask=hidden, need_weights=False)[0])
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


def test_what_no_call_gives_a_model_is_listed(tmp_path: Path) -> None:
    report = verify(saved(tmp_path, HEAD + KEPT, "Model"))
    assert ([one.what for one in report.not_exercised], report.verdict) == (["start"], "partial"), str(report)
