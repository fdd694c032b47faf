"""The situations that break kernels, each written as the lines of code that make its inputs.

A reproducer prints the very lines that the judge ran, so that the two can never tell different stories.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "Inputs", "Situation", "listed_situations", "make_inputs", "source_of"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What each mask is, in the names that the lines before it define.
MASKS = {
    "": "None",
    "bool": "torch.rand({b}, 1, {q}, {k}) < 0.7",
    "all true": "torch.ones({q}, {k}, dtype=torch.bool)",
    "blind rows": "torch.ones({q}, {k}).tril({k} // 2 - {q}).bool()",
    "padding": "(torch.arange({k}) < torch.tensor([{k}, {k} // 2 + 1]).view(-1, 1, 1, 1)).expand(-1, 1, {q}, -1)",
    "float": "torch.randn({q}, {k})",
    "-inf": "torch.randn({q}, {k}).masked_fill(torch.rand({q}, {k}) < 0.3, -torch.inf)",
    "1e4": "torch.where(torch.rand({q}, {k}) < 0.3, -1e4, 1e4 * (torch.rand({q}, 1) < 0.5))",
    "lower right": "torch.ones({q}, {k}).tril({k} - {q}).bool()",
}
ADDED = ("float", "-inf", "1e4")
# How the numbers of a contiguous tensor x come to lie otherwise in memory.
LAYOUTS = {
    "": "x",
    "permuted": "x.transpose(1, 2).contiguous().transpose(1, 2)",
    "features first": "x.mT.contiguous().mT",
    "expanded": "x[:, :1].expand_as(x)",
    "sliced": "torch.cat([x, x], -1)[..., : x.shape[-1]]",
    "every other": "torch.stack([x, x], -1).flatten(-2)[..., ::2]",
    "misaligned": "torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)",
}


@dataclass(frozen=True)
class Situation:
    """The sizes and the manner of one call.

    Args:
        name: What the table calls it.
        group: The column in which it stands.
        query_len: And the other sizes likewise.
        mask: A key of ``MASKS``.
        layout: A key of ``LAYOUTS``.
        logits: Roughly the size of the scores; negative for scores that are all near it.
        quick: Whether ``--quick`` looks at it.
    """

    name: str
    group: str
    query_len: int = 17
    key_len: int = 17
    head_dim: int = 16
    v_head_dim: int = 16
    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    mask: str = ""
    is_causal: bool = False
    layout: str = ""
    logits: float = 1.0
    scale: float | None = None
    nan_in_hidden_key: bool = False
    gradient_of_sum: bool = False
    quick: bool = False

    @property
    def size(self) -> int:
        """The number of scores, which orders situations by size."""
        return self.batch * self.heads * self.query_len * self.key_len * self.head_dim

    @property
    def plain(self) -> bool:
        """Whether it asks for nothing that a caller has to write down."""
        return not (self.mask or self.is_causal or self.scale or self.key_heads != self.heads)


@dataclass
class Inputs:
    """What a kernel is called with, and the gradient that comes back to its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float | None
    gqa: bool
    grad: Tensor

    def arguments(self) -> dict[str, Any]:
        """Give all but the three tensors, by the names of torch's function."""
        return {"attn_mask": self.mask, "is_causal": self.causal, "scale": self.scale, "enable_gqa": self.gqa}

    def with_leaves(self, requires_grad: bool) -> "Inputs":
        """Give the same call on copies that lie in memory alike, so that it can be differentiated anew."""
        q, k, v = (_copied(x).requires_grad_(requires_grad) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def in_plain_memory(self, dtype: torch.dtype) -> "Inputs":
        """Give the same numbers, contiguous, in another dtype."""
        q, k, v, grad = (x.detach().to(dtype).contiguous() for x in (self.q, self.k, self.v, self.grad))
        mask = self.mask.to(dtype) if self.mask is not None and self.mask.is_floating_point() else self.mask
        return replace(self, q=q, k=k, v=v, grad=grad, mask=mask)

    def on_cpu(self) -> "Inputs":
        """Give the same call on the CPU."""
        q, k, v, grad = (x.cpu() for x in (self.q, self.k, self.v, self.grad))
        return replace(self, q=q, k=k, v=v, grad=grad, mask=None if self.mask is None else self.mask.cpu())


def _copied(x: Tensor) -> Tensor:
    memory = x.detach().untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(memory, x.storage_offset(), x.shape, x.stride())


def source_of(situation: Situation, seed: int, device: str, dtype: str) -> list[str]:
    """Write the lines that make q, k, v, mask and grad.

    Args:
        situation: Which.
        seed: Of the numbers, which are drawn on the CPU so that every device gets the same.
        device: Where they go.
        dtype: A key of ``DTYPES``.

    Returns:
        Lines for torch alone; after them ``q``, ``k``, ``v``, ``grad`` and, if there is one, ``mask`` are there.
    """
    s = situation
    sizes = {"b": s.batch, "q": s.query_len, "k": s.key_len}
    last = [(s.heads, s.query_len, s.head_dim), (s.key_heads, s.key_len, s.head_dim)]
    last += [(s.key_heads, s.key_len, s.v_head_dim), (s.heads, s.query_len, s.v_head_dim)]
    shapes = ", ".join(str((s.batch, *shape)) for shape in last)
    lines = [
        f"torch.manual_seed({seed})",
        f'q, k, v, grad = (torch.randn(shape).to("{device}", torch.{dtype}) for shape in ({shapes}))',
        *_scaled(s),
        *([f"q, k, v = ({LAYOUTS[s.layout]} for x in (q, k, v))"] if s.layout else []),
    ]
    if s.mask:
        moved = "q" if s.mask in ADDED else "q.device"
        lines.append(f"mask = ({MASKS[s.mask].format(**sizes)}).to({moved})")
    if s.gradient_of_sum:
        lines.append("grad = torch.ones(()).to(grad).expand_as(grad)")
    if s.nan_in_hidden_key:
        lines.append("k[1, :, -1] = torch.nan")
    return lines


def _scaled(s: Situation) -> list[str]:
    if s.logits == 1.0:
        return []
    size = abs(s.logits)
    if s.logits < 0:  # all scores near one number: every query and key holds a large constant feature
        return [f"q[..., 0], k[..., 0] = -{size} * {s.head_dim}**0.5 / 8, 8"]
    return [f"q = q * {size / 4}"]


def make_inputs(situation: Situation, seed: int, device: str, dtype: str) -> Inputs:
    """Run the lines of ``source_of`` and leave the random state as it was."""
    names: dict[str, Any] = {"torch": torch, "mask": None}
    with torch.random.fork_rng(devices=[]):
        exec("\n".join(source_of(situation, seed, device, dtype)), names)
    gqa = situation.key_heads != situation.heads
    q, k, v, mask, grad = (names[name] for name in ("q", "k", "v", "mask", "grad"))
    return Inputs(q, k, v, mask, situation.is_causal, situation.scale, gqa, grad)


def listed_situations(quick: bool = False) -> list[Situation]:
    """List every situation, or those that a quick run has time for; plain and small ones first."""
    found = [*_lengths(), *_causal(), *_masks(), *_numbers(), *_head_sizes(), *_layouts(), *_edges()]
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    return [one for one in found if one.quick or not quick]


def _lengths() -> Iterator[Situation]:
    quick = (1, 2, 16, 63, 64, 65, 129)
    for length in (1, 2, 16, 31, 63, 64, 65, 96, 127, 128, 129, 191, 192, 193, 704):
        yield Situation(f"length {length}", "lengths", length, length, quick=length in quick)
    for query_len, key_len in ((1, 64), (1, 129), (5, 704), (65, 1), (130, 7), (64, 192)):
        name = f"{query_len} queries, {key_len} keys"
        yield Situation(name, "lengths", query_len, key_len, quick=key_len == 129)


def _causal() -> Iterator[Situation]:
    for query_len, key_len in ((1, 1), (17, 17), (64, 64), (65, 65), (129, 129), (192, 192), (704, 704)):
        name, quick = f"causal, length {query_len}", query_len in (17, 65, 129)
        yield Situation(name, "causal", query_len, key_len, is_causal=True, quick=quick)
    for query_len, key_len in ((1, 9), (5, 7), (63, 65), (64, 128), (65, 193), (7, 5), (129, 64)):
        name = f"causal, {query_len} queries, {key_len} keys"
        yield Situation(name, "causal", query_len, key_len, is_causal=True, quick=(query_len, key_len) == (5, 7))
    yield Situation("lower right, 5 queries, 7 keys", "causal", 5, 7, mask="lower right", quick=True)
    yield Situation("lower right, 65 queries, 193 keys", "causal", 65, 193, mask="lower right")


def _masks() -> Iterator[Situation]:
    for mask in ("bool", "all true", "blind rows", "padding", "float", "-inf", "1e4"):
        for length in (5, 65, 128, 192):
            name = f"mask {mask}, length {length}"
            yield Situation(name, "masks", length, length + 2 * (length < 100), mask=mask, quick=length in (5, 65))


def _numbers() -> Iterator[Situation]:
    for logits, mask in ((120.0, ""), (120.0, "bool"), (-120.0, ""), (-120.0, "bool"), (-120.0, "-inf")):
        for length in (17, 192):
            size = f"up to {logits:.0f}" if logits > 0 else f"near {logits:.0f}"
            name = f"scores {size}{', mask ' + mask if mask else ''}, length {length}"
            yield Situation(name, "numbers", length, length, logits=logits, mask=mask, quick=length == 17)
    yield Situation("scale 0.3", "numbers", scale=0.3, quick=True)
    yield Situation("scale 1", "numbers", 65, 65, scale=1.0)


def _head_sizes() -> Iterator[Situation]:
    for head_dim in (1, 2, 3, 8, 13, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256):
        name, quick = f"head size {head_dim}", head_dim in (1, 13, 64)
        yield Situation(name, "head sizes", 9, 9, head_dim, head_dim, quick=quick)
    yield Situation("head size 16, values 24", "head sizes", 9, 9, 16, 24, quick=True)
    yield Situation("head size 192, values 128", "head sizes", 9, 9, 192, 128)


def _layouts() -> Iterator[Situation]:
    for layout in LAYOUTS:
        for length in (17, 65):
            if layout:
                yield Situation(
                    f"{layout}, length {length}", "layouts", length, length, layout=layout, quick=length == 17
                )


def _edges() -> Iterator[Situation]:
    """Grouped heads, and inputs with nothing in them."""
    yield Situation("4 heads on 2", "heads", key_heads=2, quick=True)
    yield Situation("6 heads on 1, length 65", "heads", 65, 65, heads=6, key_heads=1)
    yield Situation("4 heads on 2, causal, length 129", "heads", 129, 129, key_heads=2, is_causal=True)
    yield Situation("4 heads on 2, mask bool", "heads", key_heads=2, mask="bool", quick=True)
    yield Situation("as many tokens as heads", "heads", 4, 4, quick=True)
    yield Situation("gradient of a sum", "edges", gradient_of_sum=True, quick=True)
    yield Situation("batch 0", "edges", batch=0, quick=True)
    yield Situation("no queries", "edges", 0, 5)
    yield Situation("no keys", "edges", 5, 0, quick=True)
    yield Situation("NaN in a hidden key", "edges", 9, 9, mask="padding", nan_in_hidden_key=True, quick=True)
