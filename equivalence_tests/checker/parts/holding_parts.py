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
from equivalence_tests.checker.equivalent.comparing import NO_GRADIENTS, Case
from equivalence_tests.checker.equivalent.deciding import all_gradients_stopped, unread
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import EXACT, SINGLE, WrittenPart, hold_part, tensors_of
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.writer import Text, Writer, signature_of
from equivalence_tests.checker.intended import accepted
from equivalence_tests.checker.parts.drawing import KINDS
from equivalence_tests.checker.parts.functions import FunctionModule
from equivalence_tests.checker.parts.kinds import own_tensors
from equivalence_tests.checker.parts.position_calls import LONGEST, Placement, drawn_of
from equivalence_tests.checker.parts.readings import Judged
from equivalence_tests.checker.reach.arguments import Sizes, value_for
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import source_of

LONGER = 16  # tokens
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
        writer, named = _writer_of(subject.name.rpartition("/")[2], function, placement)
        width = named.get("width", "")
        writer.width = f"{width} // 2" if width and placement.grid else width
        source = writer.source(_result_of(placement, writer, named, reading.text))
    except UnreadError as why:
        unread(report, str(why))
        return
    part = WrittenPart(writer.equivalent(source, source_of(subject.function)))
    # An angle in float32 is off by its position times what float32 rounds.
    rounded = _longest(function) * torch.finfo(torch.float32).eps
    tolerance = rounded if judged.bound == FLOAT32_INSIDE else EXACT
    if placement.roles.count("size") > 1:
        report.coverage.append(Exercise("more rows than columns", False, "it was called with as many of both"))
    worst = hold_part(report, part, cases_of(placement, function), tolerance=tolerance)
    if worst is not None and worst.what == NO_GRADIENTS and not placement.rotated:
        all_gradients_stopped(report, next(cases_of(placement, function)).call.run(read=False))


def _writer_of(name: str, function: Callable[..., Any], placement: Placement) -> tuple[Writer, dict[str, str]]:
    """Begin to write, and name the arguments by their roles."""
    module = function if isinstance(function, nn.Module) else None
    parameters = inspect.signature(function if module is None else module.forward).parameters.values()
    names = [one.name for one in parameters if module or one.default is one.empty][: len(placement.roles)]
    if len(names) < len(placement.roles):
        raise UnreadError("its arguments cannot be named")
    kinds = {name: _kind(role) for name, role in zip(names, placement.roles, strict=True)}
    text = ", ".join(f"{name}: {kind}" for name, kind in kinds.items()) if module else signature_of(function, kinds)
    writer = Writer(name, Parameters.of(module), module or nn.Module(), text, module is None)
    return writer, dict(zip(placement.roles, names, strict=True))


def _kind(role: str) -> str:
    return type(value_for(role[1:], Sizes())[1]).__name__ if role.startswith("=") else KINDS.get(role, "Tensor")


def _result_of(
    placement: Placement, writer: Writer, named: dict[str, str], table: Callable[[Writer, Text], Text]
) -> Text:
    """Write what comes back, where ``table`` writes the table of so many positions, or rotates vectors.

    Raises:
        UnreadError: If the table meets the tokens in a way that cannot be written.
    """
    first = Text(named.get("vectors", named.get("ids", "")), writer)
    if placement.rotated:
        return table(writer, first)
    if placement.axis is None:
        raise UnreadError("its table does not run along the tokens")
    rows = table(writer, count := _count(placement, named, writer))
    if placement.grid:
        writer.lines.append(f"table = {rows}")
        halves = f"table.expand({count}, -1, -1)", f"table[:, None].expand(-1, {count}, -1)"
        columns, other = halves if placement.grid == "columns" else halves[::-1]
        rows = Text(f"torch.cat(({columns}, {other}), -1).flatten(0, 1)", writer, rows.chain)
    if placement.scaling == "pe alone":
        return _alone(placement, rows, first)
    if placement.embedding:
        writer.lines.append(f"tokens = {writer.called(first, placement.embedding)}")
        first = Text("tokens", writer)
    rows = rows[:, None] if placement.axis == 0 else rows
    rows = rows if rows.expression.startswith("self.") else rows.to(first)
    scaled: Text = first.size(-1) ** 0.5 * first if placement.scaling.startswith("sqrt") else first
    return scaled + rows


def _count(placement: Placement, named: dict[str, str], writer: Writer) -> Text:
    """Write how many positions there are; the positions themselves where they are given."""
    for role in ("positions", "positions of each sample"):
        if role in named:
            return Text(named[role], writer, ("given",))
    if "size" in named:
        return Text(named["size"], writer)
    tokens = named.get("vectors", named.get("ids", ""))
    axis = 1 if placement.axis == 1 else 0
    return Text(f"{tokens}.size({axis})" if tokens else str(placement.observations[0][1].size(0)), writer)


def _alone(placement: Placement, rows: Text, first: Text) -> Text:
    output, batch = placement.output, placement.draws[0].first.size(0)
    if output.dim() == 2 or rows.chain == ("given",):
        return rows
    axis = 0 if placement.axis == 1 else 1
    laid = rows[None] if axis == 0 else rows[:, None]
    if output.size(axis) == 1 or not first.expression:
        return laid
    if output.size(axis) != batch:
        raise UnreadError("its table is repeated in a way that cannot be written down")
    found: Text = laid.expand(*((first.size(0), -1, -1) if axis == 0 else (-1, first.size(0), -1)))
    return found


def cases_of(placement: Placement, function: Callable[..., Any]) -> Iterator[Case]:
    """List the calls that are compared."""
    module = function if isinstance(function, nn.Module) else None
    width = placement.draws[0].width
    more = [drawn_of(2, LONGER, width), drawn_of(1, _longest(function), width)]
    for place, drawn in enumerate([*placement.draws, *more]):
        args = tuple(drawn.value(role, placement.way.layout) for role in placement.roles)
        seeds = {id(x): numbered(x.shape) for x in args if isinstance(x, Tensor) and x.is_floating_point()}
        words = f"{drawn.first.size(0)} of {drawn.first.size(1)} tokens"
        yield Case(Call(function, args, {}, module, seeds), None, words, 7 + place if place < 2 else None)


def _longest(function: Callable[..., Any]) -> int:
    """Say how many positions are compared: as many as it holds, or some more than were read."""
    held = [x.squeeze() for x in own_tensors(function)]
    return min([x.size(0) for x in held if x.dim() == 2 and x.size(0) > LONGER] or [40], key=lambda n: abs(n - LONGEST))


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
    shared = "in torch's program each place has a copy of its own, and training would make them differ"
    report.notes += [f"{name} is used in several places: {shared}" for name in dict.fromkeys(writer.copied)]
    first = next(module_cases(module, width, features_first, source)).call
    if len(tensors_of(attempt(partial(module, *first.args)))) > 1:
        report.coverage.append(Exercise("the other outputs", False, "only the first tensor was compared"))
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
    asked = inspect.signature(module.function).parameters.values() if isinstance(module, FunctionModule) else ()
    numbers = (x for x in asked if isinstance(x.default, float) and f" {x.name}: float" in source)
    others = {x.name: 3 * x.default for x in numbers}
    for words, batch, length, size, redrawn in SITUATIONS:
        x: Tensor = size * (torch.randn(batch, length, width, generator=generator, dtype=torch.float64) + 0.3)
        if redrawn is None:
            x[0, 0], x[0, 1] = 0.0, 0.5  # which a norm divides by next to nothing
        x = (x.mT if features_first else x).to(torch.get_default_dtype()).contiguous()
        named = others if redrawn is None else {}
        yield Case(Call(module, (x,), named, module, {id(x): numbered(x.shape)}), None, words, redrawn)
