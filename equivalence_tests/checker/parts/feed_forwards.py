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
from equivalence_tests.checker.parts.readings import PartReading

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
GIVEN = "arg:x"
TORCHS_NAMES = "linear1, linear2"
PLAIN, MISPLACED = "linear2(activation(linear1(x)))", ("activation_misplaced",)
PLACES: dict[str, tuple[tuple[str, ...], Callable[[Map, Map, Map, Any], Any]]] = {
    PLAIN: ((), lambda f, one, two, x: two(f(one(x)))),
    "linear2(linear1(activation(x)))": (MISPLACED, lambda f, one, two, x: two(one(f(x)))),
    "activation(linear2(linear1(x)))": (MISPLACED, lambda f, one, two, x: f(two(one(x)))),
    "activation(linear2(activation(linear1(x))))": (MISPLACED, lambda f, one, two, x: f(two(f(one(x))))),
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
    """x -> x weightᵀ + bias, in float64 whatever the module computes in, with torch's name for it as its role."""

    name: str
    weight: Tensor  # (out, in)
    bias: Tensor | None  # (out,); None if none is added
    end: Operation  # the operation that gives the result
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
    norm = next((functools.partial(_as_it_is, path, m) for path, m in norms), None)
    wraps = [(words, *wrap) for words, wrap in WRAPS.items() if norm is not None or "LayerNorm" not in words]
    for body, (words, wrap, mistakes) in itertools.product(_bodies(_applied(recorder), idle), wraps):
        if not (body.notes and mistakes):  # of what stands around a gated one only what is right is reported
            reading = replace(body, formula=functools.partial(wrap, body.formula, norm or nn.Identity()))
            yield reading.beside((("includes", words, PLAIN),), mistakes)


def _as_it_is(path: str, module: nn.Module, x: Any) -> Any:
    """Call a sub-module, or write that down."""
    return x.writer.called(x, path) if isinstance(x, Text) else module(x)


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
            (weight, name), *biases = own
            sided = product.swapped() if data[0] is operation.inputs[1] else product
            bias = biases[0][0] if biases else None
            found.append(Projection(name.removesuffix(".weight"), sided.columns(weight)[0], bias, operation))
        elif data and own and operation.name == "add":
            added = own[0][0].flatten()
            for place, p in enumerate(found):
                if p.end.outputs[0].key == data[0].key and len(added) == len(p.weight):
                    found[place] = replace(p, bias=added, end=operation)
    return found


def _bodies(applied: list[Projection], idle: dict[str, Tensor]) -> Iterator[PartReading]:
    """Put what there is between the matrices, as many as are applied."""
    if len(applied) < 2:
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


def _plain(first: Projection, second: Projection, idle: dict[str, Tensor]) -> Iterator[PartReading]:
    """The activation between the linears, before both, after both, and in two places."""
    ones, twos = (_with_idle_bias(p, idle, f"ff_{n}_bias_unused") for p, n in ((first, "first"), (second, "second")))
    every = itertools.product(ACTIVATIONS.items(), ones, twos, PLACES.items())
    for (name, f), (one, lost), (two, lost_too), (place, (misplaced, form)) in every:
        if name != "nothing" or place == PLAIN:
            mistakes = (*misplaced, *MISTAKES.get(name, ("activation_exchanged",)), *lost, *lost_too)
            linears = ("linears", f"{first.name}, {second.name}", TORCHS_NAMES)
            words = ("activation", name, "ReLU, GELU or any function"), linears
            formula = functools.partial(form, f, one, two)
            yield PartReading(formula, words, mistakes, facts={"formula": place, "activation": name})


def _with_idle_bias(p: Projection, idle: dict[str, Tensor], mistake: str) -> list[tuple[Projection, tuple[str, ...]]]:
    """A matrix as it is applied; where a bias stands beside it and is not added, with that too."""
    owners = p.name, p.name.rpartition(".")[0]
    named = ((*name.rpartition("."), bias) for name, bias in idle.items() if bias.shape == p.weight.shape[:1])
    beside = [bias for owner, _, last, bias in named if owner in owners and BIAS.search(last.lower())]
    if p.bias is not None or not beside:
        return [(p, ())]
    return [(replace(p, bias=beside[0]), ()), (p, (mistake,))]


def _gated(gate: Projection, up: Projection, down: Projection, linears: str) -> Iterator[PartReading]:
    """down(activation(gate(x)) * up(x))."""
    gate, up, down = (replace(p, role=role) for p, role in ((gate, "gate"), (up, "up"), (down, "down")))
    note = "torch.nn has no gated feed-forward: it equals down(activation(gate(x)) * up(x)), written with F.linear"
    for name, f in GATES.items():
        rows = ("gated", f"{name}: down(activation(gate(x)) * up(x))", "none"), ("linears", linears, TORCHS_NAMES)
        wrong = ("gate_without_activation",) if name == "a gate without activation" else ()
        yield PartReading(functools.partial(_by_gate, f, gate, up, down), rows, wrong, (note,))


def _by_gate(f: Map, gate: Map, up: Map, down: Map, x: Any) -> Any:
    return down(f(gate(x)) * up(x))
