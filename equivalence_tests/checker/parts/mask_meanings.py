"""Every mask that somebody may mean, right or with a known mistake, from token ids, lengths and sizes."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivalence_tests.checker.parts.drawing import OF_BOOLS, CallOfRoles, Drawn

PAD_ID = 3
Lengths = tuple[int, int, int, tuple[int, ...]]
READ: tuple[Lengths, ...] = ((3, 11, 13, (11, 2, 5)), (2, 9, 7, (4, 9)), (5, 8, 12, (8, 1, 3, 7, 2)))
COMPARED: tuple[Lengths, ...] = ((2, 6, 37, (6, 3)), (4, 41, 5, (41, 1, 20, 2)), (1, 1, 1, (1,)))
ALL = "torch.ones(QUERIES, KEYS, dtype=torch.boolDEVICE)"  # by the lengths of two sequences
# How what a plan hands over becomes (batch, len).
LAID: dict[str, str] = {"(len, batch)": ".T", "(len,)": "[None]", "(batch, 1, len)": "[:, 0]"}
LAID |= {"(batch, 1, 1, len)": "[:, 0, 0]"}


@dataclass(frozen=True)
class Meaning:
    """A mask as one reading has it.

    Args:
        words: What it hides.
        masks: (b, q, k) with True = may look, for each draw.
        mistakes: What is wrong with it.
        text: The same as Python, with True = may look, in a shape that broadcasts to (b, q, k).
        lengths: Of queries and keys, as Python.
        shape: In which it was found to be given; "" before that.
        encoding: What its numbers were found to mean; "" before that.
    """

    words: str
    masks: list[Tensor]
    mistakes: tuple[str, ...] = ()
    text: str = ""
    lengths: tuple[str, str] = ("", "")
    shape: str = ""
    encoding: str = ""


def draws_of(pads: set[int], shapes: Sequence[Lengths] = READ) -> list[Drawn]:
    """Draw calls; among the ids are all that may stand for padding.

    Args:
        pads: These ids.
        shapes: The number of samples, two lengths, and how much of the first each sample uses, for each call.

    >>> draws_of({7})[0].first.unique().tolist()
    [0, 1, 2, 3, 4, 7]
    """
    ids = torch.tensor(sorted({0, 1, 2, PAD_ID, 4} | pads))
    generator = torch.Generator().manual_seed(0)

    def sequence(batch: int, length: int) -> Tensor:
        return ids[torch.randint(len(ids), (batch, length), generator=generator)]

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
        for part in (Meaning("hides nothing", whole, text=ALL), *triangles, *alone, *joined):
            masks = [(full & mask)[:samples] for full, mask in zip(whole, part.masks, strict=True)]
            both = length_of(query, plan), length_of(key, plan)
            yield replace(part, masks=masks, text=_of_lengths(part.text, plan, both), lengths=both)


def _joined(triangle: Meaning, padding: Meaning) -> Iterator[Meaning]:
    words, mistakes = f"{triangle.words}, {padding.words}", (*triangle.mistakes, *padding.mistakes)
    pairs = list(zip(triangle.masks, padding.masks, strict=True))
    if len(mistakes) <= 2:
        text = f"{_bracketed(triangle.text)} & {_bracketed(padding.text)}"
        yield Meaning(words, [causal & keep for causal, keep in pairs], mistakes, text)
    if not mistakes:
        text = f"{_bracketed(triangle.text)} | {_bracketed(padding.text)}"
        yield Meaning(words, [causal | keep for causal, keep in pairs], ("masks_joined_by_or",), text)


def _bracketed(text: str) -> str:
    return f"({text})" if " | " in text or " & " in text else text


def laid(name: str, plan: CallOfRoles) -> str:
    """Write what is handed over as (batch, len)."""
    return name + LAID.get(plan.layout.removesuffix(OF_BOOLS), "")


def length_of(sequence: str, plan: CallOfRoles) -> str:
    """Write how long a sequence is."""
    if sequence == "second":
        key = plan.named("key_ids")
        return f"{laid(key, plan)}.size(1)" if key else plan.named("key_size")
    for role in ("ids", "keep"):
        if plan.named(role):
            return f"{laid(plan.named(role), plan)}.size(1)"
    if plan.named("vectors"):
        return f"{plan.named('vectors')}.size(1)"
    if plan.named("shape"):
        return f"{plan.named('shape')}[1]"
    return plan.named("size") or f"int({plan.named('lengths')}.max())"


def samples_of(plan: CallOfRoles) -> str:
    """Write how many samples there are."""
    if plan.named("samples"):
        return plan.named("samples")
    if plan.named("shape"):
        return f"{plan.named('shape')}[0]"
    for role in ("ids", "key_ids", "keep"):
        if plan.named(role):
            return f"{laid(plan.named(role), plan)}.size(0)"
    found = plan.named("lengths") or plan.named("vectors")
    return f"{found}.size(0)" if found else "1"


def _of_lengths(text: str, plan: CallOfRoles, lengths: tuple[str, str]) -> str:
    """Put the lengths in, and the device."""
    tensors = (plan.named(role) for role in ("ids", "key_ids", "keep", "lengths", "vectors"))
    device = plan.named("device") or next((f"{name}.device" for name in tensors if name), "")
    text = text.replace("QUERIES", lengths[0]).replace("KEYS", lengths[1])
    return text.replace("DEVICE", f", device={device}" if device else "")


def _sequences(plan: CallOfRoles) -> list[str]:
    """Say which of the two sequences, first and second, a plan tells anything about."""
    given = {role for _, role in plan.roles}
    first = given & {"ids", "keep", "size", "lengths", "shape", "vectors"}
    return ["first"] * bool(first) + ["second"] * bool(given & {"key_ids", "key_size"})


def _triangles(ahead: list[Tensor], plan: CallOfRoles, draws: Sequence[Drawn]) -> Iterator[Meaning]:
    """List the causal masks, and windows where one is asked for, by how far each key is ahead of each query."""
    causal = f"{ALL}.tril()"
    yield Meaning("causal", [j <= 0 for j in ahead], text=causal)
    if any(j.size(0) != j.size(1) for j in ahead):
        yield Meaning("causal, aligned at the end", [j <= j[-1, -1] for j in ahead], text=f"{ALL}.tril(KEYS - QUERIES)")
    if plan.named("window"):
        yield from _windows(ahead, plan.named("window"), draws)
    if plan.named("prefix"):
        name = plan.named("prefix")
        seen = [(j, torch.arange(j.size(1)) < d.window) for j, d in zip(ahead, draws, strict=True)]
        masks, text = [(j <= 0) | prefix for j, prefix in seen], f"{causal} | (torch.arange(KEYSDEVICE) < {name})"
        yield Meaning("causal after a prefix that all see", masks, text=text)
        rows = [(j, torch.arange(j.size(0))[:, None] < d.window) for j, d in zip(ahead, draws, strict=True)]
        masks, text = (
            [(j <= 0) | prefix for j, prefix in rows],
            f"{causal} | (torch.arange(QUERIESDEVICE)[:, None] < {name})",
        )
        yield Meaning("causal after a prefix", masks, ("mask_transposed",), text)
    yield Meaning("causal", [j <= 1 for j in ahead], ("causal_sees_one_ahead",), f"{ALL}.tril(1)")
    yield Meaning("causal", [j < 0 for j in ahead], ("causal_cannot_see_itself",), f"{ALL}.tril(-1)")
    yield Meaning("causal", [j >= 0 for j in ahead], ("causal_mask_inverted",), f"{ALL}.triu()")


def _windows(ahead: list[Tensor], name: str, draws: Sequence[Drawn]) -> Iterator[Meaning]:
    """List the windows: of this length or half of it, with the token itself or beside it, causal or to both sides."""
    for (window, share), more in itertools.product((("a window", 1), ("half a window", 2)), (0, 1)):
        near = [j.abs() < d.window // share + more for j, d in zip(ahead, draws, strict=True)]
        causal = f"causal, {window} {'and' if more else 'with'} the token itself"
        most = (name if share == 1 else f"{name} // 2") + (" + 1" if more else "")
        least = f"1 - {name}" if (share, more) == (1, 0) else f"1 - ({most})"
        past, ahead_too = [(j <= 0) & n for j, n in zip(ahead, near, strict=True)], f"tril({most} - 1)"
        yield Meaning(causal, past, text=f"{ALL}.tril().triu({least})")
        masks, wrong = [(j >= 0) & n for j, n in zip(ahead, near, strict=True)], ("causal_mask_inverted",)
        yield Meaning(causal, masks, wrong, f"{ALL}.triu().{ahead_too}")
        text = f"{ALL}.{ahead_too}.triu({least})"
        yield Meaning(f"{window} to both sides{'' if more else ', without its ends'}", near, text=text)


def _paddings(plan: CallOfRoles, query: str, key: str, draws: Sequence[Drawn]) -> Iterator[Meaning]:
    """List the padding masks: of the keys, as it should be, and of the queries."""
    of_queries = list(_kept(plan, query, draws))
    for kept in _kept(plan, key, draws):
        words, of_keys = f"padding of {kept.words}", [keep[:, None] for keep in kept.masks]
        text = f"({kept.text})[:, None]"
        yield Meaning(words, of_keys, kept.mistakes, text)
        yield Meaning(words, [~keep for keep in of_keys], ("padding_inverted", *kept.mistakes), f"~{text}")
        for other in of_queries:
            if not other.mistakes and not kept.mistakes:
                both = [keep & rows[..., None] for keep, rows in zip(of_keys, other.masks, strict=True)]
                yield Meaning(f"{words}, padded queries too", both, text=f"{text} & ({other.text})[..., None]")
    for kept in of_queries:
        hidden = [keep[..., None] for keep in kept.masks]
        mistakes = ("padding_mask_on_queries", *kept.mistakes)
        yield Meaning(f"padding of {kept.words}", hidden, mistakes, f"({kept.text})[..., None]")


def _kept(plan: CallOfRoles, sequence: str, draws: Sequence[Drawn]) -> Iterator[Meaning]:
    """List what may count as no padding in a sequence: (b, len)."""
    tokens = [getattr(d, sequence) for d in draws]
    ids = plan.named("ids" if sequence == "first" else "key_ids")
    argument = plan.named("pad_id")
    if ids:
        for pad in [PAD_ID, 0, 1] if argument else draws[0].first.unique().tolist():
            wrong = ("pad_id_not_used",) if argument and pad != PAD_ID else ()
            text = f"{laid(ids, plan)} != {argument if argument and not wrong else pad}"
            yield Meaning(f"{ids} ({argument or f'id {pad}'})", [x != pad for x in tokens], wrong, text)
    if sequence == "first" and plan.named("keep"):
        name, given = plan.named("keep"), laid(plan.named("keep"), plan)
        yield Meaning(f"{name} (0)", [x != PAD_ID for x in tokens], text=f"{given} != 0")
        yield Meaning(f"{name} (1)", [x == PAD_ID for x in tokens], text=f"{given} == 0")
    if sequence == "first" and plan.named("lengths"):
        for more, wrong in ((0, ()), (1, ("length_one_too_long",)), (-1, ("length_one_too_short",))):
            within = [torch.arange(d.first.size(1)) < d.lengths[:, None] + more for d in draws]
            name, added = plan.named("lengths"), f" + {more}" if more > 0 else " - 1" if more else ""
            text = f"torch.arange({length_of('first', plan)}DEVICE) < {name}[:, None]{added}"
            yield Meaning(name, within, wrong, text)
