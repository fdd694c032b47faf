"""What was exercised beyond the call that was judged, and what came out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.branches import RAN
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.state import ask, attempt
from equivalence_tests.checker.reporting.findings import Exercise, Finding
from equivalence_tests.checker.reporting.lines import code_lines, frames_of, is_refusal
from equivalence_tests.checker.reporting.report import Report

Failed = Callable[[str, str], None]
Judge = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Sequence[Report]]
Look = Callable[[], tuple[Sequence[Finding], str]]
NO_MISTAKES = (ImportError, NotImplementedError, MemoryError)  # what code may raise that is right


@dataclass
class Covered:
    """What was exercised beyond the call that was judged, and what came out."""

    trial: Trial  # a way to call it that was judged
    calls: Sequence[tuple[Trial, MaskForm | None]]  # the calls without a mask and with each
    judge: Judge  # judges a call of a function with its arguments, as the one before was
    exercises: list[Exercise] = field(default_factory=list)  # what was run, or not
    findings: list[Finding] = field(default_factory=list)  # what deviates
    intended: list[Finding] = field(default_factory=list)  # what deviates on purpose

    def add(self, what: str, findings: Sequence[Finding], detail: str = "") -> None:
        """Note that something was run, with a verdict."""
        self.exercises.append(Exercise(what, True, detail))
        known = {(finding.name, finding.line) for finding in self.findings}
        self.findings += [finding for finding in findings if (finding.name, finding.line) not in known]

    def leave_out(self, what: str, why: str) -> None:
        """Note that there is no verdict on something."""
        self.exercises.append(Exercise(what, False, why))

    def run(self, what: str, look: Look, failed: Failed | None = None) -> bool:
        """Look at one more call, and say whether it ran.

        Where the code may raise, ``failed`` is called with the message; elsewhere raising is a mistake, unless the
        code itself refuses.
        """
        answer = ask(look)
        if answer.error is None:
            self.add(what, *(answer.value or ((), "")))
            return True
        error, stack = answer.error, code_lines(frames_of(answer.error))
        if isinstance(error, CannotCheckError):
            self.leave_out(what, str(error))
        elif failed is not None or is_refusal(error) or not stack or isinstance(error, NO_MISTAKES):
            (failed or self.leave_out)(what, said(error))
        else:
            facts, evidence = {"what": what, "said": said(error)}, "the same call without it works"
            self.add(what, [found_mistake("fails_with_what_it_offers", facts, stack=stack, evidence=evidence)])
        return isinstance(error, CannotCheckError)

    def reports(self, inputs: Inputs, extra: Mapping[str, Any]) -> Sequence[Report]:
        """Judge the attentions of one more call."""
        return self.judge(self.trial.function, *self.trial.arguments(inputs, extra))

    def judged(self, inputs: Inputs, extra: Mapping[str, Any]) -> tuple[list[Finding], str]:
        """Judge one more call: it has a verdict if each of its attentions has one."""
        reports = self.reports(inputs, extra)
        unread = [report.reason for report in reports if report.verdict == "unchecked"]
        if unread or not reports:
            raise CannotCheckError(next(iter(unread), "no attention was found in the call"))
        self.note(inputs, extra)
        return [finding for report in reports for finding in report.findings], ""

    def note(self, inputs: Inputs, extra: Mapping[str, Any]) -> None:
        """Note which ways the code goes in a call that was compared."""
        attempt(partial(RAN.watching(self.trial.output), inputs, extra))
