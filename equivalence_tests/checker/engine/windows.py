"""Windows into which tokens are cut: those of a sequence, or of an image whose rows lie one after the other."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """A token sees those of its own window only."""

    height: int  # of a window, in tokens
    width: int = 1  # the same; 1 in a sequence
    down: int = 0  # how far the windows are moved down; the first ones are so much smaller
    right: int = 0  # the same, to the right
    image: int = 1  # how wide the image is; 1 for a sequence

    def __str__(self) -> str:
        if self.image == 1:
            return f"the tokens are cut into windows of {self.height}"
        moved = f", moved by {self.down} and {self.right}" if self.down or self.right else ""
        return f"the image is cut into windows of {self.height} x {self.width}{moved}"

    def of(self, places: Any, image: Any = None) -> Any:
        """Number the window of each token, by the numbers of the tokens; or as text, with the width of the image."""
        if self.image == 1:
            return _cut(places, self.height, self.down)
        image = self.image if image is None else image
        return _cut(places // image, self.height, self.down) * image + _cut(places % image, self.width, self.right)

    def hidden(self, queries: int, keys: int) -> Tensor:
        """Say which keys lie in another window than a query, (q, k)."""
        return self.of(torch.arange(queries))[:, None] != self.of(torch.arange(keys))


def _cut(places: Any, side: int, moved: int) -> Any:
    shift = -moved % side
    return (places + shift if shift else places) // side


def read_windows(seen: Tensor) -> Windows | None:
    """Read windows off who sees whom, (q, k) bool; None where these are no windows."""
    length = min(seen.shape)
    for image in (width for width in range(1, length) if seen.size(1) % width == 0):
        columns = _side(torch.arange(image), seen)
        rows = _side(torch.arange(length // image) * image, seen)
        found = Windows(rows[0], columns[0], rows[1], columns[1], image)
        if torch.equal(found.hidden(*seen.shape), ~seen):
            return found
    return None


def sides_of_windows(sees: Tensor, length: int, image: int) -> set[float]:
    """Give what a setting may say of windows into which all samples are cut: their sides, or how much they hold.

    ``sees`` is bool, of the tokens of all samples; the ``image`` is so wide, or 1 for a sequence. Nothing comes back
    where tokens see each other that see others as well.

    >>> two = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
    >>> [sides_of_windows(two, 8, image) for image in (1, 2, 4, 8)]
    [{2.0, 4}, {2}, {1, 4}, {1, 4}]
    """
    sample = torch.arange(len(sees)) // length
    apart = not bool((sees & (sample[:, None] != sample)).any()) and bool(sees.diagonal()[sees.any(1)].all())
    if not apart or not torch.equal(sees.double() @ sees.double() > 0, sees):
        return set()
    held, found = int(sees.sum(1).max()), read_windows(sees[:length, :length])
    if found is None or found.image == image == 1:
        return {held, held**0.5}
    if found.image == 1:  # some rows of the image, or a part of each
        return {max(found.height // image, 1), min(found.height, image)}
    return {found.height, found.width}


def _side(places: Tensor, seen: Tensor) -> tuple[int, int]:
    """Give how long a window is along a line of tokens, and how far it is moved."""
    cuts = 1 + (~seen[places[:-1], places[1:]]).nonzero()[:, 0]
    sizes = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([len(places)]))
    side = int(sizes.max())
    return side, int(sizes[0]) % side
