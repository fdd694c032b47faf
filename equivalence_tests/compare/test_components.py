"""Tests of components.py: equal packages pass in every dtype, and a broken one fails where it is broken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import builtin
import scratch
from equivalence_tests.compare import components as compare_components
from equivalence_tests.compare.components import Component, Row, compare_component, compare_masks, components
from scratch import attention, flex, functional, grouped, masks, rotary, sdpa, varlen
from scratch.attention import MultiheadAttention

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = [component.name for component in components(torch.float64, 0)]
SMALL = [name for name in NAMES if "sizes of the paper" not in name]
FUNCTIONS = [x.name for x in components(torch.float64, 0) if x.case.is_function]
FLEX_FORWARD = "flex_attention, window, ALiBi"
TODAYS_MODULES = ("RMSNorm", "RotaryEmbedding", "GroupedQueryAttention", "DecoderOnly")
WITH_MAPS = [x for x in NAMES if not x.startswith((*TODAYS_MODULES, "rms_norm", "varlen_attn"))]
QUANTITIES = ["output", "attention maps", "masks", "input gradients", "parameter gradients"]


def compared(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Row]:
    component = next(x for x in components(dtype, seed) if x.name == name)
    return {row.quantity: row for row in compare_component(component, CPU)}


def broken_in(rows: dict[str, Row]) -> set[str]:
    return {quantity for quantity, row in rows.items() if not row.passed}


def missing_of(name: str) -> set[str]:
    """Name what a component does not have: maps of attention, tensors that have gradients, parameters."""
    missing = set() if name in WITH_MAPS else {"attention maps", "masks"}
    if name.startswith("Seq2Seq") or name == "DecoderOnlyTransformer" or name == FLEX_FORWARD:
        missing.add("input gradients")
    if name in FUNCTIONS or name.startswith("RotaryEmbedding"):
        missing.add("parameter gradients")
    return missing


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_every_component_passes_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    for seed in (0, 1):
        rows = compared(name, dtype, seed)
        assert broken_in(rows) == set(), rows
        assert list(rows) == [x for x in QUANTITIES if x not in missing_of(name)]
        assert all(row.elements > 100 for row in rows.values())


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_compared_that_is_nan_on_both_sides(name: str) -> None:
    for seed in range(4):
        component = next(x for x in components(torch.float64, seed) if x.name == name)
        trusted = component.trusted or component.case.construct(builtin)
        results = compare_components._results(trusted, component, torch.float64, CPU)
        for quantity, tensors in results.items():
            assert all(x is not None and bool(x.isfinite().all()) for x in tensors.values()), (quantity, seed)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_whole_model_passes_at_the_sizes_of_the_paper() -> None:
    rows = compared("Seq2SeqTransformer, sizes of the paper")
    assert broken_in(rows) == set()
    assert rows["parameter gradients"].elements == 44_159_488


def test_every_class_and_function_of_the_packages_is_compared() -> None:
    named = {x.case.part.class_name for x in components(torch.float64, 0)}
    own = {name for name in scratch.__all__ if getattr(scratch, name) is not getattr(builtin, name)}
    # Masks and plans of blocks are compared as masks.
    assert own - named == {"masks", "create_block_mask", "BlockMask", "AuxRequest"}
    assert named <= own


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_promised_to_the_last_bit_is_held_to_that(dtype: torch.dtype) -> None:
    promised = [component.name for component in components(dtype, 0) if component.identical]
    assert len(promised) == 6
    for name in promised:
        rows = compared(name, dtype)
        assert all(row.identical and row.rule == "identity to the last bit" for row in rows.values())
        assert all(row.scratch_error is None for row in rows.values())


def test_low_precision_is_judged_by_both_errors() -> None:
    row = compared("TransformerDecoder", torch.bfloat16)["output"]
    assert row.scratch_error is not None
    assert row.builtin_error is not None
    assert row.error_ratio == row.scratch_error / row.builtin_error
    assert 0 < row.builtin_error < 0.1
    assert row.bound > 2 * row.builtin_error
    assert compared("TransformerDecoder")["output"].scratch_error is None


def attend_with(change: Callable[..., Any]) -> Callable[..., Any]:
    original = MultiheadAttention._attend

    def attend(module: MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        return original(module, *change(module, q, k, v), *rest)

    return attend


def scaled_by_embed_dim(self: MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q * (self.head_dim / self.embed_dim) ** 0.5, k, v


def key_without_gradient(self: MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k.detach(), v


def one_ulp_off(self: MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v * (1 + 2**-52)


SELF = "MultiheadAttention, self-attention"


def test_a_wrong_scale_is_found_in_everything_but_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiheadAttention, "_attend", attend_with(scaled_by_embed_dim))
    assert broken_in(compared(SELF)) == set(QUANTITIES) - {"masks"}
    for name in ("TransformerEncoderLayer, pre-norm", "TransformerDecoder", "Transformer", "Seq2SeqTransformer"):
        assert "output" in broken_in(compared(name)), name
        assert "output" in broken_in(compared(name, torch.float32)), name


def test_an_inverted_mask_is_found_in_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = masks.score_bias_from_module

    def inverted(module_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        is_bool = module_mask is not None and module_mask.dtype == torch.bool
        return original(~module_mask if is_bool and module_mask is not None else module_mask, dtype)

    monkeypatch.setattr(masks, "score_bias_from_module", inverted)
    rows = compared(SELF)
    assert broken_in(rows) == set(QUANTITIES)
    assert rows["masks"].differing > 50


def test_a_forgotten_bias_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.project

    def project(query: Tensor, key: Tensor, value: Tensor, projection: attention.InProjection) -> Any:
        assert projection.bias is not None
        q, k, v = original(query, key, value, projection)
        return q, k, v - projection.bias.chunk(3)[2]

    monkeypatch.setattr(attention, "project", project)
    rows = compared("TransformerEncoder")
    assert {"output", "parameter gradients"} <= broken_in(rows)
    assert "but should be" in rows["output"].detail


def test_a_wrong_gradient_is_found_although_the_output_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiheadAttention, "_attend", attend_with(key_without_gradient))
    assert broken_in(compared(SELF)) == {"input gradients", "parameter gradients"}
    assert broken_in(compared("MultiheadAttention, cross-attention")) == {"input gradients", "parameter gradients"}


def test_one_unit_in_the_last_place_breaks_the_promise_of_identity_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MultiheadAttention, "_attend", attend_with(one_ulp_off))
    assert "output" in broken_in(compared(SELF))
    assert broken_in(compared("MultiheadAttention, need_weights=False")) == set()
    assert broken_in(compared("Transformer")) == set()


def test_heads_that_are_mixed_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_transpose(context: Tensor) -> Tensor:
        batch, num_heads, length, head_dim = context.shape
        return context.reshape(length, batch, num_heads * head_dim)

    monkeypatch.setattr(attention, "merge_heads", without_transpose)
    assert {"output", "input gradients"} <= broken_in(compared(SELF, torch.float16))


def test_free_attention_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    original = functional.attention
    monkeypatch.setattr(sdpa, "attention", lambda q, k, *rest: original(q, k * (1 + 1e-9), *rest))
    for name in ("MATH kernel", "torch's choice of kernel"):
        assert {"output", "attention maps", "input gradients"} == broken_in(
            compared(f"scaled dot-product attention, {name}")
        )


def test_a_scratch_that_raises_is_reported_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any) -> Any:
        raise RuntimeError("no heads today")

    monkeypatch.setattr(attention, "merge_heads", raises)
    rows = compared(SELF)
    assert broken_in(rows) == {"call"} == set(rows)
    assert rows["call"].detail == "scratch raises RuntimeError: no heads today"


def test_weights_that_do_not_fit_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(MultiheadAttention):
        def __init__(self, embed_dim: int, num_heads: int, batch_first: bool) -> None:
            super().__init__(embed_dim, num_heads, bias=False, batch_first=batch_first)

    monkeypatch.setattr(scratch, "MultiheadAttention", Forgetful)
    row = compared(SELF)["call"]
    assert "WeightsDoNotMatchError" in row.detail
    assert "left over in the source: in_proj_bias" in row.detail


def test_masks_are_compared_builder_by_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(row.identical and row.passed for row in compare_masks(CPU))
    original = masks.causal
    monkeypatch.setattr(masks, "causal", lambda *args, **options: original(*args, **options).tril(-1))
    broken = {row.component for row in compare_masks(CPU) if not row.passed}
    assert broken == {"mask: causal, upper left", "mask: causal, lower right"}


def test_the_seed_changes_weights_inputs_and_masks() -> None:
    def numbers(seed: int) -> list[Tensor]:
        component: Component = next(x for x in components(torch.float64, seed) if x.name == SELF)
        inputs = component.case.inputs()
        weights: Any = component.case.construct(scratch)
        return [inputs["query"], inputs["key_padding_mask"], weights.in_proj_weight]

    assert all(torch.equal(x, y) for x, y in zip(numbers(3), numbers(3), strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(numbers(3), numbers(4), strict=True))


def without_sink(scores: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return scores, v + 0 * sinks.sum()


def one_key_more(q: Tensor, k: Tensor, scale: float, window_size: tuple[int, int]) -> Tensor:
    return varlen_scores(q, k, scale, (window_size[0] + 1, window_size[1]))


def heads_repeated_in_turn(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return query, *(x.repeat(1, query.size(1) // x.size(1), 1, 1) for x in (key, value))


def turned_backwards(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return rotary_halves(x, cosines, -sines)


varlen_scores, rotary_halves = varlen.windowed_scores, rotary.rotate_halves


@pytest.mark.parametrize(
    ("module", "name", "change", "found_in"),
    [
        (grouped, "with_sink_key", without_sink, "GroupedQueryAttention, all but a soft cap"),
        (varlen, "windowed_scores", one_key_more, "varlen_attn, window, by SDPA one by one"),
        (flex, "working_copies", heads_repeated_in_turn, FLEX_FORWARD),
        (flex, "working_copies", heads_repeated_in_turn, "flex_attention, gradients by SDPA"),
        (rotary, "rotate_halves", turned_backwards, "RotaryEmbedding, halves"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_broken_in_todays_attention_is_found(
    module: Any, name: str, change: Any, found_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, change)
    assert "output" in broken_in(compared(found_in))
