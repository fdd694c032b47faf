"""What the code offers beyond the call that was judged: every argument, length and switch is run, or listed."""

import inspect
import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivalence_tests.checker.engine.additive import additive
from equivalence_tests.checker.engine.agreeing import agree, output_with
from equivalence_tests.checker.engine.cache_protocols import cache_arguments
from equivalence_tests.checker.engine.caches import exercised_cache
from equivalence_tests.checker.engine.covered import Covered
from equivalence_tests.checker.engine.lengths import LIMITED, WINDOW, cover_lengths, is_tile
from equivalence_tests.checker.engine.ran import operations_of, unused_fill
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.engine.taking_part import NEVER_READ
from equivalence_tests.checker.engine.visibility import ahead_of, pattern_of, probed
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.angles import AngleForm
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.branches import RAN
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.configs import switched
from equivalence_tests.checker.reach.construction import MOST_BUILDS, built_with, inner_widths
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.masking import MaskForm, draw_masks
from equivalence_tests.checker.reach.plans import trials_of
from equivalence_tests.checker.reach.proposing import other_options, parameters_of, unread_arguments
from equivalence_tests.checker.reach.state import attempt, held_by, prepare
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reporting.findings import Exercise, Finding
from equivalence_tests.checker.reporting.lines import code_lines, source_of

OTHER_SCALE = 0.7
LENGTH, FEW = 5, 2
OF_WINDOWS = re.compile(r"window|\bn_?w(in)?\b", re.IGNORECASE)
CAUSAL = re.compile(r"causal|autoregressive|look_?ahead|mask_future", re.IGNORECASE)
SCALE = re.compile(r"^((softmax|sm|attn)_)?scale$")
DROPS = re.compile(r"drop|^p$", re.IGNORECASE)
SHOWS = re.compile(r"return|need|output|average|verbose", re.IGNORECASE)
# Arguments that number tokens: where each stands, or where all of them begin.
POSITIONS = re.compile(r"^(input_|token_)?pos(ition)?s?(_?(ids?|idx|indices))?$", re.IGNORECASE)
OFFSET = re.compile(r"(^|_)offset$|^start_?pos(ition)?$", re.IGNORECASE)
NUMBERED, LATER = 6, 3  # tokens, and where they begin with an offset
# Stages in which no option asks for anything but torch's formula.
NEVER_ASKED = ("split", "product", "context", "merge", "mask", "rotary", "cache")
# What says how something is computed, and not what.
IMPLEMENTED = re.compile(r"flash|sdpa|fused|efficient|fast|manual|kernel|\bstable", re.IGNORECASE)
# Whether torch has its fused attention, which a constructor asks for once.
ASKS_FOR_A_KERNEL = re.compile(r"self\.(\w+) = \(?hasattr\([\w.]+, *['\"]scaled_dot_product_attention['\"]")
MIXING = re.compile(r"\b(mix|shuffle)\w*=True")  # Informer's option to mix tokens and heads where heads are merged


def cover(covered: Covered, exercised: Collection[str] = ()) -> None:
    """Exercise what the code offers: optional arguments, switches, long lengths, caches."""
    trial = covered.trial
    cover_lengths(covered)
    caches = cache_arguments(trial.function)
    exercises, findings = RAN.watching(exercised_cache)(trial)
    covered.exercises += exercises
    covered.findings += findings
    given = {name for name, role in trial.plan.roles if role not in ("=None", "=False", "=True")}
    others = [p for p in parameters_of(trial.function) if p.name not in {*given, *exercised, *caches}]
    located = _with_angles([p.name for p in others if role_of_parameter(p.name) == "angles"], covered)
    for parameter in (one for one in others if (one.name, "angles") not in located.plan.roles):
        _argument(parameter, covered, located)


def _with_angles(names: list[str], covered: Covered) -> Trial:
    """Hand over the angles of rotary positions, all arguments of them at once, and give the call with them."""
    trial, seen, fitting = covered.trial, list[Finding](), covered.trial
    roles = (*trial.plan.roles, *((name, "angles") for name in names))
    tables = [form for form in AngleForm.all() if form.kind != "part"]  # a part, which tells less, only where required
    for form in tables if names and not trial.plan.positional else ():
        other = replace(trial, plan=replace(trial.plan, roles=roles, angles=form))
        judged = attempt(partial(replace(covered, trial=other).judged, trial.inputs(), {}))
        if judged is not None and (fitting is trial or not judged[0]):
            seen, fitting = judged[0], other
        if fitting is not trial and not seen:
            break
    if seen and not all(re.search("cos|sin", name) for name in names):  # what any other name asks for was only guessed
        return trial
    for name in names if fitting is not trial else ():
        covered.add(name, seen, "tables of the angles of rotary positions")
    return fitting


def _argument(parameter: inspect.Parameter, covered: Covered, located: Trial) -> None:
    name, trial = parameter.name, covered.trial
    if trial.plan.positional:
        covered.leave_out(name, "it cannot be passed by name")
    elif CAUSAL.search(name) and _is_bool(parameter):
        _causal_switch(f"{name}=True", {name: True}, covered)
    elif _is_bool(parameter):
        _call_switch(name, parameter.default is not True, covered)
    elif (numbered := numbers_exercised(located, name)) is not None:
        covered.exercises.append(numbered)
    elif name in unread_arguments(trial.function):
        covered.exercises.append(Exercise(name, True, NEVER_READ))
    elif role_of_parameter(name) in ("memory", "input") and trial.plan.self_attention:
        _context(name, covered)
    elif LIMITED.search(name) and type(parameter.default) is int:
        return  # lengths beyond it are run
    elif SCALE.search(name) and not isinstance(trial.function, nn.Module):
        _scale(name, covered)
    elif DROPS.search(name) and parameter.default in (0, 0.0, None):
        _dropout(name, parameter.default is None, covered)
    elif type(parameter.default) is int and is_tile(name, parameter.default, covered):
        return
    else:
        covered.leave_out(name, "its name does not say what it does")


def cover_fewer_masks(covered: Covered, form: MaskForm | None) -> None:
    """Call code for the windows of images with half as many masks as samples: one for each window of an image."""
    several = replace(covered.trial, sizes=replace(covered.trial.sizes, batch=2 * FEW))
    name, sizes, inputs = several.plan.mask_parameter, several.sizes, several.inputs()
    of_windows = OF_WINDOWS.search(source_of(type(several.function)))  # elsewhere neighbours may share one, as beams do
    of_samples = form is not None and form.pattern == "full" and not form.held and "head" not in form.shape
    if form is None or not (of_windows and of_samples) or several.plan.positional:
        return

    def output(may: Tensor) -> Tensor | None:
        mask = form.build(may, sizes.num_heads, several.dtype)
        return attempt(partial(several.output, inputs, {name: mask}))

    may = draw_masks("full", FEW, inputs.query.size(1), inputs.key.size(1))
    fewer, repeated, what = output(may), output(may.repeat(2, 1, 1)), f"{name} for fewer windows than samples"
    if fewer is None or repeated is None:
        return
    if near(fewer, repeated, MEASURED):
        covered.add(what, (), "the masks of one image follow each other, as its windows do")
    else:
        covered.leave_out(what, "each is applied to neighbouring samples, not to the same window of every image")


def _dropout(name: str, may_be_a_module: bool, covered: Covered) -> None:
    """Hand over what drops nothing, as a dropout in eval; leave a rate at its default."""
    inputs, extra = covered.trial.inputs(), {name: nn.Identity()}
    if may_be_a_module and attempt(partial(covered.trial.output, inputs, extra)) is not None:
        covered.run(name, partial(covered.judged, inputs, extra))
    else:
        covered.add(name, (), "left at its default, which drops nothing")


def _call_switch(name: str, value: bool, covered: Covered) -> None:
    """What a switch asks for is no mistake, unless it only says what comes back beside the output."""
    inputs, what = covered.trial.inputs(), f"{name}={value}"

    def look() -> tuple[list[Finding], str]:
        findings, _ = covered.judged(inputs, {name: value})
        return (findings, "") if SHOWS.search(name) else _asked_for(findings, f"called with {what}")

    covered.run(what, look)


def _is_bool(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, bool) or parameter.annotation in (bool, "bool", "bool | None")


def _causal_switch(what: str, extra: dict[str, Any], covered: Covered) -> None:
    """The name says what it must do: with it no output may depend on a later token, and on all earlier ones."""
    trial = covered.trial
    inputs, windowed = trial.inputs(LENGTH, LENGTH), any(WINDOW.search(name) for name in held_by(trial.function))

    def look() -> tuple[list[Finding], str]:
        reach, said = probed(trial, LENGTH, extra).any(0), "one token changed at a time"
        is_causal = pattern_of(reach, ahead_of(LENGTH)) == "causal" or (windowed and not reach.triu(1).any())
        covered.note(inputs, extra)
        return [] if is_causal else [_not_causal(what, reach, extra, inputs, covered)], said

    covered.run(what, look)
    for one, form in ((one, form) for one, form in covered.calls if form is not None):
        _mask_beside(what, extra, replace(one, function=trial.function), form, covered)


def _mask_beside(what: str, extra: dict[str, Any], trial: Trial, form: MaskForm, covered: Covered) -> None:
    """List a mask that hides nothing beside a causal switch, as with torch's hint, which promises that it is causal."""
    plain, masked = (attempt(partial(output_with, trial, one, extra)) for one in (None, form))
    if plain is not None and masked is not None and torch.equal(plain, masked):
        covered.leave_out(f"{trial.plan.mask_parameter} with {what}", "it was passed, and hides nothing")


def cover_options(covered: Covered, subject: Subject) -> None:
    """Build a class once more with each option of its constructor that it was not built with."""
    trial, known = covered.trial, {exercise.what for exercise in covered.exercises}
    hands_over = [p for p in parameters_of(trial.function) if p.name == trial.plan.mask_parameter and p.default]
    target: Any = type(subject.function)
    options = _options(subject.function)
    for what, name, value, given in options:
        more = any(CAUSAL.search(other) and other != name and other in name for _, other, _, _ in options)
        causal = value is True and CAUSAL.search(name) and not more
        if what in known or DROPS.search(name) or (causal and (hands_over or not trial.plan.self_attention)):
            continue
        other = built_alike(target, subject, **given)
        if other is None:
            covered.leave_out(what, f"it could only be built with {getattr(trial.function, name, 'its default')}")
            continue
        built = replace(covered, trial=replace(trial, function=prepare(other, subject.dtype)))
        if causal:
            _causal_switch(what, {}, built)
            continue
        found = len(covered.findings)
        _option(what, built, subject)
        if len(covered.findings) == found:
            _beside_another(what, name, given, built, covered, subject)
    _without_the_kernel(covered, subject)
    for name in inner_widths(target):
        _other_width(name, covered, subject)


def _beside_another(
    what: str, name: str, given: dict[str, Any], built: Covered, covered: Covered, subject: Subject
) -> None:
    """Compare what says how something is computed with what it stands for, alone and beside another option."""
    target, other = type(subject.function), built.trial.function
    if IMPLEMENTED.search(name):
        _implementation(what, name, covered.trial.function, built)
        return
    for beside, of, _, further in _options(other):
        both = built_alike(target, subject, **{**given, **further}) if IMPLEMENTED.search(of) else None
        if both is not None:
            faster = replace(built, trial=replace(built.trial, function=prepare(both, subject.dtype)))
            _implementation(f"{what} and {beside}", of, other, faster)


def _without_the_kernel(covered: Covered, subject: Subject) -> None:
    """Build a class that asks whether torch has its fused attention as if torch had none, and compare it."""
    target = type(subject.function)
    asked = next(filter(None, (ASKS_FOR_A_KERNEL.search(source_of(one)) for one in target.__mro__[:-1])), None)
    if asked is None:
        return
    with mock.patch.dict(vars(F)):
        del F.scaled_dot_product_attention
        other = built_alike(target, subject)
    if other is not None:
        built = replace(covered, trial=replace(covered.trial, function=prepare(other, subject.dtype)))
        _implementation("a torch that has no fused attention", asked[1], covered.trial.function, built)


def _options(function: Any) -> list[tuple[str, str, Any, dict[str, Any]]]:
    """List the other values of the options that a module was built with: what each is called, its name, value, call."""
    options = [(f"{name}={value}", name, value, {name: value}) for name, value in other_options(type(function))]
    return options + [one for one in switched(function) if not SHOWS.search(one[1])]


def _implementation(what: str, name: str, function: Any, covered: Covered) -> None:
    """What says how something is computed changes no number: with the same weights, with masks and without."""
    other = covered.trial.function
    assert isinstance(other, nn.Module)

    def look() -> tuple[list[Finding], str]:
        claims = (agree(replace(trial, function=function), other, form) for trial, form in covered.calls)
        claim = next(filter(None, claims), "")
        lines = code_lines(RAN.decided_by(name))
        found = [found_mistake("implementations_differ", {"what": what}, evidence=claim, stack=lines)]
        return found if claim else [], "the same weights give the same numbers"

    if _shapes(other) == _shapes(function):
        covered.run(f"{what}, beside the same without it", look, covered.leave_out)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in module.named_parameters()}


def _other_width(name: str, covered: Covered, subject: Subject) -> None:
    """Build a class with another width inside than outside: where both are alike, one may stand for the other."""
    trial, sizes, width = covered.trial, subject.sizes, subject.sizes.num_heads * (subject.sizes.head_dim + 2)
    made = built_with(type(subject.function), **{name: width})
    other = next((one for one, given in made if given.embed_dim == sizes.embed_dim), None)
    if other is not None:
        built = replace(covered, trial=replace(trial, function=prepare(other, subject.dtype)))
        what = f"{name} = {width} with {sizes.embed_dim} features"
        built.run(what, partial(built.judged, trial.inputs(), {}), built.leave_out)


def built_alike(target: Any, subject: Subject, **given: Any) -> nn.Module | None:
    """Build a class with more arguments, as the subject was where that can be: what both have is of the same shape."""
    shapes, made = {name: x.shape for name, x in _held_tensors(subject).items()}, list[nn.Module]()
    forward = vars(subject.module).get("forward") if subject.module is not None else None
    for other, _ in built_with(target, **given):
        if isinstance(forward, MethodType):  # what is called in the place of the forward of its class
            other.forward = MethodType(forward.__func__, other)
        made.append(other)
        if all(x.shape == shapes.get(name, x.shape) for name, x in other.state_dict().items()):
            return other
    return next(iter(made), None)


def _held_tensors(subject: Subject) -> dict[str, Tensor]:
    return subject.module.state_dict() if isinstance(subject.module, nn.Module) else {}


def never_asked(finding: Finding) -> bool:
    """Whether no option of a call or a constructor asks for this."""
    return finding.stage in NEVER_ASKED and "changed_by" not in finding.name


def _asked_for(findings: Sequence[Finding], evidence: str) -> tuple[list[Finding], str]:
    """Those that no option asks for, and the names of the others; one that says how to compute asks for none."""
    if IMPLEMENTED.search(evidence):
        return [replace(one, evidence=evidence) for one in findings], ""
    unasked = [one for one in findings if never_asked(one) and not (one.stage == "merge" and MIXING.search(evidence))]
    asked = ", ".join(one.name for one in findings if one not in unasked)
    return [replace(one, evidence=evidence) for one in unasked], asked


def _option(what: str, covered: Covered, subject: Subject) -> None:
    """Only what no option asks for is a mistake then; batch_first is called in another layout."""
    module, plan = covered.trial.function, covered.trial.plan
    assert isinstance(module, nn.Module)

    def look() -> tuple[list[Finding], str]:
        others = (one for one in trials_of(module, subject.sizes, subject.dtype) if one.plan.roles == plan.roles)
        ways = itertools.chain([covered.trial], itertools.islice(others, MOST_BUILDS))
        trial = next((one for one in ways if one.keeps_samples_apart), None)
        if trial is None:
            raise CannotCheckError("with it, the call takes other arguments")
        covered.trial, inputs = trial, trial.inputs()
        before, known = trial.output(inputs), _held_tensors(subject)
        added = {name: x for name, x in module.named_parameters() if name not in known}
        for parameter in added.values():
            parameter.data *= 1 + torch.arange(parameter.numel()).view_as(parameter)
        if added and torch.equal(before, trial.output(inputs)):
            raise CannotCheckError(f"what it adds is not used in the call: {', '.join(added)}")
        args, kwargs = trial.arguments(inputs)
        adds = "" if plan.self_attention else additive(Call(module, args, kwargs, module).run(read=False), False)
        if adds:
            raise CannotCheckError(adds)
        findings, _ = covered.judged(inputs, {})
        return _asked_for([*findings, *exercised_cache(trial)[1]], f"built with {what}")

    covered.run(what, look, covered.leave_out)


def _not_causal(what: str, reach: Tensor, extra: dict[str, Any], inputs: Inputs, covered: Covered) -> Finding:
    """Tell what a switch shows or hides, on the line of a mask that is wrong, or that is made in vain."""
    trial, (output, token) = covered.trial, (int(x) for x in (reach != torch.ones_like(reach).tril()).nonzero()[0])
    seen, patterns = bool(reach[output, token]), {"all": "all keys", "causal_mask_inverted": "the keys j >= i"}
    effect, shown = ("changes", "sees the future") if seen else ("does not change", "does not see the past")
    facts = {"what": what, "output": output, "token": token, "shown": shown, "effect": effect}
    facts |= {"seen": patterns.get(pattern_of(reach, ahead_of(LENGTH)), "other keys")}
    unused = unused_fill(operations_of(partial(trial.output, inputs, extra)))
    stack = code_lines(unused.frames) if unused is not None else ()
    evidence = f"tokens changed one at a time, {LENGTH} tokens"
    found = found_mistake("causal_switch_wrong", facts, evidence=evidence, stack=stack)
    known = (one for report in covered.reports(inputs, extra) for one in report.findings)
    like = next((one for one in known if one.stage == "mask" and one.stack), found)
    return replace(found, stack=like.stack, proof=like.proof)


def _scale(name: str, covered: Covered) -> None:
    """A scale multiplies the scores: so does the same number on the queries, beside the default of 1 / sqrt(d)."""
    trial, what = covered.trial, f"{name}={OTHER_SCALE}"

    def look() -> tuple[list[Finding], str]:
        inputs = trial.inputs()
        scaled = inputs.scaled(OTHER_SCALE * inputs.query.size(-1) ** 0.5, of=("query",))
        have, want = RAN.watching(trial.output)(inputs, {name: OTHER_SCALE}), trial.output(scaled, {})
        facts = {"what": what, "number": OTHER_SCALE, "argument": name}
        evidence = f"called with {what}, and without it on scaled queries"
        wrong = found_mistake("scale_argument_wrong", facts, evidence=evidence)
        return [] if near(have, want, MEASURED) else [wrong], "compared with multiplying the queries instead"

    covered.run(what, look)


def _context(name: str, covered: Covered) -> None:
    """A second tensor of another length: queries from the first, keys and values from it."""
    trial = covered.trial
    context = trial.inputs(trial.sizes.query_len + 2, seed=21).query
    if trial.plan.layout != "b l e":
        covered.leave_out(name, f"tensors are laid out as ({', '.join(trial.plan.layout.split())})")
        return

    given = f"a tensor of {context.size(1)} tokens of width {context.size(2)}: "  # it may want another width
    look = partial(covered.judged, trial.inputs(), {name: context})
    covered.run(name, look, lambda what, said: covered.leave_out(what, given + said))


def numbers_exercised(trial: Trial, name: str) -> Exercise | None:
    """Call the code with numbers for an argument that numbers tokens; None if its name promises nothing of the kind."""
    if not trial.plan.self_attention or trial.plan.positional:
        return None
    inputs, counted = trial.inputs(NUMBERED, NUMBERED), torch.arange(NUMBERED)

    def output(given: Any) -> Tensor | None:
        return attempt(partial(RAN.watching(trial.output), inputs, {name: given}))

    plain = attempt(partial(trial.output, inputs))
    if plain is None:
        return None
    if OFFSET.search(name):  # where all tokens stand later by the same number, their distances are as before
        later = output(LATER)
        if later is None or not near(later, plain, MEASURED):
            return None
        same = "the same as 0, to the last bit" if torch.equal(later, plain) else ""
        return Exercise(name, not same, f"{LATER} gives {same or 'what 0 gives as the first position'}")
    rows = (counted.expand(len(inputs.query), -1).clone(), counted)  # for each sample, or one for all
    named = rows if POSITIONS.search(name) else ()
    tried = (_positions(name, plain, output(row), output(row.flip(-1))) for row in named)
    return next((one for one in tried if one is not None), None)


def _positions(name: str, plain: Tensor, given: Tensor | None, others: Tensor | None) -> Exercise | None:
    """Positions 0, 1, 2, ... must give what no positions give, and others something else."""
    if given is None or others is None:
        return None
    if not near(given, plain, MEASURED):
        return Exercise(name, False, "0, 1, 2, ... give something other than no positions do")
    if torch.equal(others, plain):
        return Exercise(name, False, "other positions than 0, 1, 2, ... give the same")
    return Exercise(name, True, "0, 1, 2, ... give the same as no positions do")
