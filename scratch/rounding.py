"""Everything that is only there to round as torch does, to the last bit: layouts, halves of the scale, upcasts.

The equations read the same without it. Dimension letters as in ``functional``.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "HALF_PRECISION",
    "folded_scores",
    "halve_the_scale",
    "laid_out_like",
    "sequence_first",
    "unpack",
    "upcast_half",
]

HALF_PRECISION = (torch.float16, torch.bfloat16)


def sequence_first(query: Tensor, key: Tensor, value: Tensor, batch_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Transpose the inputs to (len, batch, features), so that inputs that are one tensor stay one tensor.

    Self-attention is recognised by ``query is key is value``: it is then one packed projection. Without a batch
    torch.nn does not recognise it and projects three times; so do we, to round the same way.

    Args:
        query: (query_len, features) without a batch; else with it, in the order that ``batch_first`` says.
        key: (key_len, features), in the same order.
        value: As long as ``key``, in the same order.
        batch_first: Whether the batch comes first.

    Returns:
        The three as views, sequence first.

    In torch.nn: the first lines of ``nn.MultiheadAttention.forward``.

    >>> x = torch.randn(2, 5, 12)
    >>> query, key, value = sequence_first(x, x, x, batch_first=True)
    >>> query.shape, query is key is value
    (torch.Size([5, 2, 12]), True)
    """
    if query.dim() == 2:
        return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    if not batch_first:
        return query, key, value
    query_view = query.transpose(0, 1)
    key_view = query_view if key is query else key.transpose(0, 1)
    return query_view, key_view, key_view if value is key else value.transpose(0, 1)


def unpack(packed: Float[Tensor, "len batch packed_width"], widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Split the result of a packed projection into one contiguous tensor for each projection.

    Equally wide ones are slices of one tensor, as in torch.nn, so that the products that follow round the same way.

    Args:
        packed: (len, batch, the sum of the widths).
        widths: One for each projection.

    Returns:
        For each width (len, batch, width).

    In torch.nn: the end of ``torch.nn.functional._in_projection_packed``.

    >>> unpack(torch.arange(6.0).view(1, 1, 6), [2, 2, 2])
    (tensor([[[0., 1.]]]), tensor([[[2., 3.]]]), tensor([[[4., 5.]]]))
    """
    if len(set(widths)) > 1:
        return tuple(x.contiguous() for x in packed.split(list(widths), dim=-1))
    return packed.unflatten(-1, (len(widths), widths[0])).permute(2, 0, 1, 3).contiguous().unbind()


def halve_the_scale(k: Tensor, scale: float) -> tuple[Tensor, float]:
    """Scale queries and keys by the square root of the scale each: (sqrt(s) q) (sqrt(s) k)ᵀ = s q kᵀ.

    It keeps float16 in range and is how torch's MATH backend rounds.

    Args:
        k: (..., key_len, head_dim); scaled in the layout that the product takes, so that the strides are torch's.
        scale: Factor on the scores.

    Returns:
        The scaled keys, and the factor for the queries: the same root, with the sign of the scale.

    In torch.nn: ``torch.ops.aten._scaled_dot_product_attention_math``.

    >>> halve_the_scale(torch.ones(3, 2), scale=-0.25)
    (tensor([[0.5000, 0.5000],
            [0.5000, 0.5000],
            [0.5000, 0.5000]]), -0.5)
    """
    root = math.sqrt(abs(scale))
    return (k.transpose(-2, -1) * root).transpose(-2, -1), math.copysign(root, scale)


def folded_scores(q: Tensor, k: Tensor, score_bias: Tensor | None, scale: float) -> Tensor:
    """Compute scores and bias in one batched product, as torch.nn's module does if weights are asked for.

    masked_scores = q kᵀ * scale + score_bias, where a product and a sum would round twice. Without a bias ``@`` would
    do, except for heads of size 1, whose operands it lays out differently.

    Args:
        q: (batch, num_heads, query_len, head_dim).
        k: (batch, num_heads, key_len, head_dim).
        score_bias: (1 or batch, 1 or num_heads, 1 or query_len, key_len); with a batch, for each head.
        scale: Factor on the scores, on the queries alone.

    Returns:
        (batch * num_heads, query_len, key_len).

    In torch.nn: ``torch.bmm`` and ``torch.baddbmm`` inside ``F.multi_head_attention_forward``.
    """
    q, k = q.flatten(0, 1) * scale, k.flatten(0, 1).transpose(1, 2)
    return torch.bmm(q, k) if score_bias is None else torch.baddbmm(score_bias.flatten(0, 1), q, k)


def laid_out_like(query: Tensor, context: Tensor) -> Tensor:
    """Give the context the memory layout of the queries: heads after tokens where the queries were transposed.

    ``context.transpose(1, 2).view(batch, query_len, -1)`` is then possible, as after torch's kernels.

    Args:
        query: (batch, num_heads, query_len, head_dim). With any other rank the context is returned as it is.
        context: (batch, num_heads, query_len, v_head_dim).

    Returns:
        The context, copied if need be.

    In torch.nn: what the fused kernels of ``F.scaled_dot_product_attention`` return; its MATH backend does not.

    >>> query = torch.randn(2, 5, 3, 11).transpose(1, 2)
    >>> laid_out_like(query, torch.randn(2, 3, 5, 13)).transpose(1, 2).is_contiguous()
    True
    """
    if query.dim() != 4 or context.dim() != 4 or not _holds(query.stride(1) < query.stride(2)):
        return context
    return context.transpose(1, 2).contiguous().transpose(1, 2)


def _holds(condition: bool) -> bool:
    """Evaluate a comparison of sizes; when compiled or exported, one that depends on the inputs counts as false."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # it takes a second to import

    return guard_or_false(condition)


def upcast_half(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert float16 and bfloat16 tensors to float32, and leave others as they are.

    Args:
        *tensors: Any tensors.

    Returns:
        As many tensors.

    In torch.nn: what the MATH backend of ``F.scaled_dot_product_attention`` does, and the fused kernels do internally.
    """
    return tuple(x.float() if x.dtype in HALF_PRECISION else x for x in tensors)
