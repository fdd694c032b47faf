"""Every mask that a builder may mean, right or with a known mistake, as an expression of torch's in its arguments."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.equivalent.texts import Code, bracketed
from equivalence_tests.checker.parts.drawing import OF_BOOLS, CallOfRoles, Drawn

PAD_ID = 3
Lengths = tuple[int, int, int, tuple[int, ...]]
READ: tuple[Lengths, ...] = ((3, 11, 13, (11, 2, 5)), (2, 9, 7, (4, 9)), (5, 8, 12, (8, 1, 3, 7, 2)))
COMPARED: tuple[Lengths, ...] = ((2, 6, 37, (6, 3)), (4, 41, 5, (41, 1, 20, 2)), (1, 1, 1, (1,)))
ALL = "torch.ones(QUERIES, KEYS, dtype=torch.boolDEVICE)"  # by the lengths of two sequences
# How token ids in each layout become (batch, len).
LAID = {"(len, batch)": ".T", "(len,)": "[None]", "(batch, 1, len)": "[:, 0]", "(batch, 1, 1, len)": "[:, 0, 0]"}
# The causal masks: what each hides, its expression, and what is wrong with it.
TRIANGLES = (
    ("causal", f"{ALL}.tril()", ()),
    ("causal, aligned at the end", f"{ALL}.tril(KEYS - QUERIES)", ()),
    ("causal", f"{ALL}.tril(1)", ("causal_sees_one_ahead",)),
    ("causal", f"{ALL}.tril(-1)", ("causal_cannot_see_itself",)),
    ("causal", f"{ALL}.triu()", ("causal_mask_inverted",)),
)
# These hide what stands behind the tokens, so that there padding may be that of the queries alone.
BEHIND, ON_QUERIES, ROWS_ALONE = ("causal", "causal, aligned at the end"), "padding_mask_on_queries", ", of queries"
PREFIXES = (
    ("causal after a prefix that all see", "(torch.arange(KEYSDEVICE) < PREFIX)", ()),
    ("causal after a prefix", "(torch.arange(QUERIESDEVICE)[:, None] < PREFIX)", ("mask_transposed",)),
)
# How many tokens the first and the second sequence have, and how many samples there are: by the first of
# these arguments that is there.
SIZED = tuple((role, "{}.size(1)") for role in ("ids", "keep", "vectors"))
NUMBERS = {
    "first": (*SIZED, ("shape", "{}[1]"), ("size", "{}"), ("lengths", "int({}.max())")),
    "second": (("key_ids", "{}.size(1)"), ("key_size", "{}")),
    "samples": (
        *(("samples", "{}"), ("shape", "{}[0]")),
        *((role, "{}.size(0)") for role in ("ids", "key_ids", "keep", "lengths", "vectors")),
    ),
}
# What is added to the lengths of the samples, and what is wrong with that.
WITHIN = (("", ()), (" + 1", ("length_one_too_long",)), (" - 1", ("length_one_too_short",)))


@dataclass(frozen=True)
class Meaning:
    """A mask as one reading has it."""

    words: str  # what it hides
    text: str  # true = may look, as Python, in a shape that broadcasts to (batch, query, key)
    mistakes: tuple[str, ...] = ()
    lengths: tuple[str, str] = ("", "")  # of queries and keys, as Python
    shape: str = ""  # in which it was found to be given; "" before that
    encoding: str = ""  # what its numbers were found to mean; "" before that

    def mask(self, plan: CallOfRoles, drawn: Drawn) -> Tensor:
        """Build the mask for one call: (batch, query, key) bool."""
        batch = 1 if plan.layout == "(len,)" else len(drawn.first)
        found: Tensor = evaluated(f"({self.text}).expand({batch}, {', '.join(self.lengths)})", plan, drawn)
        return found


@functools.cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<mask>", "eval")


@functools.lru_cache(maxsize=2 * len(READ))
def _names(plan: CallOfRoles, drawn: Drawn) -> dict[str, Any]:
    return {"torch": torch, **{name: drawn.value(role, plan.layout) for name, role in plan.roles}}


def evaluated(text: str, plan: CallOfRoles, drawn: Drawn) -> Any:
    """Run an expression with the arguments of one call."""
    return eval(_compiled(text), _names(plan, drawn))


def draws_of(pads: set[int], shapes: Sequence[Lengths] = READ) -> list[Drawn]:
    """Draw calls; among the ids are all that may stand for padding.

    The shape of a call is the number of samples, two lengths, and how much of the first one each sample uses.

    >>> draws_of({7})[0].first.unique().tolist()
    [0, 1, 2, 3, 4, 7]
    """
    ids = torch.tensor(sorted({0, 1, 2, PAD_ID, 4} | pads))
    generator = torch.Generator().manual_seed(0)

    def sequence(batch: int, length: int) -> Tensor:
        return ids[torch.randint(len(ids), (batch, length), generator=generator)]

    return [Drawn(sequence(b, n), sequence(b, m), torch.tensor(lengths), PAD_ID) for b, n, m, lengths in shapes]


def meanings(plan: CallOfRoles, ids: Sequence[int]) -> list[Meaning]:
    """List every mask that can be built from what a builder is given, those with the fewest mistakes first.

    The ids may stand for padding where no argument says which does.
    """
    found: list[Meaning] = []
    known = [one for one in ("first", "second") if any(plan.named(role) for role, _ in NUMBERS[one])]
    for query, key in itertools.product(known, repeat=2):
        triangles, paddings = list(_triangles(plan)), list(_paddings(plan, query, key, ids))
        alone = [part for part in paddings if "padding_inverted" not in part.mistakes]
        joined = (both for pair in itertools.product(triangles, paddings) for both in _joined(*pair))
        lengths = number_of(query, plan), number_of(key, plan)
        parts = (Meaning("hides nothing", ALL), *triangles, *alone, *joined)
        found += [replace(part, text=_filled_in(part.text, plan, lengths), lengths=lengths) for part in parts]
    return sorted(found, key=lambda meaning: len(meaning.mistakes))


def _joined(triangle: Meaning, padding: Meaning) -> Iterator[Meaning]:
    words, mistakes = f"{triangle.words}, {padding.words}", (*triangle.mistakes, *padding.mistakes)
    first, second = (bracketed(Code(one.text)) for one in (triangle, padding))
    if mistakes == (ON_QUERIES,) and triangle.words in BEHIND:
        yield Meaning(f"{words}{ROWS_ALONE}", f"{first} & {second}")
    elif len(mistakes) <= 2:
        yield Meaning(words, f"{first} & {second}", mistakes)
    if not mistakes:
        yield Meaning(words, f"{first} | {second}", ("masks_joined_by_or",))


def laid(role: str, plan: CallOfRoles) -> str:
    """Write the argument that has a role, token ids as (batch, len); "" if there is none."""
    layout = LAID.get(plan.layout.removesuffix(OF_BOOLS), "") if role in ("ids", "key_ids", "keep") else ""
    return f"{plan.named(role)}{layout}" if plan.named(role) else ""


def number_of(what: str, plan: CallOfRoles) -> str:
    """Write how many tokens there are in the "first" or the "second" sequence, or how many "samples"."""
    return next((text.format(laid(role, plan)) for role, text in NUMBERS[what] if plan.named(role)), "1")


def _filled_in(text: str, plan: CallOfRoles, lengths: tuple[str, str]) -> str:
    """Put the lengths in, and the device."""
    tensors = (plan.named(role) for role in ("ids", "key_ids", "keep", "lengths", "vectors"))
    device = plan.named("device") or next((f"{name}.device" for name in tensors if name), "")
    text = text.replace("QUERIES", lengths[0]).replace("KEYS", lengths[1])
    return text.replace("DEVICE", f", device={device}" if device else "")


def _triangles(plan: CallOfRoles) -> Iterator[Meaning]:
    """List the causal masks, with the windows and prefixes that an argument asks for."""
    yield from (Meaning(*row) for row in TRIANGLES)
    if name := plan.named("prefix"):
        for words, prefix, mistakes in PREFIXES:
            yield Meaning(words, f"{ALL}.tril() | {prefix.replace('PREFIX', name)}", mistakes)
    if name := plan.named("window"):
        yield from _windows(name)


def _windows(name: str) -> Iterator[Meaning]:
    """List the windows: of this length or half of it, with the token itself or beside it, causal or to both sides."""
    for (window, most), itself in itertools.product((("a window", name), ("half a window", f"{name} // 2")), (0, 1)):
        reach = f"{most} + 1" if itself else most
        least, ahead = f"1 - {reach}" if reach == name else f"1 - ({reach})", f"tril({reach} - 1)"
        causal = f"causal, {window} {'and' if itself else 'with'} the token itself"
        yield Meaning(causal, f"{ALL}.tril().triu({least})")
        yield Meaning(causal, f"{ALL}.triu().{ahead}", ("causal_mask_inverted",))
        yield Meaning(f"{window} to both sides{'' if itself else ', without its ends'}", f"{ALL}.{ahead}.triu({least})")


def _paddings(plan: CallOfRoles, query: str, key: str, ids: Sequence[int]) -> Iterator[Meaning]:
    """List the padding masks: of the keys, as it should be, and of the queries."""
    of_queries = list(_kept(plan, query, ids))
    for kept in _kept(plan, key, ids):
        words, text = f"padding of {kept.words}", f"({kept.text})[:, None]"
        yield Meaning(words, text, kept.mistakes)
        yield Meaning(words, f"~{text}", ("padding_inverted", *kept.mistakes))
        for other in of_queries:
            if not other.mistakes and not kept.mistakes:
                yield Meaning(f"{words}, padded queries too", f"{text} & ({other.text})[..., None]")
    for kept in of_queries:
        mistakes = (ON_QUERIES, *kept.mistakes)
        yield Meaning(f"padding of {kept.words}", f"({kept.text})[..., None]", mistakes)


def _kept(plan: CallOfRoles, sequence: str, ids: Sequence[int]) -> Iterator[Meaning]:
    """List what may count as no padding in a sequence: (batch, len)."""
    role, argument = "ids" if sequence == "first" else "key_ids", plan.named("pad_id")
    for pad in ((argument, 0, 1) if argument else ids) if plan.named(role) else ():
        wrong = () if pad == argument or not argument else ("pad_id_not_used",)
        yield Meaning(f"{plan.named(role)} ({argument or f'id {pad}'})", f"{laid(role, plan)} != {pad}", wrong)
    if sequence == "first" and (name := plan.named("keep")):
        yield Meaning(f"{name} (0)", f"{laid('keep', plan)} != 0")
        yield Meaning(f"{name} (1)", f"{laid('keep', plan)} == 0")
    if sequence == "first" and (name := plan.named("lengths")):
        for more, wrong in WITHIN:
            yield Meaning(name, f"torch.arange({number_of('first', plan)}DEVICE) < {name}[:, None]{more}", wrong)
