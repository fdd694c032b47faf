"""Tests of ``sidebyside compare`` as a user runs it: what it prints, writes and exits with."""

import json
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import scratch
from equivalence_tests.__main__ import app
from equivalence_tests.compare import command as compare_module
from equivalence_tests.compare.components import Component, components
from equivalence_tests.compare.timing import TimingSizes
from scratch import attention as attention_module

TINY = TimingSizes(batch=2, length=5, sentences=2, decoded=3, d_model=16, num_layers=1, seconds=0.0)


def all_but_the_largest(dtype: torch.dtype, seed: int) -> list[Component]:
    kept = [component for component in components(dtype, seed) if "paper" not in component.name]
    assert len(kept) == len(components(dtype, seed)) - 1
    return kept


@pytest.fixture(autouse=True)
def _few_epochs_and_tiny_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "EPOCHS", 2)
    monkeypatch.setattr(TimingSizes, "quick", lambda: TINY)
    monkeypatch.setattr(compare_module, "components", all_but_the_largest)


def run(*arguments: Any, columns: int = 120) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": str(columns)})


def test_a_run_that_agrees_says_so_and_exits_with_0(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = run("--quick", "--json", file)
    assert result.exit_code == 0, result.output
    assert "They agree: " in result.stdout.splitlines()[-1]
    assert "then one training and four timings follow: under a minute" in " ".join(result.stdout.split())
    report = json.loads(file.read_text())
    assert report["agree"] is True
    assert {row["component"] for row in report["components"]} > {"Transformer", "MultiheadAttention, self-attention"}
    assert [training["optimizer"] for training in report["trainings"]] == ["adam"]
    assert len(report["timings"]) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_wrong_scale_is_reported_with_the_components_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention_module.score_scale
    monkeypatch.setattr(attention_module, "score_scale", lambda d_k: original(d_k) ** 2)
    result = run("--quick")
    assert result.exit_code == 1
    assert "MultiheadAttention, self-attention, output:" in result.stdout
    last = " ".join(result.stdout[result.stdout.index("They differ:") :].split())
    assert "scaled dot-product" not in last
    assert "TransformerEncoder (output)" in last
    assert "training with adam" in last


def test_a_package_that_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    original = scratch.MultiheadAttention.forward

    @wraps(original)
    def forward(self: scratch.MultiheadAttention, *args: Any, **options: Any) -> Any:
        if self.bias_k is not None:
            raise ZeroDivisionError("no heads")
        return original(self, *args, **options)

    monkeypatch.setattr(scratch.MultiheadAttention, "forward", forward)
    result = run("--quick")
    assert result.exit_code == 1
    assert "RAISES" in result.stdout
    assert "bias_kv, zero_attn, call: scratch raises ZeroDivisionError: no heads" in " ".join(result.stdout.split())


@pytest.mark.parametrize("columns", [80, 120])
def test_no_cell_of_the_tables_is_cut(columns: int) -> None:
    result = run("--quick", "--dtype", "bfloat16", columns=columns)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "nowhere"], "device"),
        (["--dtype", "int8"], "int8"),
        (["--pairs", "none.tsv"], "none.tsv"),
        (["--json", "none/report.json"], "in a folder that exists"),
        (["--seed", "x"], "seed"),
    ],
)
def test_bad_arguments_exit_with_2_before_anything_is_computed(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "side by side" not in result.stdout
