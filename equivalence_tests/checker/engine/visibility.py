"""Which keys each query sees: names for patterns, windows of tokens, and what changing one token at a time shows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.same import ROUNDING
from equivalence_tests.checker.reach.calling import Trial

OFF_BY_ONE = ("causal_sees_one_ahead", "causal_cannot_see_itself")


def pattern_of(sees: Tensor, ahead: Tensor) -> str:
    """Name what queries see: "all", "causal", a known mistake in a causal mask, or "" for another pattern.

    ``ahead`` says how many tokens after its query each key stands.

    >>> ahead = torch.arange(4) - torch.arange(4)[:, None]
    >>> pattern_of(ahead <= 1, ahead)
    'causal_sees_one_ahead'
    """
    known = {
        "all": (torch.ones_like(sees),),
        "causal": (ahead <= 0,),
        "causal_sees_one_ahead": (ahead <= 1,),
        "causal_cannot_see_itself": (ahead < 0,),
        "causal_mask_inverted": (ahead > 0, ahead >= 0),
    }
    return next((name for name, forms in known.items() if any(torch.equal(sees, form) for form in forms)), "")


def triangle_of(x: Tensor) -> str:
    """Name the causal mask that the last two axes hold, right or off by one: one value on one side, another beyond."""
    if x.dim() < 2 or x.size(-1) != x.size(-2) or x.size(-1) < 3:
        return ""
    square = x.reshape(-1, *x.shape[-2:])[0]
    seen = square == square[-1, 0]
    two_values = bool((seen | (square == square[0, -1])).all())
    name = pattern_of(seen, ahead_of(len(seen))) if two_values else ""
    return name if name in ("causal", *OFF_BY_ONE) else ""


def seen_in(judgement: Judgement, tokens: int) -> Tensor:
    """Say which of the first tokens gives weight to which in any head, (tokens, tokens) bool, [query, key]."""
    sees = torch.zeros(tokens, tokens, dtype=torch.bool)
    for part, model in zip(judgement.attention.parts, judgement.models, strict=False):
        query, key = part.table.query, part.table.key
        seen = ~(model.hidden | model.replaced | model.dead[model.rows]) & (query.max(key) < tokens)
        sees[query[seen], key[seen]] = True
    return sees


def met_in(judgement: Judgement) -> Tensor:
    """Say which query has a score with which key, masked or not, (tokens, tokens) bool, [query, key]."""
    tables = [part.table for part in judgement.attention.parts]
    tokens = 1 + max(int(x.max()) for table in tables for x in (table.query, table.key))
    met = torch.zeros(tokens, tokens, dtype=torch.bool)
    for table in tables:
        met[table.query, table.key] = True
    return met


@torch.no_grad()
def probed(
    trial: Trial, length: int, extra: Mapping[str, Any] | None = None, tokens: Iterable[int] | None = None
) -> Tensor:
    """Say which outputs change when one input token does, (batch, length, length) bool, [sample, output, input].

    Where queries are a tensor of their own, only the keys' token changes, with its value. All tokens are changed, one
    after another, unless some are named.
    """
    inputs = trial.inputs(length, length)
    whole = trial.output(inputs, extra)
    seen = torch.zeros(len(whole), length, length, dtype=torch.bool)
    for token in range(length) if tokens is None else tokens:
        changed = inputs.changed(token=token)
        changed = changed if trial.plan.self_attention else replace(changed, query=inputs.query)
        apart = (whole - trial.output(changed, extra)).abs() > ROUNDING * whole.nan_to_num().abs().max()
        seen[..., token] = apart.flatten(2).any(-1)
    return seen


def ahead_of(length: int) -> Tensor:
    """Say how many tokens after each query each key stands, (length, length)."""
    return torch.arange(length) - torch.arange(length)[:, None]


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
