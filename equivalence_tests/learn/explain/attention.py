"""The arguments of MultiheadAttention."""

import torch
from torch import nn

import scratch
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.entry import ATTENTION, ENCODER_LAYER, WITH_LAYERS, Explanation, drawn
from scratch import MultiheadAttention, functional, masks, paths, rounding
from scratch.attention import attend_with_weights, project, resolve_masks
from scratch.decoding import GrowingCache

__all__ = ["EXPLANATIONS", "ONE_HEAD", "PADDING"]

HEADS = """\
embed_dim = 12, num_heads = 3

feature | 0  1  2  3 | 4  5  6  7 | 8  9 10 11 |
        |   head 0   |   head 1   |   head 2   |"""

LEARNT_KEY = """\
        key 0 1 2 | learnt
query 0     1 0 0 | 1
query 1     0 1 0 | 1
query 2     0 0 1 | 1"""

ZERO_KEY = """\
        key 0 1 2 | zeros
query 0     0 0 0 | 1
query 1     0 0 0 | 1
query 2     0 0 0 | 1"""

LAYOUTS = """\
batch_first=True           batch_first=False
(batch, len, features)     (len, batch, features)

sample 0: I  like tea      place 0: I     we
sample 1: we like it       place 1: like  like
                           place 2: tea   it"""

PADDING = """\
key       I     like  tea   <pad>
mask      False False False True
may look  1     1     1     0        for every query"""

MASK_ORDER = """\
row of a 3-D mask    sample    head       batch = 2, num_heads = 3
0                    0         0
1                    0         1
2                    0         2
3                    1         0
4                    1         1
5                    1         2"""


def widths() -> None:
    attention = nn.MultiheadAttention(embed_dim=12, num_heads=3)
    print("head_dim:", attention.head_dim)
    for name, parameter in attention.named_parameters():
        print(name, tuple(parameter.shape))


def heads() -> None:
    x = torch.randn(5, 2, 12)
    for num_heads in (1, 3, 6):
        attention = nn.MultiheadAttention(12, num_heads)
        output, weights = attention(x, x, x, average_attn_weights=False)
        count = sum(parameter.numel() for parameter in attention.parameters())
        print(f"heads={num_heads}: {count} parameters, {tuple(weights.shape)}")


def dropped_weights() -> None:
    x = torch.randn(1, 4, 12)
    attention = nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True)
    output, weights = attention(x, x, x, average_attn_weights=False)
    print("head 0 in training:", weights[0, 0].detach(), sep="\n")
    output, weights = attention.eval()(x, x, x, average_attn_weights=False)
    print("head 0 in evaluation:", weights[0, 0].detach(), sep="\n")


def biases() -> None:
    for bias in (True, False):
        attention = nn.MultiheadAttention(12, 3, bias=bias)
        print(f"bias={bias}:", *attention.state_dict())


def appended_token() -> None:
    x = torch.randn(1, 3, 12)
    attention = nn.MultiheadAttention(12, 3, add_bias_kv=True, batch_first=True)
    others = ~torch.eye(3, dtype=torch.bool)  # True = may not look
    output, weights = attention(x, x, x, attn_mask=others)
    print(weights[0].detach())
    print("the learnt key:", tuple(attention.get_parameter("bias_k").shape))


def appended_zeros() -> None:
    x = torch.randn(1, 3, 12)
    nothing = torch.ones(3, 3, dtype=torch.bool)  # True = may not look
    attention = nn.MultiheadAttention(12, 3, add_zero_attn=True, batch_first=True)
    output, weights = attention(x, x, x, attn_mask=nothing)
    print(weights[0].detach())


def memory_widths() -> None:
    query = torch.randn(2, 5, 12)
    key, value = torch.randn(2, 7, 8), torch.randn(2, 7, 6)
    attention = nn.MultiheadAttention(12, 3, kdim=8, vdim=6, batch_first=True)
    output, weights = attention(query, key, value)
    print("output:", tuple(output.shape))
    print("k_proj_weight:", tuple(attention.k_proj_weight.shape))
    print("v_proj_weight:", tuple(attention.v_proj_weight.shape))


def layouts() -> None:
    x = torch.randn(2, 5, 12)  # 2 samples of 5 tokens
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    output, weights = attention(x, x, x)
    print("5 tokens look at 5:", tuple(weights.shape))
    attention = nn.MultiheadAttention(12, 3)
    output, weights = attention(x, x, x)
    print("2 tokens look at 2:", tuple(weights.shape))


def devices() -> None:
    attention = nn.MultiheadAttention(12, 3, device="meta")  # shapes, no memory
    print(attention.in_proj_weight.device, tuple(attention.in_proj_weight.shape))


def dtypes() -> None:
    attention = nn.MultiheadAttention(12, 3, dtype=torch.float64)
    x = torch.randn(5, 2, 12, dtype=torch.float64)
    output, weights = attention(x, x, x)
    print(output.dtype)


def free_key_size() -> None:
    attention = scratch.MultiheadAttention(12, 3, qk_head_dim=64, v_head_dim=4)
    print("head_dim:", attention.head_dim)
    weight = attention.get_parameter("in_proj_weight")
    print("in_proj_weight:", tuple(weight.shape), "for 2 * 3 * 64 + 3 * 4 rows")


def free_value_size() -> None:
    attention = scratch.MultiheadAttention(12, 3, qk_head_dim=4, v_head_dim=64)
    weight = attention.out_proj.weight
    print("out_proj.weight:", tuple(weight.shape), "for 3 * 64 columns")


def compared() -> None:
    query, key = torch.randn(1, 1, 12), torch.randn(1, 3, 12)
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    output, weights = attention(query, key, value=key)
    print("three keys:   ", weights[0].detach())
    key = key.flip(1)
    turned, weights = attention(query, key, value=key)
    print("in reverse:   ", weights[0].detach())
    turned, _ = attention(query, key, value=key, need_weights=False)
    print("same output:  ", torch.allclose(output, turned, atol=1e-6))


def who_looks_where() -> None:
    query, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    output, weights = attention(query, memory, memory)
    print("output:", tuple(output.shape), "weights:", tuple(weights.shape))


def equal_values() -> None:
    query, key = torch.randn(1, 5, 12), torch.randn(1, 7, 12)
    value = torch.ones(1, 7, 12)  # all the same: then the weights do not matter
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    output, weights = attention(query, key, value)
    print("all rows alike:", torch.allclose(output, output[:, :1], atol=1e-6))


def padding() -> None:
    x = torch.randn(1, 4, 12)
    is_padding = torch.tensor([[False, False, False, True]])
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    output, weights = attention(x, x, x, key_padding_mask=is_padding)
    print(weights[0].detach())


def with_and_without_weights() -> None:
    x = torch.randn(2, 5, 12)
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    output, weights = attention(x, x, x)
    print("need_weights=True: ", tuple(weights.shape))
    without, nothing = attention(x, x, x, need_weights=False)
    print("need_weights=False:", nothing)
    print("same output:", torch.allclose(output, without, atol=1e-6))


def three_masks() -> None:
    x = torch.randn(1, 3, 12)
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    hide = torch.ones(3, 3, dtype=torch.bool).triu(1)  # True = may not look
    output, weights = attention(x, x, x, attn_mask=hide)
    print("bool, True = may not look:", weights[0].detach(), sep="\n")
    distance = (torch.arange(3.0)[:, None] - torch.arange(3.0)).abs()
    output, weights = attention(x, x, x, attn_mask=-2 * distance)
    print("float, added to the scores:", weights[0].detach(), sep="\n")
    without, _ = attention(x, x, x, attn_mask=-2 * distance, need_weights=False)
    print("the same output:", torch.allclose(output, without, atol=1e-6))


def averaged() -> None:
    x = torch.randn(1, 3, 12)
    attention = nn.MultiheadAttention(12, 2, batch_first=True)
    output, average = attention(x, x, x)
    output, each = attention(x, x, x, average_attn_weights=False)
    print("the average:", average[0, 0].detach())
    print("head 0:     ", each[0, 0, 0].detach())
    print("head 1:     ", each[0, 1, 0].detach())


def promised() -> None:
    x = torch.randn(1, 5, 12)
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
    masked, _ = attention(x, x, x, attn_mask=causal, need_weights=False)
    masks = {"attn_mask": causal, "is_causal": True}
    hinted, _ = attention(x, x, x, **masks, need_weights=False)
    same = torch.allclose(masked, hinted, atol=1e-6)
    print("a true promise changes nothing:", same)


def remembered() -> None:
    tokens, cache = torch.randn(1, 5, 12), GrowingCache()
    attention = scratch.MultiheadAttention(12, 3, batch_first=True)
    for token in tokens.split(1, dim=1):
        output, weights = attention(token, token, token, cache=cache)
        print("keys:", cache.length, " weights:", tuple(weights.shape))
    at_once, _ = attention(tokens, tokens, tokens)
    print("same last output:", torch.allclose(output, at_once[:, -1:], atol=1e-6))


ONE_HEAD = Place(MultiheadAttention.__init__, "self.head_dim =")
PACKED = Place(MultiheadAttention._register_parameters, 'register("in_proj_weight"')
ALWAYS_SEEN = Place(resolve_masks, "# the appended tokens are always seen")
SEQUENCE_FIRST = Place(rounding.sequence_first, "if not batch_first")
BACK_AGAIN = Place(MultiheadAttention.forward, "if self.batch_first else output")

EXPLANATIONS = (
    Explanation(
        "embed_dim",
        (ATTENTION,),
        "The width of the queries and of the output. Keys and values have the same width unless kdim and vdim say "
        "otherwise. The heads share it: each works on embed_dim / num_heads features.",
        (ONE_HEAD, PACKED),
        widths,
        HEADS,
    ),
    Explanation(
        "num_heads",
        (ATTENTION,),
        "How many attentions run side by side. Each works on its own slice of the features, so the number must "
        "divide embed_dim. The number of parameters does not depend on it.",
        (
            ONE_HEAD,
            Place(functional.split_heads, "return x.unflatten"),
            Place(functional.merge_heads, "return context"),
        ),
        heads,
        HEADS,
    ),
    Explanation(
        "dropout",
        (ATTENTION,),
        "The probability of dropping a weight in training. A dropped weight is 0, and the others are divided by 1 - "
        "dropout to make up for it. Only the attention weights are dropped.",
        (Place(MultiheadAttention._attend, "self.dropout if self.training"), Place(paths.weigh, "F.dropout")),
        dropped_weights,
    ),
    Explanation(
        "bias",
        (ATTENTION,),
        "Whether the projections of query, key, value and output each add a learnt vector. The vectors start at 0.",
        (
            Place(MultiheadAttention._register_parameters, 'register("in_proj_bias"'),
            Place(MultiheadAttention._register_parameters, "self.out_proj ="),
            Place(MultiheadAttention._reset_parameters, "if self.in_proj_bias is not None"),
        ),
        biases,
    ),
    Explanation(
        "add_bias_kv",
        (ATTENTION,),
        "Appends one learnt token to the keys and values. It comes after the projected ones and is the same for "
        "every sample, and every query may look at it, whatever the masks say. In the example, each query may "
        "otherwise look only at itself.",
        (
            Place(MultiheadAttention._register_parameters, 'register("bias_k"'),
            Place(MultiheadAttention._split, "if self.bias_k is not None"),
            ALWAYS_SEEN,
        ),
        appended_token,
        f"who may look in the example below:\n\n{LEARNT_KEY}",
    ),
    Explanation(
        "add_zero_attn",
        (ATTENTION,),
        "Appends one token of zeros to the keys and values. It comes after the projected ones. A query that may "
        "look at nothing else looks there and gets 0 instead of NaN; every other query gives it some weight too.",
        (
            Place(MultiheadAttention._split, "if self.add_zero_attn"),
            ALWAYS_SEEN,
        ),
        appended_zeros,
        f"who may look in the example below:\n\n{ZERO_KEY}",
    ),
    Explanation(
        "kdim",
        (ATTENTION,),
        "The width of the incoming keys. It defaults to embed_dim. With another width, the three projections are "
        "three matrices instead of one packed matrix.",
        (
            Place(MultiheadAttention.__init__, "if kdim is None"),
            Place(MultiheadAttention._register_parameters, "self.kdim"),
        ),
        memory_widths,
    ),
    Explanation(
        "vdim",
        (ATTENTION,),
        "The width of the incoming values. It defaults to embed_dim. With another width, the three projections are "
        "three matrices instead of one packed matrix.",
        (
            Place(MultiheadAttention.__init__, "if vdim is None"),
            Place(MultiheadAttention._register_parameters, "self.vdim"),
        ),
        memory_widths,
    ),
    Explanation(
        "batch_first",
        (ATTENTION, *WITH_LAYERS),
        "Whether the batch is the first axis or the second. True reads (batch, len, features); False, the default, "
        "reads (len, batch, features). Inputs and output have the same layout; masks and weights always have the "
        "batch first.",
        (SEQUENCE_FIRST, BACK_AGAIN),
        layouts,
        LAYOUTS,
    ),
    Explanation(
        "device",
        (ATTENTION, *WITH_LAYERS),
        "Where the parameters are created. The inputs must be on the same device.",
        (Place(MultiheadAttention._register_parameters, "return nn.Parameter("),),
        devices,
    ),
    Explanation(
        "dtype",
        (ATTENTION, *WITH_LAYERS),
        "The floating-point dtype of the parameters. The inputs must have it too, except under autocast.",
        (Place(MultiheadAttention._register_parameters, "return nn.Parameter("),),
        dtypes,
    ),
    Explanation(
        "qk_head_dim",
        (ATTENTION,),
        "The paper's d_k: the width of the queries and keys of each head. torch.nn has no such argument: it always "
        "uses embed_dim / num_heads. A query is compared with a key, so the two share one size.",
        (ONE_HEAD, PACKED),
        free_key_size,
    ),
    Explanation(
        "v_head_dim",
        (ATTENTION,),
        "The paper's d_v: the width of the values of each head. torch.nn has no such argument: it always uses "
        "embed_dim / num_heads. out_proj takes all heads together back to embed_dim.",
        (
            Place(MultiheadAttention.__init__, "self._given_widths ="),
            Place(MultiheadAttention._register_parameters, "self.out_proj ="),
        ),
        free_value_size,
    ),
    Explanation(
        "query",
        (ATTENTION,),
        "Who looks. Each query gets one row of the output. In self-attention it is the same tensor as key and "
        "value, and the three projections are then a single product.",
        (Place(project, "if not others and query is key"), SEQUENCE_FIRST),
        who_looks_where,
    ),
    Explanation(
        "key",
        (ATTENTION,),
        "What the queries are compared with. There is one score per query and key, and the order of the keys does "
        "not matter. There are as many keys as values, and there may be more or fewer of them than queries.",
        (Place(functional.attention, "scores = (q * scale) @"),),
        compared,
    ),
    Explanation(
        "value",
        (ATTENTION,),
        "What the output is made of. Each row of the output is a mean of the values, weighted by how well their "
        "keys match the query.",
        (Place(paths.weigh, "return weights @ v"),),
        equal_values,
    ),
    Explanation(
        "key_padding_mask",
        (ATTENTION,),
        "Which keys are padding: True is ignored. Its shape is (batch, key_len), one row per sample, and it applies "
        "to every query. A float mask is added to the scores instead. Padded queries are computed all the same.",
        (
            Place(resolve_masks, ".view(batch, 1, 1, key_len)"),
            Place(masks.score_bias_from_module, "masked_fill_(module_mask"),
        ),
        padding,
        PADDING,
    ),
    Explanation(
        "need_weights",
        (ATTENTION,),
        "Whether to return the weights along with the output. They then have to be written out, so torch.nn takes a "
        "slower path, on which a query that may look at nothing is NaN instead of 0.",
        (
            Place(MultiheadAttention._attend, "if need_weights"),
            Place(attend_with_weights, "context, weights = weigh"),
        ),
        with_and_without_weights,
    ),
    Explanation(
        "attn_mask",
        (ATTENTION,),
        "Who may look at whom: True means may not. Its shape is (query_len, key_len) for all, or (batch * "
        "num_heads, query_len, key_len). A float mask is added to the scores instead, where -inf hides a key.",
        (
            Place(masks.score_bias_from_module, "masked_fill_(module_mask"),
            Place(resolve_masks, "if bias is not None:"),
            Place(functional.attention, "scores + score_bias"),
        ),
        three_masks,
        f"who may look in the example below:\n\n{drawn(masks.causal(3))}\n\n{MASK_ORDER}",
    ),
    Explanation(
        "average_attn_weights",
        (ATTENTION,),
        "Whether the returned weights are averaged over the heads. If so, they are (batch, query_len, key_len); "
        "otherwise there is one map per head, (batch, num_heads, query_len, key_len). The output is the same.",
        (Place(MultiheadAttention.forward, "weights.mean(dim=1)"),),
        averaged,
    ),
    Explanation(
        "is_causal",
        (ATTENTION, ENCODER_LAYER),
        "A promise that the mask you pass is the causal one. It is not a mask: without one it is an error. If no weights "
        "are asked for and no padding mask is given, your mask is not read, and a causal one is used in its place.",
        (Place(resolve_masks, "if is_causal and key_padding_mask is None"),),
        promised,
        f"what is promised:\n\n{drawn(masks.causal(5))}",
    ),
    Explanation(
        "cache",
        (ATTENTION,),
        "The keys and values of earlier calls. This call appends its own, so that decoding token by token projects "
        "each token once. torch.nn has no such argument and recomputes the whole sentence.",
        (Place(MultiheadAttention.forward, "cache.extend("), Place(GrowingCache.extend, "_written_behind(")),
        remembered,
    ),
)
