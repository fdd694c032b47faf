"""The masks: every builder at work, drawn, in the three forms in which torch takes them."""

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.learn.excerpts import Excerpt
from equivalence_tests.learn.page.tape import statement_at
from scratch import masks

__all__ = ["FORMS", "Drawn", "Form", "builders", "conversions", "drawn_masks", "mask_data"]

# What shows a builder best, with words where two are combined. Of other builders the examples of their docstrings are
# drawn.
SHOWN = {
    "causal(6)": "",
    "causal(3, 6)": "",
    'causal(3, 6, align="lower_right")': "",
    "sliding_window(6, window=2)": "",
    "sliding_window(6, window=3) & causal(6)": "Both must allow it: a query looks at itself and the two before it.",
    "from_lengths(torch.tensor([5, 2, 3]))": "",
    "from_token_ids(torch.tensor([[7, 4, 9, 0], [5, 8, 0, 0]]), pad_id=0)": "",
    "causal(5) & from_lengths(torch.tensor([3]), max_len=5)": "Causal, and the last two tokens are padding.",
    "causal(6) | from_lengths(torch.tensor([3]), max_len=6)": "Either is enough: a prefix that all see, then causal.",
}


@dataclass(frozen=True)
class Form:
    """One of the three conventions.

    Args:
        name: What it is called here.
        meaning: What an entry says.
        takers: Who takes it.
        convert: From ``may_attend``.
        code: The same as one would type it.
    """

    name: str
    meaning: str
    takers: str
    convert: Callable[[Tensor], Tensor]
    code: str


FORMS = (
    Form(
        "may_attend",
        "True = may look",
        "F.scaled_dot_product_attention, flex_attention",
        lambda may_attend: may_attend,
        "may_attend",
    ),
    Form(
        "module_mask",
        "True = may not look",
        "nn.MultiheadAttention, nn.Transformer and its layers",
        masks.to_module_mask,
        "masks.to_module_mask(may_attend)",
    ),
    Form(
        "score_bias",
        "added to the scores: −inf hides",
        "all of them",
        masks.to_score_bias,
        "masks.to_score_bias(may_attend)",
    ),
)


@dataclass(frozen=True)
class Drawn:
    """A mask of the gallery.

    Args:
        call: What builds it.
        words: What it does.
        formula: The builder's own; "" where two are combined.
        source: The statement that builds it.
        rows: What a row stands for.
        cells: Whether each place may be looked at.
    """

    call: str
    words: str
    formula: str
    source: Excerpt
    rows: str
    cells: tuple[tuple[bool, ...], ...]

    @property
    def address(self) -> str:
        """A name that can stand in an address."""
        return re.sub(r"[^a-z0-9]+", "-", self.call.lower()).strip("-")


def builders() -> dict[str, Callable[..., Tensor]]:
    """Find the functions of ``scratch.masks`` that build a mask, rather than convert or draw one.

    Returns:
        By name, in their order.
    """
    found = {name: getattr(masks, name) for name in masks.__all__}
    return {name: x for name, x in found.items() if callable(x) and "may_attend[" in (inspect.getdoc(x) or "")}


def drawn_masks() -> tuple[Drawn, ...]:
    """Build and draw every mask of the gallery, each builder at least once."""
    calls = dict(SHOWN)
    for name, builder in builders().items():
        if not any(f"{name}(" in call for call in SHOWN):
            calls |= dict.fromkeys(_drawn_in_docstring(builder), "")
    return tuple(_draw(call, words) for call, words in calls.items())


def _drawn_in_docstring(builder: Callable[..., Tensor]) -> Iterator[str]:
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(builder) or ""):
        match = re.fullmatch(
            r"print\((?:masks\.)?draw\((.*)\)\)", example.source.strip().partition("  #")[0], re.DOTALL
        )
        if match:
            yield match[1]


def evaluate(call: str) -> Tensor:
    """Build a mask from its call."""
    names: dict[str, Any] = {name: getattr(masks, name) for name in masks.__all__}
    return eval(call, {"torch": torch, "masks": masks} | names)


def _draw(call: str, words: str) -> Drawn:
    name = call.partition("(")[0]
    builder = builders()[name.removeprefix("masks.")]
    text = (inspect.getdoc(builder) or "").split("\n\n")
    formula = "" if words else " ".join(text[1].split())
    cells = tuple(tuple(row) for row in evaluate(call).tolist())
    return Drawn(
        call, words or text[0].replace("``", ""), formula, _last_statement(builder), _rows_of(name, words), cells
    )


def _rows_of(name: str, words: str) -> str:
    return "sample" if name.startswith("from_") and not words else "query"


def _last_statement(function: Callable[..., Any]) -> Excerpt:
    lines, first = inspect.getsourcelines(function)
    return statement_at(inspect.getfile(function), first + len(lines) - 1)


def conversions(may_attend: Tensor) -> dict[str, str]:
    """Print a mask in all three forms, as torch does.

    >>> conversions(torch.tensor([[True, False]]))["score_bias"]
    'tensor([[0., -inf]])'
    """
    return {form.name: str(form.convert(may_attend)) for form in FORMS}


START = 'causal(3, 5, align="lower_right")'


def mask_data() -> dict[str, Any]:
    """Draw the gallery, and fill the converter with a first mask."""
    may_attend = evaluate(START)
    rows = ", ".join(str([int(cell) for cell in row]) for row in may_attend.tolist())
    typed = f"may_attend = torch.tensor([{rows}], dtype=torch.bool)"
    bits = masks.draw(may_attend).replace(" ", "").replace("\n", " ")
    start = {"start": conversions(may_attend), "start_bits": bits, "typed": typed}
    return {"drawn": drawn_masks(), "forms": FORMS, **start}
