"""The known mistakes of code that builds masks."""

from equivalence_tests.checker.part_mistakes import PartMistake

__all__ = ["BUILDER_MISTAKES"]

CAUSAL = "query i looks at the keys j <= i"
PADDING = "every query looks at the keys that are no padding"
BOTH = "may look = (key is no padding) and (j <= i)"
TRIANGLE_LINES = (r"tril|triu", r"arange")
PADDING_LINES = (r"pad|!=|==|\.ne\(|\.eq\(", r"unsqueeze|None")
LENGTH_LINES = (r"<=|>=|<|>|\.lt\(|\.le\(|\.gt\(|\.ge\(", r"arange")
FILL_LINES = (r"masked_fill|where|full|inf|1e", r"return")

BUILDER_MISTAKES = {
    mistake.name: mistake
    for mistake in (
        PartMistake(
            "causal_mask_sees_one_ahead",
            "The causal mask lets every token see the next one.",
            "query i looks at the keys j <= i + 1",
            CAUSAL,
            "Use torch.tril(ones) for True = may look, or torch.triu(ones, diagonal=1) for True = may not look.",
            TRIANGLE_LINES,
        ),
        PartMistake(
            "causal_mask_hides_itself",
            "The causal mask hides each token from itself, and everything from the first.",
            "query i looks at the keys j < i",
            CAUSAL,
            "Use torch.tril(ones) for True = may look, or torch.triu(ones, diagonal=1) for True = may not look.",
            TRIANGLE_LINES,
        ),
        PartMistake(
            "causal_mask_transposed",
            "The causal mask shows the future and hides the past.",
            "query i looks at the keys j >= i",
            CAUSAL,
            "Transpose it: rows are queries, columns are keys.",
            TRIANGLE_LINES,
        ),
        PartMistake(
            "padding_hides_queries",
            "The padding hides rows of queries, not keys: padding is still looked at.",
            "may look = (query is no padding)",
            PADDING,
            "Put the new axis before the length: mask[:, None, :], or unsqueeze(1).unsqueeze(2) with heads.",
            (r"unsqueeze|\[:, *:, *None|None", *PADDING_LINES),
        ),
        PartMistake(
            "padding_inverted",
            "The padding is shown and the words are hidden, while the causal part means the opposite.",
            "may look = (key is padding) and (j <= i)",
            BOTH,
            "Let True mean the same in both masks before joining them.",
            PADDING_LINES,
        ),
        PartMistake(
            "masks_joined_by_or",
            "Padding and causal mask are joined so that either may show what the other hides.",
            "may look = (key is no padding) or (j <= i)",
            BOTH,
            "Join with & where True = may look, with | where True = may not look.",
            (r"\||&|\*|\+|logical|maximum|minimum", r"tril|triu"),
        ),
        PartMistake(
            "length_one_too_long",
            "One token past the end of each sequence may still be looked at.",
            "may look = j <= length",
            "may look = j < length",
            "Positions start at 0: compare with <.",
            LENGTH_LINES,
        ),
        PartMistake(
            "length_one_too_short",
            "The last token of each sequence is hidden.",
            "may look = j < length - 1",
            "may look = j < length",
            "Positions start at 0: compare with <.",
            LENGTH_LINES,
        ),
        PartMistake(
            "pad_id_not_used",
            "The token id that is hidden is not the pad id that was passed.",
            "may look = (id != a fixed number)",
            "may look = (id != pad_id)",
            "Compare with the argument.",
            PADDING_LINES,
        ),
        PartMistake(
            "added_mask_inverted",
            "The mask that is added hides what it should show: 0 stands on the hidden keys.",
            "0 = may not look, -inf = may look",
            "0 = may look, -inf = may not look",
            "Swap the two values.",
            FILL_LINES,
        ),
        PartMistake(
            "fill_too_weak",
            "What is added to hidden scores is too small to hide them: they leak.",
            "scores + a small number",
            "scores + (-inf)",
            "Fill with -inf, or with torch.finfo(dtype).min.",
            FILL_LINES,
        ),
    )
}
