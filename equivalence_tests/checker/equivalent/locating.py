"""Find the line that keeps code from being torch's attention: without one of its expressions, it is."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.leaving_out import Repair, Without
from equivalence_tests.checker.engine.meaning import Evidence
from equivalence_tests.checker.engine.naming import finding_of
from equivalence_tests.checker.engine.running import named_tensors
from equivalence_tests.checker.engine.situations import Situation, situation_of
from equivalence_tests.checker.equivalent.comparing import difference_of
from equivalence_tests.checker.equivalent.doubting import Doubt
from equivalence_tests.checker.equivalent.holding import Held, layout_of
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.proving import Proving, proven
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.state import ask, attempt, keeping_state
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import ABOVE_ROUNDING, Finding, Proof
from equivalence_tests.checker.reporting.lines import code_lines
from equivalence_tests.checker.reporting.report import Report

T = TypeVar("T")
MOST_TRIED, MOST_OPERATIONS = 40, 600
OF_ANOTHER_SORT = ("residual",)  # steps that right attentions have without saying so


def locate(report: Report, situation: Situation) -> None:
    """Look for an expression without which the code is torch's attention, where a report does not say what is wrong.

    Args:
        report: Could not be checked; receives the finding with its proof, or the line in its reason.
        situation: One call.
    """
    if len(situation.found.run.operations) <= MOST_OPERATIONS:
        _Locating(situation, report).locate()


def first_left_out(
    repairs: Iterable[Repair], output: Callable[[Repair | None], Tensor | None], without: Callable[[Repair], T | None]
) -> tuple[Repair, T] | None:
    """Find the first expression without which code is made of torch's parts.

    Args:
        repairs: The expressions.
        output: Gives what comes back without one, or as it is; None if the call fails.
        without: Gives what is known of the code without one; None where it is not made of torch's parts.

    Returns:
        The expression, and what is known without it; None where there is none among those that change the output.
    """
    before = output(None)
    changing = (one for one in repairs if before is not None and _differ(output(one), before))
    for repair in itertools.islice(changing, MOST_TRIED):
        found = ask(partial(without, repair)).value
        if found is not None:
            return repair, found
    return None


def _differ(after: Tensor | None, before: Tensor) -> bool:
    """Whether something of the same shape comes back, and not the same."""
    return after is not None and ABOVE_ROUNDING < difference_of(after, before) < math.inf


def say(
    report: Report,
    repair: Repair,
    written: Equivalent,
    proof: Proof,
    doubt: str,
    words: tuple[str, str] = ("torch's attention", "torch's"),
) -> None:
    """Blame an expression without which code is torch's, or name it where it may be intended.

    Args:
        report: Could not be checked; receives the finding with its proof, or the line in its reason.
        repair: What is left out.
        written: Torch's program of the rest.
        proof: What leaving it out does.
        doubt: Why it may be intended; "" where nothing says so.
        words: What it is no part of, and what the code is without it.
    """
    name, lines = name_of(repair), code_lines(repair.operation.frames)
    if doubt:
        said, kept = _written(repair)
        change = f"With {kept} in the place of {said}" if kept else f"Without {said}"
        report.reason += (
            f" {change} in line {lines[-1].number} it is {words[0]} to {proof.error:.0e}; as it is, the difference "
            f"is {proof.without:.2g}. It may be intended: {doubt}."
        )
        return
    known = next((one for one in report.suspected if one.name.endswith(name)), _finding(name, repair, *words))
    report.findings = [replace(known, stack=lines, proof=proof)]
    report.verdict, report.reason, report.suspected, report.unread = "deviates", "", [], ""
    report.checks = []  # that they pass says nothing now
    report.equivalent = replace(written, agrees=False, difference=proof.without, where="output, fresh inputs")


def _finding(name: str, repair: Repair, whole: str, torchs: str) -> Finding:
    said, kept = _written(repair)
    without = f"with {kept} in its place" if kept else "without it"
    fix = f"Write {kept} instead" if kept else "Leave it out"
    fix += ", and leave out the other cut on this line" if len(repair.left_out) > 1 else ""
    return Finding(
        name,
        "whole",
        f"{said} is not part of {whole}: {without}, this is {torchs}.",
        said,
        kept or f"the same without {repair.operation.name}",
        f"{fix}, or say with --intended {name}=REASON that it is intended.",
    )


def name_of(repair: Repair) -> str:
    """Name an expression as a finding."""
    return f"changed_by_{repair.operation.name}"


def _written(repair: Repair) -> tuple[str, str]:
    """The expression, and what takes its place."""
    said, kept = repair.written
    return said or repair.operation.name, kept


@dataclass
class _Locating:
    """Leaves one expression out after the other, and compares what remains with torch.

    Args:
        situation: One call of the code as it is.
        report: What is known of it.
    """

    situation: Situation
    report: Report

    def locate(self) -> None:
        """Say which is the last expression without which the code is torch's attention, if there is one."""
        trial, subject = self.situation.trial, self.situation.subject
        args, kwargs, _ = self.situation.call.fresh()
        watched = Without(named_around(subject.module, args, kwargs))
        returned = attempt(partial(watched.run, trial.called, *args, **kwargs))
        found = first_left_out(watched.repairs(returned), self._output, self._without)
        if found is not None:
            repair, (written, proof, doubt) = found
            doubt = subject.adapter.intended.get(name_of(repair), "") or doubt
            say(self.report, repair, written, proof, doubt or Doubt(watched, repair, subject.module).said())

    def _output(self, repair: Repair | None, seed: int | None = None) -> Tensor | None:
        """What comes back without an expression, or as it is, (b, q, e), as doubles; None if the call fails."""
        called, layout = self.situation.trial.called, layout_of(self.situation.trial)
        function = called if repair is None else partial(repair.run, called)
        args, kwargs, _ = self.situation.call.fresh(seed)
        with keeping_state(self.situation.subject.module):
            return attempt(lambda: layout.outward(layout.output(function(*args, **kwargs))).double())

    def _without(self, repair: Repair) -> tuple[Equivalent, Proof, str] | None:
        """Give torch's program of the code without an expression, the proof, and a doubt; None if it is not torch's."""
        situation = situation_of(self.situation.subject, _left_out(self.situation.trial, repair))
        situation.understood = self.situation.understood
        others = self.situation.other_masks
        situation.other_masks = [replace(one, trial=_left_out(one.trial, repair)) for one in others]
        if situation.judgement is None:
            return None
        departures, before = _explained(situation), _explained(self.situation)
        asked = self.situation.subject.adapter.intended
        if any(not one.evidence and one.name not in asked for one in departures):
            return None
        held = Held(situation)
        holding = held.holding()
        intended = [*self.report.intended, *map(finding_of, departures)]
        steps = [step for step, said in holding.evidence(intended).items() if not said]
        if not holding.agrees or any(step.stage not in OF_ANOTHER_SORT for step in steps):
            return None
        gone = {
            one.name: one.evidence for one in before if one.evidence and one.name not in {x.name for x in departures}
        }
        doubt = next((f"{name} goes with it, and {said}" for name, said in gone.items()), "")
        proof = proven(self.situation.subject.module, partial(self._gaps, holding.program, repair))
        return None if proof is None else (held.written(holding, self.report), proof, doubt)

    def _gaps(self, program: Program, repair: Repair, seed: int) -> tuple[float, float]:
        """How far the code is from a program without an expression, and with it."""
        values = Proving(self.situation, layout_of(self.situation.trial)).values(seed)
        want = program(values.given, values.module, values.parameters)
        return gap_of(want, self._output(repair, seed)), gap_of(want, self._output(None, seed))


def gap_of(want: Tensor, have: Tensor | None) -> float:
    """How far what comes back is from what a program gives; infinite where nothing does."""
    return math.inf if have is None else difference_of(want, have)


def named_around(module: nn.Module | None, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    """List what a module holds, and the tensors of a call, each with its name."""
    held = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
    return [*held, *named_tensors(args, kwargs)]


def _explained(situation: Situation) -> list[Departure]:
    """What departs in a call, each with the evidence that it is intended."""
    judgement = situation.judgement
    found = None if judgement is None else Evidence(judgement, situation.subject.module)
    return [] if found is None else found.added_to(situation.departures)


def _left_out(trial: Trial, repair: Repair) -> Trial:
    """The same way to call the code, without an expression."""
    called = trial.called
    return replace(trial, adapted=lambda _, *args, **kwargs: repair.run(called, *args, **kwargs))
