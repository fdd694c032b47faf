"""Tests of the judge of anybody's own kernels: planted mistakes are found and named, right kernels are not blamed."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.kernels import judging
from equivalence_tests.kernels.faults import Request
from equivalence_tests.kernels.own import judge_own, own_kernel
from equivalence_tests.kernels.planted import LSE_MISTAKES, MISTAKES, RIGHT, planted, with_wrong_lse
from equivalence_tests.kernels.reporting import Report
from equivalence_tests.kernels.situations import Situation, listed_situations

# Enough to tell the planted mistakes apart.
NAMES = (
    "length 1",
    "length 16",
    "length 63",
    "length 65",
    "causal, length 17",
    "causal, 5 queries, 7 keys",
    "causal, length 65",
    "mask bool, length 5",
    "mask bool, length 65",
    "mask blind rows, length 5",
    "mask float, length 65",
    "mask 1e4, length 5",
    "scores up to 120, length 17",
    "scale 0.3",
    "permuted, length 17",
    "expanded, length 17",
    "4 heads on 2",
    "gradient of a sum",
    "batch 0",
)


@cache
def few() -> tuple[Situation, ...]:
    return tuple(one for one in listed_situations() if one.name in NAMES)


def judged(function: Any) -> Report:
    return judge_own(own_kernel(function, "mine"), Request(), few())


@pytest.mark.parametrize("function", RIGHT, ids=lambda one: one.__name__)
def test_a_right_kernel_is_not_blamed(function: Callable[..., Any]) -> None:
    report = judged(function)
    assert not report.faults, report.faults
    assert report.exit_status == 0


def test_after_a_kernel_has_lost_the_device_nothing_is_run_to_name_what_was_wrong_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[bool] = []

    def mine(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[2] > 16:
            lost.append(True)
            raise RuntimeError("CUDA error: misaligned address")
        return F.scaled_dot_product_attention(query, key, value, scale=1.0)

    def wait_for(_: torch.device) -> None:
        if lost:
            raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(judging, "_wait_for", wait_for)
    report = judged(mine)
    assert len(report.cells) == 3
    assert report.remarks == ["Nothing was run after it."]
    names = [fault.name for fault in report.faults]
    assert "the numbers do not say what is wrong here" in names
    assert "it fails on the device, which the program cannot use afterwards: CUDA error: misaligned address" in names
    assert len(names) == 2  # the scale that is forgotten is not named


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mistake", "words"), MISTAKES.items())
def test_a_planted_mistake_is_found_and_named(mistake: str, words: str) -> None:
    report = judged(planted(mistake))
    assert report.exit_status == 1
    assert words in report.faults[0].name


@pytest.mark.parametrize(("mistake", "words"), LSE_MISTAKES.items())
def test_a_wrong_log_sum_exp_is_found_and_named(mistake: str, words: str) -> None:
    report = judged(with_wrong_lse(mistake))
    assert {tuple(fault.parts) for fault in report.faults} == {("lse",)}
    assert words in report.faults[0].name


def test_at_least_thirty_mistakes_are_planted() -> None:
    assert len(MISTAKES) >= 30
    assert len(RIGHT) >= 10


KERNELS = """
import torch
def right(q, k, v, is_causal=False):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v
def wrong(q, k, v):
    return (q @ k.mT).softmax(-1) @ v
def demanding(q, k, v, block_table):
    return q
def two(q, k):
    return q
"""


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("right", 0, "Right: none of"),
        ("wrong", 1, "the scores are not scaled"),
        ("demanding", 2, "needs block_table"),
        ("two", 2, "must be a function of three tensors"),
        ("missing", 2, "missing"),
    ],
)
def test_a_kernel_in_a_file(name: str, status: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "my_kernel.py").write_text(KERNELS)
    result = CliRunner().invoke(app, ["kernels", f"{tmp_path / 'my_kernel.py'}:{name}", "--quick"])
    assert result.exit_code == status, result.output
    assert said in " ".join(result.output.split())
