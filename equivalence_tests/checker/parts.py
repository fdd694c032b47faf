"""The other parts of a Transformer, each with its own small family: LayerNorm, feed-forward, positional encoding.

A layer or a model is checked by walking its sub-modules (``walking``), code that builds masks in ``mask_builders``.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.construction import prepare
from equivalence_tests.checker.describe import guilty_line
from equivalence_tests.checker.diagnosis import FLOAT32_INSIDE, distance
from equivalence_tests.checker.errors import CannotCheckError
from equivalence_tests.checker.mask_builders import builds_masks, examine_mask_builder
from equivalence_tests.checker.part_mistakes import PART_MISTAKES, PartMistake
from equivalence_tests.checker.projections import Leaf, leaves_of
from equivalence_tests.checker.report import CheckResult, Finding, Report
from equivalence_tests.checker.subject import Adapter, Subject, subjects
from equivalence_tests.checker.tracing import tensors_in

__all__ = ["PART_KINDS", "examine_part", "guess_kind", "kind_of_name"]

PART_KINDS = ("layer_norm", "feed_forward", "positional_encoding", "mask_builder", "layers")
NAMES = (
    (r"attention|attn|mhs?a|multi_?head|^head$", "attention"),
    (r"layer_?norm|(^|_)norm(alization)?$|^ln$|rms_?norm", "layer_norm"),
    (r"feed_?forward|ffn|^ff|mlp|position_?wise", "feed_forward"),
    (r"pos(ition(s|al)?)?_?(enc|emb)|sinusoid|^pe$", "positional_encoding"),
    (r"layer|block|encoder|decoder|transformer|gpt|bert|model|stack", "layers"),
)
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((2, 5, 0), (4, 6, 0), (1, 8, 0))


def guess_kind(found: Any) -> str:
    """Tell from the name what something is, and a few of torch's containers by what they hold; "" if neither says.

    >>> guess_kind(nn.LayerNorm), guess_kind(nn.TransformerEncoderLayer), guess_kind(nn.MultiheadAttention)
    ('layer_norm', 'layers', 'attention')
    >>> guess_kind(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))), guess_kind(nn.Linear(2, 2))
    ('feed_forward', '')
    """
    if isinstance(found, nn.Sequential):
        return "feed_forward" if sum(isinstance(child, nn.Linear) for child in found) == 2 else ""
    if builds_masks(found):
        return "mask_builder"
    return kind_of_name(getattr(found, "__name__", type(found).__name__))


def kind_of_name(name: str) -> str:
    """Tell a kind from a name alone; "" if it says nothing.

    >>> kind_of_name("CausalSelfAttention"), kind_of_name("mlp"), kind_of_name("Thing")
    ('attention', 'feed_forward', '')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return next((kind for pattern, kind in NAMES if re.search(pattern, words)), "")


@dataclass(frozen=True)
class PartReading:
    """One way to understand a part: its formula, the settings that are its conventions, and its mistakes."""

    formula: Callable[[Tensor], Tensor]
    words: tuple[tuple[str, str, str], ...]
    mistakes: tuple[str, ...] = ()


def examine_part(found: Any, name: str, kind: str, adapter: Adapter, where: str = "") -> Report:
    """Check a part that is no attention.

    Args:
        found: Class, instance or factory.
        name: What to call it.
        kind: One of ``PART_KINDS``.
        adapter: How to build it, if that cannot be found out.
        where: Path inside a model; "" for the object itself.

    Returns:
        The report.

    Raises:
        CannotCheckError: If it cannot be built or called.
    """
    if kind == "layers":
        from equivalence_tests.checker.walking import examine_layers

        return examine_layers(found, name, adapter)
    if kind == "mask_builder":
        return examine_mask_builder(found, name)
    last: Report | None = None
    for subject in subjects(found, name, adapter):
        report = _examine_instance(subject, kind, where)
        if report is not None:
            last = report
            if report.verdict != "unchecked":
                return report
    if last is None:
        raise CannotCheckError(f"no call {name}(x) with x of (batch, len, features) gave a tensor of that shape")
    return last


def _examine_instance(subject: Subject, kind: str, where: str) -> Report | None:
    module = subject.module
    if module is None:
        raise CannotCheckError(f"{subject.name} is a function; {kind} can be checked as a module")
    torch.set_default_dtype(torch.float64)
    prepare(module)
    observations = list(_observe(module, subject, kind))
    if not observations:
        return None
    readings = {"layer_norm": _norm_readings, "feed_forward": _ff_readings, "positional_encoding": _position_readings}[
        kind
    ]
    ranked = sorted(readings(module, subject), key=lambda reading: len(reading.mistakes))
    return _judge(subject, kind, where, ranked, observations)


def _observe(module: nn.Module, subject: Subject, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for (batch, length, _), size in itertools.product(SHAPES, (1.0, 0.02) if kind == "layer_norm" else (1.0,)):
        x = size * torch.randn(batch, length, subject.sizes.embed_dim, generator=generator)
        if kind == "layer_norm":
            x = x + 0.3 * size
        try:
            with torch.no_grad():
                output = next(tensors_in((module(x),)), None)
        except Exception:
            continue
        if output is not None and output.shape == x.shape:
            yield x, output


def _judge(
    subject: Subject, kind: str, where: str, readings: list[PartReading], observations: list[tuple[Tensor, Tensor]]
) -> Report:
    """Take the reading with the fewest mistakes that gives the output, to rounding or to float32."""
    report = Report(subject.name, kind.replace("_", " "))
    for bound in (1e-10, FLOAT32_INSIDE):
        for reading in readings:
            worst = max(_error(reading, x, output) for x, output in observations)
            if worst <= bound:
                return _matched(report, reading, readings, subject, where, worst, observations)
    report.reason = (
        f"Nothing that is known reproduces its output; {len(readings)} readings were tried. "
        "No verdict follows from that."
    )
    return report


def _matched(
    report: Report,
    reading: PartReading,
    readings: list[PartReading],
    subject: Subject,
    where: str,
    worst: float,
    observations: list[tuple[Tensor, Tensor]],
) -> Report:
    report.conventions = list(reading.words)
    plain = [r for r in readings if not r.mistakes]
    without = min((max(_error(r, x, y) for x, y in observations) for r in plain), default=float("inf"))
    count = sum(len(x) for x, _ in observations)
    same_length = [r for r in readings if r.mistakes != reading.mistakes and len(r.mistakes) == len(reading.mistakes)]
    others = [r.mistakes for r in same_length if max(_error(r, x, y) for x, y in observations) <= 3 * max(worst, 1e-12)]
    alternatives = tuple(
        dict.fromkeys(PART_MISTAKES[n].sentence for names in others for n in names if n not in reading.mistakes)
    )
    for name in reading.mistakes:
        mistake = PART_MISTAKES[name]
        evidence = (
            f"reproduces your output to {worst:.0e} of its largest value on {count} inputs; "
            f"without it the difference is {without:.2g}"
        )
        report.findings.append(_finding(mistake, evidence, subject, where, alternatives))
    blamed = [name for name in reading.mistakes if not PART_MISTAKES[name].expressible]
    report.verdict = "deviates" if blamed else "equal"
    outcome: Literal["passed", "failed"] = "failed" if blamed else "passed"
    report.checks = [
        CheckResult(
            "check_values", outcome, f"greatest difference {without if blamed else worst:.1g} of the largest value"
        )
    ]
    return report


def _finding(
    mistake: PartMistake, evidence: str, subject: Subject, where: str, alternatives: tuple[str, ...]
) -> Finding:
    line = guilty_line(mistake.patterns, subject.source, subject.source)
    return Finding(
        mistake.name,
        mistake.sentence,
        mistake.have,
        mistake.want,
        mistake.fix,
        evidence,
        line,
        mistake.choice,
        alternatives,
        where,
    )


def _error(reading: PartReading, x: Tensor, output: Tensor) -> float:
    try:
        return distance(output, reading.formula(x))
    except (RuntimeError, IndexError, ValueError):
        return float("inf")


def _norm_readings(module: nn.Module, subject: Subject) -> Iterator[PartReading]:
    """Every LayerNorm: how deviations are squared, where eps stands, which axes, which gain."""
    vectors = [p.detach() for p in module.parameters()]
    stated = [v for name, v in vars(module).items() if "eps" in name.lower() and isinstance(v, float)]
    eps_values = list(dict.fromkeys([*stated, 1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0]))
    one, zero = torch.ones(()), torch.zeros(())
    affine: list[tuple[Tensor, Tensor, tuple[str, ...]]] = [(g, b, ()) for g, b in itertools.permutations(vectors, 2)]
    affine += [(g, zero, ("norm_bias_unused",) if len(vectors) > 1 else ()) for g in vectors]
    affine += [(one, zero, ("norm_gain_unused",) if vectors else ())]
    options = itertools.product(
        affine, eps_values, ("inside", "outside"), ("biased", "unbiased"), ((-1,), (-2, -1), (-2,), (0,), "rms")
    )
    for (gain, bias, unused), eps, place, squares, axes in options:
        mistakes = [*unused]
        mistakes += ["norm_eps_outside"] if place == "outside" else []
        mistakes += ["norm_unbiased_std"] if squares == "unbiased" else []
        mistakes += (
            ["norm_wrong_axes"] if axes not in ((-1,), "rms") else ["norm_without_mean"] if axes == "rms" else []
        )
        mistakes += ["norm_eps_other"] if eps != 1e-5 and eps not in stated else []
        words = (("eps", f"{eps:g}", "1e-05 by default"), ("axes", str(axes), "the last"))
        yield PartReading(_norm_formula(gain, bias, eps, place, squares, axes), words, tuple(mistakes))


def _norm_formula(
    gain: Tensor, bias: Tensor, eps: float, place: str, squares: str, axes: Any
) -> Callable[[Tensor], Tensor]:
    def formula(x: Tensor) -> Tensor:
        dims = (-1,) if axes == "rms" else axes
        centred = x if axes == "rms" else x - x.mean(dims, keepdim=True)
        count = math.prod(x.size(d) for d in dims) - (squares == "unbiased")
        variance = centred.square().sum(dims, keepdim=True) / count
        deviation = (variance + eps).sqrt() if place == "inside" else variance.sqrt() + eps
        return gain * centred / deviation + bias

    return formula


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": F.relu,
    "GELU": F.gelu,
    "tanh-GELU": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid-GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": F.silu,
    "LeakyReLU": F.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "ELU": F.elu,
    "nothing": lambda x: x,
}
EXCHANGED = ("tanh-GELU", "sigmoid-GELU", "SiLU", "LeakyReLU", "tanh", "sigmoid", "ELU")
WRAPS = {
    "the two linears": lambda x, f, n: f(x),
    "+ residual": lambda x, f, n: x + f(x),
    "+ residual, then LayerNorm": lambda x, f, n: n(x + f(x)),
    "+ LayerNorm on the input": lambda x, f, n: f(n(x)),
    "+ LayerNorm on the input, + residual": lambda x, f, n: x + f(n(x)),
}
WRONG_WRAPS = {
    "residual_missing": lambda x, f, n: n(f(x)),
    "residual_from_normalised": lambda x, f, n: n(x) + f(n(x)),
    "residual_added_twice": lambda x, f, n: n(x + x + f(x)),
    "norm_fresh_in_forward": lambda x, f, n: F.layer_norm(x + f(x), x.shape[-1:]),
    "residual_after_norm": lambda x, f, n: x + n(f(x)),
}


def _ff_readings(module: nn.Module, subject: Subject) -> Iterator[PartReading]:
    """Every feed-forward: the activation, where it stands, biases and matrices left out, residual and LayerNorm."""
    leaves = list(leaves_of(module, 1, subject.sizes.embed_dim))
    norms = [m for m in module.modules() if m is not module and "norm" in type(m).__name__.lower()]
    norm = norms[0] if norms else None
    wraps: list[tuple[str, Any, tuple[str, ...]]] = [
        (w, f, ()) for w, f in WRAPS.items() if norm is not None or "Norm" not in w
    ]
    wraps += [(n, f, (n,)) for n, f in WRONG_WRAPS.items() if norm is not None or n in ("norm_fresh_in_forward",)]
    for first, second in itertools.permutations(leaves, 2):
        for words, body, mistakes in _ff_bodies(module, first, second):
            for wrap, wrapped, wrong in wraps:
                rows = (*words, ("includes", wrap, "linear2(activation(linear1(x)))"))
                formula = _bind(wrapped, body, norm or (lambda x: x))
                yield PartReading(formula, rows, (*mistakes, *wrong))


def _bind(wrapped: Any, body: Callable[[Tensor], Tensor], norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: wrapped(x, body, norm)


Body = tuple[tuple[tuple[str, str, str], ...], Callable[[Tensor], Tensor], tuple[str, ...]]


def _ff_bodies(module: nn.Module, first: Leaf, second: Leaf) -> Iterator[Body]:
    one, two = first.read(module), second.read(module)
    for name, activation in ACTIVATIONS.items():
        rows = (
            ("activation", name, "ReLU, GELU or any function"),
            ("linears", f"{first.name}, {second.name}", "linear1, linear2"),
        )
        kind = ("activation_missing",) if name == "nothing" else ("activation_exchanged",) if name in EXCHANGED else ()
        for bias1, bias2 in itertools.product((True, False), repeat=2):
            lost = (("ff_first_bias_unused",) if not bias1 else ()) + (("ff_second_bias_unused",) if not bias2 else ())
            if (not bias1 and one.bias is None) or (not bias2 and two.bias is None):
                continue

            def middle(x: Tensor, a: Any = activation, b1: bool = bias1, b2: bool = bias2) -> Tensor:
                return two(a(one(x, b1)), b2)

            def after(x: Tensor, a: Any = activation, b1: bool = bias1, b2: bool = bias2) -> Tensor:
                return a(two(one(x, b1), b2))

            def both(x: Tensor, a: Any = activation, b1: bool = bias1, b2: bool = bias2) -> Tensor:
                return a(two(a(one(x, b1)), b2))

            yield rows, middle, (*kind, *lost)
            if name != "nothing":
                yield rows, after, ("activation_after_second_linear", *kind, *lost)
                yield rows, both, ("activation_also_after_second_linear", *kind, *lost)

        def first_only(x: Tensor, a: Any = activation) -> Tensor:
            return a(one(x))

        yield rows, first_only, ("ff_second_linear_missing", *kind)


def _position_readings(module: nn.Module, subject: Subject) -> Iterator[PartReading]:
    """Every sinusoidal table: frequencies, order of sines and cosines, first position, axis, scaling of the input."""
    width = subject.sizes.embed_dim
    scalings = {"x + pe": 1.0, "sqrt(d_model) x + pe": math.sqrt(width), "pe alone": 0.0}
    bases = (10000.0, 1000.0, 100.0, 100000.0)
    options = itertools.product(
        bases,
        POSITION_TABLES.items(),
        POSITION_EXPONENTS.items(),
        (0, 1),
        (1, 0),
        scalings.items(),
    )
    for base, (layout, (order, swapped)), (exponent, exponents), start, axis, (scaling, factor) in options:
        mistakes = [exponent] if exponent else []
        mistakes += ["position_sine_cosine_swapped"] if swapped else []
        mistakes += ["position_starts_at_one"] if start else []
        mistakes += ["position_base_other"] if base != 10000.0 else []
        words = (
            ("order", layout, "torch.nn has none"),
            ("positions run along", "axis 1: (batch, len, features)" if axis else "axis 0: (len, batch, features)", ""),
            ("gives", scaling, ""),
        )
        yield PartReading(
            _position_formula(order, swapped, exponents, base, start, axis, factor), words, tuple(mistakes)
        )


POSITION_TABLES = {
    "sine and cosine interleaved": ("interleaved", False),
    "sines, then cosines": ("concatenated", False),
    "cosine and sine interleaved": ("interleaved", True),
    "cosines, then sines": ("concatenated", True),
}
# Exponent of the base for pair i of a width d: right, and wrong in known ways (for the sine, for the cosine).
POSITION_EXPONENTS: dict[str, Callable[[Tensor, int], tuple[Tensor, Tensor]]] = {
    "": lambda i, d: (2 * i / d, 2 * i / d),
    "position_exponent_halved": lambda i, d: (i / d, i / d),
    "position_exponent_doubled": lambda i, d: (4 * i / d, 4 * i / d),
    "position_cosine_exponent_shifted": lambda i, d: (2 * i / d, (2 * i + 1) / d),
    "position_cosine_exponent_doubled": lambda i, d: (4 * i / d, 2 * (2 * i + 1) / d),
    "position_timescale_of_tensor2tensor": lambda i, d: (i / max(d // 2 - 1, 1), i / max(d // 2 - 1, 1)),
}


def _position_formula(
    order: str, swapped: bool, exponents: Any, base: float, start: int, axis: int, factor: float
) -> Callable[[Tensor], Tensor]:
    def formula(x: Tensor) -> Tensor:
        width = x.size(-1)
        positions = torch.arange(start, start + x.size(axis), dtype=x.dtype)[:, None]
        pairs = torch.arange((width + 1) // 2, dtype=x.dtype)
        for_sine, for_cosine = exponents(pairs, width)
        first, second = (positions * base**-for_sine).sin(), (positions * base**-for_cosine).cos()
        if swapped:
            first, second = (positions * base**-for_sine).cos(), (positions * base**-for_cosine).sin()
        halves = (first, second[:, : width // 2])
        table = (
            torch.stack((first, second), -1).flatten(1)[:, :width] if order == "interleaved" else torch.cat(halves, 1)
        )
        return factor * x + (table if axis else table[:, None]).expand_as(x)

    return formula
