"""The exercises that ask for torch's own way to do it, where a trap of torch.nn is the lesson."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builtin import attention as built_in
from builtin import grouped, layers, sdpa
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.practice import calls
from equivalence_tests.learn.practice.exercise import Exercise, Mistake

__all__ = ["EXERCISES"]

SDPA = Place(sdpa.scaled_dot_product_attention, "return F.scaled")
MODULE = Place(built_in.MultiheadAttention.forward, "return super()")


def scale_builtin(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Leave the scale out, with scaled_dot_product_attention.

    T5's attention is softmax(q kᵀ) v: its scores are not scaled. F.scaled_dot_product_attention scales them by
    default. Call it so that it does not.
    """
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def padding_builtin(q: Tensor, k: Tensor, v: Tensor, is_real: Tensor) -> Tensor:
    """Hide the padding, with scaled_dot_product_attention.

    is_real is (batch, key_len), bool: True for a token, False for padding. Make the attn_mask of
    F.scaled_dot_product_attention from it: what does True mean there, and which axes does it need?
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=is_real[:, None, None, :])


def causal_builtin(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Look at no later token, with scaled_dot_product_attention.

    There may be fewer queries than keys: the queries are then the last tokens, and the last query sees every key. Is
    that what is_causal=True does?
    """
    query_len, key_len = q.size(-2), k.size(-2)
    may_attend = torch.ones(query_len, key_len, dtype=torch.bool).tril(key_len - query_len)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=may_attend)


def dropout_builtin(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, training: bool) -> Tensor:
    """Drop some of the weights, with scaled_dot_product_attention.

    In training each weight is dropped with probability dropout_p, and outside of training none is. Unlike a module, a
    function does not know whether it is called in training.
    """
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p if training else 0.0)


def heads_builtin(x: Tensor, attention: nn.MultiheadAttention) -> tuple[Tensor, Tensor]:
    """Return the weights of every head, with nn.MultiheadAttention.

    x is (batch, len, embed_dim). attention was built as nn.MultiheadAttention(33, 3), with every option at its default.
    Let x attend to itself, and return the output, (batch, len, embed_dim), and the weights of each head, (batch,
    num_heads, len, len).
    """
    x = x.transpose(0, 1)
    output, weights = attention(x, x, x, average_attn_weights=False)
    return output.transpose(0, 1), weights


def masks_builtin(x: Tensor, is_real: Tensor, attention: nn.MultiheadAttention) -> Tensor:
    """Combine two masks, with nn.MultiheadAttention.

    The self-attention of a decoder: no token looks at a later one, and none at padding. is_real is (batch, len), bool:
    True for a token. attention was built with batch_first=True. What does True mean in its attn_mask and in its
    key_padding_mask?
    """
    is_later = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
    return attention(x, x, x, key_padding_mask=~is_real, attn_mask=is_later, need_weights=False)[0]


def layer_builtin(width: int, num_heads: int, ff_dim: int, num_layers: int) -> nn.Module:
    """Build an encoder with the norms first, with nn.TransformerEncoder.

    Build (do not run) num_layers layers that take (batch, len, width), have the norms first, use GELU, drop nothing
    even in training, and are followed by one more LayerNorm: an encoder whose norms come first needs it, because
    nothing else normalises the stream at its end.
    """
    layer = nn.TransformerEncoderLayer(
        width, num_heads, ff_dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)


def cache_builtin(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Decode with a cache, with scaled_dot_product_attention.

    q, k and v are those of the new tokens only. past holds the keys and values of all earlier tokens, or is None at the
    beginning. Return the context of the new tokens, and all keys and all values so far. One new token may come, or
    several at once, of which none may look at a later one.
    """
    if past is not None:
        k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
    may_attend = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=may_attend), k, v


def grouped_builtin(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let several heads share their keys and values, with scaled_dot_product_attention.

    q has more heads than k and v. Neighbouring query heads share a key head: with 6 query heads and 2 key heads, heads
    0, 1 and 2 look at key head 0. There is an argument for this; nothing needs to be repeated.
    """
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def online_builtin(q: Tensor, k: Tensor, v: Tensor, split: int) -> Tensor:
    """Merge two halves, with flex_attention.

    Attend to the first split keys, and then to the rest, with two calls of flex_attention, and merge the two results
    into what one call over all keys gives. Besides the output, each call can return lse, the logarithm of the sum of
    the exponentials of a row's scores: return_aux=AuxRequest(lse=True). This is how attention is split across machines.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    first, of_first = flex_attention(q, k[:, :, :split], v[:, :, :split], return_aux=AuxRequest(lse=True))
    rest, of_rest = flex_attention(q, k[:, :, split:], v[:, :, split:], return_aux=AuxRequest(lse=True))
    share = torch.sigmoid(of_first.lse - of_rest.lse)[..., None]
    return share * first + (1 - share) * rest


WHOLE_MASK = "\n    may_attend = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))"

EXERCISES = (
    Exercise(
        scale_builtin,
        calls.plain,
        (
            Mistake(", scale=1.0", "", "Left to itself, the function divides by sqrt(head_dim)."),
            Mistake(
                "scale=1.0",
                "scale=math.sqrt(q.size(-1))",
                "scale replaces 1 / sqrt(head_dim); the two are not multiplied.",
            ),
            Mistake(
                "(q, k, v, scale=1.0)",
                "(q / math.sqrt(q.size(-1)), k, v)",
                "The queries were scaled already, and the function scales them again.",
                "sdpa_scaled_twice",
            ),
            Mistake("scale=1.0", "scale=0.0", "scale is a factor: 0 makes all scores equal, 1 leaves them unscaled."),
            Mistake("scale=1.0", "is_causal=True, scale=1.0", "is_causal hides later keys, which nobody asked for."),
        ),
        (SDPA,),
    ),
    Exercise(
        padding_builtin,
        calls.padded,
        (
            Mistake(
                "=is_real",
                "=~is_real",
                "True means that a query may look here; in nn.MultiheadAttention it means that it may not.",
                "mask_polarity",
            ),
            Mistake(
                "=is_real[:, None, None, :]",
                "=is_real[:, None, None, :].to(q.dtype)",
                "A float mask is added to the scores: 0.0 and 1.0 hide nothing.",
                "float_mask_added",
            ),
            Mistake(
                "[:, None, None, :]",
                "[:, None, :, None]",
                "This hides queries; padding has to be hidden as a key, on the last axis.",
            ),
            Mistake(
                "=is_real[:, None, None, :]",
                "=is_real",
                "(batch, key_len) would be read as (query_len, key_len): give it axes for heads and queries.",
                "sdpa_padding_mask_axes",
            ),
            Mistake(
                "(q, k, v, attn_mask=is_real[:, None, None, :])",
                "(q, k * is_real[:, None, :, None], v)",
                "A key of zeros gets a score of 0, and exp(0) = 1: it still takes its share of the weight.",
            ),
        ),
        (SDPA,),
    ),
    Exercise(
        causal_builtin,
        calls.short_queries,
        (
            Mistake(
                "attn_mask=may_attend",
                "is_causal=True",
                "is_causal is aligned at the upper left: the first of these queries sees only one key.",
                "sdpa_top_left",
            ),
            Mistake(", attn_mask=may_attend", "", "Nothing is hidden."),
            Mistake(
                "=may_attend)",
                "=~may_attend)",
                "True means that a query may look here; in nn.MultiheadAttention it means that it may not.",
                "mask_polarity",
            ),
            Mistake(
                "=may_attend)",
                "=may_attend.to(q.dtype))",
                "A float mask is added to the scores: 0.0 and 1.0 hide nothing.",
                "float_mask_added",
            ),
            Mistake("- query_len)", "- query_len + 1)", "Off by one: every query sees the token after its own."),
        ),
        (SDPA,),
    ),
    Exercise(
        dropout_builtin,
        calls.dropping,
        (
            Mistake(
                " if training else 0.0",
                "",
                "The function drops in evaluation too: it has no training mode.",
                "sdpa_dropout_in_eval",
            ),
            Mistake("dropout_p if", "1 - dropout_p if", "dropout_p is the probability to drop, not the one to keep."),
            Mistake(", dropout_p=dropout_p if training else 0.0", "", "Nothing is dropped."),
            Mistake(
                "F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p if training else 0.0)",
                "F.dropout(F.scaled_dot_product_attention(q, k, v), dropout_p, training)",
                "This drops numbers of the output; attention drops weights.",
            ),
            Mistake("if training else 0.0", "if not training else 0.0", "It drops in evaluation, and not in training."),
        ),
        (SDPA,),
    ),
    Exercise(
        heads_builtin,
        calls.multi_head,
        (
            Mistake(
                "    x = x.transpose(0, 1)\n    output, weights = attention(x, x, x, average_attn_weights=False)\n"
                "    return output.transpose(0, 1), weights",
                "    return attention(x, x, x, average_attn_weights=False)",
                "Unless it is built with batch_first=True, the module takes (len, batch, embed_dim): here samples "
                "attended to each other.",
                "batch_first_default",
            ),
            Mistake(
                ", average_attn_weights=False",
                "",
                "By default the weights are averaged over the heads.",
                "weights_averaged",
            ),
            Mistake(
                "average_attn_weights=False", "need_weights=False", "need_weights=False gives None for the weights."
            ),
            Mistake(
                "output.transpose(0, 1), weights",
                "output, weights",
                "The output is still (len, batch, embed_dim): transpose it back.",
            ),
            Mistake(
                "output.transpose(0, 1), weights",
                "output.transpose(0, 1), weights.transpose(-2, -1)",
                "The weights are (..., query, key) already: each row adds up to 1.",
            ),
        ),
        (MODULE,),
        outputs=("output", "weights"),
    ),
    Exercise(
        masks_builtin,
        calls.two_masks,
        (
            Mistake(
                "key_padding_mask=~is_real",
                "key_padding_mask=is_real",
                "In nn.MultiheadAttention True means padding: only the padding is looked at.",
                "mask_polarity",
            ),
            Mistake(
                ".triu(1)",
                ".tril()",
                "In nn.MultiheadAttention True means that a query may not look: this hides the earlier tokens.",
                "mask_polarity",
            ),
            Mistake("key_padding_mask=~is_real, ", "", "Padding is looked at."),
            Mistake(", attn_mask=is_later", "", "Later tokens are looked at."),
            Mistake(
                ".triu(1)", ".triu()", "Off by one: a token may not look at itself, and the first sees nothing (NaN)."
            ),
        ),
        (MODULE,),
    ),
    Exercise(
        layer_builtin,
        calls.encoder_sizes,
        (
            Mistake(", norm_first=True", "", "By default the norms come last, as in the paper of 2017."),
            Mistake(
                " batch_first=True,",
                "",
                "Unless it is built with batch_first=True, the layer takes "
                "(len, batch, width): samples attend to each other.",
                "batch_first_default",
            ),
            Mistake(' activation="gelu",', "", "The activation is ReLU unless another is named."),
            Mistake(
                " dropout=0.0,", "", "By default a layer drops 10 % in training, in four places.", "dropout_by_default"
            ),
            Mistake(
                "norm=nn.LayerNorm(width), ",
                "",
                "There is no LayerNorm at the end: nn.TransformerEncoder adds none by itself.",
            ),
        ),
        (Place(layers.TransformerEncoderLayer.__init__, "super().__init__"),),
        use=calls.run_encoder,
    ),
    Exercise(
        cache_builtin,
        calls.decoding,
        (
            Mistake(
                "attn_mask=may_attend",
                "is_causal=True",
                "is_causal is aligned at the upper left: a single new token sees only the very first key.",
                "sdpa_top_left",
            ),
            Mistake(
                "attn_mask=may_attend",
                "is_causal=past is None",
                "That is right for the prompt and for single tokens; "
                "of several new tokens, earlier ones look at later ones.",
            ),
            Mistake(", attn_mask=may_attend", "", "Nothing is hidden: the tokens of the prompt look at later ones."),
            Mistake(
                "=may_attend)",
                "=~may_attend)",
                "True means that a query may look here; in nn.MultiheadAttention it means that it may not.",
                "mask_polarity",
            ),
            Mistake(
                "[past[0], k], dim=2), torch.cat([past[1], v]",
                "[k, past[0]], dim=2), torch.cat([v, past[1]]",
                "The new keys and values come after the earlier ones.",
            ),
        ),
        (SDPA,),
        outputs=("context", "keys", "values"),
    ),
    Exercise(
        grouped_builtin,
        calls.shared_keys,
        (
            Mistake(
                "(q, k, v, enable_gqa=True)",
                "(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))",
                "repeat() lines the key heads up as 0, 1, 0, 1, ...; neighbours share a head: 0, 0, 0, 1, 1, 1.",
                "grouped_heads_tiled",
            ),
            Mistake(", enable_gqa=True", "", "The function does not share heads unless enable_gqa=True."),
            Mistake(
                "(q, k, v, enable_gqa=True)",
                "(q, k[:, :1], v[:, :1], enable_gqa=True)",
                "All heads look at the first key head.",
            ),
            Mistake(
                "(q, k, v, enable_gqa=True)",
                "(q, k, v.repeat_interleave(3, dim=1).roll(1, dims=1), enable_gqa=True)",
                "The values are shared by different heads from the keys.",
            ),
            Mistake(
                "enable_gqa=True",
                "is_causal=True, enable_gqa=True",
                "is_causal hides later keys, which nobody asked for.",
            ),
        ),
        (Place(grouped.grouped_attention, "return F.scaled"),),
    ),
    Exercise(
        online_builtin,
        calls.halves,
        (
            Mistake(
                "torch.sigmoid(of_first.lse - of_rest.lse)[..., None]",
                "0.5",
                "This is the plain mean: each half should weigh as much as the exponentials it holds.",
            ),
            Mistake(
                "torch.sigmoid(of_first.lse - of_rest.lse)[..., None]",
                "split / k.size(2)",
                "Weight the halves by the exponentials they hold, not by their numbers of keys.",
            ),
            Mistake("of_first.lse - of_rest.lse", "of_rest.lse - of_first.lse", "The two shares are swapped."),
            Mistake(
                "torch.sigmoid(of_first.lse - of_rest.lse)",
                "(of_first.lse / (of_first.lse + of_rest.lse))",
                "lse is a logarithm: take exp of it, or a sigmoid of the difference.",
            ),
            Mistake(
                "share * first + (1 - share) * rest",
                "first + rest",
                "Each half's weights add up to 1: their sum counts every row twice.",
            ),
        ),
        (Place(grouped._capped_attention, "context, aux ="),),
    ),
)
