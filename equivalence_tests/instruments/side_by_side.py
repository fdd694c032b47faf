"""Run the same call in ``scratch``, ``builtin`` and torch.nn, with the same weights, and compare all that comes out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.torch_version import TorchVersion

import builtin
import scratch
from equivalence_tests.instruments.differences import FLOAT64_BOUND, compare_group, compare_tensors
from equivalence_tests.instruments.weights import copy_weights, randomize_parameters

__all__ = [
    "CLASSES",
    "PACKAGES",
    "TORCH",
    "assert_close",
    "assert_equal",
    "describe",
    "fast_path",
    "merges_as_torch_does",
    "outputs_and_gradients",
    "padding_with_holes",
    "random_tensor",
    "tokens",
    "with_same_weights",
]

CLASSES = (
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerDecoder",
    "Transformer",
)
PACKAGES = {"scratch": scratch, "builtin": builtin}
# torch's own, under the names of the packages.
TORCH = SimpleNamespace(
    **{name: getattr(nn, name) for name in CLASSES},
    scaled_dot_product_attention=F.scaled_dot_product_attention,
    flex_attention=flex_attention,
    create_block_mask=create_block_mask,
)


def merges_as_torch_does(attention: Any) -> bool:
    """Say whether heads lie in memory as in torch.nn once merged: those of width 1 are copied there before 2.13."""
    return attention.embed_dim > attention.num_heads or torch.__version__ >= TorchVersion("2.13")


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw normal numbers in float64 and round them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tokens(*names: str, batch_first: bool = False) -> dict[str, Tensor]:
    """Draw two samples of width 33 for each argument of a layer or stack, all different."""
    lengths = {"src": 7, "tgt": 5, "memory": 7}
    return {
        name: random_tensor(*((2, lengths[name]) if batch_first else (lengths[name], 2)), 33, seed=seed)
        for seed, name in enumerate(names)
    }


def padding_with_holes(length: int) -> Tensor:
    """Hide places of two samples with holes between them, others in each sample."""
    hidden = torch.zeros(2, length, dtype=torch.bool)
    hidden[0, [1, 4]] = hidden[1, 2] = True
    return hidden


def describe(arguments: Mapping[str, Any]) -> str:
    """Name a test by the arguments that it gives."""
    return ",".join(f"{name}={getattr(x, '__name__', x)}" for name, x in arguments.items()) or "plain"


def with_same_weights(ours: nn.Module, torchs: nn.Module, dtype: torch.dtype = torch.float64) -> None:
    """Give two modules the same random weights, biases and gains included."""
    copy_weights(randomize_parameters(torchs.to(dtype)), ours.to(dtype))


def outputs_and_gradients(
    call: Any, inputs: Mapping[str, Tensor], *, seed: int = 0, **arguments: Any
) -> dict[str, Tensor | None]:
    """Call a module or function, go backward from random gradients, and give everything by name.

    Args:
        call: A module or function.
        inputs: Its differentiable inputs. Equal objects stay equal: self-attention is recognised by that.
        seed: Set before the call: it decides what dropout drops.
        **arguments: The other arguments.

    Returns:
        The outputs, and the gradients of every input and parameter.
    """
    leaves = {id(x): x.detach().clone().requires_grad_() for x in inputs.values()}
    parameters = dict(call.named_parameters()) if isinstance(call, nn.Module) else {}
    for parameter in parameters.values():
        parameter.grad = None
    torch.manual_seed(seed)
    results = call(**{name: leaves[id(x)] for name, x in inputs.items()}, **arguments)
    outputs = {f"output {i}": x for i, x in enumerate(results if isinstance(results, tuple) else (results,))}
    given = [x for x in outputs.values() if x is not None]
    torch.autograd.backward(given, [random_tensor(*x.shape, seed=2, dtype=x.dtype).to(x.device) for x in given])
    gradients = {f"gradient of {name}": leaves[id(x)].grad for name, x in inputs.items()}
    return outputs | gradients | {f"gradient of {name}": x.grad for name, x in parameters.items()}


def assert_close(actual: Tensor | None, expected: Tensor | None, name: str = "result", **bounds: Any) -> None:
    """Require that two tensors agree, as ``compare_tensors`` judges it."""
    comparison = compare_tensors(actual, expected, name=name, **bounds)
    assert comparison.passed, str(comparison)


def assert_equal(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], relative_bound: float = FLOAT64_BOUND
) -> None:
    """Require that two results of ``outputs_and_gradients`` agree; a bound of 0 asks for every bit, NaN included."""
    for kind in ("output", "gradient"):
        groups = [{name: x for name, x in side.items() if name.startswith(kind)} for side in (actual, expected)]
        differences = [str(x) for x in compare_group(*groups, relative_bound=relative_bound) if not x.passed]
        assert not differences, "\n".join(differences)


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """Switch torch's fused fast path on or off for a while."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
