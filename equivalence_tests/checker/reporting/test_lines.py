"""The line of a mistake that only the output shows: where what is wrong ran, or where the part was called."""

import contextlib
import functools
import inspect
import textwrap
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equivalence_tests.checker.helpers_for_tests import line_of
from equivalence_tests.checker.layers import walking
from equivalence_tests.checker.mistakes import MISTAKES
from equivalence_tests.checker.reporting.lines import code_lines, source_lines, source_of
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo import builders, layers, parts

OPERATORS = {"getitem", "setitem", "pow", "and", "or", "div"}


@pytest.mark.parametrize("mistake", [m for m in MISTAKES.values() if m.ran], ids=lambda mistake: mistake.name)
def test_what_runs_at_a_line_is_something_that_torch_has(mistake: Any) -> None:
    for name in mistake.ran.split(", "):
        name = name.removeprefix("last ")
        known = name in ("end", "call", *OPERATORS) or any(hasattr(home, name) for home in (torch, F, torch.linalg))
        assert known, name


class Held(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_source_that_is_kept_keeps_nothing_of_the_users() -> None:
    held = Held(2, 3)
    gone = weakref.ref(held)
    assert "super().forward(x)" in source_of(held.forward)
    del held
    assert gone() is None


class Outer:
    @functools.total_ordering
    @dataclass
    class Inner:
        number: int

        def __lt__(self, other: "Outer.Inner") -> bool:
            return self.number < other.number


def made_in_a_function() -> type:
    with contextlib.suppress(TypeError):

        class Inner:
            """Another of the same name."""

    return Inner


@pytest.mark.parametrize("kind", [Held, Outer.Inner, made_in_a_function()])
def test_the_source_of_a_class_is_the_one_that_python_gives(kind: type) -> None:
    assert source_lines(kind)[1] == inspect.getsourcelines(kind)[1] > 0
    assert source_of(kind) == textwrap.dedent(inspect.getsource(kind))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("found", "line"),
    [
        (parts.EpsOutsideLayerNorm, "/ (x.std("),
        (parts.SwappedPositionalEncoding, "torch.stack((angles.cos()"),  # it runs in the constructor
        (parts.NormalisedResidualEncoderLayer, "x = y + self.self_attention("),
        (layers.StaleResidualLayer, "x + self.mlp(y)"),
        (layers.UnchainedModel, "layer(x) for layer in"),
        (builders.mask_with_axes_swapped, "torch.tril("),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_is_the_one_that_ran(found: Any, line: str) -> None:
    (finding,) = verify(found).findings
    assert line in line_of(finding)


def test_what_never_ran_has_the_line_that_makes_it() -> None:
    (finding,) = verify(parts.NoCrossDecoderLayer).findings
    assert finding.name == "cross_attention_left_out"
    assert line_of(finding).startswith("self.self_attention, self.cross_attention =")


def test_a_run_that_cannot_be_watched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no operations")

    monkeypatch.setattr(walking, "diagnose_call", broken)
    report = verify(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    assert report.verdict == "partial"
    assert "watching the whole run raised RuntimeError: no operations" in report.not_exercised[0].detail


def test_a_file_is_named_from_where_one_stands_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path.resolve() / "mine.py"
    frames = ((str(file), 1, "forward"),)
    assert str(code_lines(frames)[0]) == f"{file}:1"
    monkeypatch.chdir(file.parent)
    assert str(code_lines(frames)[0]) == "mine.py:1"
