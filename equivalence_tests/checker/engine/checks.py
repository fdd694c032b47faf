"""The small checks of an attention whose formula is right, such as its float32 error, or that two calls agree.

Each is a function ``check_*`` of the call and the report so far. It returns what it saw, raises ``FailedError`` with
what is wrong, or ``SkippedError`` with why it does not apply.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.intervening import reference
from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.running import Call, in_dtype
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.vocabulary import SAMPLES
from equivalence_tests.checker.engine.watching import Patch
from equivalence_tests.checker.mistakes import MISTAKES
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.state import ask, default_dtype, retype
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import NOT_JUDGED, CheckResult
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.instruments.differences import compare_errors

Check = Callable[[Situation, Report], str]
KEPT = frozenset(name for name, mistake in MISTAKES.items() if mistake.kept)
# Answered by the comparison with torch's program: the check, and what should be true.
ANSWERED = {
    "check_gradients": "The gradients of the arguments are those of torch's program",
    "check_returned_weights": "The returned weights are the ones that were used, for each head or averaged",
}


class FailedError(Exception):
    """The check found something wrong; the message says what."""


class SkippedError(Exception):
    """The check does not apply; the message says why."""


def attention_checks() -> list[Check]:
    """List the checks that make calls of their own, in the order of this file, which is that of the report."""
    return [check for name, check in globals().items() if name.startswith("check_")]


def all_checks() -> dict[str, str]:
    """Say for each check what should be true."""
    said = {check.__name__: (check.__doc__ or "").partition("\n")[0].rstrip(".") for check in attention_checks()}
    return ANSWERED | said


def judge_checks(report: Report) -> None:
    """Make the verdict "deviates" if a check failed; without a finding, the reason says what should be true."""
    failed = [check.name for check in report.checks if check.outcome == "failed" and check.name not in NOT_JUDGED]
    report.verdict = "deviates" if failed else report.verdict
    if failed and not report.findings:
        said = all_checks()
        report.reason = f"This should be true but is not: {'; '.join(said[name] for name in failed)}."


def run_check(check: Check, situation: Situation, report: Report) -> CheckResult:
    """Run one check; an exception raised by the user's code fails it."""
    name, answer = check.__name__, ask(partial(check, situation, report))
    match answer.error:
        case None:
            return CheckResult(name, "passed", answer.value or "")
        case SkippedError() | NotImplementedError() as error:  # the user's code may raise the latter
            return CheckResult(name, "skipped", str(error) or "it raises NotImplementedError")
        case FailedError() as error:
            return CheckResult(name, "failed", str(error))
        case error:
            return CheckResult(name, "failed", f"raised {said(error)}")


def _first(run: Run) -> Tensor:
    return next(tensors_in((run.output,)))


def _formula(situation: Situation, report: Report, dtype: torch.dtype) -> dict[int, Patch]:
    """Patches that put torch's softmax(scores) @ values in place; skips the check where a deviation is intended."""
    others = [finding.name for finding in report.intended if finding.name not in KEPT]
    judgements = situation.found.judgements
    if others or any(judgement.attention.tiled for judgement in judgements):
        raise SkippedError(f"the formula is a different one: {', '.join(others) or 'tiles'}")
    if not all(model.has_choice for judgement in judgements for model in judgement.models):
        raise SkippedError("no query had more than one key to choose from")
    return {index: patch for judgement in judgements for index, patch in reference(judgement, dtype).items()}


def check_float32_error(situation: Situation, report: Report) -> str:
    """In float32 the error is at most twice that of the built-in, plus a few units in the last place."""
    subject, double = situation.subject, situation.call
    if subject.dtype != torch.float64 or not isinstance(subject.function, nn.Module):
        raise SkippedError("computed in float32 throughout" if subject.module else "no module")
    exact, single = (_formula(situation, report, dtype) for dtype in (torch.float64, torch.float32))
    module = copy.deepcopy(subject.function)
    retype(module, torch.float32)
    args, kwargs = in_dtype((double.args, double.kwargs), torch.float32)
    call = Call(module, args, kwargs)
    args, kwargs = in_dtype((args, kwargs), torch.float64)
    widened = replace(double, args=args, kwargs=kwargs)
    with default_dtype(torch.float32):  # a mask made inside is then of the scores' dtype
        answer = ask(partial(call.run, read=False))
        mine = answer.value
        if mine is None:
            assert answer.error is not None  # a run gives something
            raise SkippedError(f"in float32 it raises {said(answer.error)}") from answer.error
        if [op.name for op in mine.operations] != [op.name for op in situation.found.run.operations]:
            raise SkippedError("in float32 it takes other steps")
        builtin = call.run(single, read=False)
    right = _first(widened.run(exact, read=False)).double()
    ratio = compare_errors(_first(mine), _first(builtin), right, name="output")
    if not ratio.passed:
        raise FailedError(str(ratio))
    return f"error {ratio.candidate_error:.1g} against {ratio.builtin_error:.1g} of the built-in"


def check_eval_is_deterministic(situation: Situation, _: Report) -> str:
    """Two calls in eval give the same numbers."""
    trial = situation.trial
    if any(op.name in SAMPLES and op.frames for op in situation.found.run.operations):
        raise SkippedError("it draws a sample in each call")
    with torch.no_grad():
        first, second = (trial.output(trial.inputs(seed=111)).double() for _ in range(2))
    if not torch.equal(first.nan_to_num(), second.nan_to_num()):
        raise FailedError("two calls in eval differ")
    return ""
