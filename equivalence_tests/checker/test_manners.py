"""verify keeps its manners: whatever the program around it has set, and whatever the code that it runs does."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests import verify


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Right."""
    return (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v


def attend_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Right, but for the caller's queries."""
    q /= q.size(-1) ** 0.5
    return (q @ k.mT).softmax(-1) @ v


def without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Right, but for the gradient."""
    return attend(q, k, v).detach()


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.device("meta"),
    ],
)
def test_what_is_set_around_the_check_makes_no_difference(around: Callable[[], AbstractContextManager[Any]]) -> None:
    with around():
        assert verify(attend)


def test_what_the_code_sets_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        os.chdir(tmp_path)
        torch.autograd.set_detect_anomaly(True)
        torch.set_float32_matmul_precision("medium")
        return attend(q, k, v)

    monkeypatch.chdir(Path(__file__).parent)
    assert verify(careless)
    assert Path.cwd() == Path(__file__).parent
    assert not torch.is_anomaly_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_writes_into_its_inputs_is_blamed_for_that_alone() -> None:
    report = verify(attend_in_place)
    assert report.verdict == "deviates"
    assert not report.findings
    assert "The tensors that are passed in are the same afterwards" in report.reason


def test_an_output_without_gradient_is_said_once() -> None:
    report = verify(without_gradient)
    assert report.verdict == "deviates"
    assert str(report).count("the output carries no gradient") == 1


def test_compiled_modules_are_looked_through_and_compiled_functions_run_as_written() -> None:
    compiled = torch.compile(nn.MultiheadAttention(12, 3, batch_first=True), backend="eager")
    report = verify(compiled)
    assert report
    assert "run inside OptimizedModule, and checked without it" in report.notes
    assert verify(torch.compile(attend, backend="eager"))


def test_a_cell_of_a_running_notebook_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=lambda path: ("Cell", "In[3]")))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    names: dict[str, Any] = {}
    exec(compile("def attend(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v", "/tmp/ipykernel_7/1.py", "exec"), names)
    report = verify(names["attend"])
    assert "line           In[3]:2  in attend" in str(report)  # the source is not there, the function's name is
    assert repr(report) == str(report)
