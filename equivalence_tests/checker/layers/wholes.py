"""Hold a layer, a stack or a model against torch as a whole: a program of its parts, wired alike, that runs alone."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.agreeing import differing_in_training, without_an_axis
from equivalence_tests.checker.engine.codes import numbered
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.leaving_out import Repair
from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.naming import finding_of
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.engine.taking_part import NEVER_READ
from equivalence_tests.checker.equivalent.comparing import Case, Difference, kept_parameters
from equivalence_tests.checker.equivalent.deciding import (
    accuse_with_proof,
    differs,
    explained,
    gradients_stopped,
    unread,
)
from equivalence_tests.checker.equivalent.part_holding import (
    EXACT,
    SINGLE,
    WrittenPart,
    first_output,
    held,
    joined_output,
)
from equivalence_tests.checker.equivalent.search import Rest, Search, rest_of_module
from equivalence_tests.checker.equivalent.steps import Step, UnreadError, evidence_of, not_called_again
from equivalence_tests.checker.equivalent.watched import are_single
from equivalence_tests.checker.layers.masks import Mask
from equivalence_tests.checker.layers.whole_calls import Calls, bound
from equivalence_tests.checker.layers.whole_source import WholeWriter
from equivalence_tests.checker.layers.whole_steps import NOT_FOLLOWED, Follower
from equivalence_tests.checker.layers.whole_torchs import TorchsLayer
from equivalence_tests.checker.reach.arguments import ADDED_POSITIONS, role_of_parameter
from equivalence_tests.checker.reach.branches import RAN, Branches
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.model_calls import AIM, ModelRun, run_layer
from equivalence_tests.checker.reach.proposing import parameters_of, unread_arguments
from equivalence_tests.checker.reach.state import ask, attempt
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import Exercise, Finding, Proof
from equivalence_tests.checker.reporting.lines import source_of
from equivalence_tests.checker.reporting.report import Report

WORDS = "a Transformer of torch's parts", "one"
UNTRIED = "it is passed here, but the part alone could not be checked with it"
HANDED = "it was passed, and compared with a program of torch's parts"
IDLE = "it was passed, and the output is the same without it"


@dataclass
class Whole:
    """A layer, a stack or a model, and what is known of it."""

    name: str
    function: Any  # what the user wrote
    module: nn.Module
    run: ModelRun
    kinds: Mapping[str, str]  # what its parts are, by path; "layer" for those that add their own residual
    reports: Mapping[str, Report]  # what was found in its parts, by path
    heads: int = 1  # how many heads a mask may be repeated for
    masks: Sequence[Mask] = ()  # the masks that it is known to take
    intended: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    runs: dict[tuple[int, bool], Run] = field(default_factory=dict)
    worst: Difference = field(init=False)
    why: str = ""  # what the first program lacked that was not made
    normalises: bool = False  # whether it is given data, which it normalises

    @cached_property
    def calls(self) -> Calls:
        """The ways in which it is called."""
        return Calls(
            self.module, self.run, self.heads, [mask for mask in self.masks if mask.form is not None and mask.reached]
        )

    @cached_property
    def call(self) -> Call:
        """The first of these, without masks that may be left out."""
        return self.calls.recorded(0, False)

    @cached_property
    def gives(self) -> list[Tensor]:
        """What that gives."""
        return [*tensors_in((self.call.returned(),))]

    @cached_property
    def parts(self) -> dict[str, Equivalent]:
        """The equivalents of its parts, by path."""
        right = {path: one.equivalent for path, one in self.reports.items() if one.verdict in ("equal", "partial")}
        return {path: one for path, one in right.items() if one is not None and one.source and path in self.kinds}

    def handed(self, report: Report, trials: Iterable[Trial]) -> Iterator["Whole"]:
        """Give the whole as it is called with another sequence, or positions, that no call has handed over.

        All that runs without them has to run with them, too.
        """
        left = {one.what.partition(" ")[0] for one in report.not_exercised}
        asked = any(role_of_parameter(one) == "memory" or ADDED_POSITIONS.search(one.lower()) for one in left)
        for trial in (one for one in (trials if asked else ()) if not left.isdisjoint(dict(one.plan.roles))):
            run = run_layer(trial)
            own = self.run.target is None and run.target is not None  # its only tokens have become the target
            masks = [mask.of_the_target() for mask in self.masks] if own else self.masks
            other = replace(self, run=run, masks=masks, steps=(), runs={}, why="")
            if (ask(other.called).value or set()) >= self.called():
                yield other

    def called(self) -> set[str]:
        """Name the sub-modules that run in it."""
        return {call.path for call in self._run(0, False).recorder.calls}

    def given_to(self, path: str) -> set[str]:
        """Name the arguments in which a part, or with "" the whole, is given tensors."""
        calls = [call for run in self.runs.values() for call in run.recorder.calls if call.path == path]
        given = [bound(self.module.get_submodule(path), call.args, call.kwargs) for call in calls]
        return {name for one in given for name, x in one.items() if isinstance(x, Tensor)}

    def takes_part(self, name: str) -> bool:
        """Whether a tensor that the whole is given changes what comes back; of others than tensors nothing is asked."""
        given = self.call.kwargs.get(name)
        if not isinstance(given, Tensor):
            return True
        changed = torch.zeros_like(given) if bool(given.any()) else torch.ones_like(given)
        other = ask(replace(self.call, kwargs={**self.call.kwargs, name: changed}).returned)
        pairs = zip(self.gives, tensors_in((other.value,)), strict=other.error is None)
        return other.error is not None or any(not torch.equal(x, y) for x, y in pairs)

    def in_vain(self) -> Iterator[Exercise]:
        """List the arguments beside masks that are handed over, and change nothing."""
        masks, unread = {*self.run.masks, *(mask.name for mask in self.masks)}, unread_arguments(self.module)
        for name in self.call.kwargs:
            if name in unread:
                yield Exercise(name, True, NEVER_READ)
            elif name not in masks and not self.takes_part(name):
                yield Exercise(name, False, IDLE)

    def equivalent(self) -> Equivalent:
        """Read the program, write it down, and compare it; UnreadError if none can be made."""
        with kept_parameters(self.module):
            run, follower = self._followed()
            found, why = self._in_torch(run, follower), UnreadError("")
            for masked, parts in self._ways() if found is None else ():
                try:
                    writer = self._written(masked, parts)
                    found = self._compared(writer.source(self.name), ("",) * bool(writer.tables), masked)
                except (UnreadError, *NOT_FOLLOWED) as error:
                    why = error if isinstance(error, UnreadError) else UnreadError(said(error))
                    self.why = self.why or str(why)
                    continue
                if found.agrees:
                    return found
        if found is None:
            raise why
        return found

    def _followed(self) -> tuple[Run, Follower]:
        """Follow one run, and one with the masks that may be left out, and note the steps that torch does not have."""
        run, follower = self._follow(masked=False)
        steps = follower.steps(list(tensors_in((run.output,))))
        left = any(self._may_be_none(mask.name) for mask in self.calls.masks)
        if left and ask(partial(self._run, 0, True)).error is None:
            masked, other = self._follow(masked=True)
            steps += other.steps(list(tensors_in((masked.output,))))
        self.steps = tuple(dict.fromkeys(steps))
        self.normalises = follower.series is not None
        return run, follower

    def _follow(self, masked: bool) -> tuple[Run, Follower]:
        run = self._run(0, masked)
        hides = dict.fromkeys([*(mask.name for mask in self.masks), *self.run.masks]) | self.calls.hidden(0)
        return run, Follower(self.module, run.recorder, self.kinds, hides, self.run.layout)

    def is_explained(self, report: Report) -> bool:
        """Whether all that torch does not have is intended, by what a report says."""
        if not self.runs:
            self._followed()
        said = self.evidence(report)
        return all(found or self.intended.get(step.name) for step, found in said.items())

    def evidence(self, report: Report) -> dict[Step, str]:
        """Give for each step the evidence that it is intended: what is intended inside a part says nothing for it."""
        return evidence_of(self.steps, [one for one in report.intended if not one.where], set())

    def _in_torch(self, run: Run, follower: Follower) -> Equivalent | None:
        """Give torch's own layer with the user's weights, where it is the whole; then no step is left to explain."""
        layer = TorchsLayer(
            self.module, run.recorder, follower.labels, self.parts, self.calls.masks, self.calls.sizes[0].batch
        )
        steps, self.steps = self.steps, ()
        try:
            source, torchs = layer.source(self.name)
            found = self._compared(source, (), masked=bool(self.calls.masks))
        except (UnreadError, *NOT_FOLLOWED):
            found = None
        if found is not None and found.agrees and not found.not_run:
            return replace(found, torchs=torchs)
        self.steps = steps
        return None

    def _run(self, place: int, masked: bool) -> Run:
        """Run it at the first or the second size, once."""
        if (place, masked) not in self.runs:
            ran = ask(partial(self.calls.recorded(place, masked).run, read=False))
            if ran.value is None:
                raise not_called_again(ran.error or UnreadError(""))
            self.runs[place, masked] = ran.value
        return self.runs[place, masked]

    def _ways(self) -> Iterator[tuple[bool, Mapping[str, Equivalent]]]:
        """With masks and the programs of its parts first, then with what ran in the parts, then without masks."""
        masked = [True] * bool(self.calls.masks) + [False]
        yield from ((mask, parts) for mask in masked for parts in ([self.parts, {}] if self.parts else [{}]))

    def _written(self, masked: bool, parts: Mapping[str, Equivalent]) -> WholeWriter:
        optional = {mask.name for mask in self.calls.masks if masked and self._may_be_none(mask.name)}
        recorders = self._run(0, masked).recorder, self._run(1, masked).recorder
        return WholeWriter(self.module, recorders, parts, optional)

    def _may_be_none(self, name: str) -> bool:
        found = inspect.signature(self.module.forward).parameters.get(name)
        return found is not None and found.default is None

    # ------------------------------------------------------------------------------------------- comparing
    def _compared(self, source: str, handed: tuple[str, ...], masked: bool) -> Equivalent:
        steps = tuple((step.words, step.evidence) for step in self.steps)
        program = Equivalent(source, "", source_of(self.function), handed, steps)
        calls, masks = self.calls.compared(masked), {*self.run.masks}
        cases = (Case(replace(call, seeds=self._seeds(call, masks)), None, words, seed) for words, call, seed in calls)
        found = held(WrittenPart(program), cases, joined_output, self._tolerance(masked))
        for error in (one for _, one in found.left_out if not isinstance(one, UnreadError)):
            raise error
        self.worst = found.worst
        left = [] if masked else [self.calls.with_masks([x.name]) for x in self.calls.masks]
        return replace(found.of(program), not_run=(*left, *(f"{case.words}: {why}" for case, why in found.left_out)))

    def _seeds(self, call: Call, masks: Collection[str]) -> dict[int, Tensor]:
        """The arguments whose gradients are compared: all that hold tokens; data that are normalised need none."""
        given = [x for name, x in call.tensors if name not in masks and not self.normalises]
        return {id(x): numbered(x.shape) for x in given if x.is_floating_point() and x.dim() > 2}

    def _tolerance(self, masked: bool) -> float:
        """Allow for what the code, or a table of a part, computes in float32 whatever it is given."""
        run = self._run(0, masked)
        single = are_single(run.operations[index] for index in run.live())
        return SINGLE if single or any(part.difference > EXACT for part in self.parts.values()) else EXACT


def hold_whole(report: Report, whole: Whole) -> bool:
    """Hold an EQUAL of a whole against torch; say whether its program agrees, and nothing in it is unexplained."""
    try:
        report.equivalent = found = whole.equivalent()
    except UnreadError as why:
        unread(report, str(why))
        return False
    report.coverage = [_as_handed(one, whole) for one in report.coverage]
    listed = {one.what for one in report.coverage}
    report.coverage += [one for one in whole.in_vain() if one.what not in listed]
    report.notes += [f"{one.what}: {NEVER_READ}" for one in report.coverage if one.detail == NEVER_READ]
    if not found.agrees:
        differs(report, whole.worst)
        gradients_stopped(report, whole.runs.values(), whole.worst)
        return False
    evidence = whole.evidence(report)
    report.equivalent = replace(found, steps=tuple((step.words, said) for step, said in evidence.items()))
    if not explained(report, evidence, whole.intended):
        return False
    reason = f"the whole was not compared in it{f': {whole.why}' if whole.why else ''}"
    report.coverage += [Exercise(one, False, reason) for one in found.not_run]
    untried = (
        (path, one.what) for path in whole.kinds if path in whole.reports for one in whole.reports[path].not_exercised
    )
    left = {f"{name} of {path}" for path, name in untried if name in whole.given_to(path)}
    report.coverage += [Exercise(one, False, UNTRIED) for one in sorted(left)]
    return True


def disagreeing(whole: Whole) -> Iterator[Finding]:
    """Find where training computes something other than eval, or one sample or token loses an axis."""
    calls, first = whole.calls, whole.calls.sizes[0]

    def sized(what: str, count: int) -> Tensor:
        sizes = replace(first, batch=count) if what == "sample" else replace(first, source=count)
        return first_output(calls.drawn(sizes, 21).returned())

    outputs = (lambda call=call: first_output(call.returned()) for _, call, _ in calls.compared(masked=True))
    found = [differing_in_training(whole.module, outputs), _changed_by_labels(whole)]
    found += [without_an_axis(what, partial(sized, what)) for what in ("sample", "token")[: 1 + bool(first.source)]]
    yield from (finding_of(one) for one in found if one is not None)


def _changed_by_labels(whole: Whole) -> Departure | None:
    """Find labels that change more than a loss: without them a model may give the logits of the last token alone."""
    run, given = whole.run, whole.call.kwargs
    optional = (p.name for p in parameters_of(whole.module) if AIM.search(p.name) and p.default is None)
    names = [name for name in optional if given.get(name) is None]  # else it does not run without them
    for name in names if run.kind == "ids" and run.target is None else ():
        ways = Branches()
        labelled = attempt(partial(ways.watching(run.run), run.source, None, {name: run.source}))
        plain = [run.call(run.source, None)]
        if labelled is None or labelled[:, -plain[0].size(1) :].shape != plain[0].shape:
            continue
        if plain[0].size(1) < labelled.size(1):  # it predicts the next token: the ones before the last are known too
            plain = [run.call(run.source[:, : place + 1], None) for place in range(1, labelled.size(1))]
        if not near(labelled[:, -sum(x.size(1) for x in plain) :], torch.cat(plain, 1), MEASURED):
            line, claim = ways.decided_by(name), f"The same tokens give different outputs with {name} and without."
            return Departure("labels_change_outputs", "call", None, {"argument": name, "claim": claim}, frames=line)
        RAN.add(ways)
    return None


def _as_handed(one: Exercise, whole: Whole) -> Exercise:
    """Say of an argument that no call of a layer by itself has given that the whole hands it over, if it does."""
    name, _, path = one.what.partition(" of ")
    is_part = not one.exercised and path in dict(whole.module.named_modules())
    if not is_part or name not in whole.given_to(path):
        return one
    takes_part = bool(path) or whole.takes_part(name)
    return replace(one, exercised=True, detail=HANDED) if takes_part else replace(one, detail=IDLE)


def locate_in_whole(report: Report, whole: Whole) -> None:
    """Look for an expression without which a whole is made of torch's parts."""
    search, rest = _search(report, whole)
    search.locate(report, rest, whole.intended)


def prove_wiring(report: Report, whole: Whole | None, repairs: Mapping[tuple[str, str], Repair | None]) -> None:
    """Accuse the wiring only where torch's numbers come back with the right sum put in; there may be none to put."""
    wired = [one for one in report.findings if (one.name, one.where) in repairs]
    others = [one for one in report.findings if one not in wired]
    if not wired:
        return
    proofs = (
        [None] * len(wired)
        if whole is None or others
        else _proofs(report, whole, [repairs[one.name, one.where] for one in wired])
    )
    shown = [replace(one, proof=proof, evidence="") for one, proof in zip(wired, proofs, strict=True)]
    if any(one.stage != "wiring" for one in others):  # what a part does may be why the sums look odd
        report.findings, report.suspected = others, [*report.suspected, *(replace(one, stack=()) for one in shown)]
    else:
        report.findings = [*others, *shown]
    accuse_with_proof(report)
    if not report.findings:
        report.checks = [
            replace(check, outcome="skipped") if check.outcome == "failed" else check for check in report.checks
        ]


def _proofs(report: Report, whole: Whole, repairs: Sequence[Repair | None]) -> list[Proof | None]:
    """Show for each of some repairs that it is needed, and that with all a whole is made of torch's parts."""
    search, rest = _search(report, whole)
    norms = [path for path, kind in whole.kinds.items() if kind == "layer_norm"]
    known = [repair for repair in repairs if repair is not None]
    return search.proofs(known, rest, norms) if len(known) == len(repairs) else [None] * len(repairs)


def _search(report: Report, whole: Whole) -> tuple[Search, Callable[[Repair], Rest | None]]:
    """Give what calls a whole, and what reads it when something is put right."""
    inside = {id(m) for path in whole.kinds for m in whole.module.get_submodule(path).modules()}
    calls, sizes = whole.calls, whole.calls.sizes
    search = Search(lambda seed: calls.drawn(sizes[seed % 2], 40 + seed), joined_output, WORDS, True, inside)
    return search, rest_of_module(search, partial(_program, report, whole))


def _program(report: Report, whole: Whole) -> Equivalent | None:
    """Give the program of a whole as it is now; None where it does not agree, or a step is not intended."""
    other = replace(whole, steps=(), runs={}, why="")
    if not other.is_explained(report):
        return None
    found = other.equivalent()
    return found if other.is_explained(report) else None
