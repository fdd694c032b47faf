"""The known mistakes in what an attention offers beyond one call: switches, windows, a scale, a cache."""

from equivalence_tests.checker.mistakes.mistake import Mistake

UNCAUSAL = "With {what} output {output} {shown}: token {token} {effect} it."
UNCAUSAL_HAVE = "with {what} query i sees {seen}"
PAST = "query i sees the keys j <= i"
HIDE = "Hide what lies above the diagonal: torch.ones(q, k).triu(1).bool() is True where the score becomes -inf."

ROWS = (
    Mistake("causal_switch_wrong", "mask", UNCAUSAL, UNCAUSAL_HAVE, PAST, HIDE),
    Mistake(
        "scale_argument_wrong",
        "scale",
        "With {what} the scores are not the products of queries and keys times that number.",
        "a different output from that with queries multiplied by {number} sqrt(head_dim)",
        "scores = {argument} * q kᵀ",
        "Multiply the scores by {argument} where it is given, and by 1 / sqrt(head_dim) where it is None.",
    ),
    Mistake(
        "window_without_effect",
        "mask",
        "The window of {limit} tokens ({argument}) hides nothing: of {length} tokens the first reaches the last.",
        "every query sees every key, however far away",
        "a query sees the keys less than {limit} tokens away",
        "Use {argument} where the mask is made.",
    ),
    Mistake(
        "window_hides_near_keys",
        "mask",
        "The window of {limit} tokens ({argument}) is the wrong way round: it hides a query's own token.",
        "a query that sees no key, or only far ones",
        "a query sees the keys less than {limit} tokens away",
        "Hide only the keys that are {limit} or more tokens away.",
    ),
    Mistake(
        "fails_with_what_it_offers",
        "call",
        "It fails with {what}: {said}.",
        "{said}",
        "an output, as without it",
        "Fix the line that fails, or do not offer the argument.",
    ),
    Mistake(
        "cache_differs_from_one_pass",
        "cache",
        "Decoded {how} with its cache, token {token} and those after it differ from those of one pass.",
        "steps of {lengths} tokens ({detail})",
        "the same numbers as one pass over all tokens that hides the future",
        "Append the new keys and values after the kept ones, count positions from the number of kept tokens, "
        "and let query i of a step see the keys up to kept + i.",
    ),
    Mistake(
        "cache_read_elsewhere",
        "cache",
        "What is read from the cache is not what was just written into it.",
        "keys and values from other places of the cache",
        "the same keys and values that were written",
        "Write to the places that are read: from the number of kept tokens on.",
    ),
    Mistake(
        "cache_fails",
        "cache",
        "The step after the first fails with the cache that the code returned: {said}.",
        "{said}",
        "a second step that sees the tokens of the first",
        "Call it again with the cache that it returns, and fix the line that fails.",
    ),
)
