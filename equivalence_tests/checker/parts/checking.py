"""The other parts of a Transformer, each with its own small family: LayerNorm, feed-forward, positional encoding.

A layer or a model is checked by walking its sub-modules (``walking``), code that builds masks in ``mask_builders``.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.parts.feed_forwards import ACTIVATIONS, feed_forward_readings
from equivalence_tests.checker.parts.functions import function_modules
from equivalence_tests.checker.parts.mask_builders import builds_masks, examine_mask_builder
from equivalence_tests.checker.parts.norms import is_rms_norm, norm_readings
from equivalence_tests.checker.parts.position_calls import holds_sinusoids, placements
from equivalence_tests.checker.parts.positions import position_readings
from equivalence_tests.checker.parts.readings import Observation, judge
from equivalence_tests.checker.reach.construction import SIZES, build, prepare
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.subject import Adapter, Subject, subjects
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.report import Report

__all__ = ["ACTIVATIONS", "BY_DATA_FLOW", "examine_part", "guess_kind", "kind_of_name", "there_and_back"]

# Under this name a copy of a module keeps the kind that a run showed, where its own name says nothing.
BY_DATA_FLOW = "_kind_by_data_flow"
NAMES = (
    (r"attention|attn|mhs?a|multi_?head|^head$", "attention"),
    (r"feed_?forward", "feed_forward"),  # one may hold a norm, and say so in its name
    (r"layer_?norm|(^|_)norm(alization)?$|^ln$|rms_?norm", "layer_norm"),
    (r"ffn|^ff|mlp|position_?wise", "feed_forward"),
    (r"pos([a-z]{0,4}n[a-z]{0,3})?_?(enc|emb)|sinusoid|(^|_)(w?pe|positions)($|_)", "positional_encoding"),
    (r"layer|block|encoder|decoder|transformer|gpt|bert|model|stack", "layers"),
)
SHAPES = ((2, 5), (4, 6), (1, 8))
MOST_OBSERVED = 3
LARGE = 64


def guess_kind(found: Any) -> str:
    """Tell from the name what something is, and a few of torch's containers by what they hold; "" if neither says.

    >>> guess_kind(nn.LayerNorm), guess_kind(nn.TransformerEncoderLayer), guess_kind(nn.MultiheadAttention)
    ('layer_norm', 'layers', 'attention')
    >>> guess_kind(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))), guess_kind(nn.Linear(2, 2))
    ('feed_forward', '')
    """
    if isinstance(found, nn.Module) and BY_DATA_FLOW in vars(found):
        return str(vars(found)[BY_DATA_FLOW])
    if isinstance(found, nn.Sequential):
        return "feed_forward" if _is_feed_forward(found) else ""
    if builds_masks(found):
        return "mask_builder"
    kind = kind_of_name(getattr(found, "__name__", type(found).__name__))
    if kind or not isinstance(found, nn.Module):
        return kind
    return "positional_encoding" if holds_sinusoids(found) else "layer_norm" if _normalises(found) else ""


def _normalises(found: nn.Module) -> bool:
    """Whether it has nothing but a gain and an offset, and gives the same for vectors ten times as long."""
    parameters = list(found.parameters())
    if not 1 <= len(parameters) <= 2 or any(p.dim() != 1 for p in parameters) or any(True for _ in found.children()):
        return False
    x = 10 * torch.randn(2, 3, len(parameters[0]), generator=torch.Generator().manual_seed(0)).to(parameters[0].dtype)
    try:
        with torch.no_grad():
            once, tenfold = found(x), found(10 * x)
        return once.shape == x.shape and bool(once.any()) and torch.allclose(once, tenfold, rtol=1e-2, atol=1e-3)
    except Exception:  # what cannot be called with one tensor is something else
        return False


def there_and_back(found: nn.Module) -> bool:
    """Whether its linears lead to another width and back: two, or three with a gate, packed or not.

    >>> there_and_back(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))), there_and_back(nn.MultiheadAttention(4, 2))
    (True, False)
    """
    shapes = [tuple(m.weight.shape) for m in found.modules() if isinstance(m, nn.Linear)]
    inside, width = shapes[-1][::-1] if shapes else (0, 0)
    halves = [(inside, width), (width, inside)], [(2 * inside, width), (width, inside)]
    return inside != width and shapes in (*halves, [*halves[0][:1] * 2, halves[0][1]])


def _is_feed_forward(found: nn.Sequential) -> bool:
    """Whether its linears lead there and back, and nothing else in it but LayerNorms has parameters."""
    ours = [p for m in found.modules() if isinstance(m, nn.Linear | nn.LayerNorm) for p in m.parameters(recurse=False)]
    return len(ours) == len(list(found.parameters())) and there_and_back(found)


def kind_of_name(name: str) -> str:
    """Tell a kind from a name alone; "" if it says nothing.

    >>> kind_of_name("CausalSelfAttention"), kind_of_name("mlp"), kind_of_name("Thing")
    ('attention', 'feed_forward', '')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return next((kind for pattern, kind in NAMES if re.search(pattern, words)), "")


def examine_part(found: Any, name: str, kind: str, adapter: Adapter, where: str = "") -> Report:
    """Check a part that is no attention.

    Args:
        found: Class, instance or factory.
        name: What to call it.
        kind: One of ``KINDS``, but for "attention" and "layers".
        adapter: How to build it, if that cannot be found out.
        where: Path inside a model; "" for the object itself.

    Returns:
        The report.

    Raises:
        CannotCheckError: If it cannot be built or called.
    """
    if kind == "mask_builder":
        return examine_mask_builder(found, name)
    observed = list[Report]()
    for subject in subjects(found, name, adapter):
        # What fits nothing at two small widths fits nothing at a large one.
        if observed and (len(observed) == MOST_OBSERVED or subject.sizes.embed_dim >= LARGE):
            break
        report = _examine_instance(subject, kind, where)
        if report is not None and report.verdict != "unchecked":
            return report
        observed += [report] if report is not None else []
    if not observed:
        if kind == "positional_encoding":
            raise CannotCheckError(f"no call of {name} gave a table of positions, or vectors plus one")
        raise CannotCheckError(f"no call {name}(x) with x of (batch, len, features) gave a tensor of that shape")
    return observed[0]


def _examine_instance(subject: Subject, kind: str, where: str) -> Report | None:
    torch.set_default_dtype(torch.float64)
    if kind == "positional_encoding":
        return _examine_positions(subject, where)
    width = subject.sizes.embed_dim
    if subject.module is not None:
        return _examine_module(subject.copied(), width, subject, kind, where)
    made = function_modules(subject.function, kind, width, subject.sizes.ff_dim)
    reports = [r for one in made if (r := _examine_module(one, width, subject, kind, where)) is not None]
    return next((report for report in reports if report.verdict != "unchecked"), (*reports, None)[0])


def _examine_module(module: nn.Module, width: int, subject: Subject, kind: str, where: str) -> Report | None:
    prepare(module)
    if kind == "layer_norm" and all(p.numel() == 1 for p in module.parameters()):
        width = SIZES[0].embed_dim  # one gain for all features says nothing about their number
    turned, observations = _fed(module, width, kind)
    if not observations:
        return None
    rows = (("layout", "(batch, features, len)", "(..., features)"),) if turned else ()

    def again() -> Any:
        return module(_as_given(observations[0][0], turned))

    readings = norm_readings(module, width) if kind == "layer_norm" else feed_forward_readings(module, width)
    readings = (replace(r, words=(*r.words, *rows)) for r in readings)
    if kind == "layer_norm":
        words = "RMSNorm" if is_rms_norm(module) else "layer norm"
        return judge(subject.name, words, where, readings, observations, [again])
    report = judge(subject.name, "feed forward", where, readings, observations, [again])
    seen = max((m.kernel_size[0] for m in module.modules() if isinstance(m, nn.Conv1d)), default=1)
    if report.verdict == "unchecked" and seen > 1:
        report.reason = f"A convolution in it looks at {seen} tokens at once: it is no position-wise feed-forward."
    return report


def _examine_positions(subject: Subject, where: str) -> Report | None:
    """Try every place where its table can be found."""
    module = None if subject.module is None else prepare(subject.copied())
    unmatched = None
    for placement in placements(subject, module or subject.function):
        width = placement.observations[0][1].size(-1)
        readings = (
            replace(
                reading,
                words=(*reading.words, *placement.words),
                mistakes=(*placement.mistakes, *reading.mistakes),
                notes=(*reading.notes, *placement.notes),
            )
            for reading in position_readings(module, width)
        )
        calls = [placement.again, *([lambda: _constructed(module)] if module is not None else [])]
        report = judge(subject.name, "positional encoding", where, readings, placement.observations, calls)
        if report.verdict != "unchecked":
            return report
        unmatched = unmatched or report
    return unmatched


def _constructed(module: nn.Module) -> None:
    """Construct another one: a table that is kept was made there."""
    with contextlib.suppress(CannotCheckError):
        next(build(type(module)))


def _fed(module: nn.Module, width: int, kind: str) -> tuple[bool, list[Observation]]:
    """Feed it tokens; beside convolutions, features and tokens may be in each other's place."""
    straight = list(_observe(module, width, kind, turned=False))
    if straight:
        return False, straight
    return True, list(_observe(module, width, kind, turned=True))


def _as_given(x: Tensor, turned: bool) -> Tensor:
    """Lay tokens out as the module takes them; a copy, for residuals may be added in place."""
    return x.mT.contiguous() if turned else x.clone()


def _observe(module: nn.Module, width: int, kind: str, turned: bool) -> Iterator[Observation]:
    """Feed it tokens of a normal and, where eps counts, of a small size."""
    generator = torch.Generator().manual_seed(0)
    for (batch, length), size in itertools.product(SHAPES, (1.0, 0.02) if kind == "layer_norm" else (1.0,)):
        x = size * torch.randn(batch, length, width, generator=generator)
        x = x + 0.3 * size if kind == "layer_norm" else x
        try:
            with torch.no_grad():
                output = next(tensors_in((module(_as_given(x, turned)),)), None)
        except Exception:
            continue
        output = output.mT if turned and output is not None and output.dim() == 3 else output
        if output is not None and output.shape == x.shape:
            yield x, output
