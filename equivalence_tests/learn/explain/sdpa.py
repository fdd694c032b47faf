"""The arguments of scaled_dot_product_attention."""

import torch
from torch.nn import functional as F

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.entry import FLEX, SDPA, VARLEN, Explanation, drawn
from scratch import functional, masks, scaled_dot_product_attention
from scratch.sdpa import usual_scale

__all__ = ["EXPLANATIONS"]


def shapes() -> None:
    query = torch.randn(2, 3, 5, 8)  # batch, num_heads, query_len, head_dim
    key, value = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 6)
    output = F.scaled_dot_product_attention(query, key, value)
    print(tuple(output.shape))


def by_name() -> None:
    query = torch.tensor([[1.0, 0.0, 2.0]])
    key = torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, 1.0]])
    value = torch.tensor([[1.0, 2.0, 3.0], [2.0, 8.0, 0.0], [2.0, 6.0, 3.0]])
    print("scores:", query @ key.T)
    output = F.scaled_dot_product_attention(query, key, value, scale=1.0)
    print("output:", output)


def masked() -> None:
    query, key = torch.zeros(2, 8), torch.randn(4, 8)  # all scores are 0
    value = torch.eye(4)  # the output is the weights
    may_look = torch.ones(2, 4, dtype=torch.bool).tril(1)  # True = may look
    print(F.scaled_dot_product_attention(query, key, value, attn_mask=may_look))


def dropped() -> None:
    query, key = torch.zeros(3, 8), torch.randn(4, 8)  # all scores are 0
    value = torch.eye(4)  # the output is the weights
    print(F.scaled_dot_product_attention(query, key, value, dropout_p=0.5))


def causal() -> None:
    query, key = torch.zeros(2, 8), torch.randn(4, 8)  # all scores are 0
    value = torch.eye(4)  # the output is the weights
    print(F.scaled_dot_product_attention(query, key, value, is_causal=True))


def scaled() -> None:
    query, key = torch.randn(1, 64), torch.randn(4, 64)
    value = torch.eye(4)  # the output is the weights
    for scale in (None, 1.0):
        weights = F.scaled_dot_product_attention(query, key, value, scale=scale)
        print(f"scale={scale}:", weights)


def grouped() -> None:
    query = torch.randn(2, 6, 5, 8)  # 6 heads look
    key, value = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)  # at 3
    output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    print(tuple(output.shape))


EXPLANATIONS = (
    Explanation(
        "query",
        (SDPA,),
        "Who looks, already projected and split into heads. Its shape is (..., query_len, head_dim), and each query "
        "gets one row of the output.",
        (Place(functional.attention, "scores = (q * scale) @"),),
        shapes,
    ),
    Explanation(
        "key",
        (SDPA,),
        "What the queries are compared with. Its shape is (..., key_len, head_dim): each score is the dot product "
        "of a query and a key.",
        (Place(functional.attention, "scores = (q * scale) @"),),
        by_name,
    ),
    Explanation(
        "value",
        (SDPA,),
        "What the output is made of. Its shape is (..., key_len, width): each row of the output is a mean of these, "
        "weighted by the softmax of the scores. The width is free, and becomes that of the output.",
        (Place(functional.attention, "weights = softmax"), Place(functional.attention, "context = weights @ v")),
        by_name,
    ),
    Explanation(
        "attn_mask",
        (SDPA,),
        "Who may look at whom: True means may, the opposite of the modules. It has any shape that broadcasts to "
        "(..., query_len, key_len). A float mask is added to the scores instead. A query that may look at nothing "
        "gets 0.",
        (
            Place(masks.Visible.as_bias, "return to_score_bias"),
            Place(masks.to_score_bias, "masked_fill_(~may_attend"),
        ),
        masked,
        f"the mask of the example below:\n\n{drawn(torch.ones(2, 4, dtype=torch.bool).tril(1))}",
    ),
    Explanation(
        "dropout_p",
        (SDPA,),
        "The probability of dropping a weight, in every mode. A dropped weight is 0, and the others are divided by "
        "1 - dropout_p. A function has no eval(): it drops whenever this is above 0.",
        (Place(functional.attention, "F.dropout"),),
        dropped,
    ),
    Explanation(
        "is_causal",
        (SDPA,),
        "A real mask, unlike in the modules: query i sees keys 0 to i. Both are counted from the start, which is "
        "the upper left corner. torch documents a mask next to it as an error, but its fused CPU kernel applies "
        "both; by hand it is an error.",
        (
            Place(masks.visible_from_sdpa, "0 if is_causal"),
            Place(masks.Visible.as_bias, "triu(self.diagonal + 1)"),
        ),
        causal,
        drawn(masks.causal(2, 4)),
    ),
    Explanation(
        "scale",
        (SDPA, FLEX, VARLEN),
        "The factor on the scores before the softmax. It defaults to 1 / sqrt(head_dim), which keeps their spread "
        "near 1 whatever the width. The greater it is, the more a query settles on its best key.",
        (
            Place(usual_scale, "1 / math.sqrt"),
            Place(functional.attention, "scores = (q * scale) @"),
        ),
        scaled,
    ),
    Explanation(
        "enable_gqa",
        (SDPA, FLEX, VARLEN),
        "Lets key and value have fewer heads than query. Each of them serves a group of query heads, hence "
        "grouped-query attention. Their number must divide that of the query.",
        (Place(scaled_dot_product_attention, "if enable_gqa"),),
        grouped,
        "query head   0 1 | 2 3 | 4 5\nlooks at      0  |  1  |  2",
    ),
)
