"""The known mistakes in scores and weights, positions and masks, each with the change that makes it of a right one."""

from collections.abc import Iterator
from dataclasses import replace

from equivalence_tests.checker.mistakes.formulas import ROTATED, SCALE, SCALE_LINE, SOFTMAX, SOFTMAX_LINE, WEIGHED
from equivalence_tests.checker.mistakes.mistake import Change, Mistake, rows

# ---------------------------------------------------------------------------------------------- scale
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
        "Luong-Attention, also called DotAttention or BilinearAttention.",
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

# ---------------------------------------------------------------------------------------------- softmax
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
            ("softplus", "A softplus", "softplus(scores)", "F.softplus(scores)"),
            ("log_softmax", "The logarithm of the softmax", "log(softmax(scores))", "F.log_softmax(scores, -1)"),
            ("softmin", "A softmin, which weighs the lowest score most,", "softmax(-scores)", "F.softmin(scores, -1)"),
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
_rotary = rows("rotary", ROTATED, "rotary")

ROTARY = (
    _rotary(
        "rotary_reversed",
        "Positions rotate queries and keys the wrong way round.",
        ("(a cos + b sin, b cos - a sin)", "(a cos - b sin, b cos + a sin)"),
        "The quarter turn of (a, b) is (-b, a).",
        ("torch.cat((-b, a), -1)", "torch.cat((b, -a), -1)"),
        ran="neg, sub",
        on_purpose_in="nanochat rotates this way: its models are as good, but weights from other code do not fit.",
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
        ("torch.arange(x.size(-2), dtype", "torch.ones(x.size(-2), dtype"),
    ),
    *(
        _rotary(
            f"rotary_{done}",
            f"Positions rotate the {done} but not the {left}.",
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
        "hidden_keys_mixed_in",
        "Hidden keys get a weight again where the weights of the heads are mixed after the softmax.",
        "weights of hidden keys = what the mix, or a norm behind it, adds",
        "Mix them without a bias and without a norm, or set the weights of hidden keys to 0 behind that.",
    ),
    _mask(
        "mask_never_used",
        "The mask{argument} is accepted but never used.",
        "softmax(scores)",
        "Fill the scores with -inf where it hides a key, before the softmax; a layer or model has to pass it on to the "
        "attention.",
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
        "Invert the mask, and let the argument's name say whether True or False may look.",
        (">= lengths", "< lengths"),
        cost=6,
        of="lengths",
    ),
    _mask(
        "mask_hides_other_entries",
        "The mask hides keys other than those that it marks.",
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
        "The mask that it builds hides the last key from all queries.",
        "softmax(scores.masked_fill(a pattern, -inf)), with nothing but -inf in the last column",
        "Extend what may be seen to the last key: the end of a slice is exclusive.",
    ),
    _mask(
        "own_mask",
        "It hides keys by a pattern that torch's formula does not have.",
        "softmax(scores.masked_fill(a pattern, -inf))",
        "Remove the pattern, or make it an argument or a setting whose name says what it hides.",
        on_purpose_in="Locality self-attention (LSA), whose tokens do not see their own keys.",
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
        "It hides the future, although no argument asks for that.",
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

ROWS = (*SCALES, *SOFTMAXES, *ROTARY, *MASKS)
