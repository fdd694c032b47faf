"""Hold a verdict against torch: the program of what was read, compared as a whole with what the code gives."""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.checks import judge_checks
from equivalence_tests.checker.engine.lengths import telling_lengths
from equivalence_tests.checker.engine.ran import SEEDS, drawing_line, drops
from equivalence_tests.checker.engine.same import MEASURED, TABLE
from equivalence_tests.checker.engine.situations import Situation, call_of, situation_of, trials_for
from equivalence_tests.checker.engine.taking_part import known_before
from equivalence_tests.checker.equivalent.comparing import (
    NO_GRADIENTS,
    OF_ARGUMENTS,
    Case,
    Comparison,
    Computes,
    Difference,
    compare,
    kept_parameters,
)
from equivalence_tests.checker.equivalent.deciding import (
    Holding,
    accuse_with_proof,
    decide,
    gradients_stopped,
    left_over,
    shown_as_step,
    unread,
)
from equivalence_tests.checker.equivalent.expressions import Given, Values, of_kind
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import WrittenPart
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.proving import NOT_ITS_SIZE, Proving, argument_of
from equivalence_tests.checker.equivalent.reading import read
from equivalence_tests.checker.equivalent.steps import Step, UnreadError
from equivalence_tests.checker.equivalent.watched import EXACT, Layout
from equivalence_tests.checker.equivalent.writer import Signature
from equivalence_tests.checker.equivalent.writing import AttentionWriter
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.calling import WINDOWS, Inputs, Trial
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.masking import draw_masks
from equivalence_tests.checker.reach.plans import Errors
from equivalence_tests.checker.reach.state import ask
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import ABOVE_ROUNDING, CheckResult, Exercise, Finding
from equivalence_tests.checker.reporting.lines import code_lines, source_of
from equivalence_tests.checker.reporting.report import Report

FRESH, WITH = "fresh inputs", "with"  # of which calls a comparison is
LENGTHS = ((4, 6), (9, 3))  # of queries and keys, besides those that it was read at
LOUD = 10  # by what inputs are multiplied
# A query of its own axis may be one of several, unless its name says that it is a decoder's state.
OF_ONE_QUERY, QUERY = "b 1 e", re.compile(r"q|query|queries|x")
MANY = 12  # windows of images, in rows and columns
OTHER_NUMBERS = "the program written from it gives other numbers"
OF_AXES = ("split", "product", "context", "merge")  # stages in which samples may meet
SAMPLES_MIXED = "the output for one sample changes with another, in every way in which it runs"
NO_CALL = "it cannot be called with gradients"
BOUNDS = {torch.float64: EXACT, torch.float32: TABLE}  # of what cannot be watched
COUNTS_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")


@dataclass
class Held:
    """Compares one situation."""

    situation: Situation

    def holding(self) -> Holding:
        """Read the program, and compare it."""
        situation, layout = self.situation, Layout.of(self.situation.trial)
        parameters = Parameters.of(situation.subject.module)
        with kept_parameters(situation.subject.module):
            program, tolerance = read(situation.found, layout)
            comparison = self._comparison(program, layout, tolerance)
            if comparison.worst.case.startswith(WITH) and not (comparison.agrees or program.bias.visible.is_everything):
                other = replace(program, mask_replaces=True)
                again = self._comparison(other, layout, tolerance)
                program, comparison = (other, again) if again.agrees else (program, comparison)
            steps = (*program.steps(parameters), *self._of_heads(program), *self._of_arguments(program))
            steps = (*steps, *self._of_later_keys(program))
            rest = left_over(program, case_of(situation.trial, None, "", seed=21).call, layout, comparison)
        return Holding(program, parameters, steps, comparison, rest)

    def _comparison(self, program: Program, layout: Layout, tolerance: float) -> Comparison:
        """Compare a program with the user's code, which has to run in the first call."""
        found = compare(partial(self._on, program, layout), self.cases(), layout, tolerance)
        for case, error in found.left_out:
            if case.words == FRESH:
                raise error if isinstance(error, UnreadError) else UnreadError(f"{NO_CALL} ({said(error)})") from error
        return found

    def _on(self, program: Program, layout: Layout, case: Case) -> Computes:
        """Give a program in one call, read anew for lengths of which it says nothing, as where a table is looked up."""

        def computed(values: Values, may_attend: Tensor | None) -> Tensor:
            try:
                return program(values, may_attend)
            except UnreadError:
                if case.lengths is None:
                    raise
                with torch.enable_grad():  # what a projection does is said by gradients
                    queries, keys = case.lengths
                    sizes = replace(self.situation.trial.sizes, query_len=queries, key_len=keys)
                    again = situation_of(self.situation.subject, replace(self.situation.trial, sizes=sizes))
                    other = read(again.found, layout)[0]
                return other(values, may_attend) * (1 if program.bias.is_continued_by(other.bias) else torch.nan)
            except NOT_ITS_SIZE as error:
                raise UnreadError(f"the program written from it does not run ({said(error)})") from error

        return computed

    def differing_beyond(self, holding: Holding, blocks: bool) -> Iterator[Exercise]:
        """List the first length at which it gives other numbers than the program, and large inputs where those do.

        Of blocks that are intended, longer ones have been judged by their widths.
        """
        trial, bound = self.situation.trial, holding.comparison.tolerance
        with kept_parameters(self.situation.subject.module):
            for length, what in telling_lengths(trial.function).items() if not blocks else ():
                differs = self._differs(holding, trial.inputs(length, length, seed=51))
                if differs:
                    yield Exercise(what, False, f"with {length} tokens {differs}")
                    break
            loud = self._differs(holding, trial.inputs(seed=52).scaled(LOUD)) if bound == EXACT else ""
            if loud:
                yield Exercise(f"inputs {LOUD} times as large", False, loud)
        if trial.plan.step == OF_ONE_QUERY and any(map(QUERY.fullmatch, trial.plan.apart)):
            several = replace(trial, plan=replace(trial.plan, step="", returned=""))
            error = ask(lambda: several.output(several.inputs())).error
            yield from () if error is None else [Exercise("more than one query", False, f"it raises {said(error)}")]

    def _differs(self, holding: Holding, inputs: Inputs) -> str:
        """Say how far the code is from its program on some inputs; "" where it is not, or cannot be run."""
        layout, case = Layout.of(self.situation.trial), Case(call_of(self.situation.trial, inputs, None)[0], None, "")
        found = compare(partial(self._on, holding.program, layout), [case], layout, MEASURED)
        gap = f"it differs from torch's program by {found.worst.size:.2g} of the largest value"
        return "" if found.agrees else f"{gap}: only its author knows whether that is intended"

    def _of_heads(self, program: Program) -> Iterator[Step]:
        """As many heads as each should have features, and the other way round."""
        asked, heads = self.situation.subject.sizes, program.query.weight.shape[:2]
        counts = any(getattr(self.situation.subject.module, name, 0) == asked.num_heads for name in COUNTS_HEADS)
        if counts and heads == (asked.head_dim, asked.num_heads) != (asked.num_heads, asked.head_dim):
            yield Step(f"it has {heads[0]} heads of {heads[1]}; it was built for {heads[1]} of {heads[0]}", "", "heads")

    def _of_later_keys(self, program: Program) -> Iterator[Step]:
        """What skewing leaves later keys is meant to be hidden."""
        if program.bias.rows is not None:
            mask = self.situation.plan.mask_parameter
            said = f"{mask} is there to hide them" if mask else ""
            yield Step("scores of later keys get what the next query says to other distances", said, "again")

    def _of_arguments(self, program: Program) -> Iterator[Step]:
        """Each operand is made of the argument that has its role."""
        arguments = self.situation.arguments
        for role, one in program.roles:
            made_of = {x.name for x in of_kind(Given, one.tokens)}
            wanted = argument_of(role, arguments)
            if wanted and made_of and wanted not in made_of:
                yield Step(f"the {role} is made from an argument other than {wanted}", "", "project")

    def written(self, holding: Holding, report: Report) -> Equivalent:
        """Write the program down."""
        situation = self.situation
        is_function = situation.subject.module is None
        writer = AttentionWriter(holding.program, signature_of(situation), holding.parameters, is_function)
        try:
            source, why = writer.source(), ""
        except UnreadError as error:
            source, why = "", str(error)
        theirs, handed = source_of(situation.subject.function), tuple(writer.writer.handed.values())
        found = Equivalent(source, why, theirs, handed, steps=holding.described(report.intended))
        found = holding.comparison.of(found)
        if not source or not holding.comparison.agrees or self._gives_the_same(found, holding.comparison.tolerance):
            return found
        return replace(found, source="", unwritten=OTHER_NUMBERS)

    def _gives_the_same(self, found: Equivalent, tolerance: float) -> bool:
        """Whether the text, run as it stands, gives the numbers of the user's code, with a mask and without."""
        situation, form = self.situation, self.situation.understood
        layout = Layout.of(situation.trial)
        other = form is not None and situation.plan.neutral not in (None, form)  # the text takes a mask of one form
        forms = dict.fromkeys((form,) if other else (None, form))
        cases = [case_of(situation.trial, None, "", seed=41, form=one) for one in forms]
        as_given = replace(layout, inward=lambda x: x.to(situation.subject.dtype), apart={})
        text = compare(lambda case: WrittenPart(found).on(case.call, layout.outward), cases, as_given, tolerance)
        return text.agrees_in_all

    def cases(self) -> Iterator[Case]:
        """List the calls that are compared."""
        trial = self.situation.trial
        yield case_of(trial, None, FRESH, seed=21, redrawn=7)
        yield case_of(trial, None, "parameters drawn anew", seed=22, redrawn=8)
        if trial.plan.layout == WINDOWS:
            many = replace(trial, sizes=replace(trial.sizes, batch=MANY))
            yield case_of(many, None, "two images of 3 by 2 windows", seed=20)
        for place, (queries, keys) in enumerate(LENGTHS):
            keys = queries if trial.plan.of_one_length else keys
            said = "1 query" if trial.plan.step else f"{queries} queries"
            yield case_of(trial, (queries, keys), f"{said} and {keys} keys", seed=23 + place)
        for one in (self.situation, *self.situation.other_masks):
            form, name = one.understood, one.plan.mask_parameter
            if form is not None:
                yield case_of(one.trial, None, f"{WITH} {name}: {form}", seed=31, form=form)
        if self.situation.subject.initial:
            own = case_of(trial, None, "the parameters as they came", seed=32)
            yield replace(own, initial=self.situation.subject.initial)


def signature_of(situation: Situation) -> Signature:
    """Say how the code that was checked is called."""
    plan, data = situation.plan, [name for name, x in situation.call.tensors if id(x) in situation.call.seeds]
    arguments = tuple((name, plan.at(name)[0]) for name in data)
    returned = Layout.of(situation.trial).output(situation.found.run.output)
    return Signature(
        situation.subject.name.rpartition("/")[2],
        arguments,
        plan.layout,
        plan.mask_parameter,
        situation.understood,
        returned.dim() < 4,
        Layout.of(situation.trial).tables,
        plan.apart,
        plan.output_layout,
    )


def case_of(
    trial: Trial,
    lengths: tuple[int, int] | None,
    words: str,
    *,
    seed: int,
    redrawn: int | None = None,
    form: Any = None,
) -> Case:
    """Make a call with fresh inputs."""
    queries, keys = lengths or (None, None)
    inputs = trial.inputs(queries, keys, seed)
    may = rows = None
    if form is not None:
        batch, length = inputs.query.shape[:2]
        may = draw_masks(form.pattern, batch, length, inputs.key.size(1), seed)
        inputs = replace(inputs, may_attend=may)
        if trial.plan.self_attention and form.pattern in ("keys", "lengths"):
            rows = may[:, 0]  # what comes back for padding means nothing
    return Case(call_of(trial, inputs, form)[0], may, words, redrawn, rows, lengths)


def hold(report: Report, situation: Situation) -> None:
    """Hold a verdict against torch: without a program that gives the same numbers there is no EQUAL."""
    held = Held(situation)
    try:
        holding = held.holding()
    except UnreadError as why:
        unread(report, str(why))
        _state_difference(report, situation)
        return
    report.equivalent = held.written(holding, report)
    if report.equivalent.unwritten == OTHER_NUMBERS:
        unread(report, OTHER_NUMBERS)
        return
    decide(report, holding, situation.subject.adapter.intended)
    if report.verdict in ("equal", "partial"):
        report.coverage += held.differing_beyond(holding, any(one.name == "own_mask" for one in report.intended))
        report.verdict = "partial" if report.not_exercised else "equal"
    for failed in _failing(holding):
        report.checks.append(failed)
        if failed.name not in situation.subject.adapter.intended:
            gradients_stopped(report, [situation.found.run], holding.comparison.worst)
        if holding.comparison.agrees:
            report.findings.append(found_mistake("weights_not_those_used", stage="checks"))
        else:
            report.equivalent = None
    judge_checks(report)


def _failing(holding: Holding) -> Iterator[CheckResult]:
    """List the checks that fail where the output is that of the program, and something else is not."""
    what, size = holding.comparison.worst.what, holding.comparison.worst.size
    if what.startswith(OF_ARGUMENTS) and size > max(ABOVE_ROUNDING, holding.comparison.tolerance):
        none = "the output carries no gradient: it is detached, or computed under no_grad"
        apart = f"the {what} differs by {size:.2g} of the largest value"
        yield CheckResult("check_gradients", "failed", none if what == NO_GRADIENTS else apart)
    elif holding.comparison.agrees and any(holding.left_over.values()):
        yield CheckResult("check_returned_weights", "failed", "the maps that are returned are not the weights used")


def accuse(report: Report, situation: Situation) -> None:
    """Let nothing count against the code that no number shows: prove it, or let it be a suspicion."""
    report.findings = _contradicted(report.findings, situation)
    if all(finding.is_proven for finding in report.findings):
        return
    held, exact = Held(situation), None
    with contextlib.suppress(UnreadError):
        holding = held.holding()
        exact = holding if holding.comparison.agrees else None
    report.findings = [_shown(finding, situation, exact) for finding in report.findings]
    if exact is not None:
        report.equivalent = held.written(exact, report)
    mixed = () if any(finding.is_proven for finding in report.findings) else _mixed(report.findings[0], situation)
    report.findings += mixed
    accuse_with_proof(report, complete=bool(mixed) or exact is not None)  # the program shows that there is no more
    if not report.findings and exact is None:
        _state_difference(report, situation)


def _mixed(finding: Finding, situation: Situation) -> list[Finding]:
    """Blame the line of what nothing proves where samples meet in every way in which the code runs."""
    plan = situation.plan
    known = plan.named and "angles" not in dict(plan.roles).values()  # what is called positions may have any shape
    if finding.stage not in OF_AXES or not known:
        return []
    if any(x.keeps_samples_apart for x in trials_for(situation.subject, Errors())):
        return []
    return [found_mistake("samples_mixed", stack=finding.stack, evidence=SAMPLES_MIXED)]


def _contradicted(findings: Sequence[Finding], situation: Situation) -> list[Finding]:
    """Take their proofs from findings of a call that gives torch's numbers as it is: what they put right is right."""
    seen = {one.name for one in situation.departures}
    held_against = [one for one in findings if one.proof is not None and one.name in seen]
    if held_against and any(gap <= ABOVE_ROUNDING for gap, _ in Proving(situation).plain()):
        return [replace(one, proof=None, evidence="") if one in held_against else one for one in findings]
    return list(findings)


def _shown(finding: Finding, situation: Situation, exact: Holding | None) -> Finding:
    """Show a finding by numbers, if they can: by the exact program, or by torch's values in the user's own run."""
    if finding.is_proven:
        return finding
    proving = Proving(situation)
    plain = [*proving.plain()]
    steps = [] if exact is None else [one for one in exact.unexplained if one.is_named_by(finding)]
    if exact is not None and finding.stage != "wrap":
        gaps = [proving.difference(exact.program.without(step.stage)) for step in steps]
        gap = max([*gaps, *(gap for gap, _ in plain)]) if steps else 0.0
        return shown_as_step(finding, steps, gap)
    if any(gap <= ABOVE_ROUNDING for gap, _ in plain):  # it is torch's attention: what is found changes nothing
        return finding
    if proving.rotates and finding.stage != "rotary":  # what rotates is not held against what does not
        return finding
    blamed = next((one.operation for one in situation.departures if one.name == finding.name), None)
    proofs = (proving.proof(one, blamed) for _, one in plain)
    return replace(finding, proof=next((proof for proof in proofs if proof is not None), finding.proof))


def _state_difference(report: Report, situation: Situation) -> None:
    """Show the plain attention that comes nearest, and how far it is."""
    proving = Proving(situation)
    near = min(proving.plain(), key=lambda x: x[0], default=None)
    if near is None or not math.isfinite(near[0]) or proving.rotates:
        return
    gap, plain = near
    report.reason += f" It differs from the program below by {gap:.2g} of the largest value."
    apart = Comparison(EXACT, Difference("", "output", gap))
    holding = Holding(plain.program, Parameters.of(situation.subject.module), (), apart)
    report.equivalent = Held(situation).written(holding, report)


def compare_output(report: Report, situation: Situation) -> None:
    """Say what hides the operations, and compare the output with torch's; a report that knows no reason stays."""
    hidden = _what_hides(situation)
    if not hidden:
        return
    trial = situation.trial
    if drew := drawing_line(lambda: trial.output(trial.inputs()), drops):
        evidence = f"seen in {SEEDS} calls with one input"
        report.findings = [found_mistake("dropout_in_eval", stack=code_lines(drew), evidence=evidence)]
        report.verdict, report.reason = "deviates", ""
        return
    subject, width = situation.subject, trial.sizes.embed_dim
    unsaid = subject.module is not None and not subject.built  # nobody says how many heads an instance has
    counts = [number for number in range(1, width + 1) if width % number == 0] if unsaid else []
    worst = min((gap for gap, _ in Proving(situation).plain(counts)), default=None)
    if worst is None or worst > BOUNDS[subject.dtype]:
        apart = "" if worst is None else f", from which it differs by {worst:.2g}"
        report.reason = (
            f"{hidden} Its output was compared all the same, and is not that of plain attention{apart}. Write it in "
            "torch's functions to see where."
        )
        return
    report.verdict, report.reason = "partial", ""
    report.coverage.append(Exercise("what happens inside", False, f"{hidden} The output is that of torch's attention."))
    masks = [name for name, role in situation.plan.roles if "mask" in role]
    report.coverage += [Exercise(name, False, "nothing was hidden") for name in masks]


def _what_hides(situation: Situation) -> str:
    """Say why nothing was seen; "" where everything was."""
    function = situation.subject.function
    inside = function.modules() if isinstance(function, nn.Module) else [getattr(function, "__wrapped__", None)]
    if any(isinstance(one, torch.jit.ScriptModule | torch.jit.ScriptFunction) for one in inside):
        return "It runs as TorchScript, which hides its operations."
    run = situation.found.run
    taking = run.graph.unwatched(known_before(run, situation.subject.module))
    if taking is None:
        return ""
    line = code_lines(taking.frames)[-1]
    return (
        f"Line {line.number}, `{line.text}`, takes numbers that no torch function returned: they come from numpy, or "
        "from a kernel of its own, and cannot be watched."
    )
