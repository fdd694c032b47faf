"""The known mistakes in how an attention splits, projects, merges and wraps, each with the change that makes it."""

from equivalence_tests.checker.mistakes.formulas import RETURNED, SCALE_LINE, WEIGHED
from equivalence_tests.checker.mistakes.mistake import Mistake, rows

# ---------------------------------------------------------------------------------------------- heads and axes
SPLIT = "(b, l, h * d) -> view (b, l, h, d) -> transpose (b, h, l, d)"
SPLIT_LINE = "x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)"
MERGE = "(b, h, l, d) -> transpose (b, l, h, d) -> reshape (b, l, h * d)"
MERGE_LINE = "context.transpose(1, 2).flatten(2)"
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
        "The product of queries and keys sums over another axis than the elements of a head.",
        ("one score sums over several tokens or heads", "scores[i, j] = sum over d of q[i, d] k[j, d]"),
        "Multiply q by k.transpose(-2, -1).",
        (SCALE_LINE, ACROSS_SAMPLES),
    ),
    _product(
        "operands_summed_apart",
        "An einsum sums each operand by itself and multiplies the sums: their shared axis has two different letters.",
        ("einsum('{have}')", "einsum('{want}')"),
        "Use the same letter in both operands for the axis to sum over.",
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
        on_purpose_in="timm's NesT; its weights fit torch's once the columns of the output projection are reordered.",
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
            f"Use what is computed from the {kind}, or remove it.",
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
        "All heads are the same module, so each returns what the others return.",
        ("[head] * num_heads, or a list with the same head appended each time", "a separate module for each head"),
        "Make a new module for each head: nn.ModuleList([Head(...) for _ in range(num_heads)]).",
    ),
    _project(
        "other_lengths_crash",
        "It fails if there are more or fewer keys than queries, though they are separate arguments: {said}.",
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
        "It is called a norm, but leaves tokens with different means or sizes.",
        ("the tokens keep different means or squares", "every token has the same mean or size before the gain"),
        "Take the mean, and the mean of the squares, over the features of one token, with keepdim=True.",
    ),
)

ROWS = (*LAYOUTS, *ROLES, *WRAPS)
