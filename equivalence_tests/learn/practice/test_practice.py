"""Tests of the exercises: each can be solved, each mistake gets its own name, and the folder keeps what was done."""

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.learn.practice import check
from equivalence_tests.learn.practice.cells import notebook
from equivalence_tests.learn.practice.checking import Answer, check_solution, difference, results_of_mistakes, run_calls
from equivalence_tests.learn.practice.exercise import IMPORTS, Exercise, Mistake
from equivalence_tests.learn.practice.listing import EXERCISES, find_exercise
from equivalence_tests.learn.traps.registry import find_trap

each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
PAIRS = ("padding", "causal", "dropout", "cache", "grouped")  # the same task, by hand and built in


def written(source: str, name: str, folder: Path) -> Callable[..., Any]:
    """Load a solution from a file of its own, as a learner's is."""
    file = folder / f"{name}.py"
    file.write_text(f"{IMPORTS}\n\n{source}")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def assert_names(exercise: Exercise, mistake: Mistake, folder: Path) -> None:
    answer = check_solution(exercise, written(exercise.with_mistake(mistake), exercise.name, folder))
    assert not answer.solved
    assert answer.mistake is not None, mistake.why
    assert (answer.mistake.sentence, answer.trap) == (mistake.why, mistake.trap)
    assert answer.mistake.line is not None
    right, wrong = (
        set(map(str.strip, text.splitlines())) for text in (exercise.source, exercise.with_mistake(mistake))
    )
    assert answer.mistake.line.text in (wrong - right or wrong - {exercise.source.splitlines()[0]})


@each_exercise
def test_the_solution_solves_it(exercise: Exercise) -> None:
    answer = check_solution(exercise, exercise.solution)
    assert answer.solved, str(answer)


@each_exercise
def test_every_mistake_gives_numbers_of_its_own(exercise: Exercise) -> None:
    assert len(exercise.mistakes) == 5
    for mistake in exercise.mistakes:
        assert exercise.source.count(mistake.old) == 1, mistake.old
        assert not mistake.trap or find_trap(mistake.trap).name == mistake.trap
    outcomes = [run_calls(exercise, exercise.solution), *results_of_mistakes(exercise.name)]
    assert all(difference(one, other) for one, other in itertools.combinations(outcomes, 2))


@pytest.mark.parametrize("name", PAIRS)
def test_by_hand_and_built_in_are_one_task(name: str) -> None:
    by_hand, built_in = find_exercise(name), find_exercise(f"{name}_builtin")
    assert not difference(run_calls(by_hand, by_hand.solution), run_calls(by_hand, built_in.solution))


@pytest.mark.parametrize(
    "exercise", [x for x in EXERCISES if x.is_built_in or x.name == "causal"], ids=lambda x: x.name
)
def test_every_mistake_is_named_on_its_line(exercise: Exercise, tmp_path: Path) -> None:
    for mistake in exercise.mistakes:
        assert_names(exercise, mistake, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("exercise", [x for x in EXERCISES if not x.is_built_in], ids=lambda x: x.name)
def test_every_mistake_by_hand_is_named_on_its_line(exercise: Exercise, tmp_path: Path) -> None:
    for mistake in exercise.mistakes:
        assert_names(exercise, mistake, tmp_path)


def test_another_way_to_write_it_is_understood(tmp_path: Path) -> None:
    source = (
        "def grouped(q, k, v):\n"
        "    batch, heads, queries, width = q.shape\n"
        "    q = q.view(batch, {groups}, queries, width)\n"
        "    weights = torch.einsum('{scores}', q, k).div(width ** 0.5).softmax(-1)\n"
        "    return torch.einsum('{context}', weights, v).reshape(batch, heads, queries, -1)\n"
    )
    right = source.format(groups="k.size(1), -1", scores="bghqd,bgkd->bghqk", context="bghqk,bgkd->bghqd")
    tiled = source.format(groups="-1, k.size(1)", scores="bhgqd,bgkd->bhgqk", context="bhgqk,bgkd->bhgqd")
    grouped = find_exercise("grouped")
    assert check_solution(grouped, written(right, "grouped", tmp_path)).solved
    answer = check_solution(grouped, written(tiled, "grouped", tmp_path))
    assert answer.mistake is not None
    assert answer.mistake.sentence == grouped.mistakes[0].why


def test_a_mistake_that_is_not_known_is_shown_by_its_numbers_and_by_the_checker() -> None:
    def scale(q: Any, k: Any, v: Any) -> Any:
        return (q @ k.mT / 3).softmax(-1) @ v

    answer = check("scale", scale)
    assert (answer.solved, answer.mistake) == (False, None)
    assert [finding.name for finding in answer.findings] == ["scale_wrong"]
    assert "but should be" in answer.difference


def test_scores_that_overflow_are_tried() -> None:
    def scale(q: Any, k: Any, v: Any) -> Any:
        weights = (q @ k.mT / q.size(-1) ** 0.5).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    assert "scores of many hundreds: output[0, 0, 0, 0] = nan" in check("1", scale).difference


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return nothing", "NameError: name 'nothing' is not defined"),
        ("return None", "None is not a tensor"),
        ("return q, k", "2 values were returned, but there should be 1: output"),
        ("return q[0]", "output has shape (3, 5, 11) instead of shape (2, 3, 5, 11)"),
        ("...", "The blank is not filled in"),
        ("scores = ...\n    return scores", "The blank is not filled in"),
    ],
)
def test_what_is_no_answer_is_told(body: str, said: str, tmp_path: Path) -> None:
    answer = check("scale", written(f"def scale(q, k, v):\n    {body}\n", "scale", tmp_path))
    assert not answer.solved
    assert said in answer.difference


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["practice", *arguments], env={"COLUMNS": "80"})


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_exercise_is_begun_checked_and_solved(empty_folder: Path) -> None:
    listed = run()
    assert "0 of 20 solved" in listed.stdout
    assert max(map(len, listed.stdout.splitlines())) <= 80
    file = empty_folder / "practice" / "01_scale.py"
    begun = file.read_text()
    assert begun.startswith('"""1. Scale the scores.')
    assert "    scores = ...\n" in begun

    unfilled = run("check")
    assert unfilled.exit_code == 1
    assert "not filled in" in unfilled.stdout

    file.write_text(begun.replace("...\n    return", "q @ k.transpose(-2, -1) / q.size(-1)\n    return"))
    wrong = run("check", "scale")
    assert wrong.exit_code == 1
    for said in ("but should be", "square root of head_dim", "practice/01_scale.py:", "/ q.size(-1)", "proof"):
        assert said in wrong.stdout
    assert run("scale").exit_code == 0
    assert "q.size(-1)" in file.read_text()  # what was begun stays

    file.write_text(begun.replace("...\n    return", "q @ k.transpose(-2, -1) / q.size(-1) ** 0.5\n    return"))
    right = run("check", "1")
    assert right.exit_code == 0, right.output
    assert "SOLVED" in right.stdout
    assert "sidebyside practice scale_builtin" in right.stdout
    assert json.loads((empty_folder / "practice" / "progress.json").read_text()) == {"solved": ["scale"]}
    assert "1 of 20 solved" in run().stdout
    assert (empty_folder / "practice" / "02_scale_builtin.py").exists()


def test_a_solution_is_shown_with_the_lines_of_the_textbook(empty_folder: Path) -> None:
    shown = run("solution", "scale").stdout
    assert "scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))" in shown
    assert "scratch/functional.py" in shown
    assert not list(empty_folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "written_before", "said"),
    [
        (["grouping"], {}, "there is no exercise 'grouping': did you mean grouped?"),
        (["21"], {}, "there is no exercise '21'"),
        (["check", "causal"], {}, "`sidebyside practice causal` writes it"),
        (["scale", "causal"], {}, "expected check or solution before 'causal', got 'scale'"),
        (["scale", "--notebook"], {}, "--notebook holds all exercises, got 'scale' as well"),
        (["--notebook"], {"practice.ipynb": "{}"}, "exists already"),
        ([], {"progress.json": "[]"}, 'must hold {"solved": [names]}'),
        (["check", "scale"], {"01_scale.py": "def scale(:"}, "line 1 cannot be imported: SyntaxError"),
        (["check", "scale"], {"01_scale.py": "import nowhere"}, "ModuleNotFoundError"),
        (["check", "scale"], {"01_scale.py": "x = 1"}, "must define the function scale"),
    ],
)
def test_bad_input_is_told(arguments: list[str], written_before: dict[str, str], said: str, empty_folder: Path) -> None:
    (empty_folder / "practice").mkdir()
    for name, text in written_before.items():
        (empty_folder / "practice" / name).write_text(text)
    result = run(*arguments)
    assert result.exit_code == 2
    plain = " ".join(result.stderr.replace("│", " ").split())
    assert said in plain


def test_the_notebook_runs(empty_folder: Path) -> None:
    assert run("--notebook").exit_code == 0
    text = (empty_folder / "practice" / "practice.ipynb").read_text()
    assert text == notebook()
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 1 + 2 * len(EXERCISES)
    session: dict[str, Any] = {}
    exec(cells[0].split("\n", 1)[1], session)  # without the installation
    for blank, checked in zip(cells[1:5:2], cells[2:5:2], strict=True):
        exec(blank, session)
        answer = eval(checked, session)
        assert isinstance(answer, Answer)
        assert not answer.solved
