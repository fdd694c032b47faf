"""Tests of work.py: the formulas against torch's counter where that counts, and against sizes written out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import scratch
from benchmarks.grids import Case
from benchmarks.work import bytes_moved, flops, roofline_seconds
from benchmarks.workloads import runnable, workload

# torch.nn's own encoder says that an odd number of heads keeps it off a part of its fast path.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

SIZES: dict[str, Any] = {"batch": 2, "query_len": 5, "key_len": 7, "embed_dim": 33, "num_heads": 3}
CASES = [
    Case("attention", **SIZES),
    Case("self_attention", **(SIZES | {"key_len": 5})),
    Case("cross_attention", **SIZES),
    Case("encoder_layer", **(SIZES | {"key_len": 5})),
    Case("decoder_layer", **SIZES),
    Case("transformer", **SIZES, num_layers=2),
    Case("seq2seq", **SIZES, num_layers=2, mask="causal"),
    Case("generate", **SIZES, num_layers=2, mask="causal"),
]


def counted(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.component)
def test_the_formula_is_what_torch_counts_in_a_forward_pass(case: Case) -> None:
    assert flops(case) == counted(runnable(case, workload(case, scratch, cached=True)))


@pytest.mark.parametrize("case", CASES[1:-1], ids=lambda case: case.component)
def test_the_formula_is_what_torch_counts_in_a_training_step(case: Case) -> None:
    case = replace(case, mode="training_step")
    assert flops(case) == counted(runnable(case, workload(case, scratch)))


def test_the_formula_is_what_torch_counts_in_forward_and_backward() -> None:
    case = replace(CASES[0], mode="backward")
    assert flops(case) == counted(runnable(case, workload(case, scratch)))


def test_masks_do_not_change_the_count() -> None:
    assert flops(replace(CASES[0], mask="both")) == flops(CASES[0])


def test_bytes_are_those_of_inputs_parameters_and_outputs() -> None:
    attention, itself, across = CASES[:3]
    assert bytes_moved(attention) == 4 * (2 * 2 * 5 * 33 + 2 * 2 * 7 * 33)
    module = scratch.MultiheadAttention(33, 3)
    parameters = sum(x.numel() for x in module.parameters())
    assert bytes_moved(itself) == 4 * (2 * 2 * 5 * 33 + parameters)
    assert bytes_moved(across) == 4 * (2 * 2 * 5 * 33 + 2 * 7 * 33 + parameters)
    assert bytes_moved(replace(itself, need_weights=True)) == (bytes_moved(itself) or 0) + 4 * 2 * 5 * 5
    assert bytes_moved(replace(attention, dtype="bfloat16")) == (bytes_moved(attention) or 0) // 2


def test_the_roofline_is_the_slower_of_arithmetic_and_memory() -> None:
    case, moved = CASES[0], bytes_moved(CASES[0])
    assert roofline_seconds(case, flops_per_s=1.0, bytes_per_s=1e12) == flops(case)
    assert roofline_seconds(case, flops_per_s=1e12, bytes_per_s=1.0) == moved
    assert roofline_seconds(replace(case, mode="backward"), 1.0, 1.0) is None
    assert roofline_seconds(CASES[3], 1.0, 1.0) is None
    assert roofline_seconds(replace(case, mask="causal"), 1.0, 1.0) is None


def test_all_sizes_differ() -> None:
    assert len(set(SIZES.values())) == len(SIZES)
    assert torch.get_default_dtype() is torch.float32


def test_shared_heads_of_keys_are_read_once() -> None:
    grouped = Case("attention", batch=2, query_len=5, key_len=7, embed_dim=36, num_heads=6, key_heads=2)
    assert bytes_moved(grouped) == 4 * (2 * 2 * 5 * 36 + 2 * 2 * 7 * 12)
    assert (
        flops(grouped) == flops(replace(grouped, key_heads=0)) == counted(runnable(grouped, workload(grouped, scratch)))
    )
