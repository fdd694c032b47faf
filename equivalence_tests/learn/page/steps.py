"""The steps of a computation, both ways: what a step is, and what is alike in all of them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

import scratch
from equivalence_tests.instruments.side_by_side import with_same_weights
from equivalence_tests.learn.excerpts import Excerpt
from equivalence_tests.learn.page.figures import Matrix, gap, largest_of, matrices
from equivalence_tests.learn.page.tape import Entry

__all__ = [
    "EMBED_DIM",
    "FF_DIM",
    "HEAD_DIM",
    "KEY_LEN",
    "NUM_HEADS",
    "QUERY_LEN",
    "WORDS",
    "Quote",
    "Side",
    "Step",
    "View",
    "attention_pair",
    "detached",
    "quotes_of",
    "same_scale",
    "shown",
    "step_of",
]

# Every axis has its own size, so that no two can be mixed up.
NUM_HEADS, QUERY_LEN, HEAD_DIM, KEY_LEN, EMBED_DIM, FF_DIM = 2, 3, 4, 5, 8, 7
Q, K, E = "query_len", "key_len", "embed_dim"
WORDS = {
    "q": ("batch", "num_heads", Q, "head_dim"),
    "k": ("batch", "num_heads", K, "head_dim"),
    "v": ("batch", "num_heads", K, "head_dim"),
    "scores": ("batch", "num_heads", Q, K),
    "masked_scores": ("batch", "num_heads", Q, K),
    "weights": ("batch", "num_heads", Q, K),
    "context": ("batch", "num_heads", Q, "head_dim"),
    "merged": ("batch", Q, E),
    "output": ("batch", Q, E),
    "query": ("batch", Q, E),
    "memory": ("batch", K, E),
}


@dataclass(frozen=True)
class Quote:
    """A statement, and the operation that it asks for."""

    excerpt: Excerpt
    operation: str


@dataclass(frozen=True)
class Side:
    """One implementation's part in a step.

    Args:
        quotes: The statements that make the tensor.
        tables: Its numbers.
        wanted_rows: With more rows than the other side has: those that count, counted from 0.
    """

    quotes: tuple[Quote, ...]
    tables: tuple[Matrix, ...]
    wanted_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """One tensor on its way through both implementations.

    Args:
        name: Of the tensor, as a trace has it.
        formula: How it is computed.
        words: What happens here.
        shape: The word and the size of each axis.
        scratch: By hand.
        torch: Built in.
        gap: The greatest difference, as it is printed.
        count: How many numbers were compared.
        operands: What goes in, by name.
    """

    name: str
    formula: str
    words: str
    shape: tuple[tuple[str, int], ...]
    scratch: Side
    torch: Side
    gap: str
    count: int
    operands: dict[str, tuple[Matrix, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """A way through one thing: its address, its title, a sentence and the steps.

    ``call`` is the code that was run, ``notes`` are sentences with numbers that were computed, and ``is_code`` says
    that the formulas of the steps are Python.
    """

    name: str
    title: str
    lead: str
    call: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    is_code: bool = False


def attention_pair(**arguments: Any) -> tuple[scratch.MultiheadAttention, nn.MultiheadAttention]:
    """Build both attentions with the same random weights, in float64."""
    ours = scratch.MultiheadAttention(EMBED_DIM, NUM_HEADS, **arguments)
    theirs = nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, **arguments)
    with_same_weights(ours, theirs)
    return ours.eval(), theirs.eval()


def shown(call: Callable[..., Any]) -> str:
    """Quote the body of a function that holds the call which was made."""
    source = inspect.getsource(call)
    _, _, body = source.partition("return ")
    return body.strip()


def detached(stages: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut tensors off from their graph."""
    return {stage: x.detach() for stage, x in stages.items()}


def same_scale(stage: str, tensors: Sequence[Tensor]) -> list[tuple[Matrix, ...]]:
    """Give both sides' tables in one scale of colours."""
    largest = 1.0 if stage == "weights" else largest_of(*tensors)
    return [matrices(x, WORDS[stage], largest) for x in tensors]


def step_of(
    name: str,
    told: tuple[str, str],
    words: Sequence[str],
    sides: Sequence[Side],
    found: tuple[Tensor, Tensor],
    operands: dict[str, tuple[Matrix, ...]] | None = None,
) -> Step:
    """Put a step together.

    Args:
        name: Of the tensor.
        told: Formula and sentence.
        words: Of its axes.
        sides: The two, by hand first.
        found: What each has computed.
        operands: What goes in.

    Returns:
        The step, with the difference of the two.
    """
    ours, theirs = sides
    x = found[0]
    shape = tuple(zip(words, x.shape, strict=True))
    return Step(name, *told, shape, ours, theirs, gap(*found), x.numel(), operands or {})


def quotes_of(way: Sequence[Entry]) -> tuple[Quote, ...]:
    """Quote each statement once, with the first operation of it that computes, if any does."""
    by_statement: dict[Excerpt, list[Entry]] = {}
    for entry in way:
        by_statement.setdefault(entry.statement, []).append(entry)
    return tuple(
        Quote(statement, next((x for x in entries if not x.is_view), entries[-1]).operation)
        for statement, entries in by_statement.items()
    )
