"""Masks that are handed over: the first form in which nothing departs, else the one in which least does."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from equivalence_tests.checker.engine.causality import switch_off
from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.judgement import Expectation, Expecting
from equivalence_tests.checker.engine.names import Attention, Run
from equivalence_tests.checker.engine.ran import unused_fill
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.engine.same import HIDING, identical, near
from equivalence_tests.checker.engine.situations import Situation, new_departures, situation_of, weighed_scores
from equivalence_tests.checker.engine.vocabulary import ELEMENTWISE, SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.masking import MaskForm, draw_masks, mask_forms, query_mask_forms
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.state import ask, attempt
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import frames_of
from equivalence_tests.checker.reporting.report import Report

T = TypeVar("T")
OF_MASKS = re.compile("mask", re.IGNORECASE)
OF_MEMORY = re.compile(r"src|source|mem|enc|cross", re.IGNORECASE)
OF_QUERIES = re.compile(r"^(q|query|queries)_|_(q|query|queries)(_|$)", re.IGNORECASE)
UNUSED_OF_QUERIES = "it says which queries are padding, and is never used; what comes back for those means nothing"
OF_WHAT = re.compile(r"_?(key_|attn_|attention_)?(padding_)?(mask|lengths?|lens)$")  # what leaves "y" of "y_mask"
# What the code answers if it is wrong in itself, and not only called with what it does not take.
CODE_ERRORS = (AttributeError, NameError)


def masked_departures(situation: Situation, report: Report) -> list[Departure]:
    """Hand a mask over in every form, and judge what it hides.

    Returns:
        What departs with the mask, beyond what departs without.
    """
    if not situation.plan.mask_parameter:
        return []
    adapted = situation.subject.adapter.call is not None
    masks = _Masks(situation, report)
    found = masks.read([MaskForm("(batch, query, key)", "look")] if adapted else mask_forms())
    if found is None and masks.says_which_queries():
        return []
    if found is None and not adapted and not (masks.tried or masks.idle or masks.broken):
        found = masks.read(replace(form, held=True) for form in mask_forms())
    even = _even(situation) if found is None and not masks.takes_all else None
    if even is not None:
        return masked_departures(even, report)
    found = masks.nearest() if found is None else found
    of_queries = bool(OF_QUERIES.search(masks.parameter))
    is_mask = role_of_parameter(masks.parameter) == "mask" and not of_queries
    if is_mask or not any(one.name == "mask_never_used" for one in found):
        return found
    why = UNUSED_OF_QUERIES if of_queries else "taken for a mask, it hides nothing, and no name says so"
    report.coverage.append(Exercise(masks.parameter, of_queries, why))
    report.notes += [f"{masks.parameter}: {why}"] if of_queries else []
    return [one for one in found if one.name != "mask_never_used"]


def _even(situation: Situation) -> Situation | None:
    """The same call with as many keys as queries, for code that takes no other masks."""
    sizes = situation.trial.sizes
    if sizes.query_len == sizes.key_len:
        return None
    trial = replace(situation.trial, sizes=replace(sizes, key_len=sizes.query_len))
    even = attempt(partial(situation_of, situation.subject, trial))
    return None if even is None or even.blocked else even


def mask_form_of(situation: Situation) -> MaskForm | None:
    """Give the form of mask that the code understands, or the nearest one that it takes; None if it takes none."""
    if not situation.plan.mask_parameter:
        return None
    masks = _Masks(situation, Report(""))
    masks.read(mask_forms())
    taken = [form for _, form, _ in sorted(masks.tried, key=lambda item: item[0])]
    return situation.understood or next(iter([*taken, *masks.idle]), None)


@dataclass
class _Masks:
    """Reads what one mask argument means.

    Args:
        situation: A call without a mask.
        report: Receives how the mask was read.
        tried: The forms in which something departs: how much, and what.
        idle: The forms without effect.
        broken: The calls that gave nothing but NaN.
        errors: What the code raised.
    """

    situation: Situation
    report: Report
    tried: list[tuple[tuple[float, ...], MaskForm, list[Departure]]] = field(default_factory=list)
    idle: list[MaskForm] = field(default_factory=list)
    broken: list[Situation] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    @property
    def parameter(self) -> str:
        """The argument."""
        return self.situation.plan.mask_parameter

    @property
    def takes_all(self) -> bool:
        """Whether a form was taken in which every entry counts."""
        return any(form.pattern == "full" for form in [*self.idle, *(form for _, form, _ in self.tried)])

    def read(self, forms: Iterable[MaskForm]) -> list[Departure] | None:
        """Try forms until nothing departs; None if something does in each."""
        plain = _output(self.situation.found.run, self.situation)
        seen: list[tuple[str, Tensor]] = []
        for form in forms:
            output = self._output(form)
            if output is None or any(pattern == form.pattern and identical(other, output) for pattern, other in seen):
                continue
            attempt = self._attempt(form)
            if attempt is None:
                continue
            seen.append((form.pattern, output))
            if torch.equal(output, plain):
                self.idle.append(form)
            elif bool(output.isnan().all()):
                self.broken.append(attempt)
            elif self._new(form, attempt) is not None:
                return self._understood(form)
        return None

    def says_which_queries(self) -> bool:
        """Whether it is no mask of keys: nothing of the keys comes out for the queries that it leaves out."""
        inputs = self.situation.inputs
        if inputs.query.size(1) == inputs.key.size(1):
            return False
        others = inputs.scaled(-1.7, of=("key", "value"))
        plain = _output(self.situation.found.run, self.situation)
        for form in query_mask_forms():
            one, two = self._output(form), self._output(form, inputs=others)
            there = self._may(form)[..., 0]
            if one is None or two is None or one.shape[:2] != there.shape:
                continue
            if torch.equal(one[there], plain[there]) and torch.equal(one[~there], two[~there]):
                self._note_convention(form)
                self.report.coverage.append(Exercise(self.parameter, True, f"{form}: what is left out gets nothing"))
                return True
        return False

    def _asked(self, call: Callable[[], T]) -> T | None:
        """What a call gives; None, with its error noted, where it raises."""
        answer = ask(call)
        self.errors += [answer.error] if answer.error is not None else []
        return answer.value

    def _output(self, form: MaskForm, of: MaskForm | None = None, inputs: Inputs | None = None) -> Tensor | None:
        """What comes back with a mask in this form, or what this form keeps of another; None if it is not taken."""
        situation, trial = self.situation, self.situation.trial
        given = replace(inputs or situation.inputs, may_attend=self._may(of or form))

        def called() -> Tensor:
            args, kwargs = trial.arguments(given, mask=form)
            return _output(Call(trial.called, args, kwargs, situation.subject.module).run(read=False), situation)

        return self._asked(called)

    def _may(self, form: MaskForm) -> Tensor:
        batch, queries = self.situation.inputs.query.shape[:2]
        return draw_masks(form.pattern, batch, queries, self.situation.inputs.key.size(1), 4)

    def _new(self, form: MaskForm, attempt: Situation) -> bool | None:
        """Note what departs in a form; True if nothing does."""
        new = _beyond(self.situation, attempt)
        if new or attempt.blocked:
            instead = self._attempt(form, replaces_own=True) if self._hides_by_itself else None
            if instead is not None and not instead.blocked and not _beyond(self.situation, instead):
                note = "a mask that you pass replaces the built-in causal mask"
                self.report.notes.append(note)
                return True
        if not new and not attempt.blocked and self._is_natural(form, attempt):
            return True
        if new:
            self.tried.append((_score(form, new, attempt.blocked), form, new))
        return None

    @property
    def _hides_by_itself(self) -> bool:
        return any(bool(hidden.any()) for j in self.situation.found.judgements for hidden in j.hidden)

    def _is_natural(self, form: MaskForm, attempt: Situation) -> bool:
        """A mask that is added as zeros leaves visible scores alone; "-10 * (1 - mask)" was meant for ones."""
        if form.encoding != "additive":
            return True
        before, after = (next(weighed_scores(x), (None, None))[1] for x in (self.situation, attempt))
        if before is None or after is None or before.shape != after.shape:
            return True
        visible = after > -HIDING
        return near(after[visible], before[visible], 1e-12)

    def _attempt(self, form: MaskForm, replaces_own: bool = False) -> Situation | None:
        situation, may = self.situation, self._may(form)
        known = _allowed(may, None if replaces_own else situation.found)

        def watched() -> Situation:
            attempt = situation_of(situation.subject, situation.trial, form, may, expecting=known)
            _refuse_further_axes(attempt)
            return attempt

        return self._asked(watched)

    def _understood(self, form: MaskForm) -> list[Departure]:
        """A form in which all samples or queries are alike hides what a general form shows."""
        general = [
            new
            for _, other, new in self.tried
            if other.pattern == "full" and new and all(departure.mistake.by_query for departure in new)
        ]
        self.situation.understood = form
        self._note_convention(form)
        if form.pattern != "full" and general:
            return general[0]
        self.report.coverage.append(Exercise(self.parameter, True, str(form)))
        if form.pattern == "keys" and any(self._takes_its_first_row(form, other) for _, other, _ in self.tried):
            why = "all queries get its first row: right only if nobody hands over a mask that differs by query"
            self.report.coverage.append(Exercise(f"{self.parameter} with a row for each query", False, why))
        return []

    def _takes_its_first_row(self, keys: MaskForm, full: MaskForm) -> bool:
        """Whether a mask that has a row for each query is taken, and does what its first row does alone."""
        if full.pattern != "full" or full.encoding != keys.encoding:
            return False
        whole, first = self._output(full), self._output(keys, full)
        return whole is not None and first is not None and identical(whole, first)

    def _note_convention(self, form: MaskForm) -> None:
        theirs = "key_padding_mask" if form.pattern == "keys" else "attn_mask"
        torchs = f"{theirs}: True = may not look, or added"
        if form.pattern == "queries":
            torchs = "none: what comes out for padding is nobody's"
        row = (f"mask ({self.parameter})", str(form), torchs)
        self.report.conventions.append(row)

    def nearest(self) -> list[Departure]:
        """What departs in the form that is nearest to right; without one, what that says."""
        if self.tried:
            _, form, new = min(self.tried, key=lambda item: item[0])
            self._note_convention(form)
            return new
        if self.idle:
            return self._without_effect()
        infinite = [place for attempt in self.broken if (place := _first_infinite(attempt)) is not None]
        if infinite:
            claim = f"With {self.parameter}, the weights are infinite here, and the output is not finite."
            return [Departure("mask_after_softmax", "mask", infinite[0], {"claim": claim})]
        wrong = [error for error in self.errors if isinstance(error, CODE_ERRORS)]
        if wrong and len(wrong) == len(self.errors):
            facts = {"said": said(wrong[0]), "claim": f"A call with {self.parameter} raises {said(wrong[0])}"}
            return [Departure("mask_fails", "mask", None, facts, frames=frames_of(wrong[0]))]
        why = f"every form raised, {said(self.errors[0])}" if self.errors else "every form gave NaN"
        self.report.notes.append(f"{self.parameter} was not read: {why}")
        self.report.coverage.append(Exercise(self.parameter, False, why))
        return []

    def _without_effect(self) -> list[Departure]:
        switch = switch_off(self.situation.subject.module, OF_MASKS)
        off = f"it has no effect: {switch} is False" if switch else ""
        why = off or has_nothing_to_hide(self.parameter, self.situation.trial)
        if why:
            self.report.coverage.append(Exercise(self.parameter, False, why))
            return []
        judgement = self.situation.judgement
        first = judgement.attention.first if judgement is not None else None
        claim = f"The output is the same, bit for bit, whatever {self.parameter} hides."
        facts = {"argument": f" {self.parameter}", "claim": claim}
        attempt = self._attempt(self.idle[0])
        unused = unused_fill(attempt.found.run.operations) if attempt is not None else None
        return [Departure("mask_never_used", "mask", unused or first, facts)]


def _allowed(may: Tensor, plain: Examination | None) -> Expecting:
    """Which keys a mask allows, less what the code hides by itself."""
    batch, queries, keys = may.shape

    def expecting(attention: Attention) -> dict[int, Expectation]:
        found = {}
        for part in attention.parts:
            query, key = part.table.query, part.table.key
            if int(query.max()) < batch * queries and int(key.max()) < batch * keys:
                allowed = may[query // queries, query % queries, key % keys]
                own = _own(plain, attention, len(allowed))
                found[part.number] = Expectation(allowed & ~own if own is not None else allowed, True)
        return found

    return expecting


def _refuse_further_axes(attempt: Situation) -> None:
    """Raise where a mask has more axes than the scores that it meets, so that these get more."""
    for judgement in attempt.found.judgements:
        run = judgement.attention.run
        for part in judgement.attention.parts:
            for step, codes, _ in list(part.steps(run))[1:]:
                taken = [own.dim() for _, own in run.names.taken(step) if part.number in sources_in(own)]
                if step.name in ELEMENTWISE and max(taken, default=codes.dim()) < codes.dim():
                    raise CannotCheckError(f"the mask has more axes than the scores: {tuple(codes.shape)}")


def _own(plain: Examination | None, attention: Attention, count: int) -> Tensor | None:
    """What the same attention hides without a mask."""
    for judgement in plain.judgements if plain is not None else ():
        for part, hidden in zip(judgement.attention.parts, judgement.hidden, strict=False):
            same = part.product.operation.frames == attention.parts[0].product.operation.frames
            if same and len(hidden) == count:
                return hidden
    return None


def _beyond(situation: Situation, attempt: Situation) -> list[Departure]:
    return new_departures(situation.departures, [d for d in attempt.departures if d.stage != "wrap"])


def _output(run: Run, situation: Situation) -> Tensor:
    return list(tensors_in((run.output,)))[situation.plan.output]


def _first_infinite(attempt: Situation) -> Operation | None:
    """What makes weights infinite after the softmax; None where nothing does."""
    judgement = attempt.judgement
    steps = [] if judgement is None else list(judgement.attention.parts[0].steps(judgement.attention.run))
    ends = [place for place, (operation, _, _) in enumerate(steps) if operation.name in SOFTMAXES]
    after = steps[ends[0] + 1 :] if ends else []
    return next((operation for operation, _, value in after if bool(value.isinf().any())), None)


def has_nothing_to_hide(mask: str, trial: Trial) -> str:
    """Say why no key of a call need be hidden by a mask of this name; "" if nothing says that."""
    plan, stem = trial.plan, OF_WHAT.sub("", mask)
    given = dict(plan.roles)
    if given.get(stem) == "query" and not plan.self_attention:
        return "it speaks of the queries, and has no effect on them"
    own = parameters_of(trial.function) if stem not in ("", mask) else []
    others = (p.name for p in own if p.name not in given and stem in p.name and p.name != mask)
    missing = next((name for name in others if role_of_parameter(name) != "mask"), "")
    if not missing and plan.self_attention and OF_MEMORY.search(mask):
        missing = "second tensor"
    return f"no {missing} is given that it could hide" if missing else ""


def _score(form: MaskForm, new: list[Departure], blocked: bool) -> tuple[float, ...]:
    """How far a reading of the mask is from right: the nearest one is reported."""
    worst = max((departure.mistake.cost for departure in new), default=0)
    kind = 0 if form.encoding in ("look", "block") else 2 if form.encoding == "additive" else 1
    return (float(blocked), float(worst + len(new)), float(form.pattern != "full"), float(kind))
