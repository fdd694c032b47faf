"""Whatever the arguments: scratch and builtin give what torch.nn gives.

Identity to the last bit is asked on every example where it is promised, 1e-12 of the largest value elsewhere in
float64, and the error-ratio rule in lower precision.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import builtin
import scratch
from equivalence_tests.instruments import strategies
from equivalence_tests.instruments.differences import FLOAT64_BOUND, compare_tensors
from equivalence_tests.instruments.inputs import Case, Mask, Part
from equivalence_tests.instruments.side_by_side import PACKAGES, fast_path, merges_as_torch_does
from equivalence_tests.twins.properties import (
    Ledger,
    Tally,
    assert_ratios,
    assert_same,
    everything,
    moves_on_the_fast_path,
    stops_the_fast_path,
)
from scratch import masks

MODULES = [name for name in strategies.COMPONENTS if name != "scaled_dot_product_attention"]
LOW_PRECISION = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
MATH = SDPBackend.MATH


def is_promised_to_the_last_bit(package: Any, case: Case) -> bool:
    """Say whether DESIGN.md promises identity off the fast path on the CPU."""
    if package is builtin:
        return True
    if case.part.class_name != "MultiheadAttention" or not case.arguments.get("need_weights", True):
        return False
    # A width of 1 leaves torch.nn's inputs with other strides, and its matrix products with another kernel.
    return case.part.arguments["embed_dim"] > 1 and merges_as_torch_does(SimpleNamespace(**case.part.arguments))


def without_kinks(part: Part) -> Part:
    """Exchange relu: its gradient jumps at 0, and rounding decides on which side of it a number falls."""
    arguments = {name: without_kinks(x) if isinstance(x, Part) else x for name, x in part.arguments.items()}
    if "dim_feedforward" in arguments and arguments.get("activation", "relu") in ("relu", F.relu):
        arguments["activation"] = "gelu"
    return replace(part, arguments=arguments)


@pytest.mark.parametrize("component", MODULES)
@pytest.mark.parametrize("package", PACKAGES)
@given(data=st.data())
def test_outputs_and_gradients_in_float64(package: str, component: str, ledger: Ledger, data: st.DataObject) -> None:
    case = data.draw(strategies.COMPONENTS[component]())
    theirs = case.construct(nn)
    ours = case.construct(PACKAGES[package], weights_of=theirs)
    with fast_path(False):
        actual, expected = everything(case, ours), everything(case, theirs)
    bound = 0.0 if is_promised_to_the_last_bit(PACKAGES[package], case) else FLOAT64_BOUND
    tally = assert_same(case, actual, expected, bound)
    ledger.add(f"{package}.{component}", "outputs and gradients, float64", tally)


@pytest.mark.parametrize("component", MODULES)
@given(data=st.data())
def test_outputs_and_gradients_in_lower_precision(component: str, ledger: Ledger, data: st.DataObject) -> None:
    case = data.draw(strategies.COMPONENTS[component](dtypes=LOW_PRECISION))
    case = replace(case, part=without_kinks(case.part))
    theirs = case.construct(nn)
    ours = case.construct(scratch, weights_of=theirs)
    if is_promised_to_the_last_bit(scratch, case):
        with fast_path(False):
            tally = assert_same(case, everything(case, ours), everything(case, theirs), 0.0)
    else:
        tally = assert_ratios(case, ours, theirs)
    ledger.add(f"scratch.{component}", "outputs and gradients, lower precision", tally)


@pytest.mark.parametrize("package", PACKAGES)
@given(case=strategies.scaled_dot_product_attention_cases(dtypes=strategies.float_dtypes()))
def test_attention_is_the_math_backends_to_the_last_bit(package: str, ledger: Ledger, case: Case) -> None:
    with sdpa_kernel(MATH):
        actual = everything(case, case.construct(PACKAGES[package]))
        expected = everything(case, F.scaled_dot_product_attention)
    tally = assert_same(case, actual, expected, 0.0)
    ledger.add(f"{package}.scaled_dot_product_attention", "MATH backend", tally)


def backends_of_the_cpu() -> list[SDPBackend]:
    """Find out by trying which kernels torch has there, besides MATH."""
    query, found = torch.ones(1, 1, 2, 2), []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend), warnings.catch_warnings(), suppress(RuntimeError):
            warnings.simplefilter("ignore")  # torch tells why it does not take a kernel
            F.scaled_dot_product_attention(query, query, query)
            found.append(backend)
    return found


@given(case=strategies.scaled_dot_product_attention_cases() | strategies.fused_attention_cases())
def test_attention_is_that_of_the_backend_torch_chooses(ledger: Ledger, case: Case) -> None:
    assume(not case.arguments.get("dropout_p"))  # another kernel, other entries dropped
    actual = everything(case, scratch.scaled_dot_product_attention)
    tally = assert_same(case, actual, everything(case, F.scaled_dot_product_attention))
    ledger.add("scratch.scaled_dot_product_attention", "the backend torch chooses", tally)


@pytest.mark.parametrize("backend", backends_of_the_cpu(), ids=lambda x: x.name)
@given(case=strategies.fused_attention_cases())
def test_attention_is_that_of_every_fused_backend(backend: SDPBackend, ledger: Ledger, case: Case) -> None:
    actual = everything(case, scratch.scaled_dot_product_attention)
    with sdpa_kernel(backend):
        expected = everything(case, F.scaled_dot_product_attention)
    tally = assert_same(case, actual, expected)
    ledger.add("scratch.scaled_dot_product_attention", f"{backend.name} backend", tally)


def valid_places(case: Case, output: Tensor) -> Tensor:
    """Give which places of an output belong to no padding, as a mask that broadcasts over the output."""
    names = ("src_key_padding_mask", "tgt_key_padding_mask")
    name = names["tgt" in case.arguments]
    padding = case.arguments.get(name)
    if not isinstance(padding, Mask):
        return torch.ones_like(output, dtype=torch.bool)
    hidden = torch.tensor(padding.hidden).view(padding.shape)
    inside = (case.part.arguments.get(name) for name in ("encoder_layer", "decoder_layer"))
    layer = next((x for x in inside if x is not None), case.part)
    turned = hidden.dim() == 2 and not layer.arguments.get("batch_first")
    return ~(hidden.T if turned else hidden).unsqueeze(-1).expand(output.shape)


def covers(mask: Sequence[bool], padding: Sequence[bool]) -> bool:
    """Whether every padded token is marked as padding."""
    return all(marked or not padded for marked, padded in zip_longest(mask, padding))


@pytest.mark.parametrize("component", MODULES)
@given(data=st.data())
def test_outputs_on_torchs_fast_path(component: str, ledger: Ledger, data: st.DataObject) -> None:
    """There torch.nn gives NaN for rows that see nothing, and 0 at padded places: traps, each with its name."""
    case = data.draw(strategies.COMPONENTS[component]())
    padding = case.arguments.get("src_key_padding_mask")
    assume(not stops_the_fast_path(case) and not moves_on_the_fast_path(case))
    # There, its encoder gives 0 at padded tokens (the trap encoder_zeroes_padding), and an unmasked decoder sees them.
    memory = case.arguments.get("memory_key_padding_mask")
    marked = memory.hidden if isinstance(memory, Mask) else ()
    assume(component != "Transformer" or not isinstance(padding, Mask) or covers(marked, padding.hidden))
    # Where the mask is not causal, its fast path follows the mask, and its plain path the promise.
    assume(not any(x is True for name, x in case.arguments.items() if name.endswith("is_causal")))
    theirs = case.construct(nn).eval()
    ours = case.construct(scratch, weights_of=theirs).eval()
    actual = everything(case, ours, gradients=False)
    with fast_path(True):
        expected = everything(case, theirs, gradients=False)
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert x is not None
        y = actual[name]
        assert y is not None
        where = ~x.isnan() & (valid_places(case, x) if component != "MultiheadAttention" else torch.ones(()).bool())
        comparison = compare_tensors(y[where], x[where], name=name, call=repr(case))
        assert comparison.passed, str(comparison)
        ledger.add(f"scratch.{component}", "torch's fast path", Tally(1, 1, int(comparison.identical)))


@pytest.mark.parametrize("component", MODULES)
@given(data=st.data())
def test_outputs_and_gradients_under_autocast(component: str, ledger: Ledger, data: st.DataObject) -> None:
    case = data.draw(strategies.COMPONENTS[component](dtypes=st.just(torch.float32)))
    case = replace(case, part=without_kinks(case.part))
    theirs = case.construct(nn)
    ours = case.construct(scratch, weights_of=theirs)
    tally = assert_ratios(case, ours, theirs, autocast=torch.bfloat16)
    ledger.add(f"scratch.{component}", "outputs and gradients, autocast to bfloat16", tally)


class TestMasks:
    @given(query_len=st.integers(0, 9), key_len=st.integers(0, 9))
    def test_causal_masks_are_torchs_in_both_alignments(self, query_len: int, key_len: int) -> None:
        for align in ("upper_left", "lower_right"):
            may_attend = masks.causal(query_len, key_len, align=align)
            offset = key_len - query_len if align == "lower_right" else 0
            assert may_attend.tolist() == [[j <= i + offset for j in range(key_len)] for i in range(query_len)]
        float_form = nn.Transformer.generate_square_subsequent_mask(query_len)
        assert torch.equal(scratch.Transformer.generate_square_subsequent_mask(query_len), float_form)
        assert torch.equal(masks.to_score_bias(masks.causal(query_len), torch.float32), float_form)

    @given(mask=strategies.attention_masks((2, 3, 5), forms=st.just("bool"), true_means_hidden=False))
    def test_conversions_round_trip(self, mask: Mask) -> None:
        may_attend = mask.build(torch.float64)
        assert torch.equal(masks.from_module_mask(masks.to_module_mask(may_attend)), may_attend)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            bias = masks.to_score_bias(may_attend, dtype)
            assert bias.dtype == dtype
            assert torch.equal(bias == -math.inf, ~may_attend)
            assert torch.equal(masks.from_score_bias(bias), may_attend)
