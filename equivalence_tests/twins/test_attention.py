"""MultiheadAttention: against a slow obvious implementation, and against torch.nn to the last bit."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import scratch
from equivalence_tests.instruments.side_by_side import (
    PACKAGES,
    assert_equal,
    describe,
    fast_path,
    merges_as_torch_does,
    outputs_and_gradients,
    random_tensor,
    with_same_weights,
)
from equivalence_tests.instruments.weights import randomize_parameters

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES: dict[str, Any] = {"embed_dim": 33, "num_heads": 3}
EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)


def attention_inputs(kind: str, dtype: torch.dtype = torch.float64, batch_first: bool = False) -> dict[str, Tensor]:
    """Give query, key and value; of self-attention all three, of cross-attention the last two are one object."""
    lengths = {"query": 7 if kind == "self" else 5, "key": 7, "value": 7}
    widths = {"query": 33, "key": 19, "value": 23} if kind == "widths" else dict.fromkeys(lengths, 33)
    x = {
        name: random_tensor(*((2, length) if batch_first else (length, 2)), widths[name], seed=seed, dtype=dtype)
        for seed, (name, length) in enumerate(lengths.items())
    }
    if kind == "self":
        return dict.fromkeys(x, x["query"])
    return {**x, "value": x["key"]} if kind == "cross" else x


def built(package: Any, kind: str, **arguments: Any) -> Any:
    """Build an attention for ``attention_inputs(kind)``."""
    widths = {"kdim": 19, "vdim": 23} if kind == "widths" else {}
    return package.MultiheadAttention(**SIZES, **widths, **arguments)


def masks_for(query_len: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Give every form of mask, True = may not look."""
    hidden = torch.ones(query_len, 7, dtype=torch.bool).triu(2)
    blind = hidden.clone()
    blind[1] = True
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, [1, 5]] = padding[1, 6] = True  # holes inside, not only at the end
    all_padded = padding.clone()
    all_padded[1] = True
    bias = random_tensor(query_len, 7, seed=5).to(dtype)
    return {
        "no mask": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": bias},
        "for each head": {"attn_mask": random_tensor(6, query_len, 7, seed=6) > 0.8},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": random_tensor(2, 7, seed=7).to(dtype)},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "both float": {"attn_mask": bias, "key_padding_mask": random_tensor(2, 7, seed=7).to(dtype)},
        "a blind query": {"attn_mask": blind},
        "a sample of padding": {"key_padding_mask": all_padded},
        "hint": {"attn_mask": torch.ones(query_len, 7, dtype=torch.bool).triu(1), "is_causal": True},
    }


EXTRAS: list[dict[str, Any]] = [
    {},
    {"bias": False, "add_zero_attn": True},
    {"add_bias_kv": True},
    {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.3},
    {"dropout": 0.3, "batch_first": True},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extras", EXTRAS, ids=describe)
@pytest.mark.parametrize("kind", ["self", "cross", "three", "widths"])
class TestBits:
    """With weights asked for, torch.nn takes its plain path: every bit is the same, NaN included."""

    def test_outputs_weights_and_all_gradients_are_torchs_to_the_last_bit(
        self, kind: str, extras: dict[str, Any], dtype: torch.dtype
    ) -> None:
        ours, theirs = built(scratch, kind, **extras), built(nn, kind, **extras)
        with_same_weights(ours, theirs, dtype)
        inputs = attention_inputs(kind, dtype, batch_first=extras.get("batch_first", False))
        for name, given in masks_for(inputs["query"].size(1 if extras.get("batch_first") else 0), dtype).items():
            arguments = {**given, "average_attn_weights": name != "both"}
            actual = outputs_and_gradients(ours, inputs, **arguments)
            assert_equal(actual, outputs_and_gradients(theirs, inputs, **arguments), relative_bound=0)

    def test_so_they_are_in_eval_off_the_fast_path(self, kind: str, extras: dict[str, Any], dtype: torch.dtype) -> None:
        ours, theirs = built(scratch, kind, **extras).eval(), built(nn, kind, **extras).eval()
        with_same_weights(ours, theirs, dtype)
        inputs = attention_inputs(kind, dtype, batch_first=extras.get("batch_first", False))
        with fast_path(False), torch.no_grad():
            (output, weights), (expected, expected_weights) = ours(**inputs), theirs(**inputs)
        assert_equal(
            {"output": output, "output weights": weights},
            {"output": expected, "output weights": expected_weights},
            relative_bound=0,
        )


@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=describe)
@pytest.mark.parametrize("sharing", ["self", "cross", "three"])
@pytest.mark.parametrize(
    ("dtype", "batch", "length", "num_heads", "head_dim"),
    [
        (torch.float64, 1, 17, 2, 7),
        (torch.float64, 3, 19, 3, 5),
        (torch.float64, 2, 17, 2, 3),  # sqrt(1 / 3) is not 1 / sqrt(3)
        (torch.float64, 1, 50, 2, 1),
        (torch.float64, 2, 50, 1, 11),  # one head alone is merged without a copy
        (torch.float16, 2, 17, 1, 2),
        (torch.float32, 1, 25, 2, 1),
        (torch.float32, 2, 50, 3, 1),
    ],
)
def test_the_bits_are_torchs_where_products_round_by_how_their_factors_lie_in_memory(
    dtype: torch.dtype, batch: int, length: int, num_heads: int, head_dim: int, sharing: str, arguments: dict[str, Any]
) -> None:
    """From about 16 places on, the CPU's kernels take other paths for other strides and alignments."""
    width = num_heads * head_dim
    ours, theirs = (package.MultiheadAttention(width, num_heads, **arguments) for package in (scratch, nn))
    if not merges_as_torch_does(theirs):
        pytest.skip("before 2.13 torch.nn lays merged heads of width 1 out anew")
    with_same_weights(ours, theirs, dtype)
    query, key, value = (random_tensor(length, batch, width, seed=i, dtype=dtype) for i in range(3))
    inputs = {"query": query, "key": query if sharing == "self" else key, "value": value}
    inputs["value"] = value if sharing == "three" else inputs["key"]
    alone = {id(x): x[:, 0] for x in inputs.values()}  # without a batch, equal objects equal
    for given in (inputs, {name: alone[id(x)] for name, x in inputs.items()}):
        actual, expected = (outputs_and_gradients(x, given, average_attn_weights=False) for x in (ours, theirs))
        assert_equal(actual, expected, relative_bound=0)


@pytest.mark.parametrize("extras", EXTRAS, ids=describe)
@pytest.mark.parametrize("kind", ["self", "cross", "three", "widths"])
class TestWithoutWeights:
    """Here torch.nn takes a fused kernel, which rounds in another order."""

    def test_outputs_and_all_gradients_agree(self, kind: str, extras: dict[str, Any]) -> None:
        ours, theirs = built(scratch, kind, **extras), built(nn, kind, **extras)
        with_same_weights(ours, theirs)
        inputs = attention_inputs(kind, batch_first=extras.get("batch_first", False))
        masks = masks_for(inputs["query"].size(1 if extras.get("batch_first") else 0), torch.float64)
        for given in masks.values():
            actual = outputs_and_gradients(ours, inputs, need_weights=False, **given)
            assert actual["output 1"] is None
            assert_equal(actual, outputs_and_gradients(theirs, inputs, need_weights=False, **given))


def slow_multihead_attention(attention: Any, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """Attend head by head and query by query: (query_len, embed_dim) against (key_len, embed_dim)."""
    d_k, d_v = attention.head_dim, attention.out_proj.in_features // 3
    sizes = [3 * d_k, 3 * d_k, 3 * d_v]
    q_weight, k_weight, v_weight = attention.in_proj_weight.split(sizes)
    q_bias, k_bias, v_bias = attention.in_proj_bias.split(sizes)
    rows = []
    for i in range(len(query)):
        contexts = []
        for head in range(3):
            of_keys, of_values = slice(head * d_k, (head + 1) * d_k), slice(head * d_v, (head + 1) * d_v)
            q = q_weight[of_keys] @ query[i] + q_bias[of_keys]
            scores = [float(q @ (k_weight[of_keys] @ x + k_bias[of_keys])) / math.sqrt(d_k) for x in key]
            exponentials = [0.0 if hidden[i, j] else math.exp(score) for j, score in enumerate(scores)]
            values = [v_weight[of_values] @ x + v_bias[of_values] for x in value]
            contexts.append(sum(e * v for e, v in zip(exponentials, values, strict=True)) / sum(exponentials))
        rows.append(attention.out_proj.weight @ torch.cat(contexts) + attention.out_proj.bias)
    return torch.stack(rows)


class TestSlowly:
    @EACH_PACKAGE
    def test_loops_over_heads_and_queries_give_the_same(self, package: Any) -> None:
        attention = randomize_parameters(built(package, "three").double())
        inputs = {name: x[:, 0] for name, x in attention_inputs("three").items()}
        hidden = torch.ones(5, 7, dtype=torch.bool).triu(2)
        with torch.no_grad():
            output, _ = attention(**inputs, attn_mask=hidden)
            assert_equal({"output": output}, {"output": slow_multihead_attention(attention, **inputs, hidden=hidden)})

    @pytest.mark.parametrize("sizes", [(13, 17), (13, None), (None, 17), (1, 1)], ids=str)
    def test_so_with_head_sizes_of_their_own(self, sizes: tuple[int | None, int | None]) -> None:
        attention = randomize_parameters(built(scratch, "three", qk_head_dim=sizes[0], v_head_dim=sizes[1]).double())
        inputs = {name: x[:, 0] for name, x in attention_inputs("three").items()}
        hidden = torch.ones(5, 7, dtype=torch.bool).triu(2)
        with torch.no_grad():
            output, _ = attention(**inputs, attn_mask=hidden)
            assert_equal({"output": output}, {"output": slow_multihead_attention(attention, **inputs, hidden=hidden)})

    def test_heads_need_not_divide_the_width_if_both_sizes_are_given(self) -> None:
        attention = scratch.MultiheadAttention(300, 7, qk_head_dim=11, v_head_dim=13)
        assert [tuple(x.shape) for x in attention.parameters()] == [(245, 300), (245,), (300, 91), (300,)]
        assert attention(*[torch.zeros(5, 2, 300)] * 3)[0].shape == (5, 2, 300)

    def test_head_sizes_join_widths_of_their_own_and_appended_tokens(self) -> None:
        attention = built(scratch, "widths", qk_head_dim=13, v_head_dim=17, add_bias_kv=True, add_zero_attn=True)
        output, weights = attention.double()(**attention_inputs("widths"))
        assert (output.shape, weights.shape) == ((5, 2, 33), (2, 5, 9))


@EACH_PACKAGE
class TestForms:
    """One computation, said in several ways."""

    def test_without_a_batch_it_is_one_sample(self, package: Any) -> None:
        attention = randomize_parameters(built(package, "three").double())
        inputs = attention_inputs("three")
        padding, mask = masks_for(5, torch.float64)["padding"]["key_padding_mask"], random_tensor(6, 5, 7) > 0.8
        output, weights = attention(**inputs, key_padding_mask=padding, attn_mask=mask, average_attn_weights=False)
        alone, its_weights = attention(
            **{name: x[:, 1] for name, x in inputs.items()},
            key_padding_mask=padding[1],
            attn_mask=mask[3:],
            average_attn_weights=False,
        )
        assert_equal({"output": alone, "output w": its_weights}, {"output": output[:, 1], "output w": weights[1]})

    def test_batch_first_turns_inputs_and_outputs(self, package: Any) -> None:
        sequence_first, batch_first = built(package, "cross"), built(package, "cross", batch_first=True)
        with_same_weights(sequence_first, batch_first)
        output, weights = sequence_first(**attention_inputs("cross"))
        turned = {name: x.transpose(0, 1) for name, x in attention_inputs("three").items()} | {}
        turned["value"] = turned["key"]
        output_turned, weights_turned = batch_first(**turned)
        assert_equal(
            {"output": output_turned.transpose(0, 1), "output w": weights_turned},
            {"output": output, "output w": weights},
        )

    def test_averaged_weights_are_the_mean_over_heads_and_sum_to_1(self, package: Any) -> None:
        attention = randomize_parameters(built(package, "three").double()).eval()
        _, averaged = attention(**attention_inputs("three"))
        _, each = attention(**attention_inputs("three"), average_attn_weights=False)
        assert each.shape == (2, 3, 5, 7)
        assert_equal({"output": averaged}, {"output": each.mean(1)})
        assert_equal({"output": each.sum(-1)}, {"output": torch.ones(2, 3, 5, dtype=torch.float64)})

    def test_masks_hide_what_they_say(self, package: Any) -> None:
        attention = randomize_parameters(built(package, "three").double()).eval()
        masks = masks_for(5, torch.float64)["both"]
        _, weights = attention(**attention_inputs("three"), **masks, average_attn_weights=False)
        hidden = masks["attn_mask"] | masks["key_padding_mask"][:, None, None, :]
        assert torch.equal(weights == 0, hidden.expand(2, 3, 5, 7))

    def test_the_mask_of_each_head_runs_through_the_heads_first(self, package: Any) -> None:
        attention = randomize_parameters(built(package, "three").double()).eval()
        mask = random_tensor(6, 5, 7, seed=6) > 0.8
        _, weights = attention(**attention_inputs("three"), attn_mask=mask, average_attn_weights=False)
        assert torch.equal(weights == 0, mask.view(2, 3, 5, 7))

    def test_appended_tokens_are_seen_through_every_mask(self, package: Any) -> None:
        attention = randomize_parameters(built(package, "three", add_bias_kv=True, add_zero_attn=True).double()).eval()
        everything = torch.ones(5, 7, dtype=torch.bool)
        _, weights = attention(**attention_inputs("three"), attn_mask=everything)
        assert weights.shape == (2, 5, 9)
        assert not weights[..., :7].any()
        assert weights[..., 7:].all()

    def test_the_hint_replaces_the_mask_only_without_weights_and_padding(self, package: Any) -> None:
        attention = randomize_parameters(built(package, "self").double())
        inputs, nothing_hidden = attention_inputs("self"), torch.zeros(7, 7, dtype=torch.bool)
        causal = {"attn_mask": ~scratch.masks.causal(7)}
        padding = {"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)}
        for without, hint_wins in (
            ({"need_weights": False}, True),
            ({}, False),
            ({"need_weights": False} | padding, False),
        ):
            hinted = attention(**inputs, attn_mask=nothing_hidden, is_causal=True, **without)[0]
            as_hinted = attention(**inputs, **causal, **without)[0]
            as_masked = attention(**inputs, attn_mask=nothing_hidden, **without)[0]
            assert_equal({"output": hinted}, {"output": as_hinted if hint_wins else as_masked})
            assert not torch.allclose(as_hinted, as_masked)

    def test_a_blind_query_is_nan_with_weights_and_the_bias_of_the_output_without(self, package: Any) -> None:
        attention = randomize_parameters(built(package, "three").double())
        blind = masks_for(5, torch.float64)["a blind query"]
        output, weights = attention(**attention_inputs("three"), **blind)
        assert output[1].isnan().all()
        assert weights[:, 1].isnan().all()
        assert output[[0, 2, 3, 4]].isfinite().all()
        without, _ = attention(**attention_inputs("three"), **blind, need_weights=False)
        assert torch.equal(without[1], attention.out_proj.bias.expand(2, 33))

    def test_scores_beyond_float16_do_not_overflow_without_weights(self, package: Any) -> None:
        module = package.MultiheadAttention(64, 1, bias=False, dtype=torch.float16)
        with torch.no_grad():
            module.in_proj_weight.copy_(torch.eye(64).repeat(3, 1))
            module.out_proj.weight.copy_(torch.eye(64))
        x = torch.full((7, 2, 64), 256.0, dtype=torch.float16)
        assert torch.equal(module(x, x, x, need_weights=False)[0], x)

    def test_dropout_is_off_in_eval_and_on_in_training(self, package: Any) -> None:
        attention = randomize_parameters(built(package, "three", dropout=0.5).double())
        inputs = attention_inputs("three")
        _, dropped = attention(**inputs, average_attn_weights=False)
        assert 0.3 < float((dropped == 0).double().mean()) < 0.7
        attention.eval()
        (first, weights), (second, _) = attention(**inputs), attention(**inputs)
        assert torch.equal(first, second)
        assert weights.all()

    def test_a_bias_of_half_precision_beside_wider_weights_works_in_eval(self, package: Any) -> None:
        attention = built(package, "self", batch_first=True).double().eval()
        attention.in_proj_bias = nn.Parameter(attention.in_proj_bias.half(), requires_grad=False)
        x = random_tensor(2, 7, 33)
        assert attention(x, x, x)[0].dtype == torch.float64

    def test_parameters_may_be_replaced_after_construction(self, package: Any) -> None:
        """Nothing is remembered of the old ones."""
        attention = built(package, "three").double()
        before = attention(**attention_inputs("three"))[0]
        attention.in_proj_weight = nn.Parameter(random_tensor(99, 33, seed=9))
        attention.out_proj.weight = nn.Parameter(random_tensor(33, 33, seed=10))
        assert not torch.allclose(attention(**attention_inputs("three"))[0], before)


def test_the_output_projection_is_called_as_a_module_in_scratch_only() -> None:
    """So hooks and adapters on it run: see trap `out_proj_never_called`."""
    calls = {}
    for name, package in PACKAGES.items():
        attention = built(package, "three").double()
        calls[name] = 0

        def count(*arguments: object, name: str = name) -> None:
            calls[name] += 1

        attention.out_proj.register_forward_hook(count)
        for need_weights in (True, False):
            attention(**attention_inputs("three"), need_weights=need_weights)
    assert calls == {"scratch": 2, "builtin": 0}


def test_the_trained_half_bias_of_torch_is_as_in_scratch() -> None:
    ours, theirs = built(scratch, "self", batch_first=True).double(), built(nn, "self", batch_first=True).double()
    with_same_weights(ours, theirs)
    for attention in (ours, theirs):
        attention.in_proj_bias = nn.Parameter(attention.in_proj_bias.half())
    x = attention_inputs("self", batch_first=True)
    with torch.no_grad():
        assert_equal({"output": ours.eval()(**x)[0]}, {"output": theirs.eval()(**x)[0]})


@pytest.mark.parametrize("widths", [{"kdim": 19}, {"vdim": 23}, {"kdim": 19, "vdim": 19}], ids=describe)
def test_widths_of_their_own_start_with_torchs_parameters_and_share_no_product(widths: dict[str, int]) -> None:
    drawn = []
    for package in (scratch, nn):
        torch.manual_seed(0)
        drawn.append(package.MultiheadAttention(**SIZES, **widths, add_bias_kv=True).double())
    ours, theirs = drawn
    assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), theirs.parameters(), strict=True))
    query, key = random_tensor(5, 2, 33), random_tensor(7, 2, ours.kdim, seed=1)
    value = key if ours.kdim == ours.vdim else random_tensor(7, 2, ours.vdim, seed=2)
    assert torch.equal(ours(query, key, value)[0], theirs(query, key, value)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_without_weights_the_bits_are_those_of_torchs_math_kernel(masked: bool, dtype: torch.dtype) -> None:
    theirs = randomize_parameters(nn.MultiheadAttention(**SIZES, dtype=dtype))
    ours = scratch.MultiheadAttention(**SIZES, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    inputs = {"query": random_tensor(5, 2, 33, dtype=dtype), "key": random_tensor(7, 2, 33, seed=1, dtype=dtype)}
    given: dict[str, Any] = {"attn_mask": random_tensor(5, 7, seed=2) > 0.5} if masked else {}

    def run(module: nn.Module) -> Any:
        def attend(query: Tensor, key: Tensor) -> Any:
            return module(query, key, key, need_weights=False, **given)[0]

        return outputs_and_gradients(attend, inputs)

    with sdpa_kernel(SDPBackend.MATH):
        assert_equal(run(ours), run(theirs), relative_bound=0)


def test_one_head_of_one_feature_is_enough() -> None:
    attention = scratch.MultiheadAttention(1, 1)
    assert (attention.embed_dim, attention.head_dim) == (1, 1)
