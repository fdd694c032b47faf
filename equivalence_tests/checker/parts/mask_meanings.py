"""Every mask that somebody may mean, right or with a known mistake, from token ids, lengths and sizes."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivalence_tests.checker.parts.drawing import CallOfRoles, Drawn

PAD_ID = 3


@dataclass(frozen=True)
class Meaning:
    """A mask as one reading has it.

    Args:
        words: What it hides.
        masks: (b, q, k) with True = may look, for each draw.
        mistakes: What is wrong with it.
        shape: In which it was found to be given; "" before that.
        encoding: What its numbers were found to mean; "" before that.
    """

    words: str
    masks: list[Tensor]
    mistakes: tuple[str, ...] = ()
    shape: str = ""
    encoding: str = ""


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


def meanings(plan: CallOfRoles, draws: Sequence[Drawn]) -> Iterator[Meaning]:
    """List every mask that can be built from what a plan gives.

    Yields:
        Meanings, with True = may look.
    """
    samples = 1 if plan.layout == "(len,)" else None
    for query, key in itertools.product(_sequences(plan), repeat=2):
        lengths = [[getattr(d, sequence).size(1) for sequence in (query, key)] for d in draws]
        whole = [torch.ones(len(d.first), *sizes, dtype=torch.bool) for d, sizes in zip(draws, lengths, strict=True)]
        triangles = list(_triangles([torch.arange(k) - torch.arange(q)[:, None] for q, k in lengths], plan, draws))
        paddings = list(_paddings(plan, query, key, draws))
        alone = [part for part in paddings if "padding_inverted" not in part.mistakes]
        joined = (both for pair in itertools.product(triangles, paddings) for both in _joined(*pair))
        for part in (Meaning("hides nothing", whole), *triangles, *alone, *joined):
            masks = [(full & mask)[:samples] for full, mask in zip(whole, part.masks, strict=True)]
            yield replace(part, masks=masks)


def _joined(triangle: Meaning, padding: Meaning) -> Iterator[Meaning]:
    words, mistakes = f"{triangle.words}, {padding.words}", (*triangle.mistakes, *padding.mistakes)
    pairs = list(zip(triangle.masks, padding.masks, strict=True))
    if len(mistakes) <= 2:
        yield Meaning(words, [causal & keep for causal, keep in pairs], mistakes)
    if not mistakes:
        yield Meaning(words, [causal | keep for causal, keep in pairs], ("masks_joined_by_or",))


def _sequences(plan: CallOfRoles) -> list[str]:
    """Say which of the two sequences, first and second, a plan tells anything about."""
    given = {role for _, role in plan.roles}
    first = given & {"ids", "keep", "size", "lengths", "shape", "vectors"}
    return ["first"] * bool(first) + ["second"] * bool(given & {"key_ids", "key_size"})


def _triangles(ahead: list[Tensor], plan: CallOfRoles, draws: Sequence[Drawn]) -> Iterator[Meaning]:
    """List the causal masks, and windows where one is asked for, by how far each key is ahead of each query."""
    yield Meaning("causal", [j <= 0 for j in ahead])
    if any(j.size(0) != j.size(1) for j in ahead):
        yield Meaning("causal, aligned at the end", [j <= j[-1, -1] for j in ahead])
    if plan.named("window"):
        for (window, share), more in itertools.product((("a window", 1), ("half a window", 2)), (0, 1)):
            near = [j.abs() < d.window // share + more for j, d in zip(ahead, draws, strict=True)]
            causal = f"causal, {window} {'and' if more else 'with'} the token itself"
            yield Meaning(causal, [(j <= 0) & n for j, n in zip(ahead, near, strict=True)])
            yield Meaning(causal, [(j >= 0) & n for j, n in zip(ahead, near, strict=True)], ("causal_mask_inverted",))
            yield Meaning(f"{window} to both sides{'' if more else ', without its ends'}", near)
    if plan.named("prefix"):
        seen = [(j, torch.arange(j.size(1)) < d.window) for j, d in zip(ahead, draws, strict=True)]
        yield Meaning("causal after a prefix that all see", [(j <= 0) | prefix for j, prefix in seen])
        rows = [(j, torch.arange(j.size(0))[:, None] < d.window) for j, d in zip(ahead, draws, strict=True)]
        yield Meaning("causal after a prefix", [(j <= 0) | prefix for j, prefix in rows], ("mask_transposed",))
    yield Meaning("causal", [j <= 1 for j in ahead], ("causal_sees_one_ahead",))
    yield Meaning("causal", [j < 0 for j in ahead], ("causal_cannot_see_itself",))
    yield Meaning("causal", [j >= 0 for j in ahead], ("causal_mask_inverted",))


def _paddings(plan: CallOfRoles, query: str, key: str, draws: Sequence[Drawn]) -> Iterator[Meaning]:
    """List the padding masks: of the keys, as it should be, and of the queries."""
    of_queries = list(_kept(plan, query, draws))
    for kept in _kept(plan, key, draws):
        words, of_keys = f"padding of {kept.words}", [keep[:, None] for keep in kept.masks]
        yield Meaning(words, of_keys, kept.mistakes)
        yield Meaning(words, [~keep for keep in of_keys], ("padding_inverted", *kept.mistakes))
        for other in of_queries:
            if not other.mistakes and not kept.mistakes:
                both = [keep & rows[..., None] for keep, rows in zip(of_keys, other.masks, strict=True)]
                yield Meaning(f"{words}, padded queries too", both)
    for kept in of_queries:
        hidden = [keep[..., None] for keep in kept.masks]
        yield Meaning(f"padding of {kept.words}", hidden, ("padding_mask_on_queries", *kept.mistakes))


def _kept(plan: CallOfRoles, sequence: str, draws: Sequence[Drawn]) -> Iterator[Meaning]:
    """List what may count as no padding in a sequence: (b, len)."""
    tokens = [getattr(d, sequence) for d in draws]
    ids = plan.named("ids" if sequence == "first" else "key_ids")
    argument = plan.named("pad_id")
    if ids:
        for pad in [PAD_ID, 0, 1] if argument else draws[0].first.unique().tolist():
            wrong = ("pad_id_not_used",) if argument and pad != PAD_ID else ()
            yield Meaning(f"{ids} ({argument or f'id {pad}'})", [x != pad for x in tokens], wrong)
    if sequence == "first" and plan.named("keep"):
        yield Meaning(f"{plan.named('keep')} (0)", [x != PAD_ID for x in tokens])
        yield Meaning(f"{plan.named('keep')} (1)", [x == PAD_ID for x in tokens])
    if sequence == "first" and plan.named("lengths"):
        for more, wrong in ((0, ()), (1, ("length_one_too_long",)), (-1, ("length_one_too_short",))):
            within = [torch.arange(d.first.size(1)) < d.lengths[:, None] + more for d in draws]
            yield Meaning(plan.named("lengths"), within, wrong)
