"""Every feed-forward: the activation, where it stands, biases and matrices left out, gates, residual and LayerNorm.

Which matrices are applied, in which order and with which biases, is read off one run.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.products import contraction_of
from equivalence_tests.checker.engine.ran import recorded
from equivalence_tests.checker.engine.watching import Operation, Recorder
from equivalence_tests.checker.equivalent.writer import Text
from equivalence_tests.checker.parts.functions import BIAS
from equivalence_tests.checker.parts.readings import PartReading, Row

Map = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Map] = {
    "ReLU": F.relu,
    "GELU": F.gelu,
    "tanh-GELU": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid-GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": F.silu,
    "LeakyReLU": F.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "ELU": F.elu,
    "squared ReLU": lambda x: F.relu(x).square(),
    "Mish": F.mish,
    "nothing": lambda x: x,
}
# What is wrong with an activation, wherever it stands; with the others, that they are neither of torch's two.
MISTAKES: dict[str, tuple[str, ...]] = {
    "ReLU": (),
    "GELU": (),
    "nothing": ("activation_missing",),
    "tanh-GELU": ("gelu_approximated",),
    "sigmoid-GELU": ("gelu_approximated",),
}
GATES: dict[str, Map] = {
    "SwiGLU": F.silu,
    "GEGLU": F.gelu,
    "GEGLU with tanh-GELU": ACTIVATIONS["tanh-GELU"],
    "ReGLU": F.relu,
    "GLU": torch.sigmoid,
    "a gate without activation": ACTIVATIONS["nothing"],
}
# How a gate meets what it gates, and what is wrong with that.
GATED: tuple[tuple[tuple[str, ...], Callable[[Map, Any, Any], Any]], ...] = (
    ((), lambda f, gate, up: f(gate) * up),
    (("activation_of_gated_product",), lambda f, gate, up: f(gate * up)),
    (("gate_added",), lambda f, gate, up: f(gate) + up),
    (("activation_of_gate_and_gated",), lambda f, gate, up: f(gate) * f(up)),
)
GIVEN = "arg:x"
PLAIN = "linear2(activation(linear1(x)))"
PLACES: dict[str, tuple[tuple[str, ...], Callable[[Map, Map, Map, Any], Any]]] = {
    PLAIN: ((), lambda f, one, two, x: two(f(one(x)))),
    "linear2(linear1(activation(x)))": (("activation_misplaced",), lambda f, one, two, x: two(one(f(x)))),
    "activation(linear2(linear1(x)))": (("activation_misplaced",), lambda f, one, two, x: f(two(one(x)))),
    "activation(linear2(activation(linear1(x))))": (
        ("activation_misplaced",),
        lambda f, one, two, x: f(two(f(one(x)))),
    ),
}
Wrap = Callable[[Map, Map, Tensor], Tensor]
# What stands around the linears, and what is wrong with that.
WRAPS: dict[str, tuple[Wrap, tuple[str, ...]]] = {
    "the two linears": (lambda f, n, x: f(x), ()),
    "+ residual": (lambda f, n, x: x + f(x), ()),
    "+ residual, then LayerNorm": (lambda f, n, x: n(x + f(x)), ()),
    "+ LayerNorm on the input": (lambda f, n, x: f(n(x)), ()),
    "+ LayerNorm on the input, + residual": (lambda f, n, x: x + f(n(x)), ()),
    "+ LayerNorm on the input, half of it + residual (Conformer)": (lambda f, n, x: x + 0.5 * f(n(x)), ()),
    "+ LayerNorm on the output, no residual": (lambda f, n, x: n(f(x)), ("residual_missing",)),
    "+ LayerNorm on the input, + residual of the normalised": (
        lambda f, n, x: n(x) + f(n(x)),
        ("residual_from_normalised",),
    ),
    "+ residual twice, then LayerNorm": (lambda f, n, x: n(x + x + f(x)), ("residual_added_twice",)),
    "+ residual, then a norm made in forward": (
        lambda f, n, x: F.layer_norm(x + f(x), x.shape[-1:]),
        ("norm_fresh_in_forward",),
    ),
    "+ LayerNorm on the output, then residual": (lambda f, n, x: x + n(f(x)), ("residual_after_norm",)),
}


@dataclass(frozen=True)
class Projection:
    """x -> x weightᵀ + bias, in float64 whatever the module computes in, with torch's name for it as its role.

    Args:
        weight: (out, in).
        bias: (out,); None if none is added.
        end: The operation that gives the result.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    end: Operation
    role: str = ""

    def __call__(self, x: Any) -> Any:
        """Apply it, or write it down."""
        if isinstance(x, Text):
            return x.writer.projected(x, self.role, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    @property
    def halves(self) -> list["Projection"]:
        """Two that are packed in one."""
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        return [replace(self, weight=w, bias=b) for w, b in zip(self.weight.chunk(2), biases, strict=True)]


def feed_forward_readings(module: nn.Module, given: Tensor) -> Iterator[PartReading]:
    """Read a feed-forward in every way in which its matrices can be used in the order of a run.

    Two linears with anything between, and gated ones, stand alone or with residual and LayerNorm.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    recorder = recorded(lambda: module(given), [*parameters.items(), (GIVEN, given)])
    touched = {n for operation in recorder.operations for bits in operation.origins for n in recorder.named(bits)}
    idle = {name: p.detach().double() for name, p in parameters.items() if name not in touched}
    norms = ((path, m) for path, m in module.named_modules() if m is not module and _is_norm(m))
    norm = next((_Inner(path, m) for path, m in norms), None)
    wraps = [(words, *wrap) for words, wrap in WRAPS.items() if norm is not None or "LayerNorm" not in words]
    for body, (words, wrap, mistakes) in itertools.product(_bodies(_applied(recorder), idle), wraps):
        if not (body.notes and mistakes):  # of what stands around a gated one only what is right is reported
            reading = replace(body, formula=functools.partial(wrap, body.formula, norm or nn.Identity()))
            yield reading.beside((("includes", words, PLAIN),), mistakes)


@dataclass(frozen=True)
class _Inner:
    """A sub-module that is called as it is."""

    path: str
    module: nn.Module

    def __call__(self, x: Any) -> Any:
        return x.writer.called(x, self.path) if isinstance(x, Text) else self.module(x)


def _is_norm(module: nn.Module) -> bool:
    """A PreNorm that holds the linears as well is a wrapper, whatever its name says."""
    named = "norm" in type(module).__name__.lower()
    return named and not any(isinstance(child, nn.Linear | nn.Conv1d) for child in module.modules())


def _applied(recorder: Recorder) -> list[Projection]:
    """List the matrices that are applied to what was made of the input, each with the bias that is added next."""
    found: list[Projection] = []
    for operation in recorder.operations:
        sides = [(s, recorder.named(bits)) for s, bits in zip(operation.inputs, operation.origins, strict=True)]
        data = [slot for slot, names in sides if GIVEN in names]
        own = [(slot.value.double(), names[0]) for slot, names in sides if names and GIVEN not in names]
        product = contraction_of(operation) if data and own else None
        if product is not None:
            (weight, name), *bias = own
            sided = product.swapped() if data[0] is operation.inputs[1] else product
            found.append(
                Projection(
                    name.removesuffix(".weight"), sided.columns(weight)[0], bias[0][0] if bias else None, operation
                )
            )
        elif data and own and operation.name == "add":
            ended = [p.end.outputs[0].key == data[0].key and own[0][0].numel() == len(p.weight) for p in found]
            found = [
                replace(p, bias=own[0][0].flatten(), end=operation) if e else p
                for p, e in zip(found, ended, strict=True)
            ]
    return found


def _bodies(applied: list[Projection], idle: dict[str, Tensor]) -> Iterator[PartReading]:
    """Put what there is between the matrices, as many as are applied."""
    if not applied:
        return
    last = replace(applied[-1], role="linear2")
    first = list({p.name: p for p in applied[:-1]}.values())  # an activation by hand may apply one twice
    pieces = first[0].halves if len(first) == 1 and len(first[0].weight) == 2 * last.weight.size(1) else first
    if len(pieces) == 2:
        for order, (gate, up) in zip(("gate; up", "up; gate"), itertools.permutations(pieces), strict=True):
            names = f"{gate.name} (gate), {up.name}" if len(first) == 2 else f"{gate.name}: rows are [{order}]"
            yield from _gated(gate, up, last, f"{names}, {last.name}")
    elif len(first) == 1:
        yield from _plain(replace(first[0], role="linear1"), last, idle)
        for unused in (name for name, p in idle.items() if p.shape == first[0].weight.shape):
            for gated in _gated(first[0], first[0], last, f"{first[0].name} (gate and values), {last.name}"):
                yield replace(gated, mistakes=(*gated.mistakes, "gate_gates_itself"), facts={"parameter": unused})
    elif not first:
        for unused in (name.removesuffix(".weight") for name, p in idle.items() if p.dim() > 1):
            for name, activation in ACTIVATIONS.items():
                mistakes = ("ff_second_linear_missing", *MISTAKES.get(name, ("activation_exchanged",)))
                words = _rows(name, f"{last.name}, {unused}")
                yield PartReading(
                    functools.partial(_then, last, activation), words, mistakes, facts={"activation": name}
                )


def _then(one: Map, two: Map, x: Any) -> Any:
    return two(one(x))


def _plain(first: Projection, second: Projection, idle: dict[str, Tensor]) -> Iterator[PartReading]:
    """The activation between the linears, before both, after both, and in two places."""
    biases = (
        _with_idle_bias(first, idle, "ff_first_bias_unused"),
        _with_idle_bias(second, idle, "ff_second_bias_unused"),
    )
    every = itertools.product(ACTIVATIONS.items(), *biases, PLACES.items())
    for (name, f), (one, lost), (two, lost_too), (place, (misplaced, form)) in every:
        if name != "nothing" or place == PLAIN:
            mistakes = (*misplaced, *MISTAKES.get(name, ("activation_exchanged",)), *lost, *lost_too)
            words = _rows(name, f"{first.name}, {second.name}")
            formula = functools.partial(form, f, one, two)
            yield PartReading(formula, words, mistakes, facts={"formula": place, "activation": name})


def _with_idle_bias(p: Projection, idle: dict[str, Tensor], mistake: str) -> list[tuple[Projection, tuple[str, ...]]]:
    """A matrix as it is applied; where a bias stands beside it and is not added, with that too."""
    owners = p.name, p.name.rpartition(".")[0]
    beside = [
        bias
        for name, bias in idle.items()
        if name.rpartition(".")[0] in owners
        and bias.shape == p.weight.shape[:1]
        and BIAS.search(name.rpartition(".")[2].lower())
    ]
    if p.bias is not None or not beside:
        return [(p, ())]
    return [(replace(p, bias=beside[0]), ()), (p, (mistake,))]


def _rows(activation: str, linears: str) -> tuple[Row, ...]:
    return ("activation", activation, "ReLU, GELU or any function"), ("linears", linears, "linear1, linear2")


def _gated(gate: Projection, up: Projection, down: Projection, linears: str) -> Iterator[PartReading]:
    """down(activation(gate(x)) * up(x))."""
    gate, up, down = (replace(p, role=role) for p, role in ((gate, "gate"), (up, "up"), (down, "down")))
    note = "torch.nn has no gated feed-forward: it equals down(activation(gate(x)) * up(x)), written with F.linear"
    for (name, f), (mistakes, form) in itertools.product(GATES.items(), GATED):
        rows = ("gated", f"{name}: down(activation(gate(x)) * up(x))", "none"), ("linears", linears, "linear1, linear2")
        bare = name == "a gate without activation"
        if not (bare and mistakes):
            wrong = ("gate_without_activation",) if bare else mistakes
            yield PartReading(functools.partial(_by_gate, form, f, gate, up, down), rows, wrong, (note,))


def _by_gate(form: Callable[..., Any], f: Map, gate: Map, up: Map, down: Map, x: Any) -> Any:
    return down(form(f, gate(x), up(x)))
