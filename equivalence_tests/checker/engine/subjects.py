"""The door to one attention: a class or function that is built, called, and held against torch in all it offers."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.calling import (
    Caller,
    CallPlan,
    call_plans,
    cross_plans,
    other_mask_plans,
    random_inputs,
)
from equivalence_tests.checker.construction import Sizes
from equivalence_tests.checker.engine.anchors import Attention
from equivalence_tests.checker.engine.calls import diagnose_call
from equivalence_tests.checker.engine.codes import coded, feature_of, known, sources_in, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.ending import ending_departures
from equivalence_tests.checker.engine.contracts.projecting import projection_departures, unused_departures
from equivalence_tests.checker.engine.contracts.scores import Expectation
from equivalence_tests.checker.engine.coverage import cover
from equivalence_tests.checker.engine.intervening import Examination, ExpectedFor, examine, prove
from equivalence_tests.checker.engine.judging import Judgement
from equivalence_tests.checker.engine.meaning import with_evidence
from equivalence_tests.checker.engine.naming import finding_of
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.trying import Trial
from equivalence_tests.checker.engine.watching import frames_of
from equivalence_tests.checker.findings import Exercise
from equivalence_tests.checker.masking import MaskForm, draw_masks, mask_forms
from equivalence_tests.checker.reference import Inputs
from equivalence_tests.checker.report import Report
from equivalence_tests.checker.subject import Subject
from equivalence_tests.checker.tracing import tensors_in

__all__ = ["diagnose_subject"]

LOUD = 30.0
ROLES = ("query", "key", "value")


@dataclass(eq=False)
class Situation:
    """One way to call the subject, and what came of it.

    Args:
        subject: What is checked.
        plan: How it is called.
        lengths: On which sizes.
        inputs: What it was given.
        call: The call.
        found: What was seen in it.
        extra: What departs outside the attention itself: inputs, weights, residual.
    """

    subject: Subject
    plan: CallPlan
    lengths: Sizes
    inputs: Inputs
    call: Call
    found: Examination
    extra: list[Departure] = field(default_factory=list)

    @property
    def departures(self) -> list[Departure]:
        """All that departs, in the order of the stages."""
        return [*(d for found in self.found.departures for d in found), *self.extra]

    @property
    def judgement(self) -> Judgement | None:
        """Of the first attention."""
        return self.found.judgements[0] if self.found.judgements else None

    @property
    def blocked(self) -> bool:
        """Whether something kept the rest from being read."""
        return not self.found.judgements or any(j.blocked() for j in self.found.judgements)


def diagnose_subject(subject: Subject, errors: list[str] | None = None) -> Report | None:
    """Check one built class or function.

    Args:
        subject: What is checked, prepared with random weights.
        errors: Receives what the code said to calls that failed.

    Returns:
        The report; None if it cannot be called as an attention.
    """
    started = time.process_time()
    errors = [] if errors is None else errors
    caller = subject.caller()
    plans = _plans(subject, caller, errors)
    if not plans:
        return None
    situation = _likeliest(subject, caller, plans)
    report = Report(subject.name, "multi-head attention" if subject.module is not None else "attention function")
    departures = list(situation.departures)
    if not situation.blocked:
        departures += _new(departures, _missing_keys(situation))
        departures += [] if departures else _other_lengths(situation, caller)
        departures += _new(departures, _loud(situation, caller))
        departures += _new(departures, _in_training(situation))
        departures += _new(departures, _crossing(situation, caller))
        departures += _new(departures, _masked(situation, caller, report))
        for plan in other_mask_plans(caller, situation.plan):
            departures += _new(departures, _masked(replace(situation, plan=plan), caller, report))
    _conclude(report, situation, departures)
    if report.verdict == "equal":
        _cover(report, situation, caller)
    report.seconds = time.process_time() - started
    return report


# ---------------------------------------------------------------------------------------------- calling
def _plans(subject: Subject, caller: Caller, errors: list[str]) -> list[tuple[CallPlan, Sizes]]:
    if subject.adapter.call is not None:
        return [(CallPlan((("query", "query"), ("key", "key"), ("value", "value")), "b l e"), subject.sizes)]
    found = list(itertools.islice(call_plans(caller, subject.sizes, errors), 12))
    named = [item for item in found if item[0].named]
    if found and not named:  # names that say what each argument is are believed, even where lengths must be equal then
        even = call_plans(caller, replace(subject.sizes, key_len=subject.sizes.query_len), [])
        named = [item for item in itertools.islice(even, 4) if item[0].named and not item[0].self_attention]
    return named or found


def _likeliest(subject: Subject, caller: Caller, plans: list[tuple[CallPlan, Sizes]]) -> Situation:
    """The way to call it in which least departs; where names say what arguments mean, the first one."""
    best: Situation | None = None
    for plan, lengths in plans[:1] if plans[0][0].named and subject.module is not None else plans[:6]:
        situation = _situation(subject, caller, plan, lengths)
        if best is None or _rank(situation) < _rank(best):
            best = situation
        if not situation.departures and not situation.blocked:
            break
    assert best is not None  # there is a plan
    return best


def _rank(situation: Situation) -> tuple[bool, bool, int]:
    return not situation.found.judgements, situation.blocked, len(situation.departures)


def _situation(
    subject: Subject,
    caller: Caller,
    plan: CallPlan,
    lengths: Sizes,
    form: MaskForm | None = None,
    may: Tensor | None = None,
    size: float = 1.0,
    known_mask: ExpectedFor | None = None,
) -> Situation:
    inputs = _resized(random_inputs(lengths, plan, 1, subject.dtype), size)
    inputs = replace(inputs, may_attend=may)
    args, kwargs = caller.arguments(plan, inputs, form)
    seeds, roles = _named_inputs(caller, plan, inputs, form, args, kwargs)
    call = Call(_calling(caller), tuple(args), kwargs, subject.module, seeds)
    found = examine(call, known_mask)
    situation = Situation(subject, plan, lengths, inputs, call, found)
    situation.extra = list(_outside(situation, roles))
    return situation


def _calling(caller: Caller) -> Any:
    adapted = getattr(caller, "call", None)
    if adapted is None:
        return caller.function
    return lambda query, key, value, may=None: adapted(caller.function, query, key, value, may)


def _resized(inputs: Inputs, size: float) -> Inputs:
    if size == 1.0:
        return inputs
    bigger = {id(x): x * size for x in (inputs.query, inputs.key, inputs.value)}
    return Inputs(*(bigger[id(x)] for x in (inputs.query, inputs.key, inputs.value)))


def _named_inputs(
    caller: Caller, plan: CallPlan, inputs: Inputs, form: MaskForm | None, args: list[Any], kwargs: dict[str, Any]
) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Names of the elements of the arguments, and what each argument is."""
    codes: dict[int, Tensor] = {}
    for x in (inputs.query, inputs.key, inputs.value):
        batch, length, width = x.shape
        token = torch.arange(batch * length).view(batch, length, 1).expand(x.shape)
        codes[id(x)] = coded(1, token, torch.arange(width).expand(x.shape))
    query, key, value = (codes[id(x)] for x in (inputs.query, inputs.key, inputs.value))
    named = Inputs(query, key, value, inputs.may_attend)
    double = replace(caller, dtype=torch.float64)
    name_args, name_kwargs = double.arguments(plan, named, form)
    seeds, roles = {}, {}
    roles_of = dict(plan.roles)
    pairs = [*zip((role for _, role in plan.roles), args, name_args, strict=False)] if args else []
    pairs += [(roles_of[name], kwargs[name], name_kwargs[name]) for name in kwargs]
    for role, x, names in pairs:
        if role in ("query", "key", "value", "memory", "input") and isinstance(x, Tensor):
            seeds[id(x)] = names
            roles[id(x)] = {"memory": "kv", "input": "qkv"}.get(role, role[0])
    return seeds, roles


# ---------------------------------------------------------------------------------------------- around
def _outside(situation: Situation, roles: dict[int, str]) -> Iterator[Departure]:
    """What departs before the projections and after the merge."""
    found = situation.found
    if not found.judgements:
        return
    judgement, module = found.judgements[-1], situation.subject.module
    attention = judgement.attention
    operands = _operands(judgement)
    by_source = _roles_of_sources(situation, roles)
    departures = list(projection_departures(attention, operands, by_source, module)) if operands else []
    departures += unused_departures(attention, module, departures)
    yield from departures
    if not judgement.blocked():
        yield from _ending(situation, attention)


def _operands(judgement: Judgement) -> list[Any]:
    return judgement.operands[0] if judgement.operands and len(judgement.operands[0]) == 3 else []


def _roles_of_sources(situation: Situation, roles: dict[int, str]) -> dict[int, str]:
    """The roles by the numbers of the sources: inputs get their names in the order of the arguments."""
    names = situation.found.run.names
    seeds = list(situation.call.seeds)
    order = [key for key in _keys_in_order(situation.call) if key in seeds]
    return {number: roles[key] for number, key in enumerate(order, start=1) if number in names.sources}


def _keys_in_order(call: Call) -> list[int]:
    found = [id(x) for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    return list(dict.fromkeys(found))


def _ending(situation: Situation, attention: Attention) -> Iterator[Departure]:
    read = _output_codes(situation)
    if read is not None:
        yield from ending_departures(attention, *read)


def _output_codes(situation: Situation) -> tuple[Tensor, Tensor, Tensor] | None:
    """What comes back, the names of its elements, and the tokens that should lie there; None if they are not known."""
    run, plan = situation.found.run, situation.plan
    outputs = list(tensors_in((run.output,)))
    if plan.output >= len(outputs):
        return None
    output = outputs[plan.output]
    codes = None
    for operation, names in zip(run.operations, run.names.after, strict=True):
        for slot, found in zip(operation.outputs, names, strict=False):
            if slot.tensor is output:
                codes = found
    wanted = _wanted_tokens(situation, output)
    if codes is None or wanted is None or not bool(known(codes).all()):
        return None
    return output.detach().double(), codes, wanted


def _wanted_tokens(situation: Situation, output: Tensor) -> Tensor | None:
    """The tokens that should lie in what comes back."""
    query = situation.inputs.query
    batch, length, _ = query.shape
    token = torch.arange(batch * length).view(batch, length)
    layout = situation.plan.layout
    if layout == "l b e" and output.dim() == 3:
        return token.T[..., None].expand(output.shape) if output.shape[:2] == (length, batch) else None
    if layout in ("b l e", "b l h d") and tuple(output.shape[:2]) == (batch, length):
        return token.view(batch, length, *[1] * (output.dim() - 2)).expand(output.shape)
    if layout == "b h l d" and output.dim() == 4 and output.size(2) == length:
        return token[:, None, :, None].expand(output.shape)
    if layout == "l e" and output.dim() == 2:
        return token[0][:, None].expand(output.shape)
    return None


# ---------------------------------------------------------------------------------------------- more situations
def _new(known_ones: list[Departure], others: list[Departure]) -> list[Departure]:
    """What is not known yet: another name, or the same in another line."""
    old = {(d.name, d.lines[:1]) for d in known_ones}
    lines = {d.lines[:1] for d in known_ones if d.lines}
    fresh = []
    for departure in others:
        frames = departure.lines[:1]
        if (departure.name, frames) not in old and not (frames in lines and departure.stage in ("scores", "operand")):
            fresh.append(departure)
    return fresh


def _loud(situation: Situation, caller: Caller) -> list[Departure]:
    """Large inputs show what holds scores down."""
    try:
        loud = _situation(situation.subject, caller, situation.plan, situation.lengths, size=LOUD)
    except Exception:  # the code may refuse large numbers
        return []
    return [d for d in loud.departures if d.name.startswith("changed_by") or "changed_by" in d.name]


def _missing_keys(situation: Situation) -> list[Departure]:
    """Every query meets every key of its sample."""
    keys = situation.inputs.key.size(1)
    for judgement in situation.found.judgements:
        attention = judgement.attention
        pairs = torch.cat(
            [torch.stack([p.table.query * 1024 + p.table.head, p.table.key], -1) for p in attention.parts]
        )
        pairs = pairs.unique(dim=0)
        if len(pairs) >= len(pairs[:, 0].unique()) * keys:
            continue
        names = attention.run.names
        lost = attention.first
        for source in {x for p in attention.parts for x in sources_in(p.product.right)}:
            whole = len(token_of(names.sources[source].codes).unique())
            for operation, codes, _ in names.carrying(source, attention.first.index - 1):
                fewer = len(token_of(codes[known(codes)]).unique()) < whole and len(operation.outputs) == 1
                if fewer and len(feature_of(codes).unique()) == len(feature_of(names.sources[source].codes).unique()):
                    return [Departure("key_tokens_missing", "product", operation, {"keys": keys})]
        return [Departure("key_tokens_missing", "product", lost, {"keys": keys})]
    return []


def _other_lengths(situation: Situation, caller: Caller) -> list[Departure]:
    """Keys may be more or fewer than queries wherever they are given apart."""
    lengths = situation.lengths
    if situation.plan.self_attention or lengths.query_len != lengths.key_len or situation.subject.adapter.call:
        return []
    inputs = random_inputs(replace(lengths, key_len=lengths.query_len + 2), situation.plan, 1, situation.subject.dtype)
    try:
        with torch.no_grad():
            caller.returned(situation.plan, inputs)
    except Exception as error:  # that is what is asked
        frames = frames_of(error)
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return [Departure("other_lengths_crash", "project", None, {"said": said}, frames=frames)]
    return []


def _in_training(situation: Situation) -> list[Departure]:
    """Dropout drops the weights, not the scores."""
    module, judgement = situation.subject.module, situation.judgement
    if module is None or judgement is None or judgement.blocked():
        return []
    module.train()
    try:
        run = situation.call.run(situation.found.patches)
    except Exception:
        return []
    finally:
        module.eval()
    for part in judgement.attention.parts:
        for operation, codes, _ in run.names.carrying(part.number):
            if "dropout" not in operation.name or not operation.inputs:
                continue
            taken = operation.inputs[0].value
            if bool((taken[known(codes)] < -1e-6).any()):
                return [Departure("dropout_on_scores", "dropout", operation)]
    return []


def _crossing(situation: Situation, caller: Caller) -> list[Departure]:
    """With the second tensor that may be left out."""
    if not situation.plan.self_attention or situation.subject.adapter.call is not None:
        return []
    found: list[Departure] = []
    for plan, lengths in itertools.islice(cross_plans(caller, situation.lengths), 1):
        if plan.layout == situation.plan.layout:
            found += _situation(situation.subject, caller, plan, lengths).departures
    return found


# ---------------------------------------------------------------------------------------------- masks
class _Allowed(ExpectedFor):
    """Says which keys a mask allows, and what the code hides by itself."""

    def __init__(self, may: Tensor, plain: Examination) -> None:
        self.may, self.plain = may, plain

    def of(self, attention: Attention) -> dict[int, Expectation]:
        found = {}
        for part in attention.parts:
            query, key = part.table.query, part.table.key
            batch, queries, keys = self.may.shape
            if int(query.max()) >= batch * queries or int(key.max()) >= batch * keys:
                continue
            allowed = self.may[query // queries, query % queries, key % keys]
            own = self._own(attention, len(allowed))
            found[part.number] = Expectation(allowed & ~own if own is not None else allowed, True)
        return found

    def _own(self, attention: Attention, count: int) -> Tensor | None:
        for judgement in self.plain.judgements:
            for part, hidden in zip(judgement.attention.parts, judgement.hidden, strict=False):
                same = part.product.operation.frames == attention.parts[0].product.operation.frames
                if same and len(hidden) == count:
                    return hidden
        return None


def _masked(situation: Situation, caller: Caller, report: Report) -> list[Departure]:
    """The first form of mask in which nothing new departs; else the one in which least does."""
    if not situation.plan.mask_parameter and situation.subject.adapter.call is None:
        return []
    plain = list(tensors_in((situation.found.run.output,)))[situation.plan.output]
    tried: list[tuple[tuple[float, ...], MaskForm, list[Departure]]] = []
    idle: list[MaskForm] = []
    seen: list[tuple[str, Tensor]] = []
    for form in mask_forms():
        attempt = _with_mask(situation, caller, form)
        if attempt is None:
            continue
        output = list(tensors_in((attempt.found.run.output,)))[situation.plan.output]
        if torch.equal(output, plain):
            idle.append(form)
            continue
        if bool(output.isnan().all()) or any(p == form.pattern and _same(o, output) for p, o in seen):
            continue
        seen.append((form.pattern, output))
        new = _new(situation.departures, [d for d in attempt.departures if d.stage != "wrap"])
        if not new and not attempt.blocked:
            return _understood(report, situation, form, tried)
        tried.append((_score(form, new, attempt.blocked), form, new))
    lengths = situation.lengths
    general = any(form.pattern == "full" for form in [*idle, *(form for _, form, _ in tried)])
    if not general and lengths.query_len != lengths.key_len:
        square = _squared(situation, caller, report)
        if square is not None:
            return square
    if not tried:
        return _never_used(situation, idle, report)
    _, form, new = min(tried, key=lambda item: item[0])
    report.conventions.append(("mask", str(form), "torch: True or -inf hides"))
    return new


def _squared(situation: Situation, caller: Caller, report: Report) -> list[Departure] | None:
    """The masks with as many keys as queries, for code that takes no other."""
    lengths = replace(situation.lengths, key_len=situation.lengths.query_len)
    try:
        even = _situation(situation.subject, caller, situation.plan, lengths)
    except Exception:  # the code may want other lengths
        return None
    if even.blocked:
        return None
    coverage = len(report.coverage)
    found = _masked(even, caller, report)
    if found or (len(report.coverage) > coverage and report.coverage[-1].exercised):
        return found
    return None


def _with_mask(situation: Situation, caller: Caller, form: MaskForm) -> Situation | None:
    lengths = situation.lengths
    batch, queries = situation.inputs.query.shape[:2]
    may = draw_masks(form.pattern, batch, queries, situation.inputs.key.size(1), 4)
    try:
        args, kwargs = caller.arguments(situation.plan, replace(situation.inputs, may_attend=may), form)
        with torch.no_grad():
            _calling(caller)(*args, **kwargs)
        return _situation(
            situation.subject, caller, situation.plan, lengths, form, may, 1.0, _Allowed(may, situation.found)
        )
    except Exception:  # the code does not take this form
        return None


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))


def _understood(
    report: Report,
    situation: Situation,
    form: MaskForm,
    tried: list[tuple[tuple[float, ...], MaskForm, list[Departure]]],
) -> list[Departure]:
    """A form in which all samples or queries are alike hides what a general form shows."""
    telling = {"mask_of_first_sample", "mask_repeated_in_wrong_order", "mask_transposed"}
    general = [new for _, other, new in tried if other.pattern == "full" and {d.name for d in new} <= telling and new]
    report.conventions.append(("mask", str(form), "torch: True or -inf hides"))
    if form.pattern != "full" and general:
        return general[0]
    report.coverage.append(Exercise(situation.plan.mask_parameter or "mask", True, str(form)))
    return []


def _score(form: MaskForm, new: list[Departure], blocked: bool) -> tuple[float, ...]:
    """How far a reading of the mask is from right: the nearest one is reported."""
    cost = {
        "mask_after_softmax": 0,
        "mask_fill_zero": 1,
        "mask_fill_not_negative": 1,
        "mask_fill_too_small": 1,
        "mask_of_first_sample": 1,
        "mask_repeated_in_wrong_order": 1,
        "padding_mask_on_queries": 2,
        "mask_transposed": 2,
        "mask_mask_multiplied": 2,
        "mask_multiplied": 2,
        "mask_added_as_01": 3,
        "mask_never_used": 5,
        "mask_inverted": 6,
    }
    worst = max((cost.get(d.name, 4) for d in new), default=0)
    kind = 0 if form.encoding in ("look", "block") else 2 if form.encoding == "additive" else 1
    return (float(blocked), float(worst + len(new)), float(form.pattern != "full"), float(kind))


def _never_used(situation: Situation, idle: list[MaskForm], report: Report) -> list[Departure]:
    if idle:
        first = situation.judgement.attention.first if situation.judgement is not None else None
        return [Departure("mask_never_used", "mask", first)]
    report.notes.append(f"{situation.plan.mask_parameter} was not read: no form of mask was taken")
    report.coverage.append(Exercise(situation.plan.mask_parameter, False, "no form of mask was taken"))
    return []


# ---------------------------------------------------------------------------------------------- conclusion
def _cover(report: Report, situation: Situation, caller: Caller) -> None:
    """Run what the code offers beyond the calls that were judged; what cannot be run makes the verdict partial."""
    if situation.subject.adapter.call is not None or _is_torchs(caller.function):
        return

    def judge(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Report]:
        return diagnose_call(caller.function, args, kwargs, module=situation.subject.module, proofs=False)

    trial = Trial(caller, situation.plan, situation.lengths)
    covered = cover(trial, judge, [exercise.what for exercise in report.coverage])
    report.coverage += covered.exercises
    if _output_codes(situation) is None:
        report.coverage.append(Exercise("the output", False, "which token lies where in it could not be followed"))
    report.findings += covered.findings
    if report.findings:
        report.verdict = "deviates"
    elif report.not_exercised:
        report.verdict = "partial"


def _is_torchs(function: Any) -> bool:
    """Whether what runs is torch's own: there is nothing of the user's to cover."""
    forward = type(function).forward if isinstance(function, torch.nn.Module) else function
    return str(getattr(forward, "__module__", "")).startswith("torch")


def _conclude(report: Report, situation: Situation, departures: list[Departure]) -> None:
    judgement = situation.judgement
    if judgement is None:
        report.verdict = "unchecked"
        report.reason = "No product of queries and keys was seen whose weights are multiplied with values."
        return
    departures = with_evidence(judgement, departures, situation.subject.module)
    wrong = [departure for departure in departures if not departure.evidence]
    own = [departure for departure in wrong if departure in situation.found.departures[0]]
    situation.found.departures[0] = own
    proofs = dict(zip(map(id, own), prove(situation.found, 0), strict=True)) if own else {}
    report.findings = [finding_of(departure, proofs.get(id(departure))) for departure in wrong]
    report.meant = [finding_of(departure) for departure in departures if departure.evidence]
    report.verdict = "deviates" if wrong else "equal"
    if judgement.unread and not wrong:
        report.verdict, report.reason = "unchecked", judgement.unread
