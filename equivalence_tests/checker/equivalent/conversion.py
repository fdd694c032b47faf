"""The conversion of a state_dict, both ways, as Python."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from equivalence_tests.checker.equivalent.blocks import blocks_of, joined, written_back
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.unread import UnreadError


class Conversion:
    """Lines that say which of the user's weights each of the equivalent's is, and where each goes back.

    Args:
        module: The user's module; None for a function.
        parameters: Of it.
        taken: Entries of the converted state_dict.
        returned: Lines that put weights back.
    """

    module: nn.Module | None
    parameters: Parameters
    taken: list[str]
    returned: list[str]

    def _convert(self, name: str, places: Tensor) -> None:
        self.taken.append(f'"{name}": {self._taken(places)},')
        self._give_back(places, f'ours["{name}"]')

    def _places(self, name: str) -> Tensor:
        return torch.arange(self.parameters.named[name].numel()) + self.parameters.start[name]

    def _taken(self, places: Tensor) -> str:
        if bool((places < 0).all()):
            return f"torch.zeros{tuple(places.shape)}" if places.dim() > 1 else f"torch.zeros({len(places)})"
        blocks = blocks_of(places, self.parameters)
        if blocks is None:
            raise UnreadError("the weights lie in an order that cannot be written down")
        return joined(blocks, "theirs")

    def _give_back(self, places: Tensor, source: str) -> None:
        blocks = [] if bool((places < 0).all()) else blocks_of(places, self.parameters) or []
        self.returned += written_back(blocks, "theirs", source)

    def _conversion(self, target: str) -> Iterator[str]:
        yield "def from_theirs(theirs: dict[str, Tensor]) -> dict[str, Tensor]:"
        yield f'    """Turn a state_dict of {target} into one of Equivalent."""'
        yield from ("    return {", *(f"        {line}" for line in self.taken), "    }")
        yield from ("", "", "def to_theirs(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:")
        yield '    """Put the weights of Equivalent into a copy of a state_dict of theirs."""'
        yield "    theirs = {name: x.clone() for name, x in theirs.items()}"
        yield from (f"    {line}" for line in self.returned)
        yield from (f'    theirs["{other}"] = theirs["{name}"]' for other, name in self._other_names())
        yield "    return theirs"

    def _other_names(self) -> Iterator[tuple[str, str]]:
        """List the names under which a parameter is held once more."""
        every = [] if self.module is None else list(self.module.named_parameters(remove_duplicate=False))
        known = {id(x): name for name, x in self.parameters.named.items()}
        yield from ((name, known[id(x)]) for name, x in every if known.get(id(x), name) != name)
