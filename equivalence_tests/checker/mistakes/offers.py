"""The known mistakes in what an attention offers beyond one call: switches, windows, a scale, a cache."""

from equivalence_tests.checker.mistakes.mistake import Mistake

UNCAUSAL = "With {what}, output {output} {shown}: token {token} {effect} it."
UNCAUSAL_HAVE = "with {what}, query i sees {seen}"
PAST = "query i sees the keys j <= i"
HIDE = "Hide what lies above the diagonal: torch.ones(q, k).triu(1).bool() is True where the score becomes -inf."

ROWS = (
    Mistake("causal_switch_wrong", "mask", UNCAUSAL, UNCAUSAL_HAVE, PAST, HIDE),
    Mistake(
        "scale_argument_wrong",
        "scale",
        "With {what}, the scores are not q kᵀ times that number.",
        "an output that differs from that with the queries multiplied by {number} * sqrt(head_dim)",
        "scores = {argument} * q kᵀ",
        "Multiply the scores by {argument} where it is given, and by 1 / sqrt(head_dim) where it is None.",
    ),
    Mistake(
        "window_without_effect",
        "mask",
        "The window of {limit} tokens ({argument}) hides nothing: of {length} tokens, the last still sees the first.",
        "every query sees every key, however far away",
        "a query sees the keys less than {limit} tokens away",
        "Use {argument} where the mask is made.",
    ),
    Mistake(
        "window_hides_near_keys",
        "mask",
        "The window of {limit} tokens ({argument}) is the wrong way round: it hides a query's own token.",
        "a query sees no key, or only distant ones",
        "a query sees the keys less than {limit} tokens away",
        "Hide only the keys that are {limit} or more tokens away.",
    ),
    Mistake(
        "fails_with_what_it_offers",
        "call",
        "It fails with {what}: {said}.",
        "{said}",
        "an output, as without it",
        "Fix the line that fails, or remove the argument.",
    ),
    Mistake(
        "implementations_differ",
        "call",
        "With {what}, the output is different.",
        "a different output with {what}",
        "the same numbers: how they are computed changes none of them",
        "Give both implementations the same mask, scale, bias and positions.",
        right="cross",
        changes=(
            ("embed_dim, num_heads):", "embed_dim, num_heads, flash=False):"),
            ("self.num_heads = num_heads", "self.num_heads, self.flash = num_heads, flash"),
            (
                "context = dropped @ v",
                "context = F.scaled_dot_product_attention(q, k, v) if self.flash else dropped @ v",
            ),
        ),
    ),
    Mistake(
        "training_differs",
        "call",
        "In training, the output differs from that in eval, and not because of dropout.",
        "a different output in training, even with dropout off",
        "the same numbers in training and in eval, but for dropout",
        "Compute the same in both.",
        right="cross",
        changes=(("mask is not None", "mask is not None and self.training is False"),),
    ),
    Mistake(
        "labels_change_outputs",
        "call",
        "With {argument}, the outputs are different.",
        "different outputs with {argument} and without",
        "the same outputs, and a loss beside them",
        "Compute the outputs before asking for {argument}.",
    ),
    Mistake(
        "axis_of_one_lost",
        "call",
        "A single {what} loses its axis.",
        "an output without the axis of size 1, or an exception",
        "an output with as many axes as for several",
        "Name the axis that squeeze() takes away, and leave those of the samples and tokens alone.",
        right="itself",
        changes=(("return self.out_proj(merged)", "return self.out_proj(merged).squeeze()"),),
    ),
    Mistake(
        "cache_differs_from_one_pass",
        "cache",
        "Decoding {how} with its cache gives other outputs than one pass, from token {token} on.",
        "steps of {lengths} tokens ({detail})",
        "the same numbers as one pass over all tokens with the future hidden",
        "Append new keys and values to the cached ones, count positions from the number of cached tokens, and let "
        "query i of a step see the keys up to cached + i.",
    ),
    Mistake(
        "cache_of_new_tokens_alone",
        "cache",
        "What comes back as the cache is of the new tokens alone: from the third step on, earlier ones are lost.",
        "a cache of the tokens of one step",
        "a cache of all tokens so far",
        "Return the keys and values of all tokens: those that were kept, joined with the new ones.",
    ),
    Mistake(
        "cache_read_elsewhere",
        "cache",
        "What is read from the cache is not what was just written into it.",
        "keys and values from elsewhere in the cache",
        "the same keys and values that were written",
        "Write to the slots that are read: from the number of cached tokens on.",
    ),
    Mistake(
        "cache_fails",
        "cache",
        "The second step fails with the cache that the first one returned: {said}.",
        "{said}",
        "a second step that sees the tokens of the first",
        "Call it again with the cache that it returns, and fix the line that fails.",
    ),
)
