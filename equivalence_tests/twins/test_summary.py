"""The parameter counts, against those of the source document and against torch."""

from typing import Any

import pytest
from torch import nn

import builtin
import scratch
from scratch.task.summary import ParameterRow, parameter_rows


def rows_of(model: nn.Module) -> dict[str, ParameterRow]:
    return {row.path: row for row in parameter_rows(model)}


def test_the_feed_forward_block_has_the_counts_of_the_source() -> None:
    rows = rows_of(scratch.TransformerEncoderLayer(512, 8, 2048))
    block = [rows[name].total for name in ("linear1", "linear2", "norm2")]
    assert block == [1_050_624, 1_049_088, 1_024]
    assert sum(block) == 2_100_736


@pytest.mark.parametrize("package", [scratch, builtin])
def test_each_projection_of_the_attention_has_the_count_of_the_source(package: Any) -> None:
    rows = rows_of(package.MultiheadAttention(512, 8))
    assert [(row.path, row.weights) for row in rows.values()] == [
        (name, 262_144) for name in ("q", "k", "v", "out_proj")
    ]
    assert [row.biases for row in rows.values()] == [512] * 4


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bias": False}, {"kdim": 5}, {"kdim": 5, "vdim": 7}, {"add_bias_kv": True}],
)
@pytest.mark.parametrize("package", [scratch, builtin, nn])
def test_the_rows_add_up_to_all_parameters(package: Any, arguments: dict[str, Any]) -> None:
    attention = package.MultiheadAttention(12, 3, **arguments)
    assert sum(row.total for row in parameter_rows(attention)) == sum(p.numel() for p in attention.parameters())


def test_head_sizes_of_their_own_are_counted() -> None:
    rows = rows_of(scratch.MultiheadAttention(12, 3, qk_head_dim=5, v_head_dim=7))
    assert [rows[name].weights for name in ("q", "k", "v", "out_proj")] == [180, 180, 252, 252]


def test_both_packages_give_the_same_rows_and_a_shared_matrix_counts_once() -> None:
    models = [package.Seq2SeqTransformer(11, 13, 12, 3, 1, 1, 20, tie_weights=True) for package in (scratch, builtin)]
    ours, theirs = (list(parameter_rows(model)) for model in models)
    assert ours == theirs
    assert sum(row.total for row in ours) == sum(p.numel() for p in models[0].parameters())


def test_a_layer_has_a_row_for_each_part_with_parameters() -> None:
    layer = scratch.TransformerEncoderLayer(12, 3, 20)
    layer.self_attn = scratch.MultiheadAttention(12, 3, add_bias_kv=True)
    assert [(row.path, row.kind, row.weights, row.biases) for row in parameter_rows(layer)] == [
        *((f"self_attn.{name}", "projection", 144, 12) for name in "qkv"),
        ("self_attn.bias_kv", "learnt token", 24, 0),
        ("self_attn.out_proj", "Linear", 144, 12),
        ("linear1", "Linear", 240, 20),
        ("linear2", "Linear", 240, 12),
        ("norm1", "LayerNorm", 12, 12),
        ("norm2", "LayerNorm", 12, 12),
    ]
