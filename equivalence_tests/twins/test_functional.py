"""Attention as a function: closed forms, a slow obvious implementation, and torch's MATH backend to the last bit."""

import itertools
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import scratch
from equivalence_tests.instruments.side_by_side import PACKAGES, assert_equal, outputs_and_gradients, random_tensor
from scratch.functional import attention, merge_heads, split_heads
from scratch.masks import Visible
from scratch.paths import are_plain, chosen_kernel, open_blind_rows, softmax, switched_on, weigh
from scratch.rounding import laid_out_like, sequence_first, upcast_half
from scratch.sdpa import textbook_attention

EACH_PACKAGE = pytest.mark.parametrize(
    "sdpa", [package.scaled_dot_product_attention for package in PACKAGES.values()], ids=PACKAGES
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAY_ATTEND = torch.ones(5, 7, dtype=torch.bool).tril(1)
BLIND = MAY_ATTEND.clone()
BLIND[2] = False


def heads(dtype: torch.dtype = torch.float64, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Give query, key and value of batch 2, heads 3, query 5, key 7, head_dim 11 and value width 13."""
    usual = {"query": (2, 3, 5, 11), "key": (2, 3, 7, 11), "value": (2, 3, 7, 13)}
    return {
        name: random_tensor(*shapes.get(name, shape), seed=seed, dtype=dtype)
        for seed, (name, shape) in enumerate(usual.items())
    }


def slow_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, scale: float | None = None
) -> list[list[float]]:
    """Attend with loops and floats, one query after the other; two-dimensional inputs."""
    output = []
    scale = 1 / math.sqrt(query.size(1)) if scale is None else scale
    for i, q in enumerate(query.tolist()):
        scores = [scale * sum(x * y for x, y in zip(q, k, strict=True)) for k in key.tolist()]
        for j in range(len(scores)):
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                scores[j] = scores[j] if attn_mask[i, j] else -math.inf
            elif attn_mask is not None:
                scores[j] += float(attn_mask[i, j])
        exponentials = [math.exp(score - max(scores)) for score in scores]
        weights = [x / sum(exponentials) for x in exponentials]
        output.append([sum(w * v for w, v in zip(weights, column, strict=True)) for column in value.T.tolist()])
    return output


def test_a_context_is_laid_out_anew_only_beside_transposed_queries() -> None:
    query, context = random_tensor(2, 3, 5, 11), random_tensor(2, 3, 5, 13)
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert laid_out_like(query, context) is context
    assert laid_out_like(transposed, context).stride(1) == 13
    one, of_another_rank = context[:, :1, :1], context[None]
    assert laid_out_like(query[:, :1, :1].contiguous(), one) is one
    assert laid_out_like(transposed[..., 0], context) is context
    assert laid_out_like(transposed, of_another_rank) is of_another_rank


class TestClosedForms:
    def test_the_worked_example_of_the_scores(self) -> None:
        query, keys = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, 1.0]])
        _, weights = attention(query, keys, keys)
        assert torch.equal(weights, torch.softmax(torch.tensor([[2.0, 4.0, 4.0]]), dim=-1))

    @EACH_PACKAGE
    def test_the_worked_example_of_the_output(self, sdpa: Any) -> None:
        """The weights are rounded to [0.0, 0.5, 0.5] there, which a large scale does to the last bit."""
        query, keys = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, 1.0]])
        values = torch.tensor([[1.0, 2.0, 3.0], [2.0, 8.0, 0.0], [2.0, 6.0, 3.0]])
        assert sdpa(query, keys, values, scale=1e4).tolist() == [[2.0, 7.0, 1.5]]

    @EACH_PACKAGE
    def test_equal_keys_give_the_mean_of_the_values(self, sdpa: Any) -> None:
        inputs = heads()
        output = sdpa(inputs["query"], inputs["key"][..., :1, :].expand(2, 3, 7, 11), inputs["value"])
        mean = inputs["value"].mean(-2, keepdim=True).expand_as(output)
        assert_equal({"output": output}, {"output": mean.contiguous()})

    @EACH_PACKAGE
    def test_equal_keys_and_a_mask_give_the_mean_of_the_values_it_leaves(self, sdpa: Any) -> None:
        inputs = heads(key=(2, 3, 7, 11))
        output = sdpa(inputs["query"], torch.zeros(2, 3, 7, 11, dtype=torch.float64), inputs["value"], MAY_ATTEND)
        for i in range(5):
            expected = inputs["value"][..., MAY_ATTEND[i], :].mean(-2)
            assert_equal({"output": output[..., i, :].contiguous()}, {"output": expected})

    @EACH_PACKAGE
    def test_one_key_gives_its_value(self, sdpa: Any) -> None:
        inputs = heads(key=(2, 3, 1, 11), value=(2, 3, 1, 13))
        assert torch.equal(sdpa(**inputs), inputs["value"].expand(2, 3, 5, 13))

    @EACH_PACKAGE
    def test_a_far_better_key_gives_its_value(self, sdpa: Any) -> None:
        query, keys, values = torch.ones(1, 2), torch.tensor([[0.0, 0.0], [1e3, 1e3], [0.0, 0.0]]), torch.eye(3)
        assert sdpa(query, keys, values).tolist() == [[0.0, 1.0, 0.0]]

    @EACH_PACKAGE
    @pytest.mark.parametrize("scale", [None, 0.3, -0.3, 0.0])
    @pytest.mark.parametrize("attn_mask", [None, MAY_ATTEND, random_tensor(5, 7, seed=5)], ids=["all", "bool", "float"])
    def test_loops_over_floats_give_the_same(self, sdpa: Any, attn_mask: Tensor | None, scale: float | None) -> None:
        query, key, value = random_tensor(5, 11), random_tensor(7, 11, seed=1), random_tensor(7, 13, seed=2)
        expected = torch.tensor(slow_attention(query, key, value, attn_mask, scale), dtype=torch.float64)
        assert_equal({"output": sdpa(query, key, value, attn_mask, scale=scale)}, {"output": expected})


MASKS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": MAY_ATTEND},
    "bool for each head": {"attn_mask": random_tensor(2, 3, 5, 7, seed=6) > 0},
    "bool with a blind row": {"attn_mask": BLIND},
    "float": {"attn_mask": random_tensor(5, 7, seed=7)},
    "float with a blind row": {"attn_mask": torch.zeros(5, 7, dtype=torch.float64).masked_fill(~BLIND, -math.inf)},
    "one for all queries": {"attn_mask": MAY_ATTEND[2:3]},
    "one for all keys": {"attn_mask": torch.tensor([[True], [True], [False], [True], [True]])},
    "padding": {"attn_mask": (random_tensor(2, 7, seed=8) > 0)[:, None, None, :]},
    "scaled": {"scale": 0.3},
    "negative scale": {"scale": -0.3, "attn_mask": MAY_ATTEND},
    "dropout": {"dropout_p": 0.3},
    "dropout and a mask": {"dropout_p": 0.3, "attn_mask": BLIND},
}
SHAPES: dict[str, dict[str, Any]] = {
    "4-D": {},
    "5-D": {"query": (1, 2, 3, 5, 11), "key": (1, 2, 3, 7, 11), "value": (1, 2, 3, 7, 13)},
    "grouped": {"query": (2, 65, 5, 11), "key": (2, 5, 7, 11), "value": (2, 5, 7, 13)},
    "one key for all samples": {"key": (1, 3, 7, 11), "value": (1, 3, 7, 13)},
}


def in_dtype(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in arguments.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
class TestBits:
    """Against torch's MATH backend, forwards and backwards."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_outputs_and_gradients_are_the_math_backends_to_the_last_bit(
        self, shape: str, mask: str, dtype: torch.dtype
    ) -> None:
        inputs, arguments = heads(dtype, **SHAPES[shape]), in_dtype(MASKS[mask], dtype)
        if "for each head" in mask and shape != "4-D":
            return
        arguments |= {"enable_gqa": shape == "grouped"}
        actual = outputs_and_gradients(scratch.scaled_dot_product_attention, inputs, **arguments)
        with sdpa_kernel(SDPBackend.MATH):
            expected = outputs_and_gradients(F.scaled_dot_product_attention, inputs, **arguments)
        assert_equal(actual, expected, relative_bound=0)

    def test_three_dimensions_are_one_sample(self, mask: str, dtype: torch.dtype) -> None:
        inputs = {name: x[0] for name, x in heads(dtype).items()}
        arguments: dict[str, Any] = {
            name: x[0] if isinstance(x, Tensor) and x.dim() == 4 else x
            for name, x in in_dtype(MASKS[mask], dtype).items()
        }
        actual = outputs_and_gradients(scratch.scaled_dot_product_attention, inputs, **arguments)
        with sdpa_kernel(SDPBackend.MATH):
            expected = outputs_and_gradients(F.scaled_dot_product_attention, inputs, **arguments)
        assert_equal(actual, expected, relative_bound=0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        (torch.float64, [(17, 7), (19, 7), (19, 2)]),
        (torch.float64, [(5, 3, 5, 8), (5, 3, 16, 8), (5, 3, 16, 7)]),
        (torch.float32, [(3, 3, 33, 8), (3, 3, 3, 8), (3, 3, 3, 16)]),
        (torch.float32, [(2, 5, 50, 1), (2, 5, 19, 1), (2, 5, 19, 11)]),
    ],
    ids=str,
)
def test_the_bits_are_torchs_where_products_round_by_how_their_factors_lie_in_memory(
    dtype: torch.dtype, shapes: list[tuple[int, ...]], is_causal: bool
) -> None:
    """From about 16 places on, the CPU's kernels take other paths for other strides and alignments."""
    query, key, value = (random_tensor(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    inputs = {"query": query.mT.contiguous().mT, "key": key, "value": value.mT.contiguous().mT}
    for enable_gqa in {False, query.dim() > 2}:  # groups of one: as without
        arguments: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": enable_gqa}
        actual = outputs_and_gradients(scratch.scaled_dot_product_attention, inputs, **arguments)
        with sdpa_kernel(SDPBackend.MATH):
            expected = outputs_and_gradients(F.scaled_dot_product_attention, inputs, **arguments)
        assert_equal(actual, expected, relative_bound=0)


def test_so_are_those_of_a_key_that_stands_for_many() -> None:
    query, key, value = random_tensor(17, 7), random_tensor(1, 7, seed=1).expand(19, 7), random_tensor(19, 2, seed=2)
    for scale in (None, 1.0, -0.5):
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(query, key, value, scale=scale)
        assert torch.equal(scratch.scaled_dot_product_attention(query, key, value, scale=scale), expected)


@pytest.mark.parametrize("mask", [name for name in MASKS if "dropout" not in name])
def test_the_kernel_that_torch_chooses_agrees_up_to_rounding(mask: str) -> None:
    inputs = heads(value=(2, 3, 7, 11))  # the fused kernel asks for equal widths
    actual = outputs_and_gradients(scratch.scaled_dot_product_attention, inputs, **MASKS[mask])
    assert_equal(actual, outputs_and_gradients(F.scaled_dot_product_attention, inputs, **MASKS[mask]))


@EACH_PACKAGE
class TestEdges:
    def test_a_query_that_may_look_at_no_key_gets_0_and_gives_no_gradient(self, sdpa: Any) -> None:
        found = outputs_and_gradients(sdpa, heads(), attn_mask=BLIND)
        output, gradient = found["output 0"], found["gradient of query"]
        assert output is not None
        assert gradient is not None
        assert not output[..., 2, :].any()
        assert not gradient[..., 2, :].any()
        assert output[..., [0, 1, 3, 4], :].all()
        assert all(x is not None and x.isfinite().all() for x in found.values())

    def test_float_masks_of_minus_infinity_do_the_same(self, sdpa: Any) -> None:
        score_bias = torch.zeros(5, 7, dtype=torch.float64).masked_fill(~BLIND, -math.inf)
        assert_equal(
            outputs_and_gradients(sdpa, heads(), attn_mask=score_bias),
            outputs_and_gradients(sdpa, heads(), attn_mask=BLIND),
        )

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_bad_numbers_in_a_query_stay_visible(self, sdpa: Any, bad: float) -> None:
        inputs = heads()
        inputs["query"][0, 0, 2, 0] = bad
        for attn_mask in (None, MAY_ATTEND):
            output = sdpa(**inputs, attn_mask=attn_mask)
            assert output[0, 0, 2].isnan().all()
            assert output[1:].isfinite().all()

    @pytest.mark.parametrize("name", ["query", "key", "value"])
    def test_so_they_do_where_a_query_may_look_at_no_key(self, sdpa: Any, name: str) -> None:
        inputs = heads()
        inputs[name][..., 3, 2] = math.nan
        blind = torch.zeros(5, 7, dtype=torch.bool)
        actual = outputs_and_gradients(sdpa, inputs, attn_mask=blind)
        with sdpa_kernel(SDPBackend.MATH):
            expected = outputs_and_gradients(F.scaled_dot_product_attention, inputs, attn_mask=blind)
        assert_equal(actual, expected)

    def test_float16_filled_with_256_does_not_overflow(self, sdpa: Any) -> None:
        inputs = {name: torch.full((2, 3, 7, 64), 256.0, dtype=torch.float16) for name in ("query", "key", "value")}
        assert torch.equal(sdpa(**inputs), inputs["value"])

    @pytest.mark.parametrize(
        "shapes",
        [
            {"query": (2, 3, 5, 0), "key": (2, 3, 7, 0)},
            {"value": (2, 3, 7, 0)},
            {"query": (0, 3, 5, 11), "key": (0, 3, 7, 11), "value": (0, 3, 7, 13)},
            {"query": (2, 0, 5, 11), "key": (2, 0, 7, 11), "value": (2, 0, 7, 13)},
            {"query": (2, 3, 0, 11)},
            {"key": (2, 3, 0, 11), "value": (2, 3, 0, 13)},
        ],
        ids=["width 0", "value width 0", "batch 0", "heads 0", "no queries", "no keys"],
    )
    def test_empty_tensors_go_forwards_and_backwards(self, sdpa: Any, shapes: Any) -> None:
        inputs = heads(**shapes)
        found = outputs_and_gradients(sdpa, inputs)
        with sdpa_kernel(SDPBackend.MATH):
            assert_equal(found, outputs_and_gradients(F.scaled_dot_product_attention, inputs))

    @pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")  # it gives 0
    @pytest.mark.parametrize("num_heads", [3, 6], ids=["as many key heads", "grouped"])
    @pytest.mark.parametrize("query_len", [5, 7, 11, 1])
    @pytest.mark.parametrize("align", ["upper_left", "lower_right"])
    def test_causal_biases_of_torch_mean_the_masks_forwards_and_backwards(
        self, sdpa: Any, align: Any, query_len: int, num_heads: int
    ) -> None:
        inputs = heads(query=(2, num_heads, query_len, 11))
        bias = {"upper_left": causal_upper_left, "lower_right": causal_lower_right}[align](query_len, 7)
        grouped: dict[str, Any] = {"enable_gqa": num_heads > 3}
        found = outputs_and_gradients(sdpa, inputs, attn_mask=bias, **grouped)
        may_attend = scratch.masks.causal(query_len, 7, align=align)
        assert_equal(found, outputs_and_gradients(sdpa, inputs, attn_mask=may_attend, **grouped))
        # torch's own function, with the key heads repeated and the mask written out.
        repeated = {name: x.repeat_interleave(num_heads // x.size(1), 1) for name, x in inputs.items()}
        expected = outputs_and_gradients(F.scaled_dot_product_attention, repeated, attn_mask=may_attend)
        for name in ("key", "value") if grouped["enable_gqa"] else ():
            expected[f"gradient of {name}"] = expected[f"gradient of {name}"].unflatten(1, (3, -1)).sum(2)  # type: ignore[union-attr]
        assert_equal(found, expected)

    @pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
    @pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (5, 1), (5, 5), (7, 7)], ids=str)
    @pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
    def test_a_causal_bias_of_other_sizes_is_what_torch_makes_of_it(self, sdpa: Any, make: Any, sizes: Any) -> None:
        inputs = heads(query=(2, 3, 5, 11))
        found = outputs_and_gradients(sdpa, inputs, attn_mask=make(*sizes))
        with sdpa_kernel(SDPBackend.MATH):
            assert_equal(found, outputs_and_gradients(F.scaled_dot_product_attention, inputs, attn_mask=make(*sizes)))

    def test_a_causal_bias_that_does_not_broadcast_is_refused(self, sdpa: Any) -> None:
        (query, key, value), bias = heads(query=(2, 3, 5, 11)).values(), causal_lower_right(5, 6)
        with pytest.raises(ValueError, match=r"attn_mask must be broadcastable to .* got \(5, 6\)"):
            sdpa(query, key, value, attn_mask=bias)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    def test_groups_share_keys_and_values(self, sdpa: Any) -> None:
        inputs = heads(query=(2, 65, 5, 11), key=(2, 5, 7, 11), value=(2, 5, 7, 13))
        output = sdpa(**inputs, enable_gqa=True)
        for head in range(65):
            alone = sdpa(inputs["query"][:, head], inputs["key"][:, head // 13], inputs["value"][:, head // 13])
            assert_equal({"output": output[:, head].contiguous()}, {"output": alone})

    def test_groups_of_no_heads_are_refused_where_torch_would_end_the_process(self, sdpa: Any) -> None:
        inputs = heads(query=(0, 5, 11), key=(0, 7, 11), value=(1, 7, 13))
        with pytest.raises(ValueError, match="the heads of key must divide the heads of query"):
            sdpa(**inputs, enable_gqa=True)

    def test_negative_scales_prefer_the_worst_key(self, sdpa: Any) -> None:
        inputs = heads()
        turned = sdpa(-inputs["query"], inputs["key"], inputs["value"], scale=0.3)
        assert_equal({"output": sdpa(**inputs, scale=-0.3)}, {"output": turned})

    def test_dropout_is_applied_whenever_it_is_asked_for(self, sdpa: Any) -> None:
        """The function knows no training mode; it draws what F.dropout draws on the weights."""
        inputs = {name: x.float() for name, x in heads().items()}
        torch.manual_seed(3)
        dropped = sdpa(**inputs, dropout_p=0.5)
        scores = inputs["query"] @ inputs["key"].transpose(-2, -1) / math.sqrt(11)
        torch.manual_seed(3)
        expected = F.dropout(scores.softmax(-1), 0.5) @ inputs["value"]
        torch.testing.assert_close(dropped, expected)
        assert not sdpa(**inputs, dropout_p=1.0).any()

    def test_float32_masks_go_with_float64_queries(self, sdpa: Any) -> None:
        score_bias = random_tensor(5, 7, seed=7, dtype=torch.float32)
        wider = sdpa(**heads(), attn_mask=score_bias.double())
        assert_equal({"output": sdpa(**heads(), attn_mask=score_bias)}, {"output": wider})

    def test_inputs_may_lie_in_memory_in_any_way(self, sdpa: Any) -> None:
        inputs = heads()
        strewn = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
        strewn["key"] = inputs["key"].transpose(-2, -1).contiguous().transpose(-2, -1)
        assert_equal(outputs_and_gradients(sdpa, strewn), outputs_and_gradients(sdpa, inputs))

    def test_inputs_are_left_as_they_were(self, sdpa: Any) -> None:
        inputs, attn_mask = heads(), random_tensor(5, 7, seed=7)
        before = [x.clone() for x in (*inputs.values(), attn_mask)]
        sdpa(**inputs, attn_mask=attn_mask)
        assert all(torch.equal(x, y) for x, y in zip((*inputs.values(), attn_mask), before, strict=True))


class TestSteps:
    """The steps that scratch writes out."""

    def test_heads_are_cut_so_that_tokens_and_heads_do_not_mix(self) -> None:
        x = random_tensor(5, 2, 33)
        split = split_heads(x, num_heads=3)
        assert split.shape == (2, 3, 5, 11)
        for sample in range(2):
            for head in range(3):
                expected = x[:, sample, 11 * head : 11 * (head + 1)]
                assert torch.equal(split[sample, head], expected)
        assert torch.equal(merge_heads(split), x)

    def test_empty_batches_keep_their_sizes(self) -> None:
        assert split_heads(torch.zeros(5, 0, 33), num_heads=3).shape == (0, 3, 5, 11)
        assert split_heads(torch.zeros(0, 2, 33), num_heads=3).shape == (2, 3, 0, 11)
        assert merge_heads(torch.zeros(2, 3, 0, 11)).shape == (0, 2, 33)
        assert merge_heads(torch.zeros(0, 3, 5, 11)).shape == (5, 0, 33)

    def test_equal_inputs_stay_equal_objects(self) -> None:
        x, y = random_tensor(2, 5, 33), random_tensor(2, 7, 33)
        query, key, value = sequence_first(x, y, y, batch_first=True)
        assert key is value
        assert query is not key
        assert (query.shape, key.shape) == ((5, 2, 33), (7, 2, 33))
        assert all(new is x for new in sequence_first(x, x, x, batch_first=False))
        assert sequence_first(x[0], y[0], y[0], batch_first=True)[0].shape == (5, 1, 33)

    def test_only_half_precision_is_raised(self) -> None:
        given = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        raised = [x.dtype for x in upcast_half(*(torch.zeros(1, dtype=dtype) for dtype in given))]
        assert raised == [torch.float64, torch.float32, torch.float32, torch.float32]

    def test_blind_rows_are_opened_and_told(self) -> None:
        score_bias = torch.zeros(5, 7).masked_fill(~BLIND, -math.inf)
        opened, row_sees = open_blind_rows(score_bias)
        assert row_sees.squeeze(-1).tolist() == [True, True, False, True, True]
        assert torch.equal(opened[row_sees.squeeze(-1)], score_bias[row_sees.squeeze(-1)])
        assert not opened[2].any()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_weights_take_the_memory_of_scores_that_nobody_else_reads(self, dtype: torch.dtype) -> None:
        v = random_tensor(3, 7, 13, seed=2, dtype=dtype)
        scores = random_tensor(3, 5, 7, seed=1, dtype=dtype).index_fill(-1, torch.tensor(3), -math.inf)
        scores[0, 0, 0], scores[1, 1] = math.nan, -math.inf
        weights = torch.softmax(scores, dim=-1)
        context, same = weigh(scores, v)
        assert same.data_ptr() == scores.data_ptr()
        assert_equal({"c": context, "w": same}, {"c": weights @ v, "w": weights}, relative_bound=0)

    @pytest.mark.parametrize(("requires_grad", "enabled"), [*itertools.product([True, False], repeat=2)])
    def test_scores_with_a_gradient_are_left_alone_and_others_are_not(self, requires_grad: bool, enabled: bool) -> None:
        scores = random_tensor(3, 5, 7, seed=1).requires_grad_(requires_grad)
        before = scores.detach().clone()
        with torch.set_grad_enabled(enabled):
            weights = softmax(scores)
        reused = not (requires_grad and enabled)
        assert (weights.data_ptr() == scores.data_ptr()) == reused
        assert torch.equal(scores, before) != reused

    @pytest.mark.filterwarnings("ignore:`torch.jit.trace(_method)?` is deprecated:DeprecationWarning")
    def test_the_door_says_nothing_while_it_is_traced(self) -> None:
        q, k, v = heads().values()
        traced = torch.jit.trace(lambda *given: scratch.scaled_dot_product_attention(*given), (q, k, v, MAY_ATTEND))
        assert torch.equal(traced(q, k, v, MAY_ATTEND), scratch.scaled_dot_product_attention(q, k, v, MAY_ATTEND))

    @pytest.mark.parametrize("attn_mask", [None, MAY_ATTEND], ids=["no", "plain"])
    def test_torchs_causal_biases_are_not_imported_for_a_mask_that_is_none(
        self, attn_mask: Tensor | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "torch.nn.attention.bias", None)
        q, k, v = heads().values()
        scratch.scaled_dot_product_attention(q, k, v, attn_mask)

    def test_blind_rows_are_nan_on_the_page_and_0_at_the_door(self) -> None:
        q, k, v = (x[0] for x in heads().values())
        score_bias = torch.zeros(5, 7, dtype=torch.float64).masked_fill(~BLIND, -math.inf)
        context, weights = attention(q, k, v, score_bias)
        assert weights[:, 2].isnan().all()
        assert context[:, 2].isnan().all()
        seen = [0, 1, 3, 4]
        assert_equal({"output": weights[:, seen].sum(-1)}, {"output": torch.ones(3, 4, dtype=torch.float64)})
        without = textbook_attention(q, k, v, Visible(score_bias), scale=1.0, dropout_p=0.0)
        assert not without[:, 2].any()
        assert_equal({"output": without[:, seen]}, {"output": context[:, seen]})


def test_grouped_heads_of_which_there_are_none_need_no_division() -> None:
    query, key = torch.empty(0, 5, 4), torch.empty(0, 7, 4)
    assert scratch.scaled_dot_product_attention(query, key, key, enable_gqa=True).shape == (0, 5, 4)


def test_the_two_rows_that_torch_gives_otherwise() -> None:
    """What ``scaled_dot_product_attention`` says under "In torch.nn"."""
    query, key, value = torch.full((1, 2, 8), 1e20), torch.full((1, 3, 8), -1e20), torch.randn(1, 3, 8)
    no_keys = torch.randn(1, 0, 8)
    for asked, expected in (((query, key, value), 0.0), ((query * torch.nan, no_keys, no_keys), torch.nan)):
        if math.isnan(expected) and torch.__version__ < "2.12":  # gave 0 as well
            continue
        theirs = F.scaled_dot_product_attention(*asked)
        assert theirs.equal(torch.full_like(theirs, expected)) or (theirs.isnan().all() and math.isnan(expected))
        ours = scratch.scaled_dot_product_attention(*asked)
        assert bool(ours.isnan().all()) is (expected == 0.0)
        assert bool((ours == 0).all()) is math.isnan(expected)


def test_a_kernel_is_chosen_only_for_tensors_on_one_type_of_device() -> None:
    def kernel(*tensors: Tensor) -> Tensor:
        raise NotImplementedError

    on_cpu, elsewhere = torch.zeros(1, 1024, 8), torch.zeros(1, 1024, 8, device="meta")
    with switched_on("meta", kernel):
        with switched_on("meta", textbook_attention):
            assert chosen_kernel(elsewhere, elsewhere, elsewhere, Visible(), 0.0) is textbook_attention
        assert chosen_kernel(elsewhere, elsewhere, elsewhere, Visible(), 0.0) is kernel
        assert chosen_kernel(on_cpu, elsewhere, elsewhere, Visible(), 0.0) is None


class Labelled(Tensor):
    """A subclass, which may keep more than its numbers."""


def test_memory_is_written_into_only_where_tensors_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = torch.zeros(2, 3), list[bool]()

    def ask(x: Tensor) -> Tensor:
        found.append(are_plain(x))
        return x + 1

    assert are_plain(x, nn.Parameter(x))
    assert not are_plain(x, x.as_subclass(Labelled))
    torch.func.vmap(ask)(x)
    with forward_ad.dual_level():
        ask(x)
    for owner, name in ((torch._C, "_get_tracing_state"), (torch.compiler, "is_compiling")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda: True)
            ask(x)
    assert found == [False] * 4
