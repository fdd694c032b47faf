"""Write a part that was read in torch's own, and let the comparison of the whole decide."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import numbered
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import FLOAT32_INSIDE
from equivalence_tests.checker.equivalent.comparing import Case
from equivalence_tests.checker.equivalent.deciding import unread
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import EXACT, SINGLE, WrittenPart, hold_part, tensors_of
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.writer import Text, Writer, signature_of
from equivalence_tests.checker.intended import accepted
from equivalence_tests.checker.parts.functions import FunctionModule
from equivalence_tests.checker.parts.position_calls import Placement
from equivalence_tests.checker.parts.position_writing import cases_of, longest, result_of, writer_of
from equivalence_tests.checker.parts.readings import Judged
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import source_of

# Batch, length, the size of the numbers, and the seed with which parameters are drawn anew.
SITUATIONS = (
    ("fresh inputs", 2, 5, 1.0, 7),
    ("parameters drawn anew", 3, 4, 1.0, 8),
    ("small numbers", 2, 3, 0.02, 9),
    ("one long sample", 1, 17, 1.0, None),
)


def hold_positions(judged: Judged, subject: Subject, placement: Placement, function: Callable[..., Any]) -> None:
    """Hold a positional encoding against what torch, or builtin, has for it; its report receives the verdict."""
    report, reading = judged.report, judged.reading
    if reading is None or accepted(report, subject.adapter.intended).verdict != "equal":
        return
    try:
        writer, names = writer_of(subject.name.rpartition("/")[2], function, placement)
        width = dict(zip(placement.roles, names, strict=True)).get("width", "")
        writer.width = f"{width} // 2" if width and placement.grid else width
        source = writer.source(result_of(placement, writer, names, reading.text))
    except UnreadError as why:
        unread(report, str(why))
        return
    part = WrittenPart(writer.equivalent(source, source_of(subject.function)))
    # An angle in float32 is off by its position times what float32 rounds.
    rounded = longest(function) * torch.finfo(torch.float32).eps
    tolerance = rounded if judged.bound == FLOAT32_INSIDE else EXACT
    if placement.roles.count("size") > 1:
        report.coverage.append(Exercise("more rows than columns", False, "it was called with as many of both"))
    hold_part(report, part, cases_of(placement, function), tolerance=tolerance)


def hold_module(judged: Judged, subject: Subject, module: nn.Module, width: int, features_first: bool) -> None:
    """Hold a norm or a feed-forward against what torch has for it; its report receives the verdict.

    Its input has so many features; with ``features_first``, it is (batch, features, tokens).
    """
    report, reading = accepted(judged.report, subject.adapter.intended), judged.reading
    if report.verdict != "equal" or reading is None:
        return
    writer = Writer(subject.name.rpartition("/")[2], Parameters.of(module), module, *_signature(module))
    given = writer.argument
    try:
        result = reading.text(writer, Text(given, writer, ()))
        source = writer.source(result, *((".mT", ".mT") if features_first else ("", "")))
    except UnreadError as why:
        unread(report, str(why))
        return
    shared = "in torch's program each place has a copy of its own, and training would part them"
    report.notes += [f"{name} is used in several places: {shared}" for name in dict.fromkeys(writer.copied)]
    first = next(module_cases(module, width, features_first, source)).call
    if len(tensors_of(attempt(partial(module, *first.args)))) > 1:
        report.coverage.append(Exercise("what else comes back", False, "only the first tensor was compared"))
    part = WrittenPart(writer.equivalent(source, source_of(subject.function)), weights_of(module))
    tolerance = SINGLE if judged.bound == FLOAT32_INSIDE else EXACT
    hold_part(report, part, module_cases(module, width, features_first, source), tolerance=tolerance)


def _signature(module: nn.Module) -> tuple[str, bool]:
    """Write the arguments of the equivalent, as the user's code names them."""
    if isinstance(module, FunctionModule):
        return signature_of(module.function), True
    first = next(iter(inspect.signature(module.forward).parameters.values()), None)
    named = first is not None and first.kind is first.POSITIONAL_OR_KEYWORD
    return f"{first.name if first is not None and named else 'x'}: Tensor", False


def weights_of(module: nn.Module | None) -> tuple[str, ...]:
    """Name the arguments of a function that are its weights, by the names under which a module holds them."""
    return module.names if isinstance(module, FunctionModule) else ()


def module_cases(module: nn.Module, width: int, features_first: bool, source: str = "") -> Iterator[Case]:
    """List the calls that are compared; of a function with other values of what it is given as numbers too."""
    generator = torch.Generator().manual_seed(11)
    others = {}
    if isinstance(module, FunctionModule):
        numbers = inspect.signature(module.function).parameters.values()
        others = {
            x.name: 3 * x.default for x in numbers if isinstance(x.default, float) and f" {x.name}: float" in source
        }
    for words, batch, length, size, redrawn in SITUATIONS:
        x: Tensor = size * (torch.randn(batch, length, width, generator=generator, dtype=torch.float64) + 0.3)
        if redrawn is None:
            x[0, 0], x[0, 1] = 0.0, 0.5  # which a norm divides by next to nothing
        x = (x.mT if features_first else x).to(torch.get_default_dtype()).contiguous()
        named = others if redrawn is None else {}
        yield Case(Call(module, (x,), named, module, {id(x): numbered(x.shape)}), None, words, redrawn)
