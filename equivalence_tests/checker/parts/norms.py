"""Every LayerNorm and RMSNorm: how deviations are squared, where eps stands, which axes, which gain and bias."""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from equivalence_tests.checker.equivalent.writer import Text, Writer
from equivalence_tests.checker.parts.functions import BIAS, FunctionModule
from equivalence_tests.checker.parts.names import words_of
from equivalence_tests.checker.parts.readings import PartReading, is_right

SMALLEST = torch.finfo(torch.float64).eps  # what nn.RMSNorm adds by default


def _inside(eps: float, variance: Any) -> Any:
    return (variance + eps).sqrt()


def _outside(eps: float, variance: Any) -> Any:
    return variance.sqrt() + eps


def _variance(x: Any, axes: tuple[int, ...]) -> Any:
    return x.var(axes, correction=0, keepdim=True)


def _unbiased_variance(x: Any, axes: tuple[int, ...]) -> Any:
    return x.var(axes, keepdim=True)


def _mean_square(x: Any, axes: tuple[int, ...]) -> Any:
    return x.square().mean(axes, keepdim=True)


def _sum_of_squares(x: Any, axes: tuple[int, ...]) -> Any:
    return x.square().sum(axes, keepdim=True)


def _sum_of_deviations(x: Any, axes: tuple[int, ...]) -> Any:
    return _sum_of_squares(x - x.mean(axes, keepdim=True), axes)


@dataclass(frozen=True)
class Norm:
    """A norm: gain * (x - mean) / divisor + bias."""

    width: int
    gain: str = ""  # the parameter that it is multiplied by; "" for none
    bias: str = ""  # the parameter that is added; "" for none
    plus_one: bool = False  # whether 1 is added to the gain
    centred: bool = True  # whether the mean is taken off
    eps: float = 0.0
    divisor: Callable[[float, Any], Any] = _inside  # makes of eps and the spread what is divided by
    axes: tuple[int, ...] = (-1,)
    spread: Callable[[Any, tuple[int, ...]], Any] = _variance  # of x over the axes
    is_torchs: bool = True  # whether torch has a norm that is the same

    def of(self, weight: Callable[[str], Any], x: Any) -> Any:
        """Compute it, or write it down, with what gives its parameters by their names."""
        gain, bias = weight(self.gain) if self.gain else 1, weight(self.bias) if self.bias else 0
        gain = 1 + gain if self.plus_one else gain
        centre = x - x.mean(self.axes, keepdim=True) if self.centred else x
        normal = centre / self.divisor(self.eps, self.spread(x, self.axes))
        return gain * normal + bias

    def written(self, writer: Writer, x: Text) -> Text:
        """Write it down: one of torch's norms where it has it, and else the formula."""
        gain, bias = (writer.parameters.named[name] if name else None for name in (self.gain, self.bias))
        if not self.is_torchs:
            found: Text = self.of(writer.parameter, x)
            return found
        vectors = all(one is None or one.numel() > 1 for one in (gain, bias))
        if vectors and (self.centred or bias is None) and not writer.is_function:
            return self._as_a_module(writer, x)
        own = [writer.parameter(one) for one in (self.gain, self.bias) if one]
        call = f"F.{'layer_norm' if self.centred else 'rms_norm'}({x}, {x}.shape[-1:]"
        said = "" if self.eps == SMALLEST else f", eps={writer.number(self.eps)}"
        if vectors and not self.plus_one and len(own) <= 1 + self.centred:
            return Text(", ".join([call, *map(str, own)]) + f"{said})", writer)
        factor, *added = own or [Text("1", writer)]
        found = (1 + factor if self.plus_one else factor) * Text(f"{call}{said})", writer)
        return found + added[0] if added else found

    def _as_a_module(self, writer: Writer, x: Text) -> Text:
        options = [str(self.width), *([f"eps={self.eps!r}"] if self.eps != SMALLEST else [])]
        options += ["elementwise_affine=False"] if not self.gain else []
        options += ["bias=False"] if self.centred and self.gain and not self.bias else []
        writer.torchs = f"nn.{'LayerNorm' if self.centred else 'RMSNorm'}({', '.join(options)})"
        if self.gain:
            writer.vector("weight", self.gain, self.plus_one)
        if self.bias:
            writer.vector("bias", self.bias)
        return Text(f"super().forward({x})", writer)


AXES = {
    "the last": (-1,),
    "the last two": (-2, -1),
    "the tokens": (-2,),
    "the batch": (0,),
    "all": (-3, -2, -1),
}
# Whether the mean is taken off, how the spread is measured, and what is wrong with that.
SPREADS: tuple[tuple[bool, Callable[[Any, tuple[int, ...]], Any], tuple[str, ...]], ...] = (
    (True, _variance, ()),
    (True, _unbiased_variance, ("norm_unbiased_std",)),
    (True, _sum_of_deviations, ("norm_sum_for_mean",)),
    (False, _mean_square, ()),
    (False, _sum_of_squares, ("norm_sum_for_mean",)),
)
GAIN_NAME = re.compile(r"gamma|gain|weight|scale|alpha|^[ag](_?\d)?$")


PLACES: dict[str, tuple[Callable[[float, Any], Any], tuple[str, ...]]] = {
    "inside the root": (_inside, ()),
    "outside the root": (_outside, ("norm_eps_outside",)),
    "added to the variance, of which no root is taken": (lambda eps, variance: variance + eps, ("norm_without_root",)),
}
EPS = (0.0, 1e-5, 1e-6, 1e-12, 1e-8, 1e-3)
SHORTEST = 1e-12  # what F.normalize takes for the length of what is shorter


def is_rms_norm(module: nn.Module) -> bool:
    """Whether its name says that it leaves the mean alone on purpose."""
    function = module.function if isinstance(module, FunctionModule) else module
    name = words_of(getattr(function, "__name__", type(function).__name__))
    return re.search(r"(^|_)rms|rms_?norm|root_?mean", name) is not None


def norm_readings(module: nn.Module, width: int, right: bool = False) -> Iterator[PartReading]:
    """Read a norm in every way, or in every right one; which of LayerNorm and RMSNorm is right, its name says."""
    yield from _scale_norms(module)
    rms = is_rms_norm(module)
    stated = [v for name, v in vars(module).items() if "eps" in name.lower() and isinstance(v, float)]
    likely = dict.fromkeys([*stated, *([SMALLEST] if rms else []), *EPS])
    weights = {name: p.detach() for name, p in module.named_parameters()}
    options = itertools.product(_affines(module, width), likely, PLACES.items(), AXES.items(), SPREADS)
    for (affine, said, mixed), eps, (place, (divisor, misplaced)), (axes_words, axes), measured in options:
        centred, spread, of_spread = measured
        mistakes = (
            *mixed,
            *(() if eps else ("norm_without_eps",)),
            *misplaced,
            *of_spread,
            *(() if axes == (-1,) else ("norm_wrong_axes",)),
            *(() if centred != rms else ("norm_subtracts_mean",) if rms else ("norm_without_mean",)),
        )
        if right and not is_right(mistakes):
            continue
        words = (
            *((("compared with", "nn.RMSNorm", ""),) if rms else ()),
            ("eps", f"{eps:g}, {place}", "inside the root" if rms else "1e-05 by default, inside the root"),
            ("axes", axes_words, "the last"),
            ("gain and bias", said, "weight" if rms else "weight and bias"),
        )
        plain = misplaced == of_spread == () and axes == (-1,)
        norm = replace(affine, eps=eps, divisor=divisor, axes=axes, centred=centred, spread=spread, is_torchs=plain)
        yield PartReading(partial(norm.of, weights.__getitem__), words, mistakes, written=norm.written)


def _scale_norms(module: nn.Module) -> Iterator[PartReading]:
    """G x / |x|, with one number g: what is no LayerNorm is no wrong one."""
    note = "torch.nn has no ScaleNorm: it equals g * F.normalize(x, dim=-1)"
    gains = {name: p.detach() for name, p in module.named_parameters() if p.numel() == 1}
    for gain, eps in itertools.product(gains, (SHORTEST, *EPS)):
        words = (("compared with", "g * F.normalize(x): ScaleNorm", ""), ("gain", gain, ""))
        norm = Norm(1, gain, centred=False, eps=eps, divisor=_outside, spread=_sum_of_squares, is_torchs=False)
        written = partial(_scaled, gain) if eps == SHORTEST else norm.written
        yield PartReading(partial(norm.of, gains.__getitem__), words, notes=(note,), written=written)


def _scaled(name: str, writer: Writer, x: Text) -> Text:
    return writer.parameter(name) * Text(f"F.normalize({x}, dim=-1)", writer)


def _affines(module: nn.Module, width: int) -> Iterator[tuple[Norm, str, tuple[str, ...]]]:
    """Give each parameter the part of the gain, of 1 + the gain, and of the bias; with words, and what is wrong."""
    vectors = [name for name, p in module.named_parameters() if p.numel() in (1, width)]
    for gain, bias in itertools.permutations(vectors, 2):
        exchanged = BIAS.search(gain.lower()) and GAIN_NAME.search(bias.lower())
        wrong = ("norm_gain_and_bias_exchanged",) if exchanged else ()
        norm, words = Norm(width, gain, bias), f"{gain} and {bias}"
        yield norm, words, wrong
        yield replace(norm, plus_one=True), f"1 + {words}", wrong
    bias_lost = ("norm_bias_unused",) if len(vectors) > 1 else ()
    for gain in vectors:
        yield Norm(width, gain), gain, bias_lost
        yield Norm(width, gain, plus_one=True), f"1 + {gain}", bias_lost
    yield Norm(width), "none", ("norm_gain_unused",) if vectors else ()
