"""Flex attention: torch's values, the gradients of the mask written out, and hidden blocks that are never computed."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import builtin
import scratch
from equivalence_tests.instruments.differences import compare_errors
from equivalence_tests.instruments.side_by_side import PACKAGES, assert_equal, outputs_and_gradients, random_tensor
from scratch import flex, score_functions

EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
IS_RECENT = "separate_full_blocks" in inspect.signature(torch_flex.create_block_mask).parameters
NEEDS_A_RECENT_TORCH = pytest.mark.skipif(not IS_RECENT, reason="this torch does not have separate_full_blocks")
# Torch 2.15 tells the share of blocks, which is never below 0, where older versions tell that of places.
COUNTS_PLACES = torch_flex.create_block_mask(flex.noop_mask, 1, 1, 1, 1, "cpu", 2).sparsity() < 0
BATCH, HEADS, KEY_HEADS, QUERY_LEN, KEY_LEN = 2, 6, 3, 5, 7
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 2]])
TABLE = random_tensor(HEADS, 5, seed=9)
SEEN = random_tensor(BATCH, HEADS, QUERY_LEN, KEY_LEN, seed=8) > 0

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def uncompiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compute the same without tracing each call first, which takes a second for each new function."""
    if request.node.get_closest_marker("traced") is None:
        monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


MASKS: dict[str, Function] = {
    "causal": score_functions.causal(),
    "lower right": score_functions.causal(2),
    "window": score_functions.sliding_window(2, offset=2),
    "documents": score_functions.document(DOCUMENTS) & score_functions.causal(2),
    "prefix": score_functions.prefix(torch.tensor([3, 0])) | score_functions.causal(),
    "nothing": lambda batch, head, q_idx, kv_idx: q_idx < 0,
    "everything": flex.noop_mask,
    "indexed": lambda batch, head, q_idx, kv_idx: SEEN[batch, head, q_idx, kv_idx],
    "blind rows": lambda batch, head, q_idx, kv_idx: (q_idx != 3) & ((head != 2) | (kv_idx != 4)),
}
SCORES: dict[str, Function | None] = {
    "plain": None,
    "alibi": score_functions.alibi(score_functions.alibi_slopes(HEADS).double()),
    "soft cap": score_functions.soft_cap(0.7),
    "relative": score_functions.relative_bias(TABLE),
    "of all": lambda score, batch, head, q_idx, kv_idx: score * (head + 1) - batch + TABLE[head, 0] * (q_idx - kv_idx),
    "hides": lambda score, batch, head, q_idx, kv_idx: torch.where(kv_idx == q_idx, -math.inf, score),
}


def heads(dtype: torch.dtype = torch.float64, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Give query, key and value: 2 query heads to a key head, and no two sizes equal beside batch and groups."""
    usual = {
        "query": (BATCH, HEADS, QUERY_LEN, 11),
        "key": (BATCH, KEY_HEADS, KEY_LEN, 11),
        "value": (BATCH, KEY_HEADS, KEY_LEN, 13),
    }
    return {
        name: random_tensor(*shapes.get(name, shape), seed=seed, dtype=dtype)
        for seed, (name, shape) in enumerate(usual.items())
    }


READS_THE_SAMPLE, READS_THE_HEAD = {"documents", "prefix", "indexed"}, {"indexed", "blind rows"}


def block_mask_of(package: Any, mask: str, block_size: int | tuple[int, int] = (2, 3)) -> Any:
    batch = BATCH if mask in READS_THE_SAMPLE else None
    num_heads = HEADS if mask in READS_THE_HEAD else None
    return package.create_block_mask(MASKS[mask], batch, num_heads, QUERY_LEN, KEY_LEN, "cpu", block_size)


def written_out(mask: str, scores: str) -> Function:
    """Give the same attention with mask and scores as dense tensors, on softmax and products alone."""
    may_attend = builtin.flex.create_mask(MASKS[mask], BATCH, HEADS, QUERY_LEN, KEY_LEN, "cpu")
    places = torch.meshgrid(*(torch.arange(n) for n in may_attend.shape), indexing="ij")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        found = query @ key.mT / math.sqrt(11)
        score_mod = SCORES[scores]
        found = found if score_mod is None else score_mod(found, *places)
        found = found.masked_fill(~may_attend, -math.inf)
        sees = (found != -math.inf).any(-1, keepdim=True)
        return found.masked_fill(~sees, 0).softmax(-1) @ value * sees

    return attend


class TestValues:
    @pytest.mark.parametrize("scores", SCORES)
    @pytest.mark.parametrize("mask", MASKS)
    def test_they_are_torchs(self, mask: str, scores: str) -> None:
        arguments: dict[str, Any] = {**heads(), "score_mod": SCORES[scores], "enable_gqa": True, "scale": 0.3}
        actual = scratch.flex_attention(**arguments, block_mask=block_mask_of(scratch, mask))
        expected = builtin.flex_attention(**arguments, block_mask=block_mask_of(builtin, mask))
        assert_equal({"output": actual}, {"output": expected})

    @pytest.mark.parametrize("block_size", [1, 2, (5, 7), (4, 3), 128])
    def test_the_size_of_the_blocks_does_not_matter(self, block_size: int | tuple[int, int]) -> None:
        expected = scratch.flex_attention(**heads(), block_mask=block_mask_of(scratch, "indexed"), enable_gqa=True)
        mask = block_mask_of(scratch, "indexed", block_size)
        found = scratch.flex_attention(**heads(), block_mask=mask, enable_gqa=True)
        assert_equal({"output": found}, {"output": expected})

    @EACH_PACKAGE
    @pytest.mark.parametrize("mask", ["indexed", "blind rows", "nothing"])
    def test_each_package_takes_the_others_block_mask(self, package: Any, mask: str) -> None:
        found = [
            package.flex_attention(**heads(), block_mask=block_mask_of(maker, mask), enable_gqa=True)
            for maker in PACKAGES.values()
        ]
        assert torch.equal(*found)

    @pytest.mark.traced
    @EACH_PACKAGE
    def test_without_anything_it_is_plain_attention(self, package: Any) -> None:
        inputs = heads(key=(BATCH, HEADS, KEY_LEN, 11), value=(BATCH, HEADS, KEY_LEN, 13))
        assert_equal({"output": package.flex_attention(**inputs)}, {"output": F.scaled_dot_product_attention(**inputs)})

    @EACH_PACKAGE
    def test_one_sample_of_keys_serves_all_that_a_block_mask_names(self, package: Any) -> None:
        inputs = heads(key=(1, KEY_HEADS, KEY_LEN, 11), value=(1, KEY_HEADS, KEY_LEN, 13))
        expanded = {name: x.expand(BATCH, -1, -1, -1) for name, x in inputs.items()}
        mask = block_mask_of(package, "documents")
        assert_equal(
            {"output": package.flex_attention(**inputs, block_mask=mask, enable_gqa=True)},
            {"output": package.flex_attention(**expanded, block_mask=mask, enable_gqa=True)},
        )

    @EACH_PACKAGE
    @pytest.mark.parametrize(("masked", "samples"), [(1, 1), (BATCH, 3)])
    def test_other_samples_of_keys_are_refused(self, package: Any, masked: int, samples: int) -> None:
        mask = package.create_block_mask(MASKS["causal"], masked, HEADS, QUERY_LEN, KEY_LEN, "cpu", 2)
        inputs = {name: x if name == "query" else x[:1].repeat(samples, 1, 1, 1) for name, x in heads().items()}
        with pytest.raises(ValueError, match=f"key must have the batch of query, {BATCH}, or 1 beside a block_mask"):
            package.flex_attention(**inputs, block_mask=mask, enable_gqa=True)

    def test_a_single_query_obeys_its_block_mask(self) -> None:
        """As a step of decoding has it."""
        q, k, v = (random_tensor(1, 2, length, 5, seed=seed) for seed, length in enumerate((1, 7, 7)))
        mask = flex.create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < 3, None, None, 1, 7, "cpu")
        seen = flex.flex_attention(q, k, v, block_mask=mask)
        assert_equal({"output": seen}, {"output": flex.flex_attention(q, k[..., :3, :], v[..., :3, :])})

    def test_two_heads_see_their_own_keys_where_queries_outnumber_keys(self) -> None:
        q, k = random_tensor(1, 2, 9, 5), random_tensor(1, 2, 7, 5, seed=1)

        def shifted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return kv_idx <= q_idx + h

        may_attend = flex.create_mask(shifted, None, 2, 9, 7, "cpu")
        expected = F.scaled_dot_product_attention(q, k, k, attn_mask=may_attend)
        for separate in (True, False):
            mask = flex.create_block_mask(shifted, None, 2, 9, 7, "cpu", 2, separate_full_blocks=separate)
            assert_equal({"output": flex.flex_attention(q, k, k, block_mask=mask)}, {"output": expected})
        assert_equal({"output": flex.flex_attention(q, k, k)}, {"output": F.scaled_dot_product_attention(q, k, k)})

    @EACH_PACKAGE
    @pytest.mark.parametrize("empty", ["query", "batch", "values"])
    def test_empty_tensors_give_empty_tensors(self, package: Any, empty: str) -> None:
        batch, query_len, width = (
            0 if empty == name else n for name, n in (("batch", 2), ("query", 5), ("values", 13))
        )
        inputs = heads(query=(batch, 3, query_len, 11), key=(batch, 3, 7, 11), value=(batch, 3, 7, width))
        assert package.flex_attention(**inputs).shape == (batch, 3, query_len, width)

    @EACH_PACKAGE
    def test_lists_of_no_row_serve_no_query(self, package: Any) -> None:
        counts = torch.zeros(1, 1, 0, dtype=torch.int32)
        mask = package.BlockMask.from_kv_blocks(counts, counts.new_zeros(1, 1, 0, 4), BLOCK_SIZE=2)
        inputs = heads(query=(1, 3, 0, 11), key=(1, 3, 8, 11), value=(1, 3, 8, 13))
        assert package.flex_attention(**inputs, block_mask=mask).shape == (1, 3, 0, 13)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("mask", ["documents", "blind rows"])
    def test_lower_precision_errs_no_more_than_twice_as_far_as_torch(self, mask: str, dtype: torch.dtype) -> None:
        inputs = heads(dtype)
        exact_inputs = {name: x.double() for name, x in inputs.items()}
        arguments: dict[str, Any] = {"score_mod": SCORES["soft cap"], "enable_gqa": True}
        exact, actual, expected = (
            package.flex_attention(**x, block_mask=block_mask_of(package, mask), **arguments)
            for package, x in ((builtin, exact_inputs), (scratch, inputs), (builtin, inputs))
        )
        assert actual.dtype == dtype
        errors = compare_errors(actual, expected, exact)
        assert errors.passed, str(errors)

    def test_keys_and_values_of_another_dtype_are_read_as_torch_reads_them(self) -> None:
        inputs = heads(torch.float32)
        inputs["key"], inputs["value"] = inputs["key"].half(), inputs["value"].bfloat16()
        exact_inputs = {name: x.double() for name, x in inputs.items()}
        actual, expected = (package.flex_attention(**inputs, enable_gqa=True) for package in PACKAGES.values())
        exact = scratch.flex_attention(**exact_inputs, enable_gqa=True)
        assert compare_errors(actual, expected, exact).passed

    def test_autocast_chooses_the_dtype_of_the_output(self) -> None:
        inputs = heads(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            actual, expected = (package.flex_attention(**inputs, enable_gqa=True) for package in PACKAGES.values())
            exact = scratch.flex_attention(**heads(), enable_gqa=True)
        assert exact.dtype == torch.float64
        rounded = scratch.flex_attention(**{name: x.bfloat16() for name, x in inputs.items()}, enable_gqa=True)
        assert torch.equal(actual, rounded)
        assert compare_errors(actual, expected, exact).passed


class TestGradients:
    @pytest.mark.parametrize("scores", SCORES)
    @pytest.mark.parametrize("mask", MASKS)
    def test_they_are_those_of_scores_written_out(self, mask: str, scores: str) -> None:
        arguments: dict[str, Any] = {"score_mod": SCORES[scores], "enable_gqa": True}
        arguments |= {"block_mask": block_mask_of(scratch, mask)}
        actual = outputs_and_gradients(scratch.flex_attention, heads(), **arguments)
        assert_equal(actual, outputs_and_gradients(written_out(mask, scores), heads()))

    @pytest.mark.parametrize("scores", ["plain", "alibi", "relative"])
    @pytest.mark.parametrize("mask", MASKS)
    def test_they_are_those_of_torchs_attention_with_a_dense_bias(self, mask: str, scores: str) -> None:
        may_attend = scratch.flex.create_mask(MASKS[mask], BATCH, HEADS, QUERY_LEN, KEY_LEN, "cpu")
        places = torch.meshgrid(*(torch.arange(n) for n in may_attend.shape), indexing="ij")
        score_mod, score_bias = SCORES[scores], torch.zeros(may_attend.shape, dtype=torch.float64)
        score_bias = score_bias if score_mod is None else score_mod(score_bias, *places)
        score_bias = score_bias.masked_fill(~may_attend, -math.inf)
        arguments: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask_of(scratch, mask)}
        actual = outputs_and_gradients(scratch.flex_attention, heads(), **arguments, enable_gqa=True)
        expected = outputs_and_gradients(F.scaled_dot_product_attention, heads(), attn_mask=score_bias, enable_gqa=True)
        assert_equal(actual, expected)

    def test_numbers_moved_a_little_give_the_same(self) -> None:
        block_mask = scratch.create_block_mask(score_functions.causal(-1), None, None, 3, 3, "cpu", 2)

        def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            score_mod = score_functions.relative_bias(table)
            output, lse = scratch.flex_attention(query, key, value, score_mod, block_mask, None, True, True)
            return output, lse.nan_to_num(neginf=0.0)  # there is no small step from -inf

        inputs = heads(query=(1, 2, 3, 2), key=(1, 1, 3, 2), value=(1, 1, 3, 2))
        leaves = [x.requires_grad_() for x in (*inputs.values(), TABLE[:2, :3].clone())]
        assert torch.autograd.gradcheck(attend, leaves)
        assert torch.autograd.gradgradcheck(attend, leaves, fast_mode=True)

    @pytest.mark.traced
    @pytest.mark.parametrize("scores", ["relative", "of all"])
    def test_tensors_that_a_score_function_reads_get_torchs_gradient(self, scores: str) -> None:
        """torch has this one on the CPU, as long as the inputs themselves need none."""
        found = []
        for package in PACKAGES.values():
            table = TABLE.clone().requires_grad_()
            score_mod = score_functions.relative_bias(table) if scores == "relative" else of_all(table)
            output = package.flex_attention(
                **heads(), score_mod=score_mod, block_mask=block_mask_of(package, "documents"), enable_gqa=True
            )
            found.append(torch.autograd.grad(output, table, random_tensor(*output.shape, seed=3))[0])
        assert_equal({"gradient": found[0]}, {"gradient": found[1]})

    def test_the_log_sum_exp_has_a_gradient_and_the_greatest_score_has_none(self) -> None:
        inputs = {name: x.requires_grad_() for name, x in heads().items()}
        request = flex.AuxRequest(lse=True, max_scores=True)
        mask = block_mask_of(scratch, "blind rows")
        _, aux = scratch.flex_attention(**inputs, block_mask=mask, enable_gqa=True, return_aux=request)
        scores = inputs["query"] @ inputs["key"].repeat_interleave(2, 1).mT / math.sqrt(11)
        hidden = ~flex.create_mask(MASKS["blind rows"], BATCH, HEADS, QUERY_LEN, KEY_LEN, "cpu")
        expected = scores.masked_fill(hidden, -math.inf)
        seen = [0, 1, 2, 4]
        assert_equal({"output": aux.lse[:, :, seen]}, {"output": expected.logsumexp(-1)[:, :, seen]})
        assert_equal({"output": aux.max_scores}, {"output": expected.amax(-1)})
        assert not aux.max_scores.requires_grad
        gradients = (
            torch.autograd.grad(x[:, :, seen].square().sum(), [inputs["query"], inputs["key"]])
            for x in (aux.lse, expected.logsumexp(-1))
        )
        for actual, right in zip(*gradients, strict=True):
            assert_equal({"gradient": actual}, {"gradient": right})


def of_all(table: Tensor) -> Function:
    return lambda score, batch, head, q_idx, kv_idx: score * (table[head, 0] + 1) - batch * table[q_idx, kv_idx % 5]


class TestBlindQueries:
    @EACH_PACKAGE
    def test_they_get_0_and_a_log_sum_exp_of_minus_infinity(self, package: Any) -> None:
        output, lse = package.flex_attention(
            **heads(), block_mask=block_mask_of(package, "blind rows"), enable_gqa=True, return_lse=True
        )
        assert not output[:, :, 3].any()
        assert (lse == -math.inf).nonzero()[:, 2].unique().tolist() == [3]
        assert output[:, :, [0, 1, 2, 4]].all()

    def test_they_give_no_gradient_and_no_nan(self) -> None:
        inputs = {name: x.requires_grad_() for name, x in heads().items()}
        mask = block_mask_of(scratch, "blind rows", 128)
        output, lse = scratch.flex_attention(**inputs, block_mask=mask, enable_gqa=True, return_lse=True)
        gradients = torch.autograd.grad(output.sum() + lse[lse.isfinite()].sum(), list(inputs.values()))
        assert all(x.isfinite().all() for x in gradients)
        assert not gradients[0][:, :, 3].any()

    @EACH_PACKAGE
    def test_nan_in_what_is_seen_stays_visible(self, package: Any) -> None:
        inputs = heads()
        inputs["key"][0, 0, 0, 0] = math.nan
        output = package.flex_attention(**inputs, block_mask=block_mask_of(package, "causal"), enable_gqa=True)
        assert output[0, :2].isnan().all()
        assert output[0, 2:].isfinite().all()


# --- what is computed ------------------------------------------------------------------------------------------------


def products_of(call: Callable[[], Any]) -> int:
    """Count the multiplications and additions of all matrix products."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


class LargestTensor(TorchDispatchMode):
    """Remember the size of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = result if isinstance(result, tuple | list) else [result]
        self.elements = max(self.elements, *(x.numel() for x in given if isinstance(x, Tensor)), 0)
        return result


class TestWhatIsComputed:
    """Blocks of 4 queries and 8 keys; 16 queries, 32 keys, widths 11 and 13, 2 samples, 3 heads."""

    def inputs(self) -> dict[str, Any]:
        return heads(query=(2, 3, 16, 11), key=(2, 3, 32, 11), value=(2, 3, 32, 13))

    @pytest.mark.parametrize(
        ("mask_mod", "blocks"),
        [
            (score_functions.causal(16), 4 * 4 - 2),
            (score_functions.sliding_window(1), 4),
            (score_functions.document(torch.arange(32) // 8), 4),
            (lambda batch, head, q_idx, kv_idx: (q_idx == 5) & (kv_idx == 9), 1),
            (MASKS["nothing"], 0),
            (flex.noop_mask, 4 * 4),
        ],
        ids=["causal", "window", "documents", "one place", "nothing", "everything"],
    )
    def test_hidden_blocks_are_not(self, mask_mod: Function, blocks: int) -> None:
        mask = scratch.create_block_mask(mask_mod, None, None, 16, 32, "cpu", (4, 8))
        assert int(mask.to_dense().sum()) == blocks
        inputs = {name: x.requires_grad_() for name, x in self.inputs().items()}
        forward = 2 * (2 * 3) * blocks * (4 * 8) * (11 + 13)
        assert products_of(lambda: scratch.flex_attention(**inputs, block_mask=mask)) == forward
        both = products_of(lambda: scratch.flex_attention(**inputs, block_mask=mask).sum().backward())
        assert both == 3 * forward

    def test_nor_are_blocks_that_are_hidden_from_one_sample_or_one_head(self) -> None:
        def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < 8 * batch + 8) & (q_idx < 4 * head + 4)

        mask = scratch.create_block_mask(mask_mod, 2, 3, 16, 32, "cpu", (4, 8))
        blocks = (1 + 2) * (1 + 2 + 3)
        expected = 2 * blocks * (4 * 8) * (11 + 13)
        assert products_of(lambda: scratch.flex_attention(**self.inputs(), block_mask=mask)) == expected

    def test_no_tensor_is_as_large_as_all_scores(self) -> None:
        mask_mod = score_functions.sliding_window(3)
        with LargestTensor() as made:
            mask = scratch.create_block_mask(mask_mod, None, None, 96, 96, "cpu", 8)
        assert made.elements <= 8 * 96
        query, key, value = (random_tensor(1, 1, 96, 4, seed=seed).requires_grad_() for seed in range(3))
        with LargestTensor() as made:
            scratch.flex_attention(query, key, value, SCORES["soft cap"], mask).sum().backward()
        assert made.elements <= 96 * 8

    def test_the_mask_function_is_not_asked_in_blocks_that_are_seen_as_a_whole(self) -> None:
        def refuse(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            raise AssertionError("asked")

        whole = scratch.create_block_mask(score_functions.document(torch.arange(32) // 8), 1, 1, 32, 32, "cpu", 8)
        inputs = heads(query=(2, 3, 32, 11), key=(2, 3, 32, 11), value=(2, 3, 32, 13))
        expected = scratch.flex_attention(**inputs, block_mask=whole)
        whole.mask_mod = refuse
        assert torch.equal(scratch.flex_attention(**inputs, block_mask=whole), expected)

    def test_no_score_is_asked_about_in_hidden_blocks(self) -> None:
        """A score function that fails outside of the blocks of the diagonal."""
        table = torch.zeros(4, dtype=torch.float64)
        mask = scratch.create_block_mask(score_functions.document(torch.arange(32) // 4), None, None, 32, 32, "cpu", 4)
        inputs = heads(query=(2, 3, 32, 11), key=(2, 3, 32, 11), value=(2, 3, 32, 13))

        def inside(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[q_idx // 4 * 4 - kv_idx + 3]

        assert torch.equal(
            scratch.flex_attention(**inputs, score_mod=inside, block_mask=mask),
            scratch.flex_attention(**inputs, block_mask=mask),
        )
        with pytest.raises(IndexError):
            scratch.flex_attention(**inputs, score_mod=inside)


# --- block masks -----------------------------------------------------------------------------------------------------


def entries_of(*masks: Any) -> Iterator[tuple[Any, ...]]:
    """Give what two block masks hold, by name, and by place in their tuples where torch has all that scratch has."""
    attributes = [name for name in inspect.signature(flex.BlockMask).parameters if not name.startswith("dq_")]
    yield from ((name, *(getattr(mask, name) for mask in masks)) for name in attributes)
    if IS_RECENT:
        for flatten in ({}, {"flatten": False}):
            both = zip(*(mask.as_tuple(**flatten) for mask in masks), strict=True)
            yield from ((place, *entries) for place, entries in enumerate(both))


def assert_same_lists(actual: Any, expected: Any) -> None:
    """Compare all attributes of two block masks, dtypes and the order of what is not counted included."""
    for name, ours, torchs in entries_of(actual, expected):
        if isinstance(torchs, Tensor):
            assert ours.dtype == torchs.dtype
            assert torch.equal(ours, torchs), name
        else:
            assert ours == torchs, name
    assert actual.shape == expected.shape
    if COUNTS_PLACES:
        assert str(actual) == str(expected)
        assert actual.sparsity() == pytest.approx(expected.sparsity(), rel=1e-12)
    assert actual.numel() == expected.numel()
    assert torch.equal(actual.to_dense(), expected.to_dense())


# How many columns each of two rows sees, and which.
LISTS = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)


class TestBlockMasks:
    @pytest.mark.parametrize("separate_full_blocks", [True, pytest.param(False, marks=NEEDS_A_RECENT_TORCH)])
    @pytest.mark.parametrize("block_size", [1, (2, 3), (4, 2), 128])
    @pytest.mark.parametrize("mask", MASKS)
    def test_they_are_torchs(self, mask: str, block_size: Any, separate_full_blocks: bool) -> None:
        arguments = (MASKS[mask], BATCH, HEADS, QUERY_LEN, KEY_LEN, "cpu", block_size, False)
        options = {} if separate_full_blocks else {"separate_full_blocks": False}
        actual, expected = (package.create_block_mask(*arguments, **options) for package in PACKAGES.values())
        assert_same_lists(actual, expected)

    def test_sizes_that_are_not_given_are_1_and_blocks_have_128_places(self) -> None:
        actual, expected = (
            package.create_block_mask(MASKS["causal"], None, None, 200, 300, "cpu") for package in PACKAGES.values()
        )
        assert actual.BLOCK_SIZE == (128, 128)
        assert actual.shape == (1, 1, 200, 300)
        assert_same_lists(actual, expected)

    @pytest.mark.parametrize("grid_size", [20, 3, (2, 5)])
    def test_they_are_drawn_as_torch_draws_them(self, grid_size: Any) -> None:
        masks = [package.create_block_mask(MASKS["window"], 3, 2, 61, 47, "cpu", 2) for package in PACKAGES.values()]
        ours, theirs = (mask.to_string(grid_size, limit=5) for mask in masks)
        if grid_size == 20:
            assert ours == theirs
        assert len(ours.splitlines()) == len(theirs.splitlines())
        assert "..." in ours
        assert "░" in ours or "█" in ours

    @pytest.mark.parametrize(
        "index",
        [
            *(0, -1, (1, 2), (slice(0, 1),), (slice(None), slice(1, 4, 2))),
            *((0, 0, rows) for rows in (torch.tensor([2, 0]), slice(1, None), slice(0, 1), slice(None, None, 2), -1)),
        ],
        ids=str,
    )
    def test_they_are_cut_as_torch_cuts_them(self, index: Any) -> None:
        whole = [block_mask_of(package, "indexed") for package in PACKAGES.values()]
        actual, expected = (mask[index] for mask in whole)
        expected.mask_mod = actual.mask_mod
        if expected.seq_lengths == whole[1].seq_lengths:  # before 2.15, torch left them as they were
            expected.seq_lengths = actual.seq_lengths
        assert_same_lists(actual, expected)

    def test_what_is_cut_has_the_queries_of_its_rows(self) -> None:
        whole = block_mask_of(scratch, "indexed")
        height, (length, keys) = whole.BLOCK_SIZE[0], whole.seq_lengths
        rows = -(-length // height)
        lengths = {rows - 1: length - (rows - 1) * height, 0: height}
        assert all(whole[:, :, row].seq_lengths == (queries, keys) for row, queries in lengths.items())
        assert whole[:, :, 1:].seq_lengths == (length - height, keys)
        assert whole[:, :, torch.tensor([rows - 1, 0])].seq_lengths == (2 * height, keys)

    @EACH_PACKAGE
    def test_what_was_cut_needs_a_mask_function_of_its_own(self, package: Any) -> None:
        inputs = heads()
        cut = block_mask_of(package, "documents")[1:]
        arguments: dict[str, Any] = {name: x[1:] for name, x in inputs.items()} | {"enable_gqa": True}
        with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
            package.flex_attention(**arguments, block_mask=cut)
        cut.mask_mod = lambda batch, head, q_idx, kv_idx: MASKS["documents"](batch + 1, head, q_idx, kv_idx)
        whole = package.flex_attention(**inputs, block_mask=block_mask_of(package, "documents"), enable_gqa=True)
        found = package.flex_attention(**arguments, block_mask=cut)
        assert_equal({"output": found}, {"output": whole[1:].contiguous()})

    @EACH_PACKAGE
    def test_lists_of_one_package_make_a_block_mask_of_the_other(self, package: Any) -> None:
        for other in PACKAGES.values():
            mask = block_mask_of(other, "documents")
            lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
            made = package.BlockMask.from_kv_blocks(*lists, mask.BLOCK_SIZE, mask.mask_mod, mask.seq_lengths)
            assert type(made) is package.BlockMask
            assert_same_lists(made, mask)

    @EACH_PACKAGE
    def test_lists_alone_are_enough(self, package: Any) -> None:
        mask = package.BlockMask.from_kv_blocks(*LISTS, BLOCK_SIZE=3)
        assert mask.shape == (1, 1, 6, 6)
        assert mask.to_dense().tolist() == [[[[0, 1], [1, 1]]]]
        assert mask.q_num_blocks.tolist() == [[[1, 2]]]
        without = package.BlockMask.from_kv_blocks(*LISTS, *LISTS, BLOCK_SIZE=3, compute_q_blocks=False)
        assert without.q_indices is without.full_q_indices is None
        assert mask.mask_mod.__name__ == "noop_mask"

    @pytest.mark.parametrize(
        ("lists", "text"),
        [
            (([1], LISTS[1]), "kv_num_blocks must be a tensor, got list"),
            ((LISTS[0], [1]), "kv_indices must be a tensor, got list"),
            ((LISTS[0][0], LISTS[1][0]), "(batch, num_heads, rows, columns), got (1, 2) and (1, 2, 2)"),
            ((LISTS[1], LISTS[1]), "(batch, num_heads, rows, columns), got (1, 1, 2, 2) and (1, 1, 2, 2)"),
            ((*LISTS, LISTS[0], None), "full_kv_num_blocks and full_kv_indices must be given together"),
            ((*LISTS, None, LISTS[1]), "full_kv_num_blocks and full_kv_indices must be given together"),
            ((*LISTS, *LISTS[::-1]), "must fit together, got shapes (1, 1, 2, 2) and (1, 1, 2)"),
        ],
    )
    def test_lists_that_do_not_fit_are_refused(self, lists: Any, text: str) -> None:
        for make in (flex.BlockMask.from_kv_blocks, whole_block_mask):
            with pytest.raises((ValueError, TypeError), match=re.escape(text)):
                make(*lists)

    def test_many_blocks_stay_in_order_and_are_drawn_as_torch_draws_them(self) -> None:
        ours, theirs = (
            package.create_block_mask(MASKS["causal"], None, None, 41, 41, "cpu", 1) for package in PACKAGES.values()
        )
        assert_same_lists(ours, theirs)
        assert ours.to_string() == theirs.to_string()

    def test_what_lies_behind_the_count_of_a_row_is_not_read(self) -> None:
        counts = torch.tensor([[[1, 0]]], dtype=torch.int32)
        columns = torch.tensor([[[[1, 77], [-5, 0]]]], dtype=torch.int32)
        mask = flex.BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=(2, 3))
        assert mask.to_dense().tolist() == [[[[0, 1], [0, 0]]]]
        inputs = heads(query=(1, 1, 4, 11), key=(1, 1, 6, 11), value=(1, 1, 6, 13))
        output = scratch.flex_attention(**inputs, block_mask=mask)
        expected = F.scaled_dot_product_attention(
            inputs["query"][:, :, :2], inputs["key"][:, :, 3:], inputs["value"][:, :, 3:]
        )
        assert_equal({"output": output[:, :, :2].contiguous()}, {"output": expected})
        assert not output[:, :, 2:].any()

    @EACH_PACKAGE
    def test_they_move_to_another_device(self, package: Any) -> None:
        mask = block_mask_of(package, "documents")
        moved = mask.to("meta")
        assert moved.kv_indices.device.type == moved.full_q_indices.device.type == "meta"
        assert mask.kv_indices.device.type == "cpu"
        assert (moved.shape, moved.BLOCK_SIZE, moved.mask_mod) == (mask.shape, mask.BLOCK_SIZE, mask.mask_mod)

    @NEEDS_A_RECENT_TORCH
    @EACH_PACKAGE
    def test_so_do_those_without_lists_of_full_blocks(self, package: Any) -> None:
        mask = package.create_block_mask(MASKS["causal"], 1, 1, 5, 7, "cpu", 2, False, False)
        for moved in (mask.to("meta"), mask[:, :, :1].to("meta")):
            assert moved.kv_indices.device.type == "meta"
            assert moved.full_kv_indices is moved.full_kv_num_blocks is None

    @pytest.mark.skipif(IS_RECENT, reason="torch has the argument")
    def test_an_older_torch_is_named(self) -> None:
        with pytest.raises(
            NotImplementedError, match="separate_full_blocks must be left at its default: create_block_mask of torch"
        ):
            builtin.create_block_mask(MASKS["causal"], 1, 1, 5, 7, "cpu", 2, False, False)


class TestWrittenOut:
    @pytest.mark.parametrize("mask", MASKS)
    def test_masks_are_torchs(self, mask: str) -> None:
        for batch_and_heads in ((BATCH, HEADS), (1, 1)):
            sizes = (*batch_and_heads, QUERY_LEN, KEY_LEN, "cpu")
            actual, expected = (package.flex.create_mask(MASKS[mask], *sizes) for package in PACKAGES.values())
            assert torch.equal(actual, expected)

    @EACH_PACKAGE
    def test_score_functions_hide_what_they_make_minus_infinity(self, package: Any) -> None:
        may_attend = package.flex.create_mask(SCORES["hides"], None, None, 2, 3, "cpu")
        assert may_attend.tolist() == [[[[False, True, True], [True, False, True]]]]

    @EACH_PACKAGE
    def test_masks_combine(self, package: Any) -> None:
        both = package.flex.and_masks(MASKS["causal"], MASKS["window"], MASKS["documents"])
        either = package.flex.or_masks(MASKS["causal"], MASKS["window"])
        sizes = (BATCH, HEADS, QUERY_LEN, KEY_LEN, "cpu")
        causal, window, documents = (
            flex.create_mask(MASKS[name], *sizes) for name in ("causal", "window", "documents")
        )
        assert torch.equal(package.flex.create_mask(both, *sizes), causal & window & documents)
        assert torch.equal(package.flex.create_mask(either, *sizes), causal | window)
        assert package.flex.create_mask(package.flex.and_masks(), *sizes).all()
        assert not package.flex.create_mask(package.flex.or_masks(), *sizes).any()


# --- under other tools -----------------------------------------------------------------------------------------------


class TestTools:
    def test_a_score_function_may_read_rows_of_a_table(self) -> None:
        """By numbers, indices and slices."""
        q, table = random_tensor(1, 3, 5, 4), random_tensor(3, 5, seed=1)

        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + table[h, :].sum() * table[h][j] + table[1, j] + table[0, ...].sum()

        bias = table.sum(1, keepdim=True) * table + table[1] + table[0].sum()
        expected = torch.softmax(q @ q.mT / 2 + bias[:, None], -1) @ q
        assert_equal({"output": flex.flex_attention(q, q, q, biased)}, {"output": expected})

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="masks are built there")
    def test_masks_are_built_on_the_cpu_where_there_is_nothing_else(self) -> None:
        assert flex.create_mask(flex.noop_mask, None, None, 2, 3).device.type == "cpu"

    def test_masks_are_built_where_they_are_asked_for(self) -> None:
        functions: list[Any] = [flex.noop_mask, SCORES["hides"]]
        for function, query_len in itertools.product(functions, (0, 2)):
            assert flex.create_mask(function, None, None, query_len, 3, "meta").device.type == "meta"
        mask = flex.create_block_mask(flex.noop_mask, None, None, 2, 3, "meta")
        assert mask.kv_indices.device.type == mask.to_dense().device.type == "meta"

    @pytest.mark.parametrize("combine", ["and_masks", "or_masks"])
    def test_only_functions_combine(self, combine: str) -> None:
        with pytest.raises(TypeError, match=r"mask_mods must be functions of .*, got 3"):
            getattr(flex, combine)(MASKS["causal"], 3)

    def test_samples_may_be_mapped_over(self) -> None:
        inputs = heads()
        causal = scratch.create_block_mask(MASKS["causal"], None, None, QUERY_LEN, KEY_LEN, "cpu", 2)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output = scratch.flex_attention(query[None], key[None], value[None], SCORES["relative"], causal, None, True)
            return output.squeeze(0)

        expected = scratch.flex_attention(**inputs, score_mod=SCORES["relative"], block_mask=causal, enable_gqa=True)
        assert_equal({"output": torch.func.vmap(attend)(*inputs.values())}, {"output": expected})

    @pytest.mark.slow
    def test_it_may_be_compiled(self) -> None:
        inputs, mask = heads(), block_mask_of(scratch, "lower right", 128)
        expected = scratch.flex_attention(**inputs, score_mod=SCORES["soft cap"], block_mask=mask, enable_gqa=True)
        compiled = torch.compile(scratch.flex_attention, backend="eager")
        actual = compiled(**inputs, score_mod=SCORES["soft cap"], block_mask=mask, enable_gqa=True)
        assert_equal({"output": actual}, {"output": expected})


class TestLimits:
    """What torch's flex attention does not do on the CPU, and scratch's does."""

    @pytest.mark.parametrize("name", ["query", "key", "value"])
    def test_builtin_refuses_gradients_with_the_reason(self, name: str) -> None:
        inputs = heads()
        inputs[name].requires_grad_()
        for call in (builtin.flex_attention, torch_flex.flex_attention):
            with torch.no_grad(), pytest.raises(NotImplementedError):
                call(**inputs, enable_gqa=True)
        with pytest.raises(ValueError, match=f"{name} must not require a gradient on the CPU"):
            builtin.flex_attention(**inputs, enable_gqa=True)
        assert scratch.flex_attention(**inputs, enable_gqa=True).requires_grad

    def test_builtin_refuses_the_greatest_scores(self) -> None:
        request: Any = flex.AuxRequest(max_scores=True)
        for call in (builtin.flex_attention, torch_flex.flex_attention):
            with pytest.raises(NotImplementedError):
                call(**heads(), enable_gqa=True, return_aux=request)
        with pytest.raises(ValueError, match="return_aux must not ask for max_scores on the CPU"):
            builtin.flex_attention(**heads(), enable_gqa=True, return_aux=request)

    @EACH_PACKAGE
    def test_nothing_asked_for_gives_nothing_beside(self, package: Any) -> None:
        _, aux = package.flex_attention(**heads(), enable_gqa=True, return_aux=package.AuxRequest())
        assert (aux.lse, aux.max_scores) == (None, None)
        assert isinstance(package.flex_attention(**heads(), enable_gqa=True), Tensor)

    def test_scratch_refuses_what_is_for_torchs_kernels(self) -> None:
        options: Any = {"BLOCK_M": 16}
        with pytest.raises(ValueError, match=r"kernel_options are for torch's compiled kernels.*BLOCK_M"):
            scratch.flex_attention(**heads(), enable_gqa=True, kernel_options=options)
        output = builtin.flex_attention(**heads(), enable_gqa=True, kernel_options=options)
        assert torch.equal(output, builtin.flex_attention(**heads(), enable_gqa=True, kernel_options={}))
        scratch.flex_attention(**heads(), enable_gqa=True, kernel_options={})
        for name, value in (("_compile", True), ("compute_dq_write_order", True), ("dq_kv_order", False)):
            with pytest.raises(ValueError, match=rf"{name} is for torch's compiled kernels.*got {value}"):
                scratch.create_block_mask(MASKS["causal"], 1, 1, 5, 7, "cpu", **{name: value})
        mask = block_mask_of(scratch, "causal")
        for name in ("dq_write_order", "dq_write_order_full", "dq_kv_order"):
            for make in (partial_lists(mask, flex.BlockMask.from_kv_blocks), partial_lists(mask, whole_block_mask)):
                with pytest.raises(ValueError, match=f"{name} is for torch's compiled kernels"):
                    make(**{name: torch.zeros(1)})
        with pytest.raises(ValueError, match="dq_kv_order_spt is for torch's compiled kernels"):
            partial_lists(mask, whole_block_mask)(dq_kv_order_spt=True)


def partial_lists(mask: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: make(mask.kv_num_blocks, mask.kv_indices, **options)


def whole_block_mask(*lists: Any, **options: Any) -> flex.BlockMask:
    return flex.BlockMask((5, 7), *lists, *[None] * (8 - len(lists)), **options)
