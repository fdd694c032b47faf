"""One way to call what is checked, what it was given, and what was seen in it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import known, numbered, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure, constant_ratio
from equivalence_tests.checker.engine.contracts.ending import ending_departures
from equivalence_tests.checker.engine.contracts.projecting import projection_departures, unused_departures
from equivalence_tests.checker.engine.judgement import Expecting, Judgement
from equivalence_tests.checker.engine.judging import examine
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.engine.trying import Trial
from equivalence_tests.checker.engine.vocabulary import SOFTMAXES
from equivalence_tests.checker.reach.calling import Caller, CallPlan, Inputs, call_plans, from_layout, random_inputs
from equivalence_tests.checker.reach.construction import Sizes
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reach.tracing import tensors_in


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
    def caller(self) -> Caller:
        """Calls the subject."""
        return self.subject.caller()

    @property
    def trial(self) -> Trial:
        """The same way to call it, to be tried with other inputs."""
        return Trial(self.caller, self.plan, self.lengths)

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


def plans_of(subject: Subject, errors: list[str]) -> list[tuple[CallPlan, Sizes]]:
    """List the ways to call it; those whose names say what each argument is are believed."""
    if subject.adapter.call is not None:
        return [(CallPlan((("query", "query"), ("key", "key"), ("value", "value")), "b l e"), subject.sizes)]
    caller = subject.caller()
    found = list(itertools.islice(call_plans(caller, subject.sizes, errors), 12))
    named = [item for item in found if item[0].named]
    if found and not named:  # names that say what each argument is are believed, even where lengths must be equal then
        even = call_plans(caller, replace(subject.sizes, key_len=subject.sizes.query_len), [])
        named = [item for item in itertools.islice(even, 4) if item[0].named and not item[0].self_attention]
    return named or found


def likeliest(subject: Subject, plans: list[tuple[CallPlan, Sizes]]) -> Situation:
    """The way to call it in which least departs; where names say what arguments mean, the first one."""
    best: Situation | None = None
    for plan, lengths in _alternatives(plans) if plans[0][0].named and subject.module is not None else plans[:6]:
        situation = situation_of(subject, plan, lengths)
        if best is None or _rank(situation) < _rank(best):
            best = situation
        if not any(_rank(situation)):
            break
    assert best is not None  # there is a plan
    return best


def _alternatives(plans: list[tuple[CallPlan, Sizes]]) -> list[tuple[CallPlan, Sizes]]:
    """The first way to call it, on all heads and on one, with each mask that may hide nothing if one is required."""
    first, lengths = plans[0]
    alike = [item for item in plans if replace(item[0], neutral=first.neutral) == first]
    return [(plan, sizes) for plan, sizes in alike if replace(sizes, num_heads=lengths.num_heads) == lengths]


def _rank(situation: Situation) -> tuple[bool, bool, bool, int]:
    judged = bool(situation.found.judgements)
    return not judged, situation.blocked, _is_shifted(situation), len(situation.departures)


def _is_shifted(situation: Situation) -> bool:
    """Whether a mask that was meant to hide nothing changes scores: True that is added counts as 1."""
    if situation.plan.neutral is None:
        return False
    return any(
        product.shape != weighed.shape or constant_ratio(weighed, product) is None
        for product, weighed in weighed_scores(situation)
    )


def weighed_scores(situation: Situation) -> Iterator[tuple[Tensor, Tensor]]:
    """The products of queries and keys, and what goes into the softmax of each."""
    for judgement in situation.found.judgements:
        for part in judgement.attention.parts:
            chain = [operation for operation, _, _ in judgement.attention.chain(part)]
            for operation in [operation for operation in chain if operation.name in SOFTMAXES][:1]:
                yield part.product.operation.outputs[0].value, operation.inputs[0].value


def situation_of(
    subject: Subject,
    plan: CallPlan,
    lengths: Sizes,
    form: MaskForm | None = None,
    may: Tensor | None = None,
    size: float = 1.0,
    expecting: Expecting | None = None,
) -> Situation:
    """Call it in one way, and look at what runs."""
    inputs = _resized(random_inputs(lengths, plan, 1, subject.dtype), size)
    inputs = replace(inputs, may_attend=may)
    caller = subject.caller()
    args, kwargs = caller.arguments(plan, inputs, form)
    seeds, roles = named_inputs(caller, plan, inputs, form, args, kwargs)
    if subject.adapter.call is not None:
        kwargs = {**kwargs, "may": may}
    call = Call(calling_of(caller), tuple(args), kwargs, subject.module, seeds)
    found = examine(call, expecting)
    situation = Situation(subject, plan, lengths, inputs, call, found)
    situation.extra = list(_outside(situation, roles))
    for departure in situation.departures:
        _name_by_heads(departure, situation)
    return situation


def _name_by_heads(departure: Departure, situation: Situation) -> None:
    """One head where there should be several, scaled as one of several."""
    heads, judgement = situation.subject.sizes.num_heads, situation.judgement
    if departure.name != "scale_other" or heads < 2 or judgement is None:
        return
    whole = len(judgement.attention.parts[0].table.heads) == 1
    if whole and abs(departure.facts["factor"] * (departure.facts["width"] // heads) ** 0.5 - 1) < 1e-6:
        departure.name, departure.stage = "heads_never_split", "split"


def calling_of(caller: Caller) -> Any:
    """Give what is called: the code itself, or the user's adapter around it."""
    adapted = getattr(caller, "call", None)
    if adapted is None:
        return caller.function
    return lambda query, key, value, may=None: adapted(caller.function, query, key, value, may)


def _resized(inputs: Inputs, size: float) -> Inputs:
    if size == 1.0:
        return inputs
    bigger = {id(x): x * size for x in (inputs.query, inputs.key, inputs.value)}
    return Inputs(*(bigger[id(x)] for x in (inputs.query, inputs.key, inputs.value)))


def named_inputs(
    caller: Caller, plan: CallPlan, inputs: Inputs, form: MaskForm | None, args: list[Any], kwargs: dict[str, Any]
) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Give names to the elements of the arguments, and say what each argument is."""
    codes = {id(x): numbered(x.shape) for x in (inputs.query, inputs.key, inputs.value)}
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


def _outside(situation: Situation, roles: dict[int, str]) -> Iterator[Departure]:
    """What departs before the projections and after the merge."""
    found = situation.found
    if not found.judgements:
        return
    judgement, module = found.judgements[-1], situation.subject.module
    attention = judgement.attention
    operands = judgement.first_operands
    by_source = _roles_of_sources(situation, roles)
    departures = list(projection_departures(attention, operands, by_source, module)) if len(operands) == 3 else []
    departures += unused_departures(attention, module, departures)
    yield from departures
    read = output_codes(situation)
    if read is not None and not judgement.blocked():
        yield from ending_departures(attention, *read)


def _roles_of_sources(situation: Situation, roles: dict[int, str]) -> dict[int, str]:
    """The roles by the numbers of the sources: inputs get their names in the order of the arguments."""
    sources, seeds = situation.found.run.names.sources, situation.call.seeds
    order = dict.fromkeys(id(x) for _, x in situation.call.tensors if id(x) in seeds)
    return {number: roles[key] for number, key in enumerate(order, start=1) if number in sources}


def output_codes(situation: Situation) -> tuple[Tensor, Tensor, Tensor] | None:
    """What comes back, the names of its elements, and the tokens that should lie there; None if they are not known."""
    run, plan = situation.found.run, situation.plan
    outputs = list(tensors_in((run.output,)))
    found = run.names.last_of(outputs[plan.output]) if plan.output < len(outputs) else None
    if found is None or not bool(known(found[1]).all()):
        return None
    output, codes = (from_layout(x.double(), plan.layout) for x in found)
    tokens = token_of(numbered(situation.inputs.query.shape))[..., 0]
    if codes.shape[:2] != tokens.shape:
        return None
    return output, codes, tokens.view(*tokens.shape, *[1] * (codes.dim() - 2)).expand(codes.shape)


def new_departures(known_ones: list[Departure], others: list[Departure]) -> list[Departure]:
    """What is not known yet: another name, or the same in another line."""
    old = {(d.name, d.lines[:1]) for d in known_ones}
    lines = {d.lines[:1] for d in known_ones if d.lines}
    fresh = []
    for departure in others:
        frames = departure.lines[:1]
        if (departure.name, frames) not in old and not (frames in lines and departure.stage in ("scores", "operand")):
            fresh.append(departure)
    return fresh
