"""The wild itself: what is counted, what may be broken, and that children stay within their limits."""

import ast
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.lines import CodeLine
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.wild.broken import rows_of_mutants
from equivalence_tests.wild.checking import Attention, attentions_in, judged_attentions, part_of
from equivalence_tests.wild.children import Limits, in_children
from equivalence_tests.wild.counting import attentions_of
from equivalence_tests.wild.models import WildModel, randomised, runnable
from equivalence_tests.wild.mutants import broken, mutants_of
from equivalence_tests.wild.operators import changes_of
from equivalence_tests.wild.transformers_models import _with_each_attention

SOURCE = """
import torch
from torch import nn

class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, 12) for _ in range(3))
        self.scale = 12**-0.5

    @torch.no_grad()
    def forward(self, x, mask=None):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores + mask
        return scores.softmax(dim=-1) @ v
"""


class Gate(nn.Module):
    """A softmax over what a layer gives, and a product with it: no attention, since no product stands before it."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(x).softmax(-1) @ x.mT @ x


class Model(nn.Module):
    def __init__(self, written: nn.Module) -> None:
        super().__init__()
        self.gate, self.first = Gate(), written
        self.second = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.gate(x), mask=torch.zeros(x.size(1), x.size(1), dtype=x.dtype).fill_diagonal_(-3.0))
        return self.second(y, y, y)[0]


def inputs(model: nn.Module) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(2, 5, 12)}]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """A model of a library of its own: its folder says what may be broken."""
    library = tmp_path / "someones"
    library.mkdir()
    (library / "written.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(library))
    yield Model(importlib.import_module("written").Written())
    sys.modules.pop("written")


@pytest.fixture
def wild_model(model: Model) -> WildModel:
    return WildModel("someones", "model", lambda: [lambda: model], inputs)


def test_an_attention_is_a_softmax_between_two_products_of_activations(model: Model) -> None:
    found = attentions_of(model, lambda: model(torch.randn(2, 5, 12)))
    assert [(one.path, one.kind) for one in found] == [("first", "softmax"), ("second", "fused")]


def test_the_call_of_an_attention_is_kept(wild_model: WildModel) -> None:
    first, second = attentions_in(wild_model)
    assert first.call.args[0].shape == second.call.args[0].shape == (2, 5, 12)
    assert "given mask" in first.variant
    assert first.call.args[0].dtype == torch.float64


def test_what_is_known_is_not_given_again(wild_model: WildModel) -> None:
    first, second = attentions_in(wild_model)
    assert [one.key for one in attentions_in(wild_model, {first.key})] == [second.key]


def test_a_checker_that_raises_counts_as_not_read(wild_model: WildModel) -> None:
    def judge(attention: Attention) -> Report:
        raise ZeroDivisionError("no heads")

    first, _ = judged_attentions(wild_model, (), None, judge)
    assert (first["verdict"], first["reason"]) == ("not read", "the checker raised ZeroDivisionError: no heads")


def test_the_parts_are_seven_to_three() -> None:
    names = [f"library.module{number}.Attention" for number in range(2000)]
    assert 0.27 < sum(part_of(name) == "held out" for name in names) / len(names) < 0.33


def test_a_model_that_cannot_be_built_says_why() -> None:
    def build() -> nn.Module:
        raise ValueError("width must be even")

    with pytest.raises(RuntimeError, match="width must be even"):
        runnable(WildModel("wild", "model", lambda: [build], inputs))


@pytest.mark.parametrize(("supported", "expected"), [(True, ["eager", "sdpa"]), (False, ["eager"])])
def test_no_model_uses_an_attention_that_it_does_not_support(supported: bool, expected: list[str]) -> None:
    model: Any = nn.Linear(2, 3)
    model.config, model._supports_sdpa = SimpleNamespace(), supported
    assert list(_with_each_attention(model)) == expected
    assert model.config._attn_implementation_internal == expected[-1]


def test_parameters_are_moved_off_zero_and_one() -> None:
    norm = nn.LayerNorm(7)
    randomised(norm)
    assert (norm.weight - 1).abs().min() > 0
    assert norm.bias.abs().min() > 0


def test_mutants_change_the_output_and_are_taken_out_again(wild_model: WildModel) -> None:
    attention = next(attentions_in(wild_model))
    right = attention.module(*attention.call.args, **attention.call.kwargs)
    kinds = set()
    for mutant in mutants_of(attention, seed=0, most=40):
        kinds.add(mutant.operator.name)
        with broken(attention, mutant):
            wrong = attention.module(*attention.call.args, **attention.call.kwargs)
        assert (right - wrong).abs().max() > 1e-6, mutant
        assert torch.equal(attention.module(*attention.call.args, **attention.call.kwargs), right)
    assert {"drop scale", "drop mask", "wrong mask", "swap roles", "another axis of the softmax", "clamp"} <= kinds


def test_a_mutant_keeps_the_lines_of_its_file(wild_model: WildModel) -> None:
    attention = next(attentions_in(wild_model))
    for mutant in mutants_of(attention, seed=0, most=40):
        if mutant.code is not None:
            before, after = (
                {line for _, _, line in code.co_lines() if line} for code in (mutant.function.__code__, mutant.code)
            )
            assert after - before <= {mutant.code.co_firstlineno}
            assert mutant.code.co_firstlineno == mutant.function.__code__.co_firstlineno + 1  # below its decorator
            assert all(path == mutant.function.__code__.co_filename for path, _ in mutant.places)


def test_what_is_said_of_the_whole_code_does_not_find_a_mistake(wild_model: WildModel) -> None:
    always = Finding("no_scale", "scale", "It has no scale.", stack=(CodeLine("x.py", 1, "x"),))

    def judge(attention: Attention) -> Report:
        return Report(attention.name, verdict="deviates", findings=[always])

    rows = [one for one in rows_of_mutants(wild_model, (), None, judge, seed=0, each=3) if "operator" in one]
    assert rows
    assert not any(one["found"] for one in rows)


def test_only_lines_that_ran_are_changed() -> None:
    tree = ast.parse("def f(q, k, scale):\n    if q is None:\n        return k * scale\n    return q * scale").body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert {change.lines for change in changes_of(tree, frozenset({2, 4}))} == {(4, 4)}


def test_children_give_what_they_found_before_they_ended() -> None:
    def work(task: str) -> Iterator[dict[str, Any]]:
        yield {"task": task}
        if task == "hang":
            time.sleep(60)
        if task == "raise":
            raise ValueError

    outcomes = {task: (found, why) for task, found, why in in_children(
        ["end", "hang", "raise"], work, limits=Limits(wall_seconds=1.0), jobs=3
    )}  # fmt: skip
    assert outcomes == {
        "end": ([{"task": "end"}], ""),
        "hang": ([{"task": "hang"}], "it did not end in time"),
        "raise": ([{"task": "raise"}], "its child failed"),
    }
