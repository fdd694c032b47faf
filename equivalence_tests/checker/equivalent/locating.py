"""Find the line that keeps code from being torch's attention: without one of its expressions, it is."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.exchanging import exchanges
from equivalence_tests.checker.engine.leaving_out import Repair
from equivalence_tests.checker.engine.meaning import Evidence
from equivalence_tests.checker.engine.naming import finding_of
from equivalence_tests.checker.engine.situations import Situation, situation_of
from equivalence_tests.checker.equivalent.deciding import Holding
from equivalence_tests.checker.equivalent.holding import Held
from equivalence_tests.checker.equivalent.proving import Proving
from equivalence_tests.checker.equivalent.search import Rest, Search
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.report import Report

OF_ANOTHER_SORT = ("residual",)  # steps that right attentions have without saying so


def locate(report: Report, situation: Situation) -> None:
    """Look for an expression without which the code is torch's attention, where a report does not say what is wrong."""
    layout = Layout.of(situation.trial)
    search = Search(
        lambda seed: situation.call.redrawn(seed or None),
        lambda found: layout.outward(layout.output(found)),
        first=[*exchanges(situation.found)] if situation.judgement is not None else (),
    )
    search.locate(report, partial(_without, report, situation), situation.subject.adapter.intended)


def _without(report: Report, before: Situation, repair: Repair) -> Rest | None:
    """Compare the code without an expression with torch's program of it; None if that is not the same."""
    situation = situation_of(before.subject, _left_out(before.trial, repair))
    situation.understood = before.understood
    situation.other_masks = [replace(one, trial=_left_out(one.trial, repair)) for one in before.other_masks]
    if situation.judgement is None:
        return None
    departures, asked, held = _explained(situation), before.subject.adapter.intended, Held(situation)
    holding = torchs(departures, held.holding, report.intended, asked)
    if holding is None:
        return None
    doubt, values = said_of_what_goes(_explained(before), departures), Proving(before).values
    written = held.written(holding, report)
    return Rest(written, lambda seed: holding.program(values(seed)), holding.comparison.tolerance, doubt)


def torchs(
    departures: Sequence[Departure], read: Callable[[], Holding], intended: Sequence[Finding], asked: Collection[str]
) -> Holding | None:
    """Give the program of code without an expression, and how it compares; None if the code is not torch's then."""
    if any(not one.evidence and one.name not in asked for one in departures):
        return None
    holding = read()
    evidence = holding.evidence([*intended, *map(finding_of, departures)])
    unsaid = [step for step, said in evidence.items() if not said and step.stage not in OF_ANOTHER_SORT]
    return holding if holding.agrees and not unsaid else None


def said_of_what_goes(before: Sequence[Departure], after: Sequence[Departure]) -> str:
    """Say that what is intended goes with an expression; "" where nothing does."""
    kept = {one.name for one in after}
    gone = (one for one in before if one.evidence and one.name not in kept)
    return next((f"{one.name} goes with it, and {one.evidence}" for one in gone), "")


def _explained(situation: Situation) -> list[Departure]:
    """What departs in a call, each with the evidence that it is intended."""
    judgement = situation.judgement
    found = None if judgement is None else Evidence(judgement, situation.subject.module)
    return [] if found is None else found.added_to(situation.departures)


def _left_out(trial: Trial, repair: Repair) -> Trial:
    """The same way to call the code, without an expression."""
    called = trial.called
    return replace(trial, adapted=lambda _, *args, **kwargs: repair.run(called, *args, **kwargs))
