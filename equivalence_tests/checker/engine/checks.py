"""The small checks of an attention whose formula is right, such as its float32 error, or that two calls agree.

Each is a function ``check_*`` of the call and the report so far. It returns whether that "passed", "failed" or was
"skipped", as it does not apply, and what it saw.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.ran import drawing_line
from equivalence_tests.checker.engine.running import Call, in_dtype
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.vocabulary import SAMPLES
from equivalence_tests.checker.reach.calling import from_layout
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.state import ask, default_dtype, retype
from equivalence_tests.checker.reporting.equivalents import taken
from equivalence_tests.checker.reporting.findings import NOT_JUDGED, CheckResult, Outcome
from equivalence_tests.checker.reporting.lines import frames_of
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.instruments.differences import compare_errors

Answer = tuple[Outcome, str]
Check = Callable[[Situation, Report], Answer]
INPUTS = 5
# Answered by the comparison with torch's program: the check, and what should be true.
ANSWERED = {
    "check_gradients": "The gradients of the arguments are those of torch's program",
    "check_returned_weights": "The returned weights are the ones that were used, for each head or averaged",
}


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
    if subject.dtype != torch.float64 or not isinstance(subject.function, nn.Module):
        return "skipped", "computed in float32 throughout" if subject.module else "no module"
    if program is None or not (program.source and program.agrees):
        return "skipped", "torch's program is not written down"
    if situation.plan.neutral not in (None, situation.understood):
        return "skipped", "torch's program takes a mask of another form"

    def ours(theirs: nn.Module, one: Any) -> Tensor:
        made = program.of(theirs)
        args, kwargs = taken(made.forward, *one)
        return from_layout(made(*args, **kwargs), situation.plan.output_layout)

    module = copy.deepcopy(subject.function)
    retype(module, torch.float32)
    calls = map(situation.call.redrawn, range(1, INPUTS + 1))  # one alone may be rounded well by chance
    given = [in_dtype((one.args, one.kwargs), torch.float32) for one in calls]
    exact = torch.stack([ours(subject.function, in_dtype(one, torch.float64)) for one in given])
    with default_dtype(torch.float32), torch.no_grad():  # a mask made inside is then of the scores' dtype
        builtin = torch.stack([ours(module, in_dtype(one, None)) for one in given])
        answer = ask(lambda: [situation.trial.output_in(Call(module, *one).returned()) for one in given])
    if answer.error is not None or answer.value is None:
        return "skipped", f"in float32 it raises {said(answer.error)}" if answer.error is not None else ""
    ratio = compare_errors(torch.stack(answer.value).float(), builtin, exact, name="output")
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
