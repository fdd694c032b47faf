"""Tests of differences.py: what it counts is counted right, and each rule lets rounding pass and nothing else."""

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import scratch
from equivalence_tests.instruments.differences import (
    compare_errors,
    compare_group,
    compare_tensors,
    first_stage_that_parts,
    largest_value,
    ulp_distance,
    ulp_size,
)
from equivalence_tests.instruments.weights import randomize_parameters

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAN, INF = math.nan, math.inf


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_are_one_ulp_apart_wherever_they_are(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for value in (1.0, -1.0, 2.0, info.smallest_normal, -info.smallest_normal, info.max / 2, 3 * info.tiny * info.eps):
        x = torch.tensor([value], dtype=dtype)
        for direction in (INF, -INF):
            neighbour = torch.nextafter(x, torch.tensor([direction], dtype=dtype))
            assert ulp_distance(x, neighbour).item() == 1, value
            assert ulp_distance(neighbour, x).item() == 1, value


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_one_place_and_denormals_count_from_it(dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.tensor([0.0, -0.0, least, -least, 5 * least], dtype=dtype)
    expected = torch.tensor([[0, 0, 1, 1, 5], [1, 1, 0, 2, 4], [1, 1, 2, 0, 6]])
    for row, of in zip(expected, (0, 2, 3), strict=True):
        assert torch.equal(ulp_distance(x[of].expand(5), x), row)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulps_agree_with_a_walk_over_the_bit_patterns(dtype: torch.dtype) -> None:
    values = torch.tensor([-2.0, -1.0, -1e-3, 0.0, 1e-3, 0.5, 1.0, 1.5, 4.0], dtype=dtype)

    def place(x: Tensor) -> int:  # sign and magnitude, read as Python numbers
        bits = int.from_bytes(x[None].view(torch.uint8).numpy().tobytes(), "little")
        half = 1 << (8 * x.element_size() - 1)
        return half - bits if bits >= half else bits

    for x in values:
        for y in values:
            assert ulp_distance(x, y).item() == min(abs(place(x) - place(y)), 2**63 - 1), (x, y)


def test_the_longest_distances_are_still_numbers() -> None:
    most = torch.finfo(torch.float64).max
    assert ulp_distance(f64(most), f64(-most)).item() == torch.iinfo(torch.int64).max
    assert ulp_distance(f64(most), f64(0.0)).item() == 0x7FEFFFFFFFFFFFFF
    assert ulp_distance(f64(INF), f64(most)).item() == 1
    float32 = torch.finfo(torch.float32).max
    assert ulp_distance(torch.tensor(float32), torch.tensor(-float32)).item() == 2 * 0x7F7FFFFF


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_near_nan_alone(dtype: torch.dtype) -> None:
    nan, one = torch.tensor([NAN], dtype=dtype), torch.ones(1, dtype=dtype)
    assert ulp_distance(nan, -nan).item() == 0
    assert ulp_distance(nan, one).item() == ulp_distance(one, nan).item() == torch.iinfo(torch.int64).max


def test_ulps_of_tensors_that_are_not_contiguous() -> None:
    x = torch.arange(6.0).view(2, 3).T
    assert ulp_distance(x, x.contiguous()).sum() == 0
    assert ulp_distance(x[:, :1].expand(3, 2), x[:, :1].expand(3, 2)).sum() == 0


@pytest.mark.parametrize("value", [1.0, 1.5, 2.0, 3.0, -7.0, 1e-3, 1e-310, 0.0])
def test_the_unit_in_the_last_place_is_numpys(value: float) -> None:
    assert ulp_size(value, torch.float64) == abs(numpy.spacing(value))
    assert ulp_size(value, torch.float32) == abs(float(numpy.spacing(numpy.float32(value))))
    assert ulp_size(value, torch.float16) == abs(float(numpy.spacing(numpy.float16(value))))


def test_a_comparison_counts_and_points_at_the_worst_elements() -> None:
    expected = f64(100.0, 1.0, 0.5, -3.0).view(2, 2)
    actual = f64(100.5, 1.0, 1.0, -3.0).view(2, 2)
    found = compare_tensors(actual, expected, name="out", call="f(x)")
    assert (found.elements, found.differing, found.identical, found.passed) == (4, 2, False, False)
    assert found.greatest is not None
    assert found.greatest_relative is not None
    assert (found.greatest.index, found.greatest.size) == ((0, 0), 0.5)
    assert (found.greatest_relative.index, found.greatest_relative.size) == ((1, 0), 1.0)
    assert (found.greatest_relative.actual, found.greatest_relative.expected) == (1.0, 0.5)
    assert found.ulps == 2**52
    assert found.ulps_of_largest == 0.5 / 2**-46
    assert str(found) == (
        "out[0, 0] = 100.5, but should be 100.0: 2 of 4 differ, by at most 0.5 (3.5e+13 ulp), not allowed by 1e-12 of "
        "the largest value 100 [f(x)]"
    )


def test_a_scalar_is_named_without_an_index() -> None:
    assert str(compare_tensors(torch.tensor(1.0), torch.tensor(2.0), name="loss")).startswith("loss = 1.0, but should")


@pytest.mark.parametrize(
    ("actual", "expected", "differing"),
    [
        (f64(NAN, 1.0), f64(NAN, 1.0), 0),
        (f64(INF, -INF), f64(INF, -INF), 0),
        (f64(0.0), f64(-0.0), 0),
        (f64(NAN), f64(1.0), 1),
        (f64(1.0), f64(NAN), 1),
        (f64(INF), f64(NAN), 1),
        (f64(INF), f64(-INF), 1),
        (f64(INF), f64(1.0), 1),
        (f64(1.0), f64(INF), 1),
        (torch.empty(0, 3), torch.empty(0, 3), 0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), 0),
    ],
)
def test_what_counts_as_equal(actual: Tensor, expected: Tensor, differing: int) -> None:
    found = compare_tensors(actual, expected)
    assert found.differing == differing
    assert found.identical is found.passed is (differing == 0)
    assert found.max_abs_difference == (0.0 if not differing else 1.0 if expected.dtype == torch.bool else INF)


def test_nan_and_infinity_on_one_side_never_pass() -> None:
    for bad in (NAN, INF):
        assert not compare_tensors(f64(bad, 1e300), f64(1.0, 1e300), relative_bound=1.0).passed


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (f64(1.0), f64(1.0, 2.0), "output has shape (1,) instead of shape (2,)"),
        (f64(1.0), torch.ones(1), "output has dtype torch.float64 instead of torch.float32"),
        (None, f64(1.0), "output has nothing instead of shape (1,)"),
        (f64(1.0), None, "output has shape (1,) instead of nothing"),
    ],
)
def test_what_does_not_fit_together_is_a_difference(actual: Tensor | None, expected: Tensor | None, text: str) -> None:
    found = compare_tensors(actual, expected)
    assert str(found) == text
    assert not found.passed
    assert not found.identical
    assert math.isnan(found.max_abs_difference)
    ratio = compare_errors(actual, expected, expected)
    assert not ratio.passed
    assert str(ratio) == text


def test_nothing_equals_nothing() -> None:
    assert compare_tensors(None, None).identical


def test_the_float64_rule_is_relative_to_the_largest_value() -> None:
    expected = f64(1000.0, 1.0)
    assert compare_tensors(expected + f64(0.0, 9e-10), expected).passed
    assert not compare_tensors(expected + f64(0.0, 1.1e-9), expected).passed
    assert not compare_tensors(expected + f64(1.1e-9, 0.0), expected).passed


def test_the_bound_0_asks_for_identity() -> None:
    assert compare_tensors(f64(1.0), f64(1.0), relative_bound=0).passed
    found = compare_tensors(f64(1.0), f64(1.0 + 2**-52), relative_bound=0)
    assert not found.passed
    assert str(found).endswith("not allowed by identity to the last bit")


def gradients(package: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    attention: nn.Module = randomize_parameters(package.MultiheadAttention(33, 3, dtype=dtype))
    x = torch.randn(5, 2, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    attention(x, x, x, need_weights=False)[0].sum().backward()
    return {name: x.grad for name, x in attention.named_parameters() if x.grad is not None}


def key_bias(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**found, "in_proj_bias": found["in_proj_bias"][33:66]}


def test_gradients_that_are_pure_rounding_noise_are_judged_against_their_group() -> None:
    actual, expected = key_bias(gradients(scratch, torch.float64)), key_bias(gradients(nn, torch.float64))
    alone = compare_tensors(actual["in_proj_bias"], expected["in_proj_bias"])
    together = {found.name: found for found in compare_group(actual, expected)}
    assert not alone.passed  # its exact value is 0
    assert together["in_proj_bias"].passed
    assert together["in_proj_bias"].largest == largest_value(expected.values())
    assert not compare_group({**actual, "in_proj_bias": expected["in_proj_bias"] + 1e-9}, expected)[1].passed


def test_a_group_misses_no_name_of_either_side() -> None:
    found = compare_group({"a": f64(1.0), "b": f64(1.0)}, {"a": f64(1.0), "c": f64(1.0)})
    assert {x.name: x.passed for x in found} == {"a": True, "b": False, "c": False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_passes_the_error_ratio_rule_and_a_mistake_does_not(dtype: torch.dtype) -> None:
    builtin, candidate = gradients(nn, dtype)["out_proj.weight"], gradients(scratch, dtype)["out_proj.weight"]
    reference = reference_gradient(dtype)
    ratio = compare_errors(candidate, builtin, reference)
    assert ratio.passed, ratio
    assert not compare_errors(candidate * 1.1, builtin, reference).passed
    assert ratio.builtin_error < largest_value([reference]) / 50


def reference_gradient(dtype: torch.dtype) -> Tensor:
    attention = randomize_parameters(nn.MultiheadAttention(33, 3, dtype=dtype)).double()
    x = torch.randn(5, 2, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype).double()
    attention(x, x, x, need_weights=False)[0].sum().backward()
    assert attention.out_proj.weight.grad is not None
    return attention.out_proj.weight.grad


def test_the_error_ratio_rule_to_the_digit() -> None:
    reference = f64(1.0, 0.25)
    builtin, floor = (reference + 1e-3).float(), 4 * 2**-23
    error = compare_errors(builtin, builtin, reference)
    assert error.floor == floor
    assert error.bound == 2 * error.builtin_error + floor
    assert (error.ratio, error.candidate_error) == (1.0, error.builtin_error)
    assert compare_errors((reference - 2e-3).float(), builtin, reference).passed
    assert not compare_errors((reference - 2.01e-3).float(), builtin, reference).passed


def test_an_exact_builtin_leaves_the_floor() -> None:
    reference = f64(1.0, 0.25)
    builtin = reference.float()
    assert compare_errors(builtin, builtin, reference).ratio == 1.0
    near = compare_errors(builtin + 4 * 2**-23, builtin, reference)
    assert (near.passed, near.ratio) == (True, INF)
    assert not compare_errors(builtin + 5 * 2**-23, builtin, reference).passed
    assert compare_errors(builtin + 5 * 2**-23, builtin, reference, largest=2.0).passed


def test_nan_in_equal_places_is_no_error_and_elsewhere_an_infinite_one() -> None:
    reference = f64(NAN, 1.0)
    good = reference.float()
    assert compare_errors(good, good, reference).passed
    assert not compare_errors(torch.tensor([0.0, 1.0]), good, reference).passed
    assert not compare_errors(torch.tensor([NAN, NAN]), good, reference).passed


def test_where_the_builtin_overflows_it_tells_nothing() -> None:
    reference = f64(1e6, 1.0)
    builtin = reference.half()
    assert builtin[0] == INF
    assert compare_errors(builtin, builtin, reference, largest=1.0).passed
    assert not compare_errors(torch.tensor([INF, 1.5]).half(), builtin, reference, largest=1.0).passed


def test_the_first_stage_that_parts() -> None:
    def stages(**changed: float) -> dict[str, Tensor]:
        return {name: f64(changed.get(name, 1.0)) for name in ("q", "scores", "weights", "output")}

    assert first_stage_that_parts(stages(), stages()) is None
    parts = first_stage_that_parts(stages(weights=2.0, output=3.0), stages(), call="f(x)")
    assert parts is not None
    assert str(parts).startswith("weights[0] = 2.0, but should be 1.0")
    assert parts.call == "f(x)"
    assert first_stage_that_parts(stages(scores=1.0 + 1e-14), stages()) is None
    bitwise = first_stage_that_parts(stages(scores=1.0 + 1e-14), stages(), relative_bound=0)
    assert bitwise is not None
    assert bitwise.name == "scores"


def test_a_stage_that_one_trace_lacks_parts() -> None:
    parts = first_stage_that_parts({"q": f64(1.0)}, {"q": f64(1.0), "scores": f64(1.0)})
    assert parts is not None
    assert parts.misfit == "nothing instead of shape (1,)"
