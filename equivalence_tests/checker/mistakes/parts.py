"""The known mistakes of LayerNorms, feed-forwards and positional encodings."""

from collections.abc import Callable
from typing import Any

from equivalence_tests.checker.mistakes.mistake import Mistake

__all__ = ["ROWS"]

ACTIVATIONS = "relu, gelu, silu, tanh, sigmoid, leaky_relu, elu, mish, square, pow, mul"
LAST_ACTIVATION = "last relu, last gelu, last silu, last tanh, last sigmoid, last mul"


def _rows_of(stage: str, want: str, ran: str = "") -> Callable[..., Mistake]:
    """Give what writes a mistake of a stage, of which the right formula is known."""

    def row(name: str, sentence: str, have: str, fix: str, ran: str = ran, **more: Any) -> Mistake:
        return Mistake(name, stage, sentence, have, **{"want": want, "fix": fix, "ran": ran} | more)

    return row


_norm = _rows_of("norm", "gain * (x - mean) / sqrt(var + eps) + bias, over the last axis, var with 1 / n")
_feed_forward = _rows_of("feed forward", "linear2(activation(linear1(x)))")
_position = _rows_of(
    "positions",
    "PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) = cos(the same)",
    "exp, pow, div, outer, sin, cos",
)


NORMS = (
    _norm(
        "norm_unbiased_std",
        "The LayerNorm divides by the unbiased standard deviation.",
        "var with 1 / (n - 1)",
        "Use var(-1, unbiased=False).",
        "std, var, std_mean, var_mean, div",
    ),
    _norm(
        "norm_eps_outside",
        "The LayerNorm adds eps to the standard deviation, outside the square root.",
        "(x - mean) / (std + eps)",
        "Divide by sqrt(var + eps).",
        "add",
    ),
    _norm(
        "norm_without_eps",
        "The norm adds no eps, so a token whose features are all alike becomes nan.",
        "gain * (x - mean) / sqrt(var) + bias",
        "Add a small eps under the root, such as 1e-5.",
        "sqrt, rsqrt, std, norm, pow, layer_norm, rms_norm, div",
    ),
    _norm(
        "norm_wrong_axes",
        "The LayerNorm normalises over other axes than the features.",
        "mean and var over other axes",
        "Take mean and var over the last axis, with keepdim=True.",
        "mean, std, var, std_mean, var_mean, layer_norm, group_norm, batch_norm",
    ),
    _norm(
        "norm_without_mean",
        "The LayerNorm does not subtract the mean.",
        "gain * x / sqrt(mean(x²) + eps)",
        "Subtract the mean, or call it RMSNorm.",
        "rsqrt, sqrt, mean, norm, div",
        on_purpose_in="RMSNorm does this on purpose (T5, LLaMA).",
    ),
    _norm(
        "norm_without_root",
        "The LayerNorm divides by the variance, without a square root.",
        "(x - mean) / (var + eps)",
        "Divide by sqrt(var + eps).",
        "div",
    ),
    _norm(
        "norm_subtracts_mean",
        "The RMSNorm subtracts the mean.",
        "gain * (x - mean) / sqrt(var + eps)",
        "Leave the mean alone, or call it LayerNorm.",
        "sub, layer_norm",
        want="gain * x / sqrt(mean(x²) + eps)",
    ),
    _norm(
        "norm_sum_for_mean",
        "The squares are summed, not averaged: the output is too small by the square root of the width.",
        "gain * (x - mean) / sqrt(sum((x - mean)²) + eps)",
        "Take the mean of the squares.",
        "sum, norm, vector_norm, normalize",
        on_purpose_in="ScaleNorm divides by the length of the vector on purpose.",
    ),
    _norm(
        "norm_gain_and_bias_exchanged",
        "Gain and bias of the LayerNorm are swapped.",
        "bias * (x - mean) / sqrt(var + eps) + gain",
        "Multiply by the gain, which starts at 1, and add the bias, which starts at 0.",
        "last mul, layer_norm",
    ),
    _norm(
        "norm_bias_scaled",
        "The bias of the LayerNorm is multiplied by the gain.",
        "gain * ((x - mean) / sqrt(var + eps) + bias)",
        "Add the bias last.",
        "last mul",
    ),
    _norm(
        "norm_gain_unused",
        "The gain and bias of the LayerNorm exist but are not used.",
        "(x - mean) / sqrt(var + eps)",
        "Multiply by the gain and add the bias.",
        "end",
    ).made_of("layer_norm", ("self.gain * normal + self.bias", "normal")),
    _norm(
        "norm_bias_unused",
        "The bias of the LayerNorm exists but is not used.",
        "gain * (x - mean) / sqrt(var + eps)",
        "Add the bias.",
        "end",
    ).made_of("layer_norm", (" + self.bias", "")),
)


FEED_FORWARDS = (
    _feed_forward(
        "activation_missing",
        "There is no activation between the two linear layers.",
        "linear2(linear1(x))",
        "Apply ReLU or GELU between the two.",
        "last linear, last matmul, last conv1d, last einsum, last bmm",
    ),
    _feed_forward(
        "gate_without_activation",
        "The gate has no activation.",
        "down(gate(x) * up(x))",
        "Apply SiLU, GELU, ReLU or sigmoid to the gate.",
        "mul",
        on_purpose_in="The bilinear variant in the paper on gated feed-forwards does this on purpose.",
        want="down(activation(gate(x)) * up(x))",
    ),
    _feed_forward(
        "activation_of_gated_product",
        "The activation is applied to the product of gate and values, not to the gate alone.",
        "down(activation(gate(x) * up(x)))",
        "Apply the activation to the gate, then multiply.",
        ACTIVATIONS,
        want="down(activation(gate(x)) * up(x))",
    ),
    _feed_forward(
        "gelu_approximated",
        "The activation is an approximation of GELU, not GELU itself.",
        "linear2(approximate GELU(linear1(x)))",
        'Use nn.GELU(), or say with --meant gelu_approximated="as GPT-2" that it is meant so.',
        ACTIVATIONS,
        on_purpose_in="GPT-2 uses the approximation by tanh, CLIP the one by a sigmoid.",
    ),
    _feed_forward(
        "activation_exchanged",
        "The activation is neither ReLU nor exact GELU.",
        "linear2(another activation(linear1(x)))",
        "Use nn.ReLU or nn.GELU if those were meant.",
        ACTIVATIONS,
        on_purpose_in="Many models use SiLU; torch.nn takes any function.",
        expressible=True,
    ),
    _feed_forward(
        "activation_before_first_linear",
        "The activation comes before the first linear layer.",
        "linear2(linear1(activation(x)))",
        "Apply it between the two.",
        ACTIVATIONS,
    ),
    _feed_forward(
        "activation_after_second_linear",
        "The activation comes after the second linear layer.",
        "activation(linear2(linear1(x)))",
        "Apply it between the two.",
        LAST_ACTIVATION,
    ),
    _feed_forward(
        "activation_also_after_second_linear",
        "The activation is applied after the second linear layer too.",
        "activation(linear2(activation(linear1(x))))",
        "Apply it once, between the two.",
        LAST_ACTIVATION,
    ).made_of("feed_forward", ("return self.w_2(F.relu(self.w_1(x)))", "return F.relu(self.w_2(F.relu(self.w_1(x))))")),
    _feed_forward(
        "ff_first_bias_unused",
        "The bias of the first linear layer exists but is not used.",
        "linear2(activation(x W1ᵀ))",
        "Call the layer, or pass its bias to F.linear.",
        "linear, matmul",
    ).made_of("feed_forward", ("self.w_1(x)", "F.linear(x, self.w_1.weight)")),
    _feed_forward(
        "ff_second_bias_unused",
        "The bias of the second linear layer exists but is not used.",
        "activation(linear1(x)) W2ᵀ",
        "Call the layer, or pass its bias to F.linear.",
        "last linear, last matmul",
    ),
    _feed_forward(
        "ff_second_linear_missing",
        "The second linear layer is not applied.",
        "activation(linear1(x))",
        "Apply the second linear layer.",
        "end",
    ).made_of(
        "feed_forward",
        (
            "nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)",
            "nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)",
        ),
        ("return self.w_2(F.relu(self.w_1(x)))", "return F.relu(self.w_1(x))"),
    ),
)


POSITIONS = (
    _position(
        "position_exponent_halved",
        "The exponent of the frequencies is halved.",
        "pos / 10000^(i / d)",
        "Divide by 10000^(2i / d) for pair i.",
    ),
    _position(
        "position_exponent_doubled",
        "The exponent of the frequencies is doubled.",
        "pos / 10000^(4i / d)",
        "Divide by 10000^(2i / d) for pair i; 2i is already the even index.",
    ),
    _position(
        "position_cosine_exponent_shifted",
        "The cosines use the exponent of their own odd index.",
        "cos(pos / 10000^((2i + 1) / d))",
        "Use one exponent, 2i / d, for both members of a pair.",
    ).made_of("positions", ("cosines = even", "cosines = (even + 1)")),
    _position(
        "position_cosine_exponent_doubled",
        "The exponents are doubled, and shifted for the cosines.",
        "sin(pos / 10000^(4i / d)), cos(pos / 10000^(2(2i + 1) / d))",
        "Use one exponent, 2i / d, for both members of a pair; 2i is already the even index.",
    ).made_of("positions", ("sines = even", "sines = 2 * even"), ("cosines = 2 * even", "cosines = 2 * (even + 1)")),
    _position(
        "position_timescale_of_tensor2tensor",
        "The frequencies end at exactly 1 / 10000.",
        "pos / 10000^(i / (d / 2 - 1))",
        "Divide by 10000^(2i / d).",
        on_purpose_in="tensor2tensor and fairseq space the frequencies so.",
    ).made_of("positions", ("even / d_model", "(even / 2) / (d_model // 2 - 1)")),
    _position(
        "position_sine_cosine_swapped",
        "Sine and cosine are swapped.",
        "PE(pos, 2i) = cos, PE(pos, 2i + 1) = sin",
        "Put the sine on even features.",
        "sin, cos",
        on_purpose_in="Time encodings in diffusion models put the cosines first.",
    ),
    _position(
        "position_starts_at_one",
        "The first position is 1, not 0.",
        "pos = 1, 2, ...",
        "Start at 0.",
        "cumsum, arange, linspace",
        on_purpose_in="fairseq counts from the id of the padding, DETR sums up its mask: both start at 1.",
        want="pos = 0, 1, ...",
    ),
    _position("position_base_other", "The base of the frequencies is not 10000.", "pos / base^(2i / d)", "Use 10000."),
    _position(
        "position_cosine_missing",
        "There are sines on all features, and no cosines.",
        "PE(pos, 2i) = PE(pos, 2i + 1) = sin",
        "Put the cosine on odd features.",
        "last sin",
    ),
    _position(
        "position_normalised",
        "The positions are divided by the length: the same token gets another encoding in a longer sequence.",
        "pos = 2π (pos + 1) / len",
        "Use the positions themselves.",
        "last div",
        on_purpose_in="DETR does this on purpose (normalize=True).",
        want="pos = 0, 1, ...",
    ),
    _position(
        "position_not_added",
        "The input comes back unchanged: no positions are added.",
        "x",
        "Add the table.",
        "end",
        want="x + pe[:, :len]",
    ),
    _position(
        "position_multiplied",
        "The input is multiplied by the table.",
        "x * pe[:, :len]",
        "Add the table.",
        "last mul",
        want="x + pe[:, :len]",
    ),
    _position(
        "position_one_row",
        "One row of the table is added to every token: the order of the tokens cannot be told.",
        "x + pe[:, len]",
        "Put a colon before the length: pe[:, :x.size(1)].",
        "last getitem",
        want="x + pe[:, :len]",
    ),
    _position(
        "position_indexed_by_batch",
        "The positional table is indexed by the batch: every token of one sequence gets the same encoding.",
        "x + pe[:x.size(0)] for x of (batch, len, features)",
        "Index the table by axis 1, or feed it sequence first.",
        "last getitem",
        want="x + pe[:, :x.size(1)]",
    ),
)

ROWS = (*NORMS, *FEED_FORWARDS, *POSITIONS)
