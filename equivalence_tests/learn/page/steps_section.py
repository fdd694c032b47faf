"""All ways through the steps, as the page and its script take them."""

from collections.abc import Sequence
from typing import Any

from equivalence_tests.learn.page.steps import View
from equivalence_tests.learn.page.steps_attention import attention_view, backward_view, decoding_view
from equivalence_tests.learn.page.steps_layers import decoder_view, encoder_layer_view

__all__ = ["cells_data", "views"]


def views() -> tuple[View, ...]:
    """Compute all views."""
    return (
        attention_view(),
        encoder_layer_view(norm_first=False),
        encoder_layer_view(norm_first=True),
        decoder_view(),
        decoding_view(),
        backward_view(),
    )


def cells_data(found: Sequence[View]) -> dict[str, list[Any]]:
    """Give how each number comes about, for the script: by view and step, [table, row, column, sum, sources]."""
    return {
        f"{view.name} {step.name}": [
            [x.table, x.row, x.column, x.text, [[s.name, s.table, s.row, s.column] for s in x.sources]]
            for x in step.cells
        ]
        for view in found
        for step in view.steps
        if step.cells
    }
