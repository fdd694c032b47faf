"""Find the line that keeps code, or one call, from being torch's attention: without one of its expressions, it is."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.leaving_out import Repair, exchanges
from equivalence_tests.checker.engine.meaning import Evidence
from equivalence_tests.checker.engine.naming import finding_of
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.engine.situations import Situation, situation_of
from equivalence_tests.checker.equivalent.calls import (
    add_departures_of_weights,
    apart,
    examined_alone,
    holding_of,
    redrawn,
    unwritten,
)
from equivalence_tests.checker.equivalent.deciding import Holding
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.holding import Held
from equivalence_tests.checker.equivalent.proving import Proving
from equivalence_tests.checker.equivalent.search import Rest, Search, left_out_of
from equivalence_tests.checker.equivalent.steps import UnreadError
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.report import Report

OF_ANOTHER_SORT = ("residual",)  # steps that right attentions have without saying so


@dataclass(frozen=True)
class _Rests:
    """Compares what is left of code without an expression with torch's program of it."""

    report: Report  # on the code as it is, which could not be checked
    asked: Mapping[str, str]  # what the user says is intended
    before: Sequence[Departure]  # what departs in the code as it is
    values: Callable[[int], Values]  # gives what a program computes from, with the inputs of a seed
    written: Callable[[Holding, Report], Equivalent]

    def of(self, after: Sequence[Departure], read: Callable[[], Holding]) -> Rest | None:
        """Compare what departs in this way and is read so; None if it is not torch's."""
        if any(not one.evidence and one.name not in self.asked for one in after):
            return None
        holding = read()
        evidence = holding.evidence([*self.report.intended, *map(finding_of, after)])
        unsaid = [step for step, said in evidence.items() if not said and step.stage not in OF_ANOTHER_SORT]
        if not holding.comparison.agrees or unsaid:
            return None
        written, rounding = self.written(holding, self.report), holding.comparison.tolerance
        return Rest(written, lambda seed: holding.program(self.values(seed)), rounding, self._goes(after))

    def _goes(self, after: Sequence[Departure]) -> str:
        """Say that what is intended goes with an expression; "" where nothing does."""
        kept = {one.name for one in after}
        gone = (one for one in self.before if one.evidence and one.name not in kept)
        return next((f"{one.name} goes with it, and {one.evidence}" for one in gone), "")


def locate(report: Report, situation: Situation) -> None:
    """Look for an expression without which the code is torch's attention, where a report does not say what is wrong."""
    layout, asked = Layout.of(situation.trial), situation.subject.adapter.intended
    before, values = _departing(situation), Proving(situation).values

    def rest(repair: Repair) -> Rest | None:
        other = situation_of(situation.subject, _left_out(situation.trial, repair))
        other.understood = situation.understood
        other.other_masks = [replace(one, trial=_left_out(one.trial, repair)) for one in situation.other_masks]
        if other.judgement is None:
            return None
        held = Held(other)
        return _Rests(report, asked, before, values, held.written).of(_departing(other), held.holding)

    search = Search(
        lambda seed: situation.call.redrawn(seed or None),
        layout.tokens,
        first=[*exchanges(situation.found)] if situation.judgement is not None else (),
    )
    search.locate(report, rest, asked)


def locate_in_call(report: Report, call: Call, intended: Mapping[str, str]) -> None:
    """Look in a call that could not be checked for an expression without which it is torch's attention."""
    with contextlib.suppress(UnreadError):
        found, layout = _alone(call)
        call, before = found.call, _departing_in(found)
        tokens = [x for _, x in call.tensors if id(x) in call.seeds]

        def drawn(seed: int) -> Call:
            return redrawn(call, tokens, seed) if seed else call

        def rest(repair: Repair) -> Rest | None:
            with left_out_of(call.module, repair):
                other, same = _alone(call)
                if (other.call.function, same) != (call.function, layout):
                    return None
                return rests.of(_departing_in(other), partial(holding_of, other, layout))

        rests = _Rests(report, intended, before, lambda seed: layout.values(drawn(seed)), unwritten)
        Search(drawn, layout.tokens, first=[*exchanges(found)] if before else ()).locate(report, rest, intended)


def _alone(call: Call) -> tuple[Examination, Layout]:
    """Examine the one attention of a call, or the sub-module that holds it."""
    found = examined_alone(call)
    return apart(found, found.judgements[0])


def _departing(situation: Situation) -> list[Departure]:
    """What departs in a call, each with the evidence that it is intended."""
    judgement = situation.judgement
    found = None if judgement is None else Evidence(judgement, situation.subject.module)
    return [] if found is None else found.added_to(situation.departures)


def _departing_in(found: Examination) -> list[Departure]:
    """The same in somebody's own call, with what its weights show."""
    add_departures_of_weights(found, 0)
    return Evidence(found.judgements[0], found.call.module).added_to(found.departures[0])


def _left_out(trial: Trial, repair: Repair) -> Trial:
    """The same way to call the code, without an expression."""
    called = trial.called
    return replace(trial, adapted=lambda _, *args, **kwargs: repair.run(called, *args, **kwargs))
