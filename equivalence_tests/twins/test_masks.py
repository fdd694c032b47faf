"""Mask builders against slow, obvious ones, and the conversions between the three conventions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scratch
from equivalence_tests.instruments.side_by_side import PACKAGES, random_tensor

pytestmark = pytest.mark.parametrize("masks", [package.masks for package in PACKAGES.values()], ids=PACKAGES)

LENGTHS = [(0, 0), (0, 3), (3, 0), (1, 1), (1, 7), (5, 5), (5, 7), (7, 5)]
ALIGNMENTS = ["upper_left", "lower_right"]


def slow_mask(query_len: int, key_len: int, may_look: Callable[[int, int], bool]) -> Tensor:
    """Ask for each query and key in turn."""
    may_attend = torch.zeros(query_len, key_len, dtype=torch.bool)
    for i in range(query_len):
        for j in range(key_len):
            may_attend[i, j] = may_look(i, j)
    return may_attend


def place_among_keys(query_len: int, key_len: int, align: str) -> int:
    """Say at which key the first query stands."""
    return key_len - query_len if align == "lower_right" else 0


@pytest.mark.parametrize(("query_len", "key_len"), LENGTHS)
@pytest.mark.parametrize("align", ALIGNMENTS)
class TestBuilders:
    def test_causal_lets_no_query_look_at_a_later_key(
        self, masks: Any, query_len: int, key_len: int, align: str
    ) -> None:
        first = place_among_keys(query_len, key_len, align)
        expected = slow_mask(query_len, key_len, lambda i, j: j <= first + i)
        assert torch.equal(masks.causal(query_len, key_len, align=align), expected)

    @pytest.mark.parametrize("window", [1, 2, 4, 100])
    def test_sliding_window_lets_a_query_look_at_its_neighbours(
        self, masks: Any, query_len: int, key_len: int, align: str, window: int
    ) -> None:
        first = place_among_keys(query_len, key_len, align)
        expected = slow_mask(query_len, key_len, lambda i, j: -window < j - (first + i) < window)
        assert torch.equal(masks.sliding_window(query_len, key_len, window=window, align=align), expected)


def test_masks_are_square_unless_a_key_length_is_given(masks: Any) -> None:
    assert masks.causal(5).shape == (5, 5)
    assert masks.sliding_window(5, window=2).shape == (5, 5)


def test_a_query_that_comes_last_sees_all_keys_if_aligned_lower_right(masks: Any) -> None:
    assert masks.causal(1, 7, align="lower_right").all()
    assert masks.causal(1, 7).sum() == 1


def test_masks_are_built_where_asked(masks: Any) -> None:
    for built in (masks.causal(5, 7, device="meta"), masks.sliding_window(5, 7, window=2, device="meta")):
        assert (built.device.type, built.shape, built.dtype) == ("meta", (5, 7), torch.bool)
    with torch.device("meta"):
        assert masks.causal(5).device.type == masks.sliding_window(5, window=2).device.type == "meta"


def test_lengths_leave_the_first_keys(masks: Any) -> None:
    lengths = torch.tensor([2, 0, 7])
    expected = slow_mask(3, 7, lambda i, j: j < int(lengths[i]))
    assert torch.equal(masks.from_lengths(lengths), expected)
    assert torch.equal(masks.from_lengths(lengths, max_len=5), expected[:, :5])
    assert torch.equal(masks.from_lengths(lengths, max_len=11)[:, 7:], torch.zeros(3, 4, dtype=torch.bool))
    assert masks.from_lengths(torch.tensor([], dtype=torch.int64)).shape == (0, 0)


def test_token_ids_leave_what_is_no_padding_holes_included(masks: Any) -> None:
    token_ids = torch.tensor([[9, 3, 9, 9], [1, 9, 2, 9]])
    assert masks.from_token_ids(token_ids, pad_id=9).tolist() == [
        [False, True, False, False],
        [True, False, True, False],
    ]
    assert masks.from_token_ids(token_ids[0].to(torch.int16), pad_id=9).shape == (4,)


def test_masks_combine(masks: Any) -> None:
    both = masks.causal(4) & masks.from_token_ids(torch.tensor([5, 5, 0, 5]), pad_id=0)
    assert masks.draw(both) == "1 0 0 0\n1 1 0 0\n1 1 0 0\n1 1 0 1"


class TestConversions:
    def test_module_masks_say_the_opposite(self, masks: Any) -> None:
        may_attend = masks.causal(5, 7)
        assert torch.equal(masks.to_module_mask(may_attend), ~may_attend)
        assert torch.equal(masks.from_module_mask(~may_attend), may_attend)

    def test_score_biases_are_0_and_minus_infinity(self, masks: Any) -> None:
        may_attend = torch.tensor([[True, False], [False, True]])
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            score_bias = masks.to_score_bias(may_attend, dtype)
            assert score_bias.dtype == dtype
            assert score_bias.tolist() == [[0.0, -torch.inf], [-torch.inf, 0.0]]

    def test_conversions_come_back_to_where_they_began(self, masks: Any) -> None:
        may_attend = random_tensor(2, 3, 5, 7) > 0
        assert torch.equal(masks.from_module_mask(masks.to_module_mask(may_attend)), may_attend)
        assert torch.equal(masks.from_score_bias(masks.to_score_bias(may_attend)), may_attend)
        assert torch.equal(masks.from_module_mask(masks.to_score_bias(may_attend)), may_attend)

    def test_the_three_conventions_reach_torch_alike(self, masks: Any) -> None:
        """One mask, said to the module as bool and as float, and to the function."""
        may_attend, x = masks.causal(5, 7), random_tensor(5, 3)
        attention = nn.MultiheadAttention(3, 1, dtype=torch.float64)
        memory = random_tensor(7, 3, seed=1)
        as_bool, _ = attention(x, memory, memory, attn_mask=masks.to_module_mask(may_attend))
        as_float, _ = attention(x, memory, memory, attn_mask=masks.to_score_bias(may_attend, torch.float64))
        assert torch.equal(as_bool, as_float)
        q, k, v = x[None, None], memory[None, None], memory[None, None]
        from_function = F.scaled_dot_product_attention(q, k, v, attn_mask=may_attend)
        assert torch.equal(from_function, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_the_float_form_is_torchs_bit_by_bit_and_dtype_by_dtype(masks: Any) -> None:
    for dtype in (None, torch.float64, torch.bfloat16, torch.bool):
        expected = nn.Transformer.generate_square_subsequent_mask(5, dtype=dtype)
        for package in PACKAGES.values():
            actual = package.Transformer.generate_square_subsequent_mask(5, dtype=dtype)
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
    assert torch.equal(masks.from_score_bias(scratch.Transformer.generate_square_subsequent_mask(5)), masks.causal(5))


def test_pictures_show_rows_of_queries_and_columns_of_keys(masks: Any) -> None:
    assert masks.draw(torch.tensor([[True, False, True]])) == "1 0 1"
    assert masks.draw(torch.tensor([[True], [False]])) == "1\n0"
