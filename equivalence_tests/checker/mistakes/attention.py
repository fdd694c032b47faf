"""The known mistakes of attentions, each with the change that makes it of a right one."""

from collections.abc import Iterator
from dataclasses import replace

from equivalence_tests.checker.mistakes.mistake import Change, Mistake, rows

# ---------------------------------------------------------------------------------------------- scale
SCALE = "scores = q kᵀ / sqrt(head_dim)"
SOFTMAX_LINE = "scores.softmax(-1)"
SCALE_LINE = "q @ k.mT / math.sqrt(q.size(-1))"
_scaled = rows("scale", SCALE)

SCALES = (
    _scaled(
        "scale_missing",
        "The scores are not scaled.",
        "scores = q kᵀ",
        "Divide the scores by sqrt(head_dim).",
        (SCALE_LINE, "q @ k.mT"),
        chosen=True,
        on_purpose_in="T5 leaves the scale out and makes up for it in the initialisation, and so do UDOP, Pop2Piano, "
        "Pix2Struct and Switch Transformers, which are derived from it; Non-Local blocks have none, nor has "
        "Luong-Attention, called DotAttention and BilinearAttention too.",
    ),
    _scaled(
        "scale_wrong",
        "The scores are {how}; they should be divided by sqrt(head_dim).",
        "scores = q kᵀ {scale}",
        "Divide by sqrt(head_dim) = sqrt(embed_dim / num_heads), once: take the size of the last axis of the keys.",
        (SCALE_LINE, "q @ k.mT / math.sqrt(query.size(-1))"),
        chosen=True,
    ),
    _scaled(
        "scale_differs_by_head",
        "The scores are multiplied by a different number in each head.",
        "scores = q kᵀ * scale[head]",
        "Divide by sqrt(head_dim).",
        (SCALE_LINE, "q @ k.mT * torch.arange(1, self.num_heads + 1).to(q)[:, None, None]"),
    ),
    _scaled(
        "scale_after_softmax",
        "The scale is applied to the weights, after the softmax.",
        ("weights = softmax(q kᵀ) / sqrt(head_dim)", "weights = softmax(q kᵀ / sqrt(head_dim))"),
        "Divide the scores before the softmax.",
        (SCALE_LINE, "q @ k.mT"),
        (SOFTMAX_LINE, "scores.softmax(-1) / math.sqrt(q.size(-1))"),
    ),
)

# ---------------------------------------------------------------------------------------------- heads and axes
SPLIT = "(b, l, h * d) -> view (b, l, h, d) -> transpose (b, h, l, d)"
SPLIT_LINE = "x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)"
MERGE = "(b, h, l, d) -> transpose (b, l, h, d) -> reshape (b, l, h * d)"
MERGE_LINE = "context.transpose(1, 2).flatten(2)"
WEIGHED = "dropped @ v"
RETURNED = "return self.out_proj(merged)"
SPLIT_ALL = "q, k, v = (self.split(x) for x in (q, k, v))"
ACROSS_SAMPLES = "torch.einsum('bhid,bhjd->hij', q, k)[None].expand(x.size(0), -1, -1, -1) / math.sqrt(q.size(-1))"

_split, _merge = rows("split", SPLIT), rows("merge", MERGE)
_product, _context, _output = rows("product", right="itself"), rows("context", right="itself"), rows("output")

LAYOUTS = (
    _split(
        "heads_never_split",
        "The heads are never split: there is one head of the full width, scaled as if it were one of several.",
        "scores = q kᵀ / sqrt(embed_dim / num_heads), with q of (b, l, embed_dim)",
        "Use view(batch, length, num_heads, head_dim).transpose(1, 2) after the projections.",
        (SPLIT_LINE, "x[:, None]"),
        (SCALE_LINE, "q @ k.mT / math.sqrt(q.size(-1) // self.num_heads)"),
    ),
    _split(
        "heads_split_without_transpose",
        "The heads are split by reshaping without a transpose, so that tokens and heads mix.",
        "q.reshape(b, h, l, d)",
        "Use view(batch, length, num_heads, head_dim).transpose(1, 2).",
        (SPLIT_LINE, "x.view(x.size(0), self.num_heads, x.size(1), -1)"),
    ),
    _split(
        "key_viewed_for_transposed",
        "The keys are reshaped where they should be transposed.",
        ("q @ k.view(..., head_dim, key_len)", "q @ k.transpose(-2, -1)"),
        "Use k.transpose(-2, -1): view does not move elements.",
        ("q @ k.mT", "q @ k.reshape(*k.shape[:2], k.size(3), k.size(2))"),
    ),
    _product(
        "product_pairs_wrong_axes",
        "The product of queries and keys does not sum over the elements of a head, but over another axis.",
        ("one score sums over several tokens or heads", "scores[i, j] = sum over d of q[i, d] k[j, d]"),
        "Multiply q by k.transpose(-2, -1).",
        (SCALE_LINE, ACROSS_SAMPLES),
    ),
    _product(
        "operands_summed_apart",
        "An einsum sums each operand by itself and multiplies the sums: their shared axis has two different letters.",
        ("einsum('{have}')", "einsum('{want}')"),
        "Give the axis to sum over the same letter in both operands.",
        (WEIGHED, "torch.einsum('bhqk,bhvd->bhqd', dropped, v)"),
    ),
    _product(
        "attention_among_heads",
        "The heads of one token attend to each other; no token ever sees another.",
        ("scores of shape (b, l, h, h)", "scores of shape (b, h, l, l)"),
        "Transpose to (batch, heads, length, head_dim) before q @ kᵀ.",
        (SPLIT_LINE, "x.view(x.size(0), x.size(1), self.num_heads, -1)"),
        (MERGE_LINE, "context.flatten(2)"),
    ),
    _product(
        "attention_over_batch",
        "Attention runs over the batch: each sample looks at the other samples, and no token sees another.",
        ("scores among samples", "scores among tokens"),
        "The class expects the sequence first: transpose the input, or pass batch_first=True.",
        (
            f"return {SPLIT_LINE}",
            "batch, length, _ = x.shape\n"
            "        return x.transpose(0, 1).reshape(length, batch, self.num_heads, -1).transpose(1, 2)",
        ),
        (MERGE_LINE, "context.transpose(1, 2).flatten(2).transpose(0, 1)"),
    ),
    _product(
        "heads_paired_wrongly",
        "The heads of the queries are paired with the wrong heads of the keys.",
        ("scores of head h = q[h] k[another]ᵀ", "scores of head h = q[h] k[h]ᵀ"),
        "Split queries and keys in the same way.",
        (SPLIT_ALL, f"{SPLIT_ALL}\n        k = torch.stack(k.unbind(1)[::-1], 1)"),
    ),
    _context(
        "heads_of_values_paired_wrongly",
        "The weights of one head are multiplied by the values of another.",
        ("context of head h = weights[h] v[another]", "context of head h = weights[h] v[h]"),
        "Split the values in the same way as queries and keys.",
        (SPLIT_ALL, f"{SPLIT_ALL}\n        v = torch.stack(v.unbind(1)[::-1], 1)"),
    ),
    _split(
        "grouped_heads_tiled",
        "Grouped keys and values are repeated in the wrong order.",
        ("k.repeat: heads 0, 1, 0, 1", "k.repeat_interleave: heads 0, 0, 1, 1"),
        "Use repeat_interleave on the head axis.",
        ("x.repeat_interleave(self.groups, dim=1)", "x.repeat(1, self.groups, 1, 1)"),
        of="grouped",
        on_purpose_in="x-transformers, with `kv_heads`; differential attention (DiffLlama), where the two halves of "
        "the heads share their values.",
    ),
    _product(
        "key_tokens_missing",
        "Not every key takes part: some tokens are cut off before queries and keys are multiplied.",
        ("q k[:-1]ᵀ", "q kᵀ, with all keys"),
        "Take all keys and values; hide some with a mask.",
        ("q @ k.mT", "q @ k[:, :, 1:].mT"),
        (WEIGHED, "dropped @ v[:, :, 1:]"),
    ),
    _context(
        "values_meet_other_keys",
        "The weights of one key are multiplied by the value of another.",
        ("context = sum over j of weights[i, j] v[another]", "context = sum over j of weights[i, j] v[j]"),
        "Keep keys and values in the same order.",
        (WEIGHED, "dropped @ torch.cat((v[:, :, 1:], v[:, :, :1]), 2)"),
    ),
    _context(
        "context_sums_over_queries",
        "The weights are summed over the queries, not over the keys.",
        ("weightsᵀ @ v", "weights @ v"),
        "Multiply weights by values without transposing the weights.",
        (WEIGHED, "dropped.mT @ v"),
    ),
    _context(
        "context_mixes_tokens",
        "The product of weights and values mixes tokens, heads or features that should stay separate.",
        ("sums over several of them at once", "context[i, d] = sum over j of weights[i, j] v[j, d]"),
        "Bring weights and values to (batch, heads, query, key) and (batch, heads, key, head_dim) first.",
        (WEIGHED, "torch.einsum('bhqk,bhkd->bqd', dropped, v)[:, None].expand(q.shape)"),
    ),
    _merge(
        "heads_merged_without_transpose",
        "The heads are merged by reshaping without transposing back, so that tokens and heads mix.",
        "context laid out (b, h, l, d), reshaped to (b, l, h * d)",
        "Use context.transpose(1, 2).reshape(batch, length, num_heads * head_dim).",
        (MERGE_LINE, "context.reshape(query.shape)"),
    ),
    _merge(
        "heads_merged_in_another_order",
        "The features of the heads are merged in a different order from that of the values.",
        "(b, l, d, h) -> (b, l, d * h)",
        "Transpose heads and length only, and keep the elements of a head together.",
        (MERGE_LINE, "context.permute(0, 2, 3, 1).flatten(2)"),
        on_purpose_in="timm's NesT; such weights are torch's, except for the order of the output projection's columns.",
    ),
    _merge(
        "heads_missing_or_repeated",
        "Some heads are left out of the merge, and others appear twice.",
        ("cat of some heads", "cat of all heads, each once"),
        "Put every head in its own place.",
        (MERGE_LINE, "context[:, :1].expand_as(context).transpose(1, 2).flatten(2)"),
    ),
    _output(
        "output_tokens_moved",
        "The output has its tokens in a different order from the queries.",
        ("output[i] belongs to query j", "output[i] belongs to query i"),
        "Leave the tokens where they are; where features come before them, transpose before the view or reshape.",
        (RETURNED, "return self.out_proj(merged).flip(1)"),
    ),
)

# ---------------------------------------------------------------------------------------------- softmax
SOFTMAX = "weights = softmax(scores, dim=-1)"
_softmax = rows("softmax", SOFTMAX)

SOFTMAXES = (
    *(
        _softmax(
            f"softmax_over_{name}",
            f"The softmax runs over the {name}, not over the keys of each query.",
            f"weights = softmax(scores, dim={axis})",
            "Take the softmax over the last axis, the keys.",
            (SOFTMAX_LINE, f"scores.softmax({axis})"),
            on_purpose_in=purpose,
        )
        for name, axis, purpose in (
            ("queries", -2, "Slot-Attention lets slots compete for a key, and divides each row by its sum."),
            ("heads", 1, ""),
            ("batch", 0, ""),
        )
    ),
    *(
        _softmax(
            f"softmax_in_{dtype}",
            f"The softmax is computed in {dtype}, below the precision of the input.",
            f"weights = softmax(scores.{cast}())",
            "Leave the scores in the input's dtype, or use float32.",
            (SOFTMAX_LINE, f"scores.{cast}().softmax(-1).to(v.dtype)"),
        )
        for dtype, cast in (("float16", "half"), ("bfloat16", "bfloat16"))
    ),
    _softmax(
        "softmax_missing",
        "There is no softmax.",
        "weights = scores",
        "Apply softmax over the keys before multiplying by the values.",
        (SOFTMAX_LINE, "scores"),
    ),
    _softmax(
        "softmax_twice",
        "The softmax is taken twice: a softmax of weights makes them nearly equal.",
        "weights = softmax(softmax(scores))",
        "Leave one of them out.",
        (SOFTMAX_LINE, "scores.softmax(-1).softmax(-1)"),
    ),
    *(
        _softmax(
            f"{name}_for_softmax",
            f"{what} is used instead of the softmax.",
            f"weights = {formula}",
            "Use softmax over the keys.",
            (SOFTMAX_LINE, code),
            of="itself",
        )
        for name, what, formula, code in (
            ("sigmoid", "A sigmoid", "sigmoid(scores)", "scores.sigmoid()"),
            ("relu", "A ReLU", "relu(scores)", "F.relu(scores)"),
            ("log_softmax", "The logarithm of the softmax", "log(softmax(scores))", "F.log_softmax(scores, -1)"),
            ("softmin", "A softmin, which gives most to the least,", "softmax(-scores)", "F.softmin(scores, -1)"),
        )
    ),
    _softmax(
        "softmax_overflows",
        "The exponentials are taken of the raw scores: large ones overflow, and the output is nan.",
        "weights = exp(scores) / sum(exp(scores))",
        "Use softmax, or subtract the largest score of each row before taking the exponentials.",
        (SOFTMAX_LINE, "(scores.exp() / scores.exp().sum(-1, keepdim=True))"),
    ),
    _softmax(
        "weights_scaled",
        "The weights are multiplied by {factor:.4g} after the softmax, so that they no longer sum to one.",
        "weights = softmax(scores) * {factor:.4g}",
        "Leave the weights as the softmax gives them.",
        (SOFTMAX_LINE, "scores.softmax(-1) * 0.5"),
        sink=True,
    ),
    _softmax(
        "tiles_do_not_add_up",
        "The tiles of keys do not add up to one softmax over all keys.",
        (
            "the sums of several tiles, not rescaled to a common maximum",
            "out = out * exp(old_max - new_max) + exp(scores - new_max) v, and the same for the denominator",
        ),
        "Rescale both the accumulated output and the denominator whenever the maximum grows.",
        ("out * shrink", "out"),
        of="tiled",
    ),
)

# ---------------------------------------------------------------------------------------------- positions
ROTATED = "scores = rotate(q) rotate(k)ᵀ"
_rotary = rows("rotary", ROTATED, "rotary")

ROTARY = (
    _rotary(
        "rotary_reversed",
        "Positions rotate queries and keys the wrong way round.",
        ("(a cos + b sin, b cos - a sin)", "(a cos - b sin, b cos + a sin)"),
        "The quarter turn of (a, b) is (-b, a).",
        ("torch.cat((-b, a), -1)", "torch.cat((b, -a), -1)"),
        ran="neg, sub",
        on_purpose_in="nanochat rotates this way: a model trained so is as good, but weights of other code do not fit.",
    ),
    _rotary(
        "rotary_mixed",
        "Elements are paired one way and their angles another: that is not a rotation.",
        ("halves with the angles of neighbours, or the reverse", "the angles of the elements that are paired"),
        "Lay out the angles the way the elements are paired: cat for halves, repeat_interleave for neighbours.",
        ("torch.cat((angles, angles), -1)", "angles.repeat_interleave(2, -1)"),
        ran="repeat_interleave, cat, stack",
    ),
    _rotary(
        "rotary_across_heads",
        "Positions rotate queries and keys before the heads are split: the two elements of a pair end up in two heads.",
        ("scores = split(rotate(q)) split(rotate(k))ᵀ", "scores = rotate(split(q)) rotate(split(k))ᵀ"),
        "Split the heads first, and rotate each by frequencies over the width of one head.",
        ("(q, k, v))\n        q, k = self.rotated(q), self.rotated(k)", "(self.rotated(q), self.rotated(k), v))"),
    ),
    _rotary(
        "rotations_differ",
        "Positions rotate queries one way and keys another, so that their product depends on more than the distance.",
        "scores = rotate(q) rotate_otherwise(k)ᵀ",
        "Rotate queries and keys in the same way.",
    ),
    _rotary(
        "rotary_without_positions",
        "Queries and keys are rotated by the same angles at all positions, so that their product ignores positions.",
        ("scores = rotate(q, angle) rotate(k, angle)ᵀ = q kᵀ", "scores = rotate(q, i) rotate(k, j)ᵀ"),
        "Count the positions along the token axis, which is a different one before the heads are moved.",
        ("torch.arange(x.size(-2), dtype=x.dtype)", "torch.ones(x.size(-2), dtype=x.dtype)"),
    ),
    *(
        _rotary(
            f"rotary_{done}",
            f"Positions rotate the {done} and not the {left}.",
            ROTATED.replace(f"rotate({letter})", letter),
            f"Rotate the {left} too.",
            (f"self.rotated({letter})", letter),
        )
        for done, left, letter in (("queries", "keys", "k"), ("keys", "queries", "q"))
    ),
    _rotary(
        "rotary_values",
        "Positions rotate the values too.",
        ("output = weights rotate(v)", "output = weights v"),
        "Rotate queries and keys only.",
        (WEIGHED, "dropped @ self.rotated(v)"),
        on_purpose_in="CLVP rotates the values too: weights that were trained this way need it.",
    ),
)

# ---------------------------------------------------------------------------------------------- roles
ROLES_LINE = "self.q_proj(query), self.k_proj(key), self.v_proj(value)"
WORDS = {"q": "query", "k": "key", "v": "value", "-": ""}
_project = rows("project")


def _inputs(order: str, name: str, sentence: str, roles: bool = False) -> Mistake:
    """Queries, keys and values made from other arguments."""
    formulas = f"Attention({', '.join(WORDS[letter] for letter in order)})", "Attention(query, key, value)"
    code = ", ".join(f"self.{role}_proj({WORDS[letter]})" for role, letter in zip("qkv", order, strict=True))
    change = ROLES_LINE, code
    return _project(name, sentence, formulas, "Use query, key and value as their names say.", change, roles=roles)


def _matrices(order: str, name: str, sentence: str, fix: str, on_purpose_in: str = "") -> Mistake:
    """Queries, keys and values made by other matrices, or by none."""
    pairs = list(zip("qkv", order, strict=True))
    have = ", ".join(f"{role} = {role}_input {'(no matrix)' if x == '-' else 'W' + x}" for role, x in pairs)
    formulas = have, "q = q_input Wq, k = k_input Wk, v = v_input Wv"
    code = ", ".join(WORDS[role] if x == "-" else f"self.{x}_proj({WORDS[role]})" for role, x in pairs)
    return _project(name, sentence, formulas, fix, (ROLES_LINE, code), on_purpose_in=on_purpose_in)


def _of_another(role: str, other: str) -> Mistake:
    order, purpose = "qkv".replace(role[0], other[0]), SHARING.get((role, other), "")
    name, sentence = f"{role}_uses_{other}_projection", f"The {PLURAL[role]} go through the {other} projection."
    return _matrices(order, name, sentence, f"Use the {role} projection for the {PLURAL[role]}.", purpose)


def _not_projected(role: str, plural: str) -> Mistake:
    order, name, sentence = "qkv".replace(role[0], "-"), f"{role}_not_projected", f"The {plural} are not projected."
    return _matrices(order, name, sentence, f"Apply the {role} projection to the {plural}.")


SHARING = {
    ("key", "query"): "Reformer makes queries and keys with one matrix.",
    ("value", "key"): "Gemma 4 can use its keys as values (attention_k_eq_v); DeepSeek-V4 always does.",
}
PLURAL = {"query": "queries", "key": "keys", "value": "values"}
SWAPS = (
    ("qvk", "key_value_swapped", "Key and value are swapped: the values are matched and the keys are averaged.", True),
    ("kqv", "query_key_swapped", "Query and key are swapped.", True),
    ("vkq", "query_value_swapped", "Query and value are swapped.", True),
    ("kvq", "arguments_rotated", "Query, key and value are used in the wrong order.", True),
    ("qkq", "values_from_query", "The values are made from the queries' tensor."),
    ("qqv", "keys_from_query", "The keys are made from the queries' tensor."),
    ("qqq", "memory_unused", "Keys and values are made from the queries' tensor: it is self-attention."),
    ("qkk", "values_from_key", "The values are made from the keys' tensor."),
    ("qvv", "keys_from_value", "The keys are made from the values' tensor."),
)
ORDERS = {order: name for order, name, *_ in SWAPS} | {"vqk": "arguments_rotated"}
ROLES = (
    *(_inputs(*swap) for swap in SWAPS),
    *map(_not_projected, PLURAL, PLURAL.values()),
    _matrices("q--", "only_query_projected", "Only the queries are projected.", "Project keys and values too."),
    _matrices("--v", "only_value_projected", "Only the values are projected.", "Project queries and keys too."),
    _matrices(
        "kkk", "projection_shared", "Queries, keys and values share one projection.", "Give each its own projection."
    ),
    *(_of_another(role, other) for role in PLURAL for other in PLURAL if role != other),
    _output(
        "output_projection_skipped",
        "The output projection exists but is not applied.",
        ("output = merged", "output = merged Wo + bo"),
        "Apply the output projection to the merged heads.",
        (RETURNED, "return merged"),
    ),
    *(
        _project(
            f"{kind}_never_used",
            f"The output does not depend on the {kind} {{parameter}}.",
            ("the same output, whatever {parameter} is", f"an output that depends on the {kind} too"),
            f"Use what is made from the {kind}, or remove it.",
        )
        for kind in ("weight", "argument")
    ),
    _project(
        "bias_never_used",
        "The output does not depend on the bias {parameter}.",
        ("the same output, whatever {parameter} is", "an output that depends on the bias too"),
        "Call its layer, add it to the product with the weight, or remove it.",
        ("self.q_proj(query)", "F.linear(query, self.q_proj.weight)"),
    ),
    _project(
        "projection_shared_by_heads",
        "The heads are split before they are projected, and all of them share one small projection.",
        ("head_i = x_i W with one W of (head_dim, head_dim)", "head_i = x W_i with W of (embed_dim, embed_dim)"),
        "Project with nn.Linear(embed_dim, embed_dim) first, then split into heads.",
    ),
    _project(
        "one_head_for_all",
        "All heads are one and the same module, so that each gives what the others give.",
        ("[head] * num_heads, or a list into which one head is put again and again", "a head of its own at each place"),
        "Make a new module for each head: nn.ModuleList([Head(...) for _ in range(num_heads)]).",
    ),
    _project(
        "other_lengths_crash",
        "It fails where keys and queries differ in number, though they are separate arguments: {said}.",
        ("keys are laid out with the length of the queries", "keys of any length"),
        "Take the length of keys and values from their own shape.",
        ("self.k_proj(key)", "self.k_proj(key).view(query.shape)"),
    ),
)

# ---------------------------------------------------------------------------------------------- residual and norm
WRAP = "LayerNorm(x + f(x)), or x + f(LayerNorm(x))"  # f is the attention, or another sub-layer
ENDS = {"post_norm": "return self.norm(x + attended)", "pre_norm": "return x + attended"}
NORMED_ONCE = "Normalise x once, and make queries, keys and values from the result."
_norm = rows("norm")
_wrap = rows("wrap", WRAP, "pre_norm", ran="end")


def _ended(name: str, sentence: str, have: str, fix: str, of: str = "post_norm", on_purpose_in: str = "") -> Mistake:
    """The last line says what the formula says."""
    code = have.replace("f(x)", "attended").replace("LayerNorm", "self.norm")
    change = ENDS[of], f"return {code}"
    return _wrap(name, sentence, f"output = {have}", fix, change, of=of, on_purpose_in=on_purpose_in)


WRAPS = (
    _ended("residual_added_twice", "The residual is added twice.", "LayerNorm(x + x + f(x))", "Add x once."),
    _ended("residual_missing", "The residual is missing.", "LayerNorm(f(x))", "Add x before the LayerNorm."),
    _ended(
        "residual_subtracted", "The attention is subtracted from the residual.", "x - f(x)", "Add it.", of="pre_norm"
    ),
    _ended(
        "norm_never_used",
        "A LayerNorm exists but is never called, or its result is not used: {norms}.",
        "x + f(x)",
        "Call the LayerNorm and use its result, or remove it.",
    ),
    _ended(
        "residual_after_norm",
        "The residual is added after the LayerNorm.",
        "x + LayerNorm(f(x))",
        "Add x before the LayerNorm: LayerNorm(x + f(x)).",
        on_purpose_in="Swin v2 (res-post-norm), Gemma 2 and CogView (sandwich norm), Non-Local blocks (a BatchNorm "
        "whose gain begins at 0).",
    ),
    _wrap(
        "residual_from_normalised",
        "The residual is taken from the normalised input.",
        "output = LayerNorm(x) + f(LayerNorm(x))",
        "Keep x from before the LayerNorm and add that.",
        (ENDS["pre_norm"], "return y + attended"),
        on_purpose_in="The released code of SASRec does so.",
    ),
    _wrap(
        "norm_fresh_in_forward",
        "The LayerNorm is created anew in every forward pass: its gain and bias are never trained.",
        "output = LayerNorm_with_gain_1_and_bias_0(x + f(x))",
        "Make the LayerNorm in __init__ and call it here.",
        (ENDS["post_norm"], "return nn.LayerNorm(x.size(-1))(x + attended)"),
        of="post_norm",
    ),
    _wrap(
        "queries_not_normalised",
        "Keys and values are made from the normalised input, queries from the input itself.",
        "output = Attention(x, LayerNorm(x), LayerNorm(x))",
        NORMED_ONCE,
        ("self.q_proj(y)", "self.q_proj(x)"),
    ),
    _wrap(
        "keys_not_normalised",
        "Queries are made from the normalised input, keys from the input itself.",
        "output = Attention(LayerNorm(x), x, ...)",
        NORMED_ONCE,
        ("self.k_proj(y)", "self.k_proj(x)"),
    ),
    _norm(
        "norm_leaves_different_sizes",
        "What is called a norm leaves tokens with different sizes.",
        ("the tokens keep different means or squares", "every token has the same size before the gain"),
        "Take the mean, and the mean of the squares, over the features of one token, with keepdim=True.",
    ),
)

# ---------------------------------------------------------------------------------------------- masks
MASK = "scores.masked_fill(hidden, -inf), then softmax"
APPLIED = "scores = scores.masked_fill({mask}, -math.inf)"
MASK_LINE = APPLIED.format(mask="mask")
WEIGHTS = "weights = scores.softmax(-1)"
CAUSAL = "query i looks at keys 0 ... i"
CAUSAL_LINE = APPLIED.format(mask="future")
FUTURE = ".triu(1)"
DIAGONAL = "Use tril(..., diagonal=0) for what may be seen, triu(..., diagonal=1) for what may not."
HIDE = "Fill the scores with -inf where the mask hides a key, before the softmax."
_mask = rows("mask", MASK, ran="masked_fill, where, full, full_like, mul")
_causal = rows("mask", CAUSAL, "causal", ran="tril, triu, le, lt, ge, gt, arange")


def _both(
    names: tuple[str, str], sentence: str, have: str, fix: str, *changes: Change, cost: int = 4, sink: bool = False
) -> Iterator[Mistake]:
    """A mask that is given, which costs a reading so much, and a causal one, applied in the same wrong way."""
    for name, right, mask, kind in zip(names, ("cross", "causal"), ("mask", "future"), ("", "causal "), strict=True):
        made = ((old.format(mask=mask), new.format(mask=mask)) for old, new in changes)
        found = _mask(name, sentence.replace("mask", f"{kind}mask", 1), have, fix, *made, of=right, sink=sink)
        yield found if kind else replace(found, cost=cost)


def _filled(name: str, what: str, fill: str, cost: int) -> Iterator[Mistake]:
    """A number that does not hide."""
    names, sentence = (f"mask_{name}", f"causal_{name}"), f"The mask fills with {{fill:g}}, {what}."
    change = APPLIED, APPLIED.replace("-math.inf", fill)
    have = "scores.masked_fill(hidden, {fill:g}), then softmax"
    return _both(names, sentence, have, "Fill with -inf.", change, cost=cost)


MASKS = (
    *_filled("fill_zero", "which hides nothing", "0.0", 1),
    *_filled("fill_not_negative", "a number near 0 where a large negative one was meant: hidden keys leak", "1e-9", 1),
    *_filled("fill_too_small", "which does not fully hide keys", "-10.0", 1),
    *_filled("fill_positive", "a large positive number: only hidden keys are looked at", "1e9", 4),
    *_both(
        ("mask_added_as_01", "causal_mask_added_as_01"),
        "The mask is added to the scores as zeros and ones, so that hidden keys leak.",
        "softmax(scores + mask)",
        HIDE,
        (APPLIED, "scores = scores + (~{mask}).to(scores.dtype)"),
        cost=3,
    ),
    *_both(
        ("mask_multiplied", "causal_mask_multiplied"),
        "The scores are multiplied by the mask: a score of 0 hides nothing.",
        "softmax(scores * mask)",
        HIDE,
        (APPLIED, "scores = scores * (~{mask}).to(scores.dtype)"),
        cost=2,
    ),
    *_both(
        ("mask_after_softmax", "causal_mask_after_softmax"),
        "The mask is applied after the softmax: the rows no longer sum to one.",
        "softmax(scores) * mask",
        HIDE,
        (APPLIED, "pass"),
        (WEIGHTS, f"{WEIGHTS} if {{mask}} is None else scores.softmax(-1).masked_fill({{mask}}, 0.0)"),
        cost=0,
        sink=True,
    ),
    _mask(
        "mask_never_used",
        "The mask{argument} is accepted but never used.",
        "softmax(scores)",
        "Fill the scores with -inf where it hides a key, before the softmax; a layer or a model has to pass it on to "
        "where that is done.",
        (MASK_LINE, "scores.masked_fill(mask, -math.inf)"),
        cost=5,
    ),
    _mask(
        "mask_lost_beside_another",
        "Where {other} is given, {argument} no longer hides anything.",
        ("query i sees what {other} allows", "query i sees what both allow"),
        "Combine the two, as in allowed = mask & causal, or fill the scores that the first has already filled.",
    ),
    _mask(
        "mask_transposed",
        "The mask is transposed: it hides queries from keys.",
        "mask[b, k, q]",
        "Transpose the mask, or use mask[:, None, None, :] for padding.",
        (MASK_LINE, APPLIED.format(mask="mask.mT")),
        cost=2,
        by_query=True,
        ran="last setitem",
    ),
    _mask(
        "padding_mask_on_queries",
        "The padding mask is applied to the queries instead of the keys.",
        "mask[:, None, :, None]",
        "Use mask[:, None, None, :].",
        cost=2,
        ran="last getitem, last unsqueeze",
    ),
    _mask(
        "mask_repeated_in_wrong_order",
        "The mask is repeated over the heads in the wrong order: samples get each other's mask.",
        "mask.repeat(num_heads, 1, 1)",
        "Heads lie inside each sample: use mask.repeat_interleave(num_heads, 0).",
        (MASK_LINE, APPLIED.format(mask="mask[:, 0].repeat(self.num_heads, 1, 1).view_as(scores)")),
        cost=1,
        by_query=True,
    ),
    _mask(
        "mask_of_first_sample",
        "Every sample gets the mask of the first one.",
        "mask[0]",
        "Keep the batch axis of the mask.",
        (MASK_LINE, APPLIED.format(mask="mask[:1]")),
        cost=1,
        by_query=True,
    ),
    _mask(
        "mask_inverted",
        "The mask hides what it should show, and shows what it should hide.",
        "masked_fill(~hidden, -inf)",
        "Invert the mask: say in the argument's name which of True and False may look.",
        (">= lengths", "< lengths"),
        cost=6,
        of="lengths",
    ),
    _mask(
        "mask_hides_other_entries",
        "The mask hides different keys from those that it marks.",
        "masked_fill(other entries, -inf)",
        "Lay the mask out as the scores are: (batch, heads, query, key).",
        (MASK_LINE, APPLIED.format(mask="mask.roll(1, -1)")),
    ),
    _mask(
        "mask_fails",
        "It fails with every mask: {said}.",
        "{said}",
        "Fix the line that fails.",
        (MASK_LINE, "scores = scores.mask_fill(mask, -math.inf)"),
    ),
    _mask(
        "last_key_hidden",
        "The mask that it makes hides the last key from all queries.",
        "softmax(scores.masked_fill(a pattern, -inf)), with a last column of -inf alone",
        "Let the pattern go to the last key: the end of a slice is exclusive.",
    ),
    _mask(
        "own_mask",
        "It hides keys by a pattern that torch's formula does not have.",
        "softmax(scores.masked_fill(a pattern, -inf))",
        "Take the pattern out, or make it an argument or a setting whose name says what it hides.",
    ),
    _causal(
        "causal_sees_one_ahead",
        "The causal mask is off by one: each query sees the token after it.",
        "query i looks at keys 0 ... i + 1",
        DIAGONAL,
        (FUTURE, ".triu(2)"),
    ),
    _causal(
        "causal_cannot_see_itself",
        "The causal mask is off by one: no query sees its own token.",
        "query i looks at keys 0 ... i - 1",
        DIAGONAL,
        (FUTURE, ".triu(0)"),
    ),
    _causal(
        "causal_mask_inverted",
        "The causal mask is the wrong way round: each query sees the future, not the past.",
        "query i looks at keys i ... end",
        "Invert or transpose the mask.",
        (FUTURE, ".tril(-1)"),
    ),
    _mask(
        "causal_mask_unasked",
        "It hides the future, although nothing that is passed to it asks for that.",
        "query i looks at keys 0 ... i",
        "Pass is_causal on as it was given.",
    ),
    _causal(
        "causal_mask_never_used",
        "A causal mask is intended but not applied: every token sees the future.",
        "query i looks at all keys",
        "Assign what masked_fill returns (scores = scores.masked_fill(...)), or pass is_causal=True.",
        (CAUSAL_LINE, "scores.masked_fill(future, -math.inf)"),
        on_purpose_in="Right where every token may see all (BERT, ViT); the unused mask, or the name, then misleads.",
        named=False,
    ),
)

# ---------------------------------------------------------------------------------------------- dropout and calls
DROP_LINE = "self.dropout(weights)"
_dropout = rows("dropout")

CALLS = (
    _dropout(
        "dropout_in_eval",
        "Dropout is active in eval: two calls with the same input differ.",
        ("weights = dropout(softmax(scores)), in eval too", "weights = softmax(scores) in eval"),
        "Use nn.Dropout, pass training=self.training to F.dropout, or dropout_p=p if self.training else 0.0.",
        (DROP_LINE, "F.dropout(weights, 0.1)"),
    ),
    _dropout(
        "dropout_on_scores",
        "Dropout is applied to the scores, before the softmax: a dropped score is 0, not hidden.",
        ("softmax(dropout(scores))", "dropout(softmax(scores))"),
        "Drop the weights, after the softmax.",
        (SOFTMAX_LINE, "self.dropout(scores).softmax(-1)"),
        (DROP_LINE, "weights"),
    ),
    _dropout(
        "dropout_not_on_weights",
        "Dropout falls on something else than the weights.",
        ("{have}", "dropout(softmax(scores)) v"),
        "Drop the weights, after the softmax and before they meet the values.",
        (DROP_LINE, "weights"),
        (WEIGHED, "dropped @ self.dropout(v)"),
    ),
    _dropout(
        "gradients_fail",
        "Training fails: an operation in place writes over what the gradients need.",
        ("an operation in place, such as dropout(weights, inplace=True)", "dropout(weights)"),
        "Let it write into a tensor of its own.",
        (DROP_LINE, "nn.functional.dropout(weights, self.dropout.p, self.training, inplace=True)"),
    ),
    _dropout(
        "dropout_not_rescaled",
        "What survives dropout is not scaled up by 1 / (1 - p), so that training and eval have different means.",
        ("weights * keep", "weights * keep / (1 - p)"),
        "Use nn.Dropout, or divide by 1 - p.",
        (DROP_LINE, "(weights * (torch.rand_like(weights) > self.dropout.p) if self.training else weights)"),
    ),
    _project(
        "layer_made_in_forward",
        "A layer with weights is created anew in every forward pass, so that it is never trained.",
        ("forward: nn.Linear(...)(x)", "__init__: self.linear = nn.Linear(...); forward: self.linear(x)"),
        "Make the layer in __init__.",
        ("self.v_proj(value)", "nn.Linear(value.size(-1), value.size(-1), dtype=value.dtype)(value)"),
    ),
    _project(
        "modules_not_registered",
        "The modules in {what} are not registered, so that they are never trained, saved or moved to a device.",
        ("{what} is a {kind}", "{what} is an {to}"),
        "Make it an {to}.",
        (
            "self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(3))",
            "self.projections = [nn.Linear(embed_dim, embed_dim) for _ in range(3)]",
        ),
        (
            "self.q_proj(query), self.k_proj(key), self.v_proj(value)",
            "(project(x) for project, x in zip(self.projections, (query, key, value)))",
        ),
    ),
    _output(
        "weights_not_those_used",
        "The attention maps that are returned are not the weights that were used.",
        ("returns other maps", "returns softmax(scores), (batch, heads, query, key)"),
        "Return the weights of this attention, after the softmax and before dropout.",
        (RETURNED, "return self.out_proj(merged), weights.roll(1, -1)"),
    ),
    rows("call")(
        "line_raises",
        "This line raises an exception that no argument is the cause of.",
        ("{said}", "a line that runs"),
        "{change}",
        (RETURNED, "return self.out_projection(merged)"),
    ),
    rows("call")(
        "argument_written_into",
        "It writes into an argument: the tensor of the caller's holds other numbers afterwards.",
        ("{what} is changed in place", "the arguments stay as they are"),
        "Copy it first, or use the operation that returns a new tensor.",
        ("masked_fill(mask, -math.inf)", "masked_fill(mask.logical_not_().logical_not(), -math.inf)"),
    ),
    rows("call")(
        "kept_of_other_sizes",
        "What one call keeps does not fit a later one with another number of samples.",
        ("the {what} of an earlier call", "a {what} of this call's sizes"),
        "Leave the samples out of what is kept, or ask for all of its sizes.",
        ("self.num_heads = num_heads", "self.num_heads, self.future = num_heads, torch.zeros(1, 1)"),
        (
            "future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)",
            "if self.future.shape[-1] != scores.shape[-1]:\n"
            "            self.future = torch.ones_like(scores, dtype=torch.bool).triu(1)\n"
            "        future = self.future",
        ),
        of="causal",
    ),
)

# ---------------------------------------------------------------------------------------------- what may be intended
_scores, _bias = rows("scores", SCALE), rows("bias")
SKEWED = "F.pad(q @ self.far[-q.size(2) :].mT, (1, 0)).reshape(*q.shape[:2], -1, q.size(2))"  # and one row too many

INTENDED = (
    _rotary(
        "rotary_positions",
        "Queries and keys are rotated by their positions.",
        (f"{ROTATED} / sqrt(head_dim)", SCALE),
        "",
        on_purpose_in="RoFormer, LLaMA and most language models since.",
    ),
    _norm(
        "queries_and_keys_normalised",
        "Queries and keys are normalised before they are multiplied.",
        ("scores = norm(q) norm(k)ᵀ * scale", SCALE),
        "",
        on_purpose_in="ViT-22B, Qwen3, OLMo 2.",
    ),
    _norm(
        "values_normalised",
        "The values are normalised before they are averaged.",
        ("output = weights norm(v)", "output = weights v"),
        "Leave the norm of the values out.",
        on_purpose_in="Gemma 3n normalises its values.",
    ),
    _scores(
        "scores_capped",
        "A tanh keeps the scores below {cap:g}.",
        "scores = {cap:g} tanh(q kᵀ / sqrt(head_dim) / {cap:g})",
        "Leave the tanh out, or make the cap a setting.",
        on_purpose_in="Gemma 2 caps its scores.",
    ),
    _scores(
        "keys_hidden_by_their_scores",
        "Which keys are seen depends on how large their scores are.",
        ("scores.masked_fill(scores < limit, -inf), then softmax", "softmax(scores)"),
        "Leave the comparison out, so that every key takes part.",
        (SOFTMAX_LINE, "scores.masked_fill(scores < scores.amax(-1, keepdim=True), -math.inf).softmax(-1)"),
        on_purpose_in="Top-k attention keeps only the largest scores (Explicit Sparse Transformer).",
        named=False,
    ),
    _scores(
        "bias_added",
        "A bias is added to the scores.",
        "scores = q kᵀ / sqrt(head_dim) + bias",
        "Leave the bias out, or pass it as a mask.",
        on_purpose_in="ALiBi, T5 and Swin add a bias by position.",
        named=False,
    ),
    _bias(
        "bias_grows_with_distance",
        "The positional bias grows with the distance, before the query or after it: far keys get more weight there.",
        ("scores = q kᵀ / sqrt(head_dim) + what grows with |i - j|", "scores = q kᵀ / sqrt(head_dim) - slope |i - j|"),
        "Use absolute distances and negative slopes.",
        (SOFTMAX_LINE, "(scores + (torch.arange(x.size(1)) - torch.arange(x.size(1))[:, None]).abs()).softmax(-1)"),
        of="itself",
    ),
    _bias(
        "positions_of_another_query",
        "Scores get what another query says to relative positions: that of query {query} and key {key} gets what query "
        "{other} says.",
        ("scores[i, j] = q[i] k[j]ᵀ + q[another] r[i - j]ᵀ", "scores[i, j] = q[i] k[j]ᵀ + q[i] r[i - j]ᵀ"),
        "{change}",
        ("= num_heads\n", "= num_heads\n        self.far = nn.Parameter(torch.randn(64, embed_dim // num_heads))\n"),
        (SCALE_LINE, f"(q @ k.mT + {SKEWED}[:, :, :-1]) / math.sqrt(q.size(-1))"),
        of="itself",
    ),
    _bias(
        "bias_without_effect",
        "A bias is added to the scores but changes nothing: it adds one number to all keys that a query sees.",
        ("softmax(scores + bias), where bias is the same for all keys that a query sees", "a bias that differs"),
        "Use the distances of the keys that a query sees, i - j for those before it, or leave the bias out.",
        (SOFTMAX_LINE, "(scores + torch.arange(x.size(1), dtype=x.dtype)[:, None]).softmax(-1)"),
        of="itself",
    ),
    _softmax(
        "attention_sink",
        "A learnt share of every row goes to no key.",
        "weights = exp(scores) / (exp(sink) + sum of exp(scores))",
        "Leave the sink out of the denominator.",
        on_purpose_in="gpt-oss learns a sink for each head.",
    ),
)

ROWS = (*SCALES, *LAYOUTS, *SOFTMAXES, *ROTARY, *ROLES, *WRAPS, *MASKS, *CALLS, *INTENDED)
