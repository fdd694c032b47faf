"""The arguments of the two layers, and of what hands them on: TransformerEncoder, TransformerDecoder, Transformer."""

import torch
from torch import nn

import scratch
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.attention import ONE_HEAD, PADDING
from equivalence_tests.learn.explain.entry import (
    DECODER_LAYER,
    DECODERS,
    ENCODER,
    ENCODER_LAYER,
    ENCODERS,
    TRANSFORMER,
    WITH_LAYERS,
    Explanation,
    drawn,
)
from scratch import MultiheadAttention, Transformer, TransformerDecoderLayer, TransformerEncoderLayer, masks
from scratch.attention import resolve_masks
from scratch.decoding import LayerCache

__all__ = ["EXPLANATIONS"]

NORMS = """\
post-norm, the default               pre-norm, norm_first=True

x = norm1(x + attention(x))          x = x + attention(norm1(x))
x = norm2(x + feedforward(x))        x = x + feedforward(norm2(x))"""

FEED_FORWARD = """\
d_model         dim_feedforward             d_model
12 -> linear1 -> 20 -> activation -> 20 -> linear2 -> 12"""

CROSS = """\
          memory 0 1 2 3 4 5 6
target 0         1 1 1 1 1 1 0
target 1         1 1 1 1 1 1 1
target 2         1 1 1 1 1 1 1"""


def widths() -> None:
    layer = nn.TransformerEncoderLayer(d_model=12, nhead=3, dim_feedforward=20)
    for name in ("self_attn.in_proj_weight", "linear1.weight", "norm1.weight"):
        print(name, tuple(layer.get_parameter(name).shape))


def heads() -> None:
    layer = nn.TransformerEncoderLayer(d_model=12, nhead=3)
    attention = layer.self_attn
    print("heads:", attention.num_heads, " features in each:", attention.head_dim)


def hidden_widths() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, dim_feedforward=20)
    for part in (layer.linear1, layer.linear2):
        part.register_forward_hook(lambda part, _, y: print(part, tuple(y.shape)))
    layer(torch.randn(5, 2, 12))


def all_dropped() -> None:
    x = torch.randn(5, 2, 12)
    layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=1.0, norm_first=True)
    print("in training only the residual is left:", torch.equal(layer(x), x))
    print("in evaluation more:", not torch.equal(layer.eval()(x), x))


def activations() -> None:
    hidden = torch.tensor([-1.0, 0.0, 2.0])
    for activation in ("relu", "gelu", torch.tanh):
        layer = nn.TransformerEncoderLayer(12, 3, 20, activation=activation)
        layer(torch.randn(5, 2, 12))
        print(layer.activation(hidden))


def epsilons() -> None:
    x = torch.tensor([0.1, -0.1] * 6)
    for eps in (1e-5, 0.03):
        layer = nn.TransformerEncoderLayer(12, 3, 20, layer_norm_eps=eps)
        print(f"layer_norm_eps={eps}:", layer.norm1(x)[:2].detach())


def pre_and_post_norm() -> None:
    x = 100 * torch.randn(5, 2, 12)
    for norm_first in (False, True):
        layer = nn.TransformerEncoderLayer(12, 3, 20, norm_first=norm_first)
        spread = layer.eval()(x).std().item()
        print(f"norm_first={norm_first}: spread of the output {spread:.1f}")


def biases() -> None:
    for bias in (True, False):
        layer = nn.TransformerEncoderLayer(12, 3, 20, bias=bias)
        biases = [name for name in layer.state_dict() if "bias" in name]
        print(f"bias={bias}:", *biases, sep="\n  ")


def free_key_size() -> None:
    layer = scratch.TransformerDecoderLayer(12, 3, 20, qk_head_dim=64)
    for attention in (layer.self_attn, layer.multihead_attn):
        weight = attention.get_parameter("in_proj_weight")
        print("in_proj_weight:", tuple(weight.shape), "for 3 * 132 rows")


def free_value_size() -> None:
    layer = scratch.TransformerDecoderLayer(12, 3, 20, v_head_dim=64)
    for attention in (layer.self_attn, layer.multihead_attn):
        print("out_proj.weight:", tuple(attention.out_proj.weight.shape))


def source_in_output_out() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
    src = torch.randn(2, 7, 12)  # 2 sentences of 7 tokens
    print(tuple(layer(src).shape))


def source_masked() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval()
    src, place = torch.randn(1, 4, 12), torch.arange(4)
    hide = (place[:, None] - place).abs() > 1  # True = may not look
    before = layer(src, src_mask=hide)
    src[:, 3] = 0.0  # another last token
    change = (layer(src, src_mask=hide) - before).abs().amax(dim=(0, 2))
    print("change of each output:", change.detach())


def source_padded() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval()
    src = torch.randn(1, 4, 12)
    is_padding = torch.tensor([[False, False, False, True]])
    before = layer(src, src_key_padding_mask=is_padding)
    src[:, 3] = 0.0  # other padding
    after = layer(src, src_key_padding_mask=is_padding)
    change = (after - before).abs().amax(dim=(0, 2))
    print("change of each output:", change.detach())


def target_and_memory() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True)
    tgt, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    print(tuple(layer(tgt, memory).shape))


def memory_matters() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True).eval()
    tgt, memory = torch.randn(1, 3, 12), torch.randn(1, 7, 12)
    output = layer(tgt, memory)
    another = layer(tgt, torch.randn(1, 7, 12))
    backwards = layer(tgt, memory.flip(1))
    change = (another - output).abs().max().item()
    print(f"another memory changes the output by {change:.2f}")
    same = torch.allclose(output, backwards, atol=1e-6)
    print("its order does not matter:", same)


def target_masked() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True).eval()
    tgt, memory = torch.randn(1, 4, 12), torch.randn(1, 7, 12)
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)  # True = may not look
    before = layer(tgt, memory, tgt_mask=causal)
    tgt[:, 3] = 0.0  # another last token
    change = (layer(tgt, memory, tgt_mask=causal) - before).abs().amax(dim=(0, 2))
    print("change of each output:", change.detach())


def memory_masked() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True).eval()
    tgt, memory = torch.randn(1, 3, 12), torch.randn(1, 7, 12)
    hide = torch.zeros(3, 7, dtype=torch.bool)
    hide[0, 6] = True  # target 0 may not look at the memory's last token
    before = layer(tgt, memory, memory_mask=hide)
    memory[:, 6] = 0.0  # another last token
    after = layer(tgt, memory, memory_mask=hide)
    change = (after - before).abs().amax(dim=(0, 2))
    print("change of each output:", change.detach())


def target_padded() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True).eval()
    tgt, memory = torch.randn(1, 4, 12), torch.randn(1, 7, 12)
    is_padding = torch.tensor([[False, False, False, True]])
    before = layer(tgt, memory, tgt_key_padding_mask=is_padding)
    tgt[:, 3] = 0.0  # other padding
    change = (layer(tgt, memory, tgt_key_padding_mask=is_padding) - before).abs()
    print("change of each output:", change.amax(dim=(0, 2)).detach())


def memory_padded() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True).eval()
    tgt, memory = torch.randn(1, 3, 12), torch.randn(1, 7, 12)
    is_padding = torch.tensor([[False] * 5 + [True] * 2])
    before = layer(tgt, memory, memory_key_padding_mask=is_padding)
    memory[is_padding] = 0.0  # other padding
    after = layer(tgt, memory, memory_key_padding_mask=is_padding)
    print("padding has no say:", torch.equal(before, after))


def target_promised() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True).eval()
    tgt, memory = torch.randn(1, 5, 12), torch.randn(1, 7, 12)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
    masked = layer(tgt, memory, tgt_mask=causal)
    hinted = layer(tgt, memory, tgt_mask=causal, tgt_is_causal=True)
    same = torch.allclose(masked, hinted, atol=1e-6)
    print("a true promise changes nothing:", same)


def memory_promised() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True).eval()
    tgt, memory = torch.randn(1, 5, 12), torch.randn(1, 7, 12)
    causal = torch.ones(5, 7, dtype=torch.bool).triu(1)  # True = may not look
    masked = layer(tgt, memory, memory_mask=causal)
    hinted = layer(tgt, memory, memory_mask=causal, memory_is_causal=True)
    same = torch.allclose(masked, hinted, atol=1e-6)
    print("a true promise changes nothing:", same)


def remembered() -> None:
    layer = scratch.TransformerDecoderLayer(12, 3, 20, batch_first=True).eval()
    tgt, memory = torch.randn(1, 5, 12), torch.randn(1, 7, 12)
    cache = LayerCache()
    for token in tgt.split(1, dim=1):
        output = layer(token, memory, cache=cache)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)  # True = may not look
    at_once = layer(tgt, memory, tgt_mask=causal)
    print("same last output:", torch.allclose(output, at_once[:, -1:], atol=1e-6))


SELF_ATTENTION = Place(TransformerEncoderLayer.__init__, "self.self_attn = ")
BOTH_ATTENTIONS = Place(TransformerDecoderLayer.__init__, "return MultiheadAttention(")
FEED_FORWARD_BLOCK = Place(TransformerEncoderLayer._ff_block, "self.linear1(")
ENCODER_ATTENDS = Place(TransformerEncoderLayer._sa_block, "self.self_attn(")
DECODER_ATTENDS = Place(TransformerDecoderLayer._sa_block, "self.self_attn(")
MEMORY_ATTENDED = Place(TransformerDecoderLayer._mha_block, "self.multihead_attn(")
POST_NORM = Place(TransformerDecoderLayer.forward, "x = self.norm2(x + self._mha_block(")
ATTN_MASK = Place(masks.score_bias_from_module, "masked_fill_(module_mask")
PADDED_KEYS = Place(resolve_masks, ".view(batch, 1, 1, key_len)")
PROMISE = Place(resolve_masks, "if is_causal and key_padding_mask is None")
TO_DECODER = Place(Transformer.forward, "self.decoder(")
TO_ENCODER = Place(Transformer.forward, "self.encoder(")

BUILT = (
    Explanation(
        "d_model",
        WITH_LAYERS,
        "The width of the input and of the output. It is the embed_dim of every attention, and the residual "
        "connections keep it from the first layer to the last. The heads share it, so nhead must divide it.",
        (SELF_ATTENTION, Place(TransformerEncoderLayer.__init__, "self.norm1 =")),
        widths,
    ),
    Explanation(
        "nhead",
        WITH_LAYERS,
        "How many heads each attention has. It is the num_heads of MultiheadAttention: each head works on d_model / "
        "nhead features. torch's fast path only accepts even numbers.",
        (SELF_ATTENTION, ONE_HEAD),
        heads,
    ),
    Explanation(
        "dim_feedforward",
        WITH_LAYERS,
        "The width between the two linear layers. They work on each token separately. It defaults to 2048, whatever "
        "d_model is.",
        (
            Place(TransformerEncoderLayer.__init__, "self.linear1 ="),
            Place(TransformerEncoderLayer.__init__, "self.linear2 ="),
            FEED_FORWARD_BLOCK,
        ),
        hidden_widths,
        FEED_FORWARD,
    ),
    Explanation(
        "dropout",
        WITH_LAYERS,
        "The probability of dropping in training, in three places. These are the attention weights, the hidden "
        "units of the feed-forward network, and what is added to the residual. In evaluation nothing is dropped.",
        (Place(TransformerEncoderLayer._sa_block, "self.dropout1("), FEED_FORWARD_BLOCK),
        all_dropped,
    ),
    Explanation(
        "activation",
        WITH_LAYERS,
        'The function between the two linear layers. It is "relu", "gelu" or any function of one tensor. Only ReLU '
        "and GELU let torch take its fast path.",
        (Place(scratch.layers.activation_function, "if isinstance(activation"), FEED_FORWARD_BLOCK),
        activations,
    ),
    Explanation(
        "layer_norm_eps",
        WITH_LAYERS,
        "A small number added to the variance in every LayerNorm. It prevents a division by 0 when all features are "
        "equal. In the example the variance is 0.01.",
        (Place(TransformerEncoderLayer.__init__, "self.norm1 ="),),
        epsilons,
    ),
    Explanation(
        "norm_first",
        WITH_LAYERS,
        "Whether LayerNorm comes before each sub-layer or after it. After it, behind the sum, is the paper's way "
        "and the default. Before it, the residual passes unchanged from input to output, so that deep stacks train "
        "more easily and need a norm at the end.",
        (
            Place(TransformerEncoderLayer.forward, "if self.norm_first"),
            Place(TransformerEncoderLayer.forward, "x = self.norm1(x + "),
            Place(TransformerEncoderLayer.forward, "return self.norm2(x + "),
        ),
        pre_and_post_norm,
        NORMS,
    ),
    Explanation(
        "bias",
        WITH_LAYERS,
        "Whether attentions, linear layers and LayerNorms add a learnt vector.",
        (
            SELF_ATTENTION,
            Place(TransformerEncoderLayer.__init__, "self.linear1 ="),
            Place(TransformerEncoderLayer.__init__, "self.norm1 ="),
        ),
        biases,
    ),
    Explanation(
        "qk_head_dim",
        WITH_LAYERS,
        "The paper's d_k: the width of the queries and keys of each head. torch.nn has no such argument: it always "
        "uses d_model / nhead. nhead need not divide d_model if both sizes are given.",
        (BOTH_ATTENTIONS,),
        free_key_size,
    ),
    Explanation(
        "v_head_dim",
        WITH_LAYERS,
        "The paper's d_v: the width of the values of each head. torch.nn has no such argument: it always uses "
        "d_model / nhead. out_proj takes all heads together back to d_model.",
        (BOTH_ATTENTIONS,),
        free_value_size,
    ),
)

CALLED = (
    Explanation(
        "src",
        ENCODERS,
        "The tokens, each a vector of d_model features. They look at each other, and the output has the same shape.",
        (Place(TransformerEncoderLayer.forward, "x = self.norm1(x + "), ENCODER_ATTENDS),
        source_in_output_out,
    ),
    Explanation(
        "src_mask",
        (ENCODER_LAYER, TRANSFORMER),
        "Who may look at whom in the source: True means may not. Its shape is (src_len, src_len) for all, or (batch "
        "* nhead, src_len, src_len). A float mask is added to the scores instead. Most encoders need none.",
        (ENCODER_ATTENDS, ATTN_MASK),
        source_masked,
        f"who may look in the example below, at itself and its neighbours:\n\n{drawn(masks.sliding_window(4, window=2))}",
    ),
    Explanation(
        "src_key_padding_mask",
        (ENCODER_LAYER, ENCODER, TRANSFORMER),
        "Which tokens of the source are padding: True is ignored. Its shape is (batch, src_len). Padded positions "
        "are computed all the same, which is why the last number in the example is not 0. nn.Transformer's decoder "
        "needs the mask a second time, as memory_key_padding_mask.",
        (ENCODER_ATTENDS, PADDED_KEYS),
        source_padded,
        PADDING,
    ),
    Explanation(
        "tgt",
        DECODERS,
        "The tokens of the target, each a vector of d_model features. They look at each other, then at the memory. The "
        "output has their shape.",
        (DECODER_ATTENDS, POST_NORM),
        target_and_memory,
    ),
    Explanation(
        "memory",
        DECODERS,
        "What the encoder made of the source. It gives the keys and values of the decoder's second attention; the "
        "queries are the target's. Every layer of a stack gets the same memory.",
        (MEMORY_ATTENDED, POST_NORM),
        memory_matters,
    ),
    Explanation(
        "tgt_mask",
        (*DECODERS, TRANSFORMER),
        "Who may look at whom in the target: True means may not. Its shape is (tgt_len, tgt_len) for all, or (batch "
        "* nhead, tgt_len, tgt_len). A float mask is added to the scores instead. Nothing is causal by itself: for "
        "a decoder that predicts the next token, pass the causal mask.",
        (DECODER_ATTENDS, ATTN_MASK),
        target_masked,
        f"the causal mask of the example below:\n\n{drawn(masks.causal(4))}",
    ),
    Explanation(
        "memory_mask",
        (*DECODERS, TRANSFORMER),
        "Which target may look at which memory: True means may not. Its shape is (tgt_len, src_len) for all, or "
        "(batch * nhead, tgt_len, src_len). A float mask is added to the scores instead. It is seldom needed: "
        "padding has a mask of its own.",
        (MEMORY_ATTENDED, ATTN_MASK),
        memory_masked,
        f"who may look in the example below:\n\n{CROSS}",
    ),
    Explanation(
        "tgt_key_padding_mask",
        (*DECODERS, TRANSFORMER),
        "Which tokens of the target are padding: True is ignored. Its shape is (batch, tgt_len). A causal mask "
        "already hides padding at the end from the real tokens.",
        (DECODER_ATTENDS, PADDED_KEYS),
        target_padded,
    ),
    Explanation(
        "memory_key_padding_mask",
        (*DECODERS, TRANSFORMER),
        "Which tokens of the memory are padding: True is ignored. Its shape is (batch, src_len). It is the source's "
        "padding mask a second time, and it is not filled in for you.",
        (MEMORY_ATTENDED, PADDED_KEYS),
        memory_padded,
    ),
    Explanation(
        "tgt_is_causal",
        (DECODER_LAYER,),
        "A promise that tgt_mask is the causal one. It is not a mask: without tgt_mask it is an error. Without a padding "
        "mask, tgt_mask is then not read, and a causal one is used in its place.",
        (DECODER_ATTENDS, PROMISE),
        target_promised,
    ),
    Explanation(
        "memory_is_causal",
        (*DECODERS, TRANSFORMER),
        "A promise that memory_mask is causal. Target i then looks at the memory's tokens 0 to i, which is hardly "
        "ever what you want. Without memory_mask it is an error.",
        (MEMORY_ATTENDED, PROMISE),
        memory_promised,
        f"what is promised, for 5 target tokens and a memory of 7:\n\n{drawn(masks.causal(5, 7))}",
    ),
    Explanation(
        "cache",
        (DECODER_LAYER,),
        "The keys and values of earlier calls. It is a LayerCache, to which this call appends its own tokens; the "
        "memory is projected at the first call only. torch.nn has no such argument.",
        (
            Place(TransformerDecoderLayer.forward, "self_cache, memory_cache ="),
            Place(MultiheadAttention.forward, "cache.extend("),
        ),
        remembered,
    ),
)

EXPLANATIONS = (*BUILT, *CALLED)
