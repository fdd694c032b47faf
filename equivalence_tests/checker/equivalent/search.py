"""Search for the line that keeps code from being torch's: leave one expression out after the other, and prove it."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any
from unittest import mock

from torch import Tensor, nn

from equivalence_tests.checker.engine.leaving_out import Repair, Without
from equivalence_tests.checker.engine.running import Call, named_tensors
from equivalence_tests.checker.engine.taking_part import unused_parameters
from equivalence_tests.checker.equivalent.comparing import difference_of
from equivalence_tests.checker.equivalent.doubting import FACTOR, Doubt
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import EXACT, SINGLE, WrittenPart
from equivalence_tests.checker.equivalent.proving import proven
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.state import ask, attempt
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import ABOVE_ROUNDING, Finding, Proof
from equivalence_tests.checker.reporting.lines import code_lines
from equivalence_tests.checker.reporting.report import Report

OF_A_PART = ("query_changed_by_mul", "key_changed_by_mul")  # a factor of all of a query or key is named as a scale
MOST_TRIED, MOST_OPERATIONS = 40, 600


@dataclass(frozen=True)
class Rest:
    """Torch's program of code without an expression."""

    written: Equivalent
    computed: Callable[[int], Tensor]  # gives its numbers for the inputs of a seed
    rounding: float  # the greatest difference that is rounding
    doubt: str = ""  # why the expression may be intended; "" where nothing says so


@dataclass(frozen=True)
class Search:
    """What is searched."""

    drawn: Callable[[int], Call]  # gives a call with the inputs of a seed
    output: Callable[[Any], Tensor]  # finds what is compared in what comes back
    words: tuple[str, str] = ("torch's attention", "torch's")  # what it is no part of, and what the code is without it
    within: bool = False  # whether attentions are parts of it: any expression may then stand behind one
    fixed: Collection[int] = ()  # the ids of the modules whose expressions stay
    first: Sequence[Repair] = ()  # what else may put it right, and is tried first

    @cached_property
    def module(self) -> nn.Module | None:
        """What holds the parameters."""
        return self.drawn(0).module

    def locate(self, report: Report, rest: Callable[[Repair], Rest | None], intended: Mapping[str, str]) -> bool:
        """Look for an expression without which the code is torch's, and say whether there is one.

        The report could not be checked; it receives the finding with its proof, or the line in its reason. The rest is
        read without an expression; None where that is not torch's.
        """
        known: list[tuple[Repair, Rest, Proof, str]] = []
        for repair, watched in itertools.islice(self._repairs(known), MOST_TRIED):
            found = ask(partial(rest, repair)).value
            proof = None if found is None else self._proof(repair, found)
            if found is not None and proof is not None:
                doubt = intended.get(name_of(repair), "") or self._doubt(report, watched, repair, found)
                known += [(repair, found, proof, doubt)] if doubt or not known else []
                if doubt or repair.certain:  # of two ways to make it torch's, one may be intended
                    break
        if known:
            self._say(report, *known[-1])
        return bool(known)

    def _doubt(self, report: Report, watched: Without, repair: Repair, rest: Rest) -> str:
        """Say why an expression may be intended; "" where nothing says so."""
        if repair.certain:
            return ""
        doubt = rest.doubt or Doubt(watched, repair, Parameters.of(self.module).module, self.within).said()
        of_a_part = any(one.name in OF_A_PART for one in report.suspected) and doubt == FACTOR
        return "" if of_a_part else doubt

    def _repairs(self, known: Sequence[tuple[Repair, Rest, Proof, str]]) -> Iterator[tuple[Repair, Without]]:
        """Give the expressions without which something else of the same shape comes back, with the run.

        Once there is one without which it is torch's, only other operands of its last operation follow.
        """
        call, module = self.drawn(0), self.module
        held = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
        args, kwargs, _ = call.fresh()
        watched = Without([*held, *named_tensors(args, kwargs)])
        returned, before = attempt(partial(watched.run, call.function, *args, **kwargs)), self._gives(call)
        if before is None or len(watched.operations) > MOST_OPERATIONS:
            return
        ours = (x for x in watched.repairs(returned) if id(watched.holders[x.operation.index]) not in self.fixed)
        for one in itertools.chain(self.first, sorted(ours, key=lambda x: len(x.parts)) if self.within else ours):
            follows = not known or one.keeps_operand_of(known[0][0].operation)
            if follows and ABOVE_ROUNDING < _apart(before, self._gives(call, one)) < math.inf:
                yield one, watched

    def _gives(self, call: Call, repair: Repair | None = None) -> Tensor | None:
        """What comes back, as it is or without an expression; None if the call fails."""
        run = call.function if repair is None else partial(repair.run, call.function)
        return attempt(lambda: self.output(replace(call, function=run).returned()).double())

    def proofs(
        self, repairs: Sequence[Repair], rest: Callable[[Repair], Rest | None], known: Collection[str]
    ) -> list[Proof | None]:
        """Show for each of some repairs that it is needed, and that with all the code is torch's.

        The sub-modules that are known may be left out: what else has parameters of its own may be intended.
        """
        every = together(repairs)
        found = ask(partial(rest, every)).value
        if found is None or any(name.rpartition(".")[0] not in known for name in self._left_idle(every)):
            return [None] * len(repairs)
        others = [[one for one in repairs if one is not left] for left in repairs]
        return [self._proof(every, found, together(left) if left else None) for left in others]

    def _left_idle(self, repair: Repair) -> set[str]:
        """Name the parameters that take part, and take none with a repair."""
        call = self.drawn(0)
        repaired = replace(call, function=partial(repair.run, call.function))
        before, after = ({*unused_parameters(one.run(read=False), self.module)} for one in (call, repaired))
        return after - before

    def _proof(self, repair: Repair, rest: Rest, without: Repair | None = None) -> Proof | None:
        """Show that the code gives torch's numbers with a repair, and does not with less; None if it does."""

        def gaps(seed: int) -> tuple[float, float]:
            call, want = self.drawn(seed), rest.computed(seed)
            return _apart(want, self._gives(call, repair)), _apart(want, self._gives(call, without))

        return proven(self.module, gaps, rest.rounding)

    def _say(self, report: Report, repair: Repair, rest: Rest, proof: Proof, doubt: str) -> None:
        """Blame an expression, or name it where it may be intended."""
        name, lines = name_of(repair), code_lines(repair.operation.frames)
        if doubt:
            said, kept = repair.written
            change = f"With {kept} instead of {said}" if kept else f"Without {said}"
            report.reason += (
                f" {change} on line {lines[-1].number}, it is {self.words[0]} to {proof.error:.0e}; as it stands, the "
                f"difference is {proof.without:.2g}. It may be intended: {doubt}."
            )
            return
        known = next((one for one in report.suspected if one.name.endswith(name)), _finding(repair, *self.words))
        report.findings = [replace(known, stack=lines, proof=proof)]
        report.verdict, report.reason, report.suspected, report.unread = "deviates", "", [], ""
        report.checks = []  # that they pass says nothing now
        report.equivalent = replace(rest.written, agrees=False, difference=proof.without, where="output, fresh inputs")


def together(repairs: Sequence[Repair]) -> Repair:
    """Give what all of some repairs do."""
    return replace(repairs[0], left_out=tuple(one for repair in repairs for one in repair.left_out))


def look_closer(report: Report, locate: Callable[[Report], None]) -> None:
    """Blame an expression without which the code is torch's in the place of what is known less closely."""
    other = replace(report, verdict="unchecked", findings=[], reason="")
    locate(other)
    if other.findings:
        report.findings, report.equivalent, report.checks = other.findings, other.equivalent, other.checks


@contextmanager
def left_out_of(module: nn.Module | None, repair: Repair) -> Iterator[None]:
    """Let a module run without an expression."""
    assert module is not None  # it is what is called
    with mock.patch.object(module, "forward", wraps(module.forward)(partial(repair.run, module.forward))):
        yield


def rest_of_module(
    search: Search, read: Callable[[], Equivalent | None], weights: tuple[str, ...] = ()
) -> Callable[[Repair], Rest | None]:
    """Give what reads a module without an expression; the arguments that are weights of a function are named."""
    module = search.module
    assert module is not None  # a function of a part is made one

    def rest(repair: Repair) -> Rest | None:
        with left_out_of(module, repair):
            found = read()
        rounding = SINGLE if found is not None and found.difference > EXACT else EXACT
        return Rest(found, partial(computed, found), rounding) if found is not None and found.agrees else None

    def computed(found: Equivalent, seed: int) -> Tensor:
        computes = WrittenPart(found, weights).on(search.drawn(seed), search.output)
        return computes(Values({}, Parameters.of(module)), None)

    return rest


def _apart(want: Tensor, found: Tensor | None) -> float:
    return math.inf if found is None else difference_of(want, found)


def _finding(repair: Repair, whole: str, torchs: str) -> Finding:
    if repair.mistake:
        return found_mistake(repair.mistake)
    name, (said, kept) = name_of(repair), repair.written
    without = f"with {kept} in its place" if kept else "without it"
    fix = f"Write {kept} instead" if kept else "Remove it"
    fix += ", and remove the other cut on this line" if len(repair.left_out) > 1 else ""
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
    return repair.mistake or f"changed_by_{repair.operation.name}"
