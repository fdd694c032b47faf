"""The arguments of GroupedQueryAttention, and of SwiGLU and the layer and model that are built from both."""

import torch
from torch.nn import functional as F

import scratch
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.entry import (
    GROUPED,
    LANGUAGE_LAYER,
    LANGUAGE_MODEL,
    SWIGLU,
    Explanation,
    drawn,
)
from scratch import DecoderOnlyLayer, GroupedQueryAttention, SwiGLU, grouped, masks
from scratch.decoding import KeyValueCache

__all__ = ["EXPLANATIONS"]

WITH_HEADS = (GROUPED, LANGUAGE_LAYER, LANGUAGE_MODEL)
WITH_FEED_FORWARD = (SWIGLU, LANGUAGE_LAYER, LANGUAGE_MODEL)
EVERYWHERE = (GROUPED, SWIGLU, LANGUAGE_LAYER, LANGUAGE_MODEL)
OF_TOKENS = (GROUPED, LANGUAGE_LAYER)


def projections() -> None:
    attention = GroupedQueryAttention(embed_dim=12, num_heads=6)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        print(name, tuple(attention.get_parameter(f"{name}.weight").shape))


def groups() -> None:
    attention = GroupedQueryAttention(12, num_heads=6, num_key_heads=2)
    q, k, _ = attention.project(torch.randn(1, 5, 12))
    scores = grouped.grouped_scores(q, k)
    print(tuple(q.shape), tuple(k.shape), "->", tuple(scores.shape))
    expected = q[:, 4] @ k[:, 1].mT
    print("head 4 looks at 1:", torch.allclose(scores[:, 4], expected))


def of_a_layer() -> None:
    layer = DecoderOnlyLayer(12, nhead=6, dim_feedforward=20)
    layer(torch.randn(1, 5, 12))
    print(layer.self_attn.num_heads, "heads of", layer.self_attn.head_dim)


def biases() -> None:
    for bias in (True, False):
        layer = DecoderOnlyLayer(12, 3, 20, bias=bias)
        print(f"bias={bias}:", sum("bias" in name for name in layer.state_dict()))


def wide_heads() -> None:
    attention = GroupedQueryAttention(12, 3, head_dim=8)
    attention(torch.randn(1, 5, 12))
    print(attention.q_proj, attention.out_proj, sep="\n")


def normed() -> None:
    x = torch.randn(1, 5, 12)
    for qk_norm in (False, True):
        attention = GroupedQueryAttention(12, 3, qk_norm=qk_norm)
        q, k, _ = attention.project(100 * x)
        greatest = (q @ k.mT).abs().max().item()
        print(f"qk_norm={qk_norm}: greatest score {greatest:.2g}")


def epsilons() -> None:
    layer = DecoderOnlyLayer(12, 3, 20, norm_eps=0.01, qk_norm=True)
    print(layer.norm1, layer.self_attn.q_norm, sep="\n")


def windowed() -> None:
    x = torch.randn(1, 5, 12)
    attention = GroupedQueryAttention(12, 3, window=2)
    before = attention(x)
    x[:, 1] = 0.0  # another second token
    print("moved:", (attention(x) - before).abs().amax((0, 2)) > 0)


def capped() -> None:
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 100.0]).view(1, 1, 2, 1)
    v = torch.eye(2)[None, None]  # the output is the weights
    for soft_cap in (None, 1.0):
        attention = GroupedQueryAttention(1, 1, soft_cap=soft_cap, scale=1.0)
        weights = attention.attend(q, k, v, None, False)
        print(f"soft_cap={soft_cap}:", weights.flatten())


def with_sinks() -> None:
    attention = GroupedQueryAttention(4, 1, sinks=True)
    q = k = torch.zeros(1, 1, 3, 4)  # all scores are 0, the sink's too
    v = torch.eye(3, 4)[None, None]  # the output is the weights
    print(attention.attend(q, k, v, None, False)[0, 0, :, :3].detach())


def with_rotary() -> None:
    rotary = scratch.RotaryEmbedding(head_dim=4)
    x = torch.randn(1, 1, 12).expand(1, 5, 12)  # the same token at 5 places
    q, _, _ = GroupedQueryAttention(12, 3, rotary=rotary).project(x)
    print("rotated:", not torch.allclose(q[:, :, 0], q[:, :, 1]))
    print("as long:", torch.allclose(q[:, :, 0].norm(), q[:, :, 1].norm()))


def scaled() -> None:
    for scale in (None, 0.5):
        attention = GroupedQueryAttention(12, 3, scale=scale)
        attention(torch.randn(1, 5, 12))
        print(f"scale={scale}:", attention.scale)


def created() -> None:
    # shapes, no memory
    attention = GroupedQueryAttention(12, 3, device="meta", dtype=torch.float64)
    print(attention.q_proj.weight.device, attention.q_proj.weight.dtype)


def tokens() -> None:
    x = torch.randn(2, 5, 12)  # batch, len, embed_dim
    print(tuple(GroupedQueryAttention(12, 3)(x).shape))


def hidden_padding() -> None:
    x, padding = torch.randn(2, 5, 12), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, :2] = True
    may_attend = ~padding[:, None, None]  # of all heads and queries
    attention = GroupedQueryAttention(12, 3)
    before = attention(x, may_attend=may_attend)
    x[1, 0] = 0.0
    moved = (attention(x, may_attend=may_attend) - before).abs().amax(2) > 0
    print(moved[1])


def not_causal() -> None:
    x = torch.randn(1, 4, 12)
    attention = GroupedQueryAttention(12, 3)
    for is_causal in (True, False):
        before = attention(x, is_causal=is_causal)
        other = x.clone()
        other[:, 3] = 0.0  # another last token
        after = attention(other, is_causal=is_causal)
        print(f"is_causal={is_causal}: moved", (after != before).any(2)[0])


def cached() -> None:
    x, cache = torch.randn(1, 5, 12), KeyValueCache()
    attention = GroupedQueryAttention(12, 3)
    for token in x.split(1, dim=1):
        last = attention(token, cache=cache)
    print("as at once:", torch.allclose(last, attention(x)[:, -1:], atol=1e-6))


def gated() -> None:
    layer = SwiGLU(d_model=12, dim_feedforward=20)
    print(tuple(layer(torch.randn(2, 5, 12)).shape))
    print(layer)


def gates() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0])
    for activation in (F.silu, F.gelu, F.relu):
        layer = SwiGLU(3, 3, activation=activation)
        layer(x)
        print(activation.__name__, layer.activation(x))


def sandwiched() -> None:
    layer = DecoderOnlyLayer(12, 3, 20, sandwich_norm=True)
    layer(torch.randn(1, 5, 12))
    print([name for name, _ in layer.named_children() if "norm" in name])


PROJECTIONS = Place(GroupedQueryAttention.__init__, "self.q_proj =")
GROUPS = Place(grouped.grouped_scores, "q_of_group =")
GATES = (Place(SwiGLU.__init__, "self.gate_proj ="), Place(SwiGLU.forward, "return self.down_proj"))

EXPLANATIONS = (
    Explanation(
        "embed_dim",
        (GROUPED,),
        "The width of input and output. The projections lead from it to all heads and back.",
        (PROJECTIONS, Place(GroupedQueryAttention.__init__, "self.out_proj =")),
        projections,
    ),
    Explanation(
        "num_heads",
        (GROUPED,),
        "The number of query heads. It is a multiple of num_key_heads.",
        (PROJECTIONS, GROUPS),
        groups,
    ),
    Explanation(
        "nhead",
        (LANGUAGE_LAYER, LANGUAGE_MODEL),
        "The number of query heads, under the name that torch's layers give it.",
        (PROJECTIONS, GROUPS),
        of_a_layer,
    ),
    Explanation(
        "num_key_heads",
        WITH_HEADS,
        "The number of heads of keys and values. Query heads that follow one another share one, so that a cache holds "
        "fewer; "
        "with 1 all share it. As many as query heads if not given.",
        (Place(GroupedQueryAttention.__init__, "self.k_proj ="), GROUPS),
        groups,
        "query head   0 1 2 | 3 4 5\nlooks at       0   |   1",
    ),
    Explanation(
        "bias",
        EVERYWHERE,
        "Whether the projections have biases. Today's models have none; GPT-2 has them everywhere, Qwen 2 in the "
        "first three "
        "projections of attention.",
        (PROJECTIONS, Place(SwiGLU.__init__, "self.gate_proj =")),
        biases,
    ),
    Explanation(
        "head_dim",
        WITH_HEADS,
        "The size of each head; embed_dim / num_heads if not given. Several models use larger heads, and project "
        "back from num_heads * head_dim.",
        (PROJECTIONS, Place(GroupedQueryAttention.project, "projection(x)")),
        wide_heads,
    ),
    Explanation(
        "qk_norm",
        WITH_HEADS,
        "Divides queries and keys of each head by their root mean square, before they are rotated. Scores then stay "
        "within "
        "bounds, however large the input grows.",
        (Place(GroupedQueryAttention.project, "self.q_norm(q)"),),
        normed,
    ),
    Explanation(
        "norm_eps",
        WITH_HEADS,
        "The epsilon of the norms. In the attention alone it is that of qk_norm, in layer and model that of all.",
        (
            Place(GroupedQueryAttention.__init__, "self.q_norm ="),
            Place(DecoderOnlyLayer.__init__, "self.norm1 ="),
        ),
        epsilons,
    ),
    Explanation(
        "window",
        WITH_HEADS,
        "How many tokens a query sees, its own included. The model takes one number for all layers, or one for each "
        "with None "
        "for layers that see everything. varlen_attn counts without the query's own place.",
        (Place(grouped.who_may_attend, "masks.sliding_window("),),
        windowed,
        drawn(masks.causal(5, 5) & masks.sliding_window(5, 5, window=2)),
    ),
    Explanation(
        "soft_cap",
        WITH_HEADS,
        "Keeps scores between -soft_cap and soft_cap by a tanh, before they are masked. Gemma 2 has it. In torch "
        "it is a score_mod of flex_attention, which has no gradient on the CPU.",
        (Place(grouped.grouped_attention, "torch.tanh"),),
        capped,
    ),
    Explanation(
        "sinks",
        WITH_HEADS,
        "Learns a score for each head that takes part in the softmax and has no value. A head can thus look at "
        "nothing: its "
        "weights sum to less than 1. gpt-oss has it.",
        (Place(grouped.with_sink_key, "return torch.cat"),),
        with_sinks,
    ),
    Explanation(
        "rotary",
        OF_TOKENS,
        "Rotates queries and keys by their positions. Without it, the attention knows nothing of the order of the "
        "tokens except through the causal mask.",
        (Place(GroupedQueryAttention.project, "self.rotary(q"),),
        with_rotary,
    ),
    Explanation(
        "scale",
        WITH_HEADS,
        "The factor on the scores; 1 / sqrt(head_dim) if not given. Gemma 2 and others give another.",
        (Place(grouped.grouped_attention, "scores = grouped_scores"),),
        scaled,
    ),
    Explanation(
        "device",
        EVERYWHERE,
        "Where the parameters are created. The inputs must be on the same device.",
        (Place(GroupedQueryAttention.__init__, "factory: dict"), PROJECTIONS),
        created,
    ),
    Explanation(
        "dtype",
        EVERYWHERE,
        "The dtype of the parameters. Half precision is computed in float32 inside the attention.",
        (Place(GroupedQueryAttention.__init__, "factory: dict"), PROJECTIONS),
        created,
    ),
    Explanation(
        "x",
        OF_TOKENS,
        "The tokens, (batch, len, width): batch first, always. Queries, keys and values all come from it.",
        (Place(GroupedQueryAttention.project, "projection(x)"),),
        tokens,
    ),
    Explanation(
        "may_attend",
        OF_TOKENS,
        "True where a query may look, the opposite of torch.nn's modules. It narrows what causality and window leave. "
        "It "
        "broadcasts to (batch, num_heads, len, key_len), where with a cache the keys are all tokens so far.",
        (Place(grouped.who_may_attend, "rules.append(may_attend"),),
        hidden_padding,
    ),
    Explanation(
        "is_causal",
        OF_TOKENS,
        "No token looks at a later one, unless it is False. It is a mask, not a hint, aligned to the lower right "
        "corner: the "
        "queries are the last of the keys.",
        (Place(grouped.who_may_attend, "masks.causal("),),
        not_causal,
        drawn(masks.causal(2, 4, align="lower_right")),
    ),
    Explanation(
        "cache",
        OF_TOKENS,
        "Keys and values of earlier calls, which this call extends. x then holds the new tokens only. A cache made "
        "with a "
        "window rolls: it forgets what nobody can see.",
        (Place(GroupedQueryAttention.forward, "cache.extend"),),
        cached,
    ),
    Explanation(
        "d_model",
        WITH_FEED_FORWARD,
        "The width of input and output.",
        GATES,
        gated,
    ),
    Explanation(
        "dim_feedforward",
        WITH_FEED_FORWARD,
        "The number of hidden units. There are two projections of that width, one of which gates the other: three "
        "matrices, so models use two thirds of the width that they would have without a gate.",
        GATES,
        gated,
    ),
    Explanation(
        "activation",
        WITH_FEED_FORWARD,
        "What the gate goes through. F.silu makes it a SwiGLU, F.gelu a GEGLU, F.relu a ReGLU.",
        (Place(SwiGLU.forward, "return self.down_proj"),),
        gates,
    ),
    Explanation(
        "x",
        (SWIGLU,),
        "What is transformed, each token by itself: (..., d_model).",
        (Place(SwiGLU.forward, "return self.down_proj"),),
        gates,
    ),
    Explanation(
        "sandwich_norm",
        (LANGUAGE_LAYER, LANGUAGE_MODEL),
        "Also normalises the outputs of the attention and the feed-forward network, before they are added. Gemma 2 "
        "has it.",
        (Place(DecoderOnlyLayer.forward, "self.post_norm1"), Place(DecoderOnlyLayer.forward, "self.post_norm2")),
        sandwiched,
    ),
)
