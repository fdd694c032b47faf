"""Tests of watching: the block computes what it would have computed, and what was called is checked afterwards."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.doors import watch as watching
from equivalence_tests.checker.doors.watch import watch
from equivalence_tests.checker.reporting.report import Report


@pytest.fixture(autouse=True)
def _referrers_are_seen() -> None:
    gc.unfreeze()  # a function is found by what refers to its code


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
    assert [type(call.function) for call in seen.calls] == [nn.TransformerEncoderLayer]


def test_only_the_first_call_of_the_outermost_module_is_kept() -> None:
    inner = nn.Linear(12, 12)
    outer = nn.Sequential(inner, nn.ReLU())
    x = torch.randn(3, 12, requires_grad=True)
    with watch() as seen:
        outer(x)
        outer(2 * x)
        inner(input=x)
    assert [call.function for call in seen.calls] == [outer, inner]
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
    assert seen.calls[0].function is layer
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

    def verify(module: nn.Module, *, inputs: Any, intended: Any) -> list[Report]:
        asked.append((module, inputs, intended))
        return [Report("a", verdict="equal"), Report("b", verdict="deviates")]

    monkeypatch.setattr(watching, "verify", verify)
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with watch(intended={"scale_missing": "as T5"}) as seen:
        layer(x)
    assert not asked
    assert not seen
    assert [report.target for report in seen] == ["a", "b"]
    assert len(asked) == 1
    assert asked[0][2] == {"scale_missing": "as T5"}
    assert "DEVIATES  b" in str(seen)
    assert "DEVIATES" in seen._repr_html_()


def test_a_block_without_attention_says_so() -> None:
    with watch() as seen:
        nn.Linear(3, 3)(torch.ones(3)).sum()
    assert str(seen) == "No attention ran while watching."
    assert "No attention ran" in seen._repr_html_()
    assert not seen


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Scales by the width, and not by its root."""
    weights = (product(q, k.mT) * (scale or 1 / q.size(-1))).softmax(-1)
    return product(weights, v)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Both products of an attention are made here, and it is none."""
    return a @ b


def loss_of(x: Tensor) -> Tensor:
    """What a training step calls."""
    return attend(x, x, x).square().mean()


class Model(nn.Module):
    """Has a method that is called without its forward, and hands its weights to a module."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.softmax, self.out = nn.Linear(12, 36), nn.Softmax(dim=-1), nn.Linear(12, 12)

    def encode(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = self.softmax(q @ k.mT / 2)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def steps(seen_by: Any = None) -> list[Any]:
    """Train on the function for a few steps, and give all that came of it."""
    torch.manual_seed(3)
    weight = torch.randn(12, 12, requires_grad=True)
    losses = []
    with watch() if seen_by else contextlib.nullcontext() as seen:
        for _ in range(3):
            loss = loss_of(F.dropout(torch.randn(2, 5, 12) @ weight, 0.1))
            loss.backward()
            losses.append(loss.detach())
    return [seen, *losses, weight.grad, torch.rand(2)]


def test_a_plain_function_is_found_by_its_data_flow_and_nothing_changes() -> None:
    (_, *plain), (seen, *watched) = steps(), steps(seen_by=watch)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [call.function for call in seen.calls] == [attend]
    (report,) = seen
    assert report.mistakes == ("scale_wrong",)
    assert report.findings[0].line is not None
    assert "q.size(-1)" in report.findings[0].line.text


def test_a_method_that_is_no_forward_is_found_with_its_module() -> None:
    model = Model()
    with watch() as seen:
        model.encode(torch.randn(2, 5, 12))
    assert seen
    assert ("heads", "3", "") in seen.reports[0].conventions


def test_closures_keyword_arguments_and_fused_attention_are_found() -> None:
    def made(scale: float) -> Any:
        def inner(q: Tensor, *others: Tensor, causal: bool = False, **more: Any) -> Tensor:
            key, value = (*others, more.get("value"))[:2]
            assert key is not None
            assert value is not None
            return F.scaled_dot_product_attention(q, key, value, is_causal=causal, scale=scale)

        return inner

    x = torch.randn(2, 5, 12)
    right, wrong = made(12**-0.5), made(1.0)
    with watch() as seen:
        right(x, x, x, causal=True)
    assert seen
    with watch() as seen:
        wrong(x, x, value=x)
    assert [report.mistakes for report in seen] == [("scale_missing",)]


def test_what_would_train_again_is_named_and_not_run_again() -> None:
    weight = nn.Parameter(torch.randn(12, 12))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train(x: Tensor) -> None:
        q = x @ weight
        ((q @ q.mT).softmax(-1) @ q).sum().backward()
        optimizer.step()

    with watch() as seen:
        train(torch.randn(2, 5, 12))
    after = weight.detach().clone()
    assert "train computes an attention and trains as well" in str(seen)
    assert not seen
    assert torch.equal(weight, after)


def test_an_attention_in_no_function_is_named() -> None:
    x = torch.randn(2, 5, 12)
    with watch() as seen:
        (x @ x.mT).softmax(-1) @ x
    assert "in no function and no module" in str(seen)


def test_nothing_of_a_function_is_held_after_it_has_ended() -> None:
    held: list[Any] = []

    def scores(x: Tensor) -> Tensor:
        made = x @ x.mT
        held.append(weakref.ref(made))
        return (made.softmax(-1) @ x).sum()

    with watch(memory_mib=1):
        scores(torch.randn(2, 5, 12))
        torch.ones(3).sum()
        gc.collect()
        assert held[0]() is None


def test_compiled_functions_compute_the_same() -> None:
    compiled = torch.compile(attend, backend="eager")
    x = torch.randn(2, 5, 12)
    with watch():
        seen = compiled(x, x, x)
    assert torch.equal(seen, attend(x, x, x))
