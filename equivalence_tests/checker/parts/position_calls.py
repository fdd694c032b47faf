"""Call a positional encoding in the ways that are met, and take its table out of what comes back."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.parts.kinds import ALIKE, own_tensors
from equivalence_tests.checker.parts.readings import Observation
from equivalence_tests.checker.reach.construction import MAX_LEN, VOCABULARY, value_for
from equivalence_tests.checker.reach.subject import Subject

__all__ = ["Placement", "placements"]

# Two samples and two tokens at the least: what is alike along an axis is told from what is not.
SHAPES = ((2, 5), (4, 6), (3, 8))
LONGEST = 1024
# Angles of later positions are less exact in float32 than what counts as equal.
MOST_ROWS = 16


@dataclass(frozen=True)
class Placement:
    """Where the table was found in what comes back.

    Args:
        words: Rows for what was found.
        observations: The numbers of the positions, and the rows of the table.
        mistakes: What is wrong with the way it is indexed.
        notes: What should be known about it.
        again: Makes the first of the calls once more.
    """

    words: tuple[tuple[str, str, str], ...]
    observations: list[Observation]
    mistakes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    again: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class _Called:
    """One call: vectors that the table may have been added to, what came back, and the call itself."""

    batch: int
    length: int
    x: Tensor | None
    output: Tensor
    again: Callable[[], Any]


def widths_of(subject: Subject) -> list[int]:
    """Give the widths to try: that of the table that it holds, then that of the tokens."""
    module = subject.module
    held = [] if module is None else [x.size(-1) for x in own_tensors(module) if x.dim() >= 2]
    return list(dict.fromkeys([*held[:1], subject.sizes.embed_dim]))


def placements(subject: Subject, function: Callable[..., Any]) -> Iterator[Placement]:
    """Call it in every way that is met.

    Args:
        subject: For its sizes and its source.
        function: The module, in float64, or the function.

    Yields:
        For each way that works, where the table was found.
    """
    for width, call in itertools.product(widths_of(subject), _calls(function, subject)):
        for shapes in (SHAPES, *_whole(subject)):
            called = [made for batch, length in shapes if (made := _attempt(call, batch, length, width)) is not None]
            if len(called) == len(shapes):
                yield from _placed(called, call)
                break


def _whole(subject: Subject) -> Iterator[tuple[tuple[int, int], ...]]:
    """Tables that are not cut to the length of the input take only inputs of their own length."""
    held = [] if subject.module is None else [x.squeeze() for x in own_tensors(subject.module)]
    for length in dict.fromkeys([MAX_LEN, *(x.size(0) for x in held if x.dim() == 2)]):
        if 1 < length <= LONGEST:
            yield (2, length), (3, length)


@dataclass(frozen=True)
class _Call:
    """One way to call: what it takes, in words, and what is passed for a batch, a length and a width."""

    words: str
    function: Callable[..., Any]
    arguments: Callable[[int, int, int], tuple[Any, ...]]
    embedding: nn.Embedding | None = None


def _calls(function: Callable[..., Any], subject: Subject) -> Iterator[_Call]:
    if not isinstance(function, nn.Module):
        yield from _function_calls(function, subject)
        return
    yield _Call("x", function, lambda b, n, d: (_vectors(b, n, d),))
    for known in (*(m for m in function.modules() if isinstance(m, nn.Embedding)), None):
        yield _Call("token ids", function, lambda b, n, d: (_ids(b, n),), known)
    yield _Call("a length", function, lambda b, n, d: (n,))
    yield _Call("positions", function, lambda b, n, d: (torch.arange(n),))
    yield _Call("positions", function, lambda b, n, d: (torch.arange(n).expand(b, n),))
    yield _Call("x and a mask, 1 = may look", function, lambda b, n, d: (_vectors(b, n, d), torch.ones(b, n)))
    padding = torch.zeros(1, dtype=torch.bool)
    yield _Call("x and a mask, True = padding", function, lambda b, n, d: (_vectors(b, n, d), padding.expand(b, n)))
    yield _Call("nothing", function, lambda b, n, d: ())


def _function_calls(function: Callable[..., Any], subject: Subject) -> Iterator[_Call]:
    """A function takes a length and a width, in either order, or vectors."""
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    options: list[list[str]] = []
    for parameter in required[:4]:
        known, value = value_for(parameter.name, subject.sizes)
        sized = not known or (isinstance(value, int) and value > 1)
        fixed = ["positions", parameter.name] if isinstance(value, float) else [parameter.name]  # timesteps holds eps
        options.append(["a length", "a width", "positions", "x"] if sized else fixed)
    for roles in itertools.product(*options):

        def arguments(b: int, n: int, d: int, roles: tuple[str, ...] = roles) -> tuple[Any, ...]:
            given = {"a length": n, "a width": d, "positions": torch.arange(n), "x": _vectors(b, n, d)}
            return tuple(given[r] if r in given else value_for(r, subject.sizes)[1] for r in roles)

        yield _Call(" and ".join(roles), function, arguments)


def _vectors(batch: int, length: int, width: int) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(length))


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def _attempt(call: _Call, batch: int, length: int, width: int) -> _Called | None:
    try:
        with torch.no_grad():
            arguments = call.arguments(batch, length, width)

            def again() -> Any:
                return call.function(*(a.clone() if isinstance(a, Tensor) else a for a in arguments))

            returned = again()
            x = arguments[0] if arguments and isinstance(arguments[0], Tensor) else None
            if x is not None and not x.is_floating_point():
                x = None if call.embedding is None else call.embedding(x)
            output = _as_tensor(returned)
    except Exception:  # the user's code may raise anything where it is called in another way than it is meant to be
        return None
    return None if output is None or output.dim() not in (2, 3) else _Called(batch, length, x, output, again)


def _as_tensor(returned: Any) -> Tensor | None:
    """The first tensor or array of numbers that comes back."""
    if isinstance(returned, tuple | list) and returned:
        return _as_tensor(returned[0])
    try:
        x = torch.as_tensor(returned)
    except (TypeError, ValueError, RuntimeError):
        return None
    return x.detach().double() if x.is_floating_point() else None


def _placed(called: list[_Called], call: _Call) -> Iterator[Placement]:
    """Take off the input, times each factor, and see along which axes the rest does not change."""
    for scaling in ("x + pe", "sqrt(d_model) x + pe", "pe alone", "x * pe"):
        rests = [_rest(one, scaling) for one in called]
        tables = [rest for rest in rests if rest is not None]
        if len(tables) < len(called):
            continue
        given = scaling if call.embedding is None else scaling.replace("x", "embedding(ids)")
        for found in _along_axes(called, tables, (("takes", call.words, ""), ("gives", given, ""))):
            multiplied = ("position_multiplied",) if scaling == "x * pe" else ()
            yield replace(found, mistakes=(*multiplied, *found.mistakes), again=called[0].again)


def _rest(called: _Called, scaling: str) -> Tensor | None:
    """What is left as (batch, len, features), with 1 for an axis that it does not have; None where shapes forbid it."""
    output = called.output
    if scaling != "pe alone":
        if called.x is None or called.x.shape != output.shape:
            return None
        if scaling == "x * pe":
            return output / called.x
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
        rows_of = [(lengths, "length"), (batches, "number of samples"), ([0] * len(called), "first token")]
        if "mask" in words[0][1]:
            rows_of.pop()  # a mask read the other way round hides all positions
        for number, name in rows_of:
            observations = [(torch.tensor([float(n)]), r[:1, 0]) for n, r in zip(number, rests, strict=True)]
            rows = (*words, ("positions run along", f"no axis: one row, that of the {name}, for every token", ""))
            yield Placement(rows, observations, ("position_one_row",))
    elif same_samples:
        flat = all(one.output.dim() == 2 for one in called)
        axes = "the rows of the table" if flat else "axis 1: (batch, len, features)"
        yield Placement((*words, ("positions run along", axes, "")), [_numbered(r[0]) for r in rests])
    elif same_tokens:
        rows = (*words, ("positions run along", "axis 0: (len, batch, features)", ""))
        note = "positions run along the first axis: right only where that is the sequence and not the batch"
        yield Placement(rows, [_numbered(r[:, 0]) for r in rests], notes=(note,))


def _alike(rest: Tensor, axis: int) -> bool:
    """Whether nothing changes along an axis."""
    return float((rest - rest.narrow(axis, 0, 1)).abs().max()) <= ALIKE * max(1.0, float(rest.abs().max()))


def _numbered(table: Tensor) -> Observation:
    return torch.arange(float(min(table.size(0), MOST_ROWS))), table[:MOST_ROWS]
