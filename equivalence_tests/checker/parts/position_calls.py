"""Call a positional encoding in the ways that are met, and take its table out of what comes back."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from equivalence_tests.checker.parts.drawing import CallOfRoles, Drawn
from equivalence_tests.checker.parts.kinds import ALIKE, own_tensors
from equivalence_tests.checker.parts.readings import Observation
from equivalence_tests.checker.reach.angles import BASE, AngleForm
from equivalence_tests.checker.reach.arguments import MAX_LEN, VOCABULARY, role_of_parameter, value_for
from equivalence_tests.checker.reach.proposing import parameters_of, ranked
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reach.tracing import tensors_in

# Two samples and two tokens at the least: what is alike along an axis is distinct from what is not.
SHAPES = ((2, 5), (4, 6), (3, 8))
LONGEST = 1024
# What a module is called with.
MODULE_ROLES = (
    *(("vectors",), ("ids",), ("size",), ("positions",), ("positions of each sample",)),
    *(("vectors", "keep"), ("vectors", "padding"), (), ("vectors", "positions")),
    *(("size", "device"), ("vectors", "positions of each sample"), ("positions of each sample", "dtype")),
    ("vectors", "size"),
)
MOST_REQUIRED = 4
WORDS = {
    "vectors": "x",
    "ids": "token ids",
    "size": "a length",
    "width": "a width",
    "positions of each sample": "positions",
    "keep": "a mask, 1 = may look",
    "padding": "a mask, True = padding",
}
# Angles of later positions are less exact in float32 than what counts as equal.
MOST_ROWS = 16
AXES_OF_HEADS = (1, 2, None)  # (batch, heads, len, head_dim), (batch, len, heads, head_dim), or without heads
LOUDER = 2.0  # than the first head is the second one


@dataclass(frozen=True)
class Placement:
    """Where the table was found in what comes back.

    Args:
        observations: The numbers of the positions, and the rows of the table.
        mistakes: What is wrong with the way it is indexed.
        rotated: Whether what is observed are vectors and what came of them, by a rotation if by anything.
        roles: What each argument is.
        output: What the first call gave.
        scaling: What is made of tokens and table.
        embedding: Path of what embeds the tokens; "" for none.
        axis: Along which positions run in what comes back; None where along none.
        grid: Of a square image, what the first half of the features tell: "columns" or "rows", as the second half tells
            the others; "" for no image.
    """

    words: tuple[tuple[str, str, str], ...]
    observations: list[Observation]
    mistakes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rotated: bool = False
    roles: tuple[str, ...] = ()
    draws: tuple[Drawn, ...] = ()
    output: Tensor = field(default_factory=lambda: torch.zeros(0))
    scaling: str = ""
    embedding: str = ""
    axis: int | None = None
    grid: str = ""

    @property
    def way(self) -> CallOfRoles:
        """How it was called."""
        return CallOfRoles(tuple(("", role) for role in self.roles))


@dataclass(frozen=True)
class _Called:
    """One call: vectors that the table may have been added to, and what came back."""

    batch: int
    length: int
    x: Tensor | None
    output: Tensor


@contextmanager
def angles_joined(function: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], list[torch.Size]]]:
    """Let code give cosines and sines as one table, whose sizes are listed; a module is as it was afterwards."""
    called, met = function.forward if isinstance(function, nn.Module) else function, list[torch.Size]()

    @wraps(called)
    def joined(*args: Any, **kwargs: Any) -> Any:
        returned = called(*args, **kwargs)
        table = side_by_side(returned)
        met.extend([] if table is None else [table.shape])
        return returned if table is None else table

    if isinstance(function, nn.Module):
        with mock.patch.object(function, "forward", joined):
            yield function, met
    else:
        yield joined, met


def side_by_side(returned: Any) -> Tensor | None:
    """Lay cosines and sines side by side: two tensors, the last axis of one, or the parts of complex numbers.

    >>> side_by_side((torch.zeros(3, 2), torch.ones(3, 2))).shape, side_by_side(torch.rand(3, 2))
    (torch.Size([3, 4]), None)
    """
    both = torch.view_as_real(returned) if isinstance(returned, Tensor) and returned.is_complex() else returned
    if isinstance(both, Tensor):
        pair = [*both.unbind(-1)] if both.dim() > 2 and both.size(-1) == 2 else []
    else:
        pair = [x for x in both if isinstance(x, Tensor)] if isinstance(both, tuple | list) else []
    if len(pair) != 2 or pair[0].shape != pair[1].shape or not all(x.is_floating_point() for x in pair):
        return None
    if not bool(((pair[0].square() + pair[1].square() - 1).abs() < ALIKE).all()):
        return None
    table = both.flatten(-2) if isinstance(both, Tensor) else torch.cat(pair, -1)
    return table.flatten(0, -3) if table.dim() > 3 else table


def placements(subject: Subject, function: Callable[..., Any], like: Placement | None = None) -> Iterator[Placement]:
    """Call it in every way that is met, or as before, and say for each that works where the table was found."""
    ways = itertools.product(_widths(subject), _role_lists(function, subject))
    for width, roles in ways if like is None else [(like.draws[0].width, like.roles)]:
        way = CallOfRoles(tuple(("", role) for role in roles))
        for shapes in (SHAPES, *_whole(subject)):
            draws = [drawn_of(batch, length, width) for batch, length in shapes]
            returned = attempt(partial(_returned, way, function, draws))
            if returned is not None:
                words = " and ".join(WORDS.get(role, role.removeprefix("=")) for role in roles) or "nothing"
                for path, given, xs in _added_to(roles, function, draws):
                    called = [_Called(*one, x, y) for one, x, y in zip(shapes, xs, returned, strict=True)]
                    for found in _placed(called, words, given):
                        yield replace(found, roles=roles, draws=tuple(draws), output=returned[0], embedding=path)
                break


def _widths(subject: Subject) -> list[int]:
    """Give the widths to try: that of the table that it holds, then that of the tokens."""
    held = [x.size(-1) for x in own_tensors(subject.module) if x.dim() >= 2]
    head = subject.sizes.head_dim
    pairs = [*(2 * width for width in held[:1]), head, 2 * head]  # a table of angles is half as wide
    return list(dict.fromkeys([*held[:1], subject.sizes.embed_dim, *pairs]))


def _whole(subject: Subject) -> Iterator[tuple[tuple[int, int], ...]]:
    """Tables that are not cut to the length of the input take only inputs of their own length."""
    held = [x.squeeze() for x in own_tensors(subject.module)]
    for length in dict.fromkeys([MAX_LEN, *(x.size(0) for x in held if x.dim() == 2)]):
        if 1 < length <= LONGEST:
            yield (2, length), (3, length)


def _role_lists(function: Callable[..., Any], subject: Subject) -> Iterator[tuple[str, ...]]:
    """Say what the arguments may be: of a function, or of many, a length, a width, positions, vectors, in any order."""
    required = [p for p in parameters_of(function) if p.default is p.empty]
    if isinstance(function, nn.Module) and len(required) <= max(map(len, MODULE_ROLES)):
        yield from MODULE_ROLES
        return
    options: list[list[str]] = []
    for parameter in required[:MOST_REQUIRED]:
        known, value = value_for(parameter.name, subject.sizes)
        sized = not known or isinstance(value, tuple) or (isinstance(value, int) and value > 1)
        fixed = [*(["positions"] if isinstance(value, float) else []), f"={parameter.name}"]  # timesteps holds eps
        options.append(["size", "width", "positions", "vectors"] if sized else fixed)
    yield from ranked(options)


def drawn_of(batch: int, length: int, width: int) -> Drawn:
    """Draw ids, which no padding is among, for one call."""
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))
    return Drawn(ids, ids, torch.full((batch,), length), 0, width=width)


def _returned(way: CallOfRoles, function: Callable[..., Any], draws: list[Drawn]) -> list[Tensor]:
    """Give the table, or what it was put into, of each call."""
    found = [next(x.double() for x in way.call(function, drawn) if x.is_floating_point()) for drawn in draws]
    assert all(x.dim() in (2, 3) for x in found)
    return found


def _added_to(
    roles: tuple[str, ...], function: Callable[..., Any], draws: list[Drawn]
) -> Iterator[tuple[str, str, list[Tensor | None]]]:
    """Say what the table may have been added to: what each embedding makes of ids, or the vectors that were given."""
    modules = function.named_modules() if isinstance(function, nn.Module) and roles == ("ids",) else ()
    for path, embedding in ((path, m) for path, m in modules if isinstance(m, nn.Embedding) and m is not function):
        yield path, "embedding(ids)", [attempt(partial(embedding, drawn.first)) for drawn in draws]
    yield "", "x", [drawn.value("vectors", "") if roles[:1] == ("vectors",) else None for drawn in draws]


def _placed(called: list[_Called], words: str, added_to: str) -> Iterator[Placement]:
    """Take off the input, times each factor, and see along which axes the rest does not change."""
    for scaling in ("x + pe", "sqrt(d_model) x + pe", "pe alone"):
        rests = [_rest(one, scaling) for one in called]
        tables = [rest for rest in rests if rest is not None]
        if len(tables) < len(called):
            continue
        given = scaling.replace("x", added_to)
        for found in _along_axes(called, tables, (("takes", words, ""), ("gives", given, ""))):
            yield replace(found, scaling=scaling)
    rotated = [(one.x, one.output) for one in called if one.x is not None and one.x.shape == one.output.shape]
    if len(rotated) == len(called):
        rows = (("takes", words, ""), ("gives", f"{added_to}, rotated", ""))
        yield Placement(rows, rotated, rotated=True)


def _rest(called: _Called, scaling: str) -> Tensor | None:
    """What is left as (batch, len, features), with 1 for an axis that it does not have; None where shapes forbid it."""
    output = called.output
    if scaling != "pe alone":
        if called.x is None or called.x.shape != output.shape:
            return None
        return output - (output.size(-1) ** 0.5 if scaling.startswith("sqrt") else 1.0) * called.x
    if output.dim() == 3:
        return output
    return output[:, None] if output.size(0) == called.batch != called.length else output[None]


def _along_axes(called: list[_Called], rests: list[Tensor], words: tuple[Any, ...]) -> Iterator[Placement]:
    same_samples = all(_alike(rest, 0) for rest in rests)
    same_tokens = all(_alike(rest, 1) for rest in rests)
    if same_samples and same_tokens and all(bool((rest == 0).all()) for rest in rests):
        yield Placement(words, [_numbered(r[0]) for r in rests])
    elif same_samples and same_tokens:
        lengths, batches = [c.length for c in called], [c.batch for c in called]
        rows_of = [(lengths, "length"), ([n - 1 for n in lengths], "last token"), (batches, "number of samples")]
        if "mask" not in words[0][1]:  # read the other way round, a mask hides all positions
            rows_of.append(([0] * len(called), "first token"))
        if not words[0][1].startswith(("x", "token ids")):
            rows_of.clear()  # nothing else has tokens
        for number, name in rows_of:
            observations = [(torch.tensor([float(n)]), r[:1, 0]) for n, r in zip(number, rests, strict=True)]
            rows = (*words, ("positions run along", f"no axis: one row, that of the {name}, for every token", ""))
            yield Placement(rows, observations, ("position_one_row",))
    elif same_samples:
        flat = all(one.output.dim() == 2 for one in called)
        axes = "the rows of the table" if flat else "axis 1: (batch, len, features)"
        yield Placement((*words, ("positions run along", axes, "")), [_numbered(r[0]) for r in rests], axis=1)
        for first in ("columns", "rows"):
            tables = [_of_a_grid(r[0], first) for r in rests]
            if found := [_numbered(x) for x in tables if x is not None][: len(tables) * (None not in tables)]:
                rows = (*words, ("positions run along", f"{axes}; {first} first, half of the features each", ""))
                yield Placement(rows, found, axis=1, grid=first)
    elif same_tokens:
        rows = (*words, ("positions run along", "axis 0: (len, batch, features)", ""))
        note = "positions run along the first axis: right only where that is the sequence and not the batch"
        yield Placement(rows, [_numbered(r[:, 0]) for r in rests], notes=(note,), axis=0)


def _of_a_grid(table: Tensor, first: str) -> Tensor | None:
    """Give the table of columns and rows that each tell half of the features of a square image; None for no such."""
    side = math.isqrt(len(table))
    if side < 2 or side**2 != len(table) or table.size(-1) % 2:
        return None
    grid = table.view(side, side, -1)
    of_columns, of_rows = (grid if first == "columns" else grid.transpose(0, 1)).chunk(2, -1)
    rows, own = of_rows[:, 0], of_columns[0]
    whole = bool((of_columns == own).all()) and bool((of_rows == rows[:, None]).all())
    return own if whole and torch.equal(own, rows) else None


def _alike(rest: Tensor, axis: int) -> bool:
    """Whether nothing changes along an axis."""
    return float((rest - rest.narrow(axis, 0, 1)).abs().max()) <= ALIKE * max(1.0, float(rest.abs().max()))


def _numbered(table: Tensor) -> Observation:
    return torch.arange(float(min(table.size(0), MOST_ROWS))), table[:MOST_ROWS]


# ------------------------------------------------------------------------------------------- angles that are given
def rotating(function: Callable[..., Any]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Give functions of (batch, len, head_dim) that call one which takes heads, and angles if it names any."""
    required = [p.name for p in parameters_of(function) if p.default is p.empty]
    turning = [name for name in required if role_of_parameter(name.lower()) == "angles"]
    if not 1 <= len(required) - len(turning) <= 2:
        return
    for form, axis in itertools.product(AngleForm.all() if turning else [None], AXES_OF_HEADS):
        if form is not None or axis is not None:
            yield _of_vectors(function, required, {*turning}, form, axis)


def _of_vectors(
    function: Callable[..., Any], names: list[str], turning: set[str], form: AngleForm | None, axis: int | None
) -> Callable[[Tensor], Tensor]:
    louder = {name: float(place) for place, name in enumerate((x for x in names if x not in turning), 1)}

    def rotated(x: Tensor) -> Tensor:
        heads = x if axis is None else torch.stack((x, LOUDER * x), axis)
        given = {name: form.build(name, x[0], BASE) for name in turning if form is not None}
        given |= {name: loud * heads for name, loud in louder.items()}
        returned = tensors_in((function(*(given[name] for name in names)),))
        pairs = zip(returned, louder.values(), strict=True)
        first, *others = (one for y, loud in pairs for one in _heads(y / loud, axis))
        if not all(torch.allclose(first, one, rtol=1e-5, atol=1e-6) for one in others):
            raise ValueError("the output is not a rotation of each head")
        return first

    return rotated


def _heads(x: Tensor, axis: int | None) -> list[Tensor]:
    """Give what came of each head, all equally loud."""
    return [x] if axis is None else [x.select(axis, 0), x.select(axis, 1) / LOUDER]
