"""Score and mask functions: each is a dense bias written in another way, and torch takes the same objects."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as torch_flex

import builtin
import scratch
from equivalence_tests.instruments.side_by_side import assert_equal, outputs_and_gradients, random_tensor
from scratch import flex, masks
from scratch import score_functions as sf

BATCH, HEADS, QUERY_LEN, KEY_LEN = 2, 3, 5, 7
SIZES = (BATCH, HEADS, QUERY_LEN, KEY_LEN)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 2]])
SLOPES, TABLE, SINKS = (random_tensor(*shape, seed=5) for shape in ((HEADS,), (HEADS, 5), (HEADS,)))


def inputs() -> dict[str, Any]:
    shapes = {"query": (QUERY_LEN, 11), "key": (KEY_LEN, 11), "value": (KEY_LEN, 13)}
    return {name: random_tensor(BATCH, HEADS, *shape, seed=len(name)) for name, shape in shapes.items()}


def of_lists(cell: Callable[[int, int, int, int], Any]) -> Tensor:
    """Fill a tensor place by place."""
    b, h, q, k = map(range, SIZES)
    dtype = torch.bool if isinstance(cell(0, 0, 0, 0), bool) else torch.float64
    return torch.tensor([[[[cell(w, x, y, z) for z in k] for y in q] for x in h] for w in b], dtype=dtype)


MASKS: dict[str, tuple[sf.MaskFunction, Callable[[int, int, int, int], bool]]] = {
    "causal": (sf.causal(), lambda b, h, i, j: j <= i),
    "causal, lower right": (sf.causal(KEY_LEN - QUERY_LEN), lambda b, h, i, j: j <= i + 2),
    "causal, some blind": (sf.causal(-2), lambda b, h, i, j: j <= i - 2),
    "window": (sf.sliding_window(2), lambda b, h, i, j: abs(i - j) <= 1),
    "window, lower right": (sf.sliding_window(3, offset=2), lambda b, h, i, j: abs(i + 2 - j) < 3),
    "documents": (sf.document(DOCUMENTS), lambda b, h, i, j: bool(DOCUMENTS[b, i] == DOCUMENTS[b, j])),
    "the same documents": (sf.document(DOCUMENTS[1]), lambda b, h, i, j: bool(DOCUMENTS[1, i] == DOCUMENTS[1, j])),
    "prefix": (sf.prefix(3), lambda b, h, i, j: j < 3),
    "prefix of each": (sf.prefix(torch.tensor([0, 4])), lambda b, h, i, j: j < (0, 4)[b]),
    "and": (sf.causal(2) & sf.sliding_window(3, 2), lambda b, h, i, j: i - 1 < j <= i + 2),
    "or": (sf.prefix(2) | sf.causal(), lambda b, h, i, j: j < 2 or j <= i),
    "not": (~sf.causal(), lambda b, h, i, j: j > i),
    "a plain function": (
        sf.causal() & (lambda batch, head, q_idx, kv_idx: head != 1) | (lambda batch, head, q_idx, kv_idx: kv_idx == 6),
        lambda b, h, i, j: (j <= i and h != 1) or j == 6,
    ),
}
SCORES: dict[str, tuple[Callable[..., Tensor], Callable[[int, int, int, int], float]]] = {
    "alibi": (sf.alibi(SLOPES), lambda b, h, i, j: -float(SLOPES[h]) * abs(i - j)),
    "relative": (sf.relative_bias(TABLE), lambda b, h, i, j: float(TABLE[h, max(-2, min(j - i, 2)) + 2])),
}


@pytest.mark.parametrize("mask", MASKS)
class TestMasks:
    def test_they_say_what_they_say_place_by_place(self, mask: str) -> None:
        function, cell = MASKS[mask]
        assert torch.equal(flex.create_mask(function, *SIZES, "cpu"), of_lists(cell))

    def test_they_take_indices_that_broadcast_too(self, mask: str) -> None:
        function, cell = MASKS[mask]
        b, h, i, j = torch.meshgrid(*map(torch.arange, SIZES), indexing="ij")
        assert torch.equal(function(b, h, i, j), of_lists(cell))

    def test_attention_is_that_of_a_dense_mask(self, mask: str) -> None:
        function, cell = MASKS[mask]
        block_mask = scratch.create_block_mask(function, *SIZES, "cpu", 3)
        actual = outputs_and_gradients(scratch.flex_attention, inputs(), block_mask=block_mask)
        expected = outputs_and_gradients(F.scaled_dot_product_attention, inputs(), attn_mask=of_lists(cell))
        assert_equal(actual, expected)

    def test_torch_takes_the_same_objects(self, mask: str) -> None:
        function, cell = MASKS[mask]
        block_mask = torch_flex.create_block_mask(function, *SIZES, "cpu", 3)
        output = torch_flex.flex_attention(**inputs(), block_mask=block_mask)
        expected = F.scaled_dot_product_attention(**inputs(), attn_mask=of_lists(cell))
        assert_equal({"output": output}, {"output": expected})
        found = torch_flex.create_mask(torch_flex.and_masks(function, sf.prefix(5)), *SIZES, "cpu")
        assert torch.equal(found[..., :5], of_lists(cell)[..., :5])
        assert not found[..., 5:].any()


@pytest.mark.parametrize("scores", SCORES)
class TestBiases:
    def test_they_add_what_they_add_place_by_place(self, scores: str) -> None:
        function, cell = SCORES[scores]
        b, h, i, j = torch.meshgrid(*map(torch.arange, SIZES), indexing="ij")
        score = random_tensor(*SIZES, seed=7)
        assert_equal({"output": function(score, b, h, i, j)}, {"output": score + of_lists(cell)})

    def test_attention_is_that_of_a_dense_bias(self, scores: str) -> None:
        function, cell = SCORES[scores]
        actual = outputs_and_gradients(scratch.flex_attention, inputs(), score_mod=function)
        score_bias = of_lists(cell)
        assert_equal(actual, outputs_and_gradients(F.scaled_dot_product_attention, inputs(), attn_mask=score_bias))

    def test_torch_takes_the_same_objects(self, scores: str) -> None:
        function, cell = SCORES[scores]
        output = torch_flex.flex_attention(**inputs(), score_mod=function)
        expected = F.scaled_dot_product_attention(**inputs(), attn_mask=of_lists(cell))
        assert_equal({"output": output}, {"output": expected})


def test_a_table_of_distances_gets_the_gradient_of_the_dense_bias() -> None:
    gradients = []
    for by_function in (True, False):
        table = TABLE.clone().requires_grad_()
        if by_function:
            output = scratch.flex_attention(**inputs(), score_mod=sf.relative_bias(table))
        else:
            distances = (torch.arange(KEY_LEN) - torch.arange(QUERY_LEN)[:, None]).clamp(-2, 2) + 2
            output = F.scaled_dot_product_attention(**inputs(), attn_mask=table[:, distances].expand(SIZES))
        gradients.append(torch.autograd.grad(output, table, random_tensor(*output.shape, seed=3))[0])
    assert_equal({"gradient": gradients[0]}, {"gradient": gradients[1]})


def test_a_mask_function_is_no_other_later_and_shows_no_function_of_its_own() -> None:
    mask = sf.causal()
    with pytest.raises(FrozenInstanceError):
        mask.may_attend = sf.prefix(2)  # type: ignore[misc]
    assert "lambda" not in repr(mask)


def test_soft_caps_bend_the_scores() -> None:
    def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT / math.sqrt(11)
        return (0.7 * torch.tanh(scores / 0.7)).softmax(-1) @ value

    actual = outputs_and_gradients(scratch.flex_attention, inputs(), score_mod=sf.soft_cap(0.7))
    assert_equal(actual, outputs_and_gradients(by_hand, inputs()))
    torchs = torch_flex.flex_attention(**inputs(), score_mod=sf.soft_cap(0.7))
    assert_equal({"output": torchs}, {"output": actual["output 0"]})


class TestSinks:
    def with_a_column(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        """Attend to one more key for each head, whose value is 0."""
        scores = (query @ key.mT / math.sqrt(11)).masked_fill(~masks.causal(QUERY_LEN, KEY_LEN).roll(-1, 0), -math.inf)
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)
        return weights[..., :-1] @ value

    def by_the_sum(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        mask = scratch.create_block_mask(rolled, None, None, QUERY_LEN, KEY_LEN, "cpu", 2)
        output, aux = scratch.flex_attention(
            query, key, value, block_mask=mask, return_aux=scratch.AuxRequest(lse=True)
        )
        return sf.add_sinks(output, aux.lse, sinks)

    def test_they_are_a_key_without_a_value(self) -> None:
        given = {**inputs(), "sinks": SINKS}
        actual, expected = (outputs_and_gradients(call, given) for call in (self.by_the_sum, self.with_a_column))
        assert_equal(actual, expected)

    def test_torch_gives_the_sum_that_they_need(self) -> None:
        mask = torch_flex.create_block_mask(rolled, None, None, QUERY_LEN, KEY_LEN, "cpu")
        output, aux = builtin.flex_attention(**inputs(), block_mask=mask, return_aux=builtin.AuxRequest(lse=True))
        expected = self.with_a_column(**inputs(), sinks=SINKS)
        assert_equal({"output": sf.add_sinks(output, aux.lse, SINKS)}, {"output": expected})

    def test_added_to_every_score_they_do_nothing(self) -> None:
        output = scratch.flex_attention(**inputs(), score_mod=lambda score, batch, head, q, k: score + SINKS[head])
        assert_equal({"output": output}, {"output": scratch.flex_attention(**inputs())})

    def test_a_query_that_sees_no_key_gives_all_its_weight_to_them(self) -> None:
        context, lse = torch.ones(1, 3, 1, 2, requires_grad=True), torch.full((1, 3, 1), -math.inf, requires_grad=True)
        output = sf.add_sinks(context, lse, SINKS.float())
        assert not output.any()
        output.sum().backward()
        assert lse.grad is not None
        assert not lse.grad.any()

    def test_half_precision_stays(self) -> None:
        context = torch.ones(1, 3, 5, 2, dtype=torch.bfloat16)
        assert sf.add_sinks(context, torch.zeros(1, 3, 5), SINKS.bfloat16()).dtype == torch.bfloat16


def rolled(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx <= (q_idx + 1) % QUERY_LEN


class TestSlopes:
    @pytest.mark.parametrize("num_heads", [1, 2, 4, 8, 16, 64])
    def test_powers_of_2_are_evenly_spaced(self, num_heads: int) -> None:
        slopes = sf.alibi_slopes(num_heads)
        assert slopes[-1] == 2**-8
        torch.testing.assert_close(slopes.log2(), -8 * torch.arange(1.0, num_heads + 1) / num_heads)

    @pytest.mark.parametrize("num_heads", [3, 5, 6, 7, 12, 33])
    def test_others_fill_up_with_every_second_slope_of_the_power_above(self, num_heads: int) -> None:
        below = 2 ** int(math.log2(num_heads))
        expected = torch.cat([sf.alibi_slopes(below), sf.alibi_slopes(2 * below)[::2][: num_heads - below]])
        assert torch.equal(sf.alibi_slopes(num_heads), expected)
        assert len(expected.unique()) == num_heads
