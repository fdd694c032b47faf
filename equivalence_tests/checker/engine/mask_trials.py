"""Masks that are handed over, alone in the first form in which nothing departs, else in the nearest, and in pairs."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.given_masks import further_axes
from equivalence_tests.checker.engine.judgement import Expectation, Expecting
from equivalence_tests.checker.engine.names import Attention, Run
from equivalence_tests.checker.engine.ran import unused_fill
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.engine.same import identical
from equivalence_tests.checker.engine.situations import Situation, new_departures, shifts_scores, situation_of
from equivalence_tests.checker.engine.taking_part import NEVER_READ, OF_MASKS, argument_name, replaced_at
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.reach.arguments import SEGMENTS, role_of_parameter
from equivalence_tests.checker.reach.calling import OF_MEMORY, Inputs, Trial
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.masking import MaskForm, draw_masks, mask_forms, mistyped, query_mask_forms
from equivalence_tests.checker.reach.passed_masks import asserted_axes, made_of_padding, triangles_passed
from equivalence_tests.checker.reach.proposing import parameters_of, unread_arguments
from equivalence_tests.checker.reach.state import ask, switch_off
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import frames_of, raised_at, source_of
from equivalence_tests.checker.reporting.report import Report

T = TypeVar("T")
OF_QUERIES = re.compile(r"^(q|query|queries)_|_(q|query|queries)(_|$)", re.IGNORECASE)
UNUSED_OF_QUERIES = "it says which queries are padding, and is never used; the output for those means nothing"
NO_MASK = "read as a mask, it hides nothing, and no name says that it is one"
IN_VAIN = "This line lets it through, and the output is the same, bit for bit, as without a mask."
WIDENS = ", or gives the scores more axes"
HIDES_NOTHING = f"{NEVER_READ}, so it hides nothing"
OF_WHAT = re.compile(r"_?(key_|attn_|attention_)?(padding_)?(mask|lengths?|lens)$")  # what leaves "y" of "y_mask"
# What the code answers if it is wrong in itself, and not only called with what it does not take.
CODE_ERRORS = (AttributeError, NameError)
# What the words beside a mask say that 1 and True mean in it; a clause ends in Chinese punctuation too.
SAYS = {
    meaning: re.compile(rf"\b(1|true|ones?)\b[^.,;\uff0c\uff1b\uff09\u30020-9]{{1,25}}?\b({words})", re.IGNORECASE)
    for meaning, words in (("look", "real|valid|ke?ep|attend|visible"), ("block", "pad|ignor|mask(ed|ing)|hid|block"))
}


def of_all_masks(masked: Sequence[Situation], report: Report) -> list[Departure]:
    """Judge each mask that may be handed over; one that no line reads, beside one that acts, is listed as not run."""
    found = [(one, departure) for one in masked for departure in masked_departures(one, report)]
    unread = unread_arguments(masked[0].trial.function) if any(one.understood for one in masked) else set()
    unread &= {one.plan.mask_parameter for one, departure in found if departure.name == "mask_never_used"}
    report.coverage += [Exercise(name, False, HIDES_NOTHING) for name in sorted(unread)]
    return [departure for one, departure in found if one.plan.mask_parameter not in unread]


def masked_departures(situation: Situation, report: Report) -> list[Departure]:
    """Hand a mask over in every form, and list what departs with it, beyond what departs without."""
    if not situation.plan.mask_parameter:
        return []
    adapted = situation.subject.adapter.call is not None
    masks = _Masks(situation, report)
    forms = [form for form in mask_forms() if not situation.plan.step or "query" not in form.shape]
    found = masks.read([MaskForm("(batch, query, key)", "look")] if adapted else forms)
    if found is None and masks.says_which_queries():
        return []
    if found is None and not adapted and not (masks.tried or masks.idle or masks.broken):
        found = masks.read(replace(form, held=True) for form in mask_forms())
    sizes, takes_all = situation.trial.sizes, any(form.pattern == "full" for form in masks.taken)
    if found is None and not takes_all and sizes.query_len != sizes.key_len:  # it may take no other masks
        even = situation.of_length(sizes.query_len)
        if even is not None and not even.blocked:
            return masked_departures(even, report)
    found = masks.nearest() if found is None else found
    if found and SEGMENTS.search(masks.parameter):
        report.coverage.append(Exercise(masks.parameter, False, "tokens see others than those of their own segment"))
        return []
    of_queries = bool(OF_QUERIES.search(masks.parameter))
    is_mask = role_of_parameter(masks.parameter) == "mask" and not of_queries
    if is_mask or not any(one.name == "mask_never_used" for one in found):
        return found
    why = UNUSED_OF_QUERIES if of_queries else NO_MASK
    report.coverage.append(Exercise(masks.parameter, of_queries, why))
    report.notes += [f"{masks.parameter}: {why}"] if of_queries else []
    return [one for one in found if one.name != "mask_never_used"]


def mask_form_of(situation: Situation) -> MaskForm | None:
    """Give the form of mask that the code understands, or the nearest one that it takes; None if it takes none."""
    if not situation.plan.mask_parameter:
        return None
    masks = _Masks(situation, Report(""))
    masks.read(mask_forms())
    return situation.understood or next(iter(masks.taken), None)


@dataclass
class _Masks:
    """Reads what one mask argument means, from a call without a mask, and reports how."""

    situation: Situation
    report: Report
    tried: list[tuple[tuple[float, ...], MaskForm, list[Departure]]] = field(default_factory=list)  # how much departs
    idle: list[MaskForm] = field(default_factory=list)  # without effect
    broken: list[Situation] = field(default_factory=list)  # that gave nothing but NaN
    errors: list[tuple[MaskForm, Exception]] = field(default_factory=list)  # that the code raised

    @property
    def parameter(self) -> str:
        """The argument."""
        return self.situation.plan.mask_parameter

    @property
    def taken(self) -> list[MaskForm]:
        """The forms that the code takes, the nearest to right first."""
        return [*(form for _, form, _ in sorted(self.tried, key=lambda item: item[0])), *self.idle]

    def read(self, forms: Iterable[MaskForm]) -> list[Departure] | None:
        """Try forms until nothing departs; None if something does in each."""
        plain = _output(self.situation.trial, self.situation.inputs)
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
            elif self._is_right(form, attempt):
                return self._understood(form)
        return None

    def says_which_queries(self) -> bool:
        """Whether it is no mask of keys: nothing of the keys comes out for the queries that it leaves out."""
        inputs = self.situation.inputs
        if inputs.query.size(1) == inputs.key.size(1):
            return False
        others = inputs.scaled(-1.7, of=("key", "value"))
        plain = _output(self.situation.trial, self.situation.inputs)
        for form in query_mask_forms():
            one, two = self._output(form), self._output(form, inputs=others)
            there = self._may(form)[..., 0]
            if one is None or two is None or one.shape[:2] != there.shape:
                continue
            if torch.equal(one[there], plain[there]) and torch.equal(one[~there], two[~there]):
                self._note_convention(form)
                self.report.coverage.append(Exercise(self.parameter, True, f"{form}: queries left out get nothing"))
                return True
        return False

    def _asked(self, form: MaskForm, call: Callable[[], T]) -> T | None:
        """What a call gives; None, with its error noted, where it raises."""
        answer = ask(call)
        self.errors += [(form, answer.error)] if answer.error is not None else []
        return answer.value

    def _output(self, form: MaskForm, of: MaskForm | None = None, inputs: Inputs | None = None) -> Tensor | None:
        """What comes back with a mask in this form, or what this form keeps of another; None if it is not taken."""
        given = replace(inputs or self.situation.inputs, may_attend=self._may(of or form))
        return self._asked(form, lambda: _output(self.situation.trial, given, form))

    def _may(self, form: MaskForm) -> Tensor:
        batch, queries = self.situation.inputs.query.shape[:2]
        return draw_masks(form.pattern, batch, queries, self.situation.inputs.key.size(1), 4)

    def _is_right(self, form: MaskForm, attempt: Situation) -> bool:
        """Note what departs in a form; whether nothing does."""
        new = _beyond(self.situation, attempt)
        if self.situation.hides_by_itself and (new or attempt.blocked):
            instead = self._attempt(form, replaces_own=True)
            if instead is not None and not instead.blocked and not _beyond(self.situation, instead):
                self.report.notes.append("a mask that you pass replaces the built-in causal mask")
                if form.pattern in ("keys", "lengths"):  # one with a row for each query may hide later tokens too
                    both = f"{self.parameter} together with the causal mask"
                    self.report.coverage.append(Exercise(both, False, "padding takes the place of the causal mask"))
                return True
        if new:
            self.tried.append((_score(form, new, attempt.blocked), form, new))
        # A mask that is added as zeros leaves visible scores alone; "-10 * (1 - mask)" was meant for ones.
        return not new and not attempt.blocked and not (form.encoding == "additive" and shifts_scores(attempt))

    def _attempt(self, form: MaskForm, replaces_own: bool = False) -> Situation | None:
        situation, may = self.situation, self._may(form)
        known = _allowed(may, None if replaces_own else situation.found)
        watch = partial(situation_of, situation.subject, situation.trial, form, may, expecting=known)
        return self._asked(form, lambda: _without_further_axes(watch()))

    def _understood(self, form: MaskForm) -> list[Departure]:
        """A form in which all samples or queries are alike hides what a general form shows."""
        full = (new for _, other, new in self.tried if other.pattern == "full")
        general = [new for new in full if all(departure.mistake.by_query for departure in new)]
        self.situation.understood = form
        self._note_convention(form)
        function = self.situation.subject.function
        owner = function if inspect.isroutine(function) else type(function)
        file = source_of(inspect.getmodule(owner))
        own, handed = _said_of(source_of(function), self.parameter), _handed_as(self.parameter, file)
        words = _otherwise(form, own if any(own.values()) or not handed else _said_of(file, handed))
        words = words or _otherwise(form, triangles_passed(function, self.parameter))
        words = words or _otherwise(form, made_of_padding(function, self.parameter))
        if words and (attempt := self._attempt(form)) is not None:
            claim = f"Its own code says otherwise: {words}"
            return [Departure("mask_inverted", "mask", self._taking(attempt.found.run), {"claim": claim})]
        if of_another := _otherwise(form, _said_of(file, r"\w*mask")):
            self.report.notes.append(f"{self.parameter} was read as {form}; its file says of a mask: {of_another}")
        if form.pattern != "full" and general:
            return general[0]
        self.report.coverage.append(Exercise(self.parameter, True, str(form)))
        alike = [other for _, other, _ in self.tried if (other.pattern, other.encoding) == ("full", form.encoding)]
        whole = ((self._output(other), self._output(form, other)) for other in alike if form.pattern == "keys")
        if any(one is not None and first is not None and identical(one, first) for one, first in whole):
            why = "all queries get its first row: right only if nobody passes a mask that differs by query"
            self.report.coverage.append(Exercise(f"{self.parameter} with a row for each query", False, why))
        in_vain = [*self._taken_in_vain(form)]
        shapes = (f"{self.parameter} of {one.shape}" for one in in_vain)
        self.report.coverage += [Exercise(what, False, "it was passed, and hides nothing") for what in shapes]
        self.report.coverage += self._not_for_each_sample(form)
        return [*self._asked_for_in_vain(in_vain)]

    def _not_for_each_sample(self, form: MaskForm) -> Iterator[Exercise]:
        """List that all samples have one mask, where a mask of each sample's own is not taken in any shape."""
        alike = [one for one in mask_forms() if (one.encoding, one.held) == (form.encoding, form.held)]
        others = [one for one in alike if "batch" in one.shape]
        if "batch" in form.shape or self.situation.inputs.query.size(0) == 1:
            return
        before = len(self.errors)
        attempts = (self._attempt(one) for one in others if self._output(one) is not None)
        if all(attempt is None or attempt.blocked for attempt in attempts):
            errors = [error for _, error in self.errors[before:]]
            line = next(filter(None, map(raised_at, errors)), "")
            wider = WIDENS * any(isinstance(error, CannotCheckError) for error in errors)
            yield Exercise(f"{self.parameter} for each sample", False, f"it raises in every shape{line}{wider}")

    def _taken_in_vain(self, form: MaskForm) -> Iterator[MaskForm]:
        """List the other shapes in which the code takes a mask that means the same, and hides nothing."""
        plain = _output(self.situation.trial, self.situation.inputs)
        kind = form.pattern, form.encoding, form.held
        for other in (one for one in mask_forms() if (one.pattern, one.encoding, one.held) == kind and one != form):
            output = self._output(other)
            if output is not None and torch.equal(output, plain):
                yield other

    def _asked_for_in_vain(self, forms: Iterable[MaskForm]) -> Iterator[Departure]:
        """Name a shape that the code itself lets through by an assertion, and that hides nothing."""
        module = self.situation.subject.module
        for form in forms if module is not None else ():
            if lines := asserted_axes(type(module), form.shape.count(",") + 1):
                facts = {"argument": f" {self.parameter} of {form.shape}", "claim": IN_VAIN}
                yield Departure("mask_never_used", "mask", None, facts, frames=lines)
                return

    def _taking(self, run: Run) -> Operation:
        """The first operation that takes the mask."""
        function, names = self.situation.trial.function, run.recorder.named
        given = ((op, name) for op in run.operations for bits in op.origins for name in names(bits))
        mine = (op for op, x in given if x.startswith("arg:") and argument_name(x, function) == self.parameter)
        return next(mine, run.operations[0])

    def _note_convention(self, form: MaskForm) -> None:
        theirs = "key_padding_mask" if form.pattern == "keys" else "attn_mask"
        nobodys = "none: nobody reads the output for padding" if form.pattern == "queries" else ""
        torchs = nobodys or f"{theirs}: True = may not look, or added"
        self.report.conventions.append((f"mask ({self.parameter})", str(form), torchs))

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
        wrong: list[Exception] = [error for _, error in self.errors if isinstance(error, CODE_ERRORS)]
        wrong = wrong if len(wrong) == len(self.errors) else mistyped(self.errors)
        if wrong:
            every = "; ".join(dict.fromkeys(map(said, wrong)))
            facts = {"said": said(wrong[0]), "claim": f"A call with {self.parameter} raises {every}"}
            return [Departure("mask_fails", "mask", None, facts, frames=frames_of(wrong[0]))]
        why = f"every form raised, {said(self.errors[0][1])}" if self.errors else "every form gave NaN"
        self.report.notes.append(f"{self.parameter} was not read: {why}")
        self.report.coverage.append(Exercise(self.parameter, False, why))
        return []

    def _without_effect(self) -> list[Departure]:
        why = has_nothing_to_hide(self.parameter, self.situation.trial)
        if why:
            self.report.coverage.append(Exercise(self.parameter, False, why))
            return []
        claim = f"The output is the same, bit for bit, whatever {self.parameter} hides."
        facts = {"argument": f" {self.parameter}", "claim": claim}
        attempt = self._attempt(self.idle[0])
        unused = unused_fill(attempt.found.run.operations) if attempt is not None else None
        return [Departure("mask_never_used", "mask", unused or self.situation.first, facts)]


def _said_of(text: str, name: str) -> dict[str, list[str]]:
    """The lines of a text that say of masks of such a name what 1 and True in them mean, by that meaning."""
    told = re.compile(rf"\b{name}\b(?: shape)?\s*[:(](?!.*\b(not|no)\b)")
    lines = [(x.strip(), x[found.end() :]) for x in text.splitlines() if (found := told.search(x))]
    return {meaning: [x for x, behind in lines if words.search(behind)] for meaning, words in SAYS.items()}


def _otherwise(form: MaskForm, said: dict[str, list[str]]) -> str:
    """A line that says the opposite of a form; "" where there is none, or lines differ."""
    meaning = form.encoding.partition("_")[0]
    return next((x for found in said.values() for x in found if meaning in said and not said[meaning]), "")


def _handed_as(parameter: str, file: str) -> str:
    """A pattern of the names of the masks that a file hands over as a parameter, if one function takes that; ""."""
    takes = re.findall(rf"\bdef \w+\([^)]*\b{parameter}\b", file)
    given = re.findall(rf"\b{parameter}\s*=\s*(\w*mask)\s*[,)]", file) if len(takes) == 1 else []
    return f"(?:{'|'.join(given)})" if given else ""


def _allowed(may: Tensor, plain: Examination | None) -> Expecting:
    """Which keys a mask allows, less what the code hides by itself."""
    batch, queries, keys = may.shape

    def expecting(attention: Attention) -> dict[int, Expectation]:
        found = {}
        for part in attention.parts:
            query, key, rank = part.table.query, part.table.key, part.table.rank_query
            if int(query.max()) >= batch * queries and int(rank.max()) < queries:  # learnt: keys say whose
                query = key // keys * queries + rank
            if int(query.max()) < batch * queries and int(key.max()) < batch * keys:
                allowed = may[query // queries, query % queries, key % keys]
                own = _own(plain, attention, len(allowed))
                found[part.number] = Expectation(allowed & ~own if own is not None else allowed, True)
        return found

    return expecting


def _without_further_axes(attempt: Situation) -> Situation:
    """Raise where a mask has more axes than the scores that it meets, so that these get more."""
    for judgement in attempt.found.judgements:
        if axes := further_axes(judgement.attention):
            raise CannotCheckError(f"the mask has more axes than the scores: {tuple(axes)}")
    return attempt


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


def _output(trial: Trial, inputs: Inputs, form: MaskForm | None = None) -> Tensor:
    """What comes back of copies of the inputs, with the same random numbers in each call, unwatched."""
    module = trial.function if isinstance(trial.function, nn.Module) else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        returned = Call(trial.called, *trial.arguments(inputs, mask=form), module).returned()
    return list(tensors_in((returned,)))[trial.plan.output]


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
    module = trial.function if isinstance(trial.function, nn.Module) else None
    if switch := switch_off(module, OF_MASKS):
        return f"it has no effect: {switch} is False"
    if given.get(stem) == "query" and not plan.self_attention:
        return "it marks queries, and has no effect on them"
    own = parameters_of(trial.function) if stem not in ("", mask) else []
    idle = {*given, mask, *unread_arguments(trial.function)}
    others = (p.name for p in own if p.name not in idle and stem in p.name)
    missing = next((name for name in others if role_of_parameter(name) != "mask"), "")
    if not missing and plan.self_attention and OF_MEMORY.search(mask):
        missing = "second tensor"
    if not missing and (line := replaced_at(trial.function, mask)):
        return f"as it was built, line {line} replaces it"
    return f"no {missing} is passed that it could hide" if missing else ""


def _score(form: MaskForm, new: list[Departure], blocked: bool) -> tuple[float, ...]:
    """How far a reading of the mask is from right: the nearest one is reported."""
    worst = max((departure.mistake.cost for departure in new), default=0)
    kind = 0 if form.encoding in ("look", "block") else 2 if form.encoding == "additive" else 1
    return (float(blocked), float(worst + len(new)), float(form.pattern != "full"), float(kind))
