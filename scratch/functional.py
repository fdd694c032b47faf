"""Scaled dot-product attention as in the paper, one equation per line; splitting into heads, and merging them.

Dimension letters: b batch, h num_heads, q query_len, k key_len, d head_dim. ``*#heads`` stands for any leading
dimensions, which broadcast.
"""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from scratch.paths import softmax

__all__ = ["attention", "merge_heads", "split_heads"]


def attention(
    q: Float[Tensor, "*#heads query_len head_dim"],
    k: Float[Tensor, "*#heads key_len head_dim"],
    v: Float[Tensor, "*#heads key_len v_head_dim"],
    score_bias: Float[Tensor, "..."] | None = None,
    scale: float = 1.0,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "*#heads query_len v_head_dim"], Float[Tensor, "*#heads query_len key_len"]]:
    """Average the values for every query, weighted by how well their keys match it.

    Attention(Q, K, V) = softmax(Q Kᵀ / sqrt(d_k)) V

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        score_bias: Broadcastable to (..., query_len, key_len); -inf hides a key.
        scale: Factor on the scores, 1 / sqrt(d_k) in the paper. The queries are scaled instead, as in torch.nn's
            module: equal up to rounding, and less likely to overflow.
        dropout_p: Probability of dropping each attention weight.

    Returns:
        The context, and the weights after dropout. Both are NaN for a query from which every key is hidden.

    Source: Vaswani et al. 2017, section 3.2.1, equation 1.

    >>> import torch
    >>> q, k = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, 1.0]])
    >>> v = torch.tensor([[1.0, 2.0, 3.0], [2.0, 8.0, 0.0], [2.0, 6.0, 3.0]])
    >>> attention(q, k, v, scale=1000.0)  # scores of 2000, 4000 and 4000: the two best keys share the weight
    (tensor([[2.0000, 7.0000, 1.5000]]), tensor([[0.0000, 0.5000, 0.5000]]))
    """
    scores = (q * scale) @ k.transpose(-2, -1)  # (..., q, k)
    masked_scores = scores if score_bias is None else scores + score_bias
    weights = softmax(masked_scores)  # of each query over the keys
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p)
    context = weights @ v  # (..., q, v_head_dim)
    return context, weights


def split_heads(x: Float[Tensor, "len batch width"], num_heads: int) -> Float[Tensor, "batch num_heads len head_dim"]:
    """Split the features into heads.

    Args:
        x: Projected queries, keys or values, (len, batch, num_heads * head_dim).
        num_heads: Number of heads.

    Returns:
        (batch, num_heads, len, head_dim).

    Source: Vaswani et al. 2017, section 3.2.2.

    >>> import torch
    >>> split_heads(torch.arange(8.0).view(2, 1, 4), num_heads=2)  # 2 tokens, 1 sample, 2 heads of 2
    tensor([[[[0., 1.],
              [4., 5.]],
    <BLANKLINE>
             [[2., 3.],
              [6., 7.]]]])
    """
    return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)  # (len, b, h, d) -> (b, h, len, d)


def merge_heads(context: Float[Tensor, "batch num_heads len head_dim"]) -> Float[Tensor, "len batch width"]:
    """Concatenate the heads again: the inverse of ``split_heads``.

    Args:
        context: The context of every head, (batch, num_heads, len, head_dim).

    Returns:
        (len, batch, num_heads * head_dim).

    Source: Vaswani et al. 2017, section 3.2.2, "Concat".

    >>> import torch
    >>> x = torch.randn(5, 2, 12)
    >>> torch.equal(merge_heads(split_heads(x, num_heads=3)), x)
    True
    """
    return context.permute(2, 0, 1, 3).flatten(2)  # (b, h, len, d) -> (len, b, h * d)
