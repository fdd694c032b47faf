"""The other parts of a Transformer, each with its own small family: LayerNorm, feed-forward, positional encoding.

A layer or a model is checked by walking its sub-modules (``walking``), code that builds masks in ``mask_builders``.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.ran import frames_where, operations_of
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.part_holding import first_output
from equivalence_tests.checker.equivalent.search import Search, rest_of_module
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.parts.feed_forwards import feed_forward_readings
from equivalence_tests.checker.parts.functions import function_modules
from equivalence_tests.checker.parts.holding_parts import (
    cases_of,
    hold_module,
    hold_positions,
    module_cases,
    weights_of,
)
from equivalence_tests.checker.parts.mask_builders import examine_mask_builder
from equivalence_tests.checker.parts.norms import is_rms_norm, norm_readings
from equivalence_tests.checker.parts.position_calls import Placement, angles_joined, placements, rotating
from equivalence_tests.checker.parts.positions import angle_readings, position_readings, rotary_readings
from equivalence_tests.checker.parts.readings import Observation, PartReading, is_right, judge
from equivalence_tests.checker.reach.arguments import SIZES
from equivalence_tests.checker.reach.construction import build
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.state import attempt, prepare
from equivalence_tests.checker.reach.subject import Adapter, Subject, subjects
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.lines import code_lines, raised_at
from equivalence_tests.checker.reporting.report import Report

SHAPES = ((2, 5), (4, 6), (1, 8))
MOST_OBSERVED = 3
OnTokens = Callable[[Tensor], Tensor | None]  # (batch, len, features)
LARGE = 64


def examine_part(found: Any, name: str, kind: str, adapter: Adapter, where: str = "", right: bool = False) -> Report:
    """Check a part that is no attention: a class, an instance or a factory, at some path inside a model.

    With ``right``, it is only asked whether it is a right one, which takes less time; of a mask builder all is asked.

    Raises:
        CannotCheckError: If it cannot be built or called.
    """
    if kind == "mask_builder":
        return examine_mask_builder(found, name, adapter.intended)
    observed, errors = list[Report](), list[str]()
    for subject in subjects(found, name, adapter):
        # What fits nothing at two small widths fits nothing at a large one.
        if observed and (len(observed) == MOST_OBSERVED or subject.sizes.embed_dim >= LARGE):
            break
        report = _examine_instance(subject, kind, where, errors, right)
        if report is not None and report.verdict != "unchecked":
            return report
        observed += [report] if report is not None else []
    if not observed:
        if kind == "positional_encoding":
            raise CannotCheckError(f"no call of {name} returned a table of positions, or vectors plus one")
        failed = f"no call {name}(x) with x of (batch, len, features) returned a tensor of that shape"
        raise CannotCheckError(f"{failed}; it said {errors[0]}" if errors else failed)
    return observed[0]


def _examine_instance(subject: Subject, kind: str, where: str, errors: list[str], right: bool) -> Report | None:
    torch.set_default_dtype(torch.float64)
    if kind == "positional_encoding":
        module = None if subject.module is None else prepare(subject.copied())
        return _examine_positions(module, subject, where, right)
    width = subject.sizes.embed_dim
    if subject.module is not None:
        return _examine_module(subject.copied(), subject, kind, where, errors, right)
    made = function_modules(subject.function, kind, width, subject.sizes.ff_dim)
    reports = [r for one in made if (r := _examine_module(one, subject, kind, where, errors, right)) is not None]
    return next((report for report in reports if report.verdict != "unchecked"), (*reports, None)[0])


def _examine_module(
    module: nn.Module, subject: Subject, kind: str, where: str, errors: list[str], right: bool
) -> Report | None:
    """Check a norm or a feed-forward; only whether it is a right one, if that is asked."""
    prepare(module)
    norm, width = kind == "layer_norm", subject.sizes.embed_dim
    if norm and all(p.numel() == 1 for p in module.parameters()):
        width = SIZES[0].embed_dim  # one gain for all features says nothing about their number
    # Beside convolutions, features and tokens may be in each other's place.
    layouts = ((features_first, partial(_on_tokens, module, features_first)) for features_first in (False, True))
    fed = ((*layout, list(_observe(layout[1], width, norm, errors))) for layout in layouts)
    features_first, call, observations = next((found for found in fed if found[2]), (False, None, []))
    if call is None:
        return None
    x = observations[0][0]
    given = x.mT.contiguous() if features_first else x.clone()
    readings = norm_readings(module, width, right) if norm else feed_forward_readings(module, given)
    rows = (("layout", "(batch, features, len)", "(..., features)"),) if features_first else ()
    readings = (reading.beside(rows) for reading in readings if is_right(reading.mistakes) or not right)
    words = "feed forward" if not norm else "RMSNorm" if is_rms_norm(module) else "layer norm"
    report = Report(subject.name, words)
    try:
        judged = judge(report, readings, observations, [partial(call, x)], where, type(module).__name__)
    except RuntimeError as error:
        again = f"{subject.name} was called, and cannot be called again: {said(error)}{raised_at(error)}"
        raise CannotCheckError(again) from error
    if report.verdict == "unchecked" and not right:
        calls = [case.call for case in module_cases(module, width, features_first)]
        examine = partial(_examine_module, module, subject, kind, where, [], right=True)
        _explain(report, type(module).__name__, call, x, partial(_located, report, subject, calls, examine))
    hold_module(judged, subject, module, width, features_first)
    return report


def _located(report: Report, subject: Subject, calls: Sequence[Call], examine: Callable[[], Report | None]) -> bool:
    """Find the line that keeps a part from being what it is called."""
    words = "an RMSNorm" if report.kind == "RMSNorm" else f"a {report.kind}", "one"
    search = Search(lambda seed: calls[seed % len(calls)].redrawn(seed), first_output, words, True)

    def read() -> Equivalent | None:
        again = examine()
        return None if again is None else again.equivalent

    return search.locate(report, rest_of_module(search, read, weights_of(search.module)), subject.adapter.intended)


def _on_tokens(module: nn.Module, features_first: bool, x: Tensor) -> Tensor | None:
    """Call a module on tokens, (batch, len, features), whichever layout the module takes."""
    given = x.mT.contiguous() if features_first else x.clone()  # residuals may be added in place
    output = next(tensors_in(module(given)), None)
    return output.mT if features_first and output is not None and output.dim() == 3 else output


def _explain(report: Report, owner: str, call: OnTokens, x: Tensor, located: Callable[[], bool]) -> None:
    """Say why no reading fits, as far as that is known."""
    other = x.clone()
    other[0, 0] *= torch.linspace(-2, 2, x.size(-1))
    before, again, after = (next(tensors_in(attempt(partial(call, one))), x[:0]) for one in (x, x, other))
    if not torch.equal(before, again):
        stack = code_lines(frames_where("dropout", operations_of(partial(call, x))))
        report.verdict, report.reason = "deviates", ""
        report.findings = [found_mistake("random_in_eval", stack=stack, evidence="it was called twice")]
    elif located():
        return
    elif not torch.allclose(before[:1, 1:], after[:1, 1:], rtol=1e-4, atol=1e-6):
        named = re.search("layer_?norm|rms_?norm", owner, re.IGNORECASE)
        report.verdict = "deviates" if named and report.kind != "feed forward" else "unchecked"
        each = f"while a {report.kind} treats each on its own"
        report.reason = f"It mixes tokens: its output for one changes with another, {each}."


def _examine_positions(
    module: nn.Module | None, subject: Subject, where: str, right: bool, like: Placement | None = None
) -> Report | None:
    """Try every place where its table can be found, or the one that is known; with ``right``, only right readings."""
    unmatched = None
    with angles_joined(module or subject.function) as (function, angles):
        for placement in placements(subject, function, like):
            width = placement.observations[0][1].size(-1)
            known = rotary_readings if placement.rotated else angle_readings if angles else position_readings
            readings = known(module, width)
            report = _judged(subject, placement, function, readings, where, right or bool(placement.grid))
            if report.verdict != "unchecked":
                return report
            unmatched = unmatched or (report, placement)
    rotation = next(_rotations(subject), None) if module is None and like is None else None
    if rotation is not None:
        return rotation
    if unmatched is not None and module is not None and not right:
        compared = [case.call for case in cases_of(unmatched[1], module)]
        again = partial(_examine_positions, module, subject, where, True, unmatched[1])
        _located(unmatched[0], subject, compared, again)
    return None if unmatched is None else unmatched[0]


def _judged(
    subject: Subject,
    placement: Placement,
    function: Callable[..., Any],
    readings: Iterator[PartReading],
    where: str,
    right: bool,
) -> Report:
    """Find the reading of a placement, and hold it against what torch has; with ``right``, only right readings."""
    beside = (one.beside(placement.words, placement.mistakes, placement.notes) for one in readings)
    wanted = (one for one in beside if is_right(one.mistakes) or not right)
    report = Report(subject.name, "positional encoding")
    calls: list[Callable[[], Any]] = [partial(placement.way.call, function, placement.draws[0])]
    if isinstance(function, nn.Module):
        calls.append(lambda: _constructed(function))
    hold_positions(judge(report, wanted, placement.observations, calls, where), subject, placement, function)
    return report


def _rotations(subject: Subject) -> Iterator[Report]:
    """Read rotations that are right with the angles that they are handed; with others any may be wrong."""
    for function in rotating(subject.function):
        for placement in (one for one in placements(subject, function) if one.rotated):
            readings = rotary_readings(None, placement.draws[0].width)
            report = _judged(subject, placement, function, readings, "", right=True)
            if report.verdict != "unchecked":
                yield report


def _constructed(module: nn.Module) -> None:
    """Construct another one: a table that is kept was made there."""
    with contextlib.suppress(CannotCheckError):
        next(build(type(module)))


def _observe(call: OnTokens, width: int, norm: bool, errors: list[str]) -> Iterator[Observation]:
    """Feed it tokens of a normal and, where eps counts, of a small size; ``errors`` receives what it said."""
    generator = torch.Generator().manual_seed(0)
    for (batch, length), size in itertools.product(SHAPES, (1.0, 0.02) if norm else (1.0,)):
        x = size * (torch.randn(batch, length, width, generator=generator) + (0.3 if norm else 0.0))
        output = attempt(partial(call, x), errors)
        if output is not None and output.shape == x.shape:
            yield x, output
