"""Broken attentions to practise on: the code, what it computes beside what is right, and what ``verify`` says of it."""

import difflib
import importlib.util
import inspect
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo import defects
from equivalence_tests.checker.zoo.conventions import FusedCausal, SeparateLinears, Stages
from equivalence_tests.instruments.side_by_side import random_tensor
from equivalence_tests.instruments.weights import randomize_parameters
from equivalence_tests.learn.page.figures import Matrix, gap, largest_of, matrices
from scratch import masks

__all__ = ["EXERCISES", "Exercise", "Line", "exercise_data", "source_of"]

# From what is seen at a glance to what is hard to see.
EXERCISES: tuple[tuple[type[Stages], type[Stages]], ...] = (
    (defects.SoftmaxOverQueries, SeparateLinears),
    (defects.AddsMask, SeparateLinears),
    (defects.SeesNextToken, FusedCausal),
    (defects.MasksAfterSoftmax, SeparateLinears),
    (defects.DoesNotScale, SeparateLinears),
    (defects.CannotSeeItself, FusedCausal),
    (defects.SplitsByReshape, SeparateLinears),
    (defects.ViewsKeys, SeparateLinears),
    (defects.SwapsKeyAndValue, SeparateLinears),
    (defects.ScalesByWholeWidth, SeparateLinears),
    (defects.MergesByReshape, SeparateLinears),
    (defects.ForgetsValueBias, SeparateLinears),
)
LENGTH, WIDTH, HEADS = 5, 8, 2
HEAD = """\
import math

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
"""
ANNOTATION = r": (?:Tensor \| None|Tensor|Any|int|float)( = )?"
ORDER = (
    "__init__",
    "forward",
    "project",
    "attend",
    "split",
    "scores",
    "future",
    "hide",
    "weigh",
    "drop",
    "merge",
    "out",
)


@dataclass(frozen=True)
class Line:
    """A line of the code, and whether the mistake is on it."""

    text: str
    is_guilty: bool


@dataclass(frozen=True)
class Exercise:
    """One broken attention.

    Args:
        number: Its place.
        lines: The code.
        right: The weights and the output as they should be.
        wrong: Those that this code gives.
        changed: How much of each is wrong, in words.
        report: What ``verify`` prints.
    """

    number: int
    lines: tuple[Line, ...]
    right: dict[str, tuple[Matrix, ...]]
    wrong: dict[str, tuple[Matrix, ...]]
    changed: dict[str, str]
    report: str


def exercise_data() -> tuple[Exercise, ...]:
    """Run every exercise, right and wrong, and ask ``verify`` about it."""
    return tuple(_exercise(number, *pair) for number, pair in enumerate(EXERCISES, start=1))


def report_on(target: type) -> str:
    """Give what ``verify`` prints of a class: the one place where the page meets the checker."""
    folder = f"{Path(inspect.getfile(target)).parent}{os.sep}"
    return str(verify(target)).replace(folder, "").rstrip()


def _exercise(number: int, defect: type[Stages], convention: type[Stages]) -> Exercise:
    right = _run(convention)
    code = source_of(defect, convention)
    with loaded(code, f"exercise_{number}") as broken:
        wrong = _run(broken)
        report = report_on(broken)
    guilty = {line.strip() for line in _changed_lines(defect, convention)}
    lines = tuple(Line(line, line.strip() in guilty) for line in code.removeprefix(HEAD).splitlines())
    both = _tables(right, right, wrong), _tables(wrong, right, wrong)
    changed = {name: _apart(wrong[name], right[name]) for name in right}
    return Exercise(number, lines, *both, changed, report)


def _tables(side: dict[str, Tensor], *both: dict[str, Tensor]) -> dict[str, tuple[Matrix, ...]]:
    words = {"weights": ("batch", "num_heads", "query_len", "key_len"), "output": ("batch", "query_len", "embed_dim")}
    top = {"weights": 1.0, "output": largest_of(*(x["output"] for x in both))}
    return {name: matrices(x, words[name], top[name]) for name, x in side.items()}


def _apart(wrong: Tensor, right: Tensor) -> str:
    found = gap(wrong, right)
    return "right" if found.startswith("<") else f"wrong by up to {float(found):.0%} of the largest number"


def source_of(defect: type[Stages], convention: type[Stages]) -> str:
    """Write a broken class as one piece: every method where it is used, without docstrings and annotations of types.

    Args:
        defect: What replaces a stage.
        convention: What it is replaced in.

    Returns:
        A module with one class, ``Attention``.
    """
    broken = type("Attention", (defect, convention), {})
    names = [name for name in ORDER if hasattr(broken, name) and _is_used(name, convention)]
    methods = (_without_docstring(inspect.getsource(getattr(broken, name))) for name in names)
    return HEAD + "\n\n".join(textwrap.indent(method, "    ") for method in methods) + "\n"


def _is_used(name: str, convention: type[Stages]) -> bool:
    return name != "future" or convention is FusedCausal


def _without_docstring(source: str) -> str:
    text = re.sub(ANNOTATION, lambda match: "=" if match[1] else "", textwrap.dedent(source).rstrip())
    head, _, rest = text.partition("\n")
    head = f"{head.partition(' -> ')[0].rstrip(':')}:"
    first, _, others = rest.partition("\n")
    return f"{head}\n{others if first.strip().startswith(chr(34) * 3) else rest}"


def _changed_lines(defect: type[Stages], convention: type[Stages]) -> Iterator[str]:
    """Give the lines of the broken stage that the right one does not have."""
    for name in ORDER:
        if name in vars(defect):
            right, wrong = (_without_docstring(inspect.getsource(getattr(x, name))) for x in (convention, defect))
            difference = difflib.ndiff(right.splitlines(), wrong.splitlines())
            yield from (line[2:] for line in difference if line.startswith("+ "))


@contextmanager
def loaded(code: str, name: str) -> Iterator[Any]:
    """Load code from a file of its own, as a user's would be, so that its lines can be quoted.

    Yields:
        Its class ``Attention``.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"
        file.write_text(code, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None  # it is a Python file
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            yield module.Attention
        finally:
            del sys.modules[name]


def _run(attention: Any) -> dict[str, Tensor]:
    """Call a class of either convention under a causal mask, and give its weights and its output."""
    takes_config = "config" in inspect.signature(attention).parameters
    sizes = SimpleNamespace(n_head=HEADS, n_embd=WIDTH, bias=True)
    module = attention(sizes) if takes_config else attention(WIDTH, HEADS)
    randomize_parameters(module.double().eval())
    attend, seen = module.attend, {}

    def watched(*arguments: Any) -> Any:
        merged, seen["weights"] = attend(*arguments)
        return merged, seen["weights"]

    module.attend = watched
    query, key, value = (random_tensor(1, LENGTH, WIDTH, seed=seed) for seed in (8, 9, 10))
    output = module(query) if takes_config else module(query, key, value, masks.causal(LENGTH)[None])
    return {"weights": seen["weights"].detach(), "output": output.detach()}
