"""Every feed-forward: the activation, where it stands, biases and matrices left out, gates, residual and LayerNorm."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.parts.matrices import Leaf, Projection, leaves_of
from equivalence_tests.checker.parts.readings import PartReading

__all__ = ["ACTIVATIONS", "feed_forward_readings"]

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
PLAIN = ("ReLU", "GELU", "nothing")
APPROXIMATE = ("tanh-GELU", "sigmoid-GELU")
GATES: dict[str, Map] = {
    "SwiGLU": F.silu,
    "GEGLU": F.gelu,
    "GEGLU with tanh-GELU": ACTIVATIONS["tanh-GELU"],
    "ReGLU": F.relu,
    "GLU": torch.sigmoid,
}
Wrap = Callable[[Tensor, Map, Map], Tensor]
# What stands around the linears, and what is wrong with that.
WRAPS: dict[str, tuple[Wrap, tuple[str, ...]]] = {
    "the two linears": (lambda x, f, n: f(x), ()),
    "+ residual": (lambda x, f, n: x + f(x), ()),
    "+ residual, then LayerNorm": (lambda x, f, n: n(x + f(x)), ()),
    "+ LayerNorm on the input": (lambda x, f, n: f(n(x)), ()),
    "+ LayerNorm on the input, + residual": (lambda x, f, n: x + f(n(x)), ()),
    "+ LayerNorm on the input, half of it + residual (Conformer)": (lambda x, f, n: x + 0.5 * f(n(x)), ()),
    "+ LayerNorm on the output, no residual": (lambda x, f, n: n(f(x)), ("residual_missing",)),
    "+ LayerNorm on the input, + residual of the normalised": (
        lambda x, f, n: n(x) + f(n(x)),
        ("residual_from_normalised",),
    ),
    "+ residual twice, then LayerNorm": (lambda x, f, n: n(x + x + f(x)), ("residual_added_twice",)),
    "+ residual, then a norm made in forward": (
        lambda x, f, n: F.layer_norm(x + f(x), x.shape[-1:]),
        ("norm_fresh_in_forward",),
    ),
    "+ LayerNorm on the output, then residual": (lambda x, f, n: x + n(f(x)), ("residual_after_norm",)),
}


@dataclass(frozen=True)
class Body:
    """What stands between residual and LayerNorm."""

    formula: Map
    words: tuple[tuple[str, str, str], ...]
    mistakes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def feed_forward_readings(module: nn.Module, width: int) -> Iterator[PartReading]:
    """Read a feed-forward in every way.

    Args:
        module: The feed-forward, with random parameters.
        width: Width of its input.

    Yields:
        Two linears with anything between, and gated ones, alone or with residual and LayerNorm.
    """
    leaves = [either for leaf in leaves_of(module) for either in _both_ways(leaf)]
    norm = next((m for m in module.modules() if m is not module and _is_norm(m)), None)
    wraps = [(words, *wrap) for words, wrap in WRAPS.items() if norm is not None or "LayerNorm" not in words]
    two_of_them = [pair for pair in itertools.permutations(leaves, 2) if pair[0].weight != pair[1].weight]
    pairs = [body for one, two in two_of_them for body in _bodies(module, one, two, width)]
    gated = list(_gated_bodies(module, leaves, width))
    right = [wrap for wrap in wraps if not wrap[-1]]
    for body, (words, wrap, mistakes) in [*itertools.product(pairs, wraps), *itertools.product(gated, right)]:
        rows = (*body.words, ("includes", words, "linear2(activation(linear1(x)))"))
        formula = _bind(wrap, body.formula, norm or nn.Identity())
        yield PartReading(formula, rows, (*body.mistakes, *mistakes), body.notes)


def _is_norm(module: nn.Module) -> bool:
    """A PreNorm that holds the linears as well is a wrapper, whatever its name says."""
    named = "norm" in type(module).__name__.lower()
    return named and not any(isinstance(child, nn.Linear | nn.Conv1d) for child in module.modules())


def _both_ways(leaf: Leaf) -> list[Leaf]:
    """A matrix that is no layer's may be stored (in, out) or (out, in): both are tried."""
    return [leaf, replace(leaf, transposed=not leaf.transposed)] if leaf.name == leaf.weight else [leaf]


def _bind(wrap: Wrap, body: Map, norm: Map) -> Map:
    return lambda x: wrap(x, body, norm)


def _bodies(module: nn.Module, first: Leaf, second: Leaf, width: int) -> Iterator[Body]:
    one, two = first.read(module), second.read(module)
    if _out_in(one)[1] != width or (_out_in(two) != _out_in(one)[::-1] and _out_in(one)[0] != width):
        return
    for name, activation in ACTIVATIONS.items():
        rows = (
            ("activation", name, "ReLU, GELU or any function"),
            ("linears", f"{first.name}, {second.name}", "linear1, linear2"),
        )
        known = _mistakes_of(name)
        for bias1, bias2 in itertools.product((True, False), repeat=2):
            if (not bias1 and one.bias is None) or (not bias2 and two.bias is None):
                continue
            lost = (("ff_first_bias_unused",) if not bias1 else ()) + (("ff_second_bias_unused",) if not bias2 else ())
            middle, after, both, before = _placed(
                partial(one, with_bias=bias1), partial(two, with_bias=bias2), activation
            )
            yield Body(middle, rows, (*known, *lost))
            if name != "nothing":
                yield Body(before, rows, ("activation_before_first_linear", *known, *lost))
                yield Body(after, rows, ("activation_after_second_linear", *known, *lost))
                yield Body(both, rows, ("activation_also_after_second_linear", *known, *lost))
        yield Body(_then(one, activation), rows, ("ff_second_linear_missing", *known))


def _mistakes_of(activation: str) -> tuple[str, ...]:
    """What is wrong with an activation, wherever it stands."""
    if activation == "nothing":
        return ("activation_missing",)
    if activation in APPROXIMATE:
        return ("gelu_approximated",)
    return () if activation in PLAIN else ("activation_exchanged",)


def _placed(one: Map, two: Map, activation: Map) -> tuple[Map, Map, Map, Map]:
    """Put the activation between the linears, after both, in both places, and before both."""
    middle, linear = _then(_then(one, activation), two), _then(one, two)
    return middle, _then(linear, activation), _then(middle, activation), _then(activation, linear)


def _then(f: Map, g: Map) -> Map:
    return lambda x: g(f(x))


def _out_in(linear: Projection) -> tuple[int, int]:
    return linear.weight.size(0), linear.weight.size(1)


def _gated_bodies(module: nn.Module, leaves: list[Leaf], width: int) -> Iterator[Body]:
    """down(activation(gate(x)) * up(x)): three linears, or two where gate and up are packed in one."""
    read = [(leaf.name, leaf.read(module)) for leaf in leaves]
    for (gate, g), (up, u), (down, d) in itertools.permutations(read, 3):
        if len({gate, up, down}) == 3 and _out_in(g) == _out_in(u) == _out_in(d)[::-1] and _out_in(g)[1] == width:
            yield from _gated(g, u, d, f"{gate} (gate), {up}, {down}")
    for (packed, p), (down, d) in itertools.permutations(read, 2):
        if packed != down and _out_in(p) == (2 * _out_in(d)[1], width) and _out_in(d)[0] == width:
            one, other = _halves(p)
            yield from _gated(one, other, d, f"{packed}: rows are [gate; up], {down}")
            yield from _gated(other, one, d, f"{packed}: rows are [up; gate], {down}")


def _halves(packed: Projection) -> tuple[Projection, Projection]:
    weights = packed.weight.chunk(2)
    biases = (None, None) if packed.bias is None else packed.bias.chunk(2)
    return Projection(weights[0], biases[0]), Projection(weights[1], biases[1])


def _gated(gate: Projection, up: Projection, down: Projection, linears: str) -> Iterator[Body]:
    note = "torch.nn has no gated feed-forward: it equals down(activation(gate(x)) * up(x)), written with F.linear"
    for name, activation in (*GATES.items(), ("a gate without activation", ACTIVATIONS["nothing"])):
        rows = (
            ("gated", f"{name}: down(activation(gate(x)) * up(x))", "none"),
            ("linears", linears, "linear1, linear2"),
        )
        mistakes = () if name in GATES else ("gate_without_activation",)
        yield Body(_gate_formula(gate, up, down, activation), rows, mistakes, (note,))
        if name in GATES:
            yield Body(_product_formula(gate, up, down, activation), rows, ("activation_of_gated_product",), (note,))


def _gate_formula(gate: Projection, up: Projection, down: Projection, activation: Map) -> Map:
    return lambda x: down(activation(gate(x)) * up(x))


def _product_formula(gate: Projection, up: Projection, down: Projection, activation: Map) -> Map:
    return lambda x: down(activation(gate(x) * up(x)))
