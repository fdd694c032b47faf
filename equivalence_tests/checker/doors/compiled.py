"""``verify --compile``: the same code under ``torch.compile``, held against itself in eager mode."""

import copy
import itertools
import warnings
from collections.abc import Callable, Mapping
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
from equivalence_tests.instruments.differences import compare_errors, largest_value
from equivalence_tests.kernels.rewriting import has_compiler, rewritten

__all__ = ["add_compiled"]

NAME = "changed_by_compile"


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
            runs = {_in_words(*way): _wrong(trial, *way, None if compiles else rewritten) for way in ways}
    except CannotCheckError as error:
        report.notes.append(f"torch.compile was not tried: {error}")
        return
    wrong = {words: said for words, said in runs.items() if said}
    report.checks += [CheckResult(f"compiled, {x}", "failed" if said else "passed", said) for x, said in runs.items()]
    uncompiled = "rewritten as torch.compile does first, but not compiled, for want of a C++ compiler"
    how = "compiled" if compiles else uncompiled
    report.notes.append(f"torch.compile: {how}; right in {len(runs) - len(wrong)} of {len(runs)} runs.")
    if wrong:
        report.findings.append(_finding(wrong))
        report.verdict = "deviates"


def _in_words(length: int, gradients: bool) -> str:
    return f"{length} tokens, {'with' if gradients else 'without'} gradients"


def _finding(wrong: Mapping[str, str]) -> Finding:
    runs = ". ".join(f"{words}: {said}" for words, said in itertools.islice(wrong.items(), 3))
    return Finding(
        NAME,
        "context",
        f"Under torch.compile the code does not compute what it computes in eager mode. {runs}. "
        "Inductor may replace what looks like attention by its own kernel (pytorch/pytorch#195320).",
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


def _wrong(trial: Trial, length: int, gradients: bool, backend: Any) -> str:
    """Say where compiled code differs from the same in eager mode; "" if nowhere."""
    torch._dynamo.reset()
    exact = _outputs(trial, length, gradients, torch.float64, lambda function: function)
    eager = _outputs(trial, length, gradients, torch.float32, lambda function: function)
    options: dict[str, Any] = {"dynamic": False} | ({"backend": backend} if backend else {})
    try:
        with torch._inductor.config.patch(compile_threads=1):
            compiled = _outputs(trial, length, gradients, torch.float32, lambda f: torch.compile(f, **options))
    except Exception as error:  # a compiler fails in any way
        lines = str(error).splitlines()
        return f"it fails: {next((line for line in lines if 'Error: ' in line), said(error))}"
    largest = {
        kind: largest_value([x for name, x in exact.items() if (name == "output") == kind]) for kind in (True, False)
    }
    errors = (
        compare_errors(x, eager[name], exact[name], name=name, largest=largest[name == "output"])
        for name, x in compiled.items()
    )
    return "; ".join(
        x.misfit or f"{x.name} is off by {x.candidate_error:.2g} (eager: {x.builtin_error:.2g})"
        for x in errors
        if not x.passed
    )


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
