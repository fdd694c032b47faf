"""The page's pieces in a notebook: a trace, a mask or a report, drawn where the cell ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.learn.page.figures import Matrix, matrices
from equivalence_tests.learn.page.gallery import FORMS, conversions
from equivalence_tests.learn.page.steps import WORDS
from equivalence_tests.learn.page.templating import environment
from scratch import masks

__all__ = ["Shown", "show"]

MOST_NUMBERS = 20_000  # of one tensor: more than anybody reads, and as much as a notebook draws at once


@dataclass(frozen=True)
class Shown:
    """Something to look at: HTML in a notebook, text elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Stage:
    """A tensor of a trace, with the word of each axis."""

    name: str
    shape: tuple[tuple[str, int], ...]
    tables: tuple[Matrix, ...]


def show(what: Any) -> Shown:
    """Draw a trace, a mask or a report as the page does.

    Args:
        what: The stages of ``trace_attention`` or the maps of ``record_attention``; a mask: bool, True = may look, or
            float, added to the scores; or what ``verify`` returned.

    Returns:
        What a notebook shows as HTML, and a terminal as text.

    Raises:
        TypeError: For anything else.
        ValueError: For tensors that cannot be drawn, or are too large to look at.

    >>> print(show(masks.causal(3)))
    1 0 0
    1 1 0
    1 1 1
    >>> "<svg" in show(masks.causal(3))._repr_html_()
    True
    """
    if isinstance(what, Report):
        return _shown("report", str(what).rstrip(), report=str(what).rstrip())
    if isinstance(what, Tensor):
        return _show_mask(what)
    if isinstance(what, Mapping) and all(isinstance(x, Tensor) for x in what.values()):
        stages = tuple(_stage(str(name), x) for name, x in what.items())
        text = "\n".join(f"{name} {tuple(x.shape)}" for name, x in what.items())
        return _shown("trace", text, stages=stages)
    raise TypeError(
        "show takes a trace (a mapping of names to tensors), a mask (a bool or float tensor) or a report of verify, "
        f"got {type(what).__name__}"
    )


def _shown(kind: str, text: str, **data: Any) -> Shown:
    page = environment().get_template("notebook.html.j2")
    return Shown(page.render(kind=kind, **data), text)


def _check_drawable(name: str, x: Tensor) -> None:
    if x.is_complex() or x.is_meta or not 1 <= x.dim() <= 4 or not 1 <= x.numel() <= MOST_NUMBERS:
        raise ValueError(
            f"show draws tensors of 1 to 4 dimensions with 1 to {MOST_NUMBERS:,} real numbers, got {name} of shape "
            f"{tuple(x.shape)} and dtype {x.dtype} on {x.device}: cut out what you want to see"
        )


def _stage(name: str, x: Tensor) -> Stage:
    _check_drawable(name, x)
    words = WORDS.get(name, ("batch", "num_heads", "query_len", "key_len"))[-x.dim() :]
    shape = tuple(zip(words, x.shape, strict=True))
    return Stage(name, shape, matrices(x, words, 1.0 if name == "weights" else None))


def _show_mask(mask: Tensor) -> Shown:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"a mask must be bool (True = may look) or floating (added to the scores), got {mask.dtype}")
    _check_drawable("a mask", mask)
    mask = mask.detach().cpu()
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == -torch.inf)).all():
        return _shown("trace", str(mask), stages=(_stage("score_bias", mask),))
    may_attend = torch.atleast_2d(mask if mask.dtype == torch.bool else masks.from_score_bias(mask))
    tables = [table.tolist() for table in may_attend.flatten(0, -3)] if may_attend.dim() > 2 else [may_attend.tolist()]
    text = "\n\n".join(masks.draw(torch.tensor(table)) for table in tables)
    return _shown("mask", text, tables=tables, forms=FORMS, values=conversions(may_attend))
