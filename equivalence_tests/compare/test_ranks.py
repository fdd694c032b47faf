"""Several processes give the numbers of one, and one that dies, raises or falls silent is named at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import multiprocessing
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.compare import command, ranks
from equivalence_tests.compare.processes import RanksFailedError, run_ranks
from equivalence_tests.compare.ranks import RankRow, compare_ranks, number_of_comparisons
from equivalence_tests.compare.workers_for_tests import one_dies, one_hangs, one_raises, tell_sum
from equivalence_tests.instruments.warm_processes import warm_context


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks from a process that has imported torch."""
    context = warm_context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.usefixtures("warm")
def test_outputs_gradients_and_ten_steps_are_those_of_one_process(num_ranks: int) -> None:
    told: list[str] = []
    rows = compare_ranks(num_ranks, "cpu", seed=1, advance=told.append)
    assert [row.detail for row in rows if not row.passed] == []
    assert len(told) == number_of_comparisons()
    assert len(rows) == 4 * number_of_comparisons()
    assert {row.strategy for row in rows} == {"DDP", "FSDP2", "tensor parallel"}
    assert {row.model.split(".")[0] for row in rows} == {"scratch", "builtin"}


@pytest.mark.slow
class TestProcesses:
    def test_they_talk_to_one_another_and_to_us(self) -> None:
        """In fresh interpreters, as everybody's are."""
        assert sorted(run_ranks(tell_sum, 2, 10)) == [(0, (2, 21.0)), (1, (2, 21.0))]

    @pytest.mark.usefixtures("warm")
    def test_one_that_raises_is_named_with_its_error(self) -> None:
        with pytest.raises(
            RanksFailedError, match=r"rank 1 of 2 raised ZeroDivisionError: no heads left \(workers_for_tests"
        ):
            list(run_ranks(one_raises, 2, None))

    @pytest.mark.usefixtures("warm")
    def test_one_that_dies_is_named(self) -> None:
        with pytest.raises(RanksFailedError, match="rank 1 of 2 was killed by signal 9"):
            list(run_ranks(one_dies, 2, None))

    @pytest.mark.usefixtures("warm")
    def test_one_that_hangs_is_named(self) -> None:
        with pytest.raises(RanksFailedError, match=r"nothing was heard from rank .*1.* of 2 for 1 seconds"):
            list(run_ranks(one_hangs, 2, None, patience=1.0))


def rows_of(passed: bool) -> list[RankRow]:
    return [
        RankRow(
            "DDP", "scratch.TransformerEncoder", quantity, 1e-15, 1e-12, passed, "output[0] = 1.0, but should be 2.0"
        )
        for quantity in ("output", "gradients")
    ]


class TestCommand:
    def run(self, *arguments: Any) -> Any:
        return CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "80"})

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
        assert "1.0e-15" in result.stdout
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

    @pytest.mark.parametrize("option", [["--quick"], ["--dtype", "float32"], ["--pairs", __file__]])
    def test_options_without_effect_are_refused(self, option: list[str]) -> None:
        result = self.run("--ranks", 2, *option)
        assert result.exit_code == 2
        assert f"in float64: leave out {option[0]}" in result.output


def test_the_worst_rank_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = rows_of(True), rows_of(False)
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: iter([(0, good), (1, bad), (2, good)]))
    assert [row.passed for row in compare_ranks(4, "cpu", 0, lambda _: None)] == [False, False]
