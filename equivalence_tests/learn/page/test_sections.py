import ast
import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scratch
from equivalence_tests import randomize_parameters
from equivalence_tests.learn.explain.entry import ATTENTION, SDPA, calls_of
from equivalence_tests.learn.page import beside, exercises, gallery, speed, steps_attention, switches
from equivalence_tests.learn.page.code import coloured_lines
from equivalence_tests.learn.page.reading import PageReader, printed_plainly
from equivalence_tests.learn.page.switch_table import ATTENTION_SWITCHES, SDPA_SWITCHES, Switch
from equivalence_tests.learn.traps import TRAPS, examine
from scratch import masks

SEVENTH = [
    pytest.param(trap, marks=() if place % 7 == 0 else pytest.mark.thorough, id=trap.name)
    for place, trap in enumerate(TRAPS)
]
EXTENSIONS = {"qk_head_dim", "v_head_dim", "cache"}


@pytest.fixture(scope="module")
def boards() -> tuple[switches.Board, ...]:
    return switches.switch_data()


def grids(x: Tensor) -> list[list[list[str]]]:
    x = x.detach().double()
    tables = x.flatten(0, -3) if x.dim() > 2 else x[None]
    return [[[printed_plainly(number) for number in row] for row in rows] for rows in tables.tolist()]


def run_as_shown(code: str, package: Any) -> dict[str, Any]:
    """Run the code of a state as a reader would."""
    names = {"torch": torch, "nn": package, "F": package, "masks": masks, "randomize_parameters": randomize_parameters}
    torch.manual_seed(0)
    exec(code, names)
    return {name: names[name] for name in ("output", "weights") if isinstance(names.get(name), Tensor)}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_every_number_of_a_state_is_what_its_code_gives(boards: tuple[switches.Board, ...], page: PageReader) -> None:
    for board in boards:
        for state in board.states:
            assert_shows_what_its_code_gives(board, state, page)


def assert_shows_what_its_code_gives(board: switches.Board, state: switches.State, page: PageReader) -> None:
    place = f"switches-{board.name}-{state.key}"
    package: Any = nn if board.name == "mha" else F
    assert state.code in page.texts[place]
    if state.error:
        with pytest.raises(Exception, match=re.escape(state.error.partition(": ")[2])):
            run_as_shown(state.code, package)
        assert state.error in page.texts[place]
        assert not page.numbers(place)
        return
    found = run_as_shown(state.code, package)
    numbers = [x for x in found.values() if x.device.type != "meta"]
    expected = [grid for x in numbers for grid in grids(x)]
    if state.scratch:
        expected += [grid for x in run_as_shown(state.code, scratch).values() for grid in grids(x)]
    assert page.numbers(place) == expected, place


def test_scratch_agrees_or_the_page_says_so(boards: tuple[switches.Board, ...], page: PageReader) -> None:
    for name, state in ((board.name, state) for board in boards for state in board.states):
        place = f"switches-{name}-{state.key}"
        if state.scratch_error and not state.error:
            assert state.scratch_error in page.texts[place], place
        elif not state.error:
            assert state.agreement.startswith("< ") or "meta" in state.key or state.key == "device.1", place


def arguments_of(owner: str) -> set[str]:
    taken = {name for _, signature in calls_of(owner) for name in signature.parameters}
    return taken - EXTENSIONS


@pytest.mark.parametrize(("owner", "board"), [(ATTENTION, ATTENTION_SWITCHES), (SDPA, SDPA_SWITCHES)])
def test_every_argument_has_a_switch(owner: str, board: tuple[Switch, ...]) -> None:
    shown = {name for switch in board for name in switch.argument.split(", ")} - {"mode"}
    assert shown == arguments_of(owner)
    assert all(len(switch.options) > 1 for switch in board)


def test_each_option_alone_and_the_pairs_of_the_traps_are_there(boards: tuple[switches.Board, ...]) -> None:
    (mha, sdpa) = boards
    for board in boards:
        keys = {state.key for state in board.states}
        for switch in board.switches:
            name = switch.argument.replace(", ", "_")
            assert {f"{name}.{option}" for option in range(1, len(switch.options))} <= keys
    assert "add_bias_kv.1-is_causal.1" in {state.key for state in mha.states}  # is_causal_with_extra_tokens
    assert "attn_mask.1-is_causal.1" in {state.key for state in sdpa.states}  # sdpa_mask_and_causal
    assert "embed_dim.1-is_causal.1" not in {state.key for state in mha.states}


def test_the_ways_of_torch_are_told_apart(boards: tuple[switches.Board, ...]) -> None:
    ways = {f"{board.name} {state.key}": state.path for board in boards for state in board.states}
    assert ways["mha defaults"].startswith("the plain path")
    assert ways["mha need_weights.1"].startswith("a fused kernel")
    assert ways["mha batch_first.1-mode.1"].startswith("the fast path")
    assert ways["sdpa dropout_p.1"].startswith("the plain path")


def test_each_equation_of_the_paper_stands_beside_torchs_line() -> None:
    steps = {step.name: step for step in steps_attention.attention_view().steps}
    for name, line in {
        "scores": "scores = (q * scale) @ k.transpose(-2, -1)",
        "masked_scores": "masked_scores = ",
        "weights": "weights = softmax(masked_scores)",
        "context": "context = weights @ v",
    }.items():
        (ours,), (theirs,) = steps[name].scratch.quotes, steps[name].torch.quotes
        assert (ours.excerpt.file, ours.excerpt.owner) == ("scratch/functional.py", "attention")
        assert ours.excerpt.code.startswith(line)
        assert theirs.excerpt.owner == "multi_head_attention_forward"


@pytest.fixture(scope="module")
def twins() -> dict[str, beside.Twin]:
    return {twin.name: twin for twin in beside.twins()}


def test_every_line_of_every_file_is_beside_its_twin(twins: dict[str, beside.Twin]) -> None:
    files = {path.stem for path in Path(inspect.getfile(scratch)).parent.glob("*.py")} - {
        "__init__",
        "__main__",
        "documentation",
    }
    assert set(twins) == files
    for twin in twins.values():
        for package in ("scratch", "builtin"):
            path = beside.FOLDERS[package] / f"{twin.name}.py"
            if not path.exists():
                assert not twin.has_twin
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            for statement in filter(beside.is_preamble, ast.parse("\n".join(lines)).body):
                for number in range(statement.lineno, (statement.end_lineno or 0) + 1):
                    lines[number - 1] = ""
            wanted = [line.strip() for line in lines if line.strip()]
            chunks = [chunk for unit in twin.units if getattr(unit, package) for chunk in unit.chunks]
            shown = "\n".join(str(getattr(chunk, package).striptags()) for chunk in chunks)
            told = ("scratch", package)  # what builtin says beyond scratch, and what it says too
            halves = [half for unit in twin.units for name in told if (half := getattr(unit, name))]
            docstrings = "\n".join(f"{half.first}\n{half.rest}" for half in halves)
            both = [line.strip() for line in f"{shown}\n{docstrings}".splitlines()]
            flat = "".join("".join(both).split())
            missing = [x for x in wanted if "".join(x.strip('"r').split()) not in flat]
            assert not missing, (package, twin.name, missing[:3])


def test_lines_that_are_called_the_same_are_the_same(twins: dict[str, beside.Twin]) -> None:
    for twin in twins.values():
        for unit in twin.units:
            for chunk in unit.chunks:
                same = [line.strip() for line in chunk.scratch.striptags().split("\n")]
                if chunk.same:
                    assert same == [line.strip() for line in chunk.builtin.striptags().split("\n")]


def test_names_of_torch_lead_to_nothing_of_ours() -> None:
    code = "from torch.nn import functional as F\nF.scale(self.scale, torch.nn.scale, masks.scale)"
    ours = {"functional", "masks", "scale"}
    linked = "".join(coloured_lines(code, lambda name: name if name in ours else ""))
    assert re.findall(r'href="#(\w+)"', linked) == ["masks", "scale"]


def test_names_lead_to_their_definitions(page: PageReader) -> None:
    assert "code-paths-softmax" in page.ids
    assert page.links.count("#code-paths-softmax") >= 2


def test_every_builder_of_masks_is_drawn_as_it_draws_itself(html: str) -> None:
    drawn = gallery.drawn_masks()
    for name in gallery.builders():
        assert any(f"{name}(" in mask.call for mask in drawn), name
    for mask in drawn:
        expected = gallery.evaluate(mask.call)
        assert torch.equal(torch.tensor(mask.cells), expected)
        label = "".join(
            f"{mask.rows} {i}: " + "".join(f"{int(cell)} " for cell in row) for i, row in enumerate(expected.tolist())
        )
        assert f'{label}"' in html, mask.call


def test_the_gallery_misses_no_builder() -> None:
    assert {"causal", "sliding_window", "from_lengths", "from_token_ids"} <= set(gallery.builders())
    others = set(masks.__all__) - set(gallery.builders())
    assert all(name.startswith(("to_", "from_module", "from_score", "draw")) for name in others), others


def test_every_trap_is_there_with_its_severity(page: PageReader) -> None:
    for trap in TRAPS:
        text = page.texts[f"trap-{trap.name}"]
        assert trap.title in text
        assert trap.severity.value in text


@pytest.mark.parametrize("trap", SEVENTH)
def test_a_trap_shows_what_it_prints_now(trap: Any, page: PageReader) -> None:
    text, finding = page.texts[f"trap-{trap.name}"], examine(trap)
    for outcome in (finding.wrong, finding.right):
        for line in outcome.lines:
            assert line.rstrip() in text
    if finding.state.value != "holds":
        assert finding.state.value in text


@pytest.mark.parametrize(("defect", "convention"), exercises.EXERCISES, ids=lambda x: x.__name__)
def test_an_exercise_computes_what_its_class_in_the_zoo_does(defect: Any, convention: Any) -> None:
    """The code that is shown was put together: it has to be the broken class all the same."""
    from_zoo = exercises._run(type("Broken", (defect, convention), {}))
    with exercises.loaded(exercises.source_of(defect, convention), "exercise") as broken:
        shown = exercises._run(broken)
    for name, x in from_zoo.items():
        assert torch.equal(shown[name], x)
    assert not torch.allclose(from_zoo["output"], exercises._run(convention)["output"])


def test_exercises_show_their_numbers_a_guilty_line_and_a_report_that_finds_it(page: PageReader, html: str) -> None:
    assert len(exercises.EXERCISES) >= 12
    for number, (defect, convention) in enumerate(exercises.EXERCISES, start=1):
        right, wrong = exercises._run(convention), exercises._run(type("Broken", (defect, convention), {}))
        expected = []
        for name, x in wrong.items():
            is_right = torch.allclose(x, right[name], rtol=0, atol=1e-12)
            expected += grids(x) + ([] if is_right else grids(right[name]))
        assert page.numbers(f"mistakes-{number}") == expected
        assert "DEVIATES" in page.texts[f"mistakes-{number}"]
    assert html.count("<li data-guilty>") >= len(exercises.EXERCISES)


def test_every_measurement_of_a_chart_is_in_the_files(page: PageReader) -> None:
    files = [speed.RESULTS / speed.SHOWN / "results.jsonl"]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    timed = {(row["contender"], speed.duration(row["median_us"])) for row in rows if row["status"] == "timed"}
    timed = {(name, time) for name, time in timed if name not in speed.LEFT_OUT}
    charts, colours = speed.speed_data()["charts"], speed.speed_data()["colours"]
    assert charts
    assert max(colours.values()) < 9  # so many the page draws differently
    singles = [single.answer for single in speed.speed_data()["singles"]]
    found = [row for table in page.numbers("speed-others") for row in table]
    assert [row[:2] for row in found] == [[row.time, row.ratio] for answer in singles for row in answer.rows]
    assert timed == {
        (row.contender, row.time)
        for answers in (singles, *(chart.answers for chart in charts))
        for answer in answers
        for row in answer.rows
    }
    for chart in charts:
        assert len(chart.answers) > 1
        expected = [[row.time, row.ratio, row.memory] for answer in chart.answers for row in answer.rows]
        found = [row for table in page.numbers(f"speed-{chart.name}") for row in table]
        assert [row[:2] for row in found] == [row[:2] for row in expected]
        assert {(row.contender, row.time) for answer in chart.answers for row in answer.rows} <= timed
        for answer in chart.answers:
            assert answer.sentence in page.texts[f"speed-{chart.name}"]


def test_answers_name_the_fastest_or_the_built_in() -> None:
    for chart in speed.speed_data()["charts"]:
        for answer in chart.answers:
            times = {
                line.contender: point.microseconds
                for line in chart.lines
                for point in line.points
                if point.length == answer.length
            }
            fastest = min(times, key=lambda contender: times[contender])
            as_fast = times["builtin"] <= 1.05 * times[fastest]
            whose = "the built-in" if as_fast else fastest
            time = speed.duration(times["builtin"] if as_fast else times[fastest])
            assert f", {whose}: it takes {time}, " in answer.sentence


def test_an_answer_without_the_built_in_says_so() -> None:
    row = {"contender": "scratch", "median_us": 7.0, "peak_memory_bytes": None, "unstable": ""}
    answer = speed._answer(64, 0.0, [row])
    assert answer.sentence == "At length 64, scratch: it takes 7 µs, and the built-in does not run."
    assert answer.rows[0].ratio == ""


def test_charts_of_one_name_are_told_apart(tmp_path: Path) -> None:
    (file,) = speed.RESULTS.glob("cpu/results.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    wider = [row | {"case": row["case"] | {"embed_dim": 1024}} for row in rows]
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "results.jsonl").write_text("\n".join(map(json.dumps, rows + wider)), encoding="utf-8")
    charts = speed.speed_data(tmp_path)["charts"]
    assert len({chart.name for chart in charts}) == len(charts) == 2 * len(speed.speed_data()["charts"])


def test_labels_of_a_chart_do_not_cover_each_other() -> None:
    for chart in speed.speed_data()["charts"]:
        heights = sorted(line.label_y for line in chart.lines)
        assert all(b - a > 0.99 * speed.LABEL_HEIGHT for a, b in itertools.pairwise(heights))


def test_without_measurements_the_section_says_so(tmp_path: Path) -> None:
    assert "part of the repository" in speed.lacks(tmp_path)
    assert speed.lacks() == ""
