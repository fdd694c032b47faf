"""Every LayerNorm and RMSNorm: how deviations are squared, where eps stands, which axes, which gain and bias."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equivalence_tests.checker.parts.functions import FunctionModule
from equivalence_tests.checker.parts.readings import PartReading

__all__ = ["is_rms_norm", "norm_readings"]

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
BIAS_NAME = re.compile(r"beta|bias|shift|^b(_?\d)?$")
GAIN_NAME = re.compile(r"gamma|gain|weight|scale|alpha|^[ag](_?\d)?$")
PLACES: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[str, ...]]] = {
    "inside the root": (lambda variance, eps: (variance + eps).sqrt(), ()),
    "outside the root": (lambda variance, eps: variance.sqrt() + eps, ("norm_eps_outside",)),
    "added to the variance, of which no root is taken": (lambda variance, eps: variance + eps, ("norm_without_root",)),
}
EPS = (0.0, 1e-5, 1e-6, 1e-12, 1e-8, 1e-3)
SMALLEST = torch.finfo(torch.float64).eps  # what nn.RMSNorm adds unless told otherwise


@dataclass(frozen=True)
class Affine:
    """A gain and a bias among the parameters."""

    gain: Tensor
    bias: Tensor
    words: str
    mistakes: tuple[str, ...] = ()


def is_rms_norm(module: nn.Module) -> bool:
    """Whether its name says that it leaves the mean alone on purpose.

    >>> is_rms_norm(nn.RMSNorm(3)), is_rms_norm(nn.LayerNorm(3))
    (True, False)
    """
    name = (module.function if isinstance(module, FunctionModule) else type(module)).__name__
    return re.search(r"(^|_)rms|rms_?norm|root_?mean", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) is not None


def norm_readings(module: nn.Module, width: int) -> Iterator[PartReading]:
    """Read a norm in every way.

    Args:
        module: The norm, with random parameters.
        width: Width of its input.

    Yields:
        LayerNorms and RMSNorms, right and with mistakes; which of the two is right, its class's name says.
    """
    yield from _scale_norms(module)
    rms = is_rms_norm(module)
    stated = [v for name, v in vars(module).items() if "eps" in name.lower() and isinstance(v, float)]
    likely = dict.fromkeys([*stated, *([SMALLEST] if rms else []), *EPS])
    for affine, eps in itertools.product(_affines(module, width), likely):
        known = (*affine.mistakes, *(() if eps else ("norm_without_eps",)))
        for (place, (divisor, misplaced)), (axes_words, axes) in itertools.product(PLACES.items(), AXES.items()):
            wrong_axes = () if axes == (-1,) else ("norm_wrong_axes",)
            for centred, divided, spread in SPREADS:
                mean = () if centred != rms else ("norm_subtracts_mean",) if rms else ("norm_without_mean",)
                words = (
                    *((("compared with", "nn.RMSNorm", ""),) if rms else ()),
                    ("eps", f"{eps:g}, {place}", "inside the root" if rms else "1e-05 by default, inside the root"),
                    ("axes", axes_words, "the last"),
                    ("gain and bias", affine.words, "weight" if rms else "weight and bias"),
                )
                formula = _formula(affine, eps, divisor, axes, centred, divided)
                yield PartReading(formula, words, (*known, *misplaced, *spread, *wrong_axes, *mean))


def _scale_norms(module: nn.Module) -> Iterator[PartReading]:
    """G x / |x|, with one number g: what is no LayerNorm is no wrong one."""
    words = (("compared with", "g * F.normalize(x): ScaleNorm", ""),)
    note = "torch.nn has no ScaleNorm: it equals g * F.normalize(x, dim=-1)"
    for name, p in module.named_parameters():
        if p.numel() == 1:
            rows = (*words, ("gain", name, ""))
            for eps in (1e-12, *EPS):
                yield PartReading(_scaled(p.detach(), eps), rows, notes=(note,))


def _scaled(gain: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: gain * x / (x.norm(dim=-1, keepdim=True) + eps)


def _affines(module: nn.Module, width: int) -> Iterator[Affine]:
    """Give each parameter the part of the gain, of 1 + the gain, and of the bias."""
    vectors = {name: p.detach() for name, p in module.named_parameters() if p.numel() in (1, width)}
    one, zero = torch.ones(()), torch.zeros(())
    for (gain, g), (bias, b) in itertools.permutations(vectors.items(), 2):
        exchanged = BIAS_NAME.search(gain.lower()) and GAIN_NAME.search(bias.lower())
        wrong = ("norm_gain_and_bias_exchanged",) if exchanged else ()
        yield Affine(g, b, f"{gain} and {bias}", wrong)
        yield Affine(1 + g, b, f"1 + {gain} and {bias}", wrong)
        yield Affine(g, g * b, f"{gain} and {bias}", ("norm_bias_scaled", *wrong))
    bias_lost = ("norm_bias_unused",) if len(vectors) > 1 else ()
    for gain, g in vectors.items():
        yield Affine(g, zero, gain, bias_lost)
        yield Affine(1 + g, zero, f"1 + {gain}", bias_lost)
    yield Affine(one, zero, "none", ("norm_gain_unused",) if vectors else ())


def _formula(
    affine: Affine,
    eps: float,
    divisor: Callable[[Tensor, float], Tensor],
    axes: tuple[int, ...],
    centred: bool,
    divided: Callable[[int], int],
) -> Callable[[Tensor], Tensor]:
    def formula(x: Tensor) -> Tensor:
        deviation = x - x.mean(axes, keepdim=True) if centred else x
        count = divided(math.prod(x.size(axis) for axis in axes))
        variance = deviation.square().sum(axes, keepdim=True) / count
        return affine.gain * deviation / divisor(variance, eps) + affine.bias

    return formula
