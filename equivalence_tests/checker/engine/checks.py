"""The small checks of an attention whose formula is right, such as its float32 error, or that two calls agree.

Each is a function ``check_*`` of the call and the report so far. It returns whether that "passed", "failed" or was
"skipped", as it does not apply, and what it saw.
"""

from collections.abc import Callable
from functools import partial

import torch

from equivalence_tests.checker.engine.precisions import errors_in, incomparable
from equivalence_tests.checker.engine.ran import drawing_line
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.vocabulary import SAMPLES
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.state import ask
from equivalence_tests.checker.reporting.findings import NOT_JUDGED, CheckResult, Outcome
from equivalence_tests.checker.reporting.lines import frames_of
from equivalence_tests.checker.reporting.report import Report

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
