"""What stands around an attention: the settings of its modules, and what its scores meet between the two products."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.judgement import Judgement, Operand
from equivalence_tests.checker.engine.names import Part, Source
from equivalence_tests.checker.engine.watching import Operation, Slot
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.proposing import parameters_of

Names = Callable[[str], object]  # whether a name asks for it
WINDOW = re.compile(r"window|sliding|local|span|band|block|chunk|context_size", re.IGNORECASE)
NORMED = ("normed", "gain")


class Surroundings:
    """What is known about one attention from the module that holds it.

    Args:
        judgement: Of one attention.
        module: Holds the parameters and configurations.
    """

    def __init__(self, judgement: Judgement, module: nn.Module | None) -> None:
        self.judgement, self.module = judgement, module
        self.modules = list(module.modules()) if module is not None else []
        self.recorder, self._names = judgement.attention.run.recorder, judgement.attention.run.names

    def _setting(self, wanted: float, named: Names, own: bool = False) -> str:
        """Say which number of a configuration, or of a module's own, is the one that is wanted; "" if none is."""
        held = (item for holder in [*self._holders(), *(self.modules if own else ())] for item in numbers_of(holder))
        found = ((name, x) for name, x in held if named(name) and abs(x - wanted) < 1e-4 * abs(wanted))
        return next((f"{name} says ({x:g})" for name, x in found), "")

    def _holders(self) -> list[Any]:
        found: dict[int, Any] = {}
        for child in self.modules:
            for value in vars(child).values():
                holder = not isinstance(value, nn.Module | Tensor | str | int | float | dict | list | tuple | set)
                if holder and hasattr(value, "__dict__") and not callable(value):
                    found[id(value)] = value
        return list(found.values())

    def _is_normed(self, operand: Operand) -> bool:
        return operand.change == "normed" or bool(self._norms_before(operand))

    def _norms_before(self, operand: Operand) -> list[Source]:
        """What norms of tokens made of an operand, after its projection."""
        made_of = self._names.made_of(source.number for source in operand.sources)
        return [s for s in made_of if s.kind in NORMED and (s.operation is None or s.operation.name != "batch_norm")]

    def _parameters_between(self, functions: frozenset[str]) -> list[str]:
        """Parameters that such functions take between the two products."""
        between = (operation for operation, _ in self._between() if operation.name in functions)
        return [name for operation in between for name in self._parameters_beside(operation)]

    def _parameters_beside(self, operation: Operation) -> list[str]:
        """The parameters of which an operation takes something beside what has names."""
        return [name for _, bits in self._names.beside(operation) for name in self.recorder.parameters(bits)]

    def _between(self) -> Iterator[tuple[Operation, Part]]:
        for part in self.judgement.attention.parts:
            for operation, _, _ in list(part.steps(self.judgement.attention.run))[1:]:
                yield operation, part

    def _beside_scores(self) -> Iterator[tuple[Operation, Slot, int, Part]]:
        """What the scores meet between the two products: the operation, the tensor, and what that was made of."""
        own = {part.number for part in self.judgement.attention.parts}
        for operation, part in self._between():
            pairs = zip(operation.inputs, operation.origins, self._names.before[operation.index], strict=True)
            yield from ((operation, slot, bits, part) for slot, bits, x in pairs if not is_of(x, own))

    def width_named(self, widths: Iterable[float]) -> str:
        """Say which setting is as wide as what is seen; "" if none is."""
        told = (self._setting(width, WINDOW.search, own=True) for width in widths)
        return next((f"it is as wide as {setting}" for setting in told if setting), "")

    def _takes_a_mask(self) -> bool:
        """Whether the module that holds the attention, or one around it, may be given a mask."""
        around = modules_around(self.module, self.judgement.attention.first.place)
        return not around or any(role_of_parameter(p.name) == "mask" for one in around for p in parameters_of(one))


def modules_around(module: nn.Module | None, place: str) -> list[nn.Module]:
    """Give what holds the module at a path, and that itself, the outermost first; nothing of a function."""
    held = module.named_modules() if module is not None else ()
    return [own for path, own in held if not path or f"{place}.".startswith(f"{path}.")]


def is_of(codes: Tensor | None, numbers: set[int]) -> bool:
    """Whether some names come from any of these sources."""
    return codes is not None and bool(set(sources_in(codes)) & numbers)


def numbers_of(holder: Any) -> Iterator[tuple[str, float]]:
    """List the finite numbers that an object holds, by their names."""
    for name, value in sorted(vars(holder).items(), key=lambda item: str(item[0])):
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if plain and math.isfinite(value) and not str(name).startswith("_"):
            yield str(name), float(value)
