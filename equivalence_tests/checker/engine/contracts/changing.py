"""What changes numbers or exchanges elements on a way on which torch's formula changes nothing.

Of what comes from beside (a bias of the scores, the angles of a rotation) nothing says what it should be. But some
functions stand on none of these ways in any known model: an ``abs``, a ``clamp`` or a ``roll`` is shown there.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import place_of, sources_in, squares_by, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure, as_it_was, changed_by
from equivalence_tests.checker.engine.names import Attention, Run, Source, values_at
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.same import LOOSE, MEASURED, SINGLE, constant_ratio, near
from equivalence_tests.checker.engine.vocabulary import (
    ADDS,
    CONTRACTIONS,
    CREATES,
    ELEMENTWISE,
    FILLS,
    INDEXED,
    MOVES,
    NORMS,
    REDUCES,
    REORDERS,
    SOFTMAXES,
    words,
)
from equivalence_tests.checker.engine.watching import Operation, Slot
from equivalence_tests.checker.reach.tracing import tensors_of

VIEWS = words("view reshape unflatten flatten")
USUAL = words(
    "relu relu6 gelu silu mish tanh sigmoid softplus elu selu celu leaky_relu prelu hardswish hardsigmoid hardtanh "
    "logsigmoid softsign erf dropout cos sin exp exp2 log log1p expm1 sqrt rsqrt reciprocal to float double half "
    "bfloat16 floor floordiv floor_divide mod remainder"  # rows and columns of a place
)
TURNS = words("transpose permute t T mT swapaxes swapdims movedim moveaxis")
JOINS = ADDS | FILLS
ENDS = CONTRACTIONS | SOFTMAXES | REDUCES | INDEXED | CREATES


def has_twin(attention: Attention, moved: Operation) -> bool:
    """Say whether a function is called on the other side of an attention, too: windows are shifted, and back."""
    operations, first = attention.run.operations, attention.first.index
    others = operations[:first] if moved.index > first else operations[attention.last.index :]
    return any((op.name, op.place) == (moved.name, moved.place) for op in others)


def first_change(
    sources: list[Source], steps: Iterable[tuple[Operation, Tensor, Tensor]], without: Tensor | None = None
) -> Operation | None:
    """Give the first step that changes the numbers of its sources; those of the tokens ``without`` may be anything."""
    return next((operation for operation, codes, value in steps if differ(sources, value, codes, without)), None)


def differ(sources: list[Source], value: Tensor, codes: Tensor, without: Tensor | None) -> bool:
    """Whether other numbers stand under the names of some sources than they have there."""
    want = values_at(sources, codes)
    mine = ~want.isnan() if without is None else ~want.isnan() & ~torch.isin(token_of(codes), without)
    return not near(value.double()[mine], want[mine], MEASURED if value.dtype == torch.float64 else LOOSE)


def shuffling(
    run: Run, numbers: Iterable[int], after: int, before: int, of: Tensor | None = None, reshaped: bool = False
) -> Operation | None:
    """Give the first operation between two that keeps the shape of what it takes and exchanges elements in it.

    With ``of``, only these elements matter. With ``reshaped``, it is a view that exchanges the sizes of two axes, as a
    transpose would, and leaves the elements.
    """
    places = None if of is None else place_of(of).unique()
    for number in numbers:
        for operation, given, _ in run.names.carrying([number], after, before):
            taken = next((codes for _, codes in run.names.taken(operation)), None)
            if operation.index + 1 < before and not any(map(run.graph.users, operation.outputs)):
                continue  # nothing takes it, as where only its size is asked for
            if taken is None or (places is not None and not bool(torch.isin(place_of(given), places).any())):
                continue
            apart = operation.name in VIEWS and taken.dim() > 2 and taken.shape != given.shape
            if apart and sorted(taken.shape) == sorted(given.shape) if reshaped else _are_exchanged(taken, given):
                return operation
    return None


def strange_operations(run: Run, slot: Slot, before: int, factors: bool = False) -> Iterator[Operation]:
    """Give the operations that no known model has where a tensor comes from, the last one first."""
    yield from (op for op in run.graph.ancestors(slot, before, _passed_on) if is_strange(op, factors))


def _passed_on(operation: Operation) -> Iterator[Slot]:
    """What an operation takes and passes on: all of it, what is joined with others, the places in a table."""
    given = operation.outputs[0].value
    whole = operation.name in MOVES or operation.name in JOINS
    for taken in operation.inputs:
        places = not _is_carried(taken.value)
        folded = operation.name in ENDS and not (operation.name in REDUCES and taken.value.shape == given.shape)
        if folded or (places and _is_carried(given)):
            carried = places and operation.name in INDEXED
        else:
            carried = whole or taken.value.numel() == given.numel()
        if carried:
            yield taken


def is_strange(operation: Operation, factors: bool = False) -> bool:
    """Say whether an operation of one tensor does what no known model does on the way into an attention.

    With ``factors``, a number that multiplies is strange too.
    """
    taken, given = [slot.value for slot in operation.inputs], operation.outputs[0].value
    if _is_carried(given):
        taken = [value for value in taken if _is_carried(value)]
    if len(taken) != 1 or taken[0].shape != given.shape or near(taken[0], given, MEASURED):
        return False
    name = operation.name
    if name in MOVES:
        return name not in TURNS and _are_exchanged(taken[0], given)
    if name in NORMS | USUAL | ENDS | REORDERS or not taken[0].is_floating_point():
        return False
    if constant_ratio(given, taken[0]) is not None:
        return factors and name != "neg"
    return name not in ELEMENTWISE


def _are_exchanged(taken: Tensor, given: Tensor) -> bool:
    """Whether the same elements lie in another order."""
    same = taken.shape == given.shape and not torch.equal(taken, given)
    return same and torch.equal(taken.reshape(-1).sort().values, given.reshape(-1).sort().values)


def _is_carried(value: Tensor) -> bool:
    return value.is_floating_point() or value.dtype == torch.bool


def context_departures(attention: Attention, padding: Tensor) -> Iterator[Departure]:
    """Name the first operation that changes what was averaged; for padding, anything may come out."""
    if attention.names is None:
        return
    names, arrived, numbers = attention.run.names, attention.end_slot, attention.context_sources
    sources = [names.sources[number] for number in numbers]
    if not differ(sources, arrived.value, attention.names, padding):
        return

    def own(operation: Operation) -> Iterator[Slot]:
        return (taken for taken, codes in names.taken(operation) if not set(numbers).isdisjoint(sources_in(codes)))

    # What else is made of the averages changes nothing.
    way = [*attention.run.graph.ancestors(arrived, attention.end.index + 1, own)]
    changed = first_change(sources, (step for step in names.carrying(numbers) if step[0] in way), padding)
    if changed is not None:
        kept = changed.inputs[0].value.shape == changed.outputs[0].value.shape
        yield changed_by(changed, "context", "context", patches={changed.index: as_it_was} if kept else {})


def rotated_back(attention: Attention) -> Departure | bool:
    """Whether the averages are rotated, each token by itself; or give the departure at a step that is not linear."""
    run, slot = attention.run, attention.parts[0].contexts[0].operation.outputs[0]
    start = attention.parts[0].contexts[0].operation.index
    generator = torch.Generator().manual_seed(4)
    one, two = (torch.randn(slot.value.shape, generator=generator, dtype=torch.float64) for _ in range(2))

    def given(x: Tensor, asked: Slot, until: int) -> Tensor | None:
        found = replayed(run.recorder, {slot.key: x.to(slot.value.dtype)}, start, asked, until)
        return None if found is None else found.double()

    for operation, _, _ in run.names.carrying(attention.context_sources, start, attention.end.index + 1):
        parts = [given(x, operation.outputs[0], operation.index) for x in (one, two, one + two)]
        first, second, both = (torch.zeros(()) if part is None else part for part in parts)
        if not near(both, first + second, SINGLE):
            return changed_by(operation, "context", "context")
    end = given(one, attention.end_slot, attention.end.index)
    if end is None or attention.names is None:
        return False
    codes = attention.parts[0].contexts[0].codes
    if near(end.reshape(-1)[attention.names.reshape(-1).argsort()], one.reshape(-1)[codes.reshape(-1).argsort()]):
        return False
    return near(squares_by(token_of(attention.names), end), squares_by(token_of(codes), one), SINGLE)


def side_departures(attention: Attention) -> Iterator[Departure]:
    """Name what no known model does beside an attention or behind it, in its module; a factor behind all matrices."""
    run = attention.run
    merging = {operation for operation, _, _ in run.names.carrying(attention.context_sources)}
    inside = run.live(context.operation.outputs[0].tensor for context in run.names.contexts)
    first = list(tensors_of(run.output))[:1]  # maps that come back beside it are judged by themselves
    rest = [run.operations[index] for index in sorted(run.live(first) - inside)]
    last = max((operation.index for operation in rest if operation.name in CONTRACTIONS), default=attention.last.index)
    for operation in rest:
        own = operation.place == attention.first.place and operation not in merging
        numbers = operation.outputs[0].value.is_floating_point()
        strange = own and numbers and is_strange(operation, factors=operation.index > last)
        if strange and not has_twin(attention, operation):
            yield changed_by(operation, "output", "output")
