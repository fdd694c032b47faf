import re

import pytest
import torch
from torch import nn

from equivalence_tests import verify
from equivalence_tests.learn.page import show
from equivalence_tests.learn.page.reading import printed_plainly, read_page
from scratch import MultiheadAttention, masks, record_attention, trace_attention


def test_a_trace_shows_every_stage_with_its_numbers() -> None:
    attention, x = MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
    trace = trace_attention(attention, x, x, x)
    shown = show(trace)
    assert all(stage in repr(shown) for stage in trace)
    tables = [table.rows for table in read_page(shown._repr_html_()).tables]
    expected = [
        [[printed_plainly(x) for x in row] for row in rows]
        for stage in trace.values()
        for rows in stage.detach().double().flatten(0, -3).tolist()
    ]
    assert tables == expected


def test_recorded_maps_are_shown_too() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2).eval()
    with record_attention(model) as maps:
        model(torch.randn(2, 3, 8))
    html = show(maps)._repr_html_()
    assert "layers.1.self_attn" in html
    assert "sample 1, head 1" in html


@pytest.mark.parametrize("mask", [masks.causal(3), masks.to_score_bias(masks.causal(3)), torch.ones(2, 3, 3) > 0])
def test_a_mask_shows_all_three_forms(mask: torch.Tensor) -> None:
    shown = show(mask)
    assert "True = may not look" in shown._repr_html_()
    assert shown._repr_html_().count("<svg") == (2 if mask.dim() == 3 else 1)
    assert repr(shown).startswith("1 ")


def test_a_bias_shows_its_numbers() -> None:
    assert "−1.500" in show(torch.tensor([[0.0, -1.5]]))._repr_html_()


def test_a_report_shows_what_verify_prints() -> None:
    report = verify(nn.MultiheadAttention)
    assert "EQUAL" in show(report)._repr_html_()
    assert repr(show(report)) == str(report).rstrip()


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"show takes a trace .*, a mask .* or a report of verify, got int"):
        show(5)
    with pytest.raises(TypeError, match=r"a mask must be bool .* or floating .*, got torch.int64"):
        show(torch.ones(2, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(True),
        torch.ones(1, 500, 500, dtype=torch.bool),
        torch.ones(2, 1, 1, 1, 1, dtype=torch.bool),
        torch.ones(0, 3, dtype=torch.bool),
        torch.ones(3, device="meta"),
    ],
    ids=lambda x: f"{tuple(x.shape)} on {x.device}",
)
def test_what_cannot_be_drawn_is_refused(x: torch.Tensor) -> None:
    message = "show draws tensors of 1 to 4 dimensions with 1 to 20,000 real numbers, got {} of shape {}"
    for what, name in ((x, "a mask"), ({"q": x}, "q")):
        with pytest.raises(ValueError, match=re.escape(message.format(name, tuple(x.shape)))):
            show(what)
