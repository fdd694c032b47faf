"""Tests of the command line: what it prints, keeps, resumes and refuses; never how long anything takes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks import children, command, measuring, running, session
from benchmarks.aims import AIMS
from benchmarks.command import app
from benchmarks.grids import PRESETS, Case, Grid
from benchmarks.measuring import MachineRates
from benchmarks.plots import is_plain
from benchmarks.results import Row, append_rows, read_rows
from benchmarks.screen import console
from benchmarks.session import Plan

TINY = ["--batch", "2", "--width", "32", "--heads", "2", "--layers", "1", "--threads", "1", "--length", "5"]
ONE = [*TINY, "--component", "attention", "--contender", "scratch"]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take as few rounds as there can be, of one run each."""
    monkeypatch.setattr(measuring, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(measuring, "MOST_ROUNDS", 2)
    monkeypatch.setattr(measuring, "FEWEST_LONG_ROUNDS", 2)
    monkeypatch.setattr(measuring, "TURN_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "80")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_quick_preset_says_what_to_use_in_a_few_cases() -> None:
    result = invoke("--quick", *TINY)
    assert result.exit_code == 0, result.output
    for title in ("attention, forward", "encoder layer, backward", "transformer, forward", "generate, forward"):
        assert f"\n{title}: " in result.output
    _, _, advice = result.output.partition("\nWhat to use: ")
    assert [advice.count(f"\n{x}") for x in ("self attention,", "attention,", "generate,")] == [1, 1, 1]
    assert "Nothing is kept" in result.output
    assert "unavailable" not in result.output
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Collect what would be measured."""
    found: list[Plan] = []

    def keep(plan: Plan, _done: Sequence[Row]) -> int:
        found.append(plan)
        return 0

    monkeypatch.setattr(command, "measure", keep)
    monkeypatch.setattr(command, "machine_rates", lambda *_: MachineRates(1e11, 1e10))
    return found


def test_axes_replace_those_of_the_preset(plans: list[Plan]) -> None:
    axes = ["--component", "attention,decoder_layer", "--mode", "forward,backward", "--mask", "both"]
    axes += ["--length", "3,5", "--key-length", "7"]
    assert invoke(*TINY, *axes, "--contender", "scratch").exit_code == 0
    cases = plans[0].cases
    assert len(cases) == 2 * 2 * 2
    assert {(x.component, x.mode, x.query_len, x.key_len, x.mask) for x in cases} == {
        (component, mode, length, 7, "both")
        for component in ("attention", "decoder_layer")
        for mode in ("forward", "backward")
        for length in (3, 5)
    }


def test_what_is_chosen_is_measured_however_long_it_takes(plans: list[Plan]) -> None:
    for arguments in ([], ["--quick"], ["--quick", "--length", "8"], ["--length", "8"], ["--component", "attention"]):
        assert invoke(*arguments, "--threads", "1").exit_code == 0
    assert invoke("--standard").exit_code == 0
    assert [plan.limit_seconds for plan in plans] == [45.0, 45.0, 45.0, None, None, None]


def test_the_quick_preset_is_fitted_to_the_machine(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    for rate in (1e9, 1e13):
        monkeypatch.setattr(command, "machine_rates", lambda *_, rate=rate: MachineRates(rate, 1.0))
        assert invoke("--quick").exit_code == 0
    slow, fast = (max(case.query_len for case in plan.cases) for plan in plans)
    assert slow < fast
    assert invoke("--quick", "--length", "8").exit_code == 0
    assert {case.query_len for case in plans[-1].cases} == {8}


def test_a_quick_run_is_continued_at_its_own_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[Case]] = []
    for rate in (1e11, 1e9):
        monkeypatch.setattr(command, "machine_rates", lambda *_, rate=rate: MachineRates(rate, 1e10))
        monkeypatch.setattr(command, "QUICK_SECONDS", 0.0)
        assert invoke("--quick", *TINY[:-2], "--output", str(tmp_path), "--resume").exit_code == 0
        found.append({row.case for row in read_rows(tmp_path / "results.jsonl")})
    assert [len(cases) for cases in found] == [1, 2]
    assert len({case.query_len for case in found[1]}) == 1


def test_the_goals_are_among_the_cases_of_the_standard_preset(plans: list[Plan]) -> None:
    assert invoke("--standard").exit_code == 0
    cases = plans[0].cases
    assert all(any(aim.concerns(case) for case in cases) for aim in AIMS)
    lengths = {(x.component, x.mode, x.query_len) for x in cases if is_plain(x) and x.batch == 1}
    for component in ("attention", "self_attention", "encoder_layer"):
        assert {(component, mode, length) for mode in ("forward", "backward") for length in (1024, 4096)} <= lengths


def test_the_command_ends_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUICK_SECONDS", 0.0)
    folder = tmp_path / "new" / "folder"
    result = invoke("--quick", *ONE, "--length", "3,5", "--output", str(folder))
    assert result.exit_code == 0
    assert "Time limit reached: 1 of 2 cases measured." in result.output
    rows = read_rows(folder / "results.jsonl")
    assert len({row.case for row in rows}) == 1
    assert (folder / "results.csv").read_text().count("\n") == 1 + len(rows)


def test_progress_is_visible_in_a_pipe() -> None:
    result = invoke(*ONE, "--length", "3,5")
    assert result.stderr.splitlines() == [
        f"[{number}/2] attention, forward, batch 2, length {length}, width 32, 2 heads, float32, 1 thread"
        for number, length in ((1, 3), (2, 5))
    ]
    assert "[1/2]" not in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "append_rows", lambda _, rows: append_rows(Path("/dev/full"), rows))
    result = invoke(*ONE, "--length", "3,5", "--output", str(tmp_path))
    assert result.exit_code == 3
    first, *errors = result.stderr.splitlines()
    assert first.startswith("[1/2] attention")
    assert errors == [f"error: {tmp_path} could not be written: No space left on device"]
    assert "attention, forward" in result.stdout  # what was measured is shown at least
    assert "0 of 2 cases are kept.\n" in result.stdout
    assert "keeps them" not in result.stdout


def test_a_folder_that_turns_read_only_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(path: Path, rows: Sequence[Row]) -> None:
        if path.exists():
            raise PermissionError(13, "Permission denied", str(path))
        append_rows(path, rows)

    monkeypatch.setattr(session, "append_rows", once)
    result = invoke(*ONE, "--length", "3,5,7", "--output", str(tmp_path))
    assert result.exit_code == 3
    assert result.stderr.count("error: ") == 1
    assert f"error: {tmp_path / 'results.jsonl'} could not be written: Permission denied" in result.stderr
    assert "1 of 3 cases are kept.\n" in result.stdout
    assert "results.jsonl keeps them; the same command with --resume goes on" in result.stdout
    monkeypatch.undo()
    assert [row.case.query_len for row in read_rows(tmp_path / "results.jsonl")] == [3, 3]


def test_a_report_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "results.csv").mkdir()
    result = invoke(*ONE, "--output", str(tmp_path))
    assert result.exit_code == 3
    assert f"error: {tmp_path / 'results.csv'} could not be written: Is a directory" in result.stderr
    assert "All rows are kept; sidebyside-bench report " in result.stdout
    assert len(read_rows(tmp_path / "results.jsonl")) == 2
    again = invoke("report", str(tmp_path / "results.jsonl"))
    assert again.exit_code == 3
    assert again.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141), (ZeroDivisionError(), 3)]
)
def test_status_1_means_unequal_and_nothing_else(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(command, "measure", fail)
    assert invoke(*ONE).exit_code == status
    monkeypatch.setattr(command, "read_rows", fail)
    assert invoke("report", "results.jsonl").exit_code == status


@pytest.mark.parametrize("preset", ["--quick", "--standard", "--full"])
def test_each_component_keeps_to_its_grids_of_the_preset(preset: str, plans: list[Plan]) -> None:
    for components in ("attention", "encoder_layer", "attention,encoder_layer"):
        assert invoke(preset, "--component", components).exit_code == 0
    attention, encoder, both = (set(plan.cases) for plan in plans)
    assert both == attention | encoder


def test_components_that_a_preset_lacks_get_a_grid(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "standard", (Grid(("attention",), length=(64,)),))
    assert invoke("--standard", "--component", "attention,generate", "--batch", "3").exit_code == 0
    assert [(x.component, x.query_len, x.batch) for x in plans[0].cases] == [("attention", 64, 3), ("generate", 512, 3)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that are measured; the second case is interrupted, 0, when it is measured first."""
    found, run_case = list[int](), running.run_case

    def interrupted(case: Case, chosen: Sequence[str], seconds: float) -> list[Row]:
        if len(found) == 1:
            found.append(0)
            raise KeyboardInterrupt
        found.append(case.query_len)
        return run_case(case, chosen, seconds)

    monkeypatch.setattr(children, "run_case", interrupted)
    return found


def test_an_interrupted_run_keeps_its_rows_and_is_resumed(tmp_path: Path, measured: list[int]) -> None:
    arguments = [*ONE, "--length", "3,5,7", "--output", str(tmp_path)]
    first = invoke(*arguments)
    assert first.exit_code == 130
    assert "attention, forward" in first.output
    assert first.output.count("Interrupted") == first.output.count("results.jsonl keeps them") == 1
    assert "Interrupted: 1 of 3 cases measured." in first.output
    assert "the same command with --resume goes on from there" in first.output
    kept = (tmp_path / "results.jsonl").read_bytes()
    assert [row.case.query_len for row in read_rows(tmp_path / "results.jsonl")] == [3, 3]
    again = invoke(*arguments)
    assert again.exit_code == 2
    assert "is there already: continue it with --resume" in again.output
    (tmp_path / "results.jsonl").write_bytes(kept + kept[:50])
    resumed = invoke(*arguments, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "keeps them" not in resumed.output
    assert "Written to " in " ".join(resumed.output.split())
    assert measured == [3, 0, 5, 7]
    assert (tmp_path / "results.jsonl").read_bytes().startswith(kept)
    assert [row.case.query_len for row in read_rows(tmp_path / "results.jsonl")] == [3, 3, 5, 5, 7, 7]


def test_what_is_measured_is_frozen_when_others_join_later(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    invoke(*ONE, "--output", str(tmp_path))
    kept = path.read_bytes().replace(b'"torch": "', b'"torch": "1.')
    path.write_bytes(kept)
    joined = invoke(*ONE, "--contender", "scratch,math", "--output", str(tmp_path), "--resume")
    assert "Some of the results were measured elsewhere" in joined.output
    assert path.read_bytes().startswith(kept)
    assert [row.contender for row in read_rows(path)] == ["builtin", "scratch", "math"]
    path.write_bytes(b"")
    assert invoke(*ONE, "--output", str(tmp_path), "--resume").exit_code == 0
    assert len(read_rows(path)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--component elephant", "component must be one of 'attention'"),
        ("--mode sideways", "mode must be one of"),
        ("--length 0", "length must be greater than 0, got length=0"),
        ("--length many", "length must be whole numbers with commas between, got 'many'"),
        ("--need-weights perhaps", "need-weights must be one of 'no', 'yes', got 'perhaps'"),
        ("--heads 7", "embed_dim must be divisible by num_heads, got embed_dim=32 and num_heads=7"),
        ("--device nowhere", "device must be one that this machine has"),
        ("--device meta", "device must be one of 'cpu', 'cuda', got 'meta'"),
        ("--contender nobody", "contender must be one of"),
        ("--memory 0", "memory must be greater than 0, got memory=0.0"),
        ("--threads 0", "threads must be greater than 0"),
        ("--quick --full", "one preset can be given, got --quick --full"),
        ("--implementation my[odd]:X:", "got my[odd]:X:: "),
        ("--window 0 --mask window", "window must be greater than 0"),
        ("--resume", "--resume needs --output"),
        ("--output /proc/nothing", "output must be a folder that can be made, got /proc/nothing"),
    ],
)
def test_bad_arguments_get_one_line_and_status_2(arguments: str, message: str) -> None:
    result = invoke(*ONE, *arguments.split())
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("error: ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(("columns", "width"), [(None, 160), ("70", 70)])
def test_a_pipe_is_wide_unless_somebody_says_otherwise(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert console().width == width
