"""From the merged heads to the output: the output projection, and the residual and the LayerNorm around it.

Norms that are written by hand must give every token the same size, before the gain.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import retagged, source_of, sources_in, squares_by, token_of
from equivalence_tests.checker.engine.contracts.changing import differ, first_change, shuffling
from equivalence_tests.checker.engine.contracts.departure import Departure, changed_by
from equivalence_tests.checker.engine.names import Attention, Run, Source, values_at
from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.engine.taking_part import matrix_of
from equivalence_tests.checker.engine.vocabulary import MULTIPLIES
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.reporting.lines import Frames

# What a tensor is a sum of, each with its factor: "out" (of the attention), "input", "inside" (an operand, the merged
# heads, or the input once more through a matrix of the attention), "norm(...)" of one of these, or "other".
_Terms = tuple[tuple[float, str], ...]
RESIDUALS = {
    "inside": "residual_from_elsewhere",
    "norm(out)": "residual_after_norm",
    "norm(input)": "residual_from_normalised",
    "2 input": "residual_added_twice",
    "-1 out": "residual_subtracted",
    "-1 input": "residual_subtracted",
}
SLACK = 0.05  # by so much an epsilon under the root may make sizes differ
WRAPS = {"out": "none", "input + out": "residual", "norm(input + out)": "post_norm"}


def ending_departures(
    attention: Attention, output: Tensor, codes: Tensor, wanted: Tensor, padding: Tensor | None = None
) -> Iterator[Departure]:
    """Compare what a call returned with its last attention, with or without a residual and a LayerNorm around it.

    The tokens ``wanted`` should lie there, in its shape; for padding, anything may come out.
    """
    if not bool(torch.isin(token_of(codes), wanted).all()):
        return
    if not torch.equal(token_of(codes), wanted):
        given = [number for number, source in attention.run.names.sources.items() if not source.parents]
        moved = shuffling(attention.run, given, -1, attention.first.index)
        yield Departure("output_tokens_moved", "output", moved or _last_move(attention))
        return
    source = _source_of_all(attention, codes)
    if source is None:
        return
    judged = source.number in attention.context_sources  # as far as the end of the attention, divided or not
    if not judged and differ([source], output, codes, padding):
        changed = first_change([source], attention.run.names.carrying([source.number]), padding)
        if changed is not None:
            yield changed_by(changed, "output", "output")
            return
    root = bare(attention, source)
    name = _mistake(attention, root)
    if name:
        yield Departure(name, "wrap", root.operation)


def wrap_of(attention: Attention, codes: Tensor) -> str:
    """Say what stands around the attention: "none", "residual" or "post_norm"; "" for anything else."""
    source = _source_of_all(attention, codes)
    return "" if source is None else WRAPS.get(_text(_terms(attention, source, 0)), "")


def _source_of_all(attention: Attention, codes: Tensor) -> Source | None:
    numbers = source_of(codes).unique()
    return attention.run.names.sources[int(numbers[0])] if len(numbers) == 1 else None


def _last_move(attention: Attention) -> Operation | None:
    after = [op for op in attention.run.operations if op.index > attention.end.index]
    moves = [op for op in after if op.name in ("view", "reshape", "transpose", "permute", "roll", "flip", "getitem")]
    return moves[-1] if moves else after[-1] if after else attention.end


def bare(attention: Attention, source: Source) -> Source:
    """Give a source without the gains and biases that were put on it last."""
    while source.kind in ("gain", "added") and len(source.parents) == 1:
        source = attention.run.names.sources[source.parents[0]]
    return source


def _terms(attention: Attention, source: Source, depth: int) -> _Terms:
    parents, made = [attention.run.names.sources[n] for n in source.parents], source.operation
    if depth > 8:
        return ((1.0, "other"),)
    if depth and source.number in _operands(attention) and source.kind not in ("input", "given"):
        return ((1.0, "inside"),)
    early = source.kind == "projection" and made is not None and made.index <= attention.first.index
    if source.kind in ("input", "given") or early:
        return ((1.0, "input"),)
    if source.kind in ("projection", "context"):
        again = source.kind == "projection" and _repeats_a_matrix(attention, source, parents)
        return ((1.0, "inside" if again else "out"),)
    passing = source.kind in ("normed", "gain", "added")
    inner = [_terms(attention, parent, depth + 1) for parent in parents] if passing else []
    if len(inner) == 1:
        return ((1.0, f"norm({_text(inner[0])})"),) if source.kind == "normed" else inner[0]
    factors = _factors(source, parents) if source.kind == "added" and len(inner) == 2 else None
    if factors is None:
        return ((1.0, "other"),)
    one, other = parents
    of_the_other = one.number in other.parents or other.number in one.parents
    if {one.kind, other.kind} == {"projection", "context"} and of_the_other:
        inner[0] = ((1.0, "inside"),)
    below = {source for parent in parents for source in attention.run.names.made_of(parent.parents, beyond=True)}
    apart = {one.kind, other.kind} == {"projection"} and below.isdisjoint(parents)
    if apart and {*map(_text, inner)} == {"out"}:
        return inner[0]  # a matrix and what is added to it (LoRA)
    return tuple((factor, _text(terms)) for factor, terms in zip(factors, inner, strict=True))


def _text(terms: _Terms) -> str:
    return " + ".join(sorted(name if factor == 1 else f"{factor:g} {name}" for factor, name in terms))


def _operands(attention: Attention) -> set[int]:
    """The sources of queries, keys and values; none where all are one tensor, which is then the input."""
    sides = (codes for part in attention.parts for codes, _ in part.sides.values())
    numbers = {number for codes in sides for number in sources_in(codes)}
    return numbers if len(numbers) > 1 else set()


def _repeats_a_matrix(attention: Attention, source: Source, parents: list[Source]) -> bool:
    """Whether it is the input, projected by a matrix of the attention again: a shortcut has a matrix of its own."""
    if not parents or any(parent.kind not in ("input", "given", "normed") for parent in parents):
        return False
    (mine, _), others = matrix_of(attention, source.operation), attention.run.names.sources.values()
    same = (other is not source and matrix_of(attention, other.operation)[0] == mine for other in others)
    return bool(mine) and any(same)


def _factors(source: Source, parents: list[Source]) -> tuple[float, ...] | None:
    """The factors of the two terms of a sum; None if it is not a sum of multiples of them."""
    table = torch.stack([values_at([p], retagged(source.codes, p.number)).reshape(-1) for p in parents], -1)
    if bool(table.isnan().any()):
        return None
    value = source.slot.value.double().reshape(-1, 1)
    found = torch.linalg.lstsq(table, value).solution
    if not near(table @ found, value, MEASURED):
        return None
    return tuple(round(float(x), 4) for x in found.reshape(-1))


def _mistake(attention: Attention, source: Source) -> str:
    """Name what is wrong about a residual and a norm; "" if nothing is."""
    terms = _terms(attention, source, 0)
    if source.kind == "normed" and len(source.parents) == 1:
        inner = _terms(attention, attention.run.names.sources[source.parents[0]], 1)
        if len(inner) == 1:
            return "residual_missing" if inner[0][1] == "out" else ""
        terms = inner
    said = {text for factor, name in terms for text in (name, f"{factor:g} {name}")} if len(terms) > 1 else set()
    return next((mistake for term, mistake in RESIDUALS.items() if term in said), "")


# ---------------------------------------------------------------------------------------------- norms
def norm_departures(attention: Attention, module: nn.Module | None) -> Iterator[Departure]:
    """Name each norm of the user's own that leaves tokens of different sizes."""
    run, seen = attention.run, set[Frames]()
    modules = module.named_modules() if module is not None else ()
    norms = {path for path, part in modules if path and _is_a_norm(part)}
    made = (source.operation for source in run.names.sources.values() if source.kind == "gain")
    gains = {operation.index for operation in made if operation is not None}
    for operation in (operation for operation in run.operations if operation.frames):
        taken = _normalised(run, operation, norms, gains)
        if taken is not None and operation.frames[:1] not in seen and _sizes_differ(*taken):
            seen.add(operation.frames[:1])
            yield Departure("norm_leaves_different_sizes", "norm", operation)


def _normalised(run: Run, operation: Operation, norms: set[str], gains: set[int]) -> tuple[Tensor, Tensor] | None:
    """Give what a norm made, before the gain, and its names, if this is the norm's last operation; None if not."""
    codes = run.names.after[operation.index][0] if operation.outputs else None
    if codes is None or codes.is_complex() or not (operation.name == "normalize" or operation.place in norms):
        return None
    slot, own = operation.outputs[0], f"{operation.place}."
    if operation.index in gains:
        later = [user for user in run.graph.users(slot) if user.place == operation.place and user.name in MULTIPLIES]
        behind = [one.outputs[0].value / slot.value for one in later[:1]]  # weight * x, and then what x is divided by
        taken = (x.value for x, _ in run.names.taken(operation) if x.value.shape == codes.shape)
        return next(((x * behind[0] if behind else x, codes) for x in taken), None)
    names = run.recorder.named(run.recorder.origins_of(slot.tensor))
    learnt = any(name.partition(":")[2].startswith(own) for name in names)
    last = not any(user.place == operation.place for user in run.graph.users(slot)[-1:])
    return (slot.value, codes) if operation.name == "normalize" or (last and not learnt) else None


def _is_a_norm(part: nn.Module) -> bool:
    """Whether it is called a norm and is not torch's: BatchNorm takes its mean over the samples."""
    return "norm" in type(part).__name__.lower() and not type(part).__module__.startswith("torch.")


def _sizes_differ(value: Tensor, codes: Tensor) -> bool:
    token = token_of(codes)
    if token.size(-1) > 1 and bool((token == token[..., :1]).all()):  # each row of features by itself, so each head
        token = torch.arange(token[..., 0].numel()).view(*token.shape[:-1], 1).expand(token.shape)
    sizes = squares_by(token, value)
    sizes = sizes[sizes > 0]  # a token of zeros, such as padding, stays zero
    return bool(len(sizes)) and float(sizes.max() - sizes.min()) > SLACK * float(sizes.max())
