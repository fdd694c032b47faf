"""Python as text: what stands for a tensor and writes down what is made of it, and how modules are constructed."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.vocabulary import GETTERS
from equivalence_tests.checker.equivalent.steps import UnreadError

# The operators, the loosest first, each by the names that the engine and numpy have for it.
OPERATORS: tuple[Mapping[str, str], ...] = (
    {"<": "lt less", "<=": "le", ">": "gt greater", ">=": "ge", "==": "eq equal", "!=": "ne"},
    {"|": "or bitwise_or"},
    {"&": "and bitwise_and"},
    {"+": "add", "-": "sub subtract"},
    {"*": "mul multiply", "/": "div divide", "//": "floordiv floor_divide", "%": "mod remainder", "@": "matmul"},
    {"**": "pow power"},
)
LEVELS = {symbol: level for level, row in enumerate(OPERATORS) for symbol in row}
SYMBOLS = {name: symbol for row in OPERATORS for symbol, names in row.items() for name in names.split()}
REVERSED = {"rsub": "-", "rdiv": "/"}
SIGNS = {"invert": "~", "neg": "-", "negative": "-"}
LISTS = (nn.ModuleList, nn.Sequential)
ACTIVATIONS = {F.relu: "F.relu", F.gelu: "F.gelu", torch.relu: "torch.relu", F.silu: "F.silu"}


@dataclass(frozen=True, eq=False)
class Code(NDArrayOperatorsMixin):
    """Stands for a tensor, and writes down what is made of it."""

    expression: str  # what it is, as Python

    def made(self, expression: str) -> Self:
        """Give what is made of it."""
        return type(self)(expression)

    def __str__(self) -> str:
        return self.expression

    def __array_ufunc__(self, ufunc: Any, _: str, *inputs: Any) -> Self:
        return self.made(call_text(ufunc, ufunc.__name__, inputs, {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in GETTERS:
            return self.made(f"{bracketed(self)}.{name}")
        return lambda *args, **kwargs: self.made(f"{bracketed(self)}.{name}({arguments_text(args, kwargs)})")

    def __getitem__(self, index: Any) -> Self:
        return self.made(call_text(Tensor.__getitem__, "getitem", (self, index), {}))


def call_text(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Write a call of one of torch's functions, which the engine or numpy calls so: as an operator, a method and so on.

    >>> x = Code("x")
    >>> str(-(x + 1) ** 2), str((x @ x.mT)[..., :3].relu())
    ('-(x + 1) ** 2', '(x @ x.mT)[..., :3].relu()')
    """
    if len(args) == 2 and not kwargs and name in SYMBOLS:
        return _infix(SYMBOLS[name], *args)
    if len(args) == 2 and name in REVERSED:
        return _infix(REVERSED[name], *reversed(args))
    if len(args) == 1 and name in SIGNS:
        return f"{SIGNS[name]}{text(args[0]) if _level(text(args[0])) > LEVELS['*'] else f'({args[0]})'}"
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return f"{bracketed(args[0])}[{', '.join(map(text, index))}]"
    if name == "setitem":
        raise UnreadError("it writes into a tensor")
    if name in GETTERS:
        return f"{bracketed(args[0])}.{name}"
    owner, named = _named(function)
    if owner:
        return f"{owner}.{named}({arguments_text(args, kwargs)})"
    return f"{bracketed(args[0])}.{named}({arguments_text(args[1:], kwargs)})"


def arguments_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Write what a call is given."""
    return ", ".join([*map(text, args), *(f"{name}={text(x)}" for name, x in kwargs.items())])


def text(x: Any) -> str:
    """Write an argument, nested as it may be.

    >>> print(text((slice(None, Code("n")), ..., [True, float("inf")], {"width": 3})))
    (:n, ..., [True, float("inf")], {'width': 3})
    """
    if isinstance(x, slice):
        ends = ["" if end is None else text(end) for end in (x.start, x.stop, x.step)]
        return ":".join(ends if x.step is not None else ends[:2])
    if isinstance(x, tuple):
        return f"({', '.join(map(text, x))}{',' * (len(x) == 1)})"
    if isinstance(x, list):
        return f"[{', '.join(map(text, x))}]"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{text(key)}: {text(value)}' for key, value in x.items())}}}"
    if isinstance(x, float):
        return repr(float(x)) if abs(x) != float("inf") else f'float("{x}")'  # numpy has floats of its own
    if x is ...:
        return "..."
    if isinstance(x, bool | int | str) or x is None:
        return repr(x)
    if isinstance(x, Code | torch.dtype | torch.memory_format | torch.layout):
        return str(x)
    raise UnreadError(f"an argument of the kind {type(x).__name__} cannot be written down")


def without_defaults(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a function does anyhow."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of one that is written in C
        return dict(kwargs)
    return {key: value for key, value in kwargs.items() if parameters[key].default != value}


def bracketed(x: Any) -> str:
    """Write something so that an attribute of it may follow."""
    said = text(x)
    return f"({said})" if _level(said) < len(OPERATORS) or said.startswith("~") else said


@functools.lru_cache(maxsize=4096)
def outside_of_brackets(expression: str) -> str:
    """Leave out of an expression all that stands in brackets.

    >>> outside_of_brackets("~(a != b)[:, None] + 1")
    '~ + 1'
    """
    depth = itertools.accumulate({"(": 1, "[": 1}.get(x, -(x in ")]")) for x in expression)
    return "".join(x for x, inside in zip(expression, depth, strict=True) if not inside and x not in ")]")


def _level(expression: str) -> int:
    """Say how closely the loosest operator of an expression binds."""
    bare = outside_of_brackets(expression)
    if " if " in bare:
        return -1
    signs = ["-"] if bare.startswith("-") else []
    return min((LEVELS[x] for x in (*signs, *bare.split()) if x in LEVELS), default=len(OPERATORS))


def _infix(symbol: str, left: Any, right: Any) -> str:
    level, said, other = LEVELS[symbol], text(left), text(right)
    same = said if _level(said) >= level + (symbol == "**") else f"({said})"
    return f"{same} {symbol} {other if _level(other) > level else f'({other})'}"


def _named(function: Callable[..., Any]) -> tuple[str, str]:
    """Give the module that a function is in, and its name there; "" for a method of tensors, out of place."""
    name = getattr(function, "__name__", "")
    if getattr(Tensor, name, None) is function:
        plain = name.strip("_")
        return "", plain if name.endswith("_") and hasattr(Tensor, plain) else name
    for owner, home in (("F", F), ("torch", torch)):
        if getattr(home, name, None) is function:
            return owner, name
    raise UnreadError(f"{name or function} is not a function of torch")


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
