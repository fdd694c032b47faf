"""Tests of ``sidebyside models``: planted mistakes are found and named, right functions are not blamed.

The logic is tested on stand-ins; what needs transformers is skipped without it.
"""

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.checker.helpers_for_tests import blocks
from equivalence_tests.checker.test_guide import GUIDE
from equivalence_tests.kernels.faults import Request
from equivalence_tests.kernels.reporting import Report, to_github, to_json, to_junit
from equivalence_tests.models import faults
from equivalence_tests.models.faults import ModelFault
from equivalence_tests.models.from_transformers import Transformers
from equivalence_tests.models.judging import UNMASKED, Runs
from equivalence_tests.models.library import Architecture, Library, Registration
from equivalence_tests.models.naming import NO_MASK
from equivalence_tests.models.planted import MISTAKES, by_scratch, planted
from equivalence_tests.models.precision import in_float64
from equivalence_tests.models.running import best_registration, judged
from equivalence_tests.models.stand_ins import StandIns, added_mask, bool_mask, own_attention

LIBRARY: Library = StandIns()
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is in the extra wild only")


@pytest.fixture(autouse=True)
def without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker watches a call in a second: one test asks it."""
    monkeypatch.setattr(faults, "read_in", lambda *_: "")


def ask(function: Any, mask: Any = bool_mask, *names: str) -> Report:
    listed = LIBRARY.architectures(names)
    return judged(LIBRARY, listed, Registration(function, mask, "mine", "bool"), Request(dtypes=("float64",)))


@pytest.mark.parametrize(
    ("function", "mask"), [(planted(), bool_mask), (own_attention, added_mask)], ids=["planted without", "own"]
)
def test_a_right_function_is_not_blamed(function: Callable[..., Any], mask: Any) -> None:
    report = ask(function, mask)
    assert not report.faults
    assert report.exit_status == 0
    assert {cell.state for cell in report.cells if cell.group != UNMASKED} == {"right"}
    assert {cell.kernel for cell in report.cells} == {one.name for one in LIBRARY.architectures()}


def test_scratch_is_right_and_says_what_it_lacks() -> None:
    report = ask(by_scratch)
    assert report.exit_status == 0
    refusing = {cell.kernel for cell in report.cells if cell.state == "refuses"}
    assert refusing == {"capped", "with sinks"}


def test_at_least_fifteen_mistakes_are_planted() -> None:
    assert len(MISTAKES) >= 15


# The mistakes that only a model with something of its own shows; the plainest decoder shows the others.
SHOWN_BY = {
    "scaling of its own": "capped",
    "window ignored": "windowed",
    "soft cap ignored": "capped",
    "sinks ignored": "with sinks",
    "position bias ignored": "biased",
    "causal in encoders": "encoder",
}


@pytest.mark.parametrize(("mistake", "words"), MISTAKES.items())
def test_a_planted_mistake_is_found_and_named(mistake: str, words: str) -> None:
    report = ask(planted(mistake), bool_mask, SHOWN_BY.get(mistake, "plain"))
    assert report.exit_status == 1
    first = report.faults[0]
    assert isinstance(first, ModelFault)
    assert words in first.name + first.cell.words
    assert "dropout" in mistake or first.where.startswith("layers.0, call ")


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ("mask ignored for one query", "static cache"),
        ("upper left", "dynamic cache"),
        ("empty slots", "static cache"),
        ("padding at the other end", "right padding"),
        ("mask added twice", "left padding"),
        ("dk scaled twice", "training"),
    ],
)
def test_the_situation_is_told(mistake: str, where: str) -> None:
    assert ask(planted(mistake), bool_mask, "plain").faults[0].cell.situation == where


def test_a_function_without_a_mask_function_sees_the_future_and_is_told_so() -> None:
    report = ask(own_attention, None)
    assert report.exit_status == 1
    assert {fault.name for fault in report.faults} == {NO_MASK}
    assert report.faults[0].advice.issue == "huggingface/transformers#45811"
    assert not any(cell.group == UNMASKED for cell in report.cells)


def test_what_a_missing_mask_function_would_do_is_no_fault() -> None:
    report = ask(own_attention, added_mask, "plain")
    assert {cell.state for cell in report.cells if cell.group == UNMASKED} == {"needs mask"}
    assert any(line.startswith("Without a mask function 5 of 5 calls are wrong") for line in report.remarks)


@pytest.mark.parametrize(("function", "expected"), [(planted(), "bool"), (own_attention, "added")])
def test_the_mask_function_that_a_function_understands_is_found(function: Any, expected: str) -> None:
    def make(function: Any, name: str) -> Registration:
        return Registration(function, LIBRARY.masks[name], "mine", name)

    assert best_registration(LIBRARY, LIBRARY.architectures(), function, make).mask_name == expected


def test_a_model_that_does_not_use_the_interface_is_named() -> None:
    deaf = Architecture("deaf", "encoder", lambda: torch.nn.Embedding(7, 3))
    report = judged(LIBRARY, [deaf], Registration(planted(), bool_mask, "mine"), Request())
    assert report.exit_status == 2
    assert any("Not judged: deaf. Their attention does not use the interface." in line for line in report.remarks)


def broken(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    return query.view(-1, 1000)


def refusing(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    raise NotImplementedError("no heads")


def narrow(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Any:
    return query.transpose(1, 2), None


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [(broken, 1, "it fails: RuntimeError"), (refusing, 2, "no heads"), (narrow, 1, "unexpected keyword argument")],
)
def test_failing_and_refusing_are_told_apart(function: Any, status: int, words: str) -> None:
    report = ask(function, bool_mask, "plain")
    assert report.exit_status == status
    assert words in report.cells[0].words


def without_gradient(module: Any, query: Tensor, *args: Any, **options: Any) -> Any:
    output, weights = planted()(module, query, *args, **options)
    return output.detach(), weights


def test_a_function_without_gradient_is_told() -> None:
    (fault,) = ask(without_gradient, bool_mask, "plain").faults
    assert (fault.cell.situation, fault.name) == ("training", "its output has no gradient")


def test_float32_is_not_asked_for_in_float64() -> None:
    def softmax_in_float32(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        output, weights = own_attention(module, query.float(), key.to(torch.float32), value, mask, **options)
        return output * torch.zeros(1).softmax(-1, dtype=torch.float32), weights

    assert ask(softmax_in_float32, added_mask, "plain").exit_status == 0


def test_reports_for_other_programs() -> None:
    report = ask(planted("heads alternate"), bool_mask, "plain")
    data = json.loads(to_json(report))
    assert data["faults"][0]["architecture"] == "plain"
    assert data["faults"][0]["where"].startswith("layers.0, call 1: 6 queries on 6 keys, 4 heads on 2")
    suites = ElementTree.fromstring(to_junit(report))
    assert int(suites[0].get("failures", 0)) == sum(cell.state == "wrong" for cell in report.cells)
    assert next(to_github(report)).startswith("::error title=attention function::plain, no mask: output off by")


def test_the_same_seed_gives_the_same_table() -> None:
    first, second = (ask(planted("scaled twice"), bool_mask, "plain").cells for _ in range(2))
    assert first == second


def test_a_model_is_left_as_it_was() -> None:
    runs = Runs(LIBRARY, LIBRARY.architectures(("plain",))[0])
    situation = LIBRARY.situations[0]
    before = runs.run(situation, None).parts["output"]
    runs.judge(situation, Registration(planted("scaling ignored"), bool_mask, "mine"), 1)
    assert torch.equal(runs.run(situation, None).parts["output"], before)


def test_the_checker_reads_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "readable.py").write_text(
        "def attend(module, query, key, value, mask, **_):\n"
        "    key, value = (x.repeat_interleave(2, 1) for x in (key, value))\n"
        "    scores = query @ key.transpose(2, 3)\n"
        "    scores = scores if mask is None else scores + mask\n"
        "    return (scores.softmax(-1) @ value).transpose(1, 2), None\n"
    )
    spec = importlib.util.spec_from_file_location("readable", tmp_path / "readable.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fault = ask(module.attend, added_mask, "plain").faults[0]
    assert "readable.py:3  scores = query @ key.transpose(2, 3)" in fault.places[-1]


def test_without_transformers_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    result = CliRunner().invoke(app, ["models", "math:sqrt"])
    assert result.exit_code == 2
    assert "sidebyside models needs transformers, which is not installed" in result.output
    assert "Traceback" not in result.output


@cache
def transformers_library() -> Transformers:
    return Transformers()


OURS = "equivalence_tests.models.planted:by_scratch"


@needs_transformers
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["missing.py:f"], "missing.py"),
        (["math:pi"], "math:pi must be a function, got a float"),
        (["math:sqrt"], "must be a function of (module, query, key, value, attention_mask, **kwargs)"),
        ([OURS, "--architecture", "lama"], "--architecture must be"),
        ([OURS, "--architecture", "gpt2", "--mask", "causal"], "--mask must be"),
    ],
)
def test_bad_input_is_one_line(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["models", *options])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@needs_transformers
@pytest.mark.parametrize("names", [("llama", "mistral"), ("bert", "bart"), ("t5", "vit")])
def test_the_attention_of_transformers_is_right(names: tuple[str, ...]) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    library = transformers_library()
    registration = library.registered(sdpa_attention_forward)
    assert registration is not None
    with in_float64():
        listed = library.architectures(names)
    report = judged(library, listed, registration, Request(quick=True))
    assert report.exit_status == 0
    assert not report.faults


@needs_transformers
def test_a_reproducer_runs_and_shows_the_fault(capsys: pytest.CaptureFixture[str]) -> None:
    library = transformers_library()
    registration = library.registration(planted("scaled twice"), library.masks["sdpa"], "mine.py:planted", "sdpa")
    with in_float64():
        listed = library.architectures(("mistral",))
    fault = judged(library, listed, registration, Request(quick=True)).faults[0]
    program = fault.program.replace("from mine import planted as attention", "")
    before = torch.get_default_dtype()
    try:
        exec(program, {"attention": registration.function})
    finally:
        torch.set_default_dtype(before)
    error = float(capsys.readouterr().out.split("tensor(")[1].split(",")[0].rstrip(")\n "))
    assert error == pytest.approx(fault.cell.wrong_parts[0].candidate_error, rel=1e-3)
    assert "MistralConfig" in program


@needs_transformers
def test_the_guide_shows_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "my_attention.py").write_text(
        "from transformers import AttentionInterface\n"
        "def my_attention_forward(module, query, key, value, attention_mask, scaling=None, **_):\n"
        "    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))\n"
        "    scores = query @ key.mT * scaling\n"
        "    scores = scores if attention_mask is None else scores + attention_mask\n"
        "    return (scores.softmax(-1) @ value).transpose(1, 2), None\n"
        "AttentionInterface.register('mine', my_attention_forward)\n"
    )
    options = ["--architecture", "llama", "--architecture", "gemma2", "--quick"]
    result = CliRunner().invoke(app, ["models", f"{tmp_path / 'my_attention.py'}:my_attention_forward", *options])
    (shown,) = (block for block in blocks(GUIDE, "text") if block.startswith("WRONG  llama"))
    assert shown in result.stdout


@needs_transformers
def test_a_function_that_its_file_registers_is_judged_as_registered(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "from transformers import AttentionInterface\n"
        "from transformers.models.llama.modeling_llama import eager_attention_forward\n"
        "def attend(*args, **kwargs):\n"
        "    return eager_attention_forward(*args, **kwargs)\n"
        "AttentionInterface.register('theirs', attend)\n"
    )
    options = ["--architecture", "llama", "--quick"]
    result = CliRunner().invoke(app, ["models", f"{tmp_path / 'theirs.py'}:attend", *options])
    assert result.exit_code == 1
    assert NO_MASK in " ".join(result.output.split())
    result = CliRunner().invoke(app, ["models", f"{tmp_path / 'theirs.py'}:attend", "--mask", "eager", *options])
    assert result.exit_code == 0, result.output
