"""Which path attention takes, and the steps that several paths share. The equations are in ``functional``.

Three paths give the same numbers:

- **textbook**: ``functional.attention``, which keeps every score in memory;
- **tiles**: ``tiling.tiled_attention``, where the scores would fill too much memory and nobody asks for the weights;
- **a kernel**: ``triton_attention``, instead of tiles on the devices for which it is switched on.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from scratch import tiling
from scratch.masks import Visible

__all__ = ["Kernel", "are_plain", "chosen_kernel", "open_blind_rows", "softmax", "switched_on", "weigh"]

# Called with q, k, v, score_bias, diagonal and scale, as ``tiling.tiled_attention`` is.
Kernel = Callable[..., Tensor]
_SWITCHED_ON: dict[str, Kernel] = {}


def chosen_kernel(q: Tensor, k: Tensor, v: Tensor, visible: Visible, dropout_p: float) -> Kernel | None:
    """Choose what computes this attention: tiles or a kernel where it is large, else the textbook.

    The textbook is needed for dropout, which is drawn for all weights at once; for a score bias that requires a
    gradient; under transforms, tracing, compilation and forward-mode differentiation; and where torch's own switch,
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``, asks for it.

    Args:
        q: (..., query_len, head_dim), as ``scaled_dot_product_attention`` takes it.
        k: (..., key_len, head_dim).
        v: (..., key_len, v_head_dim).
        visible: The masks, combined.
        dropout_p: Probability of dropping each attention weight.

    Returns:
        What to call, or None for the textbook. On devices other than the CPU, where nothing has been measured, it is a
        kernel only if one is switched on, and only without a ``score_bias``.

    In torch.nn: the choice of a backend inside ``F.scaled_dot_product_attention``.

    >>> short, long = torch.randn(2, 8, 64, 16), torch.randn(2, 8, 1024, 16)
    >>> chosen_kernel(short, short, short, Visible(), 0.0) is None
    True
    >>> chosen_kernel(long, long, long, Visible(), 0.0).__name__
    'tiled_attention'
    """
    tensors = [x for x in (q, k, v, visible.score_bias) if x is not None]
    if dropout_p > 0.0 or not are_plain(*tensors) or not torch.backends.cuda.flash_sdp_enabled():
        return None
    if q.size(-2) * k.size(-2) < tiling.TILES_FROM or not _are_heads(q, k, v):
        return None
    kernels = {_kernel_on(x.device.type) for x in tensors}
    if len(kernels) > 1 or not _takes_bias(visible.score_bias):
        return None
    return kernels.pop()


def _kernel_on(device_type: str) -> Kernel | None:
    return _SWITCHED_ON.get(device_type, tiling.tiled_attention if device_type == "cpu" else None)


def _takes_bias(score_bias: Tensor | None) -> bool:
    """Return whether tiles or a kernel can add this bias: on the CPU, and without a gradient of its own."""
    if score_bias is None:
        return True
    return score_bias.device.type == "cpu" and not (score_bias.requires_grad and torch.is_grad_enabled())


def _are_heads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether all have at most four dimensions, none of them empty, and k and v have equally many heads."""
    if max(q.dim(), k.dim(), v.dim()) > 4 or 0 in (q.numel(), k.numel(), v.numel()):
        return False
    return k.dim() < 3 or v.dim() < 3 or len({k.size(-3), v.size(-3)} - {1}) <= 1


@contextmanager
def switched_on(device_type: str, kernel: Kernel) -> Iterator[None]:
    """Let a kernel compute large attention on a type of device, in the modules and in the function.

    Args:
        device_type: "cuda", for example.
        kernel: Called as ``tiling.tiled_attention`` is.

    Yields:
        Nothing.

    In torch.nn: ``torch.nn.attention.sdpa_kernel``.
    """
    before = _SWITCHED_ON.copy()
    _SWITCHED_ON[device_type] = kernel
    try:
        yield
    finally:
        _SWITCHED_ON.clear()
        _SWITCHED_ON.update(before)


def are_plain(*tensors: Tensor) -> bool:
    """Return whether these are plain tensors, computed eagerly, so that their memory may be reused.

    Args:
        *tensors: Any tensors.

    Returns:
        False under ``torch.func``, tracing, compilation and forward-mode differentiation, and for subclasses.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0:
        return False
    return not any(type(x) not in (Tensor, nn.Parameter) or tiling.is_transformed(x) for x in tensors)


def softmax(masked_scores: Float[Tensor, "*heads query_len key_len"]) -> Float[Tensor, "*heads query_len key_len"]:
    """Turn scores into weights, in place where no gradient needs the scores.

    Allocating as much memory again would cost as much time as the softmax itself.

    Args:
        masked_scores: May hold the weights afterwards: do not read them again.

    Returns:
        The weights; those of each row sum to 1.
    """
    reused = not (masked_scores.requires_grad and torch.is_grad_enabled()) and are_plain(masked_scores)
    return torch.softmax(masked_scores, dim=-1, out=masked_scores if reused else None)


def open_blind_rows(
    score_bias: Float[Tensor, "*lead key_len"],
) -> tuple[Float[Tensor, "*lead key_len"], Bool[Tensor, "*lead 1"]]:
    """Unmask the rows that are fully masked, so that their softmax and its gradient stay finite.

    The context is then multiplied by the second result, which is False for these rows: 0 times a finite number is 0,
    and a NaN in the inputs stays a NaN.

    Args:
        score_bias: -inf hides a key.

    Returns:
        The bias with 0 in rows that were -inf throughout, and whether each row sees any key.

    In torch.nn: ``torch._safe_softmax`` inside ``F.scaled_dot_product_attention``.

    >>> open_blind_rows(torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]]))
    (tensor([[0., -inf],
            [0., 0.]]), tensor([[ True],
            [False]]))
    """
    row_sees = (score_bias != -math.inf).any(dim=-1, keepdim=True)
    return score_bias.masked_fill(~row_sees, 0.0), row_sees


def weigh(
    masked_scores: Float[Tensor, "*#heads query_len key_len"],
    v: Float[Tensor, "*#heads key_len v_head_dim"],
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "*#heads query_len v_head_dim"], Float[Tensor, "*#heads query_len key_len"]]:
    """Compute the second half of ``functional.attention``, for scores that were computed in another way.

    weights = softmax(masked_scores); context = dropout(weights) v

    Args:
        masked_scores: May be overwritten: do not read them again.
        v: Values.
        dropout_p: Probability of dropping each attention weight.

    Returns:
        The context, and the weights after dropout.

    In torch.nn: the end of ``torch.ops.aten._scaled_dot_product_attention_math``.
    """
    weights = softmax(masked_scores)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p)
    return weights @ v, weights
