"""One contender's share of a case, ready to run: the module, its inputs, and the call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.grids import Case
from equivalence_tests.compare.timing import VOCABULARY, decoding
from equivalence_tests.instruments.weights import randomize_parameters
from scratch import masks

__all__ = [
    "VOCABULARY",
    "Attend",
    "Results",
    "Workload",
    "compiled",
    "gradients_of",
    "may_attend_of",
    "runnable",
    "seen_lengths",
    "workload",
]

# The function of "attention", called with q, k, v and the keywords attn_mask and is_causal.
Attend = Callable[..., Tensor]
Results = dict[str, Tensor | None]

PAD_ID, FIRST_WORD = 0, 3
LEARNING_RATE = 1e-6  # so small that a thousand steps leave the numbers, and with them the speed, as they are


@dataclass
class Workload:
    """What one contender computes in a case.

    Args:
        call: Gives the outputs; gradients are taken of the first.
        module: What holds the parameters; None for a function.
        inputs: What is attended from and to, by name.
        translated: Gives gradients of other parameters the built-in's names and shapes.
    """

    call: Callable[[], tuple[Tensor, ...]]
    module: nn.Module | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    translated: Callable[[Results], Results] = lambda gradients: gradients

    def leaves(self) -> dict[str, Tensor]:
        """Give inputs and parameters by name, those that gradients are taken of."""
        parameters = {} if self.module is None else dict(self.module.named_parameters())
        return {name: x for name, x in {**self.inputs, **parameters}.items() if x.is_floating_point()}


def workload(
    case: Case,
    package: ModuleType | SimpleNamespace,
    *,
    attend: Attend | None = None,
    cached: bool = False,
    upcast: bool = False,
) -> Workload:
    """Build the module of a package, or take its function, and bind it to the inputs of the case.

    Args:
        case: What is computed.
        package: ``scratch``, ``builtin`` or torch.nn under the same names. All get the same weights: they have the same
            parameters in one order.
        attend: Stands in for the package's ``scaled_dot_product_attention``.
        cached: Whether "generate" remembers keys and values.
        upcast: Compute in float64 with the weights and inputs that the dtype of the case leaves.

    Returns:
        A ``Workload`` in eval mode for "forward", else in train mode, without dropout.
    """
    inputs = {name: _to_device(x, case, upcast) for name, x in _inputs(case).items()}
    if case.component == "attention":
        attend = compiled(attend or package.scaled_dot_product_attention, case)
        options = _function_masks(case) | {"enable_gqa": bool(case.key_heads)}
        return Workload(lambda: (attend(*inputs.values(), **options),), None, inputs)
    module = _module(case, package).train(case.mode != "forward")
    module = module.double() if upcast else module
    if case.component == "generate":
        run = decoding(module, inputs["src_ids"], case.query_len, cached=cached)
        return Workload(lambda: (run(),), module, inputs)
    call, positional, options = compiled(module, case), _positional(case, inputs), _module_masks(case)
    return Workload(lambda: _as_tuple(call(*positional, **options)), module, inputs)


def runnable(case: Case, work: Workload) -> Callable[[], object]:
    """Give what is timed: forward, forward and backward, or a step of SGD with momentum.

    Args:
        case: Its mode says which.
        work: What is computed.

    Returns:
        A function to be called again and again.
    """
    if case.mode == "forward":
        return torch.no_grad()(work.call)
    if case.mode == "backward":
        return lambda: gradients_of(case, work)
    assert work.module is not None  # a function has nothing to train
    optimizer = torch.optim.SGD(work.module.parameters(), lr=LEARNING_RATE, momentum=0.9)
    leaves = _requiring_gradients(work)  # inputs too: inside of a network there is more below

    def step() -> None:
        _loss(case, work, work.call()[0]).backward()
        optimizer.step()
        for x in leaves.values():  # at the end: each step frees what it has allocated
            x.grad = None

    return step


def gradients_of(case: Case, work: Workload) -> Results:
    """Run forward and backward.

    Args:
        case: What is computed.
        work: By whom.

    Returns:
        The gradient of each input and parameter.
    """
    leaves = _requiring_gradients(work)
    loss = _loss(case, work, work.call()[0])
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {f"gradient of {name}": x for name, x in zip(leaves, found, strict=True)}


def _requiring_gradients(work: Workload) -> dict[str, Tensor]:
    return {name: x.requires_grad_() for name, x in work.leaves().items()}


def _loss(case: Case, work: Workload, output: Tensor) -> Tensor:
    if case.component == "seq2seq":
        return F.cross_entropy(output.flatten(0, 1), work.inputs["tgt_ids"].flatten())
    # Half of the squares: the gradient is the output itself, as good as random.
    return output.square().sum() / 2


def _inputs(case: Case) -> dict[str, Tensor]:
    """Draw inputs on the CPU, the same for every contender."""
    generator = torch.Generator().manual_seed(0)
    query, key = (case.batch, case.query_len), (case.batch, case.key_len)
    if case.component in ("seq2seq", "generate"):
        src_ids, tgt_ids = (torch.randint(FIRST_WORD, VOCABULARY, x, generator=generator) for x in (key, query))
        return {"src_ids": src_ids.masked_fill(~_seen_keys(case).cpu(), PAD_ID), "tgt_ids": tgt_ids}
    width, key_heads = case.embed_dim, case.key_heads or case.num_heads
    split_query = (case.batch, case.num_heads, case.query_len, case.head_dim)
    split_key = (case.batch, key_heads, case.key_len, case.head_dim)
    by_component: dict[str, dict[str, tuple[int, ...]]] = {
        "attention": {"query": split_query, "key": split_key, "value": split_key},
        "self_attention": {"query": (*query, width)},
        "cross_attention": {"query": (*query, width), "key": (*key, width)},
        "encoder_layer": {"src": (*query, width)},
        "decoder_layer": {"tgt": (*query, width), "memory": (*key, width)},
        "transformer": {"src": (*key, width), "tgt": (*query, width)},
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in by_component[case.component].items()
    }


def _to_device(x: Tensor, case: Case, upcast: bool) -> Tensor:
    if not x.is_floating_point():
        return x.to(case.device)
    x = x.to(case.device, getattr(torch, case.dtype))
    return x.double() if upcast else x


def _positional(case: Case, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    tensors = list(inputs.values())
    if case.component == "self_attention":
        return tensors * 3
    return [*tensors, tensors[1]] if case.component == "cross_attention" else tensors


def _module(case: Case, package: ModuleType | SimpleNamespace) -> nn.Module:
    factory: dict[str, Any] = {"bias": case.bias, "device": case.device, "dtype": getattr(torch, case.dtype)}
    sizes = (case.embed_dim, case.num_heads)
    layer: dict[str, Any] = {"dim_feedforward": 4 * case.embed_dim, "dropout": 0.0, **factory}
    stack = {**layer, "num_encoder_layers": case.num_layers, "num_decoder_layers": case.num_layers}
    max_len = max(case.query_len + 1, case.key_len)
    if case.component in ("self_attention", "cross_attention"):
        module = package.MultiheadAttention(*sizes, batch_first=True, **factory)
    elif case.component == "encoder_layer":
        module = package.TransformerEncoderLayer(*sizes, batch_first=True, **layer)
    elif case.component == "decoder_layer":
        module = package.TransformerDecoderLayer(*sizes, batch_first=True, **layer)
    elif case.component == "transformer":
        module = package.Transformer(*sizes, batch_first=True, **stack)
    else:
        module = package.Seq2SeqTransformer(VOCABULARY, VOCABULARY, *sizes, max_len=max_len, **stack)
    return randomize_parameters(module)


def seen_lengths(case: Case) -> Tensor:
    """Say how many keys of each sequence are real: in even steps down to half of them, if the case is padded.

    Args:
        case: What is computed.

    Returns:
        (batch).
    """
    hidden = case.key_len * torch.arange(1, case.batch + 1) // (2 * case.batch)
    return case.key_len - hidden * case.is_padded


def _seen_keys(case: Case) -> Tensor:
    return masks.from_lengths(seen_lengths(case), case.key_len).to(case.device)  # (b, k)


def may_attend_of(case: Case) -> Tensor:
    """Say which query may look at which key.

    Args:
        case: What is computed.

    Returns:
        (batch, query_len, key_len), True = may look.
    """
    may_attend = _seen_keys(case)[:, None, :].expand(-1, case.query_len, -1)
    return may_attend if case.mask in ("none", "padding") else may_attend & _may_look_back(case, case.key_len)


def _may_look_back(case: Case, key_len: int) -> Tensor:
    """Say which key each query sees by their places alone: none that is later, or too far back for the window."""
    causal = masks.causal(case.query_len, key_len, device=case.device)
    if not case.window:
        return causal
    return causal & masks.sliding_window(case.query_len, key_len, window=case.window, device=case.device)


def _function_masks(case: Case) -> dict[str, Any]:
    if case.window:
        return {"attn_mask": _may_look_back(case, case.key_len)}
    if not case.is_padded:
        return {"is_causal": case.is_causal}
    may_attend = _seen_keys(case)[:, None, None, :]  # (b, 1, 1, k)
    return {"attn_mask": may_attend & _may_look_back(case, case.key_len) if case.is_causal else may_attend}


def _module_masks(case: Case) -> dict[str, Any]:
    if case.component == "seq2seq":
        return {}
    kind, padding_names = {
        "encoder_layer": ("src", ["src_key_padding_mask"]),
        "decoder_layer": ("tgt", ["memory_key_padding_mask"]),
        "transformer": ("tgt", ["src_key_padding_mask", "memory_key_padding_mask"]),
    }.get(case.component, ("attn", ["key_padding_mask"]))
    options: dict[str, Any] = {"need_weights": case.need_weights} if kind == "attn" else {}
    if case.is_causal or case.window:
        key_len = case.key_len if kind == "attn" else case.query_len
        options[f"{kind}_mask"] = masks.to_module_mask(_may_look_back(case, key_len))
        options["tgt_is_causal" if kind == "tgt" else "is_causal"] = case.is_causal
    if case.is_padded:
        options |= dict.fromkeys(padding_names, masks.to_module_mask(_seen_keys(case)))
    return options


def compiled(function: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """Compile a function if the case asks for it, apart from what is compiled for other contenders."""
    if not case.compiled:
        return function

    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    # torch keeps what it has compiled with the code object, and would take it again where another kernel is asked for.
    call.__code__ = call.__code__.replace()
    return torch.compile(call, dynamic=False)


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(x for x in found if x is not None)
