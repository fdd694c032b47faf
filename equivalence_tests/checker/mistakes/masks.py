"""The known mistakes of code that builds masks."""

from equivalence_tests.checker.mistakes.mistake import rows

CAUSAL = "query i looks at the keys j <= i"
PADDING = "every query looks at the keys that are no padding"
BOTH = "may look = (key is no padding) and (j <= i)"
COMPARED = "ne, eq"
FILLED = "masked_fill, where, full, full_like, mul"
DIAGONAL = "Use torch.tril(ones) for True = may look, or torch.triu(ones, diagonal=1) for True = may not look."
_mask, _causal = rows("mask"), rows("mask", CAUSAL, ran="tril, triu, le, lt, ge, gt, arange")
_lengths = rows("mask", "may look = j < length", ran="le, lt, ge, gt")

ROWS = (
    _causal(
        "causal_mask_sees_one_ahead",
        "The causal mask lets every token see the next one.",
        "query i looks at the keys j <= i + 1",
        DIAGONAL,
    ),
    _causal(
        "causal_mask_hides_itself",
        "The causal mask hides each token from itself, and everything from the first.",
        "query i looks at the keys j < i",
        DIAGONAL,
    ),
    _causal(
        "causal_mask_transposed",
        "The causal mask shows the future and hides the past.",
        "query i looks at the keys j >= i",
        "Transpose it: rows are queries, columns are keys.",
    ),
    _mask(
        "padding_hides_queries",
        "The padding hides rows of queries, not keys: padding is still looked at.",
        ("may look = (query is no padding)", PADDING),
        "Put the new axis before the length: mask[:, None, :], or unsqueeze(1).unsqueeze(2) with heads.",
        ran="last getitem, last unsqueeze",
    ),
    _mask(
        "padding_inverted",
        "The padding is shown and the words are hidden, while the causal part means the opposite.",
        ("may look = (key is padding) and (j <= i)", BOTH),
        "Let True mean the same in both masks before joining them.",
        ran=COMPARED,
    ),
    _mask(
        "masks_joined_by_or",
        "Padding and causal mask are joined so that either may show what the other hides.",
        ("may look = (key is no padding) or (j <= i)", BOTH),
        "Join with & where True = may look, with | where True = may not look.",
        ran="last or, last logical_or, last and, last logical_and, last mul, last add, maximum, minimum",
    ),
    _lengths(
        "length_one_too_long",
        "One token past the end of each sequence may still be looked at.",
        "may look = j <= length",
        "Positions start at 0: compare with <.",
    ),
    _lengths(
        "length_one_too_short",
        "The last token of each sequence is hidden.",
        "may look = j < length - 1",
        "Positions start at 0: compare with <.",
    ),
    _mask(
        "pad_id_not_used",
        "The token id that is hidden is not the pad id that was passed.",
        ("may look = (id != a fixed number)", "may look = (id != pad_id)"),
        "Compare with the argument.",
        ran=COMPARED,
    ),
    _mask(
        "added_mask_inverted",
        "The mask that is added hides what it should show: 0 stands on the hidden keys.",
        ("0 = may not look, -inf = may look", "0 = may look, -inf = may not look"),
        "Swap the two values.",
        ran=FILLED,
    ),
    _mask(
        "fill_too_weak",
        "What is added to hidden scores is too small to hide them: they leak.",
        ("scores + a small number", "scores + (-inf)"),
        "Fill with -inf, or with torch.finfo(dtype).min.",
        ran=FILLED,
    ),
)
