"""What lower precision makes of somebody's code, beside torch's program in the same precision."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.agreeing import output_with
from equivalence_tests.checker.engine.running import Call, in_dtype
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.reach.calling import from_layout
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.state import ask, default_dtype, retype
from equivalence_tests.checker.reporting.equivalents import Equivalent, taken
from equivalence_tests.checker.reporting.lines import raised_at
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.instruments.differences import ErrorRatio, compare_errors

INPUTS = 5
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
UNIMPLEMENTED = "not implemented for"  # an operation that torch does not have in half precision on a CPU


def incomparable(situation: Situation, program: Equivalent | None) -> str:
    """Say why errors cannot be compared with those of torch's program; "" if they can."""
    if program is None or not (program.source and program.agrees):
        return "torch's program is not written down"
    if situation.plan.neutral not in (None, situation.understood):
        return "torch's program takes a mask of another form"
    return ""


def errors_in(dtype: torch.dtype, situation: Situation, program: Equivalent) -> ErrorRatio:
    """Compare the errors of the code and of torch's program in a lower precision."""
    calls = map(situation.call.redrawn, range(1, INPUTS + 1))  # one alone may be rounded well by chance
    given = [in_dtype((one.args, one.kwargs), dtype) for one in calls]
    module = _retyped(situation.subject.function, dtype)
    ours = partial(_of_program, program, situation.plan.output_layout)
    exact = torch.stack([ours(situation.subject.function, in_dtype(one, torch.float64)) for one in given])
    with default_dtype(dtype), torch.no_grad():  # a mask made inside is then of the scores' dtype
        builtin = torch.stack([ours(module, in_dtype(one, None)) for one in given])
        theirs = [situation.trial.output_in(Call(module, *one).returned()) for one in given]
    return compare_errors(torch.stack(theirs).to(dtype), builtin, exact, name="output")


def in_half_precision(situation: Situation, report: Report) -> list[str]:
    """Say where the code raises in half precision, what becomes nan, and what is rounded more than torch rounds it."""
    if situation.subject.dtype != torch.float64 or situation.subject.module is None:
        return []
    words = {name: _in_half(dtype, situation, report.equivalent) for name, dtype in HALVES.items()}
    alike = {text: [name for name, other in words.items() if other == text] for text in words.values() if text}
    return [f"in {' and '.join(names)}, {text}" for text, names in alike.items()]


def _in_half(dtype: torch.dtype, situation: Situation, program: Equivalent | None) -> str:
    trial = replace(situation.trial, function=_retyped(situation.subject.function, dtype), dtype=dtype)
    for form in dict.fromkeys((None, situation.understood)):
        given = f" with {trial.plan.mask_parameter}" if form is not None else ""
        answer = _asked(dtype, partial(output_with, trial, form))
        if isinstance(answer, str):
            return answer
        if not bool(answer.isfinite().all()):
            return f"the output{given} is not finite"
    if program is None or incomparable(situation, program):
        return ""
    errors = _asked(dtype, partial(errors_in, dtype, situation, program))
    if isinstance(errors, str) or errors.passed or errors.misfit:
        return ""
    return f"the error of the output is {errors.ratio:,.1f} times that of torch's program"


def _asked(dtype: torch.dtype, call: Callable[[], Any]) -> Any:
    """Give what a call gives in a precision, or say that it raises."""
    with default_dtype(dtype), torch.no_grad():
        answer = ask(call)
    if answer.error is None:
        return answer.value
    line = raised_at(answer.error)
    return f"it raises {said(answer.error)}{line}" if line and UNIMPLEMENTED not in str(answer.error) else ""


def _retyped(function: Any, dtype: torch.dtype) -> nn.Module:
    module: nn.Module = copy.deepcopy(function)
    retype(module, dtype)
    return module


def _of_program(program: Equivalent, layout: str, theirs: Any, one: Any) -> Tensor:
    made = program.of(theirs)
    args, kwargs = taken(made.forward, *one)
    return from_layout(made(*args, **kwargs), layout)
