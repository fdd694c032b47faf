"""Rotary positions against turned pairs of numbers, and what they are for: scores that know distances only."""

import copy
import io
import itertools
import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import builtin
import scratch
from equivalence_tests.instruments.differences import compare_errors
from equivalence_tests.instruments.side_by_side import PACKAGES, assert_equal, outputs_and_gradients, random_tensor
from scratch.rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Pairing,
    RotaryEmbedding,
    YaRNScaling,
    adjacent_to_halves,
    halves_to_adjacent,
    rotary_frequencies,
)

PAIRINGS: tuple[Pairing, ...] = ("adjacent", "halves")
SCALINGS: list[Any] = [
    None,
    LinearScaling(4.0),
    NTKScaling(4.0),
    YaRNScaling(4.0, original_max_len=64),
    YaRNScaling(4.0, original_max_len=64, truncate=False, attention_factor=1.5),
    Llama3Scaling(8.0, original_max_len=64),
]
HEAD_DIM, LENGTH = 14, 7


def partner(feature: int, pairing: Pairing, head_dim: int) -> tuple[int, int]:
    """Give the pair that a first feature begins: (where the first is, where the second)."""
    return (2 * feature, 2 * feature + 1) if pairing == "adjacent" else (feature, feature + head_dim // 2)


def slow_rotation(x: Tensor, positions: list[int], pairing: Pairing, base: float = 10000.0) -> Tensor:
    """Turn pair after pair of one head, number by number."""
    turned = x.clone()
    for row, position in enumerate(positions):
        for pair in range(x.size(1) // 2):
            angle = position * math.exp(-2 * pair / x.size(1) * math.log(base))
            i, j = partner(pair, pairing, x.size(1))
            first, second = x[row, i].item(), x[row, j].item()
            turned[row, i] = first * math.cos(angle) - second * math.sin(angle)
            turned[row, j] = first * math.sin(angle) + second * math.cos(angle)
    return turned


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("package", PACKAGES)
class TestRotation:
    @pytest.mark.parametrize("base", [10000.0, 7.0])
    @pytest.mark.parametrize("head_dim", [2, 4, 14, 64])
    def test_values_are_those_of_the_formula(self, package: str, pairing: Pairing, head_dim: int, base: float) -> None:
        x, positions = random_tensor(LENGTH, head_dim), [3, 0, 1, 1000, 17, 5, 2]
        rotary = PACKAGES[package].RotaryEmbedding(head_dim, base, pairing=pairing)
        expected = slow_rotation(x, positions, pairing, base)
        assert_equal({"output": rotary(x, torch.tensor(positions))}, {"output": expected})

    @pytest.mark.parametrize("scaling", SCALINGS, ids=str)
    def test_a_score_depends_on_the_distance_only(self, package: str, pairing: Pairing, scaling: Any) -> None:
        rotary = PACKAGES[package].RotaryEmbedding(HEAD_DIM, pairing=pairing, scaling=scaling)
        q, k = random_tensor(2, LENGTH, HEAD_DIM)
        near, far = (
            rotary(q, m + positions) @ rotary(k, positions).mT
            for positions, m in ((torch.arange(LENGTH), 3), (torch.arange(LENGTH) + 123, 3))
        )
        assert_equal({"output": far}, {"output": near}, relative_bound=1e-11)

    def test_lengths_stay(self, package: str, pairing: Pairing) -> None:
        x = random_tensor(2, 3, LENGTH, HEAD_DIM)
        turned = PACKAGES[package].RotaryEmbedding(HEAD_DIM, pairing=pairing)(x)
        assert_equal({"output": turned.norm(dim=-1)}, {"output": x.norm(dim=-1)})
        assert torch.equal(turned[..., 0, :], x[..., 0, :])  # position 0 is not turned

    def test_positions_may_differ_from_row_to_row(self, package: str, pairing: Pairing) -> None:
        rotary = PACKAGES[package].RotaryEmbedding(HEAD_DIM, pairing=pairing)
        x, positions = random_tensor(2, 3, LENGTH, HEAD_DIM), torch.randint(99, (2, 1, LENGTH))
        together = rotary(x, positions)
        for row in range(2):
            assert torch.equal(together[row], rotary(x[row], positions[row, 0]))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_is_turned_in_float32_and_rounded_once(
        self, package: str, pairing: Pairing, dtype: torch.dtype
    ) -> None:
        rotary = PACKAGES[package].RotaryEmbedding(HEAD_DIM, pairing=pairing)
        x, positions = random_tensor(3, LENGTH, HEAD_DIM, dtype=dtype), torch.arange(LENGTH) + 100_000
        turned, exact = rotary(x, positions), rotary(x.double(), positions)
        ratio = compare_errors(turned, exact.to(dtype), exact)
        assert ratio.passed, str(ratio)

    def test_a_stay_in_half_precision_leaves_no_trace(self, package: str, pairing: Pairing) -> None:
        rotary = PACKAGES[package].RotaryEmbedding(HEAD_DIM, pairing=pairing)
        moved = copy.deepcopy(rotary).half().to(torch.bfloat16)
        assert moved.frequencies.dtype == torch.float64
        assert torch.equal(moved.frequencies, rotary.frequencies)
        assert rotary.state_dict() == {}
        torch.save(rotary, io.BytesIO())

    def test_it_can_be_built_on_no_device_and_moved(self, package: str, pairing: Pairing) -> None:
        with torch.device("meta"):
            rotary = PACKAGES[package].RotaryEmbedding(HEAD_DIM, pairing=pairing, device="meta")
        x = random_tensor(LENGTH, HEAD_DIM)
        expected = PACKAGES[package].RotaryEmbedding(HEAD_DIM, pairing=pairing)(x)
        assert rotary.frequencies.is_meta
        assert rotary(x.to("meta")).is_meta
        assert torch.equal(rotary.to_empty(device="cpu")(x), expected)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_both_packages_turn_alike_with_gradients(pairing: Pairing, scaling: Any) -> None:
    inputs = {"x": random_tensor(2, 3, LENGTH, HEAD_DIM)}
    ours, theirs = (
        outputs_and_gradients(package.RotaryEmbedding(HEAD_DIM, pairing=pairing, scaling=scaling), inputs)
        for package in PACKAGES.values()
    )
    assert_equal(ours, theirs)


class TestConversion:
    @given(seed=st.integers(0, 999), num_heads=st.integers(1, 4), pairs=st.integers(1, 5))
    def test_scores_stay_and_the_way_back_is_exact(self, seed: int, num_heads: int, pairs: int) -> None:
        head_dim, width = 2 * pairs, 5
        weights = random_tensor(2, num_heads * head_dim, width, seed=seed)
        x = random_tensor(LENGTH, width, seed=seed + 1)

        def scores(pairing: Pairing, projections: Tensor) -> Tensor:
            rotary = RotaryEmbedding(head_dim, pairing=pairing)
            q, k = ((x @ w.T).unflatten(-1, (num_heads, head_dim)).transpose(0, 1) for w in projections)
            return rotary(q) @ rotary(k).mT

        converted = torch.stack([adjacent_to_halves(w, head_dim) for w in weights])
        assert_equal({"output": scores("halves", converted)}, {"output": scores("adjacent", weights)})
        back = torch.stack([halves_to_adjacent(w, head_dim) for w in converted])
        assert torch.equal(back, weights)

    def test_pairs_are_mixed_up_without_it(self) -> None:
        q, k = random_tensor(2, LENGTH, HEAD_DIM)
        adjacent, halves = (RotaryEmbedding(HEAD_DIM, pairing=pairing) for pairing in PAIRINGS)
        assert not torch.allclose(adjacent(q) @ adjacent(k).mT, halves(q) @ halves(k).mT, atol=0.1)

    def test_biases_and_gains_are_converted_too(self) -> None:
        assert adjacent_to_halves(torch.arange(12), 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
        assert halves_to_adjacent(torch.arange(6), 6).tolist() == [0, 3, 1, 4, 2, 5]

    @pytest.mark.parametrize("convert", [adjacent_to_halves, halves_to_adjacent])
    @pytest.mark.parametrize(
        ("weight", "head_dim", "text"),
        [
            (torch.ones(12, 5), 5, "head_dim must be even and at least 2 (features turn in pairs), got 5"),
            (torch.ones(10, 5), 4, "(num_heads * head_dim, ...) with head_dim = 4, got (10, 5)"),
            (torch.tensor(1.0), 4, "got ()"),
            ([1.0], 4, "weight must be a tensor, got list"),
        ],
    )
    def test_what_does_not_fit_is_named(self, convert: Any, weight: Any, head_dim: int, text: str) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            convert(weight, head_dim)
        assert text in str(caught.value)


class TestScaling:
    def test_linear_reads_positions_as_if_closer(self) -> None:
        x, positions = random_tensor(LENGTH, HEAD_DIM), torch.arange(LENGTH)
        scaled = RotaryEmbedding(HEAD_DIM, scaling=LinearScaling(4.0))(x, 4 * positions)
        assert_equal({"output": scaled}, {"output": RotaryEmbedding(HEAD_DIM)(x, positions)})

    def test_ntk_leaves_the_fastest_pair_and_stretches_the_slowest_by_the_factor(self) -> None:
        plain, (scaled, factor) = rotary_frequencies(HEAD_DIM), NTKScaling(4.0)(HEAD_DIM, 10000.0)
        ratios = (plain / scaled).tolist()
        assert ratios == sorted(ratios)
        assert (ratios[0], ratios[-1], factor) == (1.0, pytest.approx(4.0, rel=1e-13), 1.0)
        assert NTKScaling(4.0)(2, 10000.0)[0].tolist() == [1.0]

    @pytest.mark.parametrize("truncate", [True, False])
    @pytest.mark.parametrize(("max_len", "base"), [*itertools.product([16, 64, 4096], [10000.0, 150.0]), (220, 7.0)])
    def test_yarn_blends_between_the_pairs_that_turn_often_and_seldom(
        self, max_len: int, base: float, truncate: bool
    ) -> None:
        head_dim = 64
        scaled, factor = YaRNScaling(4.0, max_len, beta_fast=8.0, beta_slow=0.5, truncate=truncate)(head_dim, base)
        plain = rotary_frequencies(head_dim, base)
        # Where a (broken) index of a pair turns n times: bisected, not solved.
        bounds = []
        for times in (8, 0.5):
            low, high = -100.0, 200.0
            for _ in range(200):
                middle = (low + high) / 2
                turns = max_len * math.exp(-2 * middle / head_dim * math.log(base)) / (2 * math.pi)
                low, high = (middle, high) if turns > times else (low, middle)
            bounds.append(low)
        fast, slow = (math.floor(bounds[0]), math.ceil(bounds[1])) if truncate else bounds
        fast, slow = max(fast, 0), min(slow, head_dim - 1)
        share = [min(max((pair - fast) / (slow - fast), 0.0), 1.0) for pair in range(head_dim // 2)]
        expected = [f * (1 - s) + f / 4 * s for f, s in zip(plain.tolist(), share, strict=True)]
        assert scaled.tolist() == pytest.approx(expected, rel=1e-9)
        assert factor == pytest.approx(1 + math.log(4) / 10)

    def test_yarn_steps_from_fast_to_slow_pairs_where_nothing_lies_between(self) -> None:
        scaled, _ = YaRNScaling(4.0, 4096, beta_fast=1.001, beta_slow=1.0, truncate=False)(64, 10000.0)
        ratios = (rotary_frequencies(64) / scaled).tolist()
        assert {round(x, 9) for x in ratios} == {1.0, 4.0}

    def test_what_is_not_given_is_as_in_the_papers(self) -> None:
        assert YaRNScaling(2.0, 64) == YaRNScaling(2.0, 64, 32.0, 1.0, True, None)
        assert Llama3Scaling(2.0, 64) == Llama3Scaling(2.0, 64, 1.0, 4.0)

    @pytest.mark.parametrize("scaling", [None, LinearScaling(2.0), YaRNScaling(2.0, 64), Llama3Scaling(2.0, 64)])
    def test_frequencies_are_computed_on_the_cpu_whatever_the_usual_device_is(self, scaling: Any) -> None:
        with torch.device("meta"):
            frequencies = rotary_frequencies(6) if scaling is None else scaling(6, 10000.0)[0]
        assert frequencies.device.type == "cpu"

    @pytest.mark.parametrize(
        "scaling", [LinearScaling(2.0), NTKScaling(2.0), YaRNScaling(2.0, 64), Llama3Scaling(2.0, 64)]
    )
    def test_a_checked_factor_cannot_be_changed(self, scaling: Any) -> None:
        with pytest.raises(FrozenInstanceError):
            scaling.factor = 0.5

    def test_sizes_are_checked_whatever_the_scaling_does(self) -> None:
        with pytest.raises(ValueError, match="head_dim must be even"):
            RotaryEmbedding(5, scaling=lambda *_: (torch.ones(2), 1.0))

    def test_the_attention_factor_of_yarn_scales_scores_by_its_square(self) -> None:
        x = random_tensor(LENGTH, HEAD_DIM)
        plain, sharp = (
            RotaryEmbedding(HEAD_DIM, scaling=YaRNScaling(4.0, 64, attention_factor=factor)) for factor in (1.0, 3.0)
        )
        assert_equal({"output": sharp(x) @ sharp(x).mT}, {"output": 9 * plain(x) @ plain(x).mT})

    def test_llama3_cuts_where_pairs_turn_once_and_four_times(self) -> None:
        plain, (scaled, factor) = rotary_frequencies(64), Llama3Scaling(8.0, original_max_len=512)(64, 10000.0)
        for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
            turns = 512 * before / (2 * math.pi)
            blend = (turns - 1) / 3
            expected = before if turns > 4 else before / 8 if turns < 1 else before / 8 * (1 - blend) + before * blend
            assert after == pytest.approx(expected, rel=1e-12)
        assert factor == 1.0

    @pytest.mark.parametrize(
        "scaling", [LinearScaling(1.0), NTKScaling(1.0), YaRNScaling(1.0, 64), Llama3Scaling(1.0, 64)]
    )
    def test_a_factor_of_one_changes_nothing(self, scaling: Any) -> None:
        frequencies, factor = scaling(HEAD_DIM, 10000.0)
        assert_equal({"output": frequencies}, {"output": rotary_frequencies(HEAD_DIM)})
        assert factor == 1.0

    @pytest.mark.parametrize(
        ("build", "text"),
        [
            (lambda: rotary_frequencies(5), "head_dim must be even"),
            (lambda: LinearScaling(0.5), "factor must be at least 1 and finite, got 0.5"),
            (lambda: NTKScaling(math.inf), "factor must be at least 1 and finite, got inf"),
            (lambda: YaRNScaling(math.nan, 64), "factor must be at least 1 and finite, got nan"),
            (lambda: YaRNScaling(2.0, 0), "original_max_len must be greater than 0"),
            (lambda: YaRNScaling(2.0, 64, beta_fast=1.0, beta_slow=2.0), "got beta_slow=2.0 and beta_fast=1.0"),
            (lambda: YaRNScaling(2.0, 64, attention_factor=0.0), "attention_factor must be greater than 0"),
            (
                lambda: Llama3Scaling(2.0, 64, low_freq_factor=4.0),
                "got low_freq_factor=4.0 and high_freq_factor=4.0",
            ),
            (lambda: Llama3Scaling(2.0, -1), "original_max_len must be greater than 0"),
            (lambda: Llama3Scaling(0.0, 64), "factor must be at least 1"),
            (lambda: LinearScaling("8"), "factor must be a number, got '8'"),  # type: ignore[arg-type]
            (lambda: YaRNScaling(2.0, 64, beta_slow=None), "beta_slow must be a number, got None"),  # type: ignore[arg-type]
        ],
    )
    def test_bad_settings_are_named(self, build: Any, text: str) -> None:
        with pytest.raises((ValueError, TypeError), match=text):
            build()


@pytest.mark.parametrize("package", PACKAGES)
class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"head_dim": 5}, ValueError, "head_dim must be even and at least 2 (features turn in pairs), got 5"),
            ({"head_dim": 0}, ValueError, "got 0"),
            ({"head_dim": 4.0}, TypeError, "head_dim must be a whole number, got 4.0"),
            ({"base": 1.0}, ValueError, "base must be greater than 1 and finite, got 1.0"),
            ({"pairing": "both"}, ValueError, "pairing must be one of 'adjacent', 'halves', got 'both'"),
            ({"base": None}, TypeError, "base must be a number, got None"),
            ({"scaling": {"rope_type": "linear"}}, TypeError, "scaling must be a function, got dict"),
        ],
    )
    def test_of_building(self, package: str, arguments: Any, error: type[Exception], text: str) -> None:
        with pytest.raises(error) as caught:
            PACKAGES[package].RotaryEmbedding(**{"head_dim": 4, **arguments})
        assert text in str(caught.value)

    @pytest.mark.parametrize(
        ("x", "positions", "error", "text"),
        [
            (torch.ones(3, 6), None, ValueError, "(..., len, head_dim) with head_dim = 4, got (3, 6)"),
            (torch.ones(4), None, ValueError, "got (4,)"),
            (torch.ones(3, 4).int(), None, TypeError, "x must be floating, got torch.int32"),
            ("text", None, TypeError, "x must be a tensor, got str"),
            (torch.ones(3, 4), torch.arange(2), ValueError, "broadcastable to (..., len) = (3,), got (2,)"),
            (torch.ones(3, 4), torch.ones(2, 3).int(), ValueError, "got (2, 3)"),
            (torch.ones(3, 4), torch.ones(3), TypeError, "positions must hold integers, got torch.float32"),
            (torch.ones(3, 4), torch.ones(3, dtype=torch.complex64), TypeError, "got torch.complex64"),
            (torch.ones(3, 4), [0, 1, 2], TypeError, "positions must be a tensor, got list"),
        ],
    )
    def test_of_calling(self, package: str, x: Any, positions: Any, error: type[Exception], text: str) -> None:
        with pytest.raises(error) as caught:
            PACKAGES[package].RotaryEmbedding(4)(x, positions)
        assert text in str(caught.value)


def test_any_base_above_one_is_taken() -> None:
    assert scratch.RotaryEmbedding(4, base=1.5).base == 1.5


def test_it_says_how_it_was_built_and_compiles() -> None:
    rotary = builtin.RotaryEmbedding(4, scaling=LinearScaling(2.0))
    assert repr(rotary) == "RotaryEmbedding(4, base=10000.0, pairing='adjacent', scaling=LinearScaling(factor=2.0))"
    x = random_tensor(3, 4)
    compiled = torch.compile(scratch.RotaryEmbedding(4), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), scratch.RotaryEmbedding(4)(x))
