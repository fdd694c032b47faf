"""verify keeps its manners: whatever the program around it has set, and whatever the code that it runs does."""

import operator
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests import verify
from equivalence_tests.checker.engine.checks import run_check
from equivalence_tests.checker.helpers_for_tests import line_of
from equivalence_tests.checker.reporting.report import Report


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
        os.environ["LEFT_BEHIND"] = "1"
        sys.path = [str(tmp_path), *sys.path]
        torch.set_printoptions(precision=2)
        np.set_printoptions(precision=2)
        torch.autograd.set_detect_anomaly(True)
        torch.set_float32_matmul_precision("medium")
        return attend(q, k, v)

    monkeypatch.chdir(Path(__file__).parent)
    assert verify(careless)
    monkeypatch.syspath_prepend("what was put there between two checks stays")
    assert verify(attend)
    assert sys.path[0] == "what was put there between two checks stays"
    assert Path.cwd() == Path(__file__).parent
    assert "LEFT_BEHIND" not in os.environ
    assert str(tmp_path) not in sys.path
    assert repr(torch.tensor(1 / 3)) == "tensor(0.3333)"
    assert np.get_printoptions()["precision"] == 8
    assert not torch.is_anomaly_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_folder_that_is_added_between_two_checks_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify(attend)
    monkeypatch.syspath_prepend(tmp_path)
    assert verify(attend)
    assert str(tmp_path) in sys.path


def test_what_writes_into_its_inputs_is_blamed_for_that_alone() -> None:
    report = verify(attend_in_place)
    assert (report.verdict, report.mistakes) == ("deviates", ("argument_written_into",))


def test_what_is_equal_is_said_on_a_few_lines() -> None:
    printed = str(verify(lambda: Plain(12, 3)))
    assert len(printed.splitlines()) < 8
    assert "with your weights: equal to" in printed
    assert "checks passed" not in printed


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


# In a fresh interpreter, with a class that compiles itself while it is checked.
COMPILES_ITSELF = """
import sys
import builtin
from equivalence_tests.checker.test_manners import attend, nn, torch, verify

print(verify(attend).verdict, "torch._dynamo" in sys.modules)


class Compiled(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attend = torch.compile(attend, backend=lambda *_: 1 / 0)
        self.attend(*torch.ones(3, 1, 1, 1))

    def forward(self, query, key, value):
        return self.attend(query, key, value)


print(verify(Compiled, kind="attention").verdict, "torch._dynamo" in sys.modules)
"""


def test_what_compiles_itself_runs_as_it_is_written_without_torchs_compiler() -> None:
    """It takes as long to import as torch itself."""
    ran = subprocess.run([sys.executable, "-c", COMPILES_ITSELF], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["equal False", "equal False"]


def test_a_cell_of_a_running_notebook_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=lambda path: ("Cell", "In[3]")))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    names: dict[str, Any] = {}
    exec(compile("def attend(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v", "/tmp/ipykernel_7/1.py", "exec"), names)
    report = verify(names["attend"])
    assert "line           In[3]:2  in attend" in str(report)  # the source is not there, the function's name is
    assert repr(report) == str(report)


class Kernel(torch.autograd.Function):
    """Stands for a kernel that nobody can look into."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        del ctx
        scores = np.exp(scale * q.detach().numpy() @ k.detach().numpy().swapaxes(-1, -2))
        return torch.from_numpy(scores / scores.sum(-1, keepdims=True) @ v.detach().numpy())


class Fused(nn.Module):
    """Right, with a kernel of its own."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def scale(self, q: Tensor) -> float:
        return q.size(-1) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        context: Tensor = Kernel.apply(q, k, v, self.scale(q))  # type: ignore[no-untyped-call]  # torch has none
        return self.out(context.transpose(1, 2).flatten(2))


class Plain(Fused):
    """The same in torch's functions."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


class PlainUnscaled(Fused):
    """A mistake that TorchScript hides."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(attend(2 * q, k, v).transpose(1, 2).flatten(2))


class FusedUnscaled(Fused):
    """A mistake in what the kernel is called with."""

    def scale(self, q: Tensor) -> float:
        return 1.0


class FusedAndAlwaysDropped(Fused):
    """Of what a kernel gives, a part is dropped in every mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1)


class FusedWithRandomFeatures(Fused):
    """Draws what it means to draw, in every mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.randn_like(x)


def test_what_is_drawn_behind_a_kernel_is_no_dropout() -> None:
    assert verify(FusedWithRandomFeatures).findings == []


def test_dropout_in_eval_is_seen_behind_a_kernel() -> None:
    (finding,) = verify(FusedAndAlwaysDropped).findings
    assert finding.name == "dropout_in_eval"
    assert line_of(finding) == "return F.dropout(super().forward(x), 0.1)"


def test_the_output_of_a_kernel_is_compared_and_no_more_is_said_of_it() -> None:
    right, wrong = verify(Fused), verify(FusedUnscaled)
    assert right.verdict == "partial"
    assert [exercise.what for exercise in right.not_exercised] == ["what happens inside"]
    assert not right.reason
    assert wrong.verdict == "unchecked"
    assert "takes numbers that no torch function returned" in wrong.reason
    assert "is not that of plain attention, from which it differs by" in wrong.reason


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_named_and_its_output_compared() -> None:
    for right in (torch.jit.script(attend), torch.jit.trace(Plain(12, 3), torch.randn(2, 5, 12))):
        report = verify(right)
        assert report.verdict == "partial", str(report)
        assert "It runs as TorchScript, which hides its operations." in str(report)
    report = verify(torch.jit.trace(PlainUnscaled(12, 3), torch.randn(2, 5, 12)))
    assert report.reason.startswith("It runs as TorchScript, which hides its operations. Its output was compared")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_in_a_call_of_ones_own_is_compared_as_well() -> None:
    x = torch.randn(2, 5, 12)
    right, wrong, other = (torch.jit.trace(m, x) for m in (Plain(12, 3), PlainUnscaled(12, 3), nn.Linear(12, 12)))
    scripted, watched = verify(nn.Sequential(wrong), x), verify(nn.Sequential(Plain(12, 3), right, other), x)
    assert [report.verdict for report in scripted] == ["unchecked"]
    assert "is not that of plain attention" in scripted[0].reason
    assert [(report.place, report.verdict) for report in watched] == [("0", "equal"), ("1", "partial")]
    assert watched[0].notes == ["TorchScript hides what runs in 2"]


def test_a_call_that_fails_is_told_with_its_line() -> None:
    (report,) = verify(Plain(12, 3), torch.randn(2, 5, 13))
    assert "mat1 and mat2 shapes cannot be multiplied" in report.reason
    assert "test_manners.py:" in report.reason


class Misspelt(Fused):
    """Fails however it is called."""

    def scale(self, q: Tensor) -> float:
        return q.size(-1) ** self.power  # type: ignore[operator,return-value]  # there is none


def test_an_error_that_no_argument_changes_is_a_finding_and_told_alone() -> None:
    report = verify(Misspelt)
    assert (report.verdict, report.mistakes) == ("deviates", ("line_raises",))
    (finding,) = report.findings
    assert finding.have == "AttributeError: 'Misspelt' object has no attribute 'power'"
    assert line_of(finding).startswith("return q.size(-1) ** self.power")


class Nested(nn.Module):
    """Its forward is made by the constructor, and forgotten."""

    def __init__(self, dim: int) -> None:
        super().__init__()

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return x


def test_a_class_without_forward_is_told_so() -> None:
    assert verify(Nested).reason == "Nested has no forward: the one in its source is inside another function."


def test_a_check_that_fails_by_itself_does_not_count_against_the_code() -> None:
    result = run_check(operator.matmul, None, Report("it"))  # type: ignore[arg-type]  # no check, and no situation
    assert (result.outcome, "raised TypeError" in result.detail) == ("skipped", True)
