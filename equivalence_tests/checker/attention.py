"""Examine an attention function or a multi-head attention module: read it, compare it, name its mistakes."""

import contextlib
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.calling import (
    CHANNELS_FIRST,
    Caller,
    CallPlan,
    call_plans,
    cross_plans,
    forward_parameters,
    from_layout,
    other_mask_plans,
    random_inputs,
    role_of_parameter,
    to_layout,
)
from equivalence_tests.checker.construction import Sizes
from equivalence_tests.checker.diagnosis import (
    PROBES,
    Effort,
    Match,
    Observation,
    Reading,
    convention_sets,
    search,
)
from equivalence_tests.checker.hints import NORMALISED, ROTATED, seen_inside
from equivalence_tests.checker.inner import base_of, inner_conventions, norms_of_queries_and_keys
from equivalence_tests.checker.loading import source_of
from equivalence_tests.checker.mask_reading import MaskReading, read_masks
from equivalence_tests.checker.mistakes import mistake_for
from equivalence_tests.checker.observing import observe, other_sizes
from equivalence_tests.checker.own_bias import is_graded, own_bias
from equivalence_tests.checker.projections import Leaf, ProjectionReading, leaves_of, projection_readings
from equivalence_tests.checker.reference import Inputs, Setting
from equivalence_tests.checker.subject import Subject
from equivalence_tests.checker.tracing import tensors_in, trace

__all__ = ["AttentionExamination", "examine", "independent_samples"]

MOST_PROJECTIONS = 40
NORM = re.compile(r"norm|^ln", re.IGNORECASE)
TRIANGLE = re.compile(r"tril|triu|causal|subsequent|future|look_?ahead", re.IGNORECASE)


@dataclass
class AttentionExamination:
    """All that was found out about one attention."""

    subject: Subject
    caller: Caller
    lengths: Sizes
    plans: list[CallPlan]
    matches: list[Match]
    masks: MaskReading = field(default_factory=MaskReading)
    other_masks: list[MaskReading] = field(default_factory=list)  # each by itself, the first one hiding nothing
    evaluated: int = 0
    tried: str = ""
    seen: list[str] = field(default_factory=list)  # what takes part that no reading has
    cross: "AttentionExamination | None" = None  # with the second tensor that may be left out

    def inputs(self, plan: CallPlan) -> Inputs:
        """Draw inputs for a plan."""
        return random_inputs(self.lengths, plan, 11, self.subject.dtype)

    @property
    def masked_lengths(self) -> Sizes:
        """Lengths on which masks work."""
        return replace(self.lengths, key_len=self.lengths.query_len) if self.masks.square else self.lengths

    @property
    def memory_may_be_given(self) -> bool:
        """Whether a second tensor may be given, for which some mask may be meant."""
        passed = {name for plan in self.plans for name, _ in plan.roles}
        others = (p.name for p in forward_parameters(self.caller.function) if p.name not in passed)
        return any(role_of_parameter(name) in ("memory", "key", "value") for name in others)

    @property
    def match(self) -> Match | None:
        """The first match."""
        return self.matches[0] if self.matches else None


def examine(subject: Subject, effort: Effort, errors: list[str]) -> AttentionExamination | None:
    """Read an attention and find the mistakes that explain its numbers.

    Args:
        subject: What is checked, prepared with random weights.
        effort: Bounds the search.
        errors: Receives what the code said to calls that failed.

    Returns:
        What was found, or None if the code cannot be called as an attention.
    """
    caller = subject.caller()
    plans, lengths = _plans(subject, caller, errors)
    if not plans:
        return None
    caller = _quietened(subject, caller, plans[0], lengths)
    examination = _searched(subject, caller, plans, lengths, effort)
    match = examination.match
    if match is not None and (match.reading.plan.mask_parameter or subject.adapter.call is not None):
        effort.progress("forms of mask")
        examination.masks = read_masks(subject, caller, lengths, match)
    if match is not None and subject.adapter.call is None:
        others = [_with_plan(match, plan) for plan in other_mask_plans(caller, match.reading.plan)]
        examination.other_masks = [read_masks(subject, caller, lengths, other) for other in others]
    if match is not None and match.reading.plan.self_attention:
        crossing = [(p, sizes) for p, sizes in cross_plans(caller, lengths) if p.layout == match.reading.plan.layout]
        if crossing:
            effort.most = 1  # the rest is explained: what has more mistakes here is not read in the same way
            examination.cross = _searched(subject, caller, [crossing[0][0]], crossing[0][1], effort)
    return examination


def _with_plan(match: Match, plan: CallPlan) -> Match:
    return replace(match, reading=replace(match.reading, plan=plan))


def _searched(
    subject: Subject, caller: Caller, plans: list[CallPlan], lengths: Sizes, effort: Effort
) -> AttentionExamination:
    seen = seen_inside(
        subject.function, lambda: caller.returned(plans[0], random_inputs(lengths, plans[0], 1, caller.dtype))
    )
    readings = list(_readings(subject, caller, plans, lengths, seen))
    # With parts that no reading has, pairs and triples of mistakes explain nothing either.
    most = 1 if set(seen) - {NORMALISED} else effort.most
    observations = _Observations(caller, lengths)
    found = search(subject.function, readings, observations, subject.dtype, effort, min(most, 1))
    if not found:
        biased = list(_with_own_bias(caller, readings, lengths))
        found = search(subject.function, biased, observations, subject.dtype, effort, min(most, 1))
    if not found:
        found = search(subject.function, readings, observations, subject.dtype, effort, most, fewest=2)
    examination = AttentionExamination(subject, caller, lengths, plans, found, evaluated=effort.evaluated, seen=seen)
    examination.tried = f"{len(readings)} readings, {effort.evaluated} combinations of reading and mistakes"
    return examination


def _with_own_bias(caller: Caller, readings: Sequence[Reading], lengths: Sizes) -> Iterator[Reading]:
    """Give the likely readings of code that adds a bias to its scores by itself."""
    biases = {plan: own_bias(caller, plan, lengths.embed_dim) for plan in {reading.plan for reading in readings}}
    for plan, bias in biases.items():
        key_len = lengths.query_len if plan.self_attention else lengths.key_len
        with contextlib.suppress(Exception):  # the code has its own say on tokens that are all alike
            if is_graded(bias(lengths.query_len, key_len)):
                yield from (replace(r, own_bias=bias) for r in readings if r.plan == plan and r.likely)


def _quietened(subject: Subject, caller: Caller, plan: CallPlan, lengths: Sizes) -> Caller:
    """Hold dropout back where two calls in eval differ and dropout is why."""
    inputs = random_inputs(lengths, plan, 2, caller.dtype)
    with torch.no_grad():
        if torch.equal(caller.output(plan, inputs).nan_to_num(), caller.output(plan, inputs).nan_to_num()):
            return caller
        quiet = replace(caller, quiet_dropout=True)
        if torch.equal(quiet.output(plan, inputs).nan_to_num(), quiet.output(plan, inputs).nan_to_num()):
            subject.quiet_dropout = True
            return quiet
    return caller


@dataclass(frozen=True)
class LaidOutNorm:
    """A norm called with features last and in any precision, though it may want them first and in its own."""

    norm: Any
    layout: str
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Call it."""
        if self.layout not in CHANNELS_FIRST:
            return self.norm(x.to(self.dtype)).to(x.dtype)
        return from_layout(self.norm(to_layout(x.to(self.dtype), self.layout, 1)), self.layout).to(x.dtype)


class _Observations:
    """Calls the user's code once for each plan: as searched on, with other lengths, and as the probes ask."""

    def __init__(self, caller: Caller, lengths: Sizes) -> None:
        self.caller, self.lengths = caller, lengths
        self.known: dict[CallPlan, list[Observation]] = {}

    def __call__(self, plan: CallPlan) -> Sequence[Observation]:
        if plan not in self.known:
            self.known[plan] = list(self._observe(plan))
        return self.known[plan]

    def _observe(self, plan: CallPlan) -> Iterator[Observation]:
        calls = [(0, self.lengths, ""), (1, other_sizes(self.lengths)[0], "")]
        for seed, sizes, probe in [*calls, *((0, self.lengths, probe) for probe in PROBES)]:
            observation = observe(self.caller, plan, sizes, seed, probe=probe)
            if observation is not None:
                yield observation


def _plans(subject: Subject, caller: Caller, errors: list[str]) -> tuple[list[CallPlan], Sizes]:
    if subject.adapter.call is not None:
        return [CallPlan((("query", "query"), ("key", "key"), ("value", "value")), "b l e")], subject.sizes
    found = list(_unique_plans(call_plans(caller, subject.sizes, errors)))
    if not found:
        return [], subject.sizes
    independent = {plan: independent_samples(caller, plan, lengths) for plan, lengths in found}
    ordered = sorted(found, key=lambda item: (not item[0].named, not independent[item[0]]))
    telling = [item for item in ordered if independent[item[0]]] or ordered
    return _with_distinct_outputs(caller, telling)[:12], telling[0][1]


def _with_distinct_outputs(caller: Caller, found: list[tuple[CallPlan, Sizes]]) -> list[CallPlan]:
    """Keep one of the plans that differ only in a mask which changes nothing; those that give no number at all last."""
    kept: dict[tuple[object, ...], CallPlan] = {}
    empty: list[CallPlan] = []
    for plan, lengths in found:
        observation = observe(caller, plan, lengths, 0)
        if observation is not None and not observation.output.isfinite().any():
            empty.append(plan)  # a mask that was meant to hide nothing hides everything
        elif observation is not None:
            # Masked by -1e9 everywhere, scores are all but the same: exact digits tell that from no mask.
            kept.setdefault((plan.roles, plan.layout, _mark(observation.output.nan_to_num(7.0), digits=11)), plan)
    return list(kept.values()) or empty[:1]


def _unique_plans(found: Iterator[tuple[CallPlan, Sizes]]) -> Iterator[tuple[CallPlan, Sizes]]:
    seen = set()
    named = False
    for plan, lengths in found:
        named = named or plan.named
        if plan in seen or (named and not plan.named):
            continue
        seen.add(plan)
        yield plan, lengths


def independent_samples(caller: Caller, plan: CallPlan, lengths: Sizes) -> bool:
    """Whether changing sample 0 leaves the other samples alone, and changing token 0 does not."""
    inputs = random_inputs(lengths, plan, 1, caller.dtype)
    if len(inputs.query) == 1:
        return True
    try:
        with torch.no_grad():
            before, after = caller.output(plan, inputs), caller.output(plan, inputs.changed(sample=0))
    except Exception:
        return False
    return bool(torch.allclose(before[1:], after[1:], rtol=1e-9, atol=1e-12))


def _readings(
    subject: Subject, caller: Caller, plans: list[CallPlan], lengths: Sizes, seen: Collection[str]
) -> Iterator[Reading]:
    """List the readings; those that names suggest are marked as likely.

    Code may turn its tensors to the other layout inside: that matters to a wrong reshape only, and comes last.
    """
    found = list(_readings_as_called(subject, caller, plans, lengths, seen))
    yield from found
    for reading in found:
        if reading.likely and reading.plan.layout in ("b l e", "l b e"):
            turned = replace(reading.setting, sequence_first=not reading.setting.sequence_first)
            yield replace(reading, setting=turned)


def _readings_as_called(
    subject: Subject, caller: Caller, plans: list[CallPlan], lengths: Sizes, seen: Collection[str]
) -> Iterator[Reading]:
    norms_of_parts = None if subject.module is None else norms_of_queries_and_keys(subject.module)
    base = base_of(subject.module)
    norms = _norms(subject.module, norms_of_parts or ())[:3]
    pairs = [*((norm, None) for norm in norms), *itertools.permutations(norms, 2)] or [(None, None)]
    for plan in plans:
        causal = _causal_behaviour(caller, plan, lengths)
        if causal == ("no",) and _mentions_a_triangle(subject):
            causal = ("no", "yes")  # a triangle that some mistake lets the future through
        inner = inner_conventions(norms_of_parts, ROTATED in seen or plan.takes_angles, NORMALISED in seen)
        unused = _never_used(subject.module, caller, plan, lengths)
        left_out = _left_out(subject, unused)
        for projections, heads in _projections(subject, caller, plan, lengths, unused):
            implied = (*_implied(projections), *_unused(projections, left_out))
            for pair in pairs:
                norm, key_norm = (one and LaidOutNorm(one, plan.layout, subject.dtype) for one in pair)
                setting = Setting(heads, plan.sequence_first, norm, base, key_norm, plan.channels_first)
                named = projections is None or _named(projections)
                count = len([norm for norm in pair if norm is not None])
                for conventions in convention_sets(count, not plan.self_attention, causal, inner):
                    options = dict(conventions)
                    plain = options["split"] == options["merge"] == "lh"
                    if plain or named:
                        read = projections and replace(projections, norms=norms_of_parts)
                        yield Reading(plan, read, setting, conventions, implied, plain and named)


def _mentions_a_triangle(subject: Subject) -> bool:
    """Whether the code, or a class that it inherits from, speaks of a causal mask."""
    owners = type(subject.module).__mro__ if subject.module is not None else ()
    inherited = (source_of(owner).text for owner in owners if not owner.__module__.startswith(("torch", "builtins")))
    return any(TRIANGLE.search(text) for text in (subject.source.text, *inherited))


def _never_used(module: nn.Module | None, caller: Caller, plan: CallPlan, lengths: Sizes) -> set[str]:
    """Name the parameters that the output does not depend on."""
    if module is None:
        return set()
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    try:
        with torch.enable_grad():
            output = caller.output(plan, random_inputs(lengths, plan, 1, caller.dtype))
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                output.sum(), list(named.values()), allow_unused=True
            )
    except Exception:  # computed without gradients
        return set()
    return {name for name, gradient in zip(named, gradients, strict=True) if gradient is None}


def _left_out(subject: Subject, unused: set[str]) -> set[str]:
    """Name the roles of what exists and takes no part: "norm" for a norm."""
    if subject.module is None or not unused:
        return set()
    leaves = leaves_of(subject.module, subject.head_counts[0], subject.sizes.embed_dim)
    norms = (name for name in unused if NORM.search(name.rpartition(".")[0].rpartition(".")[2]))
    return {leaf.role for leaf in leaves if set(leaf.weights) <= unused} | {"norm" for _ in norms}


def _unused(projections: ProjectionReading | None, left_out: set[str]) -> Iterator[str]:
    """Name the parts that exist and are left out under a reading."""
    if projections is not None and projections.output is None and left_out & {"output", ""}:
        yield "output_projection_skipped"
    if projections is not None and "norm" in left_out:
        yield "norm_never_used"


def _named(projections: ProjectionReading) -> bool:
    if not projections.leaves:
        return False
    packed = projections.layout != "separate" and projections.leaves[-1].role not in ("query", "key", "value")
    return projections.by_name or (packed and projections.order == "qkv")


def _projections(
    subject: Subject, caller: Caller, plan: CallPlan, lengths: Sizes, unused: set[str]
) -> Iterator[tuple[ProjectionReading | None, int]]:
    module, sizes = subject.module, subject.sizes
    if module is None or not any(p.dim() >= 2 for p in module.parameters()):
        counted = subject.head_counts[:1] if module is not None else []
        yield from ((None, heads) for heads in ([sizes.num_heads] if plan.heads_are_given else [1, *counted]))
        return
    for heads in subject.head_counts:
        leaves = leaves_of(module, heads, sizes.embed_dim)
        if subject.adapter.weights:
            yield adapted_projections(subject, leaves), heads
            continue
        leaves = [leaf for leaf in leaves if not set(leaf.weights) <= unused]
        fed = _fed_by_inputs(module, caller, plan, lengths, leaves)
        for reading in itertools.islice(projection_readings(leaves, fed, module, heads), MOST_PROJECTIONS):
            yield reading, heads
        if any(not leaf.weights[0].endswith("weight") for leaf in leaves):
            flipped = [replace(leaf, transposed=not leaf.transposed) for leaf in leaves]
            for reading in itertools.islice(projection_readings(flipped, fed, module, heads), MOST_PROJECTIONS):
                yield replace(reading, by_name=False), heads


def adapted_projections(subject: Subject, leaves: list[Leaf]) -> ProjectionReading:
    """Take the projections that the adapter names."""
    named = {leaf.weights[0]: leaf for leaf in leaves} | {leaf.name: leaf for leaf in leaves}
    chosen = {role: named[path] for role, path in subject.adapter.weights.items()}
    output = chosen.pop("output", None)
    if "qkv" in chosen:
        return ProjectionReading((chosen["qkv"],), output, "qkv3hd")
    order = "".join(role[0] if role in chosen else "-" for role in ("query", "key", "value"))
    return ProjectionReading(tuple(chosen[r] for r in ("query", "key", "value") if r in chosen), output, order=order)


def _fed_by_inputs(module: nn.Module, caller: Caller, plan: CallPlan, lengths: Sizes, leaves: list[Leaf]) -> set[str]:
    """Name the leaves that meet an argument, in any shape and order of elements, or the output of a norm of one."""
    inputs = random_inputs(lengths, plan, 1, caller.dtype)
    seen = trace(module, lambda: caller.returned(plan, inputs))
    known = [inputs.query, inputs.key, inputs.value]
    given = {_mark(x) for x in known}
    norms = [call for call in seen.calls if NORM.search(call.path)]
    normalised = [call for call in norms if any(_mark(x) in given for x in tensors_in((call.args, call.kwargs)))]
    known += [x for call in normalised for x in tensors_in(call.output)]
    marks = {_mark(x) for x in known}
    fed = set()
    for leaf in leaves:
        if any(_mark(x) in marks or _part_of(x, known) for name in leaf.weights for x in seen.feeding(name)):
            fed.add(leaf.name)
    return fed


def _mark(x: Tensor, digits: int = 6) -> tuple[int, float, float]:
    """Numbers that no rearrangement of the elements changes."""
    return x.numel(), round(float(x.double().sum()), digits), round(float(x.double().square().sum()), digits)


def _part_of(x: Tensor, known: list[Tensor]) -> bool:
    """Whether x is the features of one head of a known tensor."""
    return any(
        x.dim() == y.dim()
        and x.shape[:-1] == y.shape[:-1]
        and x.size(-1) < y.size(-1)
        and bool((y[..., : x.size(-1)] == x).all())
        for y in known
    )


def _norms(module: nn.Module | None, others: Collection[str]) -> list[Any]:
    if module is None:
        return []
    found = [
        child
        for name, child in module.named_modules()
        if (name not in others and (name and NORM.search(name.rpartition(".")[2]))) or NORM.search(type(child).__name__)
    ]
    return [child for child in found if child is not module and not list(child.children())]


def _causal_behaviour(caller: Caller, plan: CallPlan, lengths: Sizes) -> tuple[str, ...]:
    """Whether the last token leaves all earlier outputs alone, and the first does not leave the later ones."""
    if not plan.self_attention and lengths.query_len != lengths.key_len:
        return ("no", "yes")
    inputs = random_inputs(lengths, plan, 1, caller.dtype)
    try:
        with torch.no_grad():
            before, last, first = (
                caller.output(plan, x) for x in (inputs, inputs.changed(token=-1), inputs.changed(token=0))
            )
    except Exception:
        return ("no", "yes")
    causal = torch.allclose(before[:, :-1], last[:, :-1], equal_nan=True)
    mixes = not torch.allclose(before[:, 1:], first[:, 1:], equal_nan=True)
    return ("yes",) if causal and mixes else ("no",)


def _implied(projections: ProjectionReading | None) -> tuple[str, ...]:
    """Name the mistakes that the structure shows: a projection that does not exist, or is shared."""
    if projections is None:
        return ()
    implied = []
    first = {leaf.weights: letter for leaf, letter in reversed(list(zip(projections.leaves, "qkv", strict=False)))}
    pattern = "".join(first[leaf.weights] for leaf in projections.leaves)
    if len(pattern) == 3 and pattern != "qkv":
        implied.append(mistake_for("matrices", pattern).name)
    if projections.layout == "separate" and "-" in projections.order and projections.leaves:
        implied.append(mistake_for("matrices", projections.order).name)
    if any(leaf.shared_heads > 1 for leaf in projections.leaves):
        implied.append("projection_shared_by_heads")
    return tuple(implied)
