"""Every LayerNorm and RMSNorm: how deviations are squared, where eps stands, which axes, which gain and bias."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

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
# Gain, bias, what they are called, and what is wrong with them.
Map = Callable[[Tensor], Tensor]
Affine = tuple[Tensor, Tensor, str, tuple[str, ...]]
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
    for (gain, bias, names, wrong), eps, (place, (divisor, misplaced)), (axes_words, axes), spread in options:
        centred, divided, of_spread = spread
        mistakes = (
            *wrong,
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
            ("gain and bias", names, "weight" if rms else "weight and bias"),
        )
        formula = partial(_normed, gain, bias, partial(divisor, eps), axes, centred, divided)
        yield PartReading(formula, words, mistakes)


def _scale_norms(module: nn.Module) -> Iterator[PartReading]:
    """G x / |x|, with one number g: what is no LayerNorm is no wrong one."""
    note = "torch.nn has no ScaleNorm: it equals g * F.normalize(x, dim=-1)"
    gains = [(name, p.detach()) for name, p in module.named_parameters() if p.numel() == 1]
    for (name, gain), eps in itertools.product(gains, (1e-12, *EPS)):
        words = (("compared with", "g * F.normalize(x): ScaleNorm", ""), ("gain", name, ""))
        formula = partial(_normed, gain, torch.zeros(()), partial(_outside, eps), (-1,), False, lambda n: 1)
        yield PartReading(formula, words, notes=(note,))


def _affines(module: nn.Module, width: int) -> Iterator[Affine]:
    """Give each parameter the part of the gain, of 1 + the gain, and of the bias."""
    vectors = {name: p.detach() for name, p in module.named_parameters() if p.numel() in (1, width)}
    one, zero = torch.ones(()), torch.zeros(())
    for (gain, g), (bias, b) in itertools.permutations(vectors.items(), 2):
        exchanged = BIAS.search(gain.lower()) and GAIN_NAME.search(bias.lower())
        wrong = ("norm_gain_and_bias_exchanged",) if exchanged else ()
        yield (g, b, f"{gain} and {bias}", wrong)
        yield (1 + g, b, f"1 + {gain} and {bias}", wrong)
        yield (g, g * b, f"{gain} and {bias}", ("norm_bias_scaled", *wrong))
    bias_lost = ("norm_bias_unused",) if len(vectors) > 1 else ()
    for gain, g in vectors.items():
        yield (g, zero, gain, bias_lost)
        yield (1 + g, zero, f"1 + {gain}", bias_lost)
    yield (one, zero, "none", ("norm_gain_unused",) if vectors else ())


def _normed(
    gain: Tensor,
    bias: Tensor,
    divisor: Map,
    axes: tuple[int, ...],
    centred: bool,
    divided: Callable[[int], int],
    x: Tensor,
) -> Tensor:
    deviation = x - x.mean(axes, keepdim=True) if centred else x
    count = divided(math.prod(x.size(axis) for axis in axes))
    return gain * deviation / divisor(deviation.square().sum(axes, keepdim=True) / count) + bias
