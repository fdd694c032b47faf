"""Grouped-query attention head by head, in both packages, with every option, with and without a cache."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import builtin
import scratch
from builtin.grouped import grouped_attention as grouped_attention_of_torch
from equivalence_tests.instruments.differences import compare_errors, largest_value
from equivalence_tests.instruments.side_by_side import (
    PACKAGES,
    assert_equal,
    outputs_and_gradients,
    random_tensor,
    with_same_weights,
)
from equivalence_tests.instruments.weights import randomize_parameters
from scratch import validation
from scratch.decoding import KeyValueCache
from scratch.grouped import Scoring, grouped_attention, who_may_attend

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

BATCH, LENGTH, NUM_HEADS, HEAD_DIM, EMBED_DIM = 2, 7, 6, 10, 13
PADDING = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
PADDING[1, ..., :2] = False  # on the left: the first two tokens of the second row see nothing


def combinations() -> list[dict[str, Any]]:
    """Give every combination of the options of an attention."""
    choices: dict[str, list[Any]] = {
        "num_key_heads": [None, 2, 1],
        "qk_norm": [False, True],
        "window": [None, 3],
        "soft_cap": [None, 0.7],
        "sinks": [False, True],
        "pairing": [None, "adjacent", "halves"],
    }
    every = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    # Without a compiler torch's flex attention, the way to capped scores, is traced anew each time, which takes long.
    return [options for options in every if options["soft_cap"] is None or options["num_key_heads"] == 2]


CALLS: list[dict[str, Any]] = [
    {"may_attend": may_attend, "is_causal": is_causal} for may_attend in (PADDING, None) for is_causal in (True, False)
]
FEW = {"num_key_heads": 2, "qk_norm": True, "pairing": "halves"}
CAPPED = [{**FEW, "soft_cap": 0.7, "window": window, "sinks": sinks} for window in (None, 3) for sinks in (False, True)]


def build(package: Any, options: dict[str, Any], **more: Any) -> Any:
    """Build an attention with random weights; "pairing" stands for its rotary embedding."""
    rotary = package.RotaryEmbedding(HEAD_DIM, pairing=options["pairing"]) if options.get("pairing") else None
    arguments = {name: x for name, x in options.items() if name != "pairing"} | {"rotary": rotary, **more}
    attention = package.GroupedQueryAttention(EMBED_DIM, NUM_HEADS, head_dim=HEAD_DIM, bias=True, **arguments)
    return randomize_parameters(attention.double())


def written_out(attention: Any, x: Tensor, may_attend: Tensor | None, is_causal: bool) -> Tensor:
    """Compute the attention head by head and query by query."""
    q, k, v = attention.project(x)
    context = torch.zeros_like(q)
    for b, h, i in itertools.product(range(q.size(0)), range(q.size(1)), range(q.size(2))):
        group = h // (attention.num_heads // attention.num_key_heads)
        scores, values = [], []
        for j in range(k.size(2)):
            hidden = is_causal and j > i
            hidden |= attention.window is not None and abs(i - j) >= attention.window
            hidden |= may_attend is not None and not may_attend.expand(len(x), q.size(1), q.size(2), -1)[b, h, i, j]
            if not hidden:
                score = attention.scale * (q[b, h, i] @ k[b, group, j])
                cap = attention.soft_cap
                scores.append(score if cap is None else cap * torch.tanh(score / cap))
                values.append(v[b, group, j])
        weights = torch.tensor([s.exp() for s in scores], dtype=x.dtype)
        below = weights.sum() + (0 if attention.sinks is None else attention.sinks[h].exp())
        if scores:
            context[b, h, i] = (weights / below) @ torch.stack(values)
    return attention.out_proj(context.transpose(1, 2).flatten(2))


class TestBothPackages:
    @pytest.mark.parametrize("options", combinations(), ids=str)
    def test_every_combination_computes_the_same_flex_attention_included(self, options: dict[str, Any]) -> None:
        x = random_tensor(BATCH, LENGTH, EMBED_DIM)
        ours, theirs = (build(package, options) for package in PACKAGES.values())
        if options["soft_cap"] is None:
            for call in CALLS:
                assert_equal(
                    outputs_and_gradients(ours, {"x": x}, **call), outputs_and_gradients(theirs, {"x": x}, **call)
                )
        with torch.no_grad():
            assert_equal({"output": ours(x, **CALLS[0])}, {"output": theirs(x, **CALLS[0])})

    @pytest.mark.parametrize("call", CALLS[1:], ids=str)
    @pytest.mark.parametrize("options", CAPPED, ids=str)
    def test_capped_scores_are_those_of_flex_attention_in_every_call(
        self, options: dict[str, Any], call: dict[str, Any]
    ) -> None:
        x = random_tensor(BATCH, LENGTH, EMBED_DIM)
        ours, theirs = (build(package, options) for package in PACKAGES.values())
        with torch.no_grad():
            assert_equal({"output": ours(x, **call)}, {"output": theirs(x, **call)})

    @pytest.mark.parametrize("options", combinations()[::13], ids=str)
    @pytest.mark.parametrize("call", CALLS, ids=str)
    def test_scratch_is_the_formula_head_by_head(self, options: dict[str, Any], call: dict[str, Any]) -> None:
        attention, x = build(scratch, options), random_tensor(BATCH, LENGTH, EMBED_DIM)
        with torch.no_grad():
            assert_equal({"output": attention(x, **call)}, {"output": written_out(attention, x, **call)})

    @pytest.mark.parametrize(
        "options", [{"soft_cap": 0.7, "sinks": True, "qk_norm": True, "pairing": "halves"}], ids=str
    )
    def test_the_gradients_that_flex_attention_lacks_are_right(self, options: dict[str, Any]) -> None:
        attention = build(scratch, {**options, "num_key_heads": 2, "window": 3})

        def call(x: Tensor, *parameters: Tensor) -> Tensor:
            named = dict(zip((name for name, _ in attention.named_parameters()), parameters, strict=True))
            return torch.func.functional_call(attention, named, (x, PADDING))

        inputs = random_tensor(BATCH, LENGTH, EMBED_DIM).requires_grad_(), *attention.parameters()
        assert torch.autograd.gradcheck(call, inputs, fast_mode=True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("options", combinations()[::13], ids=str)
    def test_in_lower_precision_the_errors_are_those_of_torch_flex_attention_included(
        self, options: dict[str, Any], dtype: torch.dtype
    ) -> None:
        x = random_tensor(BATCH, LENGTH, EMBED_DIM, dtype=dtype)
        modules = [build(package, options).to(dtype) for package in PACKAGES.values()]
        exact = copy.deepcopy(modules[0]).double()
        if options["soft_cap"] is None:
            inputs = [{"x": x}, {"x": x}, {"x": x.double()}]
            results = [
                outputs_and_gradients(module, tensors, may_attend=PADDING)
                for module, tensors in zip((*modules, exact), inputs, strict=True)
            ]
        else:
            with torch.no_grad():
                results = [{"output": m(x.to(m.q_proj.weight.dtype), PADDING)} for m in (*modules, exact)]
        for kind in ("output", "gradient"):
            names = [name for name in results[2] if name.startswith(kind)]
            largest = largest_value(y for name in names if (y := results[2][name]) is not None)
            for name in names:
                ratio = compare_errors(*(result[name] for result in results), name=name, largest=largest)
                assert ratio.passed, str(ratio)

    def test_same_seed_gives_the_same_parameters(self) -> None:
        built = []
        for package in PACKAGES.values():
            torch.manual_seed(7)
            built.append(package.GroupedQueryAttention(12, 6, 2, True, qk_norm=True, sinks=True).state_dict())
        assert list(built[0]) == list(built[1])
        assert all(torch.equal(built[0][name], built[1][name]) for name in built[0])

    def test_queries_and_keys_are_normalised_and_then_turned(self) -> None:
        rotary = scratch.RotaryEmbedding(4)
        attention = scratch.GroupedQueryAttention(12, 3, 1, qk_norm=True, rotary=rotary, scale=0.7).double()
        assert attention.scale == 0.7
        assert isinstance(attention.q_norm, scratch.RMSNorm)
        assert isinstance(attention.k_norm, scratch.RMSNorm)
        x = random_tensor(2, 5, 12)
        for first, place in ((3, (3,)), (0, ())):
            q, k, _ = attention.project(x, *place)
            for found, projection, norm in (
                (q, attention.q_proj, attention.q_norm),
                (k, attention.k_proj, attention.k_norm),
            ):
                split = projection(x).unflatten(-1, (-1, 4)).transpose(1, 2)
                assert torch.equal(found, rotary(norm(split), torch.arange(first, first + 5)))

    def test_free_functions_agree_on_a_mask_of_any_shape(self) -> None:
        q, k, v = random_tensor(2, 6, 5, 11), random_tensor(2, 3, 7, 11, seed=1), random_tensor(2, 3, 7, 11, seed=2)
        options: dict[str, Any] = {"scoring": Scoring(-0.5), "sinks": random_tensor(6)}
        for shape in ((7,), (5, 7), (1, 7), (2, 1, 1, 7), (2, 6, 5, 7), (6, 1, 7)):
            may_attend = random_tensor(*shape, seed=3) > 0
            ours = grouped_attention(q, k, v, may_attend, **options)
            assert_equal({"output": ours}, {"output": grouped_attention_of_torch(q, k, v, may_attend, **options)})


class TestMeaning:
    @pytest.mark.parametrize("package", PACKAGES)
    def test_as_many_key_heads_as_heads_is_multi_head_attention(self, package: str) -> None:
        attention = build(PACKAGES[package], {})
        plain = scratch.MultiheadAttention(
            EMBED_DIM, NUM_HEADS, batch_first=True, qk_head_dim=HEAD_DIM, v_head_dim=HEAD_DIM
        )
        with_same_weights(plain, attention)
        x = random_tensor(BATCH, LENGTH, EMBED_DIM)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        assert_equal({"output": attention(x)}, {"output": plain(x, x, x, attn_mask=hidden)[0]})

    @pytest.mark.parametrize("package", PACKAGES)
    def test_groups_are_neighbours(self, package: str) -> None:
        """Zero values of the second key head silence heads 3, 4 and 5."""
        attention = build(PACKAGES[package], {"num_key_heads": 2})
        x = random_tensor(BATCH, LENGTH, EMBED_DIM)
        q, k, v = attention.project(x)
        v[:, 1] = 0.0
        context = attention.attend(q, k, v, None, True)
        assert (context[:, :3] != 0).all()
        assert (context[:, 3:] == 0).all()

    @pytest.mark.parametrize("package", PACKAGES)
    def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_all(self, package: str) -> None:
        x = random_tensor(BATCH, LENGTH, EMBED_DIM)
        with_sinks, without = (
            build(PACKAGES[package], {"sinks": sinks, "num_key_heads": 3}) for sinks in (True, False)
        )
        without.load_state_dict({name: w for name, w in with_sinks.state_dict().items() if name != "sinks"})
        torch.nn.init.constant_(with_sinks.sinks, -1e6)
        assert_equal({"output": with_sinks(x)}, {"output": without(x)})
        torch.nn.init.constant_(with_sinks.sinks, 1e6)
        assert_equal({"output": with_sinks(x)}, {"output": with_sinks.out_proj.bias.expand_as(x)})

    @pytest.mark.parametrize("package", PACKAGES)
    def test_a_cap_far_above_the_scores_changes_nothing_in_flex_attention_either(self, package: str) -> None:
        x = random_tensor(BATCH, LENGTH, EMBED_DIM)
        capped, plain = (build(PACKAGES[package], {"soft_cap": soft_cap}) for soft_cap in (1e9, None))
        with torch.no_grad():
            assert_equal({"output": capped(x)}, {"output": plain(x)})

    @pytest.mark.parametrize("package", PACKAGES)
    def test_a_window_of_one_sees_itself_and_a_wide_one_all(self, package: str) -> None:
        x = random_tensor(BATCH, LENGTH, EMBED_DIM)
        narrow, wide, none = (build(PACKAGES[package], {"window": window}) for window in (1, LENGTH, None))
        itself = none.out_proj(none.v_proj(x))
        assert_equal({"output": narrow(x)}, {"output": itself})
        assert_equal({"output": wide(x)}, {"output": none(x)})

    @pytest.mark.parametrize("package", PACKAGES)
    @pytest.mark.parametrize("sinks", [True, False])
    def test_who_sees_nothing_gets_the_bias_and_no_gradient(self, package: str, sinks: bool) -> None:
        attention = build(PACKAGES[package], {"sinks": sinks})
        x = random_tensor(BATCH, LENGTH, EMBED_DIM).requires_grad_()
        output = attention(x, torch.zeros(LENGTH, LENGTH, dtype=torch.bool))
        assert torch.equal(output, attention.out_proj.bias.expand_as(x))
        output.sum().backward()
        assert x.grad is not None
        assert (x.grad == 0).all()

    @given(seed=st.integers(0, 999), shift=st.integers(1, 50))
    def test_where_the_text_begins_does_not_matter_to_rotary_positions(self, seed: int, shift: int) -> None:
        attention = build(scratch, {"pairing": "halves", "window": 4, "num_key_heads": 2})
        x = random_tensor(BATCH, LENGTH, EMBED_DIM, seed=seed)
        projected = [attention.project(x, first) for first in (0, shift)]
        here, there = (attention.attend(*qkv, None, True) for qkv in projected)
        assert_equal({"output": there}, {"output": here}, relative_bound=1e-11)


class TestCache:
    @pytest.mark.parametrize("cuts", [(1,) * 7, (4, 1, 2), (6, 1), (2, 5)], ids=str)
    @pytest.mark.parametrize("options", combinations()[::5], ids=str)
    def test_cached_equals_recomputed(self, options: dict[str, Any], cuts: tuple[int, ...]) -> None:
        for rolling in (True, False):
            check_cache(scratch, options, cuts, rolling)
            if options["soft_cap"] is None:
                check_cache(builtin, options, cuts, rolling)

    @pytest.mark.parametrize("options", CAPPED, ids=str)
    def test_cached_equals_recomputed_with_flex_attention(self, options: dict[str, Any]) -> None:
        check_cache(builtin, options, (4, 1, 2), rolling=True)


def check_cache(package: Any, options: dict[str, Any], cuts: tuple[int, ...], rolling: bool) -> None:
    attention, x = build(package, options), random_tensor(BATCH, LENGTH, EMBED_DIM)
    cache, outputs = KeyValueCache(options["window"] if rolling else None), []
    with torch.no_grad():
        for part in x.split(cuts, dim=1):
            seen = PADDING[..., : cache.length + part.size(1)]
            outputs.append(attention(part, seen, cache=cache))
        assert cache.length == LENGTH
        assert_equal({"output": torch.cat(outputs, dim=1)}, {"output": attention(x, PADDING)})


class TestRollingCache:
    @pytest.mark.parametrize("window", [1, 2, 3, 6, 7])
    def test_it_remembers_what_the_next_token_can_see_and_no_more(self, window: int) -> None:
        cache, tokens = KeyValueCache(window), torch.arange(23.0).view(1, 1, 23, 1)
        for part in tokens.split([5, 1, 1, 9, 1, 6], dim=2):
            remembered = min(cache.length, window - 1)
            k, v = cache.extend(part, -part)
            expected = tokens[:, :, cache.length - part.size(2) - remembered : cache.length]
            assert torch.equal(k, expected)
            assert torch.equal(v, -expected)
        assert cache.length == 23

    def test_rows_can_be_reordered(self) -> None:
        cache, tokens = KeyValueCache(), torch.arange(6.0).view(3, 1, 2, 1)
        cache.reorder(torch.tensor([0]))  # nothing yet
        cache.extend(tokens, tokens)
        cache.reorder(torch.tensor([2, 0, 0]))
        k, _ = cache.extend(tokens[:, :, :1], tokens[:, :, :1])
        assert k.flatten(1).tolist() == [[4, 5, 0], [0, 1, 2], [0, 1, 4]]

    def test_another_batch_and_no_window_are_named(self) -> None:
        cache, tokens = KeyValueCache(), torch.ones(3, 1, 2, 1)
        cache.extend(tokens, tokens)
        with pytest.raises(ValueError, match="cache holds a batch of 3, got a batch of 2"):
            cache.extend(tokens[:2], tokens[:2])
        assert cache.length == 2
        with pytest.raises(ValueError, match="window must be at least 1"):
            KeyValueCache(0)


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_is_made_where_the_inputs_are(package: str) -> None:
    parts: Any = PACKAGES[package]
    rotary = parts.RotaryEmbedding(4, device="meta")
    options: dict[str, Any] = {"rotary": rotary, "window": 2, "qk_norm": True, "sinks": True, "device": "meta"}
    assert parts.GroupedQueryAttention(12, 3, **options)(torch.empty(2, 5, 12, device="meta")).is_meta
    assert who_may_attend(2, 4, is_causal=True, window=None, device="meta").is_meta  # type: ignore[union-attr]
    assert who_may_attend(2, 4, is_causal=False, window=2, device="meta").is_meta  # type: ignore[union-attr]


def test_half_precision_is_computed_in_float32_and_rounded_once() -> None:
    attention = scratch.GroupedQueryAttention(12, 6, 2, sinks=True)
    q, k, v = (random_tensor(2, heads, 5, 2, seed=heads, dtype=torch.bfloat16) for heads in (6, 2, 2))
    wide = attention.attend(q.float(), k.float(), v.float(), None, True)
    assert torch.equal(attention.attend(q, k, v, None, True), wide.to(torch.bfloat16))


@pytest.mark.parametrize("package", PACKAGES)
class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"num_heads": 0}, ValueError, "num_heads must be greater than 0, got num_heads=0"),
            ({"num_key_heads": 0}, ValueError, "num_key_heads must be greater than 0, got num_key_heads=0"),
            ({"num_key_heads": 4}, ValueError, "divisible by num_key_heads, got num_heads=6 and num_key_heads=4"),
            ({"embed_dim": 13}, ValueError, "divisible by num_heads unless head_dim is given, got embed_dim=13"),
            ({"embed_dim": 12.0}, TypeError, "embed_dim must be a whole number, got 12.0"),
            ({"head_dim": 0}, ValueError, "head_dim must be greater than 0, got head_dim=0"),
            ({"window": 0}, ValueError, "window must be at least 1 (the query's own place), got 0"),
            ({"soft_cap": 0.0}, ValueError, "soft_cap must be greater than 0 and finite, got 0.0"),
            ({"scale": math.nan}, ValueError, "scale must be greater than 0 and finite, got nan"),
            ({"soft_cap": "50"}, TypeError, "soft_cap must be a number, got '50'"),
            ({"rotary": True}, TypeError, "rotary must be a RotaryEmbedding, got bool"),
            (
                {"rotary": scratch.RotaryEmbedding(4)},
                ValueError,
                "rotary must have the head_dim of the attention, 2, got 4",
            ),
        ],
    )
    def test_of_building(self, package: str, arguments: Any, error: type[Exception], text: str) -> None:
        with pytest.raises(error) as caught:
            PACKAGES[package].GroupedQueryAttention(**{"embed_dim": 12, "num_heads": 6, **arguments})
        assert text in str(caught.value)

    @pytest.mark.parametrize(
        ("call", "error", "text"),
        [
            ({"x": torch.ones(5, 12)}, ValueError, "(batch, len, embed_dim) with embed_dim = 12, got (5, 12)"),
            ({"x": torch.ones(2, 5, 11)}, ValueError, "got (2, 5, 11)"),
            ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
            ({"x": torch.ones(2, 5, 12).double()}, TypeError, "dtype of the weights, torch.float32, got torch.float64"),
            ({"may_attend": torch.ones(5, 5)}, TypeError, "may_attend must be a bool tensor"),
            (
                {"may_attend": torch.ones(5, 4) > 0},
                ValueError,
                "(batch, num_heads, len, key_len) = (2, 6, 5, 5), got (5, 4)",
            ),
            ({"may_attend": torch.ones(1, 2, 6, 5, 5) > 0}, ValueError, "got (1, 2, 6, 5, 5)"),
            ({"cache": [KeyValueCache()]}, TypeError, "cache must be a KeyValueCache, got list"),
        ],
    )
    def test_of_calling(self, package: str, call: Any, error: type[Exception], text: str) -> None:
        with pytest.raises(error) as caught:
            PACKAGES[package].GroupedQueryAttention(12, 6)(**{"x": torch.ones(2, 5, 12), **call})
        assert text in str(caught.value)

    def test_autocast_takes_what_is_not_of_the_dtype_of_the_weights(self, package: str) -> None:
        attention, x = PACKAGES[package].GroupedQueryAttention(12, 6), torch.ones(2, 5, 12, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            assert attention(x).shape == x.shape

    def test_a_mask_spans_the_tokens_of_the_cache(self, package: str) -> None:
        attention, cache, x = PACKAGES[package].GroupedQueryAttention(12, 6), KeyValueCache(), torch.ones(2, 5, 12)
        attention(x, cache=cache)
        with pytest.raises(ValueError, match=r"= \(2, 6, 5, 10\), got \(5, 5\)"):
            attention(x, torch.ones(5, 5) > 0, cache=cache)


class TestNoGradientOfFlex:
    def test_builtin_says_that_soft_caps_cannot_be_trained_on_the_cpu(self) -> None:
        attention, x = builtin.GroupedQueryAttention(12, 6, soft_cap=1.0), torch.ones(2, 5, 12)
        with pytest.raises(ValueError, match=r"soft_cap=1.0 cannot be trained on the CPU with torch"):
            attention(x)
        validation.check_flex_has_gradient(attention, x.to("meta"))
        attention.requires_grad_(False)
        assert attention(x).shape == x.shape
        with pytest.raises(ValueError, match="cannot be trained"):
            attention(x.requires_grad_())
        with torch.no_grad():
            assert attention(x).shape == x.shape

    def test_torch_still_has_none(self) -> None:
        x = torch.ones(1, 1, 5, 4, requires_grad=True)
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            grouped_attention_of_torch(x, x, x, scoring=Scoring(1.0, soft_cap=1.0))
