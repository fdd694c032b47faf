"""How each number of an attention comes about, written out with the numbers that go in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equivalence_tests.learn.page.figures import printed

__all__ = ["Explained", "Source", "explain_cells"]


@dataclass(frozen=True)
class Source:
    """Numbers that go into another one: a row, a column or a cell of one table of a tensor; None stands for all."""

    name: str
    table: int
    row: int | None
    column: int | None


@dataclass(frozen=True)
class Explained:
    """One number: where it stands, what it is made of, and the sum in full."""

    table: int
    row: int
    column: int
    text: str
    sources: tuple[Source, ...]

    @property
    def names(self) -> list[str]:
        """The tensors that go in."""
        return [source.name for source in self.sources]


def explain_cells(attention: Any, tensors: dict[str, Tensor]) -> dict[str, tuple[Explained, ...]]:
    """Explain every number of every stage.

    Args:
        attention: One of the attentions, with a packed projection.
        tensors: The inputs ``query`` and ``memory`` and the ``score_bias``, one sample each, and all stages.

    Returns:
        For each stage its numbers, table after table and row after row.
    """
    of = {name: x[0] if x.dim() > 2 else x for name, x in tensors.items()}  # without the batch
    (q_weight, _), (k_weight, _), (v_weight, _) = attention._in_projection().each()
    q_bias, k_bias, v_bias = attention.in_proj_bias.chunk(3)
    out_proj = attention.out_proj
    return {
        "q": tuple(_projected(of["q"], "query", of["query"], q_weight, q_bias)),
        "k": tuple(_projected(of["k"], "memory", of["memory"], k_weight, k_bias)),
        "v": tuple(_projected(of["v"], "memory", of["memory"], v_weight, v_bias)),
        "scores": tuple(_scores(of)),
        "masked_scores": tuple(_masked(of)),
        "weights": tuple(_weights(of)),
        "context": tuple(_context(of)),
        "merged": tuple(_merged(of)),
        "output": tuple(_output(of, out_proj.weight, out_proj.bias)),
    }


def _places(x: Tensor) -> Iterator[tuple[int, int, int, str]]:
    """Give each place of a tensor of tables, with its number."""
    for table, rows in enumerate(x.tolist()):
        for row, numbers in enumerate(rows):
            for column, number in enumerate(numbers):
                yield table, row, column, printed(number)


def _factor(number: float) -> str:
    text = printed(number)
    return f"({text})" if text.startswith("−") else text


def _products(left: Sequence[float], right: Sequence[float]) -> str:
    return " + ".join(f"{_factor(a)} × {_factor(b)}" for a, b in zip(left, right, strict=True))


def _projected(x: Tensor, source: str, inputs: Tensor, weight: Tensor, bias: Tensor) -> Iterator[Explained]:
    head_dim = x.size(-1)
    for head, row, feature, number in _places(x):
        at = head * head_dim + feature
        total = f"{_products(inputs[row].tolist(), weight[at].tolist())} + {_factor(bias[at].item())}"
        yield Explained(head, row, feature, f"{total} = {number}", (Source(source, 0, row, None),))


def _scores(of: dict[str, Tensor]) -> Iterator[Explained]:
    head_dim = of["q"].size(-1)
    for head, i, j, number in _places(of["scores"]):
        total = _products(of["q"][head, i].tolist(), of["k"][head, j].tolist())
        sources = Source("q", head, i, None), Source("k", head, j, None)
        yield Explained(head, i, j, f"({total}) / √{head_dim} = {number}", sources)


def _masked(of: dict[str, Tensor]) -> Iterator[Explained]:
    for head, i, j, number in _places(of["masked_scores"]):
        total = f"{printed(of['scores'][head, i, j].item())} + {_factor(of['score_bias'][i, j].item())}"
        sources = Source("scores", head, i, j), Source("score_bias", 0, i, j)
        yield Explained(head, i, j, f"{total} = {number}", sources)


def _weights(of: dict[str, Tensor]) -> Iterator[Explained]:
    for head, i, j, number in _places(of["weights"]):
        row = [f"exp({printed(score)})" for score in of["masked_scores"][head, i].tolist()]
        text = f"{row[j]} / ({' + '.join(row)}) = {number}"
        yield Explained(head, i, j, text, (Source("masked_scores", head, i, None),))


def _context(of: dict[str, Tensor]) -> Iterator[Explained]:
    for head, i, feature, number in _places(of["context"]):
        total = _products(of["weights"][head, i].tolist(), of["v"][head, :, feature].tolist())
        sources = Source("weights", head, i, None), Source("v", head, None, feature)
        yield Explained(head, i, feature, f"{total} = {number}", sources)


def _merged(of: dict[str, Tensor]) -> Iterator[Explained]:
    head_dim = of["context"].size(-1)
    for _, i, at, number in _places(of["merged"][None]):
        head, feature = divmod(at, head_dim)
        text = f"feature {feature} of head {head}, as it is: {number}"
        yield Explained(0, i, at, text, (Source("context", head, i, feature),))


def _output(of: dict[str, Tensor], weight: Tensor, bias: Tensor) -> Iterator[Explained]:
    for _, i, at, number in _places(of["output"][None]):
        total = f"{_products(of['merged'][i].tolist(), weight[at].tolist())} + {_factor(bias[at].item())}"
        yield Explained(0, i, at, f"{total} = {number}", (Source("merged", 0, i, None),))
