"""How a module of torch's is constructed, and how a sub-module is reached, as Python."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.equivalent.texts import without_defaults

LISTS = (nn.ModuleList, nn.Sequential)
ACTIVATIONS = {F.relu: "F.relu", F.gelu: "F.gelu", torch.relu: "torch.relu", F.silu: "F.silu"}


def constructor(module: nn.Module) -> str:
    """Write the call that constructs one of torch's own modules; "" for any other module.

    >>> constructor(nn.Linear(2, 3)), constructor(nn.Sequential(nn.ReLU()))
    ('nn.Linear(in_features=2, out_features=3, bias=True)', 'nn.Sequential(nn.ReLU())')
    """
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules"):
        return ""
    if kind in _WRITTEN:
        return _WRITTEN[kind](module)
    if isinstance(module, LISTS):
        inside = [constructor(child) for child in module]
        return made_of(module, inside) if all(inside) else ""
    if next(module.children(), None) is not None:
        return ""
    name = "Linear" if isinstance(module, nn.Linear) else kind.__name__  # torch has Linears of its own
    return f"nn.{name}({repr(module).partition('(')[2]}"


def made_of(module: nn.Module, inside: list[str]) -> str:
    """Write a list of modules, which takes one, or a sequence, which takes them one by one."""
    listed = ", ".join(inside)
    return f"nn.{type(module).__name__}({listed if isinstance(module, nn.Sequential) else f'[{listed}]'})"


def reached(module: nn.Module, path: str) -> str:
    """Write how a sub-module, or a parameter, is reached from a module.

    >>> reached(nn.ModuleList([nn.ModuleDict({"a": nn.ReLU()})]), "0.a")
    '[0]["a"]'
    """
    text = ""
    for name in path.split(".") if path else ():
        if isinstance(module, LISTS):
            text += f"[{name}]"
        else:
            text += f'["{name}"]' if isinstance(module, nn.ModuleDict) else f".{name}"
        module = module._modules.get(name) or module  # else the last is a parameter
    return text


def called_with(kind: type[nn.Module], *sizes: int, **options: Any) -> str:
    """Write the construction of a module of torch's, without what it takes anyhow.

    >>> called_with(nn.MultiheadAttention, 6, 3, dropout=0.0, bias=False)
    'nn.MultiheadAttention(6, 3, bias=False)'
    """
    named = without_defaults(kind, options).items()
    said = (f"{name}={ACTIVATIONS[x] if callable(x) else repr(x)}" for name, x in named)
    return f"nn.{kind.__name__}({', '.join([*map(str, sizes), *said])})"


def _attention(module: nn.MultiheadAttention) -> str:
    bias: Tensor | None = module.in_proj_bias
    apart = {"kdim": module.kdim, "vdim": module.vdim}
    return called_with(
        nn.MultiheadAttention,
        module.embed_dim,
        module.num_heads,
        dropout=module.dropout,
        bias=bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        **{name: width for name, width in apart.items() if width != module.embed_dim},
        batch_first=module.batch_first,
    )


def _layer(module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> str:
    attention, bias = module.self_attn, module.linear1.bias
    if module.activation not in ACTIVATIONS:
        return ""
    return called_with(
        type(module),
        *(attention.embed_dim, attention.num_heads, module.linear1.out_features),
        dropout=module.dropout.p,
        activation=module.activation,
        layer_norm_eps=module.norm1.eps,
        batch_first=attention.batch_first,
        norm_first=module.norm_first,
        bias=bias is not None,
    )


def _stack(module: nn.TransformerEncoder | nn.TransformerDecoder) -> str:
    layer, norm = constructor(module.layers[0]), "" if module.norm is None else constructor(module.norm)
    if not layer or bool(norm) != (module.norm is not None):
        return ""
    nested = ", enable_nested_tensor=False" if isinstance(module, nn.TransformerEncoder) else ""
    return f"nn.{type(module).__name__}({layer}, {len(module.layers)}, norm={norm or None}{nested})"


_WRITTEN: Mapping[type[nn.Module], Callable[[Any], str]] = {
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _layer,
    nn.TransformerDecoderLayer: _layer,
    nn.TransformerEncoder: _stack,
    nn.TransformerDecoder: _stack,
}


def own_lines(module: nn.Module) -> Iterator[str]:
    """Write the parameters and buffers that a module holds itself."""
    for name, weight in module._parameters.items():
        if weight is not None:
            yield f"self.{name} = nn.Parameter(torch.empty({tuple(weight.shape)}))"
    for name, x in module._buffers.items():
        if x is not None and name not in module._non_persistent_buffers_set:
            dtype = "" if x.is_floating_point() else f", dtype={x.dtype}"
            yield f'self.register_buffer("{name}", torch.empty({tuple(x.shape)}{dtype}))'
