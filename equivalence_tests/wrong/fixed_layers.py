"""Wrong versions of right layers, stacks and models, each one edit: what stands between the parts, and around them."""

import inspect

from equivalence_tests.wrong import layers
from equivalence_tests.wrong.editing import Version
from equivalence_tests.wrong.sources import HEADS, WIDTH, Right, call_of, complete, sizes_of, text_of

__all__ = ["EDITS", "rights", "versions"]

HIDDEN, WORDS = 20, 31
BLOCK = {"dim": WIDTH, "heads": HEADS, "hidden": HIDDEN}
LAYER = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": HIDDEN}
ROWS = (
    ("PostNormLayer", LAYER, ("src:tokens", "src:tokens src_mask:hidden_by_itself")),
    ("PreNormBlock", BLOCK, ("x:tokens",)),
    ("GatedBlock", BLOCK, ("x:tokens",)),
    ("ScaledBlock", BLOCK, ("x:tokens",)),
    ("CrossLayer", LAYER, ("tgt:tokens memory:memory", "tgt:tokens memory:memory tgt_mask:hidden_by_itself")),
    ("Encoder", BLOCK, ("x:tokens",)),
    ("Gpt", {"vocab_size": WORDS, **BLOCK, "max_len": 32}, ("ids:words",)),
    ("Classifier", {"vocab_size": WORDS, **BLOCK, "classes": 5}, ("ids:words",)),
    ("Decoder", LAYER, ("tgt:tokens memory:memory", "tgt:tokens memory:memory tgt_mask:hidden_by_itself")),
    ("Translator", {"vocab_size": WORDS, **LAYER, "max_len": 32}, ("src:more_words tgt:words",)),
    ("Bert", {"vocab_size": WORDS, **LAYER, "max_len": 32}, ("input_ids:words",)),
    ("Vision", {"image_size": 8, "patch_size": 4, **BLOCK, "classes": 5}, ("images:picture",)),
)
# The class, what is done, what it is done to, and what stands there then.
EDITS = (
    ("PostNormLayer", "residual doubled", "src + self.dropout(attended)", "src + self.dropout(attended) + src"),
    ("PostNormLayer", "output gated by the input", "return self.norm2(", "return src.sigmoid() * self.norm2("),
    ("PostNormLayer", "feed-forward of the input", "F.relu(self.linear1(x))", "F.relu(self.linear1(src))"),
    ("PostNormLayer", "last norm dropped", "return self.norm2(", "return ("),
    ("PostNormLayer", "first norm in both places", "return self.norm2(", "return self.norm1("),
    ("PostNormLayer", "branch bent", "self.dropout(attended)", "self.dropout(attended).tanh()"),
    (
        "PostNormLayer",
        "features of the feed-forward moved",
        "F.relu(self.linear1(x))",
        "F.relu(self.linear1(x.roll(1, -1)))",
    ),
    ("PreNormBlock", "softmax of a branch", "self.mlp(self.ln_2(x))", "self.mlp(self.ln_2(x)).softmax(-1)"),
    (
        "PreNormBlock",
        "half of the features blanked before",
        "        x = x + self.attn",
        "        x = x.index_fill(-1, torch.arange(x.size(-1) // 2), 0.0)\n        x = x + self.attn",
    ),
    (
        "PreNormBlock",
        "scores less their mean",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))",
        "scores = (kept := (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)))) - kept.mean(-2, keepdim=True)",
    ),
    ("PreNormBlock", "residual doubled", "x + self.attn(", "2 * x + self.attn("),
    ("PreNormBlock", "sublayer run twice", "self.mlp(self.ln_2(x))", "self.mlp(self.mlp(self.ln_2(x)))"),
    ("PreNormBlock", "first norm in both places", "self.ln_2(x)", "self.ln_1(x)"),
    ("PreNormBlock", "normalised twice", "self.ln_2(x)", "self.ln_2(self.ln_2(x))"),
    ("PreNormBlock", "branch halved", "x + self.mlp(", "x + 0.5 * self.mlp("),
    ("PreNormBlock", "residual negated", "x = x + self.attn", "x = -x + self.attn"),
    (
        "PreNormBlock",
        "output less its mean over tokens",
        "return x + self.mlp(self.ln_2(x))",
        "x = x + self.mlp(self.ln_2(x))\n        return x - x.mean(1, keepdim=True)",
    ),
    ("PreNormBlock", "residual rolled along tokens", "x + self.mlp(", "x.roll(1, 1) + self.mlp("),
    ("GatedBlock", "feed-forward of the input", "self.ffn_norm(h)", "self.ffn_norm(x)"),
    ("GatedBlock", "residual of the input", "return h + self", "return x + self"),
    (
        "GatedBlock",
        "feed-forward gated by the stream",
        "return h + self.feed_forward(",
        "return h + h.sigmoid() * self.feed_forward(",
    ),
    (
        "GatedBlock",
        "gate outside of its activation",
        "F.silu(self.w1(x)) * self.w3(x)",
        "F.silu(self.w1(x) * self.w3(x))",
    ),
    ("GatedBlock", "gated by two activations", "* self.w3(x))", "* self.w3(x).tanh())"),
    ("GatedBlock", "residual left out", "h = x + self.attention", "h = self.attention"),
    (
        "GatedBlock",
        "feed-forward with positions inside",
        "F.silu(self.w1(x)) * self.w3(x)",
        "F.silu(self.w1(x)) * self.w3(x) + 0.1 * torch.arange(x.size(1))[:, None]",
    ),
    ("ScaledBlock", "first scale in both places", "self.gamma_2 *", "self.gamma_1 *"),
    ("ScaledBlock", "scale squared", "self.gamma_2 *", "self.gamma_2 * self.gamma_2 *"),
    (
        "ScaledBlock",
        "activation behind the second matrix",
        "self.fc2(F.gelu(self.fc1(self.norm2(x))))",
        "F.gelu(self.fc2(self.fc1(self.norm2(x))))",
    ),
    (
        "CrossLayer",
        "feed-forward bent at its end",
        "self.linear2(F.relu(self.linear1(x)))",
        "self.linear2(F.relu(self.linear1(x))).tanh()",
    ),
    (
        "CrossLayer",
        "feed-forward left out",
        "return self.norm3(x + self.linear2(F.relu(self.linear1(x))))",
        "return self.norm3(x)",
    ),
    ("CrossLayer", "queries of no token", "(tgt, tgt, tgt, attn", "(torch.zeros_like(tgt), tgt, tgt, attn"),
    ("CrossLayer", "values in another order", "(tgt, tgt, tgt, attn", "(tgt, tgt, tgt.flip(1), attn"),
    ("CrossLayer", "values of the decoder", "(x, memory, memory)", "(x, memory, memory * x.mean(1, keepdim=True))"),
    (
        "CrossLayer",
        "memory normalised as the stream",
        "(x, memory, memory)",
        "(x, self.norm1(memory), self.norm1(memory))",
    ),
    (
        "CrossLayer",
        "cross-attention added twice",
        "x = self.norm2(x + self.multihead_attn(x, memory, memory)[0])",
        "y = self.multihead_attn(x, memory, memory)[0]\n        x = self.norm2(x + y + y)",
    ),
    ("Encoder", "layer run twice", "x = layer(x)", "x = layer(layer(x))"),
    ("Encoder", "residual around each layer", "x = layer(x)", "x = x + layer(x)"),
    ("Encoder", "last norm left out", "return self.norm(x)", "return x"),
    (
        "Encoder",
        "input added at the end",
        "layer in self.layers:\n            x = layer(x)\n        return self.norm(x)",
        "given, layer in zip([x, x], self.layers):\n            x = layer(x)\n        return self.norm(x + given)",
    ),
    ("Encoder", "residual around the last norm", "return self.norm(x)", "return self.norm(x) + x"),
    ("Gpt", "embedding added twice", "x = self.wte(ids)", "x = self.wte(ids) + self.wte(ids)"),
    ("Gpt", "bias of a norm added", "self.head(self.ln_f(x))", "self.head(self.ln_f(x + self.ln_f.bias))"),
    ("Gpt", "last norm left out", "self.head(self.ln_f(x))", "self.head(x)"),
    ("Gpt", "logits scaled", "return self.head(", "return 0.5 * self.head("),
    ("Gpt", "positions multiplied", "self.wte(ids) + self.wpe", "self.wte(ids) * self.wpe"),
    (
        "Gpt",
        "positions from the end",
        "torch.arange(ids.size(1), device=ids.device)",
        "torch.arange(ids.size(1), device=ids.device).flip(0)",
    ),
    ("Gpt", "a norm between the blocks", "x = block(x)", "x = self.ln_f(block(x))"),
    (
        "Bert",
        "tokens moved before each layer",
        "x = layer(x)\n        return self.pooler",
        "x = layer(x.roll(1, 1))\n        return self.pooler",
    ),
    ("Vision", "patches in another order", "1, -1), x], dim=1)", "1, -1), x.flip(1)], dim=1)"),
    (
        "Translator",
        "positions added twice",
        "self.positions(self.embedding(src) * math.sqrt(self.d_model))",
        "self.positions(self.positions(self.embedding(src) * math.sqrt(self.d_model)))",
    ),
    ("Classifier", "embedding scaled by its width", "math.sqrt(self.dim)", "self.dim"),
    ("Classifier", "mean of squares", "self.encoder(x).mean(dim=1)", "self.encoder(x).pow(2).mean(dim=1)"),
    (
        "Classifier",
        "positions added twice",
        "x = x + self.positions[:, : ids.size(1)]",
        "x = x + 2 * self.positions[:, : ids.size(1)]",
    ),
)


def rights() -> tuple[Right, ...]:
    """List the right ones."""
    source = inspect.getsource(layers)
    return tuple(_right(source, *row) for row in ROWS)


def _right(source: str, name: str, arguments: dict[str, int], calls: tuple[str, ...]) -> Right:
    text = complete(text_of(source, name))
    return Right("layers", name, text, name, arguments, tuple(map(call_of, calls)), sizes_of(arguments, text))


def versions() -> list[Version]:
    """Make all wrong versions."""
    known = {right.name: right for right in rights()}
    return [_version(known[name], *edit) for name, *edit in EDITS]


def _version(right: Right, name: str, old: str, new: str) -> Version:
    before, found, after = right.text.partition(old)
    assert found, (right.name, name)
    assert old not in after, (right.name, name)
    first = before.count("\n") + 1
    return Version(right, name, before + new + after, tuple(range(first, first + new.count("\n") + 1)))
