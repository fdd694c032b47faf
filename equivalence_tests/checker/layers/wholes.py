"""Hold a layer, a stack or a model against torch as a whole: a program of its parts, wired alike, that runs alone."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from equivalence_tests.checker.engine.codes import numbered
from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.equivalent.comparing import Case, Difference, compare, kept_parameters
from equivalence_tests.checker.equivalent.deciding import differs, explained
from equivalence_tests.checker.equivalent.holding import source_of
from equivalence_tests.checker.equivalent.part_holding import EXACT, WrittenPart, joined_output
from equivalence_tests.checker.equivalent.steps import Step, evidence_of
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.layers.masks import Mask
from equivalence_tests.checker.layers.whole_calls import Calls, called_by_hooks
from equivalence_tests.checker.layers.whole_source import WholeWriter
from equivalence_tests.checker.layers.whole_steps import NOT_FOLLOWED, Follower
from equivalence_tests.checker.layers.whole_torchs import TorchsLayer
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.model_calls import ModelRun
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.report import Report


@dataclass
class Whole:
    """A layer, a stack or a model, and what is known of it.

    Args:
        name: What it is called.
        function: What the user wrote.
        module: A copy, in float64.
        run: How it is called.
        kinds: What its parts are, by path; "layer" for those that add their own residual.
        parts: The equivalents of its parts, by path.
        heads: How many heads a mask may be repeated for.
        masks: The masks that it is known to take.
        intended: What the user says is intended, by name, each with the reason.
    """

    name: str
    function: Any
    module: nn.Module
    run: ModelRun
    kinds: Mapping[str, str]
    parts: Mapping[str, Equivalent]
    heads: int = 1
    masks: Sequence[Mask] = ()
    intended: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    compared: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    why: str = ""  # what the first program lacked that was not made

    @cached_property
    def calls(self) -> Calls:
        """The ways in which it is called."""
        return Calls(
            self.module, self.run, self.heads, [mask for mask in self.masks if mask.form is not None and mask.reached]
        )

    def equivalent(self) -> Equivalent:
        """Read the program, write it down, and compare it.

        Raises:
            UnreadError: If none can be made.
        """
        with kept_parameters(self.module):
            runs = self._recorded(masked=False)
            follower = self._follower(runs[0])
            self.steps = tuple(follower.steps(list(tensors_in((runs[0].output,)))))
            found, why = self._in_torch(runs[0], follower), UnreadError("")
            for masked, parts in self._ways() if found is None else ():
                try:
                    writer = self._written(runs, masked, parts)
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

    def _in_torch(self, run: Run, follower: Follower) -> Equivalent | None:
        """Give torch's own layer with the user's weights, where it is the whole; then no step is left to explain."""
        layer = TorchsLayer(
            self.module, run.recorder, follower.labels, self.parts, self.calls.masks, self.calls.sizes()[0].batch
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

    def _recorded(self, masked: bool) -> list[Run]:
        with called_by_hooks(self.module):
            return [call.run(read=False) for call in self.calls.recorded(masked)]

    def _ways(self) -> Iterator[tuple[bool, Mapping[str, Equivalent]]]:
        """With masks and the programs of its parts first, then with what ran in the parts, then without masks."""
        masked = [True] * bool(self.calls.masks) + [False]
        yield from ((mask, parts) for mask in masked for parts in ([self.parts, {}] if self.parts else [{}]))

    def _follower(self, run: Run) -> Follower:
        return Follower(self.module, run.recorder, self.kinds, {mask.name for mask in self.masks} | {*self.run.masks})

    def _written(self, runs: Sequence[Run], masked: bool, parts: Mapping[str, Equivalent]) -> WholeWriter:
        if masked:
            runs = self._recorded(masked=True)
        optional = {mask.name for mask in self.calls.masks if self._may_be_none(mask.name)} if masked else set()
        return WholeWriter(self.module, (runs[0].recorder, runs[1].recorder), parts, optional)

    def _may_be_none(self, name: str) -> bool:
        found = inspect.signature(self.module.forward).parameters.get(name)
        return found is not None and found.default is None

    # ------------------------------------------------------------------------------------------- comparing
    def _compared(self, source: str, handed: tuple[str, ...], masked: bool) -> Equivalent:
        steps = tuple((step.words, step.evidence) for step in self.steps)
        found = Equivalent(source, "", source_of(self.function), handed, steps, (), (), 0, "", True)
        part = WrittenPart(found)
        self.compared, self.not_run = [], [] if masked else [self.calls.with_masks([x.name]) for x in self.calls.masks]
        worst = Difference("", "output", 0.0)
        for words, call, seed in self.calls.compared(masked):
            call.seeds = {id(x): numbered(x.shape) for _, x in call.tensors if x.is_floating_point() and x.dim() > 2}
            case = Case(call, None, words, seed)
            try:
                apart = list(compare(part.on(call, joined_output), case, LAYOUT, gradients=seed is not None))
            except UnreadError as why:
                self.not_run.append(f"{words}: {why}")
                continue
            self.compared.append(words)
            worst = max([worst, *apart], key=lambda one: one.size)
            if worst.size > EXACT:
                break
        if not self.compared:
            raise UnreadError(self.not_run[0])
        return replace(
            found,
            compared=tuple(self.compared),
            not_run=tuple(self.not_run),
            difference=worst.size,
            where=f"{worst.what}, {worst.case}",
            agrees=worst.size <= EXACT,
        )


LAYOUT = Layout(lambda x: x, lambda x: x, joined_output)


def hold_whole(report: Report, whole: Whole) -> bool:
    """Hold an EQUAL of a layer, a stack or a model against torch: without a program of the whole it is none.

    Args:
        report: Receives the program, and the verdict that follows.
        whole: What is held.

    Returns:
        Whether the program agrees, and nothing in it is unexplained.
    """
    try:
        report.equivalent = found = whole.equivalent()
    except UnreadError as why:
        report.unread = str(why)
        report.verdict, report.reason = "unchecked", f"It could not be written in torch's own parts: {why}."
        return False
    if not found.agrees:
        what, _, case = found.where.partition(", ")
        differs(report, Difference(case, what, found.difference))
        return False
    if not explained(report, evidence_of(whole.steps, report.intended, set()), whole.intended):
        return False
    reason = f"the whole was not compared in it{f': {whole.why}' if whole.why else ''}"
    report.coverage += [Exercise(one, False, reason) for one in found.not_run]
    return True
