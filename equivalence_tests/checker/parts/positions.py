"""Every positional encoding: sinusoids with their known mistakes, learned tables, rotations and tables of angles.

Only the table is compared: ``position_calls`` subtracts the input from the output.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.equivalent.writer import Text, Writer
from equivalence_tests.checker.parts.kinds import own_tensors
from equivalence_tests.checker.parts.readings import PartReading, Row
from equivalence_tests.checker.reach.angles import PLACES, base_of
from equivalence_tests.checker.reach.state import settings_of

OFFSETS = (0, 1, 2)  # of the first row that a learned table gives
BASES = (10000.0, 1000.0, 100.0, 100000.0)
# What stands on even and odd features, or in the first and the second half.
Map = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, tuple[Map, Map, bool, tuple[str, ...]]] = {
    "sine and cosine interleaved": (torch.sin, torch.cos, True, ()),
    "sines, then cosines": (torch.sin, torch.cos, False, ()),
    "cosine and sine interleaved": (torch.cos, torch.sin, True, ("position_sine_cosine_swapped",)),
    "cosines, then sines": (torch.cos, torch.sin, False, ("position_sine_cosine_swapped",)),
    "sines everywhere": (torch.sin, torch.sin, True, ("position_cosine_missing",)),
}
# Exponent of the base for pair i of a width d, for the first and second of the pair, and what is wrong with it.
Exponents = Callable[[Tensor, int], tuple[Tensor, Tensor]]
WRONG = ("position_exponent_wrong",)
EXPONENTS: dict[str, tuple[Exponents, tuple[str, ...]]] = {
    "2i / d": (lambda i, d: (2 * i / d, 2 * i / d), ()),
    "i / d": (lambda i, d: (i / d, i / d), WRONG),
    "4i / d": (lambda i, d: (4 * i / d, 4 * i / d), WRONG),
    "2i / d for the sine and (2i + 1) / d for the cosine": (lambda i, d: (2 * i / d, (2 * i + 1) / d), WRONG),
    "4i / d for the sine and 2(2i + 1) / d for the cosine": (lambda i, d: (4 * i / d, 2 * (2 * i + 1) / d), WRONG),
    "0": (lambda i, d: (0 * i, 0 * i), WRONG),
    "i / (d / 2 - 1)": (lambda i, d: (i / _steps_of(d), i / _steps_of(d)), ("position_timescale_of_tensor2tensor",)),
}
SHARED_EXPONENTS = {name: law for name, law in EXPONENTS.items() if "cosine" not in name}  # by sine and cosine
SINUSOIDS = {"sine and cosine interleaved": "", "sines, then cosines": ', "concatenated"'}  # as builtin has them
NOTE = "torch.nn has no rotary positions: the angles are pos / base^(2i / d)"


def _steps_of(width: Any) -> Any:
    """How many steps there are from the first frequency to the last."""
    return Text(f"max({width} // 2 - 1, 1)", width.writer) if isinstance(width, Text) else max(width // 2 - 1, 1)


# What is done to the numbers 0, 1, ... of the positions.
NUMBERINGS: dict[str, tuple[Map, tuple[str, ...]]] = {
    "from 0": (lambda p: p, ()),
    "from 1": (lambda p: p + 1, ("position_starts_at_one",)),
}

# What is made of the cosines and sines of all angles, and how many times as wide as a head it is.
Lay = Callable[[Any, Any], Any]
ANGLE_LAYOUTS: dict[str, tuple[Lay, int]] = {
    "cosines, then sines": (lambda cos, sin: torch.cat((cos, sin), -1), 1),
    "the cosine and the sine of each angle": (lambda cos, sin: torch.stack((cos, sin), -1).flatten(-2), 1),
    "cosines for halves of a head, then sines": (lambda cos, sin: torch.cat((cos, cos, sin, sin), -1), 2),
    "cosines for pairs of neighbours, then sines": (
        lambda cos, sin: torch.cat((cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)), -1),
        2,
    ),
}
# How elements are paired: their angles laid out for each of them, and their quarter turn.
PAIRS: dict[str, tuple[Map, Map]] = {
    "halves of a head": (PLACES["halves"], lambda x: torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1)),
    "pairs of neighbours": (PLACES["pairs"], lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)),
}


def rotary_readings(module: nn.Module | None, width: int) -> Iterator[PartReading]:
    """Read a rotation of vectors by their positions in every way; the module may state a base of its own."""
    options = itertools.product(SHARED_EXPONENTS.items(), _bases_of(module), PAIRS.items(), PAIRS.items(), (1, -1))
    for (exponent, (law, wrong)), base, (pairs, (_, turn)), (angled, (laid_out, _)), sign in options:
        of_rotation = {"rotary_mixed": pairs != angled, "rotary_reversed": sign < 0}
        mistakes = (*wrong, *(name for name, met in of_rotation.items() if met))
        steps = base ** -law(torch.arange(width // 2, dtype=torch.float64), width)[0]
        words = (("rotates", pairs, "torch.nn does not"), ("base", f"{base:g}", ""))
        formula = partial(_rotated, turn, laid_out, sign * steps)
        written = None if mistakes else partial(rotation, pairs, base, width)
        yield PartReading(formula, words, mistakes, (NOTE,), {"exponent": exponent}, written)


def _bases_of(module: nn.Module | None) -> Iterable[float]:
    return dict.fromkeys((BASES[0], base_of(module)))


def _rotated(turn: Map, laid_out: Map, steps: Tensor, x: Tensor) -> Tensor:
    angles = laid_out(torch.arange(float(x.size(-2)), dtype=steps.dtype)[:, None] * steps)
    return x * angles.cos() + turn(x) * angles.sin()


def angle_readings(module: nn.Module | None, width: int) -> Iterator[PartReading]:
    """Read cosines and sines, side by side in a table of this width, in every way; the module may state a base.

    The formulas take the numbers of the positions.
    """
    layouts = itertools.product(ANGLE_LAYOUTS.items(), (False, True))
    options = itertools.product(_bases_of(module), layouts, SHARED_EXPONENTS.items(), NUMBERINGS.items())
    for base, ((layout, (lay, times)), turned), (exponent, (law, wrong)), (numbers, (number, shifted)) in options:
        of_sines = layout.replace("cosine", "-").replace("sine", "cosine").replace("-", "sine")
        order = ("order", of_sines if turned else layout, "torch.nn has none")
        words = (order, ("positions", numbers, ""), *_said_base(base))
        table = partial(_angle_table, lay, turned, law, base, number)
        written = partial(sinusoids, "", base, table, width // times)
        formula, mistakes = partial(table, width // times), (*wrong, *shifted)
        yield PartReading(formula, words, mistakes, (NOTE,), {"exponent": exponent}, written=written)


def _said_base(base: float) -> tuple[Row, ...]:
    return (("base", f"{base:g}", "10000"),) if base != BASES[0] else ()


def _angle_table(lay: Lay, turned: bool, law: Exponents, base: float, number: Map, width: Any, given: Any) -> Any:
    """Give the table's rows at these positions, as a tensor or as text; ``turned`` puts the sines first."""
    positions, pairs = kept("positions", number(given[..., None])), kept("pairs", numbers_to(width // 2))
    angles = kept("angles", positions * base ** -law(pairs, width)[0])
    return lay(*((angles.sin(), angles.cos()) if turned else (angles.cos(), angles.sin())))


def position_readings(module: nn.Module | None, width: int) -> Iterator[PartReading]:
    """Read a table in every way: as one that the module learns, then as sinusoids, times a scale that it may learn.

    The formulas take the numbers of the positions.
    """
    computed = set() if module is None else {id(x) for x in settings_of(module) if x.dim() > 1}
    named = {} if module is None else dict(module.named_parameters())
    parameters = {n: p.detach() for n, p in named.items() if id(p) not in computed}
    learned = [(name, p.reshape(-1, width)) for name, p in parameters.items() if p.dim() >= 2 and p.size(-1) == width]
    note = "a learned table: its values cannot be wrong, only the way it is indexed was checked"
    for (name, table), offset in itertools.product(learned, OFFSETS):
        first = f", from row {offset} on" if offset else ""
        words = (("table", f"learned: {name}{first}", "nn.Embedding of the positions"),)
        written = partial(learnt_table, name, width, offset)
        yield PartReading(partial(_rows, table, offset), words, notes=(note,), written=written)
    yield PartReading(lambda p: torch.zeros(len(p), width), (("table", "none", ""),), ("position_not_added",))
    scales = {"": torch.ones(())} | {name: p.flatten()[0] for name, p in parameters.items() if p.numel() == 1}
    zero_first = module is None or _has_a_row_of_zeros(module)
    for (scale, factor), zeroed in itertools.product(scales.items(), (False, True) if zero_first else (False,)):
        yield from _sinusoids(width, scale, factor, zeroed)


def _rows(table: Tensor, offset: int, positions: Tensor) -> Tensor:
    return table[positions.long() + offset]


def _has_a_row_of_zeros(module: nn.Module) -> bool:
    tables = [x for x in own_tensors(module) if x.dim() >= 2]
    return any(bool((x.reshape(-1, x.size(-1)) == 0).all(-1).any()) for x in tables)


def _sinusoids(width: int, scale: str, factor: Tensor, zeroed: bool) -> Iterator[PartReading]:
    options = itertools.product(BASES, LAYOUTS.items(), EXPONENTS.items(), NUMBERINGS.items())
    for base, (layout, (one, two, interleaved, swapped)), (exponent, law), (numbers, (number, shifted)) in options:
        exponents, wrong = law
        mistakes = (*wrong, *swapped, *shifted, *(() if base == BASES[0] else ("position_base_other",)))
        words = (
            ("order", layout, "torch.nn has none"),
            ("positions", numbers + (", with row 0 all zeros for padding" if zeroed else ""), ""),
            *((("scaled by", scale, ""),) if scale else ()),
            *_said_base(base),
        )
        table = partial(_numbered, partial(_table, (one, two), interleaved, exponents, base), number, zeroed)
        formula = partial(_scaled, factor if scale else None, partial(table, width))
        ours = mistakes == () and exponent == "2i / d" and not zeroed
        written = partial(_written, scale, partial(sinusoids, layout if ours else "", base, table, width))
        yield PartReading(formula, words, mistakes, facts={"exponent": exponent}, written=written)


def _scaled(factor: Any, table: Map, positions: Tensor) -> Tensor:
    return table(positions) if factor is None else factor * table(positions)


def _written(scale: str, table: Callable[[Writer, Text], Text], writer: Writer, count: Text) -> Text:
    """Write the program of a table, times its learnt scale if there is one."""
    found = table(writer, count)
    return writer.parameter(scale).flatten()[0] * found if scale else found


def _numbered(table: Callable[[Any, Any], Any], number: Map, zeroed: bool, width: Any, given: Any) -> Any:
    """Give the rows at these positions, (len, width), as a tensor or as text; ``zeroed`` makes row 0 all zeros."""
    given = kept("given", given) if zeroed else given
    rows = table(width, number(given[..., None]))
    return rows * given[..., None].clamp(max=1) if zeroed else rows


def _table(
    functions: tuple[Map, Map], interleaved: bool, exponents: Exponents, base: float, width: Any, positions: Any
) -> Any:
    positions, pairs = kept("positions", positions), kept("pairs", numbers_to((width + 1) // 2))
    powers = zip(("first", "second"), exponents(pairs, width), strict=True)
    angles = [kept(name, positions * base**-power) for name, power in powers]
    one, two = (function(x) for function, x in zip(functions, angles, strict=True))
    if interleaved:
        return torch.stack((one, two), -1).flatten(-2)[..., :width]
    return torch.cat((one, two[..., : width // 2]), -1)


# ------------------------------------------------------------------------------------------- as text
def learnt_table(name: str, width: int, offset: int, writer: Writer, count: Text) -> Text:
    """Write the rows of a learned table."""
    shape = (writer.parameters.named[name].numel() // width, width)
    table, end = writer.parameter(name, shape), count + offset if offset else count
    return table.made(f"{table[end]}", count.chain) if count.chain else table[offset or None : end]


def kept(name: str, x: Any) -> Any:
    """Assign an expression to a variable of this name in the written program; return tensors unchanged."""
    if not isinstance(x, Text):
        return x
    x.writer.lines.append(f"{name} = {x}")
    return Text(name, x.writer, x.chain)


def numbers_to(count: Any) -> Any:
    """Give 0, 1, ..., count - 1 in float64, as a tensor or as text of the written program."""
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
