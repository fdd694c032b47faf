"""Tests of watching: the block computes what it would have computed, and what was called is checked afterwards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.doors import watch as watching
from equivalence_tests.checker.doors.watch import watch
from equivalence_tests.checker.report import Report


def training_step(layer: nn.Module) -> list[Tensor]:
    """Draw an input, go forward with dropout and back, and give everything that came of it."""
    torch.manual_seed(7)
    x = torch.randn(2, 5, 12, requires_grad=True)
    output = layer(x)
    layer.zero_grad()
    output.square().sum().backward()
    assert x.grad is not None
    return [output, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None), torch.rand(3)]


@pytest.mark.parametrize("training", [True, False])
def test_watching_changes_no_output_gradient_or_random_number(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).train(training)
    plain = training_step(layer)
    with watch() as seen:
        watched = training_step(layer)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [type(call.module) for call in seen.calls] == [nn.TransformerEncoderLayer]


def test_only_the_first_call_of_the_outermost_module_is_kept() -> None:
    inner = nn.Linear(12, 12)
    outer = nn.Sequential(inner, nn.ReLU())
    x = torch.randn(3, 12, requires_grad=True)
    with watch() as seen:
        outer(x)
        outer(2 * x)
        inner(input=x)
    assert [call.module for call in seen.calls] == [outer, inner]
    (kept,) = seen.calls[0].args
    assert torch.equal(kept, x)
    assert not kept.requires_grad
    assert kept is not x
    assert list(seen.calls[1].kwargs) == ["input"]


def test_calls_are_plain_again_after_the_block_even_if_it_fails() -> None:
    before = nn.Module.__call__
    with pytest.raises(RuntimeError), watch() as seen:
        nn.Linear(3, 3)(torch.randn(2, 5))
    assert nn.Module.__call__ is before
    assert len(seen.calls) == 1
    nn.Linear(3, 3)(torch.randn(2, 3))
    assert len(seen.calls) == 1


def test_wrappers_are_looked_through_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(12, 12)
    wrapped = nn.DataParallel(layer)
    with watch() as seen:
        wrapped(torch.randn(2, 12))
    assert seen.calls[0].module is layer
    monkeypatch.setattr(watching, "verify", lambda *_, **__: [Report("Linear", verdict="equal")])
    assert seen.reports[0].notes == ["run inside DataParallel, and checked without it"]


def test_what_does_not_fit_into_memory_is_named() -> None:
    layer = nn.Linear(1024, 2)
    with watch(memory_mib=1) as seen:
        layer(torch.randn(512, 1024))
    assert not seen.calls
    assert seen.notes == ["Linear: its arguments take 2 MiB and were not kept (memory_mib)"]
    assert not seen


def test_reports_are_made_once_and_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def verify(module: nn.Module, *, inputs: Any, meant: Any) -> list[Report]:
        asked.append((module, inputs, meant))
        return [Report("a", verdict="equal"), Report("b", verdict="deviates")]

    monkeypatch.setattr(watching, "verify", verify)
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with watch(meant={"no_scale": "as T5"}) as seen:
        layer(x)
    assert not asked
    assert not seen
    assert [report.target for report in seen] == ["a", "b"]
    assert len(asked) == 1
    assert asked[0][2] == {"no_scale": "as T5"}
    assert "DEVIATES  b" in str(seen)
    assert "DEVIATES" in seen._repr_html_()


def test_a_block_without_modules_says_so() -> None:
    with watch() as seen:
        torch.ones(3).sum()
    assert str(seen).startswith("No module was called while watching")
    assert not seen
