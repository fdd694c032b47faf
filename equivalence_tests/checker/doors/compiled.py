"""``verify --compile``: the same code under ``torch.compile``, held against itself in eager mode."""

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.situations import trials_for
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.loading import load
from equivalence_tests.checker.reach.plans import Errors
from equivalence_tests.checker.reach.state import prepare, preserved_global_state
from equivalence_tests.checker.reach.subject import Adapter, subjects
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import CheckResult, Finding
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.instruments.differences import ErrorRatio, compare_errors, largest_value
from equivalence_tests.kernels.rewriting import has_compiler, rewritten

__all__ = ["add_compiled"]

NAME = "changed_by_compile"


@dataclass(frozen=True)
class _Run:
    """One comparison of compiled and eager code."""

    length: int
    gradients: bool
    errors: tuple[ErrorRatio, ...]
    failure: str
    rewrites: int
    breaks: int

    @property
    def wrong(self) -> str:
        """What is wrong, or ""."""
        if self.failure:
            return f"it fails: {self.failure}"
        return "; ".join(
            x.misfit or f"{x.name} is off by {x.candidate_error:.2g} (eager: {x.builtin_error:.2g})"
            for x in self.errors
            if not x.passed
        )

    def __str__(self) -> str:
        return f"{self.length} tokens, {'with' if self.gradients else 'without'} gradients"


def add_compiled(report: Report, target: Any, adapter: Adapter | None) -> None:
    """Compile what was verified, and add to its report what the compiler makes of it."""
    if report.verdict == "unchecked":
        return
    compiles = has_compiler("cpu")
    try:
        with preserved_global_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = _trial(load(target), str(target), adapter or Adapter())
            # With as many tokens as heads a mix-up of the two axes raises no error.
            ways = itertools.product((trial.sizes.num_heads, 16), (False, True))
            runs = [_compared(trial, *way, None if compiles else rewritten) for way in ways]
    except CannotCheckError as error:
        report.notes.append(f"torch.compile was not tried: {error}")
        return
    wrong = [run for run in runs if run.wrong]
    report.checks += [CheckResult(f"compiled, {run}", "failed" if run.wrong else "passed", run.wrong) for run in runs]
    report.notes.append(_in_words(runs, compiles))
    if wrong:
        report.findings.append(_finding(wrong))
        report.verdict = "deviates"


def _in_words(runs: Sequence[_Run], compiles: bool) -> str:
    uncompiled = "rewritten as torch.compile does first, but not compiled, for want of a C++ compiler"
    done = "compiled" if compiles else uncompiled
    same, breaks = sum(not run.wrong for run in runs), max(run.breaks for run in runs)
    rewritten_too = any(run.rewrites for run in runs)
    fused = "was replaced by scaled_dot_product_attention" if rewritten_too else "was not recognised as attention"
    return f"torch.compile: {done}; right in {same} of {len(runs)} runs; it {fused}; graph breaks: {breaks}."


def _finding(wrong: Sequence[_Run]) -> Finding:
    runs = ". ".join(f"{run}: {run.wrong}" for run in wrong[:3])
    reason = " Inductor replaces what looks like attention by its own kernel (pytorch/pytorch#195320)."
    reason = reason if any(run.rewrites or run.failure for run in wrong) else ""
    return Finding(
        NAME,
        "context",
        f"Under torch.compile the code does not compute what it computes in eager mode. {runs}.{reason}",
        fix="Transpose the keys in two steps, k.transpose(1, 2) and k.transpose(-2, -1), or call "
        "F.scaled_dot_product_attention; torch.compiler.disable keeps the function out.",
    )


def _trial(found: Any, name: str, adapter: Adapter) -> Trial:
    """Find a way to call the code in float64."""
    torch.set_default_dtype(torch.float64)
    for subject in subjects(found, name, adapter):
        if subject.module is not None:
            prepare(subject.module)
        subject.dtype = torch.float64
        trials = trials_for(subject, Errors())
        if trials:
            return trials[0]
    raise CannotCheckError("no way was found to call it")


def _compared(trial: Trial, length: int, gradients: bool, backend: Any) -> _Run:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    exact = _outputs(trial, length, gradients, torch.float64, lambda function: function)
    eager = _outputs(trial, length, gradients, torch.float32, lambda function: function)
    options: dict[str, Any] = {"dynamic": False} | ({"backend": backend} if backend else {})
    failure, compiled = "", {}
    try:
        with torch._inductor.config.patch(compile_threads=1):
            compiled = _outputs(trial, length, gradients, torch.float32, lambda f: torch.compile(f, **options))
    except Exception as error:  # a compiler fails in any way
        lines = str(error).splitlines()
        failure = next((line for line in lines if "Error: " in line), said(error))
    largest = {
        kind: largest_value([x for name, x in exact.items() if (name == "output") == kind]) for kind in (True, False)
    }
    errors = tuple(
        compare_errors(x, eager[name], exact[name], name=name, largest=largest[name == "output"])
        for name, x in compiled.items()
    )
    counts = counters["inductor"]["fuse_attention"], sum(counters["graph_break"].values())
    return _Run(length, gradients, errors, failure, *counts)


def _outputs(
    trial: Trial, length: int, gradients: bool, dtype: torch.dtype, made: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """Call the code, compiled or not, and go backward."""
    torch.set_default_dtype(dtype)
    function = trial.function
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).to(dtype)
    here = Trial(function, trial.plan, trial.sizes, dtype, trial.adapted)
    args, kwargs = here.arguments(here.inputs(length, length))
    leaves = list(tensors_in((args, kwargs)))
    for leaf in leaves:
        leaf.requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        output = here.output_in(made(here.called)(*args, **kwargs))
    found = {"output": output.detach()}
    if gradients and output.requires_grad:
        generator = torch.Generator().manual_seed(7)
        grad = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
        gradients_of = torch.autograd.grad(output, leaves, grad, materialize_grads=True)
        found |= {f"gradient of input {number}": x for number, x in enumerate(gradients_of)}
    return found
