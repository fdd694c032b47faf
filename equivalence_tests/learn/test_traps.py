"""Every trap holds on the installed torch, and what it advises helps."""

import io
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.torch_version import TorchVersion
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.learn.traps import command, states
from equivalence_tests.learn.traps.entry import Trap
from equivalence_tests.learn.traps.registry import TRAPS, find_trap
from equivalence_tests.learn.traps.rendering import in_full
from equivalence_tests.learn.traps.running import Examined, State, examine
from equivalence_tests.learn.traps.states import state_of

ROOT = Path(__file__).parents[2]
# How a docstring points at traps: "see trap `NAME`" or "see traps `NAME`, `NAME`", on one line or over two.
REFERENCE = re.compile(r"\bsee\s+traps?\s+(`[^`]*`(?:,\s+`[^`]*`)*)")


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_the_trap_is_as_told(trap: Trap) -> None:
    if not trap.runs_here:
        pytest.skip(f"{trap.name} needs {trap.needs}")
    found = examine(trap)
    assert_shown_in_full(found)
    state = found.state
    assert state_of(trap) in (state, State.DESCRIBED, State.NOT_TRIED), "states.json: run `sidebyside traps --record`"
    if trap.since and torch.__version__ < TorchVersion(trap.since):
        assert state is State.MENDED, f"trap {trap.name} is older than torch {trap.since}"
        return
    if trap.mended_in and torch.__version__ >= TorchVersion(trap.mended_in):
        assert state is State.MENDED, f"trap {trap.name} is back: it was mended in torch {trap.mended_in}"
        return
    assert state is not State.MENDED, f"trap {trap.name} is mended in the installed torch: give its entry mended_in"
    assert state is State.HOLDS, f"what trap {trap.name} advises does not help on the installed torch"


def assert_shown_in_full(found: Examined) -> None:
    for width in (80, 110):
        page = Console(width=width, file=io.StringIO(), record=True)
        page.print(in_full(found))
        shown, trap = page.export_text(), found.trap
        assert max(map(len, shown.splitlines())) <= width
        assert f"Trap {trap.number}: {trap.name}  {trap.severity.value}" in shown
        assert all(place.excerpt().owner in shown for place in trap.places)


def test_all_are_shown_in_full_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [find_trap("mask_polarity"), find_trap("gqa_falls_back")]
    monkeypatch.setattr(command, "TRAPS", few)
    page = CliRunner().invoke(app, ["traps", "--all"], env={"COLUMNS": "80"}).stdout
    assert re.findall(r"^Trap \d+: (\w+)", page, re.MULTILINE) == [trap.name for trap in few]


def test_the_list_is_what_was_found_before_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "examine", lambda trap: pytest.fail(f"{trap.name} was run"))
    shown = CliRunner().invoke(app, ["traps"], env={"COLUMNS": "80"}).stdout
    assert re.findall(r"^ *(\d+) +(\w+) .* holds$", shown, re.MULTILINE).count(("1", "mask_polarity")) == 1
    assert len(re.findall(" described$", shown, re.MULTILINE)) == sum(bool(trap.needs) for trap in TRAPS)
    monkeypatch.setattr(states, "INSTALLED", "1.0.0")
    monkeypatch.setattr(states.state_of, "__defaults__", ("1.0.0",))
    assert re.search(r"mask_polarity .* not tried$", CliRunner().invoke(app, ["traps"]).stdout, re.MULTILINE)


def test_what_was_run_is_recorded_beside_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TRAPS", [find_trap("mask_polarity"), find_trap("gqa_falls_back")])
    monkeypatch.setattr(states, "INSTALLED", "3.0.0")
    monkeypatch.setattr(command, "FILE", tmp_path / "states.json")
    assert "2 traps" in CliRunner().invoke(app, ["traps", "--record"]).stdout
    versions = [*states.checked_on(find_trap("mask_polarity")), "3.0.0"]
    assert json.loads((tmp_path / "states.json").read_text()) == {"mask_polarity": {"holds": versions}}


def test_a_trap_that_takes_a_device_is_described_and_not_run() -> None:
    shown = CliRunner().invoke(app, ["traps", "gqa_falls_back"], env={"COLUMNS": "100"}).stdout
    assert "Trap 70: gqa_falls_back  slow; described" in shown
    assert "What happens (not run: it needs a CUDA device)" in shown
    assert "enable_gqa=True)" in shown
    assert "It needs a CUDA device." in shown


def test_numbers_and_names_are_unique() -> None:
    assert len({trap.number for trap in TRAPS}) == len({trap.name for trap in TRAPS}) == len(TRAPS)


def references() -> Iterator[tuple[str, str]]:
    for file in sorted(path for room in ("scratch", "builtin") for path in (ROOT / room).glob("*.py")):
        text = file.read_text(encoding="utf-8")
        found = REFERENCE.findall(text)
        assert len(found) == len(re.findall(r"\btraps?\b", text)), f"{file.name} points at a trap in another form"
        for names in found:
            yield from ((file.name, name) for name in re.findall("`([^`]*)`", names))


def test_docstrings_point_at_all_traps_and_at_no_others() -> None:
    found, names = set(references()), {trap.name for trap in TRAPS}
    assert {(file, name) for file, name in found if name not in names} == set()
    assert names - {name for _, name in found} == set()


def test_a_trap_that_is_told_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    trap = find_trap("mask_polarity")
    monkeypatch.setattr(type(trap), "holds", lambda *_: False)
    assert examine(trap).state is State.MENDED
    monkeypatch.undo()
    monkeypatch.setattr(type(trap), "helps", lambda *_: False)
    assert examine(trap).state is State.ADVICE_FAILS


@pytest.mark.parametrize(("category", "state"), [(FutureWarning, State.HOLDS), (UserWarning, State.MENDED)])
def test_a_warning_counts_unless_it_is_about_the_future(
    category: type[Warning], state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = find_trap("mask_polarity")
    wrong = trap.wrong

    def warning() -> object:
        warnings.warn("a word from torch", category, stacklevel=2)
        return wrong()

    monkeypatch.setattr(trap, "wrong", warning)
    assert examine(trap).state is state


@pytest.mark.parametrize("asked", ["1", "mask_polarity"])
def test_one_trap_is_shown_by_name_and_number(asked: str) -> None:
    data = json.loads(CliRunner().invoke(app, ["traps", asked, "--json"]).stdout)
    assert (data["number"], data["name"]) == (1, "mask_polarity")


@pytest.mark.parametrize(
    ("asked", "answer"), [("mask_polarty", "mask_polarity"), ("need_weights", "sidebyside explain need_weights")]
)
def test_an_unknown_trap_is_refused_with_where_to_look(asked: str, answer: str) -> None:
    result = CliRunner().invoke(app, ["traps", asked])
    assert result.exit_code == 2
    assert answer in result.stderr


@pytest.mark.parametrize(("warning", "state"), [("ResourceWarning", "holds"), ("UserWarning", "mended")])
def test_what_others_left_open_says_nothing_of_a_trap(warning: str, state: str) -> None:
    trap = TRAPS[0]
    found = examine(trap)
    assert found.state.value == "holds"
    warned = replace(found.wrong, warnings=(*found.wrong.warnings, f"{warning}: unclosed file"))
    assert replace(found, wrong=warned).state.value == state
