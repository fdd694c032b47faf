"""The known mistakes of LayerNorm, feed-forward, positional encoding, and of the wiring of a layer."""

from dataclasses import dataclass

__all__ = ["PART_MISTAKES", "PartMistake"]


@dataclass(frozen=True)
class PartMistake:
    """One way to get it wrong, as in ``mistakes``.

    Args:
        name: A short stable identifier.
        sentence: What is wrong, in one plain sentence.
        have: The formula that the code computes.
        want: The formula that it should compute.
        fix: What would mend it.
        patterns: Regular expressions that the guilty line is likely to match.
        choice: Which well-known models do this on purpose.
        expressible: Whether torch.nn has an argument for it, so that it is no deviation.
    """

    name: str
    sentence: str
    have: str
    want: str
    fix: str
    patterns: tuple[str, ...] = ()
    choice: str = ""
    expressible: bool = False


NORM = "gain * (x - mean) / sqrt(var + eps) + bias, over the last axis, var with 1 / n"
FF = "linear2(activation(linear1(x)))"
PE = "PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) = cos(the same)"
POST_OR_PRE = "LayerNorm(x + f(x)), or x + f(LayerNorm(x))"
ACTIVATION_LINES = (r"(?i)(relu|gelu|silu|act\w*)\((?!\))", r"relu|gelu|act")  # first where it is called
POSITION_LINES = (r"10000|exp\(|pow|\*\*", r"sin\(|cos\(")

PART_MISTAKES = {
    mistake.name: mistake
    for mistake in (
        PartMistake(
            "norm_unbiased_std",
            "The LayerNorm divides by the unbiased standard deviation.",
            "var with 1 / (n - 1)",
            NORM,
            "Use var(-1, unbiased=False).",
            (r"\.(std|var)\(",),
        ),
        PartMistake(
            "norm_eps_outside",
            "The LayerNorm adds eps to the standard deviation, outside the square root.",
            "(x - mean) / (std + eps)",
            NORM,
            "Divide by sqrt(var + eps).",
            (r"\+ *[\w.]*eps|eps\w* *\+", r"eps"),
        ),
        PartMistake(
            "norm_eps_other",
            "The eps of the LayerNorm is written into the code and is not 1e-5.",
            "another eps",
            NORM,
            "Use 1e-5, or make eps an argument.",
            (r"eps|1e-",),
            "BERT uses 1e-12 and many ports of the paper 1e-6.",
        ),
        PartMistake(
            "norm_wrong_axes",
            "The LayerNorm normalises over other axes than the features.",
            "mean and var over other axes",
            NORM,
            "Take mean and var over the last axis, with keepdim=True.",
            (r"mean\(|var\(|std\(",),
        ),
        PartMistake(
            "norm_without_mean",
            "The LayerNorm does not subtract the mean.",
            "gain * x / sqrt(mean(x²) + eps)",
            NORM,
            "Subtract the mean, or call it RMSNorm.",
            (r"rsqrt|sqrt|mean\(",),
            "RMSNorm does this on purpose (T5, LLaMA).",
        ),
        PartMistake(
            "norm_without_root",
            "The LayerNorm divides by the variance, without a square root.",
            "(x - mean) / (var + eps)",
            NORM,
            "Divide by sqrt(var + eps).",
            (r"/.*var|/.*eps", r"var"),
        ),
        PartMistake(
            "norm_subtracts_mean",
            "The RMSNorm subtracts the mean.",
            "gain * (x - mean) / sqrt(var + eps)",
            "gain * x / sqrt(mean(x²) + eps)",
            "Leave the mean alone, or call it LayerNorm.",
            (r"mean\(",),
        ),
        PartMistake(
            "norm_sum_for_mean",
            "The squares are summed, not averaged: the output is too small by the square root of the width.",
            "gain * (x - mean) / sqrt(sum((x - mean)²) + eps)",
            NORM,
            "Take the mean of the squares.",
            (r"sum\(|norm\(", r"sqrt"),
            "ScaleNorm divides by the length of the vector on purpose.",
        ),
        PartMistake(
            "norm_gain_and_bias_exchanged",
            "Gain and bias of the LayerNorm are swapped.",
            "bias * (x - mean) / sqrt(var + eps) + gain",
            NORM,
            "Multiply by the gain, which starts at 1, and add the bias, which starts at 0.",
            (r"(beta|bias|shift|b\w*) *\*", r"return"),
        ),
        PartMistake(
            "norm_bias_scaled",
            "The bias of the LayerNorm is multiplied by the gain.",
            "gain * ((x - mean) / sqrt(var + eps) + bias)",
            NORM,
            "Add the bias last.",
            (r"\+ *(self\.)?(beta|bias|shift|b\w*)", r"return"),
        ),
        PartMistake(
            "norm_gain_unused",
            "The gain and bias of the LayerNorm exist but are not used.",
            "(x - mean) / sqrt(var + eps)",
            NORM,
            "Multiply by the gain and add the bias.",
            (r"return",),
        ),
        PartMistake(
            "norm_bias_unused",
            "The bias of the LayerNorm exists but is not used.",
            "gain * (x - mean) / sqrt(var + eps)",
            NORM,
            "Add the bias.",
            (r"return",),
        ),
        PartMistake(
            "activation_missing",
            "There is no activation between the two linear layers.",
            "linear2(linear1(x))",
            FF,
            "Apply ReLU or GELU between the two.",
        ),
        PartMistake(
            "gate_without_activation",
            "The gate has no activation.",
            "down(gate(x) * up(x))",
            "down(activation(gate(x)) * up(x))",
            "Apply SiLU, GELU, ReLU or sigmoid to the gate.",
            (r"\*",),
            "The bilinear variant in the paper on gated feed-forwards does this on purpose.",
        ),
        PartMistake(
            "activation_exchanged",
            "The activation is neither ReLU nor exact GELU.",
            "linear2(another activation(linear1(x)))",
            FF,
            "Use nn.ReLU or nn.GELU if those were meant.",
            (r"gelu|silu|swish|tanh|sigmoid|elu|act",),
            "GPT-2 uses tanh-GELU, CLIP sigmoid-GELU, others SiLU; torch.nn takes any function as activation.",
            True,
        ),
        PartMistake(
            "activation_before_first_linear",
            "The activation comes before the first linear layer.",
            "linear2(linear1(activation(x)))",
            FF,
            "Apply it between the two.",
            ACTIVATION_LINES,
        ),
        PartMistake(
            "activation_after_second_linear",
            "The activation comes after the second linear layer.",
            "activation(linear2(linear1(x)))",
            FF,
            "Apply it between the two.",
            ACTIVATION_LINES,
        ),
        PartMistake(
            "activation_also_after_second_linear",
            "The activation is applied after the second linear layer too.",
            "activation(linear2(activation(linear1(x))))",
            FF,
            "Apply it once, between the two.",
            ACTIVATION_LINES,
        ),
        PartMistake(
            "ff_first_bias_unused",
            "The bias of the first linear layer exists but is not used.",
            "linear2(activation(x W1ᵀ))",
            FF,
            "Call the layer, or pass its bias to F.linear.",
            (r"F\.linear|\.weight",),
        ),
        PartMistake(
            "ff_second_bias_unused",
            "The bias of the second linear layer exists but is not used.",
            "activation(linear1(x)) W2ᵀ",
            FF,
            "Call the layer, or pass its bias to F.linear.",
            (r"F\.linear|\.weight",),
        ),
        PartMistake(
            "ff_second_linear_missing",
            "The second linear layer is not applied.",
            "activation(linear1(x))",
            FF,
            "Apply the second linear layer.",
            (r"return",),
        ),
        PartMistake(
            "residual_missing",
            "The residual is missing.",
            "LayerNorm(f(x))",
            POST_OR_PRE,
            "Add x.",
            (r"norm\w*\(", r"return"),
        ),
        PartMistake(
            "residual_from_normalised",
            "The residual is taken from the normalised input.",
            "LayerNorm(x) + f(LayerNorm(x))",
            POST_OR_PRE,
            "Keep x from before the LayerNorm and add that.",
            (r"norm\w*\(", r"return"),
        ),
        PartMistake(
            "residual_added_twice",
            "The residual is added twice.",
            "LayerNorm(x + x + f(x))",
            POST_OR_PRE,
            "Add x once.",
            (r"\+",),
        ),
        PartMistake(
            "residual_after_norm",
            "The residual is added after the LayerNorm.",
            "x + LayerNorm(f(x))",
            POST_OR_PRE,
            "Add x before the LayerNorm.",
            (r"norm\w*\(",),
            "Swin v2 does this on purpose (res-post-norm).",
        ),
        PartMistake(
            "norm_fresh_in_forward",
            "The LayerNorm is created anew in every forward: its gain and bias are never trained.",
            "LayerNorm_with_gain_1_and_bias_0(x + f(x))",
            POST_OR_PRE,
            "Make the LayerNorm in __init__ and call it here.",
            (r"LayerNorm\([^)]*\)\S*\(", r"norm"),
        ),
        PartMistake(
            "norm_missing",
            "A LayerNorm exists but is not applied, or its result is not used.",
            "x + f(x)",
            POST_OR_PRE,
            "Call the LayerNorm.",
            (r"norm",),
        ),
        PartMistake(
            "norm_shared",
            "One LayerNorm serves two sub-layers.",
            "norm(x + f(x)); norm(x + g(x))",
            "norm1(x + f(x)); norm2(x + g(x))",
            "Give each sub-layer its own LayerNorm.",
            (r"norm\w*\(",),
        ),
        PartMistake(
            "norm_final_extra",
            "A LayerNorm follows the last residual of a pre-norm layer as well.",
            "LayerNorm(x + f(LayerNorm(x)))",
            POST_OR_PRE,
            "Keep it for the end of the stack.",
            (r"norm\w*\(", r"return"),
        ),
        PartMistake(
            "cross_attention_from_decoder",
            "The cross-attention takes its keys or values from the decoder.",
            "Attention(query=x, key=x, value=x)",
            "Attention(query=x, key=memory, value=memory)",
            "Pass the encoder's output as key and value.",
            (r"(cross|enc|multihead|src)\w*\(", r"attn\w*\("),
        ),
        PartMistake(
            "cross_attention_left_out",
            "The cross-attention exists but is never called.",
            "self-attention, feed-forward",
            "self-attention, cross-attention, feed-forward",
            "Call it between the two.",
            (r"def forward",),
        ),
        PartMistake(
            "cross_maps_are_self_maps",
            "The self-attention maps are returned in place of the cross-attention maps.",
            "returns the self-attention maps twice",
            "returns self-attention maps and cross-attention maps",
            "Keep the maps of the second attention and return those.",
            (r"return", r"attn"),
        ),
        PartMistake(
            "sublayers_in_another_order",
            "The sub-layers run in the wrong order.",
            "another order",
            "self-attention, cross-attention, feed-forward",
            "Put them in the order of the paper.",
            (r"def forward",),
        ),
        PartMistake(
            "position_exponent_halved",
            "The exponent of the frequencies is halved.",
            "pos / 10000^(i / d)",
            PE,
            "Divide by 10000^(2i / d) for pair i.",
            POSITION_LINES,
        ),
        PartMistake(
            "position_exponent_doubled",
            "The exponent of the frequencies is doubled.",
            "pos / 10000^(4i / d)",
            PE,
            "Divide by 10000^(2i / d) for pair i; 2i is already the even index.",
            POSITION_LINES,
        ),
        PartMistake(
            "position_cosine_exponent_shifted",
            "The cosines use the exponent of their own odd index.",
            "cos(pos / 10000^((2i + 1) / d))",
            PE,
            "Use one exponent, 2i / d, for both members of a pair.",
            POSITION_LINES,
        ),
        PartMistake(
            "position_cosine_exponent_doubled",
            "The exponents are doubled, and shifted for the cosines.",
            "sin(pos / 10000^(4i / d)), cos(pos / 10000^(2(2i + 1) / d))",
            PE,
            "Use one exponent, 2i / d, for both members of a pair; 2i is already the even index.",
            POSITION_LINES,
        ),
        PartMistake(
            "position_timescale_of_tensor2tensor",
            "The frequencies end at exactly 1 / 10000.",
            "pos / 10000^(i / (d / 2 - 1))",
            PE,
            "Divide by 10000^(2i / d).",
            POSITION_LINES,
            "tensor2tensor and fairseq space the frequencies so.",
        ),
        PartMistake(
            "position_sine_cosine_swapped",
            "Sine and cosine are swapped.",
            "PE(pos, 2i) = cos, PE(pos, 2i + 1) = sin",
            PE,
            "Put the sine on even features.",
            (r"sin\(|cos\(",),
            "Time encodings in diffusion models put the cosines first.",
        ),
        PartMistake(
            "position_starts_at_one",
            "The first position is 1, not 0.",
            "pos = 1, 2, ...",
            "pos = 0, 1, ...",
            "Start at 0.",
            (r"cumsum", r"arange|range"),
            "fairseq counts from the id of the padding, DETR sums up its mask: both start at 1.",
        ),
        PartMistake(
            "position_base_other",
            "The base of the frequencies is not 10000.",
            "pos / base^(2i / d)",
            PE,
            "Use 10000.",
            POSITION_LINES,
        ),
        PartMistake(
            "position_cosine_missing",
            "There are sines on all features, and no cosines.",
            "PE(pos, 2i) = PE(pos, 2i + 1) = sin",
            PE,
            "Put the cosine on odd features.",
            (r"1::2.*sin\(", r"sin\("),
        ),
        PartMistake(
            "position_normalised",
            "The positions are divided by the length: the same token gets another encoding in a longer sequence.",
            "pos = 2π (pos + 1) / len",
            "pos = 0, 1, ...",
            "Use the positions themselves.",
            (r"\[:, *-1:?\]|normali[sz]e|/.*(len|size|shape)",),
            "DETR does this on purpose (normalize=True).",
        ),
        PartMistake(
            "position_not_added",
            "The input comes back unchanged: no positions are added.",
            "x",
            "x + pe[:, :len]",
            "Add the table.",
            (r"return",),
        ),
        PartMistake(
            "position_multiplied",
            "The input is multiplied by the table.",
            "x * pe[:, :len]",
            "x + pe[:, :len]",
            "Add the table.",
            (r"\*.*\bpe\b|\bpe\b.*\*|return.*\*", r"return"),
        ),
        PartMistake(
            "position_one_row",
            "One row of the table is added to every token: the order of the tokens cannot be told.",
            "x + pe[:, len]",
            "x + pe[:, :len]",
            "Put a colon before the length: pe[:, :x.size(1)].",
            (r"\[:, *[^:\]]*(size|shape|len)", r"\[(0|.*(size|shape|len)[^:]*)\]", r"pe\w*\["),
        ),
        PartMistake(
            "position_indexed_by_batch",
            "The positional table is indexed by the batch: every token of one sequence gets the same encoding.",
            "x + pe[:x.size(0)] for x of (batch, len, features)",
            "x + pe[:, :x.size(1)]",
            "Index the table by axis 1, or feed it sequence first.",
            (r"pe\w*\[|size\(0\)|shape\[0\]",),
        ),
    )
}
