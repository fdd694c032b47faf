"""The plans of tensor parallelism: what is cut, what stays whole and why, and that one process can carry them out.

That several give the numbers of one is tested in ``equivalence_tests/compare/test_ranks.py``.
"""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import builtin
import builtin.parallel
import scratch
from equivalence_tests.instruments.side_by_side import assert_equal, outputs_and_gradients, random_tensor
from equivalence_tests.instruments.weights import copy_weights, randomize_parameters
from equivalence_tests.learn.traps.todays import one_process
from scratch.parallel import tensor_parallel_plan


class TestPlan:
    @pytest.mark.parametrize("package", [scratch, builtin])
    def test_it_cuts_the_parts_of_a_language_model(self, package: Any) -> None:
        options: dict[str, Any] = {"num_key_heads": 2, "head_dim": 6, "qk_norm": True, "sinks": True}
        model = package.DecoderOnlyTransformer(17, 12, 4, 1, 8, **options)
        plan = tensor_parallel_plan(model, 2)
        kinds = {path.removeprefix("layers.0."): type(style).__name__ for path, style in plan.styles.items()}
        assert kinds == {
            **{f"self_attn.{x}_proj": "ColwiseParallel" for x in "qkv"},
            "self_attn.out_proj": "RowwiseParallel",
            "self_attn.q_norm": "SequenceParallel",
            "self_attn.k_norm": "SequenceParallel",
            "self_attn": "ShardedSinks",
            "feed_forward.gate_proj": "ColwiseParallel",
            "feed_forward.up_proj": "ColwiseParallel",
            "feed_forward.down_proj": "RowwiseParallel",
        }
        assert plan.replicated == {}
        norm: Any = plan.styles["layers.0.self_attn.q_norm"]
        assert norm.sequence_sharding == (Shard(1),)  # (batch, num_heads, len, head_dim)

    @pytest.mark.parametrize("package", [scratch, builtin, nn])
    def test_it_says_that_a_packed_projection_stays_whole(self, package: Any) -> None:
        plan = tensor_parallel_plan(package.TransformerDecoderLayer(12, 3, 8), 2)
        assert list(plan.styles) == ["linear1", "linear2"]
        assert list(plan.replicated) == ["self_attn", "multihead_attn"]
        assert "self_attn: replicated, because rows of in_proj_weight are queries, keys and values" in str(plan)

    def test_heads_that_cannot_be_shared_are_named(self) -> None:
        attention = scratch.GroupedQueryAttention(12, 6, 3)
        with pytest.raises(ValueError, match="got num_ranks=2 for the 3 of k_proj"):
            tensor_parallel_plan(attention, 2)
        with pytest.raises(ValueError, match="num_ranks must be greater than 0"):
            tensor_parallel_plan(attention, 0)

    def test_a_plan_is_no_other_later(self) -> None:
        with pytest.raises(FrozenInstanceError):
            tensor_parallel_plan(scratch.SwiGLU(12, 8), 2).styles = {}  # type: ignore[misc]

    def test_both_packages_give_one_and_the_same(self) -> None:
        assert builtin.parallel.tensor_parallel_plan is tensor_parallel_plan

    def test_a_part_alone_is_cut_too(self) -> None:
        plan = tensor_parallel_plan(scratch.SwiGLU(12, 8), 4)
        assert list(plan.styles) == ["gate_proj", "up_proj", "down_proj"]
        with pytest.raises(ValueError, match="got num_ranks=3 for the 8 of gate_proj"):
            tensor_parallel_plan(scratch.SwiGLU(12, 8), 3)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with one_process() as mesh:
        yield mesh


@pytest.mark.parametrize("package", [scratch, builtin])
def test_one_process_carries_a_plan_out_and_computes_the_same(package: Any, mesh: DeviceMesh) -> None:
    attention = randomize_parameters(package.GroupedQueryAttention(12, 4, 2, qk_norm=True, sinks=True).double())
    cut = package.GroupedQueryAttention(12, 4, 2, qk_norm=True, sinks=True).double()
    copy_weights(attention, cut)
    parallelize_module(cut, mesh, tensor_parallel_plan(cut, 1).styles)
    whole = {"k_proj.weight", "sinks", "q_norm.weight"}
    assert all(isinstance(cut.get_parameter(name), DTensor) for name in whole)
    inputs = {"x": random_tensor(2, 5, 12)}
    results = outputs_and_gradients(cut, inputs)
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in results.items()}
    assert_equal(found, outputs_and_gradients(attention, inputs))


@pytest.mark.parametrize("package", [scratch, builtin])
def test_the_own_sinks_are_shown_for_the_time_of_the_call_only(package: Any, mesh: DeviceMesh) -> None:
    cut = package.GroupedQueryAttention(12, 4, 2, sinks=True)
    parallelize_module(cut, mesh, tensor_parallel_plan(cut, 1).styles)
    with pytest.raises(ValueError, match="x must have"):
        cut(torch.zeros(3))
    assert "sinks" not in vars(cut)
    assert isinstance(cut.sinks, DTensor)
