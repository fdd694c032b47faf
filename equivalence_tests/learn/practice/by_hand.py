"""The exercises that ask for the formula, each followed elsewhere by the same with torch's own function."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.practice import calls
from equivalence_tests.learn.practice.exercise import Exercise, Mistake
from scratch import decoding, functional, layers, paths, tiling
from scratch import grouped as grouping
from scratch import masks as masking

__all__ = ["EXERCISES"]

SCORES = Place(functional.attention, "scores = (q * scale)")
BIAS = Place(functional.attention, "masked_scores =")
CAUSAL = Place(masking.causal, "offset =")


def scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scale the scores.

    A score is the dot product of a query and a key: a sum over head_dim products. Its standard deviation grows with
    sqrt(head_dim), and softmax of large scores lets one key take all the weight. Divide so that it no longer grows.

    q is (batch, heads, query_len, head_dim); k and v are (batch, heads, key_len, head_dim).
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return torch.softmax(scores, dim=-1) @ v


def padding(q: Tensor, k: Tensor, v: Tensor, is_real: Tensor) -> Tensor:
    """Hide the padding.

    is_real is (batch, key_len), bool: True for a token, False for padding. No query may look at padding: its weight
    must be exactly 0, and the weights of the others must add up to 1. Padding can stand anywhere, not only at the end.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~is_real[:, None, None, :], -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Look at no later token.

    A query may look at its own token and at earlier ones. There may be fewer queries than keys: the queries are then
    the last tokens, so that the last query sees every key.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    query_len, key_len = scores.shape[-2:]
    may_attend = torch.ones(query_len, key_len, dtype=torch.bool).tril(key_len - query_len)
    scores = scores.masked_fill(~may_attend, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def dropout(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, training: bool) -> Tensor:
    """Drop some of the weights.

    In training, each weight is set to 0 with probability dropout_p, and the others are divided by 1 - dropout_p;
    outside of training nothing is dropped. F.dropout does both: the question is where to call it, and with what.
    """
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), dim=-1)
    weights = F.dropout(weights, dropout_p, training)
    return weights @ v


def heads(x: Tensor, attention: nn.MultiheadAttention) -> tuple[Tensor, Tensor]:
    """Split into heads, and merge them again.

    x is (batch, len, embed_dim). attention only holds the parameters: project with its in_proj_weight and in_proj_bias
    (queries, keys and values, stacked in this order), give each of its num_heads heads its own part of the features,
    attend in each, put the heads side by side, and apply its out_proj. Return the output, and the weights of each head:
    (batch, num_heads, len, len).
    """
    q, k, v = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
    q, k, v = (y.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for y in (q, k, v))
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), dim=-1)
    context = (weights @ v).transpose(1, 2).flatten(2)
    return attention.out_proj(context), weights


def blind(q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor) -> Tensor:
    """Give zeros to a query that sees no key.

    may_attend is (query_len, key_len), bool: True = may look. Some queries may look at no key at all. Softmax turns
    such a row into NaN, and one NaN spreads through a model: the output of these queries must be 0.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    weights = torch.softmax(scores.masked_fill(~may_attend, -torch.inf), dim=-1)
    weights = weights.masked_fill(~may_attend.any(-1, keepdim=True), 0.0)
    return weights @ v


def layer(x: Tensor, attention: nn.Module, feed_forward: nn.Module, norm1: nn.Module, norm2: nn.Module) -> Tensor:
    """Wire a layer, with the norms first.

    Each half of the layer adds what it computes to its input: first the attention, then the feed-forward network. Each
    reads a normalised copy of the stream, norm1 before the attention and norm2 before the feed-forward network. The
    stream itself is never normalised.
    """
    x = x + attention(norm1(x))
    return x + feed_forward(norm2(x))


def cache(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Decode with a cache.

    q, k and v are those of the new tokens only. past holds the keys and values of all earlier tokens, or is None at the
    beginning. Return the context of the new tokens, and all keys and all values so far. Several new tokens can come at
    once, and none of them may look at a later one.
    """
    if past is not None:
        k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    may_attend = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
    weights = torch.softmax(scores.masked_fill(~may_attend, -torch.inf), dim=-1)
    return weights @ v, k, v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let several heads share their keys and values.

    q is (batch, num_heads, query_len, head_dim); k and v have fewer heads, num_key_heads. Neighbouring query heads
    share a key head: with 6 query heads and 2 key heads, heads 0, 1 and 2 look at key head 0, and heads 3, 4 and 5 at
    key head 1.
    """
    shared = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), dim=-1) @ v


def online(q: Tensor, k: Tensor, v: Tensor, tile: int) -> Tensor:
    """Compute softmax in one pass, tile by tile.

    Never hold more than tile scores of a row at once. For each query, keep the largest score so far, and, relative to
    it, the sum of the exponentials and the weighted sum of the values; correct both whenever a larger score comes.
    This is what makes flash attention possible. The last tile may be smaller than the others.
    """
    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total, context = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values in zip(k.split(tile, dim=-2), v.split(tile, dim=-2), strict=True):
        scores = q @ keys.transpose(-2, -1) / math.sqrt(q.size(-1))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        correction, weights = torch.exp(top - new_top), torch.exp(scores - new_top)
        total = total * correction + weights.sum(-1, keepdim=True)
        context = context * correction + weights @ values
        top = new_top
    return context / total


EXERCISES = (
    Exercise(
        scale,
        calls.plain,
        (
            Mistake(" / math.sqrt(q.size(-1))", "", "The scores are not scaled."),
            Mistake("math.sqrt(q.size(-1))", "q.size(-1)", "Divide by the square root of head_dim."),
            Mistake("/ math", "* math", "The scores are multiplied where they should be divided."),
            Mistake("q.size(-1))", "k.size(-2))", "That is the square root of key_len: take the last axis."),
            Mistake("dim=-1", "dim=-2", "The softmax runs over the queries, not over the keys of each query."),
        ),
        (SCORES,),
        blank="q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))",
    ),
    Exercise(
        padding,
        calls.padded,
        (
            Mistake("~is_real", "is_real", "It is the other way round: only the padding is seen."),
            Mistake("-torch.inf", "0.0", "A score of 0 hides nothing: exp(0) = 1. Fill with -inf."),
            Mistake("-torch.inf", "1e-9", "1e-9 is a score of nearly 0, which hides nothing. Fill with -inf."),
            Mistake(
                "[:, None, None, :]", "[:, None, :, None]", "This hides queries; padding has to be hidden as a key."
            ),
            Mistake(
                "scores = scores.masked_fill(~is_real[:, None, None, :], -torch.inf)\n"
                "    return torch.softmax(scores, dim=-1) @ v",
                "return torch.softmax(scores, dim=-1).masked_fill(~is_real[:, None, None, :], 0.0) @ v",
                "Hidden after the softmax: padding has taken its share of the weight already, and the rest no longer "
                "adds up to 1.",
            ),
        ),
        (Place(masking.to_score_bias, "masked_fill"), BIAS),
    ),
    Exercise(
        causal,
        calls.short_queries,
        (
            Mistake(
                "tril(key_len - query_len)",
                "tril()",
                "The mask starts at the upper left: the last query should see "
                "every key. Shift the diagonal by key_len - query_len.",
            ),
            Mistake("- query_len)", "- query_len + 1)", "Off by one: every query sees the token after its own."),
            Mistake("- query_len)", "- query_len - 1)", "Off by one: no query sees its own token."),
            Mistake("tril", "triu", "It is the other way round: a query sees its own token and later ones."),
            Mistake("-torch.inf", "0.0", "A score of 0 hides nothing: exp(0) = 1. Fill with -inf."),
        ),
        (CAUSAL, Place(masking.causal, "return torch.ones")),
    ),
    Exercise(
        dropout,
        calls.dropping,
        (
            Mistake(", training)", ")", "It drops outside training too: pass training on."),
            Mistake(
                "dropout_p, training",
                "1 - dropout_p, training",
                "F.dropout takes the probability to drop, not the one to keep.",
            ),
            Mistake(
                "weights = F.dropout(weights, dropout_p, training)\n    return weights @ v",
                "return F.dropout(weights @ v, dropout_p, training)",
                "This drops numbers of the context; attention drops weights.",
            ),
            Mistake("weights = F.dropout(weights, dropout_p, training)\n    ", "", "Nothing is dropped."),
            Mistake(
                "F.dropout(weights, dropout_p, training)",
                "F.dropout(weights, dropout_p, training) * (1 - dropout_p)",
                "F.dropout has divided by 1 - dropout_p already; this undoes it.",
            ),
        ),
        (Place(functional.attention, "F.dropout"),),
    ),
    Exercise(
        heads,
        calls.multi_head,
        (
            Mistake("q, k, v = F", "k, q, v = F", "in_proj_weight holds the queries' matrix first, then the keys'."),
            Mistake(
                ".unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)",
                ".reshape(y.size(0), attention.num_heads, -1, y.size(-1) // attention.num_heads)",
                "A reshape to (batch, heads, len, head_dim) mixes tokens and heads: cut the last axis, then swap "
                "two axes.",
            ),
            Mistake(
                ".transpose(1, 2).flatten(2)",
                ".reshape(x.shape)",
                "The heads are merged without swapping their axis back: this mixes tokens and heads.",
            ),
            Mistake(
                "q.size(-1)),",
                "x.size(-1)),",
                "The scores are divided by sqrt(embed_dim): every head has only head_dim features.",
            ),
            Mistake("attention.out_proj(context)", "context", "The output projection is missing."),
        ),
        (Place(functional.split_heads, "return"), Place(functional.merge_heads, "return"), SCORES),
        outputs=("output", "weights"),
    ),
    Exercise(
        blind,
        calls.blind_rows,
        (
            Mistake(
                "    weights = weights.masked_fill(~may_attend.any(-1, keepdim=True), 0.0)\n",
                "",
                "A row of nothing but -inf is NaN after the softmax.",
            ),
            Mistake(
                "-torch.inf), dim=-1)\n    weights = weights.masked_fill(~may_attend.any(-1, keepdim=True), 0.0)",
                "-1e9), dim=-1)",
                "With -1e9 in place of -inf, a query that may look at no key looks at all of them equally.",
            ),
            Mistake(
                "~may_attend.any(-1, keepdim=True), 0.0",
                "~may_attend.any(-1, keepdim=True), 1.0",
                "Weights of 1 give such a query the sum of all values; it should get 0.",
            ),
            Mistake(
                ".any(-1", ".all(-1", "This takes every query that may not look at some key for one that sees none."
            ),
            Mistake("~may_attend, -torch.inf", "may_attend, -torch.inf", "It is the other way round: True = may look."),
        ),
        (Place(paths.softmax, "softmax("),),
    ),
    Exercise(
        layer,
        calls.one_layer,
        (
            Mistake(
                "    x = x + attention(norm1(x))\n    return x + feed_forward(norm2(x))",
                "    x = norm1(x + attention(x))\n    return norm2(x + feed_forward(x))",
                "Your norms come last (post-norm, as in the paper); this layer has them first.",
            ),
            Mistake(
                "x = x + attention(norm1(x))",
                "x = norm1(x)\n    x = x + attention(x)",
                "The stream itself is normalised: norm1 is for the copy that the attention reads.",
            ),
            Mistake("return x + feed", "return feed", "The second half does not add its input (the residual)."),
            Mistake("x = x + attention", "x = attention", "The first half does not add its input (the residual)."),
            Mistake("(norm2(x))", "(x)", "The feed-forward network reads the stream without norm2."),
        ),
        (
            Place(layers.TransformerEncoderLayer.forward, "x = x + self._sa_block(self.norm1"),
            Place(layers.TransformerEncoderLayer.forward, "return x + self._ff_block(self.norm2"),
        ),
    ),
    Exercise(
        cache,
        calls.decoding,
        (
            Mistake(
                "[past[0], k], dim=2), torch.cat([past[1], v]",
                "[k, past[0]], dim=2), torch.cat([v, past[1]]",
                "The new keys and values come after the earlier ones.",
            ),
            Mistake(
                ".tril(k.size(2) - q.size(2))",
                ".tril()",
                "With a cache the mask is aligned at the lower right: the "
                "first new token can already look at all of the past.",
            ),
            Mistake("~may_attend, -torch.inf", "~may_attend, 0.0", "A score of 0 hides nothing: exp(0) = 1."),
            Mistake(
                "(scores.masked_fill(~may_attend, -torch.inf), dim=-1)",
                "(scores, dim=-1)",
                "Several new tokens came at once, and earlier ones looked at later ones.",
            ),
            Mistake(
                "torch.cat([past[1], v], dim=2)",
                "torch.cat([past[1], v.flip(2)], dim=2)",
                "The values are not in the order of their keys.",
            ),
        ),
        (Place(decoding.KeyValueCache.extend, "k, v = torch.cat"), CAUSAL),
        outputs=("context", "keys", "values"),
    ),
    Exercise(
        grouped,
        calls.shared_keys,
        (
            Mistake(
                "k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)",
                "k.repeat(1, shared, 1, 1), v.repeat(1, shared, 1, 1)",
                "repeat() lines the key heads up as 0, 1, 0, 1, ...; neighbours share a head: 0, 0, 0, 1, 1, 1.",
            ),
            Mistake(
                "v.repeat_interleave(shared, dim=1)",
                "v.repeat(1, shared, 1, 1)",
                "The values are repeated in a different order from the keys.",
            ),
            Mistake(
                "k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)",
                "k[:, :1], v[:, :1]",
                "All heads look at the first key head.",
            ),
            Mistake(
                "k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)",
                "k.mean(1, keepdim=True), v.mean(1, keepdim=True)",
                "The key heads are averaged; each belongs to its own group of query heads.",
            ),
            Mistake(
                "math.sqrt(q.size(-1))",
                "math.sqrt(q.size(-1) * shared)",
                "Sharing keys does not change the scale: a score is still a sum over head_dim products.",
            ),
        ),
        (Place(grouping.stacked, "return"), Place(grouping.grouped_scores, "return")),
    ),
    Exercise(
        online,
        calls.tiled,
        (
            Mistake(
                "context = context * correction +",
                "context = context +",
                "The weighted sum of the values is not corrected when a larger score comes.",
            ),
            Mistake(
                "total = total * correction +",
                "total = total +",
                "The sum of the exponentials is not corrected when a larger score comes.",
            ),
            Mistake(
                "torch.maximum(top, scores.amax(-1, keepdim=True))",
                "torch.zeros_like(top)",
                "No maximum is subtracted: exponentials of large scores overflow.",
            ),
            Mistake(
                "torch.maximum(top, scores.amax(-1, keepdim=True))",
                "scores.amax(-1, keepdim=True)",
                "The maximum is that of the last tile, not the largest so far.",
            ),
            Mistake(
                "return context / total",
                "return context / weights.sum(-1, keepdim=True)",
                "Divided by the sum of the last tile, not by that of all tiles.",
            ),
        ),
        (Place(tiling._raise_maximum, "raised ="), Place(tiling._attend_rows, "weights =")),
    ),
)
