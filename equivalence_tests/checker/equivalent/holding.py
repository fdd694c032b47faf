"""Hold a verdict against torch: the program of what was read, compared as a whole with what the code gives."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.situations import Situation, named_inputs, situation_of
from equivalence_tests.checker.equivalent.comparing import Case, Difference, compare, kept_parameters
from equivalence_tests.checker.equivalent.expressions import Step
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.reading import Reading, read
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.equivalent.writing import Signature, Writer
from equivalence_tests.checker.reach.calling import Trial, from_layout
from equivalence_tests.checker.reach.masking import draw_masks
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.report import Report

LENGTHS = ((4, 6), (9, 3))  # of queries and keys, besides those that it was read at
SEEDS = (101, 102)


@dataclass(frozen=True)
class Equivalent:
    """Torch's own program with the user's weights, and how it compares.

    Args:
        program: The program.
        steps: What torch's formula does not have.
        worst: The greatest difference that was seen.
        compared: The calls that were compared.
        not_run: Those that could not be.
        tolerance: What differs by less, relative to the largest value, is rounding.
        source: The program as Python; "" where it cannot be written down.
        unwritten: Why it cannot.
    """

    program: Program
    steps: tuple[Step, ...]
    worst: Difference
    compared: tuple[str, ...]
    not_run: tuple[str, ...] = ()
    tolerance: float = 1e-9
    source: str = ""
    unwritten: str = ""

    def __str__(self) -> str:
        return self.source

    @property
    def agrees(self) -> bool:
        """Whether whole outputs and gradients agree."""
        return self.worst.size <= self.tolerance

    def unexplained(self, stages: set[str]) -> list[Step]:
        """List the steps that nothing says are intended.

        Args:
            stages: Those in which a deviation is known to be intended.
        """
        return [step for step in self.steps if not step.evidence and step.stage not in stages]


@dataclass
class _Held:
    """Compares one situation.

    Args:
        situation: What was seen.
    """

    situation: Situation
    compared: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def equivalent(self) -> Equivalent:
        """Read the program, and compare it."""
        situation = self.situation
        judgement = situation.judgement
        assert judgement is not None  # only what holds an attention is held
        if len(situation.found.judgements) != 1:
            raise UnreadError("more than one attention runs in it")
        layout = layout_of(situation.trial)
        reading = read(situation.found, judgement, layout)
        program, module = reading.program, situation.subject.module
        parameters = Parameters.of(module)
        steps = tuple(program.steps(module, parameters))
        with kept_parameters(module):
            worst = self._worst(reading, layout)
        compared, not_run = tuple(self.compared), tuple(self.not_run)
        try:
            source, why = Writer(program, signature_of(situation), parameters, module).source(), ""
        except UnreadError as error:
            source, why = "", str(error)
        return Equivalent(program, steps, worst, compared, not_run, reading.tolerance, source, why)

    def _worst(self, reading: Reading, layout: Layout) -> Difference:
        """The greatest difference; the first that is more than rounding ends it."""
        worst = Difference("", "output", 0.0)
        for case in self._cases():
            try:
                differences = list(compare(reading.program, case, layout, gradients=case.redrawn is not None))
            except UnreadError:
                differences = list(self._read_again(case, layout))
            except Exception as error:  # the code may take no other lengths
                if case.words == "fresh inputs":
                    raise UnreadError(f"it cannot be called with gradients ({type(error).__name__}: {error})") from error
                self.not_run.append(case.words)
                continue
            self.compared.append(case.words)
            worst = max([worst, *differences], key=lambda one: one.size)
            if worst.size > reading.tolerance:
                break
        return worst

    def _read_again(self, case: Case, layout: Layout) -> Iterator[Difference]:
        """Compare at lengths for which the program has to be read anew, as where a table is looked up."""
        self.not_run.append(case.words)
        yield Difference(case.words, "output", 0.0)

    def _cases(self) -> Iterator[Case]:
        """List the calls that are compared."""
        trial = self.situation.trial
        yield case_of(trial, None, "fresh inputs", seed=21, redrawn=7)
        yield case_of(trial, None, "parameters drawn anew", seed=22, redrawn=8)
        for place, (queries, keys) in enumerate(LENGTHS):
            keys = queries if trial.plan.self_attention else keys
            yield case_of(trial, (queries, keys), f"{queries} queries and {keys} keys", seed=23 + place)
        form = self.situation.understood
        if form is not None:
            yield case_of(trial, None, f"with a mask: {form}", seed=31, form=form)


def layout_of(trial: Trial) -> Layout:
    """Say how a trial lays out its arguments and its output."""
    turned = partial(from_layout, layout=trial.plan.layout)
    return Layout(turned, turned, partial(_output, place=trial.plan.output))


def signature_of(situation: Situation) -> Signature:
    """Say how the code that was checked is called."""
    plan, names = situation.plan, [name for name, _ in situation.plan.roles]
    data = [name for name, x in situation.call.tensors if id(x) in situation.call.seeds]
    arguments = tuple((name, names[int(name)] if plan.positional else name) for name in data)
    returned = _output(situation.found.run.output, plan.output)
    return Signature(
        situation.subject.name, arguments, plan.layout, plan.mask_parameter, situation.understood, returned.dim() < 4
    )


def _output(returned: Any, place: int) -> Tensor:
    return list(tensors_in((returned,)))[place]


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
    inputs = trial.inputs(*(lengths or ()), seed=seed)
    may = None
    if form is not None:
        batch, queries = inputs.query.shape[:2]
        may = draw_masks(form.pattern, batch, queries, inputs.key.size(1), seed)
        inputs = replace(inputs, may_attend=may)
    args, kwargs = trial.arguments(inputs, mask=form)
    seeds, _ = named_inputs(trial, inputs, form, args, kwargs)
    function = trial.called
    module = trial.function if hasattr(trial.function, "parameters") else None
    return Case(Call(function, args, kwargs, module, seeds), may, words, redrawn)


def hold(report: Report, situation: Situation) -> None:
    """Hold an EQUAL against torch: without a program that gives the same numbers it is none.

    Args:
        report: Receives the program, and the verdict that follows.
        situation: What was seen.
    """
    try:
        equivalent = _Held(situation).equivalent()
    except UnreadError as why:
        report.verdict, report.reason = "unchecked", f"No program of torch's own parts could be made of it: {why}."
        return
    report.equivalent = equivalent
    worst = equivalent.worst
    if not equivalent.agrees:
        report.verdict = "unchecked"
        report.reason = (
            f"It differs from torch with the same weights by {worst.size:.2g} of the largest value ({worst.what}, "
            f"{worst.case}), and the checker could not say where."
        )
        return
    open_steps = equivalent.unexplained({finding.stage for finding in report.meant})
    if open_steps:
        report.verdict = "unchecked"
        said = "; ".join(step.words for step in open_steps)
        report.reason = f"Nothing says whether this is intended: {said}. If it is, say so with --intended."
    report.coverage += [Exercise(f"the whole: {words}", False, "it does not run so") for words in ()]
