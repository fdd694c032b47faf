"""RMSNorm to the last bit of torch's, outputs and gradients, in every dtype."""

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import builtin
import scratch
from equivalence_tests.instruments.side_by_side import PACKAGES, assert_equal, outputs_and_gradients, random_tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((11,), (7, 11), (5, 7, 11), (513,), (1,))


def slow_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Write it out number by number, for one dimension of features."""
    rows = []
    for row in x.flatten(0, -2).tolist():
        root = math.sqrt(sum(number * number for number in row) / len(row) + eps)
        rows.append([number / root * gain for number, gain in zip(row, weight.tolist(), strict=True)])
    return torch.tensor(rows, dtype=torch.float64).view_as(x)


@pytest.mark.parametrize("package", PACKAGES)
class TestFunction:
    @pytest.mark.parametrize("eps", [None, 1e-5, 0.5])
    @pytest.mark.parametrize("with_weight", [True, False])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_bit_is_torchs(
        self, package: str, dtype: torch.dtype, shape: tuple[int, ...], with_weight: bool, eps: float | None
    ) -> None:
        inputs = {"input": random_tensor(2, 3, *shape, dtype=dtype)}
        if with_weight:
            inputs["weight"] = random_tensor(*shape, seed=1, dtype=dtype)
        arguments: Any = {"normalized_shape": shape, "eps": eps}
        ours = outputs_and_gradients(PACKAGES[package].rms_norm, inputs, **arguments)
        assert_equal(ours, outputs_and_gradients(F.rms_norm, inputs, **arguments), relative_bound=0)

    def test_values_are_those_of_the_formula(self, package: str) -> None:
        x, weight = random_tensor(2, 3, 11), random_tensor(11, seed=1)
        ours = PACKAGES[package].rms_norm(x, [11], weight, 0.25)
        assert_equal({"output": ours}, {"output": slow_rms_norm(x, weight, 0.25)})

    def test_zeros_stay_zeros(self, package: str) -> None:
        assert PACKAGES[package].rms_norm(torch.zeros(2, 3), [3]).tolist() == [[0.0] * 3] * 2

    def test_large_half_precision_does_not_overflow(self, package: str) -> None:
        x = torch.full((2, 4), 6e4, dtype=torch.float16)
        assert PACKAGES[package].rms_norm(x, [4]).tolist() == [[1.0] * 4] * 2

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            (
                {"normalized_shape": [5]},
                ValueError,
                "input must have shape (..., *normalized_shape) = (..., 5), got (2, 3)",
            ),
            ({"normalized_shape": []}, ValueError, "normalized_shape must hold at least one size, got ()\n"),
            ({"normalized_shape": 3}, TypeError, "normalized_shape must be a list or tuple of sizes, got 3"),
            ({"weight": [1.0] * 3}, TypeError, "weight must be a tensor, got list"),
            ({"normalized_shape": [2.5]}, TypeError, "normalized_shape[0] must be a whole number, got 2.5"),
            ({"weight": torch.ones(2)}, ValueError, "weight must have shape normalized_shape = (3,), got (2,)"),
            ({"input": torch.ones(2, 3).int()}, TypeError, "input must be floating, got torch.int32"),
            ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
            ({"input": torch.ones(3), "normalized_shape": [2, 3]}, ValueError, "(..., 2, 3), got (3,)"),
        ],
    )
    def test_bad_arguments_are_named(
        self, package: str, arguments: dict[str, Any], error: type[Exception], text: str
    ) -> None:
        usual: dict[str, Any] = {"input": torch.ones(2, 3), "normalized_shape": [3]}
        with pytest.raises(error) as caught:
            PACKAGES[package].rms_norm(**usual | arguments)
        assert text in f"{caught.value}\n"


@given(seed=st.integers(0, 999), scale=st.sampled_from([1e-3, 1.0, 1e3, -1.0]))
def test_the_size_of_the_input_does_not_matter(seed: int, scale: float) -> None:
    x = random_tensor(2, 3, 11, seed=seed)
    expected = scratch.rms_norm(x, [11], eps=0.0) * math.copysign(1.0, scale)
    assert_equal({"output": scratch.rms_norm(x * scale, [11], eps=0.0)}, {"output": expected})


@pytest.mark.parametrize("package", PACKAGES)
class TestModule:
    @pytest.mark.parametrize("arguments", [{}, {"eps": 0.5}, {"elementwise_affine": False}], ids=str)
    @pytest.mark.parametrize("shape", [11, [7, 11], (11,)], ids=str)
    def test_it_is_torchs_to_the_last_bit(self, package: str, shape: Any, arguments: dict[str, Any]) -> None:
        ours = PACKAGES[package].RMSNorm(shape, **arguments, dtype=torch.float64)
        theirs = nn.RMSNorm(shape, **arguments, dtype=torch.float64)
        assert (repr(ours), list(ours.state_dict())) == (repr(theirs), list(theirs.state_dict()))
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
        for parameter in theirs.parameters():
            nn.init.normal_(parameter)
        ours.load_state_dict(theirs.state_dict())
        inputs = {"x": random_tensor(2, 3, 7, 11)}
        assert_equal(outputs_and_gradients(ours, inputs), outputs_and_gradients(theirs, inputs), relative_bound=0)

    def test_its_signature_is_torchs(self, package: str) -> None:
        for method in ("__init__", "forward", "reset_parameters"):
            ours, theirs = (
                [(name, x.kind, x.default) for name, x in inspect.signature(getattr(owner, method)).parameters.items()]
                for owner in (PACKAGES[package].RMSNorm, nn.RMSNorm)
            )
            assert ours == theirs

    def test_gains_can_be_reset(self, package: str) -> None:
        norm = PACKAGES[package].RMSNorm(5)
        nn.init.normal_(norm.weight)
        norm.reset_parameters()
        assert norm.weight.tolist() == [1.0] * 5
        PACKAGES[package].RMSNorm(5, elementwise_affine=False).reset_parameters()

    def test_gains_are_created_where_they_are_wanted(self, package: str) -> None:
        assert PACKAGES[package].RMSNorm((3, 5), device="meta").weight.is_meta

    @pytest.mark.parametrize(
        ("size", "error", "text"),
        [
            (2.5, TypeError, "normalized_shape must be a whole number, got 2.5"),
            ([3, -1], ValueError, "normalized_shape must not be negative, got -1"),
        ],
    )
    def test_sizes_that_are_none_are_named(self, package: str, size: Any, error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            PACKAGES[package].RMSNorm(size)

    def test_another_width_is_named(self, package: str) -> None:
        with pytest.raises(ValueError, match=r"input must have shape .* = \(\.\.\., 5\), got \(2, 3\)"):
            PACKAGES[package].RMSNorm(5)(torch.ones(2, 3))


def test_builtin_is_torchs_module_and_scratch_is_not() -> None:
    assert issubclass(builtin.RMSNorm, nn.RMSNorm)
    assert not issubclass(scratch.RMSNorm, nn.RMSNorm)
    parameters = list(inspect.signature(scratch.rms_norm).parameters)
    assert parameters == list(inspect.signature(F.rms_norm).parameters)
