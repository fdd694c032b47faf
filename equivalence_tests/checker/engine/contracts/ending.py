"""From the merged heads to what comes back: the output projection, the residual and the LayerNorm around it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import known, retagged, source_of, sources_in, token_of
from equivalence_tests.checker.engine.contracts.changing import (
    adds_two,
    changed_on_the_way,
    has_twin,
    shuffling,
    strange_departures,
)
from equivalence_tests.checker.engine.contracts.departure import Departure, changed_by, near
from equivalence_tests.checker.engine.names import Attention, Source, values_at
from equivalence_tests.checker.engine.taking_part import matrix_in
from equivalence_tests.checker.engine.watching import Operation, Slot, tensors_of

__all__ = ["ending_departures", "output_departures", "wrap_of"]


@dataclass(frozen=True)
class _Expression:
    """What a tensor is made of: the attention's output, the input, a sum, or a norm of one of these.

    Args:
        kind: "out", "input", "sum", "norm", "inside" (an operand, the merged heads, or the input once more through a
            matrix of the attention) or "other".
        inner: What it is made of.
        factors: Of the parts of a sum.
    """

    kind: str
    inner: tuple["_Expression", ...] = ()
    factors: tuple[float, ...] = ()
    operation: Operation | None = None


def ending_departures(attention: Attention, output: Tensor, codes: Tensor, wanted: Tensor) -> Iterator[Departure]:
    """Hold what comes back against the attention, with a residual and a LayerNorm around it or not.

    Args:
        attention: The last one of the call.
        output: What the call gave back.
        codes: Its names.
        wanted: The tokens that should lie there, in its shape.
    """
    if not bool(torch.isin(token_of(codes), wanted).all()):
        return
    if not torch.equal(token_of(codes), wanted):
        yield Departure("output_tokens_moved", "output", _last_move(attention))
        return
    source = _source_of_all(attention, codes)
    if source is None:
        return
    judged = source.number in attention.context_sources  # as far as the end of the attention, divided or not
    changed = None if judged else changed_on_the_way(attention, [source.number], output, codes)
    if changed is not None:
        yield changed
        return
    expression = _read(attention, source, 0)
    name = _mistake(expression)
    if name:
        yield Departure(name, "wrap", expression.operation)


def output_departures(attention: Attention) -> Iterator[Departure]:
    """Hold what a call returns first against what the last weight or product gave."""
    output = next(tensors_of(attention.run.output), None)
    found = attention.run.names.last_of(output) if output is not None else None
    if found is not None:
        yield from _unchanged(attention, *found)
    elif output is not None:  # nobody knows which of its elements is which
        slot, end = Slot(output, output.detach()), len(attention.run.operations)
        bent = strange_departures(attention, slot, end, "output", "output")
        yield from (one for one in bent if one.operation is not None and one.operation.index > attention.end.index)


def _unchanged(attention: Attention, output: Tensor, codes: Tensor) -> Iterator[Departure]:
    numbers = sources_in(codes)
    source = attention.run.names.sources[numbers[0]] if len(numbers) == 1 and bool(known(codes).all()) else None
    if source is None or source.operation is None or source.operation.index <= attention.end.index:
        return
    if codes.shape == source.codes.shape and not torch.equal(codes, source.codes):
        moved = shuffling(attention.run, numbers, attention.end.index, len(attention.run.operations))
        gone = Departure("output_tokens_moved", "output", _last_move(attention))
        if moved is None or not has_twin(attention, moved):
            yield changed_by(moved, "output", "output") if moved is not None else gone
        return
    changed = changed_on_the_way(attention, numbers, output, codes)
    if changed is not None and not adds_two(
        changed.operation
    ):  # a residual, which came from where names are not followed
        yield changed


def wrap_of(attention: Attention, codes: Tensor) -> str:
    """Say what stands around the attention: "none", "residual" or "post_norm"; "" for anything else."""
    source = _source_of_all(attention, codes)
    expression = _read(attention, source, 0) if source is not None else _Expression("other")
    inside = expression.inner[0] if expression.kind == "norm" else expression
    if inside.kind == "sum" and {part.kind for part in inside.inner} == {"out", "input"}:
        return "post_norm" if expression.kind == "norm" else "residual"
    return "none" if expression.kind == "out" else ""


def _source_of_all(attention: Attention, codes: Tensor) -> Source | None:
    numbers = source_of(codes).unique()
    return attention.run.names.sources[int(numbers[0])] if len(numbers) == 1 else None


def _last_move(attention: Attention) -> Operation | None:
    after = [op for op in attention.run.operations if op.index > attention.end.index]
    moves = [
        op for op in after if op.name in ("view", "reshape", "transpose", "permute", "roll", "flip", "__getitem__")
    ]
    return moves[-1] if moves else after[-1] if after else attention.end


def _read(attention: Attention, source: Source, depth: int) -> _Expression:
    names = attention.run.names
    if depth > 8:
        return _Expression("other", operation=source.operation)
    parents = [names.sources[n] for n in source.parents]
    if source.kind == "input" or source.kind == "given":
        return _Expression("input", operation=source.operation)
    if depth and source.number in _operands(attention):
        return _Expression("inside", operation=source.operation)
    if source.operation is not None and source.operation.index <= attention.first.index and source.kind == "projection":
        return _Expression("input", operation=source.operation)
    if source.kind == "projection" and _repeats_a_matrix(attention, source, parents):
        return _Expression("inside", operation=source.operation)
    if source.kind in ("projection", "context"):
        return _Expression("out", operation=source.operation)
    if source.kind in ("normed", "gain") and len(parents) == 1:
        inner = _read(attention, parents[0], depth + 1)
        norm = source.kind == "normed"
        return _Expression("norm", (inner,), operation=source.operation) if norm else inner
    if source.kind == "added" and len(parents) == 2:
        factors = _factors(source, parents)
        if factors is not None:
            inner_ones = tuple(_read(attention, parent, depth + 1) for parent in parents)
            if {parent.kind for parent in parents} == {"projection", "context"} and _one_of_the_other(*parents):
                inner_ones = (_Expression("inside", operation=source.operation), *inner_ones[1:])
            if [parent.kind for parent in parents] == ["projection", "projection"] and {*map(str, inner_ones)} == {
                "out"
            }:
                return inner_ones[0]  # a matrix and what is added to it (LoRA)
            return _Expression("sum", inner_ones, factors, source.operation)
    if source.kind == "added" and len(parents) == 1:
        return _read(attention, parents[0], depth + 1)
    return _Expression("other", operation=source.operation)


def _operands(attention: Attention) -> set[int]:
    """The sources of queries, keys and values; none where all are one tensor, which is then the input."""
    sides = (codes for part in attention.parts for codes, _ in part.sides.values())
    numbers = {number for codes in sides for number in sources_in(codes)}
    return numbers if len(numbers) > 1 else set()


def _repeats_a_matrix(attention: Attention, source: Source, parents: list[Source]) -> bool:
    """Whether it is the input once more through a matrix of the attention: a shortcut has one of its own."""
    if not parents or any(parent.kind not in ("input", "given", "normed") for parent in parents):
        return False
    mine, others = matrix_in(attention, source.operation), attention.run.names.sources.values()
    return bool(mine) and any(other is not source and matrix_in(attention, other.operation) == mine for other in others)


def _one_of_the_other(one: Source, other: Source) -> bool:
    return one.number in other.parents or other.number in one.parents


def _factors(source: Source, parents: list[Source]) -> tuple[float, ...] | None:
    """Of a sum of two, how often each is in it."""
    table = torch.stack([values_at([p], retagged(source.codes, p.number)).reshape(-1) for p in parents], -1)
    if bool(table.isnan().any()):
        return None
    value = source.slot.value.double().reshape(-1, 1)
    found = torch.linalg.lstsq(table, value).solution
    if not near(table @ found, value, 1e-6):
        return None
    return tuple(round(float(x), 4) for x in found.reshape(-1))


def _mistake(expression: _Expression) -> str:
    """Name what is wrong about a residual and a norm; "" if nothing is."""
    if expression.kind == "norm":
        inner = expression.inner[0]
        if inner.kind == "out":
            return "residual_missing"
        return _mistake(inner) if inner.kind == "sum" else ""
    if expression.kind != "sum":
        return ""
    if any(part.kind == "inside" for part in expression.inner):
        return "residual_from_elsewhere"
    kinds = {part.kind: factor for part, factor in zip(expression.inner, expression.factors, strict=True)}
    normed = [part for part in expression.inner if part.kind == "norm"]
    if normed:
        if normed[0].inner[0].kind == "out":
            return "residual_after_norm"
        return "residual_from_normalised" if normed[0].inner[0].kind == "input" else ""
    if kinds.get("input", 1.0) == 2.0:
        return "residual_added_twice"
    if kinds.get("out", 1.0) == -1.0 or kinds.get("input", 1.0) == -1.0:
        return "residual_subtracted"
    return ""
