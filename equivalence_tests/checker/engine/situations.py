"""One way to call what is checked, its inputs, and what was found in the call."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import known, numbered, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.ending import ending_departures, norm_departures
from equivalence_tests.checker.engine.contracts.projecting import projection_departures, unused_departures
from equivalence_tests.checker.engine.judgement import Expecting, Judgement
from equivalence_tests.checker.engine.judging import examine, padding_of
from equivalence_tests.checker.engine.meaning import OF_A_STATE, Evidence
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.engine.same import HIDING, MEASURED, near
from equivalence_tests.checker.engine.taking_part import argument_name
from equivalence_tests.checker.engine.vocabulary import ELEMENTWISE
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.reach.arguments import ROLES, role_of_parameter
from equivalence_tests.checker.reach.calling import HEADS, CallPlan, Inputs, Trial, from_layout, held_roles
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.plans import Errors, trials_of
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.lines import source_of

# Where code says that the first axis of what it is given holds the samples.
BATCH_FIRST = re.compile(
    r"\b(bs?|bsz|batch\w*)\s*(,[^=\n]*)?=\s*\w+\.(shape\b(?!\[[^0])|size\((0?|dim=0)\))", re.IGNORECASE
)
# Which of queries, keys and values are made of an argument, by its role.
OF_TOKENS = {"query": "q", "key": "k", "value": "v", "memory": "kv", "input": "qkv"}


@dataclass(eq=False)
class Situation:
    """One way to call the subject, and what was found in the call."""

    subject: Subject
    trial: Trial  # how it is called
    inputs: Inputs
    call: Call
    found: Examination  # the attentions of the call, judged
    # The departures outside the attention itself: inputs, weights, residual.
    extra: list[Departure] = field(default_factory=list)
    # The form of mask that the code reads without a departure; None if no mask was tried.
    understood: MaskForm | None = None
    other_masks: "list[Situation]" = field(default_factory=list)  # the same, called with each of the other masks

    @property
    def plan(self) -> CallPlan:
        """What each argument is."""
        return self.trial.plan

    @property
    def arguments(self) -> dict[str, str]:
        """The argument in each role, as a program calls it."""
        data = [name for name, x in self.call.tensors if id(x) in self.call.seeds]
        return {self.plan.at(name)[1]: name for name in data}

    @property
    def departures(self) -> list[Departure]:
        """All departures, in the order of the stages."""
        return [*(d for found in self.found.departures for d in found), *self.extra]

    @property
    def judgement(self) -> Judgement | None:
        """What was found out about the first attention."""
        return self.found.judgements[0] if self.found.judgements else None

    @property
    def first(self) -> Operation | None:
        """The product of its queries and keys."""
        return None if self.judgement is None else self.judgement.attention.first

    @property
    def hides_by_itself(self) -> bool:
        """Whether keys are hidden though no mask is given."""
        return any(bool(hidden.any()) for judgement in self.found.judgements for hidden in judgement.hidden)

    @property
    def blocked(self) -> bool:
        """Whether something keeps the later stages from being read."""
        return not self.found.judgements or any(j.blocked() for j in self.found.judgements)

    def of_length(self, length: int) -> "Situation | None":
        """The same with so many queries and keys; None where it cannot be called so."""
        sizes = replace(self.trial.sizes, query_len=length, key_len=length)
        found = attempt(partial(situation_of, self.subject, replace(self.trial, sizes=sizes)))
        return found and replace(found, understood=self.understood, other_masks=self.other_masks)


def trials_for(subject: Subject, errors: Errors) -> list[Trial]:
    """List the ways to call it: those that follow the names of all arguments, or else every one that runs."""
    if subject.adapter.call is not None:
        plan = CallPlan(tuple((role, role) for role in ("query", "key", "value", "mask")), "b l e", positional=True)
        return [Trial(subject.function, plan, subject.sizes, subject.dtype, subject.adapter.call)]
    found = list(itertools.islice(trials_of(subject.function, subject.sizes, subject.dtype, errors), 12))
    named = [trial for trial in found if trial.plan.named]
    if found and not named:  # names that say what each argument is are believed, even where lengths must be equal then
        even = replace(subject.sizes, key_len=subject.sizes.query_len)
        trials = itertools.islice(trials_of(subject.function, even, subject.dtype), 4)
        named = [trial for trial in trials if trial.plan.named and not trial.plan.self_attention]
    return named or found


def likeliest(subject: Subject, trials: list[Trial]) -> Situation:
    """The way to call it with the fewest departures, or the first, if the names say what the arguments mean."""
    found = list[Situation]()
    for trial in _alternatives(trials) if trials[0].plan.named and subject.module is not None else trials[:6]:
        found.append(situation_of(subject, trial))
        if not any(_rank(found[-1])):
            break
    return min(found, key=_rank)


def _alternatives(trials: list[Trial]) -> list[Trial]:
    """The first way to call it, on all heads or on one, with each mask that may hide nothing and each form of angles.

    Code may have torch's default layout, (len, batch, features), where it does not say that samples come first.
    """
    plan, sizes, function = trials[0].plan, trials[0].sizes, trials[0].function
    modules = function.modules() if isinstance(function, nn.Module) else ()
    default = any(isinstance(module, nn.MultiheadAttention) and not module.batch_first for module in modules)
    if default or not BATCH_FIRST.search(source_of(type(function))):
        length_first = [trial for trial in trials if trial.plan.layout == "l b e" and trial.plan.roles == plan.roles]
        plan = next((one.plan for one in (trials[0], *length_first) if one.keeps_samples_apart), plan)
    layouts = HEADS if plan.layout in HEADS else (plan.layout,)  # no name says which of them it is
    laid = [trial for trial in trials if trial.plan.layout in layouts]
    same = (replace(one.plan, neutral=plan.neutral, layout=plan.layout, angles=plan.angles) == plan for one in laid)
    alike = list(itertools.compress(laid, same))
    return [trial for trial in alike if replace(trial.sizes, num_heads=sizes.num_heads) == sizes]


def _rank(situation: Situation) -> tuple[bool, bool, bool, int]:
    judged = bool(situation.found.judgements)
    shifted = situation.plan.neutral is not None and shifts_scores(situation)
    return not judged, situation.blocked, shifted, len(situation.departures)


def shifts_scores(situation: Situation) -> bool:
    """Whether the mask changes the scores of visible keys, as an added True does, or leaves no key visible."""
    run, function, mask = situation.found.run, situation.trial.function, situation.plan.mask_parameter
    parts = (part for judgement in situation.found.judgements for part in judgement.attention.parts)
    for operation, _, given in (step for part in parts for step in part.steps(run)):
        given_too = [name for _, bits in run.names.beside(operation) for name in run.recorder.named(bits)]
        masked = any(name.startswith("arg:") and argument_name(name, function) == mask for name in given_too)
        for slot, _ in run.names.taken(operation) if masked and operation.name in ELEMENTWISE else ():
            seen = given > -HIDING
            if not bool(seen.any()) or not near(given[seen], slot.value.expand_as(given)[seen], 1e-12):
                return True
    return False


def situation_of(
    subject: Subject,
    trial: Trial,
    form: MaskForm | None = None,
    may: Tensor | None = None,
    size: float = 1.0,
    expecting: Expecting | None = None,
) -> Situation:
    """Call it in one way, and judge what runs."""
    inputs = replace(trial.inputs(seed=1).scaled(size), may_attend=may)
    call, roles = call_of(trial, inputs, form)
    found = examine(call, expecting)
    situation = Situation(subject, trial, inputs, call, found)
    situation.extra = list(_outside(situation, roles, expecting))
    for place, departures in enumerate(found.departures):
        departures[:] = [replace(_known_by_its_call(one, situation), seen_in=(found, place)) for one in departures]
    return situation


def _known_by_its_call(departure: Departure, situation: Situation) -> Departure:
    """Name a scale that shows that heads are never split, and say why a decoder's state that asks needs none."""
    subject, judgement = situation.subject, situation.judgement
    if departure.stage != "scale" or judgement is None:
        return departure
    asks = departure.name == "scale_missing" and situation.plan.step
    if asks and Evidence(judgement, subject.module).may_be_luongs(subject.function):
        return replace(departure, evidence=OF_A_STATE)
    heads, facts = subject.sizes.num_heads, departure.facts
    whole, width = len(judgement.attention.parts[0].table.heads) == 1, facts["width"] // heads
    unsplit = heads > 1 and whole and width > 1 and abs(facts["factor"] * width**0.5 - 1) < MEASURED  # of 1, no scale
    return replace(departure, name="heads_never_split", stage="split") if unsplit else departure


def call_of(trial: Trial, inputs: Inputs, form: MaskForm | None = None) -> tuple[Call, dict[int, str]]:
    """Make a call, with names for the elements of its arguments, and say what each argument is."""
    given = (inputs.query, inputs.key, inputs.value)
    args, kwargs = trial.arguments(inputs, mask=form)
    codes = {id(x): numbered(x.shape) for x in given}
    query, key, value = (codes[id(x)] for x in given)
    named = Inputs(query, key, value, inputs.may_attend)
    name_args, name_kwargs = replace(trial, dtype=torch.float64).arguments(named, mask=form)
    roles = dict(trial.plan.roles)
    pairs = [*zip(roles.values(), args, name_args, strict=False)] if args else []
    pairs += [(roles[name], kwargs[name], name_kwargs[name]) for name in kwargs]
    held = [one for role, *both in pairs if role.startswith("[") for one in zip(held_roles(role), *both, strict=True)]
    tokens = [one for one in (*pairs, *held) if one[0] in OF_TOKENS and isinstance(one[1], Tensor)]
    module = trial.function if isinstance(trial.function, nn.Module) else None
    call = Call(trial.called, args, kwargs, module, {id(x): names for _, x, names in tokens})
    return call, {id(x): OF_TOKENS[role] for role, x, _ in tokens}


def _outside(situation: Situation, roles: dict[int, str], expecting: Expecting | None) -> Iterator[Departure]:
    """The departures before the attention, in inputs and projections, and after the merge."""
    found = situation.found
    if not found.judgements:
        return
    judgement, module = found.judgements[-1], situation.subject.module
    attention = judgement.attention
    operands = judgement.first_operands
    sources = found.run.names.sources  # numbered in the order of the arguments
    named = (role_of_parameter(name) in (role, "input") or role not in ROLES for name, role in situation.plan.roles)
    by_source = {number: role for number, role in enumerate(roles.values(), start=1) if number in sources}
    by_source = by_source if all(named) else {}  # what an argument is only taken for says nothing against the code
    departures = list(projection_departures(attention, operands, by_source, module)) if len(operands) == 3 else []
    departures += unused_departures(attention, module, departures)
    yield from departures
    yield from norm_departures(attention, module)
    read = output_codes(situation)
    if read is not None and not judgement.blocked():
        padding = padding_of(attention, expecting(attention)) if expecting is not None else None
        ending = list(ending_departures(attention, *read, padding))
        ended = {departure.operation for departure in ending if departure.operation is not None}
        found.departures[-1][:] = [one for one in found.departures[-1] if one.operation not in ended]
        yield from ending


def output_codes(situation: Situation) -> tuple[Tensor, Tensor, Tensor] | None:
    """The output, the names of its elements, and the tokens that should be there; None if the names are not known."""
    run, plan = situation.found.run, situation.plan
    outputs = list(tensors_in((run.output,)))
    found = run.names.last_of(outputs[plan.output]) if plan.output < len(outputs) else None
    if found is None or not bool(known(found[1]).all()):
        return None
    output, codes = (from_layout(x.double(), plan.output_layout) for x in found)
    tokens = token_of(numbered(situation.inputs.query.shape))[..., 0]
    if codes.shape[:2] != tokens.shape:
        return None
    return output, codes, tokens.view(*tokens.shape, *[1] * (codes.dim() - 2)).expand(codes.shape)


def new_departures(known_ones: list[Departure], others: list[Departure]) -> list[Departure]:
    """Those of the others that are not known yet: another name, or the same in another line."""
    old = {(d.name, d.lines[:1]) for d in known_ones}
    lines = {d.lines[:1] for d in known_ones if d.lines}
    fresh = (d for d in others if (d.name, d.lines[:1]) not in old)
    return [d for d in fresh if d.lines[:1] not in lines or d.stage not in ("scores", "operand")]
