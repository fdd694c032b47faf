"""Packed sequences: each attends as it would alone, or padded beside the others, forwards and backwards."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

import builtin
import scratch
from equivalence_tests.instruments.differences import compare_errors
from equivalence_tests.instruments.side_by_side import assert_equal, outputs_and_gradients, random_tensor
from scratch import masks, score_functions, validation
from scratch.varlen import AuxRequest

QUERY_LENGTHS, KEY_LENGTHS = (5, 2, 0, 3), (7, 2, 4, 11)
HEADS, KEY_HEADS, HEAD_DIM = 6, 2, 13
WINDOWS = {
    "all": (-1, -1),
    "causal": (-1, 0),
    "the last 3": (2, 0),
    "either side": (1, 2),
    "from here on": (0, -1),
    "its own place": (0, 0),
}


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(dtype: torch.dtype = torch.float64, key_heads: int = KEY_HEADS) -> dict[str, Any]:
    shapes = {
        "query": (sum(QUERY_LENGTHS), HEADS, HEAD_DIM),
        "key": (sum(KEY_LENGTHS), key_heads, HEAD_DIM),
        "value": (sum(KEY_LENGTHS), key_heads, HEAD_DIM),
    }
    return {name: random_tensor(*shape, seed=seed, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}


def arguments(**more: Any) -> dict[str, Any]:
    lengths = {"max_q": max(QUERY_LENGTHS), "max_k": max(KEY_LENGTHS), "enable_gqa": True}
    return {"cu_seq_q": cumulative(QUERY_LENGTHS), "cu_seq_k": cumulative(KEY_LENGTHS), **lengths, **more}


def may_attend_within(query_len: int, key_len: int, window_size: tuple[int, int]) -> Tensor:
    """Go through all places: the last query stands at the last key."""
    left, right = (math.inf if size == -1 else size for size in window_size)
    rows = [[-left <= j - (i + key_len - query_len) <= right for j in range(key_len)] for i in range(query_len)]
    return torch.tensor(rows, dtype=torch.bool).view(query_len, key_len)


def padded(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Give every sequence the length of the longest: (batch, num_heads, len, head_dim)."""
    return torch.nn.utils.rnn.pad_sequence(list(x.split(list(lengths))), batch_first=True).transpose(1, 2)


class TestPacked:
    @pytest.mark.parametrize("window", WINDOWS)
    def test_equals_padded_sample_by_sample(self, window: str) -> None:
        may_attend = torch.zeros(4, 1, max(QUERY_LENGTHS), max(KEY_LENGTHS), dtype=torch.bool)
        for sample, (query_len, key_len) in enumerate(zip(QUERY_LENGTHS, KEY_LENGTHS, strict=True)):
            within = may_attend_within(query_len, key_len, WINDOWS[window])
            may_attend[sample, 0, :query_len, :key_len] = within

        def by_padding(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = padded(query, QUERY_LENGTHS), padded(key, KEY_LENGTHS), padded(value, KEY_LENGTHS)
            output = F.scaled_dot_product_attention(q, k, v, may_attend, enable_gqa=True).transpose(1, 2)
            return torch.cat([x[:length] for x, length in zip(output, QUERY_LENGTHS, strict=True)])

        actual = outputs_and_gradients(scratch.varlen_attn, packed(), **arguments(window_size=WINDOWS[window]))
        assert_equal(actual, outputs_and_gradients(by_padding, packed()))

    @pytest.mark.parametrize("window", WINDOWS)
    def test_equals_each_sequence_alone(self, window: str) -> None:
        inputs = packed()
        options = arguments(window_size=WINDOWS[window], scale=0.3, return_aux=AuxRequest(lse=True))
        output, lse = scratch.varlen_attn(**inputs, **options)
        at = [cumulative(lengths).tolist() for lengths in (QUERY_LENGTHS, KEY_LENGTHS)]
        for i in range(4):
            if not QUERY_LENGTHS[i]:
                continue
            own, others = slice(*at[0][i : i + 2]), slice(*at[1][i : i + 2])
            q = inputs["query"][own].transpose(0, 1)
            k, v = (inputs[name][others].transpose(0, 1).repeat_interleave(3, 0) for name in ("key", "value"))
            hidden = ~may_attend_within(QUERY_LENGTHS[i], KEY_LENGTHS[i], WINDOWS[window])
            scores = (q @ k.mT * 0.3).masked_fill(hidden, -math.inf)
            sees = ~hidden.all(-1, keepdim=True)
            expected = scores.masked_fill(~sees, 0).softmax(-1) @ v * sees
            assert_equal({"output": output[own].transpose(0, 1).contiguous()}, {"output": expected})
            assert_equal({"output": lse[:, own].contiguous()}, {"output": scores.logsumexp(-1)})

    def test_equals_flex_attention_within_documents(self) -> None:
        inputs = packed(key_heads=HEADS)
        same = {"query": inputs["key"], "key": inputs["key"], "value": inputs["value"]}
        cu_seq = cumulative(KEY_LENGTHS)
        actual = scratch.varlen_attn(**same, cu_seq_q=cu_seq, cu_seq_k=cu_seq, max_q=11, max_k=11, window_size=(2, 0))
        documents = torch.arange(4).repeat_interleave(torch.tensor(KEY_LENGTHS))
        mask_mod = score_functions.document(documents) & score_functions.causal() & score_functions.sliding_window(3)
        tokens = sum(KEY_LENGTHS)
        mask = scratch.create_block_mask(mask_mod, None, None, tokens, tokens, "cpu", 4)
        heads_first = {name: x.transpose(0, 1)[None] for name, x in same.items()}
        expected = scratch.flex_attention(**heads_first, block_mask=mask)[0].transpose(0, 1)
        assert_equal({"output": actual}, {"output": expected.contiguous()})

    def test_causal_is_aligned_to_the_lower_right(self) -> None:
        q, k, v = (random_tensor(n, 2, 3, seed=n) for n in (3, 5, 5))
        options: dict[str, Any] = {"max_q": 3, "max_k": 5, "window_size": (-1, 0)}
        output = scratch.varlen_attn(q, k, v, torch.tensor([0, 3]).int(), torch.tensor([0, 5]).int(), **options)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        expected = F.scaled_dot_product_attention(q, k, v, causal_lower_right(3, 5))
        assert_equal({"output": output}, {"output": expected[0].transpose(0, 1).contiguous()})
        assert torch.equal(may_attend_within(3, 5, (-1, 0)), masks.causal(3, 5, align="lower_right"))


class TestEdges:
    def test_a_query_that_may_look_at_no_key_gets_0_and_gives_no_gradient(self) -> None:
        q, k = random_tensor(5, 1, 3).requires_grad_(), random_tensor(2, 1, 3, seed=1).requires_grad_()
        cu_seqs = torch.tensor([0, 3, 5]).int(), torch.tensor([0, 2, 2]).int()
        options: dict[str, Any] = {"window_size": (-1, 0), "return_aux": AuxRequest(lse=True)}
        output, lse = scratch.varlen_attn(q, k, k, *cu_seqs, 3, 2, **options)
        blind = torch.tensor([True, False, False, True, True])
        assert not output[blind].any()
        assert output[~blind].all()
        assert torch.equal(lse[0] == -math.inf, blind)
        gradients = torch.autograd.grad(output.sum() + lse[:, ~blind].sum(), (q, k))
        assert all(x.isfinite().all() for x in gradients)
        assert not gradients[0][blind].any()

    def test_no_tokens_have_no_context(self) -> None:
        nothing, cu_seq = random_tensor(0, 2, 3), torch.zeros(2).int()
        assert scratch.varlen_attn(nothing, nothing, nothing, cu_seq, cu_seq, 0, 0).shape == (0, 2, 3)

    def test_the_log_sum_exp_has_the_heads_first_and_is_not_rounded_to_half(self) -> None:
        _, lse = scratch.varlen_attn(**packed(torch.bfloat16), **arguments(return_aux=AuxRequest(lse=True)))
        assert (lse.shape, lse.dtype) == ((HEADS, sum(QUERY_LENGTHS)), torch.float32)
        assert isinstance(scratch.varlen_attn(**packed(), **arguments(return_aux=AuxRequest())), Tensor)

    def test_torchs_own_says_that_the_heads_come_first_too(self) -> None:
        """Without a GPU it computes nothing, and still knows its shapes."""
        on_meta = {name: x.half().to("meta") for name, x in packed().items()}
        lengths = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in arguments().items()}
        if "enable_gqa" not in (varlen_attn.__kwdefaults__ or {}):
            on_meta, lengths = dict.fromkeys(on_meta, on_meta["query"]), {**lengths}
            lengths.pop("enable_gqa")
        output, lse = varlen_attn(**on_meta, **lengths, return_aux=AuxRequest(lse=True))  # type: ignore[arg-type]
        assert lse.shape == (HEADS, sum(QUERY_LENGTHS))
        assert output.shape == on_meta["query"].shape

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_lower_precision_errs_no_more_than_twice_as_far_as_torchs_padded_attention(
        self, dtype: torch.dtype
    ) -> None:
        q, k, v = (random_tensor(5, 3, 8, seed=seed, dtype=dtype) for seed in range(3))
        cu_seq = torch.tensor([0, 5]).int()
        actual = scratch.varlen_attn(q, k, v, cu_seq, cu_seq, 5, 5)
        exact = scratch.varlen_attn(q.double(), k.double(), v.double(), cu_seq, cu_seq, 5, 5)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        expected = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).contiguous()
        assert actual.dtype == dtype
        errors = compare_errors(actual, expected, exact)
        assert errors.passed, str(errors)

    def test_it_computes_in_float32_under_autocast_too(self) -> None:
        expected = scratch.varlen_attn(**packed(torch.float32), **arguments())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(scratch.varlen_attn(**packed(torch.float32), **arguments()), expected)

    def test_numbers_moved_a_little_give_the_same(self) -> None:
        cu_seqs = torch.tensor([0, 1, 3]).int(), torch.tensor([0, 2, 4]).int()

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
            options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
            return scratch.varlen_attn(query, key, value, *cu_seqs, 2, 2, **options)

        shapes = ((3, 2, 2), (4, 1, 2), (4, 1, 2))
        leaves = [random_tensor(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
        assert torch.autograd.gradcheck(attend, leaves)
        assert torch.autograd.gradgradcheck(attend, leaves, fast_mode=True)


class TestLimits:
    def test_builtin_refuses_what_torch_does_not_compute(self) -> None:
        given = {name: x for name, x in arguments().items() if name != "enable_gqa"}
        for call in (builtin.varlen_attn, varlen_attn):
            with pytest.raises(NotImplementedError):
                call(**packed(torch.float16, HEADS), **given)
        with pytest.raises(ValueError, match=r"must be float16 or bfloat16 on CUDA.*got torch.float16 on cpu"):
            builtin.varlen_attn(**packed(torch.float16), **arguments())

    @pytest.mark.parametrize(
        ("device", "dtype", "taken"),
        [
            ("cuda", torch.float16, True),
            ("cuda", torch.bfloat16, True),
            ("cuda", torch.float32, False),
            ("cpu", torch.float16, False),
        ],
    )
    def test_torchs_kernel_takes_half_precision_on_cuda(self, device: str, dtype: torch.dtype, taken: bool) -> None:
        query: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
        with nullcontext() if taken else pytest.raises(NotImplementedError):
            validation.check_varlen_on_device(query)

    @pytest.mark.parametrize("name", ["seqused_k", "block_table", "num_splits"])
    def test_scratch_refuses_what_is_for_torchs_kernel(self, name: str) -> None:
        value = 1 if name == "num_splits" else torch.ones(4).int()
        with pytest.raises(ValueError, match=f"{name} is for torch's compiled kernels"):
            scratch.varlen_attn(**packed(), **arguments(**{name: value}))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("window", WINDOWS)
def test_torchs_kernel_gives_the_same_on_cuda(window: str) -> None:
    grouped = "enable_gqa" in (varlen_attn.__kwdefaults__ or {})  # not in torch 2.11
    given = arguments(window_size=WINDOWS[window], enable_gqa=grouped)
    options: dict[str, Any] = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}
    drawn = packed(torch.bfloat16, KEY_HEADS if grouped else HEADS)
    inputs = {name: F.pad(x, (0, 3)).cuda() for name, x in drawn.items()}  # widths of 8, 16, ...
    found = outputs_and_gradients(scratch.varlen_attn, inputs, **options, scale=0.3)
    torchs = outputs_and_gradients(builtin.varlen_attn, inputs, **options, scale=0.3)
    exact_inputs = {name: x.double() for name, x in inputs.items()}
    exact = outputs_and_gradients(scratch.varlen_attn, exact_inputs, **options, scale=0.3)
    for name in exact:
        errors = compare_errors(found[name], torchs[name], exact[name], name=name)
        assert errors.passed, str(errors)
