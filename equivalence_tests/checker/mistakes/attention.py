"""The known mistakes of attentions, each with the change that makes it of a right one."""

from dataclasses import replace

from equivalence_tests.checker.mistakes.mistake import Change, Mistake

__all__ = ["ORDERS", "ROWS"]

# ---------------------------------------------------------------------------------------------- scale
SCALE = "scores = q kᵀ / sqrt(head_dim)"
SCALE_LINE = "q @ k.mT / math.sqrt(q.size(-1))"


def _scale(name: str, sentence: str, have: str, fix: str, code: str, on_purpose_in: str = "") -> Mistake:
    found = Mistake(name, "scale", sentence, f"scores = {have}", SCALE, fix, on_purpose_in)
    return found.made_of("cross", (SCALE_LINE, code)) if code else found


SCALES = (
    _scale(
        "scale_sqrt_d_model",
        "The scores are divided by the square root of the input's width, not of one head's width.",
        "q kᵀ / sqrt(embed_dim)",
        "Divide by sqrt(head_dim) = sqrt(embed_dim / num_heads): take the size of the last axis of the keys.",
        "q @ k.mT / math.sqrt(query.size(-1))",
    ),
    _scale(
        "scale_missing",
        "The scores are not scaled.",
        "q kᵀ",
        "Divide the scores by sqrt(head_dim).",
        "q @ k.mT",
        "T5 leaves the scale out and makes up for it in the initialisation; non-local blocks have none.",
    ),
    _scale(
        "scale_twice",
        "The scores are divided by head_dim: the scale is applied twice, or the square root is missing.",
        "q kᵀ / head_dim",
        "Scale once, by 1 / sqrt(head_dim).",
        "q @ k.mT / q.size(-1)",
    ),
    _scale(
        "scale_multiplied",
        "The scores are multiplied by sqrt(head_dim) instead of divided.",
        "q kᵀ * sqrt(head_dim)",
        "Divide by sqrt(head_dim).",
        "q @ k.mT * math.sqrt(q.size(-1))",
    ),
    _scale(
        "scale_by_d_model",
        "The scores are divided by the full width, without a square root.",
        "q kᵀ / embed_dim",
        "Divide by sqrt(head_dim).",
        "q @ k.mT / query.size(-1)",
    ),
    _scale(
        "scale_quartic_root",
        "Only one of query and key carries the fourth root of head_dim.",
        "q kᵀ / head_dim^(1/4)",
        "Scale both query and key by head_dim^(-1/4), or the scores by 1 / sqrt(head_dim).",
        "(q * q.size(-1) ** -0.25) @ k.mT",
    ),
    _scale(
        "scale_sqrt_heads",
        "The scores are divided by the square root of the number of heads.",
        "q kᵀ / sqrt(num_heads)",
        "Divide by sqrt(head_dim); look at which axis the size is taken from.",
        "q @ k.mT / math.sqrt(q.size(1))",
    ),
    _scale(
        "scale_sqrt_key_len",
        "The scores are divided by the square root of the number of keys.",
        "q kᵀ / sqrt(key_len)",
        "Divide by sqrt(head_dim): take the size of the last axis of the keys.",
        "q @ k.mT / math.sqrt(k.size(-2))",
    ),
    _scale(
        "scale_sqrt_query_len",
        "The scores are divided by the square root of the number of queries.",
        "q kᵀ / sqrt(query_len)",
        "Divide by sqrt(head_dim): take the size of the last axis of the queries.",
        "q @ k.mT / math.sqrt(q.size(-2))",
    ),
    _scale(
        "scale_sqrt_batch",
        "The scores are divided by the square root of the batch size.",
        "q kᵀ / sqrt(batch)",
        "Divide by sqrt(head_dim): take the size of the last axis.",
        "q @ k.mT / math.sqrt(q.size(0))",
    ),
    _scale(
        "scale_squared",
        "The scores are divided by the square of head_dim.",
        "q kᵀ / head_dim²",
        "Divide by sqrt(head_dim).",
        "q @ k.mT / q.size(-1) ** 2",
    ),
    _scale(
        "scale_halved",
        "The scores are divided by twice the square root of head_dim.",
        "q kᵀ / (2 sqrt(head_dim))",
        "Divide by sqrt(head_dim) alone.",
        "q @ k.mT / (2 * math.sqrt(q.size(-1)))",
    ),
    _scale(
        "scale_root_of_half",
        "The scores are divided by the square root of half of head_dim.",
        "q kᵀ / sqrt(head_dim / 2)",
        "Divide by sqrt(head_dim).",
        "q @ k.mT / math.sqrt(q.size(-1) / 2)",
    ),
    _scale(
        "scale_multiplied_d_model",
        "The scores are multiplied by the square root of the full width.",
        "q kᵀ * sqrt(embed_dim)",
        "Divide by sqrt(head_dim).",
        "q @ k.mT * math.sqrt(query.size(-1))",
    ),
    _scale(
        "scale_other",
        "The scores are multiplied by {factor:.4g}, which is none of the sizes.",
        "q kᵀ * {factor:.4g}",
        "Divide the scores by sqrt(head_dim).",
        "q @ k.mT * 0.7",
    ),
    _scale(
        "scale_differs_by_head",
        "The scores of the heads are multiplied by different numbers.",
        "q kᵀ * scale[head]",
        "Divide the scores of all heads by sqrt(head_dim).",
        "q @ k.mT * torch.arange(1, self.num_heads + 1).to(q)[:, None, None]",
    ),
    Mistake(
        "scale_after_softmax",
        "scale",
        "The scale is applied to the weights, after the softmax.",
        "weights = softmax(q kᵀ) / sqrt(head_dim)",
        "weights = softmax(q kᵀ / sqrt(head_dim))",
        "Divide the scores before the softmax.",
    ).made_of(
        "cross",
        (SCALE_LINE, "q @ k.mT"),
        ("weights = scores.softmax(-1)", "weights = scores.softmax(-1) / math.sqrt(q.size(-1))"),
    ),
)

# ---------------------------------------------------------------------------------------------- heads and axes
SPLIT = "(b, l, h * d) -> view (b, l, h, d) -> transpose (b, h, l, d)"
SPLIT_LINE = "x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)"
MERGE = "(b, h, l, d) -> transpose (b, l, h, d) -> reshape (b, l, h * d)"
MERGE_LINE = "context.transpose(1, 2).flatten(2)"
WEIGHED = "dropped @ v"
SPLIT_ALL = "q, k, v = (self.split(x) for x in (q, k, v))"
ACROSS_SAMPLES = "torch.einsum('bhid,bhjd->hij', q, k)[None].expand(x.size(0), -1, -1, -1) / math.sqrt(q.size(-1))"

LAYOUTS = (
    Mistake(
        "heads_never_split",
        "split",
        "The heads are never split: there is one head of the full width, scaled as if it were one of several.",
        "scores = q kᵀ / sqrt(embed_dim / num_heads), with q of (b, l, embed_dim)",
        SPLIT,
        "Use view(batch, length, num_heads, head_dim).transpose(1, 2) after the projections.",
    ).made_of(
        "cross",
        (SPLIT_LINE, "x[:, None]"),
        (SCALE_LINE, "q @ k.mT / math.sqrt(q.size(-1) // self.num_heads)"),
    ),
    Mistake(
        "heads_split_without_transpose",
        "split",
        "The heads are split by reshaping without a transpose, so that tokens and heads mix.",
        "q.reshape(b, h, l, d)",
        SPLIT,
        "Use view(batch, length, num_heads, head_dim).transpose(1, 2).",
    ).made_of("cross", (SPLIT_LINE, "x.view(x.size(0), self.num_heads, x.size(1), -1)")),
    Mistake(
        "key_viewed_for_transposed",
        "split",
        "The keys are reshaped where they should be transposed.",
        "q @ k.view(..., head_dim, key_len)",
        "q @ k.transpose(-2, -1)",
        "Use k.transpose(-2, -1): view does not move elements.",
    ).made_of("cross", ("q @ k.mT", "q @ k.reshape(*k.shape[:2], k.size(3), k.size(2))")),
    Mistake(
        "product_pairs_wrong_axes",
        "product",
        "The product of queries and keys sums over another axis than the elements of a head.",
        "one score sums over several tokens or heads",
        "scores[i, j] = sum over d of q[i, d] k[j, d]",
        "Multiply q by k.transpose(-2, -1).",
    ).made_of("itself", (SCALE_LINE, ACROSS_SAMPLES)),
    Mistake(
        "operands_summed_apart",
        "product",
        "An einsum sums each operand by itself and multiplies the sums: the axis that they share has two letters.",
        "einsum('{have}')",
        "einsum('{want}')",
        "Give the axis to sum over the same letter in both operands.",
    ).made_of("cross", (WEIGHED, "torch.einsum('bhqk,bhvd->bhqd', dropped, v)")),
    Mistake(
        "attention_among_heads",
        "product",
        "The heads of one token attend to each other; no token ever sees another.",
        "scores of shape (b, l, h, h)",
        "scores of shape (b, h, l, l)",
        "Transpose to (batch, heads, length, head_dim) before q @ kᵀ.",
    ).made_of(
        "itself", (SPLIT_LINE, "x.view(x.size(0), x.size(1), self.num_heads, -1)"), (MERGE_LINE, "context.flatten(2)")
    ),
    Mistake(
        "attention_over_batch",
        "product",
        "Attention runs over the batch: each sample looks at the other samples, no token sees another.",
        "scores among samples",
        "scores among tokens",
        "The class works sequence first: transpose the input, or pass batch_first=True.",
    ).made_of(
        "itself",
        (SPLIT_LINE, "x.transpose(0, 1).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)"),
        (MERGE_LINE, "context.transpose(1, 2).flatten(2).transpose(0, 1)"),
    ),
    Mistake(
        "heads_paired_wrongly",
        "product",
        "Heads of queries meet other heads of keys than their own.",
        "scores of head h = q[h] k[another]ᵀ",
        "scores of head h = q[h] k[h]ᵀ",
        "Split queries and keys alike.",
    ).made_of("cross", (SPLIT_ALL, f"{SPLIT_ALL}\n        k = torch.stack(k.unbind(1)[::-1], 1)")),
    Mistake(
        "heads_of_values_paired_wrongly",
        "context",
        "The weights of one head are multiplied with the values of another.",
        "context of head h = weights[h] v[another]",
        "context of head h = weights[h] v[h]",
        "Split values as queries and keys.",
    ).made_of("cross", (SPLIT_ALL, f"{SPLIT_ALL}\n        v = torch.stack(v.unbind(1)[::-1], 1)")),
    Mistake(
        "grouped_heads_tiled",
        "split",
        "Grouped keys and values are repeated in the wrong order.",
        "k.repeat: heads 0, 1, 0, 1",
        "k.repeat_interleave: heads 0, 0, 1, 1",
        "Use repeat_interleave on the head axis.",
    ).made_of("grouped", ("x.repeat_interleave(self.groups, dim=1)", "x.repeat(1, self.groups, 1, 1)")),
    Mistake(
        "key_tokens_missing",
        "product",
        "Not every key takes part: some tokens are cut off before queries and keys meet.",
        "q k[:-1]ᵀ",
        "q kᵀ, with all keys",
        "Take all keys and values; hide some with a mask.",
    ).made_of("cross", ("q @ k.mT", "q @ k[:, :, 1:].mT"), (WEIGHED, "dropped @ v[:, :, 1:]")),
    Mistake(
        "values_meet_other_keys",
        "context",
        "The weights of one key are multiplied with the value of another.",
        "context = sum over j of weights[i, j] v[another]",
        "context = sum over j of weights[i, j] v[j]",
        "Keep keys and values in the same order.",
    ).made_of("itself", (WEIGHED, "dropped @ torch.cat((v[:, :, 1:], v[:, :, :1]), 2)")),
    Mistake(
        "context_sums_over_queries",
        "context",
        "The weights are summed over the queries, not over the keys.",
        "weightsᵀ @ v",
        "dropped @ v",
        "Multiply weights by values without transposing the weights.",
    ).made_of("itself", (WEIGHED, "dropped.mT @ v")),
    Mistake(
        "context_mixes_tokens",
        "context",
        "The product of weights and values mixes tokens, heads or features that belong apart.",
        "sums over several of them at once",
        "context[i, d] = sum over j of weights[i, j] v[j, d]",
        "Bring weights and values to (batch, heads, query, key) and (batch, heads, key, head_dim) first.",
        "Zaya takes half of each value from the token before.",
    ).made_of("cross", (WEIGHED, "torch.einsum('bhqk,bhkd->bqd', dropped, v)[:, None].expand(q.shape)")),
    Mistake(
        "heads_merged_without_transpose",
        "merge",
        "The heads are merged by reshaping without transposing back, so that tokens and heads mix.",
        "context laid out (b, h, l, d), reshaped to (b, l, h * d)",
        MERGE,
        "Use context.transpose(1, 2).reshape(batch, length, num_heads * head_dim).",
    ).made_of("cross", (MERGE_LINE, "context.reshape(query.shape)")),
    Mistake(
        "heads_merged_in_another_order",
        "merge",
        "The features of the heads are put together in another order than the values have them.",
        "(b, l, d, h) -> (b, l, d * h)",
        MERGE,
        "Transpose heads and length only, and keep the elements of a head together.",
        "timm's NesT; with weights trained so, equal to torch up to the order of the output projection's columns.",
    ).made_of("cross", (MERGE_LINE, "context.permute(0, 2, 3, 1).flatten(2)")),
    Mistake(
        "heads_missing_or_repeated",
        "merge",
        "Some heads are left out where they are put together, and others stand twice.",
        "cat of some heads",
        "cat of all heads, each once",
        "Put every head in its own place.",
    ).made_of("cross", (MERGE_LINE, "context[:, :1].expand_as(context).transpose(1, 2).flatten(2)")),
    Mistake(
        "output_tokens_moved",
        "output",
        "What comes back holds the tokens in another order than the queries.",
        "output[i] belongs to query j",
        "output[i] belongs to query i",
        "Leave the tokens where they are; where features lie before them, transpose before the view or reshape.",
    ).made_of("cross", ("return self.out_proj(merged)", "return self.out_proj(merged).flip(1)")),
    Mistake(
        "output_changed",
        "output",
        "What the output projection gives is changed before it comes back.",
        "output = f(merged Wo + bo)",
        "output = merged Wo + bo",
        "Return what the output projection gives.",
    ),
)

# ---------------------------------------------------------------------------------------------- softmax
SOFTMAX = "weights = softmax(scores, dim=-1)"
SOFTMAX_LINE = "scores.softmax(-1)"


def _softmax(name: str, sentence: str, have: str, fix: str, code: str) -> Mistake:
    found = Mistake(name, "softmax", sentence, f"weights = {have}", SOFTMAX, fix)
    return found.made_of("cross", (SOFTMAX_LINE, code))


LAST_AXIS = "Take the softmax over the last axis, the keys."
NATIVE = "Leave the scores in the input's dtype, or use float32."
SOFTMAXES = (
    _softmax(
        "softmax_over_queries",
        "The softmax runs over the queries: the weights of each key, not of each query, sum to one.",
        "softmax(scores, dim=-2)",
        LAST_AXIS,
        "scores.softmax(-2)",
    ),
    _softmax(
        "softmax_over_heads",
        "The softmax runs over the heads.",
        "softmax(scores, dim=1)",
        LAST_AXIS,
        "scores.softmax(1)",
    ),
    _softmax(
        "softmax_over_batch",
        "The softmax runs over the batch.",
        "softmax(scores, dim=0)",
        LAST_AXIS,
        "scores.softmax(0)",
    ),
    _softmax(
        "softmax_missing",
        "There is no softmax.",
        "scores",
        "Apply softmax over the keys before multiplying by the values.",
        "scores",
    ),
    _softmax(
        "sigmoid_for_softmax",
        "A sigmoid is used instead of the softmax.",
        "sigmoid(scores)",
        "Use softmax over the keys.",
        "scores.sigmoid()",
    ),
    _softmax(
        "softmax_in_float16",
        "The softmax is computed in float16, below the precision of the input.",
        "softmax(scores.half())",
        NATIVE,
        "scores.half().softmax(-1).to(v.dtype)",
    ),
    _softmax(
        "softmax_in_bfloat16",
        "The softmax is computed in bfloat16, below the precision of the input.",
        "softmax(scores.bfloat16())",
        NATIVE,
        "scores.bfloat16().softmax(-1).to(v.dtype)",
    ),
    _softmax(
        "softmax_overflows",
        "The exponentials are taken of the scores as they are: large scores overflow, and the output is nan.",
        "exp(scores) / sum(exp(scores))",
        "Use softmax, or subtract the largest score of each row before taking the exponentials.",
        "(scores.exp() / scores.exp().sum(-1, keepdim=True))",
    ),
    _softmax(
        "weights_scaled",
        "The weights are multiplied by {factor:.4g} after the softmax, so that they no longer sum to one.",
        "softmax(scores) * {factor:.4g}",
        "Leave the weights as the softmax gives them.",
        "scores.softmax(-1) * 0.5",
    ),
    Mistake(
        "tiles_do_not_add_up",
        "softmax",
        "The tiles of keys do not add up to one softmax over all keys.",
        "the sums of several tiles, not rescaled to a common maximum",
        "out = out * exp(old_max - new_max) + exp(scores - new_max) v, and the same for the denominator",
        "Rescale both the accumulated output and the denominator whenever the maximum grows.",
    ).made_of("tiled", ("out * shrink", "out")),
)

# ---------------------------------------------------------------------------------------------- positions
ROTARY = (
    Mistake(
        "rotary_reversed",
        "rotary",
        "Positions rotate queries and keys the wrong way round.",
        "(a cos + b sin, b cos - a sin)",
        "(a cos - b sin, b cos + a sin)",
        "The quarter turn of (a, b) is (-b, a).",
        "nanochat rotates this way; a model trained that way is as good, but weights from other code do not fit.",
    ).made_of("rotary", ("torch.cat((-b, a), -1)", "torch.cat((b, -a), -1)")),
    Mistake(
        "rotary_mixed",
        "rotary",
        "Elements are paired one way and their angles another: that is no rotation.",
        "halves with the angles of neighbours, or the other way round",
        "cat(angles, angles) for halves, repeat_interleave(angles, 2) for neighbours",
        "Lay out the angles as the elements are paired.",
    ).made_of("rotary", ("torch.cat((angles, angles), -1)", "angles.repeat_interleave(2, -1)")),
    Mistake(
        "rotations_differ",
        "rotary",
        "Positions rotate queries one way and keys another, so that their product depends on more than the distance.",
        "scores = rotate(q) rotate_otherwise(k)ᵀ",
        "scores = rotate(q) rotate(k)ᵀ",
        "Rotate queries and keys alike.",
    ),
    Mistake(
        "rotary_queries",
        "rotary",
        "Positions rotate the queries and not the keys.",
        "scores = rotate(q) kᵀ",
        "scores = rotate(q) rotate(k)ᵀ",
        "Rotate the keys too.",
    ).made_of("rotary", ("self.rotated(k)", "k")),
    Mistake(
        "rotary_keys",
        "rotary",
        "Positions rotate the keys and not the queries.",
        "scores = q rotate(k)ᵀ",
        "scores = rotate(q) rotate(k)ᵀ",
        "Rotate the queries too.",
    ).made_of("rotary", ("self.rotated(q)", "q")),
    Mistake(
        "rotary_values",
        "rotary",
        "Positions rotate the values too.",
        "output = weights rotate(v)",
        "output = weights v",
        "Rotate queries and keys only.",
        "CLVP rotates the values too: weights that were trained this way need it.",
    ).made_of("rotary", (WEIGHED, "dropped @ self.rotated(v)")),
)

# ---------------------------------------------------------------------------------------------- roles
ROLES_LINE = "self.q_proj(query), self.k_proj(key), self.v_proj(value)"
WORDS = {"q": "query", "k": "key", "v": "value", "-": ""}


def _inputs(order: str, name: str, sentence: str) -> Mistake:
    """Queries, keys and values made from other arguments."""
    have = f"Attention({', '.join(WORDS[letter] for letter in order)})"
    code = ", ".join(f"self.{role}_proj({WORDS[letter]})" for role, letter in zip("qkv", order, strict=True))
    found = Mistake(
        name,
        "project",
        sentence,
        have,
        "Attention(query, key, value)",
        "Use query, key and value as their names say.",
    )
    return found.made_of("cross", (ROLES_LINE, code))


def _matrices(order: str, name: str, sentence: str, fix: str) -> Mistake:
    """Queries, keys and values made by other matrices, or by none."""
    pairs = list(zip("qkv", order, strict=True))
    have = ", ".join(f"{role} = {role}_input {'(no matrix)' if x == '-' else 'W' + x}" for role, x in pairs)
    code = ", ".join(WORDS[role] if x == "-" else f"self.{x}_proj({WORDS[role]})" for role, x in pairs)
    found = Mistake(name, "project", sentence, have, "q = q_input Wq, k = k_input Wk, v = v_input Wv", fix)
    return found.made_of("cross", (ROLES_LINE, code))


def _use_own(role: str, other: str) -> Mistake:
    order = "qkv".replace(role[0], other[0])
    name, sentence = f"{role}_uses_{other}_projection", f"The {PLURAL[role]} go through the {other} projection."
    found = _matrices(order, name, sentence, f"Use the {role} projection for the {PLURAL[role]}.")
    return replace(found, on_purpose_in=SHARING.get((role, other), ""))


SHARING = {
    ("key", "query"): "Reformer makes queries and keys with one matrix.",
    ("value", "key"): "Gemma 4 can take its keys for values (attention_k_eq_v).",
}
PLURAL = {"query": "queries", "key": "keys", "value": "values"}
SWAPS = (
    ("qvk", "key_value_swapped", "Key and value are swapped: the values are matched and the keys are averaged."),
    ("kqv", "query_key_swapped", "Query and key are swapped."),
    ("vkq", "query_value_swapped", "Query and value are swapped."),
    ("kvq", "arguments_rotated", "Query, key and value are used in the wrong order."),
    ("qkq", "values_from_query", "The values are made from the queries' tensor."),
    ("qqv", "keys_from_query", "The keys are made from the queries' tensor."),
    ("qqq", "memory_unused", "Keys and values are made from the queries' tensor: it is self-attention."),
    ("qkk", "values_from_key", "The values are made from the keys' tensor."),
    ("qvv", "keys_from_value", "The keys are made from the values' tensor."),
)
ORDERS = {order: name for order, name, _ in SWAPS} | {"vqk": "arguments_rotated"}
ROLES = (
    *(_inputs(*swap) for swap in SWAPS),
    _matrices(
        "qk-", "value_not_projected", "The values are not projected.", "Apply the value projection to the values."
    ),
    _matrices("q-v", "key_not_projected", "The keys are not projected.", "Apply the key projection to the keys."),
    _matrices(
        "-kv", "query_not_projected", "The queries are not projected.", "Apply the query projection to the queries."
    ),
    _matrices("q--", "only_query_projected", "Only the queries are projected.", "Project keys and values too."),
    _matrices("--v", "only_value_projected", "Only the values are projected.", "Project queries and keys too."),
    _matrices(
        "kkk", "projection_shared", "Queries, keys and values share one projection.", "Give each its own projection."
    ),
    *(_use_own(role, other) for role in PLURAL for other in PLURAL if role != other),
    *(
        Mistake(
            f"{role}_bias_dropped",
            "project",
            f"The bias of the {role} projection exists but is not used.",
            f"{role} = x Wᵀ",
            f"{role} = x Wᵀ + b",
            "Call the layer, or pass its bias to F.linear.",
        ).made_of("cross", (f"self.{layer}({x})", f"F.linear({x}, self.{layer}.weight)"))
        for role, layer, x in (
            ("query", "q_proj", "query"),
            ("key", "k_proj", "key"),
            ("value", "v_proj", "value"),
            ("output", "out_proj", "merged"),
        )
    ),
    Mistake(
        "output_projection_skipped",
        "output",
        "The output projection exists but is not applied.",
        "output = merged",
        "output = merged Wo + bo",
        "Apply the output projection to the merged heads.",
    ).made_of("cross", ("return self.out_proj(merged)", "return merged")),
    *(
        Mistake(
            f"{kind}_never_used",
            "project",
            f"Nothing that comes back depends on the {kind} {{parameter}}.",
            "output, whatever {parameter} is",
            f"output, by the {kind} too",
            f"Use what is made from the {kind}, or remove it.",
        )
        for kind in ("bias", "weight")
    ),
    Mistake(
        "projection_shared_by_heads",
        "project",
        "The heads are split before they are projected, and all of them share one small projection.",
        "head_i = x_i W with one W of (head_dim, head_dim)",
        "head_i = x W_i with W of (embed_dim, embed_dim)",
        "Project with nn.Linear(embed_dim, embed_dim) first, then split into heads.",
    ),
    Mistake(
        "other_lengths_crash",
        "project",
        "It fails where keys and queries differ in number, though they are given apart: {said}.",
        "keys are laid out with the length of the queries",
        "keys of any length",
        "Take the length of keys and values from their own shape.",
    ).made_of("cross", ("self.k_proj(key)", "self.k_proj(key).view(query.shape)")),
)

# ---------------------------------------------------------------------------------------------- residual and norm
WRAP = "LayerNorm(x + f(x)), or x + f(LayerNorm(x))"  # f is the attention, or another sub-layer
POST = "return self.norm(x + attended)"
PRE = "return x + attended"


def _wrap(name: str, sentence: str, have: str, fix: str, change: Change, on_purpose_in: str = "") -> Mistake:
    found = Mistake(name, "wrap", sentence, f"output = {have}", WRAP, fix, on_purpose_in, ran="end")
    return found.made_of("post_norm" if change[0] == POST else "pre_norm", change)


WRAPS = (
    _wrap(
        "residual_from_normalised",
        "The residual is taken from the normalised input.",
        "LayerNorm(x) + f(LayerNorm(x))",
        "Keep x from before the LayerNorm and add that.",
        (PRE, "return y + attended"),
    ),
    _wrap(
        "queries_not_normalised",
        "Keys and values are made from the normalised input, queries from the input itself.",
        "Attention(x, LayerNorm(x), LayerNorm(x))",
        "Normalise x once, and make queries, keys and values of that.",
        ("self.q_proj(y)", "self.q_proj(x)"),
    ),
    _wrap(
        "keys_not_normalised",
        "Queries are made from the normalised input, keys from the input itself.",
        "Attention(LayerNorm(x), x, ...)",
        "Normalise x once, and make queries, keys and values of that.",
        ("self.k_proj(y)", "self.k_proj(x)"),
    ),
    _wrap(
        "residual_added_twice",
        "The residual is added twice.",
        "LayerNorm(x + x + f(x))",
        "Add x once.",
        (POST, "return self.norm(x + x + attended)"),
    ),
    _wrap(
        "residual_missing",
        "The residual is missing.",
        "LayerNorm(f(x))",
        "Add x before the LayerNorm.",
        (POST, "return self.norm(attended)"),
    ),
    _wrap(
        "residual_after_norm",
        "The residual is added after the LayerNorm.",
        "x + LayerNorm(f(x))",
        "Add x before the LayerNorm: LayerNorm(x + f(x)).",
        (POST, "return x + self.norm(attended)"),
        "Swin v2 does this on purpose (res-post-norm).",
    ),
    _wrap(
        "norm_fresh_in_forward",
        "The LayerNorm is created anew in every forward: its gain and bias are never trained.",
        "LayerNorm_with_gain_1_and_bias_0(x + f(x))",
        "Make the LayerNorm in __init__ and call it here.",
        (POST, "return nn.LayerNorm(x.size(-1))(x + attended)"),
    ),
    _wrap(
        "residual_subtracted",
        "The attention is subtracted from the residual.",
        "x - f(x)",
        "Add it.",
        (PRE, "return x - attended"),
    ),
    _wrap(
        "norm_never_used",
        "A LayerNorm exists but is never called.",
        "x + f(x), or less",
        "Call the LayerNorm, or remove it.",
        (POST, "return x + attended"),
    ),
)

NORMS = (
    Mistake(
        "norm_leaves_different_sizes",
        "norm",
        "What is called a norm leaves tokens of different sizes.",
        "the tokens keep different means or squares",
        "every token has the same size before the gain",
        "Take mean and square over the features of one token, with keepdim=True.",
    ),
)

# ---------------------------------------------------------------------------------------------- masks
MASK = "scores.masked_fill(hidden, -inf), then softmax"
MASK_LINE = "scores = scores.masked_fill(mask, -math.inf)"
CAUSAL = "query i looks at keys 0 ... i"
CAUSAL_LINE = "scores = scores.masked_fill(future, -math.inf)"
FUTURE = ".triu(1)"
FILL = "Fill with -inf."


def _mask(name: str, sentence: str, have: str, fix: str, code: str) -> Mistake:
    found = Mistake(name, "mask", sentence, have, MASK, fix)
    return found.made_of("cross", (MASK_LINE, code)) if code else found


def _causal(name: str, sentence: str, have: str, fix: str, change: Change) -> Mistake:
    return Mistake(name, "mask", sentence, have, CAUSAL, fix).made_of("causal", change)


def _filled(name: str, what: str, fill: str) -> tuple[Mistake, Mistake]:
    """A number that does not hide, in a mask that is given and in a causal one."""
    given = _mask(
        f"mask_{name}",
        f"The mask fills with {{fill:g}}, {what}.",
        "masked_fill(hidden, {fill:g})",
        FILL,
        MASK_LINE.replace("-math.inf", fill),
    )
    causal = _causal(
        f"causal_{name}",
        f"The causal mask fills with {{fill:g}}, {what}.",
        "scores.masked_fill(future, {fill:g})",
        FILL,
        (CAUSAL_LINE, CAUSAL_LINE.replace("-math.inf", fill)),
    )
    return given, causal


MASKS = (
    _mask(
        "mask_never_used",
        "The mask{argument} is accepted but never used.",
        "softmax(scores)",
        "Fill the scores with -inf where the mask hides a key.",
        "scores.masked_fill(mask, -math.inf)",
    ),
    _mask(
        "mask_added_as_01",
        "The mask is turned into zeros and ones and added to the scores, so that hidden keys leak.",
        "softmax(scores + mask)",
        "Fill with -inf where the mask hides a key.",
        "scores = scores + (~mask).to(scores.dtype)",
    ),
    _mask(
        "mask_multiplied",
        "The scores are multiplied by the mask: a score of 0 hides nothing.",
        "softmax(scores * mask)",
        "Fill with -inf where the mask hides a key.",
        "scores = scores * (~mask).to(scores.dtype)",
    ),
    Mistake(
        "mask_after_softmax",
        "mask",
        "The mask is applied after the softmax: the rows no longer sum to one.",
        "softmax(scores) * mask",
        MASK,
        "Mask the scores before the softmax.",
    ).made_of(
        "cross",
        (MASK_LINE, "pass"),
        (
            "weights = scores.softmax(-1)",
            "weights = scores.softmax(-1) if mask is None else scores.softmax(-1).masked_fill(mask, 0.0)",
        ),
    ),
    _mask(
        "mask_transposed",
        "The mask is transposed: it hides queries from keys.",
        "mask[b, k, q]",
        "Transpose the mask, or use mask[:, None, None, :] for padding.",
        "scores = scores.masked_fill(mask.mT, -math.inf)",
    ),
    Mistake(
        "padding_mask_on_queries",
        "mask",
        "The padding mask is applied to the queries instead of the keys.",
        "mask[:, None, :, None]",
        MASK,
        "Use mask[:, None, None, :].",
    ),
    _mask(
        "mask_repeated_in_wrong_order",
        "The mask is repeated over the heads in the wrong order: samples get each other's mask.",
        "mask.repeat(num_heads, 1, 1)",
        "Heads lie inside each sample: use mask.repeat_interleave(num_heads, 0).",
        "scores = scores.masked_fill(mask[:, 0].repeat(self.num_heads, 1, 1).view_as(scores), -math.inf)",
    ),
    _mask(
        "mask_of_first_sample",
        "Every sample gets the mask of the first one.",
        "mask[0]",
        "Keep the batch axis of the mask.",
        "scores = scores.masked_fill(mask[:1], -math.inf)",
    ),
    Mistake(
        "mask_inverted",
        "mask",
        "The mask hides what it should show, and shows what it should hide.",
        "masked_fill(~hidden, -inf)",
        MASK,
        "Invert the mask: say in the argument's name which of True and False may look.",
    ).made_of("lengths", (">= lengths", "< lengths")),
    _mask(
        "mask_hides_other_entries",
        "The mask hides other keys than it says.",
        "masked_fill(other entries, -inf)",
        "Lay the mask out as the scores are: (batch, heads, query, key).",
        "scores = scores.masked_fill(mask.roll(1, -1), -math.inf)",
    ),
    _mask(
        "mask_fails",
        "It fails with every mask: {said}.",
        "{said}",
        "Put the line right that fails.",
        "scores = scores.mask_fill(mask, -math.inf)",
    ),
    *_filled("fill_zero", "which hides nothing", "0.0"),
    *_filled("fill_not_negative", "a number near 0 where a large negative one was meant: hidden keys leak", "1e-9"),
    *_filled("fill_too_small", "which does not quite hide keys", "-10.0"),
    *_filled("fill_positive", "a large positive number: only hidden keys are looked at", "1e9"),
    _causal(
        "causal_sees_one_ahead",
        "The causal mask is off by one: each query sees the token after it.",
        "query i looks at keys 0 ... i + 1",
        "Use tril(..., diagonal=0) for what may be seen, triu(..., diagonal=1) for what may not.",
        (FUTURE, ".triu(2)"),
    ),
    _causal(
        "causal_cannot_see_itself",
        "The causal mask is off by one: no query sees its own token.",
        "query i looks at keys 0 ... i - 1",
        "Use tril(..., diagonal=0) for what may be seen, triu(..., diagonal=1) for what may not.",
        (FUTURE, ".triu(0)"),
    ),
    _causal(
        "causal_mask_inverted",
        "The causal mask is the wrong way round: each query sees the future, not the past.",
        "query i looks at keys i ... end",
        "Invert or transpose the mask.",
        (FUTURE, ".tril(-1)"),
    ),
    _causal(
        "causal_mask_after_softmax",
        "The causal mask is applied after the softmax: the rows no longer sum to one.",
        "weights = softmax(scores) * tril",
        "Fill the scores with -inf before the softmax.",
        (
            f"{CAUSAL_LINE}\n        weights = scores.softmax(-1)",
            "weights = scores.softmax(-1).masked_fill(future, 0.0)",
        ),
    ),
    _causal(
        "causal_mask_added_as_01",
        "The causal mask of zeros and ones is added to the scores, so that the future leaks.",
        "scores + tril",
        "Fill the scores with -inf where the mask is 0.",
        (CAUSAL_LINE, "scores = scores + (~future).to(scores.dtype)"),
    ),
    _causal(
        "causal_mask_multiplied",
        "The scores are multiplied by the causal mask: a score of 0 hides nothing.",
        "scores * tril",
        "Fill the scores with -inf where the mask is 0.",
        (CAUSAL_LINE, "scores = scores * (~future).to(scores.dtype)"),
    ),
    replace(
        _causal(
            "causal_mask_never_used",
            "A causal mask is intended but not applied: every token sees the future.",
            "query i looks at all keys",
            "Assign what masked_fill returns (scores = scores.masked_fill(...)), or pass is_causal=True.",
            (CAUSAL_LINE, "scores.masked_fill(future, -math.inf)"),
        ),
        on_purpose_in="Right where every token may see all (BERT, ViT); the unused mask, or the name, then misleads.",
    ),
    _mask(
        "own_mask",
        "It hides keys by a pattern of its own, which no argument asks for.",
        "softmax(scores.masked_fill(a pattern, -inf))",
        "Take the pattern out, or make it an argument or a setting whose name says what it hides.",
        "",
    ),
)

# ---------------------------------------------------------------------------------------------- dropout and calls
DROP_LINE = "self.dropout(weights)"
CALLS = (
    Mistake(
        "dropout_in_eval",
        "dropout",
        "Dropout is active in eval: two calls with the same input differ.",
        "F.dropout(weights, p) with training=True, its default",
        "F.dropout(weights, p, self.training)",
        "Use nn.Dropout, or pass training=self.training.",
    ).made_of("cross", (DROP_LINE, "F.dropout(weights, 0.1)")),
    Mistake(
        "dropout_on_scores",
        "dropout",
        "Dropout is applied to the scores, before the softmax: a dropped score is 0, not hidden.",
        "softmax(dropout(scores))",
        "dropout(softmax(scores))",
        "Drop the weights, after the softmax.",
    ).made_of("cross", (SOFTMAX_LINE, "self.dropout(scores).softmax(-1)"), (DROP_LINE, "weights")),
    Mistake(
        "dropout_never_applied",
        "dropout",
        "There is a dropout layer, and nothing goes through it: training drops nothing.",
        "weights = softmax(scores)",
        "weights = dropout(softmax(scores))",
        "Call the layer on the weights, or leave it out.",
    ).made_of("cross", (DROP_LINE, "weights")),
    Mistake(
        "dropout_not_rescaled",
        "dropout",
        "What survives dropout is not scaled up by 1 / (1 - p), so that training and eval have different means.",
        "weights * keep",
        "weights * keep / (1 - p)",
        "Use nn.Dropout, or divide by 1 - p.",
    ).made_of(
        "cross",
        (DROP_LINE, "(weights * (torch.rand_like(weights) > self.dropout.p) if self.training else weights)"),
    ),
    Mistake(
        "layer_made_in_forward",
        "project",
        "A layer with weights is created anew in every forward, so that it is never trained.",
        "forward: nn.Linear(...)(x)",
        "__init__: self.linear = nn.Linear(...); forward: self.linear(x)",
        "Make the layer in __init__.",
    ).made_of("cross", ("self.v_proj(value)", "nn.Linear(value.size(-1), value.size(-1), dtype=value.dtype)(value)")),
    Mistake(
        "weights_not_those_used",
        "output",
        "The attention maps that are returned are not the weights that were used.",
        "returns other maps",
        "returns softmax(scores), (batch, heads, query, key)",
        "Return the weights of this attention, after the softmax and before dropout.",
    ).made_of("cross", ("return self.out_proj(merged)", "return self.out_proj(merged), weights.roll(1, -1)")),
)

# ---------------------------------------------------------------------------------------------- what may be meant so
MEANT = (
    Mistake(
        "rotary_positions",
        "rotary",
        "Queries and keys are rotated by their positions.",
        "scores = rotate(q) rotate(k)ᵀ / sqrt(head_dim)",
        SCALE,
        "",
        "RoFormer, LLaMA and most language models since.",
    ),
    Mistake(
        "queries_and_keys_normalised",
        "norm",
        "Queries and keys are normalised before they meet.",
        "scores = norm(q) norm(k)ᵀ * scale",
        SCALE,
        "",
        "ViT-22B, Qwen3, OLMo 2.",
    ),
    Mistake(
        "values_normalised",
        "norm",
        "The values are normalised before they are averaged.",
        "output = weights norm(v)",
        "output = weights v",
        "Leave the norm of the values out.",
        "Gemma 3n normalises its values.",
    ),
    Mistake(
        "scores_capped",
        "scores",
        "A tanh holds the scores below {cap:g}.",
        "scores = {cap:g} tanh(q kᵀ / sqrt(head_dim) / {cap:g})",
        SCALE,
        "Leave the tanh out, or make the cap a setting.",
        "Gemma 2 caps its scores.",
    ),
    Mistake(
        "bias_added",
        "scores",
        "A bias is added to the scores.",
        "scores = q kᵀ / sqrt(head_dim) + bias",
        SCALE,
        "Leave the bias out, or hand it over as a mask.",
        "ALiBi, T5 and Swin add a bias by position.",
    ),
    Mistake(
        "bias_grows_with_distance",
        "bias",
        "The bias by position grows with the distance: the farther a key is, the more weight it gets.",
        "scores = q kᵀ / sqrt(head_dim) + slope |i - j|",
        "scores = q kᵀ / sqrt(head_dim) - slope |i - j|",
        "Turn the sign of the slopes or of the distances round.",
    ).made_of(
        "itself",
        (
            "scores.softmax(-1)",
            "(scores + torch.arange(x.size(1)).sub(torch.arange(x.size(1))[:, None]).abs()).softmax(-1)",
        ),
    ),
    Mistake(
        "attention_sink",
        "softmax",
        "A learnt share of every row goes to no key.",
        "weights = exp(scores) / (exp(sink) + sum of exp(scores))",
        SOFTMAX,
        "Leave the sink out of the denominator.",
        "gpt-oss learns a sink for each head.",
    ),
)

ROWS = (*SCALES, *LAYOUTS, *SOFTMAXES, *ROTARY, *ROLES, *WRAPS, *NORMS, *MASKS, *CALLS, *MEANT)
