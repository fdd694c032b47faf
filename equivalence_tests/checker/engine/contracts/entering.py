"""What reaches the projections of an attention: nothing that no known model has there."""

from collections.abc import Iterator

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.changing import has_twin, strange_operations
from equivalence_tests.checker.engine.contracts.departure import Departure, changed_by
from equivalence_tests.checker.engine.names import Attention, Source

__all__ = ["input_departures"]


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
            if here and not has_twin(attention, operation):
                seen.add(operation.index)
                yield changed_by(operation, "input", "input")


def _projections(attention: Attention) -> Iterator[Source]:
    """The projections that queries, keys and values were made of."""
    numbers = [number for part in attention.parts for codes, _ in part.sides.values() for number in sources_in(codes)]
    made_of = attention.run.names.made_of(numbers, beyond=True)
    yield from (source for source in made_of if source.kind == "projection" and source.operation is not None)
