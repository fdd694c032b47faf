"""The small checks of an attention whose formula is right: do two calls agree, what does lower precision make of it?

Each is a function ``check_*`` of the call and the report so far. It returns whether that "passed", "failed" or was
"skipped", as it does not apply, and what it saw.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.agreeing import output_with
from equivalence_tests.checker.engine.ran import drawing_line
from equivalence_tests.checker.engine.running import Call, in_dtype
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.vocabulary import SAMPLES
from equivalence_tests.checker.reach.calling import from_layout
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.state import ask, default_dtype, retype
from equivalence_tests.checker.reporting.equivalents import Equivalent, taken
from equivalence_tests.checker.reporting.findings import NOT_JUDGED, CheckResult, Outcome
from equivalence_tests.checker.reporting.lines import frames_of, raised_at
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.instruments.differences import ErrorRatio, compare_errors

Answer = tuple[Outcome, str]
Check = Callable[[Situation, Report], Answer]
INPUTS = 5
# Answered by the comparison with torch's program: the check, and what should be true.
ANSWERED = {
    "check_gradients": "The gradients of the arguments are those of torch's program",
    "check_returned_weights": "The returned weights are the ones that were used, for each head or averaged",
}
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
UNIMPLEMENTED = "not implemented for"  # an operation that torch does not have in half precision on a CPU


def all_checks() -> dict[str, str]:
    """Say for each check what should be true."""
    own = (check_float32_error, check_eval_is_deterministic)
    return ANSWERED | {check.__name__: (check.__doc__ or "").partition("\n")[0].rstrip(".") for check in own}


def judge_checks(report: Report) -> None:
    """Make the verdict "deviates" if a check failed; without a finding, the reason says what should be true."""
    failed = [check.name for check in report.checks if check.outcome == "failed" and check.name not in NOT_JUDGED]
    report.verdict = "deviates" if failed else report.verdict
    if failed and not report.findings:
        said = all_checks()
        report.reason = f"This should be true but is not: {'; '.join(said[name] for name in failed)}."


def run_check(check: Check, situation: Situation, report: Report) -> CheckResult:
    """Run one check; an exception that the user's code raised fails it, and one of the check itself skips it."""
    name, answer = check.__name__, ask(partial(check, situation, report))
    match answer.error:
        case None:
            return CheckResult(name, *(answer.value or ("passed", "")))
        case NotImplementedError() as error:  # the user's code may raise it
            return CheckResult(name, "skipped", str(error) or "it raises NotImplementedError")
        case error:
            return CheckResult(name, "failed" if frames_of(error) else "skipped", f"raised {said(error)}")


def check_float32_error(situation: Situation, report: Report) -> Answer:
    """In float32 the error is at most twice that of torch's program, plus a few units in the last place."""
    subject, program = situation.subject, report.equivalent
    if subject.dtype != torch.float64 or subject.module is None:
        return "skipped", "computed in float32 throughout" if subject.module else "no module"
    why = incomparable(situation, program)
    if why or program is None:
        return "skipped", why
    answer = ask(partial(errors_in, torch.float32, situation, program))
    if answer.value is None:
        return "skipped", f"in float32 it raises {said(answer.error)}" if answer.error is not None else ""
    ratio = answer.value
    if not ratio.passed:
        return "failed", str(ratio)
    return "passed", f"error {ratio.candidate_error:.1g} against {ratio.builtin_error:.1g} of torch's program"


def check_eval_is_deterministic(situation: Situation, _: Report) -> Answer:
    """Two calls in eval give the same numbers."""
    trial = situation.trial
    if any(op.name in SAMPLES and op.frames for op in situation.found.run.operations):
        return "skipped", "it samples in each call"
    if drawing_line(lambda: trial.output(trial.inputs(seed=111))) is not None:
        return "failed", "two calls in eval differ"
    return "passed", ""


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
