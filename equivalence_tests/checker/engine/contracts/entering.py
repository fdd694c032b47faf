"""What reaches an attention from beside: its input, a bias of its scores, the angles of its rotation.

Nothing says what these should be. But some functions stand on none of these ways in any known model: an ``abs``, a
``clamp`` or a ``roll`` is shown wherever one is met.
"""

from collections.abc import Iterator

import torch

from equivalence_tests.checker.engine.anchors import Attention, Run
from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.departure import Departure, constant_ratio
from equivalence_tests.checker.engine.identities import Source
from equivalence_tests.checker.engine.vocabulary import (
    CONTRACTIONS,
    CREATES,
    ELEMENTWISE,
    INDEXED,
    MOVES,
    NORMS,
    REDUCES,
    SOFTMAXES,
    words,
)
from equivalence_tests.checker.engine.watching import Operation, Slot

__all__ = ["USUAL", "input_departures", "is_strange", "is_undone", "puts_back", "strange_operations"]

USUAL = words(
    "relu relu6 gelu silu mish tanh sigmoid softplus elu selu celu leaky_relu prelu hardswish hardsigmoid hardtanh "
    "logsigmoid softsign dropout cos sin exp exp2 log log1p expm1 sqrt rsqrt reciprocal to float double half bfloat16"
)
TURNS = words("transpose permute t T mT swapaxes swapdims movedim moveaxis")
ENDS = CONTRACTIONS | SOFTMAXES | REDUCES | INDEXED | CREATES


def input_departures(attention: Attention) -> Iterator[Departure]:
    """Name what no known model does to the input of a projection, in the module that holds the attention.

    Args:
        attention: Whose input.
    """
    seen: set[int] = set()
    for source in _projections(attention):
        assert source.operation is not None  # see _projections
        for operation in strange_operations(attention.run, source.operation.inputs[0], source.operation.index):
            here = operation.place == attention.first.place and operation.index not in seen
            if here and not is_undone(attention, operation):
                seen.add(operation.index)
                function = operation.name.strip("_")
                yield Departure(f"changed_by_{function}", "input", operation, {"function": function, "what": "input"})


def _projections(attention: Attention) -> Iterator[Source]:
    """The projections that queries, keys and values were made of."""
    names, seen = attention.run.names, set[int]()
    sides = [codes for part in attention.parts for codes in (part.product.left, part.product.right)]
    sides += [context.values for part in attention.parts for context in part.contexts]
    left = [number for codes in sides for number in sources_in(codes)]
    while left:
        number = left.pop()
        source = names.sources[number]
        if number not in seen:
            seen.add(number)
            left += source.parents
            if source.kind == "projection" and source.operation is not None and source.operation.inputs:
                yield source


def puts_back(attention: Attention, moved: Operation) -> bool:
    """Say whether a function that moves what comes out was called in the same module before the attention, too.

    Args:
        attention: Whose output is moved.
        moved: What moves it.
    """
    before = attention.run.operations[: attention.first.index]
    return any((op.name, op.place) == (moved.name, moved.place) for op in before)


def is_undone(attention: Attention, operation: Operation) -> bool:
    """Say whether the same function is called again behind an attention, as where windows are shifted and put back.

    Args:
        attention: Whose input is moved.
        operation: What moves it.
    """
    last = max(context.operation.index for part in attention.parts for context in part.contexts)
    after = attention.run.operations[last:]
    return any((op.name, op.place) == (operation.name, operation.place) for op in after)


def strange_operations(run: Run, slot: Slot, before: int, factors: bool = False) -> Iterator[Operation]:
    """Give the operations that no known model has where a tensor comes from, the last one first.

    Args:
        run: The recorded run.
        slot: The tensor.
        before: The first operation that comes too late to have made it.
        factors: Whether a number that multiplies is strange too.
    """
    left = [(slot.key, before)]
    while left:
        key, until = left.pop()
        made = (op for op in reversed(run.operations[:until]) if any(out.key == key for out in op.outputs))
        operation = next(made, None)
        if operation is None or operation.name in ENDS:
            continue
        if is_strange(operation, factors):
            yield operation
        size = operation.outputs[0].value.numel()
        for taken in operation.inputs:
            if taken.value.is_floating_point() and (operation.name in MOVES or taken.value.numel() == size):
                left.append((taken.key, operation.index))


def is_strange(operation: Operation, factors: bool = False) -> bool:
    """Say whether an operation of one tensor does what no known model does on the way into an attention.

    Args:
        operation: Any.
        factors: Whether a number that multiplies is strange too.
    """
    taken = [slot.value for slot in operation.inputs if slot.value.is_floating_point()]
    given = operation.outputs[0].value
    if len(taken) != 1 or taken[0].shape != given.shape or torch.equal(taken[0].nan_to_num(), given.nan_to_num()):
        return False
    name = operation.name.strip("_")
    if operation.name in MOVES:
        exchanged = torch.equal(taken[0].flatten().sort().values, given.flatten().sort().values)
        return name not in TURNS and exchanged
    if operation.name in NORMS or name in USUAL:
        return False
    if constant_ratio(given, taken[0]) is not None:
        return factors and name != "neg"
    return operation.name not in ELEMENTWISE
