"""How a module of torch's is constructed, and how a sub-module is reached, as Python."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
        return f"nn.{kind.__name__}({_listed(module, inside)})" if all(inside) else ""
    if next(module.children(), None) is not None:
        return ""
    arguments = repr(module).partition("(")[2]
    return (
        f"nn.{'Linear' if isinstance(module, nn.Linear) else kind.__name__}({arguments}"  # torch has Linears of its own
    )


def _listed(module: nn.Module, inside: list[str]) -> str:
    """Write the elements of a list, which takes one, or of a sequence, which takes them one by one."""
    return ", ".join(inside) if isinstance(module, nn.Sequential) else f"[{', '.join(inside)}]"


def made_of(module: nn.Module, inside: list[str]) -> str:
    """Write a list or a sequence of modules."""
    return f"nn.{type(module).__name__}({_listed(module, inside)})"


def reached(module: nn.Module, path: str) -> str:
    """Write how a sub-module is reached from a module.

    >>> reached(nn.ModuleList([nn.ModuleDict({"a": nn.ReLU()})]), "0.a")
    '[0]["a"]'
    """
    text = ""
    for name in path.split(".") if path else ():
        if isinstance(module, LISTS):
            text += f"[{name}]"
        else:
            text += f'["{name}"]' if isinstance(module, nn.ModuleDict) else f".{name}"
        module = module.get_submodule(name)
    return text


def _attention(module: nn.Module) -> str:
    assert isinstance(module, nn.MultiheadAttention)  # chosen by its class
    bias: Tensor | None = module.in_proj_bias
    said = [str(module.embed_dim), str(module.num_heads)]
    said += [f"dropout={module.dropout!r}"] if module.dropout else []
    said += ["bias=False"] if bias is None else []
    said += ["add_bias_kv=True"] if module.bias_k is not None else []
    said += ["add_zero_attn=True"] if module.add_zero_attn else []
    apart = (("kdim", module.kdim), ("vdim", module.vdim))
    said += [f"{name}={width}" for name, width in apart if width != module.embed_dim]
    said += ["batch_first=True"] if module.batch_first else []
    return f"nn.MultiheadAttention({', '.join(said)})"


def _layer(module: nn.Module) -> str:
    assert isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)  # chosen by its class
    attention, activation = module.self_attn, ACTIVATIONS.get(module.activation, "")
    if not activation:
        return ""
    bias: Tensor | None = attention.in_proj_bias
    said = [str(attention.embed_dim), str(attention.num_heads), str(module.linear1.out_features)]
    said += [f"dropout={module.dropout.p!r}", f"activation={activation}"]
    said += [f"layer_norm_eps={module.norm1.eps!r}"] if module.norm1.eps != 1e-5 else []
    said += ["norm_first=True"] if module.norm_first else []
    said += ["batch_first=True"] if attention.batch_first else []
    said += ["bias=False"] if bias is None else []
    return f"nn.{type(module).__name__}({', '.join(said)})"


def _stack(module: nn.Module) -> str:
    assert isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder)  # chosen by its class
    layer, norm = constructor(module.layers[0]), "" if module.norm is None else constructor(module.norm)
    if not layer or bool(norm) != (module.norm is not None):
        return ""
    nested = ", enable_nested_tensor=False" if isinstance(module, nn.TransformerEncoder) else ""
    return f"nn.{type(module).__name__}({layer}, {len(module.layers)}, norm={norm or None}{nested})"


_WRITTEN = {
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
