"""The known mistakes in dropout and calls, and what may be intended, each with the change that makes it."""

from equivalence_tests.checker.mistakes.formulas import (
    RETURNED,
    ROTATED,
    SCALE,
    SCALE_LINE,
    SOFTMAX,
    SOFTMAX_LINE,
    WEIGHED,
)
from equivalence_tests.checker.mistakes.mistake import rows

_project, _norm, _output = rows("project"), rows("norm"), rows("output")
_rotary, _softmax = rows("rotary", ROTATED, "rotary"), rows("softmax", SOFTMAX)

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
        "Apply dropout to the weights, after the softmax.",
        (SOFTMAX_LINE, "self.dropout(scores).softmax(-1)"),
        (DROP_LINE, "weights"),
    ),
    _dropout(
        "dropout_not_on_weights",
        "Dropout is applied to something other than the weights.",
        ("{have}", "dropout(softmax(scores)) v"),
        "Apply dropout to the weights, after the softmax and before they are multiplied by the values.",
        (DROP_LINE, "weights"),
        (WEIGHED, "dropped @ self.dropout(v)"),
    ),
    _dropout(
        "gradients_fail",
        "Training fails: an in-place operation overwrites what the gradients need.",
        ("an in-place operation, such as dropout(weights, inplace=True)", "dropout(weights)"),
        "Use the operation that returns a new tensor.",
        (DROP_LINE, "nn.functional.dropout(weights, self.dropout.p, self.training, inplace=True)"),
    ),
    _dropout(
        "gradient_stopped",
        "The output is right, and its gradient is stopped on the way.",
        ("an operation that stops the gradient", "a gradient that reaches all that the output depends on"),
        "Leave out what stops it: detach(), .data or torch.no_grad().",
        (WEIGHED, "dropped.detach() @ v"),
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
        "A layer with weights is created anew in every forward pass, so it is never trained.",
        ("forward: nn.Linear(...)(x)", "__init__: self.linear = nn.Linear(...); forward: self.linear(x)"),
        "Make the layer in __init__.",
        ("self.v_proj(value)", "nn.Linear(value.size(-1), value.size(-1), dtype=value.dtype)(value)"),
    ),
    _project(
        "modules_not_registered",
        "The modules in {what} are not registered, so they are never trained, saved or moved to a device.",
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
    _project(
        "tensor_not_registered",
        "{what} requires a gradient but is not an nn.Parameter, so it is never trained, saved or moved to a device.",
        ("{what} is a tensor with requires_grad=True", "{what} is an nn.Parameter"),
        "Make it an nn.Parameter.",
        ("for _ in range(3))", "for _ in range(3)); self.w = torch.randn(embed_dim, embed_dim, requires_grad=True)"),
        ("self.v_proj(value)", "value @ self.w"),
    ),
    _project(
        "parameter_never_trained",
        "{what} is used through .data or detach(), so it gets no gradient and is never trained.",
        ("x + self.weight.data", "x + self.weight"),
        "Leave out .data or detach(); register what should not be trained as a buffer.",
        ("self.v_proj(value)", "nn.functional.linear(value, self.v_proj.weight.data, self.v_proj.bias)"),
        on_purpose_in="Codebooks that a moving average updates (VQ-VAE).",
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
        "It writes into an argument: the caller's tensor holds other numbers afterwards.",
        ("{what} is changed in place", "the arguments stay as they are"),
        "Copy it first, or use the operation that returns a new tensor.",
        ("masked_fill(mask, -math.inf)", "masked_fill(mask.logical_not_().logical_not(), -math.inf)"),
    ),
    rows("call")(
        "kept_of_other_sizes",
        "What one call stores does not fit a later call with another batch size.",
        ("the {what} of an earlier call", "a {what} of this call's sizes"),
        "Store it without a batch axis, or compare all of its sizes before reusing it.",
        ("self.num_heads = num_heads", "self.num_heads, self.future = num_heads, torch.zeros(1, 1)"),
        (
            "future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)",
            "if self.future.shape[-1] != scores.shape[-1]:\n"
            "            self.future = torch.ones_like(scores, dtype=torch.bool).triu(1)\n"
            "        future = self.future",
        ),
        of="causal",
    ),
    rows("call")(
        "kept_mask",
        "The mask of one call is stored, and used again in a later call that is given another.",
        ("the mask of an earlier call", "the mask of this call"),
        "Use the mask of each call, and store only what depends on none of its arguments.",
        ("self.num_heads = num_heads", "self.num_heads, self.hidden = num_heads, None"),
        (
            "scores = scores.masked_fill(mask, -math.inf)",
            "if self.hidden is None or self.hidden.shape != mask.shape:\n"
            "                self.hidden = mask\n"
            "            scores = scores.masked_fill(self.hidden, -math.inf)",
        ),
    ),
)

# ---------------------------------------------------------------------------------------------- what may be intended
_scores, _bias = rows("scores", SCALE), rows("bias")
SKEWED = "F.pad(q @ self.far[-q.size(2) :].mT, (1, 0)).reshape(*q.shape[:2], -1, q.size(2))"  # and one row too many
FROM_THE_FIRST = SKEWED.replace("self.far[-q.size(2) :]", "self.far[: q.size(2)]")

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
        "The positional bias grows with the distance, before the query or after it: distant keys get more weight.",
        ("scores = q kᵀ / sqrt(head_dim) + what grows with |i - j|", "scores = q kᵀ / sqrt(head_dim) - slope |i - j|"),
        "Use absolute distances and negative slopes.",
        (SOFTMAX_LINE, "(scores + (torch.arange(x.size(1)) - torch.arange(x.size(1))[:, None]).abs()).softmax(-1)"),
        of="itself",
    ),
    _bias(
        "positions_of_another_query",
        "The relative-position term is not that of its own query: the score of query {query} and key {key} gets "
        "{other}.",
        ("scores[i, j] = q[i] k[j]ᵀ + q[another] r[i - j]ᵀ", "scores[i, j] = q[i] k[j]ᵀ + q[i] r[i - j]ᵀ"),
        "{change}",
        ("= num_heads\n", "= num_heads\n        self.far = nn.Parameter(torch.randn(64, embed_dim // num_heads))\n"),
        (SCALE_LINE, f"(q @ k.mT + {SKEWED}[:, :, :-1]) / math.sqrt(q.size(-1))"),
        of="itself",
    ),
    _bias(
        "positions_by_length",
        "The relative-position term meets other vectors for the same distances when the call is longer.",
        ("scores[i, j] = q[i] k[j]ᵀ + q[i] r[len - (i - j)]ᵀ", "scores[i, j] = q[i] k[j]ᵀ + q[i] r[i - j]ᵀ"),
        "Take the rows from the end of the table, table[-len:], where the last is that of a query's own key.",
        ("= num_heads\n", "= num_heads\n        self.far = nn.Parameter(torch.randn(64, embed_dim // num_heads))\n"),
        (SCALE_LINE, f"(q @ k.mT + {FROM_THE_FIRST}[:, :, 1:]) / math.sqrt(q.size(-1))"),
        of="causal",
    ),
    _bias(
        "bias_without_effect",
        "A bias is added to the scores but changes nothing: it is the same for all keys that a query sees.",
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
    _softmax(
        "heads_mixed",
        "The scores or weights of the heads are mixed with one another.",
        "weights of head h = sum of mix[g, h] times those of head g",
        "Leave the mix out.",
        on_purpose_in="Talking heads, DeepViT and CaiT mix the heads by a learnt matrix.",
        named=False,
    ),
)

ROWS = (*CALLS, *INTENDED)
