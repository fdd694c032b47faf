"""Which attentions run inside a model, found without the checker: a softmax between two products of activations."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

__all__ = ["Call", "Executed", "attentions_of", "captured_calls", "variant_of"]

# What multiplies two tensors and sums over an axis.
PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "mm", "addmm", "tensordot"})
WHOLE = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention"})
# After these a tensor is no longer scores: tokens or features are mixed by parameters.
FORGETTING = frozenset({"linear", "conv1d", "conv2d", "conv3d", "embedding", "layer_norm", "group_norm", "batch_norm"})


@dataclass(frozen=True)
class Executed:
    """An attention that ran.

    Args:
        path: Of its module in the model.
        module: The module.
        kind: "softmax" where its products are written out, "fused" where torch's function does it.
    """

    path: str
    module: nn.Module
    kind: str


@dataclass(frozen=True)
class Call:
    """What a module was called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copied(self) -> "Call":
        """Copy it, so that a cache in it may be written; modules in it stay the same."""
        return Call(*copy.deepcopy((self.args, self.kwargs), {id(x): x for x in _modules((self.args, self.kwargs))}))


def attentions_of(model: nn.Module, call: Callable[[], object]) -> list[Executed]:
    """Run a model once and give the attentions that ran, each once, in their order.

    An attention is the innermost module with parameters in whose forward scores (a product of two tensors of which none
    is a parameter) go through a softmax into a second product, or in which one of torch's fused functions runs.

    >>> layer = nn.TransformerEncoderLayer(6, 2, 11, batch_first=True).train()
    >>> [found.path for found in attentions_of(layer, lambda: layer(torch.ones(2, 5, 6)))]
    ['self_attn']
    """
    names = {module: path for path, module in model.named_modules()}
    running: list[nn.Module] = []
    counter = _Counter(running)
    before = nn.modules.module.register_module_forward_pre_hook(lambda *given: running.append(given[0]))
    after = nn.modules.module.register_module_forward_hook(_leave(running), always_call=True)
    try:
        with counter, torch.no_grad():
            call()
    finally:
        before.remove()
        after.remove()
    return [Executed(names[module], module, kind) for module, kind in counter.found.items() if module in names]


def _leave(running: list[nn.Module]) -> Callable[..., None]:
    def leave(module: nn.Module, args: object, output: object) -> None:
        running.remove(module)

    return leave


class _Counter(TorchFunctionMode):
    """Marks scores and weights as they are made."""

    def __init__(self, running: list[nn.Module]) -> None:
        self.running = running
        self.found: dict[nn.Module, str] = {}
        self.marked: dict[int, tuple[str, Tensor]] = {}  # the tensor is kept, so that its id stays its own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
        inputs = list(_tensors((args, tuple((kwargs or {}).values()))))
        if name in WHOLE:
            self._count("fused")
        elif isinstance(result, Tensor) and name not in FORGETTING:
            self._follow(name, inputs, result)
        return result

    def _follow(self, name: str, inputs: list[Tensor], result: Tensor) -> None:
        marks = {self.marked[id(x)][0] for x in inputs if id(x) in self.marked}
        if name in PRODUCTS:
            if "weights" in marks:
                self._count("softmax")
            elif not any(isinstance(x, nn.Parameter) for x in inputs):
                self._mark(result, "scores")
        elif name in ("softmax", "exp"):
            if "scores" in marks:
                self._mark(result, "weights")
        elif marks:
            self._mark(result, "weights" if "weights" in marks else "scores")

    def _mark(self, tensor: Tensor, mark: str) -> None:
        self.marked[id(tensor)] = (mark, tensor)

    def _count(self, kind: str) -> None:
        with_parameters = [module for module in self.running if next(module.parameters(), None) is not None]
        if with_parameters:
            self.found.setdefault(with_parameters[-1], kind)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def captured_calls(call: Callable[[], object], modules: Iterable[nn.Module]) -> dict[nn.Module, Call]:
    """Run a model and give copies of what these modules are called with the first time.

    >>> layer = nn.TransformerEncoderLayer(6, 2, 11, batch_first=True).train()
    >>> calls = captured_calls(lambda: layer(torch.ones(2, 5, 6)), [layer.self_attn])
    >>> calls[layer.self_attn].args[0].shape, calls[layer.self_attn].kwargs["need_weights"]
    (torch.Size([2, 5, 6]), False)
    """
    calls: dict[nn.Module, Call] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:
            calls[module] = Call(args, kwargs).copied()

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            call()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _modules(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _modules(one)
    elif isinstance(value, Mapping):
        yield from _modules(list(value.values()))


def variant_of(module: nn.Module, call: Call, kind: str) -> str:
    """Say what distinguishes two attentions of one class: their parts, their switches, and what they are given.

    >>> variant_of(nn.MultiheadAttention(6, 2), Call((), {"key": torch.ones(1), "attn_mask": None}), "fused")
    ...     # doctest: +ELLIPSIS
    'fused; given key; in_proj_bias, in_proj_weight, out_proj.bias, out_proj.weight; _qkv_same_embed_dim, training'
    """
    own = vars(module)
    parts = sorted(name for name, _ in module.named_parameters())
    switches = sorted(name for name, value in own.items() if value is True)
    given = sorted(
        name for name, value in call.kwargs.items() if value is not None and not isinstance(value, (bool, int))
    )
    return "; ".join((kind, "given " + ", ".join(given), ", ".join(parts), ", ".join(switches)))
