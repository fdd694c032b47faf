"""Find the line that keeps somebody's own call from being torch's attention: without one of its expressions, it is."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any
from unittest import mock

from torch import Tensor

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.exchanging import exchanges
from equivalence_tests.checker.engine.given_masks import GivenMasks
from equivalence_tests.checker.engine.judging import examine
from equivalence_tests.checker.engine.leaving_out import Repair
from equivalence_tests.checker.engine.meaning import Evidence
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.equivalent.calls import add_departures_of_weights
from equivalence_tests.checker.equivalent.locating import said_of_what_goes, torchs
from equivalence_tests.checker.equivalent.one_call import apart, holding_of, redrawn, unwritten
from equivalence_tests.checker.equivalent.search import Rest, Search
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reporting.report import Report


@dataclass(frozen=True)
class OwnCall:
    """The call of a module that holds one attention, and the report on it, which could not be checked."""

    found: Examination
    layout: Layout
    report: Report
    intended: Mapping[str, str]

    def locate(self) -> None:
        """Look for an expression without which it is torch's attention."""
        departures = self._departures  # adds those of weights
        search = Search(self._drawn, self._output, first=[*exchanges(self.found)] if departures else ())
        search.locate(self.report, self._without, self.intended)

    @property
    def call(self) -> Call:
        """What is called."""
        return self.found.call

    @cached_property
    def _departures(self) -> list[Departure]:
        return _explained(self.found)

    def _drawn(self, seed: int) -> Call:
        tokens = [x for _, x in self.call.tensors if id(x) in self.call.seeds]
        return redrawn(self.call, tokens, seed) if seed else self.call

    def _output(self, returned: Any) -> Tensor:
        return self.layout.outward(self.layout.output(returned))

    def _without(self, repair: Repair) -> Rest | None:
        """Compare the call without an expression with torch's program of it; None if that is not the same."""
        module = self.call.module
        assert module is not None  # it is what is called
        forward = wraps(module.forward)(partial(repair.run, module.forward))
        with mock.patch.object(module, "forward", forward):
            found, layout = _alone(self.call)
            departures = _explained(found)
            holding = torchs(departures, partial(holding_of, found, layout), self.report.intended, self.intended)
        if holding is None or (found.call.function, layout) != (self.call.function, self.layout):
            return None
        return Rest(
            unwritten(holding, self.report),
            lambda seed: holding.program(layout.values(self._drawn(seed))),
            holding.comparison.tolerance,
            said_of_what_goes(self._departures, departures),
        )


def locate_in_call(report: Report, call: Call, intended: Mapping[str, str]) -> None:
    """Look in a call that could not be checked for an expression without which it is torch's attention."""
    with contextlib.suppress(UnreadError):
        found, layout = _alone(call)
        OwnCall(found, layout, report, intended).locate()


def _alone(call: Call) -> tuple[Examination, Layout]:
    """Examine the one attention of a call, or the sub-module that holds it."""
    found = examine(call, GivenMasks(call))
    if len(found.judgements) != 1:
        raise UnreadError("there is not one attention in it")
    return apart(found, found.judgements[0])


def _explained(found: Examination) -> list[Departure]:
    """What departs in a call, each with the evidence that it is intended."""
    add_departures_of_weights(found, 0)
    return Evidence(found.judgements[0], found.call.module).added_to(found.departures[0])
