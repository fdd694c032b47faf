"""All ways through the steps."""

from equivalence_tests.learn.page.steps import View
from equivalence_tests.learn.page.steps_attention import attention_view, backward_view, decoding_view
from equivalence_tests.learn.page.steps_layers import decoder_view, encoder_layer_view

__all__ = ["views"]


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
