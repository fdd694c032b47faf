"""Write a positional encoding down: sinusoids, a learned table or a rotation, and how it meets the tokens."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import numbered
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.comparing import Case
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.writer import Text, Writer, signature_of
from equivalence_tests.checker.parts.drawing import KINDS, CallOfRoles
from equivalence_tests.checker.parts.kinds import own_tensors
from equivalence_tests.checker.parts.position_calls import LONGEST, Placement, drawn_of
from equivalence_tests.checker.reach.arguments import Sizes, value_for

LONGER = 16  # tokens
SINUSOIDS = {"sine and cosine interleaved": "", "sines, then cosines": ', "concatenated"'}


def writer_of(name: str, function: Callable[..., Any], placement: Placement) -> tuple[Writer, list[str]]:
    """Begin to write, and name the arguments that have a role."""
    module = function if isinstance(function, nn.Module) else None
    parameters = inspect.signature(function if module is None else module.forward).parameters.values()
    names = [one.name for one in parameters if module or one.default is one.empty][: len(placement.roles)]
    if len(names) < len(placement.roles):
        raise UnreadError("its arguments cannot be named")
    kinds = {name: _kind(role) for name, role in zip(names, placement.roles, strict=True)}
    text = ", ".join(f"{name}: {kind}" for name, kind in kinds.items()) if module else signature_of(function, kinds)
    return Writer(name, Parameters.of(module), module or nn.Module(), text, module is None), names


def _kind(role: str) -> str:
    return type(value_for(role[1:], Sizes())[1]).__name__ if role.startswith("=") else KINDS.get(role, "Tensor")


def result_of(
    placement: Placement, writer: Writer, names: Sequence[str], table: Callable[[Writer, Text], Text]
) -> Text:
    """Write what comes back, where ``table`` writes the table of so many positions, or rotates vectors.

    Raises:
        UnreadError: If the table meets the tokens in a way that cannot be written.
    """
    named = dict(zip(placement.roles, names, strict=True))
    first = Text(named.get("vectors", named.get("ids", "")), writer)
    if placement.rotated:
        return table(writer, first)
    if placement.axis is None:
        raise UnreadError("its table runs along no axis of the tokens")
    rows = table(writer, count := _count(placement, named, writer))
    if placement.grid:
        writer.lines.append(f"table = {rows}")
        halves = f"table.expand({count}, -1, -1)", f"table[:, None].expand(-1, {count}, -1)"
        columns, other = halves if placement.grid == "columns" else halves[::-1]
        rows = Text(f"torch.cat(({columns}, {other}), -1).flatten(0, 1)", writer, rows.chain)
    if placement.scaling == "pe alone":
        return _alone(placement, rows, first)
    given = first
    if placement.embedding:
        writer.lines.append(f"tokens = {writer.called(first, placement.embedding)}")
        given = Text("tokens", writer)
    rows = rows[:, None] if placement.axis == 0 else rows
    rows = rows if rows.expression.startswith("self.") else rows.to(given)
    scaled = given.size(-1) ** 0.5 * given if placement.scaling.startswith("sqrt") else given
    found: Text = given * rows if placement.scaling == "x * pe" else scaled + rows
    return found


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


# ------------------------------------------------------------------------------------------- tables
def learnt_table(name: str, width: int, offset: int, writer: Writer, count: Text) -> Text:
    """Write the rows of a learned table."""
    shape = (writer.parameters.named[name].numel() // width, width)
    table, end = writer.parameter(name, shape), count + offset if offset else count
    return table.made(f"{table[end]}", count.chain) if count.chain else table[offset or None : end]


def kept(name: str, x: Any) -> Any:
    """Give a step of a table a name where the table is written down."""
    if not isinstance(x, Text):
        return x
    x.writer.lines.append(f"{name} = {x}")
    return Text(name, x.writer, x.chain)


def numbers_to(count: Any) -> Any:
    """Give 0, 1, ... in float64, or write them down."""
    if isinstance(count, Text):
        return Text(f"torch.arange({count}, dtype=torch.float64)", count.writer)
    return torch.arange(count, dtype=torch.float64)


def sinusoids(
    layout: str, base: float, table: Callable[[Any, Any], Any], width: int, writer: Writer, count: Text
) -> Text:
    """Write a table of sinusoids for so many positions, or for these: builtin's where it has the layout."""
    wide = Text(writer.width or str(width), writer)
    if layout in SINUSOIDS and not count.chain:
        writer.imports = ["from builtin import sinusoidal_encoding"]
        said = f", base={writer.number(base)}" if base != 10000.0 else ""
        return Text(f"sinusoidal_encoding({count}, {wide}{SINUSOIDS[layout]}{said})", writer)
    found: Text = table(wide, count.double() if count.chain else numbers_to(count))
    return Text(f"{found}", writer, count.chain)


def rotation(pairs: str, base: float, width: int, writer: Writer, x: Text) -> Text:
    """Write a rotation by position: builtin's."""
    writer.imports = ["from builtin import RotaryEmbedding"]
    said = f", base={base!r}" if base != 10000.0 else ""
    pairing = ', pairing="halves"' if pairs == "halves of a head" else ""
    made = f"RotaryEmbedding({width}{said}{pairing})"
    if writer.is_function:
        return Text(f"{made.replace(str(width), f'{x}.size(-1)', 1)}({x})", writer)
    writer.made["rotary"] = made
    return Text(f"self.rotary({x})", writer)


# ------------------------------------------------------------------------------------------- calls
def cases_of(placement: Placement, function: Callable[..., Any]) -> Iterator[Case]:
    """List the calls that are compared."""
    module = function if isinstance(function, nn.Module) else None
    way, width = CallOfRoles(tuple(("", role) for role in placement.roles)), placement.draws[0].width
    more = [drawn_of(2, LONGER, width), drawn_of(1, longest(function), width)]
    for place, drawn in enumerate([*placement.draws, *more]):
        args = tuple(drawn.value(role, way.layout) for _, role in way.roles)
        seeds = {id(x): numbered(x.shape) for x in args if isinstance(x, Tensor) and x.is_floating_point()}
        words = f"{drawn.first.size(0)} of {drawn.first.size(1)} tokens"
        yield Case(Call(function, args, {}, module, seeds), None, words, 7 + place if place < 2 else None)


def longest(function: Callable[..., Any]) -> int:
    """Say how many positions are compared: as many as it holds, or some more than were read."""
    held = [x.squeeze() for x in own_tensors(function)] if isinstance(function, nn.Module) else []
    return min([x.size(0) for x in held if x.dim() == 2 and x.size(0) > LONGER] or [40], key=lambda n: abs(n - LONGEST))
