"""Every mask that somebody may mean, right or with a known mistake, from token ids, lengths and sizes."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["LAYOUTS", "OF_BOOLS", "BuilderPlan", "Drawn", "Meaning", "draws_of", "meanings"]

Part = Callable[["Drawn"], Tensor]
Named = tuple[str, Part, tuple[str, ...]]  # words, formula, mistakes
PAD_ID = 3
OF_BOOLS = " of bools"


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "(batch, len)": lambda ids: ids,
    "(len, batch)": lambda ids: ids.T,
    "(len,)": lambda ids: ids[0],
    "(batch, 1, len)": lambda ids: ids[:, None],
    "(batch, 1, 1, len)": lambda ids: ids[:, None, None],
}


@dataclass(frozen=True)
class Drawn:
    """What one call is about.

    Args:
        first: Token ids (b, n).
        second: Token ids (b, m) of another sequence.
        lengths: (b,), at most n.
        pad_id: The padding.
        window: How far a window reaches.
    """

    first: Tensor
    second: Tensor
    lengths: Tensor
    pad_id: int
    window: int = 2

    def value(self, role: str, layout: str) -> Any:
        """Give what a role asks for."""
        keep = self.first != self.pad_id
        ids = {"ids": self.first, "key_ids": self.second, "keep": keep if layout.endswith(OF_BOOLS) else keep.long()}
        if role in ids:
            return LAYOUTS[layout.removesuffix(OF_BOOLS)](ids[role])
        sizes = {"size": self.first.size(1), "key_size": self.second.size(1), "samples": len(self.first)}
        sizes |= {"heads": 2, "window": self.window}
        if role in sizes:
            return sizes[role]
        if role == "vectors":
            return torch.zeros(*self.first.shape, 13)
        others = {"pad_id": self.pad_id, "lengths": self.lengths, "shape": tuple(self.first.shape)}
        return (others | {"device": "cpu", "dtype": torch.float32})[role]


@dataclass(frozen=True)
class BuilderPlan:
    """How a builder is called: the role of each parameter, and the layout of token ids."""

    roles: tuple[tuple[str, str], ...]
    layout: str = "(batch, len)"

    def call(self, function: Callable[..., Any], drawn: Drawn) -> list[Tensor]:
        """Call it and list the tensors that come back."""
        values = {name: drawn.value(role, self.layout) for name, role in self.roles}
        returned = function(**values)
        several = returned if isinstance(returned, tuple | list) else (returned,)
        tensors = (torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in several)
        return [x for x in tensors if isinstance(x, Tensor) and x.dim() >= 1]

    def named(self, role: str) -> str:
        """Name the parameter that has a role; "" if none has."""
        return next((name for name, given in self.roles if given == role), "")


@dataclass(frozen=True)
class Meaning:
    """A mask as one reading has it: its words, (b, q, k) with True = may look, and its mistakes."""

    words: str
    formula: Callable[[Drawn], Tensor]
    mistakes: tuple[str, ...] = ()


def draws_of(pads: set[int]) -> list[Drawn]:
    """Draw three calls; among the ids are all that may stand for padding.

    >>> draws_of({7})[0].first.unique().tolist()
    [0, 1, 2, 3, 4, 7]
    """
    ids = torch.tensor(sorted({0, 1, 2, PAD_ID, 4} | pads))
    generator = torch.Generator().manual_seed(0)

    def sequence(batch: int, length: int) -> Tensor:
        return ids[torch.randint(len(ids), (batch, length), generator=generator)]

    shapes = ((3, 11, 13, (11, 2, 5)), (2, 9, 7, (4, 9)), (5, 8, 12, (8, 1, 3, 7, 2)))
    return [Drawn(sequence(b, n), sequence(b, m), torch.tensor(lengths), PAD_ID) for b, n, m, lengths in shapes]


def meanings(plan: BuilderPlan, draws: Sequence[Drawn]) -> Iterator[Meaning]:
    """List every mask that can be built from what a plan gives.

    Args:
        plan: How the builder is called.
        draws: What it is called with.

    Yields:
        Meanings whose formulas give (b, q, k), True = may look.
    """
    for query, key in itertools.product(_sequences(plan), repeat=2):
        place = (query, key, plan.layout == "(len,)")
        triangles, paddings = list(_triangles(query, key, plan)), list(_paddings(plan, query, key, draws))
        alone = [part for part in paddings if "padding_inverted" not in part[2]]
        for words, part, mistakes in (("hides nothing", _everything(query, key), ()), *triangles, *alone):
            yield Meaning(words, _in_full(part, *place), mistakes)
        for triangle, padding in itertools.product(triangles, paddings):
            yield from _joined(triangle, padding, place)


def _joined(triangle: Named, padding: Named, place: tuple[str, str, bool]) -> Iterator[Meaning]:
    (one, causal, slip), (other, keep, wrong) = triangle, padding
    words, mistakes = f"{one}, {other}", (*slip, *wrong)
    if len(mistakes) <= 2:
        yield Meaning(words, _in_full(lambda d: causal(d) & keep(d), *place), mistakes)
    if not mistakes:
        yield Meaning(words, _in_full(lambda d: causal(d) | keep(d), *place), ("masks_joined_by_or",))


def _sequences(plan: BuilderPlan) -> list[str]:
    """Say which of the two sequences, first and second, a plan tells anything about."""
    given = {role for _, role in plan.roles}
    first = given & {"ids", "keep", "size", "lengths", "shape", "vectors"}
    return ["first"] * bool(first) + ["second"] * bool(given & {"key_ids", "key_size"})


def _everything(query: str, key: str) -> Part:
    """(b, q, k), True everywhere."""

    def ones(drawn: Drawn) -> Tensor:
        lengths = [getattr(drawn, sequence).size(1) for sequence in (query, key)]
        return torch.ones(len(drawn.first), *lengths, dtype=torch.bool)

    return ones


def _in_full(part: Part, query: str, key: str, one_sample: bool) -> Part:
    return lambda d: (_everything(query, key)(d) & part(d))[: 1 if one_sample else None]


def _triangles(query: str, key: str, plan: BuilderPlan) -> Iterator[Named]:
    """List the causal masks of (query, key), and windows where one is asked for."""

    def ahead(drawn: Drawn) -> Tensor:
        query_len, key_len = _everything(query, key)(drawn).shape[1:]
        return torch.arange(key_len) - torch.arange(query_len)[:, None]  # j - i

    yield "causal", lambda d: ahead(d) <= 0, ()
    if query != key:
        yield "causal, aligned at the end", lambda d: ahead(d) <= ahead(d)[-1, -1], ()
    if plan.named("window"):
        yield "causal, a window with the token itself", lambda d: (ahead(d) <= 0) & (ahead(d) > -d.window), ()
        yield "causal, a window and the token itself", lambda d: (ahead(d) <= 0) & (ahead(d) >= -d.window), ()
        yield "a window to both sides", lambda d: ahead(d).abs() <= d.window, ()
        yield "a window to both sides, without its ends", lambda d: ahead(d).abs() < d.window, ()
    yield "causal", lambda d: ahead(d) <= 1, ("causal_mask_sees_one_ahead",)
    yield "causal", lambda d: ahead(d) < 0, ("causal_mask_hides_itself",)
    yield "causal", lambda d: ahead(d) >= 0, ("causal_mask_transposed",)


def _paddings(plan: BuilderPlan, query: str, key: str, draws: Sequence[Drawn]) -> Iterator[Named]:
    """List the padding masks of (query, key): of the keys, as it should be, and of the queries."""
    of_queries = list(_kept(plan, query, draws))
    for words, keep, mistakes in _kept(plan, key, draws):
        yield f"padding of {words}", _of_keys(keep), mistakes
        yield f"padding of {words}", _of_keys(_inverse(keep)), ("padding_inverted", *mistakes)
        right = [other for _, other, wrong in of_queries if not wrong and not mistakes]
        for other in right:
            yield f"padding of {words}, padded queries too", _of_both(keep, other), ()
    for words, keep, mistakes in of_queries:
        yield f"padding of {words}", _of_queries(keep), ("padding_hides_queries", *mistakes)


def _inverse(keep: Part) -> Part:
    return lambda d: ~keep(d)


def _of_keys(keep: Part) -> Part:
    return lambda d: keep(d)[:, None, :]


def _of_queries(keep: Part) -> Part:
    return lambda d: keep(d)[:, :, None]


def _of_both(keys: Part, queries: Part) -> Part:
    return lambda d: keys(d)[:, None, :] & queries(d)[:, :, None]


def _kept(plan: BuilderPlan, sequence: str, draws: Sequence[Drawn]) -> Iterator[Named]:
    """List what may count as no padding in a sequence: (b, len)."""
    ids = plan.named("ids" if sequence == "first" else "key_ids")
    argument = plan.named("pad_id")
    if ids:
        for pad in [PAD_ID, 0, 1] if argument else draws[0].first.unique().tolist():
            wrong = ("pad_id_not_used",) if argument and pad != PAD_ID else ()
            yield f"{ids} ({argument or f'id {pad}'})", _other_than(sequence, pad), wrong
    if sequence == "first" and plan.named("keep"):
        yield f"{plan.named('keep')} (0)", _other_than(sequence, PAD_ID), ()
        yield f"{plan.named('keep')} (1)", lambda d: d.first == PAD_ID, ()
    if sequence == "first" and plan.named("lengths"):
        for more, wrong in ((0, ()), (1, ("length_one_too_long",)), (-1, ("length_one_too_short",))):
            yield plan.named("lengths"), _within_lengths(more), wrong


def _other_than(sequence: str, pad: int) -> Part:
    return lambda d: getattr(d, sequence) != pad


def _within_lengths(more: int) -> Part:
    return lambda d: torch.arange(d.first.size(1)) < d.lengths[:, None] + more
