"""Every argument is explained, by lines that run when its example runs, and by an example whose claims hold."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention
from typer.testing import CliRunner

import scratch
from equivalence_tests.__main__ import app
from equivalence_tests.learn import terminal
from equivalence_tests.learn.excerpts import Excerpt, Place, as_typed, imports_of
from equivalence_tests.learn.explain import rendering
from equivalence_tests.learn.explain.entry import (
    BESIDE_TORCH_NN,
    BLOCKS,
    CAUSAL_MASK,
    FLEX,
    NOT_IN_TORCH,
    OWNERS,
    RMS_FUNCTION,
    SDPA,
    TRANSFORMER,
    Explanation,
    calls_of,
)
from equivalence_tests.learn.explain.registry import EXPLANATIONS, arguments_of, find_explanations
from equivalence_tests.learn.explain.rendering import traps_of
from equivalence_tests.learn.traps.registry import TRAPS
from equivalence_tests.learn.traps.running import Outcome, run

# In scratch these two are kept and have no effect: its one path for every mode is what their examples set torch's
# fast path apart from.
WITHOUT_EFFECT_BY_HAND = {"enable_nested_tensor", "mask_check"}
FUNCTIONS = {SDPA, CAUSAL_MASK, RMS_FUNCTION, *BESIDE_TORCH_NN}
IN_TORCH_NN = [owner for owner in OWNERS if owner not in FUNCTIONS and owner not in NOT_IN_TORCH]
PAGE_WIDTH = 78  # of code on a terminal of 80 columns

each_explanation = pytest.mark.parametrize("explanation", EXPLANATIONS, ids=lambda x: f"{x.owners[0]}.{x.argument}")


def taken(owner: str) -> set[str]:
    return {argument for _, signature in calls_of(owner) for argument in signature.parameters}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_argument_has_one_explanation_and_every_explanation_an_argument(owner: str) -> None:
    explained = [explanation.argument for explanation in EXPLANATIONS if owner in explanation.owners]
    assert sorted(explained) == sorted(taken(owner))


@pytest.mark.parametrize("owner", IN_TORCH_NN)
def test_arguments_of_the_installed_torch_are_explained(owner: str) -> None:
    built_in = getattr(nn, owner)
    theirs = {name for call in (built_in.__init__, built_in.forward) for name in parameters_of(call)} - {"self"}
    assert theirs <= taken(owner)


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    code: CodeType = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@cache
def run_once(example: Callable[[], None]) -> Outcome:
    return run(example)


@each_explanation
def test_the_example_runs_and_says_nothing_false(explanation: Explanation) -> None:
    outcome = run_once(explanation.example)
    assert outcome.error == ""
    # On that one release of Python, torch's compiler warns of itself.
    assert [x for x in outcome.warnings if "Python 3.13.0" not in x] == []
    assert outcome.printed
    assert not [line for line in outcome.printed if line.endswith(": False")]


@each_explanation
def test_the_example_uses_the_argument_and_fits_the_page(explanation: Explanation) -> None:
    code = as_typed(explanation.example)
    assert re.search(rf"\b{explanation.argument}\b", code)
    assert [line for line in code.splitlines() if len(line) > PAGE_WIDTH] == []


@contextmanager
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``nn`` and ``F`` mean the classes and the function of scratch."""
    with monkeypatch.context() as patch:
        for owner in IN_TORCH_NN:
            patch.setattr(nn, owner, getattr(scratch, owner))
        for owner in (SDPA, RMS_FUNCTION):
            patch.setattr(F, owner, getattr(scratch, owner))
        for owner in (FLEX, BLOCKS):
            patch.setattr(flex_attention, owner, getattr(scratch, owner))
        yield


@contextmanager
def lines_run() -> Iterator[set[tuple[str, int]]]:
    """Collect (file, line) of what runs in scratch."""
    seen: set[tuple[str, int]] = set()

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("scratch."):
            return None
        if event == "line":
            seen.add((frame.f_globals["__name__"].replace(".", "/") + ".py", frame.f_lineno))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield seen
    finally:
        sys.settrace(before)


@each_explanation
def test_by_hand_the_example_prints_the_same_and_runs_the_quoted_lines(
    explanation: Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with by_hand(monkeypatch), lines_run() as seen:
        ours = run(explanation.example)
    assert ours.error == ""
    same = ours.printed == run_once(explanation.example).printed
    assert same is (explanation.argument not in WITHOUT_EFFECT_BY_HAND)
    quoted = [place.excerpt() for place in explanation.places]
    assert quoted
    assert [excerpt.where for excerpt in quoted if not seen & lines_of(excerpt)] == []


def lines_of(excerpt: Excerpt) -> set[tuple[str, int]]:
    return {(excerpt.file, excerpt.line + offset) for offset in range(len(excerpt.code.splitlines()))}


def test_a_place_that_is_not_there_any_more_is_told() -> None:
    with pytest.raises(LookupError, match=r"scratch.masks.causal has 0 statements with 'offset = None'"):
        Place(scratch.masks.causal, "offset = None").excerpt()


def test_a_name_of_its_own_is_not_imported() -> None:
    def example() -> None:
        torch, nn = 1, 2
        print(torch, nn, F.relu)

    assert imports_of(example) == ["from torch.nn import functional as F"]


def test_long_code_is_folded_and_never_cut() -> None:
    code, written = "answer(" * 8 + ")" * 8, io.StringIO()
    Console(width=20, file=written).print(terminal.code_block(code, first_line=7))
    assert "".join(written.getvalue().split()) == f"7{code}"


def test_traps_concern_arguments_that_exist() -> None:
    names = {explanation.argument for explanation in EXPLANATIONS}
    full_names = {f"{owner}.{argument}" for owner in OWNERS for argument in taken(owner)}
    assert {concern for trap in TRAPS for concern in trap.concerns} <= names | full_names
    for trap in TRAPS:
        assert any(trap in traps_of(explanation) for explanation in EXPLANATIONS), trap.name


class TestCommand:
    @pytest.fixture(autouse=True)
    def examples_run_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rendering, "run", run_once)

    def ask(self, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "80"})

    @pytest.mark.parametrize("argument", sorted({explanation.argument for explanation in EXPLANATIONS}))
    def test_each_argument_is_shown(self, argument: str) -> None:
        page = self.ask(argument).stdout
        assert max(map(len, page.splitlines())) <= 80
        for explanation in find_explanations(argument):
            assert all(usage in page for usage in explanation.usages)
            assert all(place.excerpt().owner in page for place in explanation.places)
            assert all(trap.name in page for trap in traps_of(explanation))

    def test_one_class_is_shown_if_it_is_named(self) -> None:
        page = self.ask("is_causal", "--of", SDPA).stdout
        assert "scaled_dot_product_attention(..., is_causal=False)" in page
        assert "MultiheadAttention" not in page

    def test_without_an_argument_all_are_listed(self) -> None:
        page = self.ask().stdout
        assert all(f"{explanation.argument} " in page for explanation in EXPLANATIONS)
        of_one = self.ask("--owner", TRANSFORMER).stdout
        named = [explanation.argument for explanation in arguments_of(TRANSFORMER)]
        assert [
            line.split()[0] for line in of_one.splitlines() if line.split()[:1] and line.split()[0] in named
        ] == named

    def test_json_holds_what_the_page_shows(self) -> None:
        (data,) = json.loads(self.ask("need_weights", "--json").stdout)
        assert data["usages"] == ["MultiheadAttention.forward(..., need_weights=True)"]
        assert "need_weights_slow_path" in data["traps"]
        assert "need_weights=True:  (2, 5, 5)" in data["example"]["printed"]
        assert data["scratch"][0]["code"].startswith("if need_weights")
        assert data["torch"] == torch.__version__
        assert len(json.loads(self.ask("--json").stdout)) == len(EXPLANATIONS)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["is_casual"], "there is no argument 'is_casual': did you mean is_causal"),
            (["zzz"], "there is no argument 'zzz': `sidebyside explain` lists them all."),
            (["nhed", "--of", TRANSFORMER], "`sidebyside explain --of Transformer` lists them all."),
            (["nhead", "--of", "Transfomer"], "there is no class or function 'Transfomer': did you mean Transformer"),
            (
                ["need_weights", "--of", TRANSFORMER],
                "Transformer has no argument 'need_weights': MultiheadAttention has.",
            ),
            (
                [TRANSFORMER],
                "'Transformer' is no argument but has some: `sidebyside explain --of Transformer` lists them.",
            ),
        ],
    )
    def test_what_is_not_there_is_refused_with_near_names(self, arguments: list[str], message: str) -> None:
        result = self.ask(*arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
