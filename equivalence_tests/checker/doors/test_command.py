"""Tests of ``sidebyside verify`` as a user runs it: what it prints, writes and exits with."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from equivalence_tests.__main__ import app
from equivalence_tests.checker.doors import command
from equivalence_tests.checker.doors.sandbox import Limits, Request
from equivalence_tests.checker.reporting.exports import to_github, to_json, to_junit, to_sarif
from equivalence_tests.checker.reporting.findings import CheckResult, Exercise, Finding, Proof, Verdict
from equivalence_tests.checker.reporting.lines import CodeLine
from equivalence_tests.checker.reporting.report import Report

SCALE = Finding(
    "scale_missing",
    "scale",
    "The scores are not scaled.",
    "scores = q kᵀ",
    "scores = q kᵀ / sqrt(head_dim)",
    "Divide by sqrt(head_dim).",
    (CodeLine("model.py", 31, "return self.attend(x)", "forward"), CodeLine("model.py", 12, "s = q @ k.mT", "attend")),
    Proof(3e-16, 0.8, 20),
    on_purpose_in="T5",
)
CACHE = Exercise("past_key_value", False, "no call with it succeeded: KeyError: 'k'")


def report(target: str, verdict: Verdict) -> Report:
    made = Report(target, "multi-head attention", verdict, seconds=0.5)
    made.findings = [SCALE] if verdict == "deviates" else []
    made.coverage = [CACHE] if verdict == "partial" else [Exercise("mask", True)]
    made.reason = "Its forward answered:\n  KeyError: 'k'" if verdict == "unchecked" else ""
    made.checks = [CheckResult("check_gradients", "failed" if verdict == "deviates" else "passed", "they differ")]
    return made


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command with a worker that gives the verdicts in turn."""

    def run(*arguments: str, verdicts: Sequence[Verdict], columns: int = 100) -> Result:
        def answers(requests: Sequence[Request], limits: Limits, progress: object) -> Iterator[list[Report]]:
            assert limits.cpu_seconds == 120.0
            for request, verdict in zip(requests, verdicts, strict=True):
                yield [report(request.target, verdict)]

        monkeypatch.setattr(command, "checked", answers)
        return CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": str(columns)})

    return run


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (["equal"], 0),
        (["deviates"], 1),
        (["unchecked"], 2),
        (["partial"], 3),
        (["equal", "partial"], 3),
        (["partial", "unchecked"], 2),
        (["unchecked", "deviates", "equal"], 1),
    ],
)
def test_the_exit_status_is_that_of_the_worst(
    verdicts: list[Verdict], status: int, answered: Callable[..., Result]
) -> None:
    targets = [f"model.py:A{number}" for number in range(len(verdicts))]
    assert answered(*targets, verdicts=verdicts).exit_code == status
    allowed = answered(*targets, "--allow-partial", verdicts=verdicts)
    assert allowed.exit_code == (0 if status == 3 else status)


def test_the_finding_comes_first_and_one_screen_holds_it(answered: Callable[..., Result]) -> None:
    lines = answered("model.py:A", verdicts=["deviates"], columns=80).stdout.splitlines()
    assert lines[0].split() == ["DEVIATES", "model.py:A", "(multi-head", "attention)"]
    text = "\n".join(lines)
    for part in (
        "The scores are not scaled.",
        "model.py:12 s = q @ k.mT",
        "called from model.py:31",
        "Divide by sqrt(head_dim).",
        "to 3e-16 on 20 fresh inputs",
        "on purpose in",
    ):
        assert part in " ".join(text.split()), text
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in str(report("a", "deviates")).splitlines())


def test_of_several_the_table_comes_first(answered: Callable[..., Result]) -> None:
    printed = answered("a.py:A", "b.py:B", "c.py:C", verdicts=["equal", "deviates", "partial"]).stdout
    table, _, rest = printed.partition("DEVIATES")
    for word in ("a.py:A", "scale_missing", "not run: past_key_value"):
        assert word in table
    assert "EQUAL, as far as it ran  c.py:C" in rest
    assert "a.py:A" not in rest


def test_the_table_says_what_the_code_answered(answered: Callable[..., Result]) -> None:
    table = answered("a.py:A", "b.py:B", verdicts=["equal", "unchecked"]).stdout
    assert "Its forward answered: KeyError: 'k'" in " ".join(table.split())


def test_a_proof_among_several_says_that_the_others_are_put_right_too() -> None:
    made = report("a.py:A", "deviates")
    assert "With the right value on this line" in str(made)
    made.findings *= 2
    assert str(made).count("here and at the other findings") == 2
    made.findings = [SCALE, replace(SCALE, where="layers.0")]  # another attention
    assert "here and at the other findings" not in str(made)


def test_reports_are_written_in_every_form(tmp_path: Path, answered: Callable[..., Result]) -> None:
    names = {option: tmp_path / f"report.{option}" for option in ("json", "junit", "sarif")}
    options = [word for option, path in names.items() for word in (f"--{option}", str(path))]
    printed = answered("a.py:A", "b.py:B", *options, "--github", verdicts=["deviates", "unchecked"]).stdout
    data = json.loads(names["json"].read_text())
    assert [data[0][key] for key in ("target", "verdict", "exit_status")] == ["a.py:A", "deviates", 1]
    assert data[0]["findings"] == json.loads(json.dumps([asdict(SCALE)]))
    assert data[1]["exit_status"] == 2
    first, second = ElementTree.fromstring(names["junit"].read_text())
    assert [case.get("name") for case in first] == ["scale_missing"]  # the checks fail because of it
    assert (first.get("failures"), second.get("errors")) == ("1", "1")
    (run,) = json.loads(names["sarif"].read_text())["runs"]
    (place,) = run["results"][0]["locations"]
    assert place["physicalLocation"]["region"]["startLine"] == 12
    assert run["results"][0]["ruleId"] == run["tool"]["driver"]["rules"][0]["id"] == "scale_missing"
    assert "::error file=model.py,line=12,title=scale_missing::The scores are not scaled." in printed
    assert "::warning title=could not be checked::b.py:B: Its forward answered:%0A  KeyError: 'k'" in printed


@pytest.mark.parametrize(("option", "starts"), [("--json", "[\n"), ("--junit", "<testsuites>"), ("--sarif", "{\n")])
def test_a_dash_prints_that_form_and_nothing_else(option: str, starts: str, answered: Callable[..., Result]) -> None:
    printed = answered("a.py:A", option, "-", verdicts=["deviates"]).stdout
    assert printed.startswith(starts)
    assert "DEVIATES" not in printed


def test_what_other_programs_read_is_well_formed() -> None:
    odd = replace(SCALE, stack=(CodeLine("a, b/my model.py", 3, "x", "f"),), proof=Proof(math.inf, 0.8, 20))
    deviating = Report("m.py:A", verdict="deviates", findings=[odd])
    unnamed = Report("m.py:B", verdict="deviates", reason="100 % of\x1b[31m it is wrong")
    (data,) = json.loads(to_json([deviating]), parse_constant=pytest.fail)
    assert data["findings"][0]["proof"]["error"] == "inf"
    ElementTree.fromstring(to_junit([Report("m.py:C", reason="\x1b[31mred")]))
    (run,) = json.loads(to_sarif([deviating, unnamed]))["runs"]
    assert [result["ruleId"] for result in run["results"]] == ["scale_missing", "deviates"]
    (place,) = run["results"][0]["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "a%2C%20b/my%20model.py"
    first, second = to_github([deviating, unnamed])
    assert first.startswith("::error file=a%2C b/my model.py,line=3,title=scale_missing::")
    assert second.startswith("::error title=deviates::m.py:B: 100 %25 of")


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path, answered: Callable[..., Result]) -> None:
    for option in ("--json", "--junit", "--sarif"):
        result = answered("a.py:A", option, str(tmp_path / "nowhere" / "x"), verdicts=[])
        assert result.exit_code == 2
        assert "cannot be written: No such file or directory" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "zebra"], "must be one of attention"),
        (["--intended", "no_scale"], "must be NAME=REASON"),
        (["--intended", "scale_mising=as T5"], "is it 'scale_missing'?"),
        (["--meant", "no_scale"], "must be NAME=REASON"),
        (["--json", "-", "--sarif", "-"], "only one of --json, --junit and --sarif can be -"),
        (["--template", "--inputs", "a.py:batch"], "shows the call that is worked out"),
        (["--timeout", "0"], "greater than or equal to 1"),
    ],
)
def test_bad_options_are_named(arguments: list[str], said: str, answered: Callable[..., Result]) -> None:
    result = answered("a.py:A", *arguments, verdicts=[])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--intended", "--meant"])
@pytest.mark.parametrize("other", ["--intended", "--meant"])
def test_reasons_come_from_options_and_from_a_file(
    option: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Request] = []

    def answers(requests: Sequence[Request], *_: object) -> Iterator[list[Report]]:
        seen.extend(requests)
        yield [report("a.py:A", "equal")]

    monkeypatch.setattr(command, "checked", answers)
    (tmp_path / "reasons.toml").write_text('scale_missing = "as T5"')
    arguments = ["a.py:A", f"{option}-file", str(tmp_path / "reasons.toml"), other, "own_mask=as Mistral"]
    assert CliRunner().invoke(app, ["verify", *arguments]).exit_code == 0
    assert seen[0].intended == {"scale_missing": "as T5", "own_mask": "as Mistral"}


def test_the_old_names_of_options_are_not_shown() -> None:
    shown = CliRunner().invoke(app, ["verify", "--help"], env={"COLUMNS": "200"}).stdout
    assert "--intended-file" in shown
    assert "--meant" not in shown


def test_an_empty_target_is_refused() -> None:
    result = CliRunner().invoke(app, ["verify", ""])
    assert (result.exit_code, "is empty: name a file" in result.stderr) == (2, True)


def test_a_folder_without_attention_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "there is no Python file and no notebook in" in result.stdout


def test_the_command_starts_without_torch() -> None:
    code = "import sys, equivalence_tests.checker.doors.command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_long_stack_is_folded_and_names_are_broken_at_their_joints(answered: Callable[..., Result]) -> None:
    code = f"return self.layer({', '.join(['argument'] * 15)})"
    calls = [CodeLine("model.py", number, code, "forward") for number in range(20)]
    made = report("m.py:A", "deviates")
    made.findings = [replace(SCALE, stack=(*calls, CodeLine("model.py", 99, "s = q @ k.mT", "attend")))]
    shown = str(made)
    assert [int(n) for n in re.findall(r"called from model.py:(\d+)", shown)] == [19, 18, 17, 16, 0]
    assert "... 15 more calls" in shown
    assert shown.count("argument, argument, arg") == 5
    assert shown.count("argument") < 5 * 10
    targets = ("src/models/transformer.py:MultiHeadAttention", "src/models/transformer.py:B")
    lines = answered(*targets, verdicts=["equal", "partial"], columns=50).stdout.splitlines()
    pieces = [line.split()[0] for line in lines[1 : lines.index("")] if not line.startswith(" ")]
    assert "".join(pieces) == "".join(targets)
    assert set(pieces) & {"MultiHeadAttention", "transformer.py:MultiHeadAttention"}
