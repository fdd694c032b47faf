"""The verdict that follows from a program and how it compares with the user's code."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import HIDING, MEASURED, TABLE, near
from equivalence_tests.checker.engine.vocabulary import STOPS_GRADIENTS
from equivalence_tests.checker.equivalent.comparing import OF_ARGUMENTS, WRITTEN_INTO, Comparison, Difference
from equivalence_tests.checker.equivalent.expressions import Values
from equivalence_tests.checker.equivalent.operands import first_alike
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.steps import Step, evidence_of
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import ABOVE_ROUNDING, Exercise, Finding, some_of
from equivalence_tests.checker.reporting.lines import Frames, code_lines
from equivalence_tests.checker.reporting.report import Report

NOT_TORCHS = "it is not part of torch's program"
AXES = 4  # of which the order may be another


@dataclass(frozen=True)
class Holding:
    """A program, and how it compares."""

    program: Program
    parameters: Parameters
    steps: tuple[Step, ...]  # what torch's formula does not have
    comparison: Comparison
    left_over: Mapping[str, bool] = field(default_factory=dict)  # what else comes back, and whether as a map

    @property
    def unexplained(self) -> list[Step]:
        """The steps that nothing in the code says are intended."""
        return [step for step, said in self.evidence(()).items() if not said]

    def described(self, intended: Sequence[Finding]) -> tuple[tuple[str, str], ...]:
        """Give what each step does, and its evidence."""
        return tuple((step.words, said) for step, said in self.evidence(intended).items())

    def evidence(self, intended: Sequence[Finding]) -> dict[Step, str]:
        """Give for each step the evidence that it is intended; "" where there is none."""
        return evidence_of(self.steps, intended, self.program.projections(self.parameters))


def decide(report: Report, holding: Holding, intended: Mapping[str, str]) -> None:
    """Write into a report what a comparison of the whole says; the user gives reasons for what is intended, by name."""
    if not holding.comparison.agrees:
        differs(report, holding.comparison.worst)
        return
    if explained(report, holding.evidence(report.intended), intended):
        report.coverage += [Exercise(what, False, NOT_TORCHS) for what in holding.left_over]
        report.verdict = "partial" if report.not_exercised else "equal"


def explained(report: Report, evidence: Mapping[Step, str], intended: Mapping[str, str]) -> bool:
    """Say whether all steps of a program are intended, by their evidence or the user's words, and write it down."""
    reasons = {step: said or intended.get(step.words, intended.get(step.name, "")) for step, said in evidence.items()}
    unexplained = [step for step, said in reasons.items() if not said]
    if unexplained:
        report.verdict = "unchecked"
        shown, options = some_of(step.words for step in unexplained), _options(unexplained)
        report.reason = f"Nothing says whether this is intended: {shown}. If it is, say so with {options}."
        return False
    unlisted = [step for step in reasons if not any(step.is_named_by(finding) for finding in report.intended)]
    report.intended += [step.as_intended(reasons[step]) for step in unlisted]
    return True


def accuse_with_proof(report: Report, complete: bool = False) -> None:
    """Let nothing count against the code that no number shows: what is unproven is suspected, and blames no line.

    Where what is proven is not known to be all, what was seen beside it stays, behind it.
    """
    report.findings.sort(key=lambda finding: not finding.is_proven)
    unproven = [finding for finding in report.findings if not finding.is_proven]
    if not unproven or (len(unproven) < len(report.findings) and not complete):
        return
    report.findings = [finding for finding in report.findings if finding.is_proven]
    report.suspected = [replace(finding, stack=()) for finding in unproven]
    if not report.findings:
        report.verdict, report.reason = "unchecked", _suspicion(unproven)


def shown_as_step(finding: Finding, steps: Sequence[Step], gap: float) -> Finding:
    """Show a finding by the program with its steps, which gives the same numbers; without them it is off by the gap."""
    if not steps or not ABOVE_ROUNDING < gap < math.inf:
        return finding
    said = f"Your code equals a program of torch's parts that has this step: {steps[0].words}."
    return replace(finding, evidence=f"{said} Without it the difference is {gap:.2g}.", proof=None)


def _suspicion(suspected: Sequence[Finding]) -> str:
    """Say what is suspected, in sentences that blame no line."""
    said = " ".join(dict.fromkeys(finding.sentence for finding in suspected))
    return f"This is suspected but could not be proven: {said} If it is intended, say so with {_options(suspected)}."


def _options(named: Sequence[Finding | Step]) -> str:
    """Write the options that say that something is intended."""
    return " ".join(dict.fromkeys(f"--intended {one.name}=REASON" for one in named))


def differs(report: Report, worst: Difference) -> None:
    """Write into a report that whole outputs or gradients differ, and that nothing says where."""
    report.verdict = "unchecked"
    name, written, _ = worst.what.partition(WRITTEN_INTO)
    if written:
        said = f"its argument number {int(name) + 1}" if name.isdigit() else f"its argument {name}"
        report.reason = (
            f"It writes into {said}: after the call, the caller's tensor holds other numbers ({worst.case})."
        )
        return
    size = f" by {worst.size:.2g} of the largest value" if math.isfinite(worst.size) else ""
    report.reason = (
        f"It differs from torch with the same weights{size} "
        f"({worst.what}, {worst.case}), and the checker could not say where."
    )


def gradients_stopped(report: Report, runs: Iterable[Run], worst: Difference) -> None:
    """Name the lines that stop a gradient, where whole outputs agree and that of an argument does not."""
    if not worst.what.startswith(OF_ARGUMENTS) or not math.isfinite(worst.size):
        return
    evidence = f"The output is torch's; the {worst.what} differs by {worst.size:.2g} of the largest value."
    _stopped_in(report, dict.fromkeys(place for run in runs for place in _stopping(run)), evidence)


def all_gradients_stopped(report: Report, run: Run) -> None:
    """Name the line that stops all gradients of what gives its tokens back; without one, the last line to run."""
    last = [one.frames for one in run.operations if one.frames][-1:]
    evidence = "The output is torch's; no gradient comes back, so that what gives the tokens is never trained."
    _stopped_in(report, [*dict.fromkeys(_stopping(run))] or last, evidence)


def _stopping(run: Run) -> Iterator[Frames]:
    """Give the lines that stop gradients of arguments."""
    live = (run.operations[index] for index in run.live())
    yield from (one.frames for one in live if one.name in STOPS_GRADIENTS and any(one.origins) and one.frames)


def _stopped_in(report: Report, places: Iterable[Frames], evidence: str) -> None:
    found = [found_mistake("gradient_stopped", stack=code_lines(frames), evidence=evidence) for frames in places]
    report.findings += found
    if found:
        report.verdict, report.reason = "deviates", ""


def unread(report: Report, why: str) -> None:
    """Say that there is no equivalent, and so no verdict."""
    report.verdict, report.unread = "unchecked", why
    report.reason = f"It could not be written in torch's own parts: {why}."


def left_over(program: Program, call: Call, layout: Layout, comparison: Comparison) -> dict[str, bool]:
    """Find the tensors that come back and are none of the program's, in any order of their axes; none if it differs.

    Returns:
        For each, by its place, whether it looks like a map of weights, and is none that was used.
    """
    with torch.no_grad():
        returned = call.returned()
        output = layout.output(returned)
        rest = {f"output {place}": x for place, x in enumerate(tensors_in((returned,)), 1) if x is not output}
        if not rest or not comparison.agrees:
            return {}
        values = layout.values(call)
        tables = [x.double().clamp_min(-HIDING) for x in _tables(program, values)]
        heads = [x.double() for x in _heads(program, values, layout.outward(output))]
    given = [x.double() for _, x in call.tensors if x.is_floating_point()]

    def is_known(x: Tensor, tolerance: float) -> bool:
        others = any(is_same(x, y, tolerance) for y in (*heads, *given))
        return others or any(is_same(x, y, tolerance, of_pairs=True) for y in tables)

    def is_map(x: Tensor) -> bool:  # as weights, which sum to one over the keys
        return x.shape[-2:] == tables[1].shape[-2:] and near(x.sum(-1), torch.ones_like(x.sum(-1)), MEASURED)

    found = {name: x.double() for name, x in rest.items() if not is_known(x.double(), comparison.tolerance)}
    return {name: is_map(x) and not is_known(x, TABLE) for name, x in found.items()}


def _tables(program: Program, values: Values) -> Iterator[Tensor]:
    """All that it computes for each query and key: of all heads, averaged, over the samples too, and of each."""
    scores, weights, products = program.scores(values), program.weights(values), program.products(values)
    yield from (scores, weights, weights.mean(1), weights.mean((0, 1)), weights.sum(1), products)
    yield from (head for x in (weights, scores, products) for head in x.unbind(1))


def _heads(program: Program, values: Values, output: Tensor) -> Iterator[Tensor]:
    """All else that it computes, with one head alone where several share it."""
    yield from (output, program.averaged(values))
    for _, one in program.roles:
        heads = one.projected(values), one(values)
        first = first_alike(one.weight).unique()
        yield from heads
        yield from (x[:, first] for x in heads)


def is_same(x: Tensor, own: Tensor, tolerance: float, of_pairs: bool = False) -> bool:
    """Whether two are the same in some order of their axes; of pairs the queries stand before the keys."""
    if x.numel() != own.numel() or own.dim() > AXES:
        return False
    x, close = x.clamp_min(-HIDING), tolerance * float(own.abs().max())
    keys, every = own.dim() - 1, itertools.permutations(range(own.dim()))
    orders = (order for order in every if not of_pairs or order.index(keys - 1) < order.index(keys))
    return any(torch.allclose(own.permute(order).reshape(x.shape), x, rtol=0, atol=close) for order in orders)
