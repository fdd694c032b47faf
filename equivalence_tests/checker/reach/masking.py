"""The shapes and encodings in which masks are handed over in the wild."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.checker.reporting.lines import frames_of

# What is written behind a mask of (batch, query, key) to hand it over; along an axis that a shape does not name, all
# must be alike.
SHAPES = {
    "(batch, query, key)": "",
    "(batch, 1, query, key)": "[:, None]",
    "(batch, heads, query, key)": "[:, None].expand(-1, heads, -1, -1)",
    "(batch * heads, query, key)": ".repeat_interleave(heads, 0)",
    "(heads * batch, query, key)": ".repeat(heads, 1, 1)",
    "(query, key, batch)": ".permute(1, 2, 0)",
    "(query, key)": "[0]",
    "(1, query, key)": "[:1]",
    "(1, 1, query, key)": "[:1, None]",
    "(batch, key)": "[:, 0]",
    "(batch, 1, key)": "[:, :1]",
    "(batch, 1, 1, key)": "[:, None, :1]",
    "(1, key, batch)": "[:, :1].permute(1, 2, 0)",
    "(batch, key, 1)": "[:, 0, :, None]",
    "(batch, query)": "[:, :, -1]",
    "lengths (batch,)": "[:, 0].sum(-1)",
    "lengths (batch, query)": ".sum(-1)",
    "segments (batch, key)": ".long().argmax(-1)",  # each is numbered by its first token
    # Only what builds masks has been seen to give these.
    "(key, batch)": "[:, 0].T",
    "(key,)": "[0, 0]",
    "(batch, query, 1)": "[:, :, :1]",
    "(batch, 1, query, 1)": "[:, None, :, :1]",
}
BUILT_ONLY = ("(key, batch)", "(key,)", "(batch, query, 1)", "(batch, 1, query, 1)")
OF_QUERIES = "(batch, query)"
ENCODINGS = {
    "look": "True = may look",
    "block": "True = may not look",
    "look_float": "1.0 = may look, 0.0 = may not",
    "block_float": "1.0 = may not look, 0.0 = may",
    "look_int": "1 = may look, 0 = may not",
    "block_int": "1 = may not look, 0 = may",
    "additive": "added to the scores: 0 = may look, -inf = may not",
    "lengths": "the number of keys that may be looked at",
    "segments": "the segment of each token, which may look at those of its own",
}
# What torch says where a mask is of a type that it does not take, whatever its shape.
MISTYPED = re.compile(r"bool tensor is not supported|only supports boolean masks|only implemented on integer and Bool")
COUNTS = ("lengths", "segments")  # encodings by whole numbers that are more than yes and no


@functools.cache
def _arranging(text: str) -> Callable[[Tensor, int], Tensor]:
    found: Callable[[Tensor, int], Tensor] = eval(f"lambda mask, heads: mask{text}")
    return found


def in_shape(may_attend: Tensor, shape: str, num_heads: int) -> Tensor:
    """Lay (batch, query, key) out in one of ``SHAPES``."""
    return _arranging(SHAPES[shape])(may_attend, num_heads)


class HeldMask:
    """Holds a mask under whatever name it is asked for, but for what a tensor would answer itself."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__") or hasattr(Tensor, name):
            raise AttributeError(name)
        return self._mask


@dataclass(frozen=True)
class MaskForm:
    """One way to hand over a mask: as a tensor, or held by an object."""

    shape: str
    encoding: str
    held: bool = False

    @property
    def pattern(self) -> str:
        """Which masks it can express: full, shared (by all samples), keys, queries (alike for others), or counts."""
        if self.shape == OF_QUERIES:
            return "queries"
        if self.encoding in COUNTS:
            return "query_lengths" if self.shape.endswith("query)") else self.encoding
        return "keys" if "query" not in self.shape else "full" if "batch" in self.shape else "shared"

    @property
    def dtype(self) -> str:
        """What its elements are: "bool", "float" or "int"."""
        kind = self.encoding.partition("_")[2] or ("bool" if self.encoding in ("look", "block") else "int")
        return "float" if self.encoding == "additive" else kind

    def build(self, may_attend: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Write (b, q, k), True = may look, in this form, into new memory."""
        x = in_shape(may_attend, self.shape, num_heads).clone(memory_format=torch.contiguous_format)
        if self.encoding in COUNTS:
            return x
        if self.encoding == "additive":
            return torch.zeros(x.shape, dtype=dtype).masked_fill(~x, -torch.inf)
        meaning, _, kind = self.encoding.partition("_")
        x = x if meaning == "look" else ~x
        return x if not kind else x.to(dtype) if kind == "float" else x.long()

    def __str__(self) -> str:
        return f"{self.shape}, {ENCODINGS[self.encoding]}" + (", held by an object" if self.held else "")

    @staticmethod
    def neutral_forms() -> list["MaskForm"]:
        """List forms in which a mask that hides nothing can be tried."""
        shapes = ["(batch, 1, query, key)", "(batch, query, key)", "(batch, 1, 1, key)", "(batch, key)", "(query, key)"]
        shapes += ["(query, key, batch)", "(batch, 1, key)"]
        boolean = [
            MaskForm(s, e) for s, e in itertools.product(shapes, ("look", "block", "look_int", "block_int", "additive"))
        ]
        return [*boolean, MaskForm("lengths (batch,)", "lengths")]


def mask_forms() -> Iterator[MaskForm]:
    """List every form, bool before numbers, per-sample masks before shared ones."""
    for encoding, shape in itertools.product(
        [e for e in ENCODINGS if e not in COUNTS],
        [s for s in SHAPES if not s.startswith((*COUNTS, OF_QUERIES, *BUILT_ONLY))],
    ):
        yield MaskForm(shape, encoding)
    yield from (MaskForm(shape, shape.partition(" ")[0]) for shape in SHAPES if shape.startswith(COUNTS))


def mistyped(errors: Sequence[tuple[MaskForm, Exception]]) -> list[Exception]:
    """List what masks raise for their type, that of the last line first; nothing if some type of mask never does."""
    found: dict[str, Exception] = {}
    for form, error in errors:
        if MISTYPED.search(str(error)) and frames_of(error):
            found.setdefault(form.dtype, error)
    last = sorted(found.values(), key=lambda error: frames_of(error)[0][1], reverse=True)
    return last if found.keys() == {form.dtype for form in mask_forms()} else []


def query_mask_forms() -> Iterator[MaskForm]:
    """List the forms of a mask that says which queries are there."""
    for encoding in ENCODINGS:
        if encoding not in ("additive", *COUNTS):
            yield MaskForm(OF_QUERIES, encoding)


def draw_masks(pattern: str, batch: int, query_len: int, key_len: int, seed: int = 3) -> Tensor:
    """Draw (b, q, k) of a pattern: holes inside, other ones for each sample, key 0 always visible.

    >>> draw_masks("lengths", 3, 1, 5).sum(-1).tolist()
    [[2], [3], [5]]
    """
    generator = torch.Generator().manual_seed(seed)
    may = torch.rand(batch, query_len, key_len, generator=generator) > 0.4
    if pattern in ("lengths", "query_lengths"):
        rows = torch.arange(query_len) if pattern == "query_lengths" else torch.zeros(query_len, dtype=torch.long)
        lengths = 2 + (torch.arange(batch)[:, None] + rows) % max(key_len - 2, 1)
        lengths[-1, -1 if pattern == "query_lengths" else slice(None)] = key_len
        return torch.arange(key_len) < lengths[..., None]
    if pattern == "segments":
        segments = (torch.arange(batch)[:, None] + torch.arange(max(query_len, key_len))) // 2
        return segments[:, :query_len, None] == segments[:, None, :key_len]
    if pattern == "queries":
        may = may[..., -1:].expand(-1, -1, key_len).clone()
        may[:, 0], may[:, -1] = True, False
        return may
    if pattern == "keys":
        may = may[:, :1].expand(-1, query_len, -1).clone()
        may[:, :, 1 + torch.arange(batch).remainder(max(key_len - 2, 1))] = True
        for sample in range(batch):  # a hole inside, in another place for each sample
            may[sample, :, 1 + sample % max(key_len - 1, 1)] = False
    if pattern == "shared":
        may = may[:1].expand(batch, -1, -1).clone()
    may[:, :, 0] = True
    return may
