"""Tests of ``sidebyside kernels``: right kernels stand, broken ones in the place of torch's are found, and shown."""

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from equivalence_tests.__main__ import app
from equivalence_tests.kernels import judging, running
from equivalence_tests.kernels.faults import Request
from equivalence_tests.kernels.judging import Cell, Judge
from equivalence_tests.kernels.kernels import Kernel, listed_kernels
from equivalence_tests.kernels.own import judge_own, own_kernel
from equivalence_tests.kernels.reporting import Report
from equivalence_tests.kernels.reproducing import MOST_LINES, reproducer
from equivalence_tests.kernels.rewriting import rewritten_only
from equivalence_tests.kernels.situations import Situation, listed_situations

KERNELS = {kernel.name: kernel for kernel in listed_kernels("cpu", compiles=False)}
SITUATIONS = {situation.name: situation for situation in listed_situations()}
SDPA = KERNELS["sdpa, as torch chooses"]
JUDGE = Judge()
torch_sdpa = F.scaled_dot_product_attention


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=lambda one: one.name)
def test_the_textbook_of_torch_is_never_blamed(situation: Situation) -> None:
    cell = JUDGE.judge(KERNELS["sdpa, MATH"], situation, "float32")
    assert cell.state == "right", cell


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["sdpa, as torch chooses", "MultiheadAttention, need_weights=True"])
def test_other_precisions_have_rules_of_their_own(name: str, dtype: str) -> None:
    for situation in listed_situations(quick=True)[::6]:
        if KERNELS[name].asked(situation):
            cell = JUDGE.judge(KERNELS[name], situation, dtype)
            assert cell.state in ("right", "falls back", "refuses"), cell


def test_scores_of_ten_thousand_may_be_rounded_to_their_size() -> None:
    cell = JUDGE.judge(KERNELS["MultiheadAttention, need_weights=True"], SITUATIONS["mask 1e4, length 128"], "float64")
    assert cell.state == "right", cell


# Kernels broken on purpose, with the situation that shows it and the parts that are wrong.
BROKEN: dict[str, tuple[Callable[..., Any], str, set[str]]] = {
    "forgets the scale": (
        lambda q, k, v, m, **kw: torch_sdpa(q, k, v, m, **kw | {"scale": 1.0}),
        "length 16",
        {"output", "dq", "dk", "dv"},
    ),
    "causal by the lower right": (
        lambda q, k, v, m, is_causal, **kw: torch_sdpa(
            q, k, v, torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool() if is_causal else m, **kw
        ),
        "causal, 5 queries, 7 keys",
        {"output", "dq", "dk", "dv"},
    ),
    "drops the last key where the length is odd": (
        lambda q, k, v, m, **kw: torch_sdpa(q, k[:, :, : k.shape[2] & ~1], v[:, :, : k.shape[2] & ~1], m, **kw),
        "length 63",
        {"output", "dq", "dk", "dv"},
    ),
    "blind rows are NaN": (
        lambda q, k, v, m, **kw: torch.where(
            m.any(-1, keepdim=True) if m is not None and m.dtype == torch.bool else torch.tensor(True),
            torch_sdpa(q, k, v, m, **kw),
            torch.nan,
        ),
        "mask blind rows, length 5",
        {"output"},
    ),
    "ignores strides": (
        lambda q, k, v, m, **kw: torch_sdpa(q, torch.as_strided(k, k.shape, torch.empty(k.shape).stride()), v, m, **kw),
        "permuted, length 17",
        {"output"},
    ),
    "takes the wrong head of a group": (
        lambda q, k, v, m, **kw: (
            torch_sdpa(q, k.flip(1), v.flip(1), m, **kw) if kw["enable_gqa"] else torch_sdpa(q, k, v, m, **kw)
        ),
        "4 heads on 2",
        {"output"},
    ),
    "exponentials overflow": (
        lambda q, k, v, *_, **__: (lambda e: e / e.sum(-1, keepdim=True))((q @ k.mT * q.shape[-1] ** -0.5).exp()) @ v,
        "scores up to 120, length 17",
        {"output"},
    ),
}


@pytest.mark.parametrize(("broken", "where", "parts"), BROKEN.values(), ids=BROKEN)
def test_a_kernel_broken_in_the_place_of_torchs_is_found(
    broken: Callable[..., Any], where: str, parts: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", broken)
    cell = JUDGE.judge(SDPA, SITUATIONS[where], "float32")
    assert cell.state == "wrong"
    assert parts <= {error.name for error in cell.wrong_parts}


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad * 1.01


def test_a_gradient_that_alone_is_wrong_is_named_and_reproduced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, k, v, m=None, **kw: torch_sdpa(q, _WrongBackward.apply(k), v, m, **kw),  # type: ignore[no-untyped-call]
    )
    report = running.judged(Request(), [SDPA], [SITUATIONS["length 64"], SITUATIONS["length 16"]])
    (fault,) = report.faults
    assert (fault.parts, fault.cell.situation, report.exit_status) == (["dk"], "length 16", 1)
    exec(fault.program, {})
    error = float(capsys.readouterr().out.split("tensor(")[1].split(",")[0].rstrip(")\n "))
    assert error == pytest.approx(fault.cell.wrong_parts[0].candidate_error, rel=1e-3)


def test_writing_into_inputs_and_chance_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def writes(q: Tensor, k: Tensor, v: Tensor, m: Any, **kw: Any) -> Tensor:
        out = torch_sdpa(q, k, v, m, **kw)
        k.detach().mul_(2)
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", writes)
    assert "its inputs" in JUDGE.judge(SDPA, SITUATIONS["length 2"], "float32").words
    assert (
        "writes into its inputs" in JUDGE.judge(replace(SDPA, gradients=False), SITUATIONS["length 2"], "float32").words
    )
    noise = lambda *a, **kw: torch_sdpa(*a, **kw) + 1e-9 * torch.randn(1)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", noise)
    cell = Judge().judge(SDPA, SITUATIONS["length 65"], "float32")
    assert "different outputs" in cell.words


def test_the_fast_path_of_an_encoder_is_held_against_its_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, native = KERNELS["TransformerEncoder, fast path"], torch._transformer_encoder_layer_fwd
    asked = [one for one in SITUATIONS.values() if kernel.asked(one)]
    assert {one.mask for one in asked} == {"", "padding"}
    assert {JUDGE.judge(kernel, one, "float32").state for one in asked[::5]} == {"right"}
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a, **kw: native(*a, **kw) * 1.01)
    assert JUDGE.judge(kernel, asked[0], "float32").state == "wrong"


def test_a_silent_fallback_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JUDGE.judge(SDPA, SITUATIONS["length 16"], "float32").state == "right"
    assert JUDGE.judge(SDPA, SITUATIONS["head size 16, values 24"], "float32").state == "falls back"


def test_torchs_words_are_told_where_it_refuses() -> None:
    cell = JUDGE.judge(KERNELS["sdpa, FLASH_ATTENTION"], SITUATIONS["head size 16, values 24"], "float32")
    assert cell.state == "refuses"
    assert "same last dimension" in cell.words


def forms() -> list[Kernel]:
    return [kernel for kernel in KERNELS.values() if kernel.backend == "compiled"]


def test_a_rewrite_that_is_wrong_is_found_on_the_torch_that_has_it() -> None:
    """pytorch#195320, not in 2.11, in 2.13 and mended in 2.15: numbers at length = heads, an error elsewhere."""
    kernel = KERNELS["permuted keys, rewritten without gradients"]
    cells = [JUDGE.judge(kernel, SITUATIONS[name], "float32") for name in ("as many tokens as heads", "length 16")]
    if "2.13" <= torch.__version__ < "2.14":
        assert [cell.state for cell in cells] == ["wrong", "wrong"]
        assert cells[0].wrong_parts[0].candidate_error > 0.1
        assert "broadcast" in cells[1].words
    elif torch.__version__ < "2.12" or torch.__version__ >= "2.15":
        assert [cell.state for cell in cells] == ["right", "right"]


def test_a_compiler_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    form = forms()[0]
    wrong = Kernel(form.name, "compiled", form.lines, compiled=True, gradients=False, call=rewritten_only(_forgetful))
    assert JUDGE.judge(wrong, SITUATIONS["length 16"], "float32").state == "wrong"


def _forgetful(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.softmax(q @ k.mT, -1) @ v


REPRODUCED = [
    (kernel, situation)
    for kernel in KERNELS.values()
    for situation in SITUATIONS.values()
    if kernel.asked(situation) and situation.size
]


def test_reproducers_are_short_and_need_torch_alone() -> None:
    for kernel, situation in REPRODUCED:
        for part in ("output", "dk"):
            program = reproducer(kernel, situation, part, 0, "cpu", "float32")
            assert len(program.splitlines()) <= MOST_LINES, program
            assert "scratch" not in program
            compile(program, "reproducer", "exec")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", ["output", "dq", "dv"])
@pytest.mark.parametrize(
    "name", ["sdpa, MATH", "flex, eager", "MultiheadAttention, need_weights=False", "einsum, rewritten"]
)
def test_reproducers_show_nothing_where_nothing_is_wrong(
    name: str, part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    kernel = KERNELS[name]
    forward_only = name.startswith("flex")  # on the CPU
    part = "output" if forward_only else part
    for situation in [one for one in SITUATIONS.values() if kernel.asked(one) and one.size][
        :: 25 if forward_only else 7
    ]:
        if situation.nan_in_hidden_key:
            continue
        with torch.set_grad_enabled(not forward_only):
            exec(reproducer(kernel, situation, part, 3, "cpu", "float64"), {})
        error, largest = (float(x.split(",")[0].rstrip(")")) for x in capsys.readouterr().out.split("tensor(")[1:])
        assert error <= 1e-12 * max(largest, 1e-3) or math.isnan(largest), (situation.name, error)


def test_the_same_seed_gives_the_same_table() -> None:
    situations = listed_situations(quick=True)[:5]
    first, again = (running.judged(Request(seed=3), [SDPA], situations).cells for _ in range(2))
    assert first == again


def fake(state: Any, size: int = 1) -> Cell:
    return Cell("k", "sdpa", "s", "lengths", "float32", state, size)


@pytest.mark.parametrize(("states", "status"), [(["right", "refuses"], 0), (["right", "wrong"], 1), (["refuses"], 2)])
def test_exit_status(states: list[str], status: int) -> None:
    assert Report(Request(), "", [fake(state) for state in states], []).exit_status == status


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["kernels", *arguments])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "listed_situations", lambda _: listed_situations(quick=True)[:3])


@pytest.mark.usefixtures("few")
def test_the_command_tells_and_writes(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("json", "junit")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    result = invoked("--quick", "--backend", "sdpa", "--dtype", "float32", "--github", *options)
    assert result.exit_code == 0, result.output
    assert "sdpa, CUDNN_ATTENTION refuse every call: No viable backend" in result.stdout
    data = json.loads(files["json"].read_text())
    assert {cell["state"] for cell in data["cells"]} == {"right", "refuses"}
    assert '<testsuite name="sdpa, MATH" tests="3" failures="0" skipped="0">' in files["junit"].read_text()


@pytest.mark.usefixtures("few")
def test_a_wrong_kernel_is_told_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, *_, **__: torch_sdpa(q, k, v) * 1.5)
    result = invoked("--quick", "--backend", "sdpa", "--dtype", "float32", "--github")
    assert result.exit_code == 1
    assert "WRONG  sdpa, as torch chooses, length 1, float32: output is off by" in result.stdout
    assert "    out = F.scaled_dot_product_attention(q, k, v, None, is_causal=False, scale=None" in result.stdout
    assert "::error title=attention kernel::sdpa" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda:99"], "device must be one that this machine has"),
        (["--dtype", "int8"], "--dtype must be one of"),
        (["--backend", "flash"], "--backend must be one of"),
        (["--json", "/nowhere/x.json"], "/nowhere"),
        (["--json", "-", "--junit", "-"], "only one of --json and --junit can be -"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(arguments: list[str], said: str) -> None:
    result = invoked(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_kernel_that_loses_the_device_is_blamed_and_the_rest_runs_in_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[str] = []

    def breaks_at_length_16(q: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if q.shape[2] == 16 and not lost:
            lost.append("the device")
            raise RuntimeError("CUDA error: misaligned address")
        return torch_sdpa(q, *arguments, **named)

    def wait_for(_: torch.device) -> None:
        if len(lost) == 1:
            lost.append("reported")
            raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(judging, "_wait_for", wait_for)
    monkeypatch.setattr(F, "scaled_dot_product_attention", breaks_at_length_16)
    report = judged_in_forks(monkeypatch)
    assert [cell.state for cell in report.cells] == ["right", "wrong", "right"]
    (fault,) = report.faults
    assert "length 16" in fault.sentence
    assert "cannot use afterwards: CUDA error: misaligned address" in fault.sentence


def test_where_what_is_right_cannot_be_computed_nothing_is_blamed() -> None:
    kernel = Kernel("a module", "module", SDPA.lines, right=("raise AttributeError('no such layer')",))
    cell = JUDGE.judge(kernel, SITUATIONS["length 16"], "float32")
    assert cell.state == "refuses"
    assert cell.words == "what is right could not be computed: no such layer"


def judged_in_forks(monkeypatch: pytest.MonkeyPatch) -> Report:
    """Judge at three lengths, each process a copy of this one."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system cannot fork")
    if torch.cuda.is_initialized():
        pytest.skip("a copy of a process that has used the GPU cannot go backward")
    monkeypatch.setattr(running, "get_context", lambda _: multiprocessing.get_context("fork"))
    monkeypatch.setattr(running, "kernels_for", lambda _: ([SDPA], []))
    named = [SITUATIONS[f"length {length}"] for length in (1, 16, 64)]
    monkeypatch.setattr(running, "listed_situations", lambda _: named)
    return running.judged_apart(Request())


def test_a_kernel_that_ends_its_process_is_blamed_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies_at_length_16(q: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if q.shape[2] == 16:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch_sdpa(q, *arguments, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", dies_at_length_16)
    report = judged_in_forks(monkeypatch)
    assert [(cell.situation, cell.state) for cell in report.cells] == [
        ("length 1", "right"),
        ("length 16", "wrong"),
        ("length 64", "right"),
    ]
    assert report.cells[1].words == "it fails on the device, and its process was ended by signal 9"


def test_an_error_of_the_judge_is_raised_and_blames_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("of the judge")

    monkeypatch.setattr(judging, "compared", fails)
    with pytest.raises(KeyError, match="of the judge") as raised:
        judged_in_forks(monkeypatch)
    assert "in fails" in raised.value.__notes__[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_of_a_cuda_device() -> None:
    report = running.judged_apart(Request("cuda", ("bfloat16",), ("sdpa", "module"), quick=True))
    assert [cell for cell in report.cells if cell.state == "right"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mistake_in_a_kernel_of_ones_own_is_named_on_a_cuda_device() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
        scores = q.float() @ k.float().mT
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ v.float()).to(q), scores.logsumexp(-1)

    report = judge_own(own_kernel(attend), Request("cuda", quick=True))
    assert report.faults[0].name == "the scores are not scaled"
