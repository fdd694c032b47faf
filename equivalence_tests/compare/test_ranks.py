"""Several processes give the numbers of one, and one that dies, raises or falls silent is named at once."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import builtin
import scratch
from equivalence_tests.__main__ import app
from equivalence_tests.compare import command, ranks
from equivalence_tests.compare.processes import RanksFailedError, Tell, run_ranks
from equivalence_tests.compare.ranks import RankRow, compare_ranks, number_of_comparisons
from scratch.parallel import tensor_parallel_plan


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_outputs_gradients_and_ten_steps_are_those_of_one_process(num_ranks: int) -> None:
    told: list[str] = []
    rows = compare_ranks(num_ranks, "cpu", seed=1, advance=told.append)
    assert [row.detail for row in rows if not row.passed] == []
    assert len(told) == number_of_comparisons()
    assert len(rows) == 4 * number_of_comparisons()
    assert {row.strategy for row in rows} == {"DDP", "FSDP2", "tensor parallel"}
    assert {row.model.split(".")[0] for row in rows} == {"scratch", "builtin"}


def tell_sum(rank: int, num_ranks: int, tell: Tell, argument: Any) -> None:
    x = torch.tensor([float(rank + argument)])
    torch.distributed.all_reduce(x)
    tell((num_ranks, x.item()))


def one_raises(rank: int, num_ranks: int, tell: Tell, argument: Any) -> None:
    if rank == 1:
        raise ZeroDivisionError("no heads left")
    time.sleep(600)


def one_dies(rank: int, num_ranks: int, tell: Tell, argument: Any) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def one_hangs(rank: int, num_ranks: int, tell: Tell, argument: Any) -> None:
    if rank == 1:
        time.sleep(600)


@pytest.mark.slow
class TestProcesses:
    def test_they_talk_to_one_another_and_to_us(self) -> None:
        assert sorted(run_ranks(tell_sum, 2, 10)) == [(0, (2, 21.0)), (1, (2, 21.0))]

    def test_one_that_raises_is_named_with_its_error(self) -> None:
        with pytest.raises(RanksFailedError, match=r"rank 1 of 2 raised ZeroDivisionError: no heads left \(test_ranks"):
            list(run_ranks(one_raises, 2, None))

    def test_one_that_dies_is_named(self) -> None:
        with pytest.raises(RanksFailedError, match="rank 1 of 2 was killed by signal 9"):
            list(run_ranks(one_dies, 2, None))

    def test_one_that_hangs_is_named(self) -> None:
        with pytest.raises(RanksFailedError, match=r"nothing was heard from rank .*1.* of 2 for 1 seconds"):
            list(run_ranks(one_hangs, 2, None, patience=1.0))


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


def rows_of(passed: bool) -> list[RankRow]:
    return [
        RankRow(
            "DDP", "scratch.TransformerEncoder", quantity, 1e-15, 1e-12, passed, "output[0] = 1.0, but should be 2.0"
        )
        for quantity in ("output", "gradients")
    ]


class TestCommand:
    def run(self, *arguments: Any) -> Any:
        return CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "120"})

    @pytest.mark.parametrize(("passed", "verdict"), [(True, "They agree: 2"), (False, "They differ: 2 of 2")])
    def test_it_ends_with_a_verdict(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, passed: bool, verdict: str
    ) -> None:
        monkeypatch.setattr(command, "compare_ranks", lambda *_: rows_of(passed))
        result = self.run("--ranks", 2, "--json", tmp_path / "report.json")
        assert result.exit_code == (0 if passed else 1)
        assert verdict in result.stdout.splitlines()[-1]
        assert ("but should be 2.0" in result.stdout) is not passed
        assert "Context parallelism is left out" in result.stdout
        assert json.loads((tmp_path / "report.json").read_text())["agree"] is passed

    def test_a_rank_that_fails_ends_in_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(*arguments: Any) -> list[RankRow]:
            raise RanksFailedError("rank 1 of 2 was killed by signal 9")

        monkeypatch.setattr(command, "compare_ranks", failing)
        result = self.run("--ranks", 2)
        assert result.exit_code == 1
        assert result.stdout.splitlines()[-1] == "They could not be compared: rank 1 of 2 was killed by signal 9."

    def test_other_numbers_of_ranks_are_refused(self) -> None:
        result = self.run("--ranks", 3)
        assert result.exit_code == 2
        assert "ranks must be one of 2, 4, got 3" in result.output


def test_the_worst_rank_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = rows_of(True), rows_of(False)
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: iter([(0, good), (1, bad), (2, good)]))
    assert [row.passed for row in compare_ranks(4, "cpu", 0, lambda _: None)] == [False, False]
