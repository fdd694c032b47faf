"""The matrices of a module: linears, convolutions over one token, and parameters that stand alone."""

import re
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Leaf", "Projection", "leaves_of"]


@dataclass(frozen=True)
class Projection:
    """x -> x weightᵀ + bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, with_bias: bool = True) -> Tensor:
        """Apply it in the precision of x."""
        bias = self.bias.to(x.dtype) if with_bias and self.bias is not None else None
        return F.linear(x, self.weight.to(x.dtype), bias)


@dataclass(frozen=True)
class Leaf:
    """A matrix of the user's module.

    Args:
        name: How the user calls it.
        weight: Path of the parameter.
        bias: Path of its bias; "" if there is none.
        transposed: Whether the parameter is stored (in, out).
    """

    name: str
    weight: str
    bias: str
    transposed: bool

    def read(self, module: nn.Module) -> Projection:
        """Give the matrix as (out, in), with its bias, in float64 whatever the module computes in."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        weight = _as_matrix(parameters[self.weight].detach().double(), self.transposed)
        return Projection(weight, parameters[self.bias].detach().double() if self.bias else None)


def leaves_of(module: nn.Module) -> list[Leaf]:
    """List every Linear-like pair of weight and bias."""
    named = module.named_parameters(remove_duplicate=False)
    return [_leaf(module, name, p) for name, p in named if _is_matrix(p) or _is_pointwise(module, name)]


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.dim() in (2, 3) and min(parameter.shape) > 1


def _is_pointwise(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the kernel of a convolution over one token at a time, (out, in, 1) or (out, in, 1, 1)."""
    owner, _, last = name.rpartition(".")
    parent = module.get_submodule(owner)
    if last != "weight" or not isinstance(parent, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    return parent.groups == 1 and set(parent.kernel_size) == {1}


def _as_matrix(weight: Tensor, transposed: bool) -> Tensor:
    """Drop every 1 of (out, in, 1), or transpose (in, out)."""
    weight = weight.flatten(1) if weight.dim() > 2 else weight
    return weight.t() if transposed else weight


def _leaf(module: nn.Module, name: str, parameter: nn.Parameter) -> Leaf:
    owner, _, last = name.rpartition(".")
    parent = module.get_submodule(owner)
    biases = [f"{owner}.bias" if owner else "bias"] if last == "weight" else [name.replace("weight", "bias")]
    biases += [re.sub(r"(?i)w(?=_?[a-z]?$)", "b", name), re.sub(r"(?i)(^|[._])w(?=_?[a-z0-9]+$)", r"\1b", name)]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    bias = next((b for b in biases if b != name and b in parameters and parameters[b].dim() == 1), "")
    label = owner if last == "weight" and owner else name
    raw = last != "weight" or not isinstance(parent, nn.Linear)
    transposed = raw and parameter.dim() == 2 and not isinstance(parent, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if bias and parameter.dim() == 2 and parameter.size(0) != parameter.size(1):
        transposed = parameters[bias].numel() == parameter.size(1)
    return Leaf(label, name, bias, transposed)
