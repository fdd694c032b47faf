"""Every known mistake: what it is in a sentence, the formula it makes, the formula it should be, and what mends it.

A mistake sets one switch of the family in ``reference``. ``CONVENTIONS`` lists the settings that are right too.
"""

from dataclasses import dataclass

__all__ = ["ATTENTION_MISTAKES", "CONVENTIONS", "MASK_MISTAKES", "STRUCTURE", "Mistake", "mistake_for", "named_mistake"]


@dataclass(frozen=True)
class Mistake:
    """One way to get it wrong.

    Args:
        name: A short stable identifier.
        slot: The switch of the family.
        option: Its setting.
        sentence: What is wrong, in one plain sentence.
        have: The formula that the code computes.
        want: The formula that it should compute.
        fix: What would mend it.
        patterns: Regular expressions that the guilty line is likely to match, the most telling first.
        choice: Where well-known models do this on purpose: which ones and why; "" if nobody does.
        tell: What in the source would single it out among mistakes that give the same numbers.
    """

    name: str
    slot: str
    option: str
    sentence: str
    have: str
    want: str
    fix: str
    patterns: tuple[str, ...] = ()
    choice: str = ""
    tell: str = ""


SCALE_WANTED = "scores = q kᵀ / sqrt(head_dim)"
SCALE_LINES = (
    r"sqrt|\*\*\s*-?\(?\s*(0?\.5|1\s*/\s*[24]|0?\.25)|scale(?!d_dot)|temper|norm_fact|power\(|\.pow\(",
    r"(matmul|bmm|@).*(transpose|permute|\.m?T\b)",
    r"einsum|matmul|bmm|@",
    r"softmax",
)
SPLIT_LINES = (r"(view|reshape|rearrange)\(.*(head|h\b|\bd_?k)", r"view|reshape")
MERGE_LINES = (
    r"(context|ctx|attended|merged)\w*(\.\w+\([^()]*\))*\.(view|reshape|flatten)\(",
    r"return .*\.(view|reshape|flatten)\(",
)
SOFTMAX_LINES = (r"softmax",)
TELLS = {
    "fill_tiny32": r"\btiny\b|\b1e-\d",
    "fill_1e-9": r"\btiny\b|\b1e-\d",
    "fill_-1e-9": r"-\s*1e-\d",
    "fill_1e-12": r"[^-]\s*\b1e-1\d|masked_fill_?\(.*,\s*[a-z_]\w*\s*\)",
    "fill_-1e-12": r"-\s*1e-1\d|masked_fill_?\(.*,\s*-\s*[a-z_]\w*\s*\)",
    "fill_0": r"(masked_fill_?|where)\(.*,\s*(0|0\.0*|float\(.?0.?\))\s*\)",
    "multiplied_visible": r"\*=?\s*\(?~?\w*mask|mask\w*\s*\*|hidden.*\*|\*.*hidden",
    "multiplied_blocked": r"\*=?\s*\(?~?\w*mask|mask\w*\s*\*",
}
MASK_LINES = (
    r"masked_fill|where\(.*mask|where\(.*inf|where\(.*-1e",
    r"[-+*]=?\s*\(?[^=]*mask|mask\w*(\.\w+\([^()]*\))*(\[[^\]]*\])?\s*[-+*]",
    r"\w*mask\w*\s*=",
)
ADDED_LINES = (r"[-+]=?\s*[^=]*mask|mask[^=]*\s[-+]=?\s", r"mask.*(float|\.to|type)\b")
MASK_LINES_OF = {
    **dict.fromkeys(("added_visible", "added_blocked", "subtracted_blocked"), ADDED_LINES),
    **dict.fromkeys(("multiplied_visible", "multiplied_blocked"), (r"\*.*mask|mask.*\*|\bmul_?\(",)),
    "ignored": (r"^\s*[\w.\[\]]+\.masked_fill\(", r"def forward"),
    "heads_first_order": (r"(mask|len|bias)\w*.*(repeat|expand|tile)", *MASK_LINES),
    "head_order": (r"(mask|len|bias)\w*.*(repeat|expand|tile)", *MASK_LINES),
    "first_sample": (r"mask\w*\[0\b", *MASK_LINES),
    "transposed": (r"mask.*(transpose|permute|\.t\(|\.m?T\b|unsqueeze|None)", *MASK_LINES),
    "query_rows": (r"mask.*(unsqueeze|None|view|reshape)", *MASK_LINES),
}
DROPPED_FILL = r"^\s*[\w.\[\]]+\.masked_fill\("  # nothing takes what comes back
WRAP_LINES = (r"(layer_?)?norm\w*\(", r"return")


def _scale(option: str, name: str, sentence: str, have: str, fix: str, choice: str = "") -> Mistake:
    return Mistake(name, "scale", option, sentence, f"scores = {have}", SCALE_WANTED, fix, SCALE_LINES, choice)


SCALE_MISTAKES = (
    _scale(
        "sqrt_model",
        "scale_sqrt_d_model",
        "The scores are divided by the square root of the full width, not of one head's width.",
        "q kᵀ / sqrt(embed_dim)",
        "Divide by sqrt(head_dim) = sqrt(embed_dim / num_heads).",
    ),
    _scale(
        "sqrt_input",
        "scale_sqrt_d_model",
        "The scores are divided by the square root of the input's width, not of one head's width.",
        "q kᵀ / sqrt(embed_dim)",
        "Divide by sqrt(head_dim): take the size of the last axis of the keys.",
    ),
    _scale(
        "none",
        "scale_missing",
        "The scores are not scaled.",
        "q kᵀ",
        "Divide the scores by sqrt(head_dim).",
        "T5 leaves the scale out and makes up for it in the initialisation; non-local blocks have none.",
    ),
    _scale(
        "twice",
        "scale_twice",
        "The scores are divided by head_dim: the scale is applied twice, or the square root is missing.",
        "q kᵀ / head_dim",
        "Scale once, by 1 / sqrt(head_dim).",
    ),
    _scale(
        "multiplied",
        "scale_multiplied",
        "The scores are multiplied by sqrt(head_dim) instead of divided.",
        "q kᵀ * sqrt(head_dim)",
        "Divide by sqrt(head_dim).",
    ),
    _scale(
        "by_model",
        "scale_by_d_model",
        "The scores are divided by the full width, without a square root.",
        "q kᵀ / embed_dim",
        "Divide by sqrt(head_dim).",
    ),
    _scale(
        "quartic_root",
        "scale_quartic_root",
        "Only one of query and key carries the fourth root of head_dim.",
        "q kᵀ / head_dim^(1/4)",
        "Scale both query and key by head_dim^(-1/4), or the scores by 1 / sqrt(head_dim).",
    ),
    _scale(
        "sqrt_heads",
        "scale_sqrt_heads",
        "The scores are divided by the square root of the number of heads.",
        "q kᵀ / sqrt(num_heads)",
        "Divide by sqrt(head_dim); look at which axis the size is taken from.",
    ),
    _scale(
        "sqrt_key_len",
        "scale_sqrt_key_len",
        "The scores are divided by the square root of the number of keys.",
        "q kᵀ / sqrt(key_len)",
        "Divide by sqrt(head_dim): take the size of the last axis of the keys.",
    ),
    _scale(
        "sqrt_query_len",
        "scale_sqrt_query_len",
        "The scores are divided by the square root of the number of queries.",
        "q kᵀ / sqrt(query_len)",
        "Divide by sqrt(head_dim): take the size of the last axis of the queries.",
    ),
    _scale(
        "sqrt_batch",
        "scale_sqrt_batch",
        "The scores are divided by the square root of the batch size.",
        "q kᵀ / sqrt(batch)",
        "Divide by sqrt(head_dim): take the size of the last axis.",
    ),
    _scale(
        "squared",
        "scale_squared",
        "The scores are divided by the square of head_dim.",
        "q kᵀ / head_dim²",
        "Divide by sqrt(head_dim).",
    ),
    _scale(
        "halved",
        "scale_halved",
        "The scores are divided by twice the square root of head_dim.",
        "q kᵀ / (2 sqrt(head_dim))",
        "Divide by sqrt(head_dim) alone.",
    ),
    _scale(
        "root_of_half",
        "scale_root_of_half",
        "The scores are divided by the square root of half of head_dim.",
        "q kᵀ / sqrt(head_dim / 2)",
        "Divide by sqrt(head_dim).",
    ),
    _scale(
        "sqrt_model_multiplied",
        "scale_multiplied_d_model",
        "The scores are multiplied by the square root of the full width.",
        "q kᵀ * sqrt(embed_dim)",
        "Divide by sqrt(head_dim).",
    ),
    Mistake(
        "scale_after_softmax",
        "scale",
        "after_softmax",
        "The scale is applied to the weights, after the softmax.",
        "weights = softmax(q kᵀ) / sqrt(head_dim)",
        "weights = softmax(q kᵀ / sqrt(head_dim))",
        "Divide the scores before the softmax.",
        SCALE_LINES,
    ),
)

SPLIT_WANTED = "(b, l, h * d) -> view (b, l, h, d) -> transpose (b, h, l, d)"
MERGE_WANTED = "(b, h, l, d) -> transpose (b, l, h, d) -> reshape (b, l, h * d)"


def _orders() -> list[str]:
    return ["bhld", "hbld", "lhbd", "hlbd", "blhd", "lbhd", "bhdl"]


HEADS_BEFORE_LENGTH = r"\.(view|reshape)\([^,]+,\s*[\w.]*heads?\w*\s*,"
SPLIT_MISTAKES = (
    Mistake(
        "heads_never_split",
        "split",
        "whole",
        "The heads are never split: there is one head of the full width, scaled as if it were one of several.",
        "scores = q kᵀ / sqrt(embed_dim / num_heads), with q of (b, l, embed_dim)",
        SPLIT_WANTED,
        "Use view(batch, length, num_heads, head_dim).transpose(1, 2) after the projections.",
        SCALE_LINES,
    ),
    *(
        Mistake(
            "heads_split_without_transpose",
            "split",
            order,
            "The heads are split by reshaping without a transpose, so that tokens and heads mix.",
            f"q.reshape({', '.join(order)})",
            SPLIT_WANTED,
            "Use view(batch, length, num_heads, head_dim).transpose(1, 2).",
            SPLIT_LINES,
            tell=HEADS_BEFORE_LENGTH if order == "bhld" else "",
        )
        for order in _orders()
    ),
)
PACKED_MISTAKES = tuple(
    Mistake(
        "packed_parts_mixed",
        "split",
        order,
        "The packed projection is split by reshaping without a transpose, so that queries, keys and values mix.",
        f"qkv.reshape({', '.join(order)})",
        "(b, l, 3 * h * d) -> reshape (b, l, 3, h, d) -> permute (3, b, h, l, d)",
        "Use qkv.reshape(batch, length, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4).",
        (r"qkv\w*.*\.(view|reshape)\((3\b|[^,]+,\s*3\b|.*\b3\s*\*)", *SPLIT_LINES),
    )
    for order in ("3blhd", "3bhld", "b3lhd", "b3hld", "bhl3d")
)
MERGE_MISTAKES = tuple(
    Mistake(
        "heads_merged_without_transpose",
        "merge",
        order,
        "The heads are merged by reshaping without transposing back, so that tokens and heads mix.",
        f"context laid out ({', '.join(order)}), reshaped to (b, l, h * d)",
        MERGE_WANTED,
        "Use context.transpose(1, 2).reshape(batch, length, num_heads * head_dim).",
        MERGE_LINES,
    )
    for order in _orders()
)

TURNS_BACK = "nanochat rotates this way; a model trained that way is as good, but weights from other code do not fit."
# (name, sentence, have, want, fix) for either way to pair the elements of a head.
ROTARY_MISTAKES = (
    (
        "rotary_reversed",
        "Positions rotate queries and keys the wrong way round.",
        "(a cos + b sin, b cos - a sin)",
        "(a cos - b sin, b cos + a sin)",
        "The quarter turn of (a, b) is (-b, a).",
    ),
    (
        "rotary_mixed",
        "Elements are paired one way and their angles another: that is no rotation.",
        "halves with the angles of neighbours, or the other way round",
        "cat(angles, angles) for halves, repeat_interleave(angles, 2) for neighbours",
        "Lay out the angles as the elements are paired.",
    ),
    (
        "rotary_queries",
        "Positions rotate the queries and not the keys.",
        "scores = rotate(q) kᵀ",
        "scores = rotate(q) rotate(k)ᵀ",
        "Rotate the keys too.",
    ),
    (
        "rotary_keys",
        "Positions rotate the keys and not the queries.",
        "scores = q rotate(k)ᵀ",
        "scores = rotate(q) rotate(k)ᵀ",
        "Rotate the queries too.",
    ),
    (
        "rotary_values",
        "Positions rotate the values too.",
        "output = weights rotate(v)",
        "output = weights v",
        "Rotate queries and keys only.",
    ),
)

AXIS_MISTAKES = (
    Mistake(
        "attention_among_heads",
        "attend_over",
        "heads",
        "The heads of one token attend to each other; no token ever sees another.",
        "scores of shape (b, l, h, h)",
        "scores of shape (b, h, l, l)",
        "Transpose to (batch, heads, length, head_dim) before q @ kᵀ.",
        (r"view|reshape|transpose|permute",),
    ),
    Mistake(
        "attention_over_batch",
        "attend_over",
        "batch",
        "Attention runs over the batch: each sample looks at the other samples, no token sees another.",
        "scores among samples",
        "scores among tokens",
        "The class works sequence first: transpose the input, or pass batch_first=True.",
        (r"MultiheadAttention\(", r"matmul|bmm|einsum|@"),
    ),
    Mistake(
        "softmax_over_queries",
        "softmax",
        "queries",
        "The softmax runs over the queries: the weights of each key, not of each query, sum to one.",
        "weights = softmax(scores, dim=-2)",
        "weights = softmax(scores, dim=-1)",
        "Take the softmax over the last axis, the keys.",
        SOFTMAX_LINES,
    ),
    Mistake(
        "softmax_over_heads",
        "softmax",
        "heads",
        "The softmax runs over the heads.",
        "weights = softmax(scores, dim=1)",
        "weights = softmax(scores, dim=-1)",
        "Take the softmax over the last axis, the keys.",
        SOFTMAX_LINES,
    ),
    Mistake(
        "softmax_over_batch",
        "softmax",
        "batch",
        "The softmax runs over the batch.",
        "weights = softmax(scores, dim=0)",
        "weights = softmax(scores, dim=-1)",
        "Take the softmax over the last axis, the keys.",
        SOFTMAX_LINES,
    ),
    Mistake(
        "softmax_missing",
        "softmax",
        "missing",
        "There is no softmax.",
        "weights = scores",
        "weights = softmax(scores)",
        "Apply softmax over the keys before multiplying by the values.",
        (r"matmul|bmm|einsum|@",),
    ),
    Mistake(
        "sigmoid_for_softmax",
        "softmax",
        "sigmoid",
        "A sigmoid is used instead of the softmax.",
        "weights = sigmoid(scores)",
        "weights = softmax(scores)",
        "Use softmax over the keys.",
        (r"sigmoid",),
    ),
    Mistake(
        "softmax_in_float16",
        "softmax_precision",
        "float16",
        "The softmax is computed in float16, below the precision of the input.",
        "softmax(scores.half())",
        "softmax(scores)",
        "Leave the scores in the input's dtype, or use float32.",
        (r"half|float16", *SOFTMAX_LINES),
    ),
    Mistake(
        "softmax_in_bfloat16",
        "softmax_precision",
        "bfloat16",
        "The softmax is computed in bfloat16, below the precision of the input.",
        "softmax(scores.bfloat16())",
        "softmax(scores)",
        "Leave the scores in the input's dtype, or use float32.",
        (r"bfloat16", *SOFTMAX_LINES),
    ),
    Mistake(
        "key_viewed_for_transposed",
        "key_transpose",
        "viewed",
        "The keys are reshaped where they should be transposed.",
        "q @ k.view(..., head_dim, key_len)",
        "q @ k.transpose(-2, -1)",
        "Use k.transpose(-2, -1): view does not move elements.",
        (r"k\w*\.(view|reshape)", r"view|reshape"),
    ),
    Mistake(
        "grouped_heads_tiled",
        "grouped",
        "tiled",
        "Grouped keys and values are repeated in the wrong order.",
        "k.repeat: heads 0, 1, 0, 1",
        "k.repeat_interleave: heads 0, 0, 1, 1",
        "Use repeat_interleave on the head axis.",
        (r"repeat|expand",),
    ),
    *(
        Mistake(
            name,
            "rotary",
            name.replace("rotary", layout),
            sentence,
            have,
            want,
            fix,
            (r"cat|stack", r"cos|sin|polar|rot"),
            choice=TURNS_BACK if name == "rotary_reversed" else "",
        )
        for layout in ("halves", "pairs")
        for name, sentence, have, want, fix in ROTARY_MISTAKES
    ),
)


NAMES_OF = {"q": r"(q|x_?q|quer(y|ies))\w*", "k": r"(k|x_?k|keys?)\w*", "v": r"(v|x_?v|values?)\w*"}


def _swapped(order: str, name: str, sentence: str) -> Mistake:
    roles = {"q": "query", "k": "key", "v": "value"}
    have = ", ".join(roles[letter] for letter in order)
    wrong = [(role, NAMES_OF[letter]) for role, letter in zip("qkv", order, strict=True) if role != letter]
    patterns = [rf"\.(?!\w*(att|qkv))\w*{role}\w*\(\s*({used}|x|hidden\w*)\s*[,)]" for role, used in wrong]
    patterns += [rf"(matmul|bmm|@).*\b{used}\.(transpose|m?T\b)" for role, used in wrong if role == "k"]
    return Mistake(
        name,
        "arguments",
        order,
        sentence,
        f"Attention({have})",
        "Attention(query, key, value)",
        "Use query, key and value as their names say.",
        tuple(patterns),
    )


ROLE_MISTAKES = (
    _swapped(
        "qvk", "key_value_swapped", "Key and value are swapped: the values are matched and the keys are averaged."
    ),
    _swapped("kqv", "query_key_swapped", "Query and key are swapped."),
    _swapped("vkq", "query_value_swapped", "Query and value are swapped."),
    _swapped("kvq", "arguments_rotated", "Query, key and value are used in the wrong order."),
    _swapped("vqk", "arguments_rotated", "Query, key and value are used in the wrong order."),
    _swapped("qkq", "values_from_query", "The values are made from the queries' tensor."),
    _swapped("qqv", "keys_from_query", "The keys are made from the queries' tensor."),
    _swapped("qqq", "memory_unused", "Keys and values are made from the queries' tensor: it is self-attention."),
    _swapped("qkk", "values_from_key", "The values are made from the keys' tensor."),
    _swapped("qvv", "keys_from_value", "The keys are made from the values' tensor."),
)


def _matrices(order: str, name: str, sentence: str, fix: str) -> Mistake:
    letters = tuple(zip("qkv", order, strict=True))
    words = {"q": "Wq", "k": "Wk", "v": "Wv", "-": "(no matrix)"}
    have = ", ".join(f"{role} = {role}_input {words[letter]}" for role, letter in letters)
    guilty = [NAMES_OF[role] for role, letter in letters if role != letter]
    patterns = [rf"^\s*{name}\s*=.*\(" for name in guilty] + [rf"self\.\w+(\[\d\])?\(\s*{name}\b" for name in guilty]
    want = "q = q_input Wq, k = k_input Wk, v = v_input Wv"
    return Mistake(name, "matrices", order, sentence, have, want, fix, tuple(patterns))


MATRIX_MISTAKES = (
    _matrices(
        "qk-", "value_not_projected", "The values are not projected.", "Apply the value projection to the values."
    ),
    _matrices("q-v", "key_not_projected", "The keys are not projected.", "Apply the key projection to the keys."),
    _matrices(
        "-kv", "query_not_projected", "The queries are not projected.", "Apply the query projection to the queries."
    ),
    _matrices(
        "qqq", "projection_shared", "Queries, keys and values share one projection.", "Give each its own projection."
    ),
    _matrices(
        "kkk", "projection_shared", "Queries, keys and values share one projection.", "Give each its own projection."
    ),
    _matrices(
        "vvv", "projection_shared", "Queries, keys and values share one projection.", "Give each its own projection."
    ),
    _matrices(
        "qkk",
        "value_uses_key_projection",
        "The values go through the key projection.",
        "Use the value projection for the values.",
    ),
    _matrices(
        "qvv",
        "key_uses_value_projection",
        "The keys go through the value projection.",
        "Use the key projection for the keys.",
    ),
    _matrices(
        "qqv",
        "key_uses_query_projection",
        "The keys go through the query projection.",
        "Use the key projection for the keys.",
    ),
    _matrices(
        "kkv",
        "query_uses_key_projection",
        "The queries go through the key projection.",
        "Use the query projection for the queries.",
    ),
    _matrices(
        "qkq",
        "value_uses_query_projection",
        "The values go through the query projection.",
        "Use the value projection for the values.",
    ),
    _matrices(
        "vkv",
        "query_uses_value_projection",
        "The queries go through the value projection.",
        "Use the query projection for the queries.",
    ),
    _matrices("q--", "only_query_projected", "Only the queries are projected.", "Project keys and values too."),
    _matrices("--v", "only_value_projected", "Only the values are projected.", "Project queries and keys too."),
)
BIAS_MISTAKES = tuple(
    Mistake(
        f"{role}_bias_dropped",
        f"{role}_bias",
        "dropped",
        f"The bias of the {role} projection exists but is not used.",
        f"{role} = x Wᵀ",
        f"{role} = x Wᵀ + b",
        "Call the layer, or pass its bias to F.linear.",
        (r"F\.linear|\.weight",),
    )
    for role in ("query", "key", "value", "output")
)
OUTPUT_MISTAKES = (
    Mistake(
        "output_projection_skipped",
        "output",
        "skipped",
        "The output projection exists but is not applied.",
        "output = merged",
        "output = merged Wo + bo",
        "Apply the output projection to the merged heads.",
        (r"return",),
    ),
)

WRAP_WANTED = "LayerNorm(x + Attention(x)), or x + Attention(LayerNorm(x))"


def _wrap(option: str, name: str, sentence: str, have: str, fix: str, choice: str = "") -> Mistake:
    return Mistake(name, "wrap", option, sentence, f"output = {have}", WRAP_WANTED, fix, WRAP_LINES, choice)


WRAP_MISTAKES = (
    _wrap(
        "residual_from_norm",
        "residual_from_normalised",
        "The residual is taken from the normalised input.",
        "LayerNorm(x) + Attention(LayerNorm(x))",
        "Keep x from before the LayerNorm and add that.",
    ),
    *(
        _wrap(
            wrap,
            "queries_not_normalised",
            "Keys and values are made from the normalised input, queries from the input itself.",
            f"{residual}Attention(x, LayerNorm(x), LayerNorm(x))",
            "Normalise x once, and make queries, keys and values of that.",
        )
        for wrap, residual in (("pre_norm_keys_only", ""), ("pre_norm_residual_keys_only", "x + "))
    ),
    _wrap(
        "residual_twice", "residual_added_twice", "The residual is added twice.", "x + x + Attention(x)", "Add x once."
    ),
    _wrap(
        "post_norm_residual_twice",
        "residual_added_twice",
        "The residual is added twice.",
        "LayerNorm(x + x + Attention(x))",
        "Add x once.",
    ),
    _wrap(
        "norm_without_residual",
        "residual_missing",
        "The residual is missing.",
        "LayerNorm(Attention(x))",
        "Add x before the LayerNorm.",
    ),
    _wrap(
        "residual_after_norm",
        "residual_after_norm",
        "The residual is added after the LayerNorm.",
        "x + LayerNorm(Attention(x))",
        "Add x before the LayerNorm: LayerNorm(x + Attention(x)).",
        "Swin v2 does this on purpose (res-post-norm).",
    ),
    _wrap(
        "fresh_norm",
        "norm_fresh_in_forward",
        "The LayerNorm is created anew in every forward: its gain and bias are never trained.",
        "LayerNorm_with_gain_1_and_bias_0(x + Attention(x))",
        "Make the LayerNorm in __init__ and call it here.",
    ),
    _wrap(
        "residual_subtracted",
        "residual_subtracted",
        "The attention is subtracted from the residual.",
        "x - Attention(x)",
        "Add it.",
    ),
)

CAUSAL_WANTED = "query i looks at keys 0 ... i"


def _causal(option: str, name: str, sentence: str, have: str, fix: str) -> Mistake:
    return Mistake(name, "causal", option, sentence, have, CAUSAL_WANTED, fix, (r"tril|triu", *MASK_LINES))


CAUSAL_MISTAKES = (
    _causal(
        "sees_next",
        "causal_sees_one_ahead",
        "The causal mask is off by one: each query sees the token after it.",
        "query i looks at keys 0 ... i + 1",
        "Use tril(..., diagonal=0) for what may be seen, triu(..., diagonal=1) for what may not.",
    ),
    _causal(
        "not_itself",
        "causal_cannot_see_itself",
        "The causal mask is off by one: no query sees its own token.",
        "query i looks at keys 0 ... i - 1",
        "Use tril(..., diagonal=0) for what may be seen, triu(..., diagonal=1) for what may not.",
    ),
    _causal(
        "reversed",
        "causal_mask_inverted",
        "The causal mask is the wrong way round: each query sees itself and the future only.",
        "query i looks at keys i ... end",
        "Invert or transpose the mask.",
    ),
    _causal(
        "strictly_reversed",
        "causal_mask_inverted",
        "The causal mask is inverted: each query sees the future only.",
        "query i looks at keys i + 1 ... end",
        "Invert the mask: fill where tril is 0.",
    ),
    _causal(
        "after_softmax",
        "causal_mask_after_softmax",
        "The causal mask is applied after the softmax: the rows no longer sum to one.",
        "weights = softmax(scores) * tril",
        "Fill the scores with -inf before the softmax.",
    ),
)


def _causal_use(option: str, name: str, sentence: str, have: str, fix: str) -> Mistake:
    patterns = (*MASK_LINES, r"tril|triu")
    want = "scores.masked_fill(future, -inf)"
    return Mistake(name, "causal_use", option, sentence, have, want, fix, patterns, tell=TELLS.get(option, ""))


CAUSAL_USE_MISTAKES = (
    _causal_use(
        "added_visible",
        "causal_mask_added_as_01",
        "The causal mask of zeros and ones is added to the scores, so that the future leaks.",
        "scores + tril",
        "Fill the scores with -inf where the mask is 0.",
    ),
    _causal_use(
        "added_blocked",
        "causal_mask_added_as_01",
        "The causal mask of zeros and ones is added to the scores, so that the future leaks.",
        "scores + triu",
        "Fill the scores with -inf where the mask is 1.",
    ),
    _causal_use(
        "multiplied_visible",
        "causal_mask_multiplied",
        "The scores are multiplied by the causal mask: a score of 0 hides nothing.",
        "scores * tril",
        "Fill the scores with -inf where the mask is 0.",
    ),
    _causal_use(
        "fill_-10",
        "causal_fill_too_small",
        "The causal mask fills with -10, which does not quite hide the future.",
        "scores.masked_fill(future, -10)",
        "Fill with -inf.",
    ),
    _causal_use(
        "fill_1e-9",
        "causal_fill_not_negative",
        "The causal mask fills with 1e-9, a number near 0, where -1e9 was meant.",
        "scores.masked_fill(future, 1e-9)",
        "Fill with -inf.",
    ),
    _causal_use(
        "fill_-1e-9",
        "causal_fill_not_negative",
        "The causal mask fills with -1e-9, a number near 0, where -1e9 was meant.",
        "scores.masked_fill(future, -1e-9)",
        "Fill with -inf.",
    ),
    _causal_use(
        "fill_0",
        "causal_fill_zero",
        "The causal mask fills the scores with 0, which hides nothing.",
        "scores.masked_fill(future, 0)",
        "Fill with -inf.",
    ),
    _causal_use(
        "fill_tiny32",
        "causal_fill_not_negative",
        "The causal mask fills with the least positive float (finfo.tiny), where finfo.min was meant.",
        "scores.masked_fill(future, finfo.tiny)",
        "Fill with -inf, or finfo(dtype).min.",
    ),
)

ATTENTION_MISTAKES = (
    *SCALE_MISTAKES,
    *SPLIT_MISTAKES,
    *PACKED_MISTAKES,
    *MERGE_MISTAKES,
    *AXIS_MISTAKES,
    *ROLE_MISTAKES,
    *MATRIX_MISTAKES,
    *BIAS_MISTAKES,
    *OUTPUT_MISTAKES,
    *WRAP_MISTAKES,
    *CAUSAL_MISTAKES,
    *CAUSAL_USE_MISTAKES,
)

MASK_WANTED = "scores.masked_fill(hidden, -inf), then softmax"


def _mask(option: str, name: str, sentence: str, have: str, fix: str) -> Mistake:
    lines = MASK_LINES_OF.get(option, MASK_LINES)
    return Mistake(name, "mask", option, sentence, have, MASK_WANTED, fix, lines, tell=TELLS.get(option, ""))


MASK_MISTAKES = (
    _mask(
        "ignored",
        "mask_never_used",
        "The mask is accepted but never used.",
        "softmax(scores)",
        "Fill the scores with -inf where the mask hides a key.",
    ),
    _mask(
        "added_visible",
        "mask_added_as_01",
        "The mask is turned into zeros and ones and added to the scores, so that hidden keys leak.",
        "softmax(scores + mask)",
        "Fill with -inf where the mask hides a key.",
    ),
    _mask(
        "added_blocked",
        "mask_added_as_01",
        "The mask is turned into zeros and ones and added to the scores, so that hidden keys leak.",
        "softmax(scores + mask)",
        "Fill with -inf where the mask hides a key.",
    ),
    _mask(
        "subtracted_blocked",
        "mask_added_as_01",
        "The mask is turned into zeros and ones and subtracted from the scores, so that hidden keys leak.",
        "softmax(scores - mask)",
        "Fill with -inf where the mask hides a key.",
    ),
    _mask(
        "subtracted_10",
        "mask_fill_too_small",
        "Only 10 is subtracted from the scores of hidden keys, which does not quite hide them.",
        "softmax(scores - 10 * hidden)",
        "Fill with -inf where the mask hides a key.",
    ),
    _mask(
        "multiplied_visible",
        "mask_multiplied",
        "The scores are multiplied by the mask: a score of 0 hides nothing.",
        "softmax(scores * mask)",
        "Fill with -inf where the mask hides a key.",
    ),
    _mask(
        "multiplied_blocked",
        "mask_multiplied",
        "The scores are multiplied by the mask: a score of 0 hides nothing.",
        "softmax(scores * mask)",
        "Fill with -inf where the mask hides a key.",
    ),
    _mask(
        "after_softmax",
        "mask_after_softmax",
        "The mask is applied after the softmax: the rows no longer sum to one.",
        "softmax(scores) * mask",
        "Mask the scores before the softmax.",
    ),
    _mask(
        "after_softmax_inf",
        "mask_after_softmax",
        "The mask is applied after the softmax, and with -inf: the weights of hidden keys are infinite.",
        "softmax(scores).masked_fill(hidden, -inf)",
        "Mask the scores before the softmax.",
    ),
    _mask(
        "transposed",
        "mask_transposed",
        "The mask is transposed: it hides queries from keys.",
        "mask[b, k, q]",
        "Transpose the mask, or use mask[:, None, None, :] for padding.",
    ),
    _mask(
        "query_rows",
        "padding_mask_on_queries",
        "The padding mask is applied to the queries instead of the keys.",
        "mask[:, None, :, None]",
        "Use mask[:, None, None, :].",
    ),
    _mask(
        "head_order",
        "mask_repeated_in_wrong_order",
        "The mask is repeated over the heads in the wrong order: samples get each other's mask.",
        "mask.repeat(num_heads, 1, 1)",
        "Heads lie inside each sample: use mask.repeat_interleave(num_heads, 0).",
    ),
    _mask(
        "heads_first_order",
        "mask_repeated_in_wrong_order",
        "The mask is repeated over the heads in the wrong order: samples get each other's mask.",
        "mask.repeat_interleave(num_heads, 0)",
        "Heads lie outside the batch here: use mask.repeat(num_heads, 1, 1).",
    ),
    _mask(
        "first_sample",
        "mask_of_first_sample",
        "Every sample gets the mask of the first one.",
        "mask[0]",
        "Keep the batch axis of the mask.",
    ),
    _mask(
        "fill_-1",
        "mask_fill_too_small",
        "The mask fills with -1, which hides hardly anything.",
        "masked_fill(hidden, -1)",
        "Fill with -inf.",
    ),
    _mask(
        "fill_-5",
        "mask_fill_too_small",
        "The mask fills with -5, which hides keys only partly.",
        "masked_fill(hidden, -5)",
        "Fill with -inf.",
    ),
    _mask(
        "fill_-10",
        "mask_fill_too_small",
        "The mask fills with -10, which does not quite hide keys.",
        "masked_fill(hidden, -10)",
        "Fill with -inf.",
    ),
    _mask(
        "fill_-20",
        "mask_fill_too_small",
        "The mask fills with -20, which does not quite hide keys.",
        "masked_fill(hidden, -20)",
        "Fill with -inf.",
    ),
    _mask(
        "fill_scaled",
        "mask_fill_too_small",
        "The mask fills with -10 before the scale makes it smaller still: hidden keys leak.",
        "masked_fill(hidden, -10) * scale",
        "Fill with -inf.",
    ),
    _mask(
        "fill_1e-9",
        "mask_fill_not_negative",
        "The mask fills with 1e-9, a number near 0, where -1e9 was meant: hidden keys leak.",
        "masked_fill(hidden, 1e-9)",
        "Fill with -inf.",
    ),
    _mask(
        "fill_-1e-9",
        "mask_fill_not_negative",
        "The mask fills with -1e-9, a number near 0, where -1e9 was meant: hidden keys leak.",
        "masked_fill(hidden, -1e-9)",
        "Fill with -inf.",
    ),
    _mask(
        "fill_1e-12",
        "mask_fill_not_negative",
        "The mask fills with 1e-12, a number near 0: hidden keys leak.",
        "masked_fill(hidden, 1e-12)",
        "Fill with -inf.",
    ),
    _mask(
        "fill_-1e-12",
        "mask_fill_not_negative",
        "The mask fills with -1e-12, a number near 0: hidden keys leak.",
        "masked_fill(hidden, -1e-12)",
        "Fill with -inf.",
    ),
    _mask(
        "fill_0",
        "mask_fill_zero",
        "The mask fills the scores with 0, which hides nothing.",
        "masked_fill(hidden, 0)",
        "Fill with -inf.",
    ),
    _mask(
        "fill_tiny32",
        "mask_fill_not_negative",
        "The mask fills with the least positive float (finfo.tiny), where finfo.min was meant.",
        "masked_fill(hidden, finfo.tiny)",
        "Fill with -inf, or finfo(dtype).min.",
    ),
    _mask(
        "fill_+inf",
        "mask_fill_positive",
        "The mask fills with a large positive number: only hidden keys are looked at.",
        "masked_fill(hidden, 1e9)",
        "Fill with -inf.",
    ),
)

# Settings that are right too: what the class includes, and in which order it lays out its features.
CONVENTIONS: dict[str, tuple[str, ...]] = {
    "wrap": (
        "none",
        "residual",
        "post_norm",
        "pre_norm",
        "pre_norm_residual",
        "pre_norm_query_only",
        "pre_norm_residual_query_only",
        "merged_norm",
    ),
    "wrap of two norms": ("pre_norm", "pre_norm_residual"),
    "wrap of cross-attention": ("pre_norm_keys_only", "pre_norm_residual_keys_only"),
    "features": ("lh", "ld"),
    "softmax_precision": ("same", "float32"),
    "causal": ("no", "yes"),
}


def mistake_for(slot: str, option: str) -> Mistake:
    """Look a mistake up by the switch that it sets.

    >>> mistake_for("scale", "none").sentence
    'The scores are not scaled.'
    """
    known = {(m.slot, m.option): m for m in (*ATTENTION_MISTAKES, *MASK_MISTAKES)}
    return known[slot, option]


def named_mistake(name: str) -> Mistake:
    """Look a mistake up by its name.

    >>> named_mistake("softmax_missing").fix
    'Apply softmax over the keys before multiplying by the values.'
    """
    return next(m for m in (*ATTENTION_MISTAKES, *MASK_MISTAKES, *STRUCTURE.values()) if m.name == name)


def _structure(name: str, sentence: str, have: str, want: str, fix: str, *patterns: str, choice: str = "") -> Mistake:
    return Mistake(name, "structure", name, sentence, have, want, fix, patterns, choice)


# What the parameters or the calls show, rather than the numbers.
STRUCTURE = {
    mistake.name: mistake
    for mistake in (
        _structure(
            "projection_shared_by_heads",
            "The heads are split before projecting, and all of them share one small projection.",
            "head_i = x_i W with one W of (head_dim, head_dim)",
            "head_i = x W_i with W of (embed_dim, embed_dim)",
            "Project with nn.Linear(embed_dim, embed_dim) first, then split into heads.",
            r"Linear\(\s*self\.(head|d_k|d_head)",
            r"Linear\(",
        ),
        _structure(
            "norm_never_used",
            "A LayerNorm exists but is never called.",
            "output = x + Attention(x), or less",
            WRAP_WANTED,
            "Call the LayerNorm, or remove it.",
            r"norm",
        ),
        _structure(
            "causal_mask_never_used",
            "A causal mask is intended but not applied: every token sees the future.",
            "query i looks at all keys",
            CAUSAL_WANTED,
            "Assign what masked_fill returns (scores = scores.masked_fill(...)), or pass is_causal=True.",
            DROPPED_FILL,
            r"is_causal\s*=\s*False",
            r"tril|triu",
            choice="Right where every token may see all (BERT, ViT); the unused mask, or the name, then misleads.",
        ),
        _structure(
            "dropout_in_eval",
            "Dropout is active in eval: two calls with the same input differ.",
            "F.dropout(weights, p) with training=True, its default",
            "F.dropout(weights, p, self.training)",
            "Use nn.Dropout, or pass training=self.training.",
            r"(F|functional)\.dropout\(",
            r"dropout_p\s*=(?!.*training)",
            r"scaled_dot_product_attention\(",
            r"(?<!self\.)\bdropout\(",
        ),
        _structure(
            "dropout_on_scores",
            "Dropout is applied to the scores, before the softmax: a dropped score is 0, not hidden.",
            "softmax(dropout(scores))",
            "dropout(softmax(scores))",
            "Drop the weights, after the softmax.",
            r"drop",
        ),
        _structure(
            "dropout_not_rescaled",
            "What survives dropout is not scaled up by 1 / (1 - p), so that training and eval have different means.",
            "weights * keep",
            "weights * keep / (1 - p)",
            "Use nn.Dropout, or divide by 1 - p.",
            r"rand|bernoulli|drop",
        ),
        _structure(
            "layer_made_in_forward",
            "A layer with weights is created anew in every forward, so that it is never trained.",
            "forward: nn.Linear(...)(x)",
            "__init__: self.linear = nn.Linear(...); forward: self.linear(x)",
            "Make the layer in __init__.",
            r"nn\.(Linear|LayerNorm|Embedding)\([^)]*\)(\.to\([^)]*\))?\(",
            r"nn\.(Linear|LayerNorm)",
        ),
        _structure(
            "weights_not_those_used",
            "The attention maps that are returned are not the weights that were used.",
            "returns other maps",
            "returns softmax(scores), (batch, heads, query, key)",
            "Return the weights of this attention, after the softmax and before dropout.",
            r"return",
        ),
    )
}
