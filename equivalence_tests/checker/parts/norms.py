"""Every LayerNorm and RMSNorm: how deviations are squared, where eps stands, which axes, which gain and bias."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.equivalent.part_writing import Normalising, PartWriter, Text
from equivalence_tests.checker.parts.functions import BIAS, FunctionModule
from equivalence_tests.checker.parts.readings import PartReading

AXES = {
    "the last": (-1,),
    "the last two": (-2, -1),
    "the tokens": (-2,),
    "the batch": (0,),
    "all": (-3, -2, -1),
}
# Whether the mean is taken off, by what the sum of squares is divided, and what is wrong with that.
SPREADS: tuple[tuple[bool, Callable[[int], int], tuple[str, ...]], ...] = (
    (True, lambda n: n, ()),
    (True, lambda n: n - 1, ("norm_unbiased_std",)),
    (True, lambda n: 1, ("norm_sum_for_mean",)),
    (False, lambda n: n, ()),
    (False, lambda n: 1, ("norm_sum_for_mean",)),
)
GAIN_NAME = re.compile(r"gamma|gain|weight|scale|alpha|^[ag](_?\d)?$")


def _outside(eps: float, variance: Tensor) -> Tensor:
    return variance.sqrt() + eps


PLACES: dict[str, tuple[Callable[[float, Tensor], Tensor], tuple[str, ...]]] = {
    "inside the root": (lambda eps, variance: (variance + eps).sqrt(), ()),
    "outside the root": (_outside, ("norm_eps_outside",)),
    "added to the variance, of which no root is taken": (lambda eps, variance: variance + eps, ("norm_without_root",)),
}
EPS = (0.0, 1e-5, 1e-6, 1e-12, 1e-8, 1e-3)
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Affine:
    """What is made of a normalised vector.

    Args:
        gain: What it is multiplied by.
        bias: What is added.
        words: What they are called.
        mistakes: What is wrong with them.
        names: The parameter that is the gain, and the one that is the bias; "" for none.
        plus_one: Whether 1 is added to the gain.
        inside: Whether the bias is multiplied by the gain too.
    """

    gain: Any
    bias: Any
    words: str
    mistakes: tuple[str, ...] = ()
    names: tuple[str, str] = ("", "")
    plus_one: bool = False
    inside: bool = False

    def written(self, writer: PartWriter) -> tuple[Any, Any]:
        """Give gain and bias as text."""
        gain, bias = (writer.parameter(name) if name else None for name in self.names)
        if gain is None:
            return 1, 0
        gain = 1 + gain if self.plus_one else gain
        return gain, 0 if bias is None else gain * bias if self.inside else bias


SHORTEST = 1e-12  # what F.normalize takes for the length of what is shorter
SMALLEST = torch.finfo(torch.float64).eps  # what nn.RMSNorm adds unless told otherwise


def is_rms_norm(module: nn.Module) -> bool:
    """Whether its name says that it leaves the mean alone on purpose.

    >>> is_rms_norm(nn.RMSNorm(3)), is_rms_norm(nn.LayerNorm(3))
    (True, False)
    """
    name = (module.function if isinstance(module, FunctionModule) else type(module)).__name__
    return re.search(r"(^|_)rms|rms_?norm|root_?mean", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) is not None


def norm_readings(module: nn.Module, width: int) -> Iterator[PartReading]:
    """Read a norm in every way.

    Yields:
        LayerNorms and RMSNorms, right and with mistakes; which of the two is right, its class's name says.
    """
    yield from _scale_norms(module)
    rms = is_rms_norm(module)
    stated = [v for name, v in vars(module).items() if "eps" in name.lower() and isinstance(v, float)]
    likely = dict.fromkeys([*stated, *([SMALLEST] if rms else []), *EPS])
    options = itertools.product(_affines(module, width), likely, PLACES.items(), AXES.items(), SPREADS)
    for affine, eps, (place, (divisor, misplaced)), (axes_words, axes), (centred, divided, of_spread) in options:
        mistakes = (
            *affine.mistakes,
            *(() if eps else ("norm_without_eps",)),
            *misplaced,
            *of_spread,
            *(() if axes == (-1,) else ("norm_wrong_axes",)),
            *(() if centred != rms else ("norm_subtracts_mean",) if rms else ("norm_without_mean",)),
        )
        words = (
            *((("compared with", "nn.RMSNorm", ""),) if rms else ()),
            ("eps", f"{eps:g}, {place}", "inside the root" if rms else "1e-05 by default, inside the root"),
            ("axes", axes_words, "the last"),
            ("gain and bias", affine.words, "weight" if rms else "weight and bias"),
        )
        form = _Form(partial(divisor, eps), axes, centred, divided)
        plain = misplaced == of_spread == () and axes == (-1,) and not affine.inside
        added = None if eps == SMALLEST else eps
        gain, bias = affine.names
        norm = Normalising(width, centred, added, gain, bias, affine.plus_one) if plain else None
        yield PartReading(
            partial(_normed, form, affine.gain, affine.bias),
            words,
            mistakes,
            written=partial(_written, form, affine, norm),
        )


def _scale_norms(module: nn.Module) -> Iterator[PartReading]:
    """G x / |x|, with one number g: what is no LayerNorm is no wrong one."""
    note = "torch.nn has no ScaleNorm: it equals g * F.normalize(x, dim=-1)"
    gains = [(name, p.detach()) for name, p in module.named_parameters() if p.numel() == 1]
    for (name, gain), eps in itertools.product(gains, (SHORTEST, *EPS)):
        words = (("compared with", "g * F.normalize(x): ScaleNorm", ""), ("gain", name, ""))
        form, affine = _Form(partial(_outside, eps), (-1,), False, lambda n: 1), Affine(gain, 0, name, names=(name, ""))
        written = partial(_scaled, name) if eps == SHORTEST else partial(_written, form, affine, None)
        yield PartReading(partial(_normed, form, gain, 0), words, notes=(note,), written=written)


def _affines(module: nn.Module, width: int) -> Iterator[Affine]:
    """Give each parameter the part of the gain, of 1 + the gain, and of the bias."""
    vectors = {name: p.detach() for name, p in module.named_parameters() if p.numel() in (1, width)}
    for (gain, g), (bias, b) in itertools.permutations(vectors.items(), 2):
        exchanged = BIAS.search(gain.lower()) and GAIN_NAME.search(bias.lower())
        wrong = ("norm_gain_and_bias_exchanged",) if exchanged else ()
        names, words = (gain, bias), f"{gain} and {bias}"
        yield Affine(g, b, words, wrong, names)
        yield Affine(1 + g, b, f"1 + {words}", wrong, names, plus_one=True)
        yield Affine(g, g * b, words, ("norm_bias_scaled", *wrong), names, inside=True)
    bias_lost = ("norm_bias_unused",) if len(vectors) > 1 else ()
    for gain, g in vectors.items():
        yield Affine(g, 0, gain, bias_lost, (gain, ""))
        yield Affine(1 + g, 0, f"1 + {gain}", bias_lost, (gain, ""), plus_one=True)
    yield Affine(1, 0, "none", ("norm_gain_unused",) if vectors else ())


@dataclass(frozen=True)
class _Form:
    """How a norm measures and divides.

    Args:
        divisor: Makes of the spread what is divided by.
        axes: Over which it is taken.
        centred: Whether the mean is taken off.
        divided: By what a sum over so many squares is divided.
    """

    divisor: Map
    axes: tuple[int, ...]
    centred: bool
    divided: Callable[[int], int]


def _normed(form: _Form, gain: Any, bias: Any, x: Any) -> Any:
    deviation = x - x.mean(form.axes, keepdim=True) if form.centred else x
    count = form.divided(math.prod(x.size(axis) for axis in form.axes))
    return gain * deviation / form.divisor(deviation.square().sum(form.axes, keepdim=True) / count) + bias


def _written(form: _Form, affine: Affine, norm: Normalising | None, writer: PartWriter, x: Text) -> Text:
    """Write one of torch's norms; where it has none that is the same, the formula."""
    if norm is not None:
        return writer.normed(x, norm)
    found: Text = _normed(form, *affine.written(writer), x)
    return found


def _scaled(name: str, writer: PartWriter, x: Text) -> Text:
    return writer.parameter(name) * Text(f"F.normalize({x}, dim=-1)", writer)
