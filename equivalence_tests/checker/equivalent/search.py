"""Search for the line that keeps code from being torch's: leave one expression out after the other, and prove it.

A right code of another sort may have an expression that torch's has not; then something can be said for it.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.graph import Graph
from equivalence_tests.checker.engine.leaving_out import Repair, Without
from equivalence_tests.checker.engine.meaning import SIZES
from equivalence_tests.checker.engine.running import Call, named_tensors
from equivalence_tests.checker.engine.same import HIDING, ROUNDING, constant_ratio, identical
from equivalence_tests.checker.engine.taking_part import unused_parameters
from equivalence_tests.checker.engine.vocabulary import ADDS, CASTS, CONTRACTIONS, MIXES, REDUCES, SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation, storage_of
from equivalence_tests.checker.equivalent.comparing import difference_of
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import EXACT, SINGLE, WrittenPart
from equivalence_tests.checker.equivalent.proving import proven
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.state import ask, attempt
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import ABOVE_ROUNDING, Finding, Proof
from equivalence_tests.checker.reporting.lines import code_lines
from equivalence_tests.checker.reporting.report import Report

ALIKE = 1e-3  # of sizes that a norm or a rotation leaves, relative
FACTOR = "it is a constant factor"
SETTING = re.compile(r"\bself\.(\w+)")
OF_A_PART = ("query_changed_by_mul", "key_changed_by_mul")  # a factor of all of a query or key is named as a scale
MOST_TRIED, MOST_OPERATIONS = 40, 600


@dataclass(frozen=True)
class Doubt:
    """What may be said for an expression."""

    watched: Without  # the run, with the places of its operations
    repair: Repair
    module: nn.Module  # the user's; an empty one for a function
    behind: bool = False  # whether it stands behind an attention, wherever it is, as in a layer

    def said(self) -> str:
        """Say what may be said for it; "" where nothing may."""
        out, instead = self.repair.operation.outputs[0].value.double(), self.repair.instead.value.double()
        if out.shape != instead.shape:
            return self._asked_for()
        of_values = of_its_values(out, instead) or self._rounds(out, instead)
        if of_values == FACTOR and any(one.name in REDUCES for one in self.repair.parts):
            of_values = ""  # a number that is made of the data is no constant
        of_values = of_values or self._zeroes_padding(out, instead)
        return self._asked_for() or self._adds_what_is_there() or of_values or self._acts()

    def _asked_for(self) -> str:
        """What has a name of its own: a parameter, a buffer, an argument, a part without parameters, a setting."""
        if self.repair.own:
            return f"{self.repair.own[0]} has no other use"
        if bent := self._bent():
            return f"{bent} has no other use"
        for one in self.repair.parts:
            holder = self.watched.holders[one.index]
            if holder is not None and holder is not self.module and next(holder.parameters(), None) is None:
                return f"a separate module does it, a {type(holder).__name__}"
        held = [vars(x) for x in self.module.modules()]
        for name in SETTING.findall(self.repair.left_out[0].place.text):
            if not SIZES.search(name) and any(isinstance(x.get(name), int | float | str) for x in held):
                return f"the setting {name} may ask for it"
        return ""

    def _bent(self) -> str:
        """The vector or number that is learnt of which a function is taken, as of a gate, if nothing else takes it."""
        instead, parts = self.repair.instead, self.repair.parts
        names = [name for name, x in zip(self.watched.names, self.watched.given, strict=True) if x.key == instead.key]
        users = Graph(self.watched.operations).users(instead)
        vector = instead.value.numel() == max(instead.value.shape, default=1)
        alone = all(one in parts for one in users) and not any(map(_mixes, self._way()))
        return names[0] if names and vector and alone else ""

    def _way(self) -> list[Operation]:
        """The operations that take what is left, or what others have made of it."""
        made, found = {storage_of(self.repair.instead.tensor)}, list[Operation]()
        for one in self.repair.parts:
            if made & {storage_of(x.tensor) for x in one.inputs}:
                made |= {storage_of(x.tensor) for x in one.outputs}
                found.append(one)
        return found

    def _adds_what_is_there(self) -> str:
        """A residual connection, or a branch: behind the scores, something is added that is made of other data."""
        operation = self.repair.operation
        between = [x for one in self._way() if one is not operation for x in one.outputs]
        made = {storage_of(x.tensor) for x in (self.repair.instead, *between)}
        held = {*dict(self.module.named_parameters()), *dict(self.module.named_buffers())}
        pairs = zip(operation.inputs, operation.origins, strict=True)
        outside = (bits for x, bits in pairs if storage_of(x.tensor) not in made)
        others = [bits for bits in outside if not held.issuperset(self.watched.named(bits))]
        return (
            "it adds what is computed from something else"
            if operation.name in ADDS and others and self._behind()
            else ""
        )

    def _zeroes_padding(self, out: Tensor, instead: Tensor) -> str:
        """A mask that is handed over, times tokens: those that it hides become 0."""
        operation = self.repair.operation
        names = [name.rpartition(":")[2] for bits in operation.origins for name in self.watched.named(bits)]
        masked = any(role_of_parameter(name) == "mask" for name in names)
        return "it sets padded tokens to 0" if masked and bool(((out == 0) | (out == instead)).all()) else ""

    def _acts(self) -> str:
        """The activation of a network behind the attention: a function of each number alone."""
        learnt = {storage_of(x.tensor) for x in self.watched.given}
        weighed = any(
            one.name in CONTRACTIONS and any(storage_of(x.tensor) in learnt for x in one.inputs)
            for one in self._behind()
        )
        outputs = (x for one in self.repair.parts for x in one.outputs)
        known = {storage_of(x.tensor) for x in (self.repair.instead, *outputs)}
        alone = all(
            not _mixes(one)
            and all(storage_of(x.tensor) in known for x in one.inputs)
            and (one.inputs or all(x.value.numel() == 1 for x in one.outputs))  # places are no constant
            for one in self.repair.parts
        )
        return "it is an activation" if weighed and alone and self._is_of_a_matrix() else ""

    def _is_of_a_matrix(self) -> bool:
        """Whether what is left is what a product gave, or that with its bias."""
        found = Graph(self.watched.operations).maker(self.repair.instead, self.repair.operation.index)
        if found is not None and found.name in ADDS:
            found = Graph(self.watched.operations).maker(found.inputs[0], found.index)
        return found is not None and found.name in CONTRACTIONS

    def _behind(self) -> list[Operation]:
        """The operations between the last softmax before the expression, and that; none if there is no softmax."""
        before = self.watched.operations[: self.repair.operation.index]
        if self.behind:
            return before
        last = max((one.index for one in before if one.name in SOFTMAXES), default=len(before))
        return before[last + 1 :]

    def _rounds(self, out: Tensor, instead: Tensor) -> str:
        close = torch.allclose(out, instead, rtol=0.02, atol=0.02 * float(instead.abs().max()))
        return "it rounds to another precision" if close and any(x.name in CASTS for x in self.repair.parts) else ""


def _mixes(one: Operation) -> bool:
    """Whether an operation is no function of each number alone; along an axis of one number it gives what it takes."""
    return one.name in MIXES and not identical(one.outputs[0].value, one.inputs[0].value)


def of_its_values(out: Tensor, instead: Tensor) -> str:
    """Say by its numbers what an expression may be: a factor, positions, a mask, a norm, a rotation; "" if none."""
    if bool((out == out.flatten()[0]).all()):
        return ""
    if (factor := constant_ratio(out, instead)) is not None:
        return FACTOR if factor > 0 else ""
    apart, ratio = out - instead, torch.where(instead == 0, 1.0, out / instead)
    if bool((apart[apart != 0] <= -HIDING).all()):
        return "it hides keys"
    of_places = (_is_same(x, 0) and not _is_same(x, -2) for x in (apart, ratio))
    if out.dim() > 2 and not _is_same(instead, 0) and any(of_places):
        return "it depends on positions alone"
    for axis in (-1, -2) if out.dim() > 1 else ():
        if _is_normal(out, axis) and not _is_normal(instead, axis):
            return "it normalises"
    turned = bool((out < 0).any()) and torch.allclose(out.norm(dim=-1), instead.norm(dim=-1), rtol=ALIKE)
    moved = torch.allclose(out.flatten().sort().values, instead.flatten().sort().values)
    return "it rotates" if turned and not moved and not torch.allclose(out.abs(), instead.abs()) else ""


def _is_normal(what: Tensor, axis: int) -> bool:
    """Whether all vectors along an axis are of one size."""
    sizes = [torch.linalg.vector_norm(what, dim=axis), what.std(dim=axis)]
    return any(float(x.std() / x.mean().abs().clamp_min(1e-30)) < ALIKE for x in sizes)


def _is_same(what: Tensor, axis: int) -> bool:
    """Whether all slices along an axis are the same, up to rounding."""
    return bool(((what - what.narrow(axis, 0, 1)).abs() <= ROUNDING * what.abs().max()).all())


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
