"""What the code offers beyond the call that was judged: every argument, length and switch is run, or listed."""

import contextlib
import copy
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.caches import cache_arguments, exercised_cache
from equivalence_tests.checker.engine.judging import examine
from equivalence_tests.checker.engine.ran import operations_of, unused_fill
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.engine.situations import named_inputs
from equivalence_tests.checker.engine.token_numbers import numbers_exercised
from equivalence_tests.checker.mistakes import named_mistake, told
from equivalence_tests.checker.reach.angles import AngleForm
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.construction import build, inner_widths, prepare
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.plans import role_of_parameter, trials_of
from equivalence_tests.checker.reach.proposing import other_options, parameters_of
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.subject import Subject
from equivalence_tests.checker.reporting.findings import Exercise, Finding
from equivalence_tests.checker.reporting.lines import code_lines, frames_of, is_refusal
from equivalence_tests.checker.reporting.report import Report

Judge = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Report]]
Failed = Callable[[str, Exception], None]
Look = Callable[[], tuple[Sequence[Finding], str]]

LONGEST = 300
TILES = range(8, LONGEST // 2 - 1)  # a number like these may be the length of a tile
OTHER_SCALE = 0.7
MOST_BUILDS = 12
LIMITED = re.compile(r"block|tile|chunk|window|span|segment|bucket|local|sliding", re.IGNORECASE)
WINDOW = re.compile(r"window|sliding|local_?(size|span|attention)?$", re.IGNORECASE)
SLIDES = re.compile(r"slid", re.IGNORECASE)
CAUSAL = re.compile(r"causal|autoregressive|look_?ahead|mask_future", re.IGNORECASE)
SCALE = re.compile(r"^((softmax|sm|attn)_)?scale$")
DROPS = re.compile(r"drop|^p$", re.IGNORECASE)
SHOWS = re.compile(r"return|need|output|average|verbose", re.IGNORECASE)
# Stages in which no option asks for anything but torch's formula.
NEVER_ASKED = ("split", "product", "context", "merge", "mask", "rotary")


@dataclass
class Covered:
    """What was exercised beyond the call that was judged, and what came out.

    Args:
        trial: A way to call it that was judged.
        judge: Judges a call by its arguments, as the one before was.
        exercises: What was run, or not.
        findings: What deviates.
        meant: What deviates on purpose.
        angles: The form that each argument takes which asks for the angles of rotary positions.
    """

    trial: Trial
    judge: Judge
    exercises: list[Exercise] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    meant: list[Finding] = field(default_factory=list)
    angles: dict[str, AngleForm] = field(default_factory=dict)

    def tables(self, inputs: Inputs) -> dict[str, Any]:
        """Make the angles that some arguments take."""
        return {name: self.trial.angles(name, form, inputs) for name, form in self.angles.items()}

    def add(self, what: str, findings: Sequence[Finding], detail: str = "") -> None:
        """Note that something was run, with a verdict."""
        self.exercises.append(Exercise(what, True, detail))
        known = {(finding.name, finding.line) for finding in self.findings}
        self.findings += [finding for finding in findings if (finding.name, finding.line) not in known]

    def leave_out(self, what: str, why: str) -> None:
        """Note that there is no verdict on something."""
        self.exercises.append(Exercise(what, False, why))

    def add_failure(self, what: str, error: Exception) -> None:
        """Note that the code raised: a mistake, unless it says itself that it does not do this."""
        stack = code_lines(frames_of(error))
        if is_refusal(error) or not stack or isinstance(error, (ImportError, NotImplementedError, MemoryError)):
            self.leave_out(what, said(error))
        else:
            facts, evidence = {"what": what, "said": said(error)}, "the same call without it works"
            self.add(what, [told(named_mistake("fails_with_what_it_offers"), facts, stack=stack, evidence=evidence)])

    def run(self, what: str, look: Look, failed: Failed | None = None) -> bool:
        """Look at one more call.

        Args:
            what: Is exercised by it.
            look: Calls it, and gives what deviates, and how that was seen.
            failed: What to do where the code raises; None for a mistake.

        Returns:
            Whether it ran.
        """
        try:
            findings, detail = look()
        except CannotCheckError as error:
            self.leave_out(what, str(error))
        except Exception as error:
            (failed or self.add_failure)(what, error)
            return False
        else:
            self.add(what, findings, detail)
        return True

    def judged(self, inputs: Inputs, extra: Mapping[str, Any]) -> tuple[list[Finding], str]:
        """Judge one more call: it has a verdict if each of its attentions has one."""
        reports = self.judge(*self.trial.arguments(inputs, extra))
        unread = [report.reason for report in reports if report.verdict == "unchecked"]
        if unread or not reports:
            raise CannotCheckError(next(iter(unread), "no attention was found in the call"))
        return [finding for report in reports for finding in report.findings], ""


def cover(trial: Trial, judge: Judge, exercised: Collection[str] = ()) -> Covered:
    """Exercise what the code offers: optional arguments, switches, long lengths, caches.

    Returns:
        All of it, and what deviates.
    """
    covered = Covered(trial, judge)
    _long_lengths(covered)
    caches = cache_arguments(trial.function)
    exercises, findings = exercised_cache(trial)
    covered.exercises += exercises
    covered.findings += findings
    others = list(_optional(trial, {*exercised, *caches}))
    _angles([p.name for p in others if role_of_parameter(p.name) == "angles"], covered)
    for parameter in (parameter for parameter in others if parameter.name not in covered.angles):
        _argument(parameter, covered)
    _causal_setting(covered)
    return covered


def _optional(trial: Trial, exercised: Collection[str]) -> Iterator[inspect.Parameter]:
    """The arguments that the judged call left out, or filled with a constant."""
    given = {name for name, role in trial.plan.roles if role not in ("=None", "=False", "=True")}
    for parameter in parameters_of(trial.function):
        if parameter.name not in given and parameter.name not in exercised:
            yield parameter


def _angles(names: list[str], covered: Covered) -> None:
    """Hand over the angles of rotary positions, all arguments of them at once."""
    inputs, seen, fitting = covered.trial.inputs(), list[Finding](), dict[str, AngleForm]()
    for form in AngleForm.all() if names and not covered.trial.plan.positional else ():
        covered.angles = dict.fromkeys(names, form)
        judged = attempt(lambda: covered.judged(inputs, covered.tables(inputs)))
        if judged is not None and (not fitting or not judged[0]):
            seen, fitting = judged[0], covered.angles
        if fitting and not seen:
            break
    told = all(re.search("cos|sin", name) for name in names)  # what any other name asks for was only guessed
    covered.angles = fitting if told or not seen else {}
    for name in covered.angles:
        covered.add(name, seen, "tables of the angles of rotary positions")


def _argument(parameter: inspect.Parameter, covered: Covered) -> None:
    name, trial = parameter.name, covered.trial
    if trial.plan.positional:
        covered.leave_out(name, "it has no name to be given by")
    elif CAUSAL.search(name) and _is_bool(parameter):
        _causal_switch(f"{name}=True", {name: True}, covered)
    elif _is_bool(parameter):
        _call_switch(name, parameter.default is not True, covered)
    elif (numbered := numbers_exercised(trial, name, covered.tables)) is not None:
        covered.exercises.append(numbered)
    elif role_of_parameter(name) in ("memory", "input") and trial.plan.self_attention:
        _context(name, covered)
    elif LIMITED.search(name) and type(parameter.default) is int:
        return  # lengths beyond it are run
    elif SCALE.search(name) and not isinstance(trial.function, nn.Module):
        _scale(name, covered)
    elif DROPS.search(name) and parameter.default in (0, 0.0, None):
        covered.add(name, (), "left at its default, which drops nothing")
    elif type(parameter.default) is int and _as_tile(name, parameter.default, covered):
        return
    else:
        covered.leave_out(name, "its name does not say what it does")


def _as_tile(name: str, default: int, covered: Covered) -> bool:
    """Whether a number says how long tiles are: with less of it more is run, and the same comes out if it is right."""
    trial, length = covered.trial, covered.trial.sizes.query_len
    inputs = trial.inputs(length, length)

    def ran(given: dict[str, int]) -> tuple[Tensor, int]:
        return trial.output(inputs, given), len(operations_of(partial(trial.output, inputs, given)))

    whole, smaller = attempt(partial(ran, {})), [default >> shift for shift in range(1, default.bit_length())]
    runs = ((number, attempt(partial(ran, {name: number}))) for number in smaller)
    more = [(number, run[0]) for number, run in runs if run is not None and whole is not None and run[1] > whole[1]]
    wrong = next(
        (number for number, output in more if whole is not None and not near(output, whole[0], MEASURED)), None
    )
    if wrong is None and more:
        covered.add(name, (), f"down to {more[-1][0]}: more is run, and the same comes out")
    judged = attempt(partial(covered.judged, inputs, {name: wrong})) if wrong is not None else None
    findings = [one for one in judged[0] if one.name == "tiles_do_not_add_up"] if judged is not None else []
    if findings:
        covered.add(f"{name}={wrong}", findings)
    return bool(findings) or (wrong is None and bool(more))


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
    length, trial = 5, covered.trial
    wanted = torch.ones(length, length).tril().bool()

    def look() -> tuple[list[Finding], str]:
        reach, findings = trial.reach(length, extra), []
        sees_the_future = bool((reach & ~wanted).any())
        if sees_the_future or not (torch.equal(reach, wanted) or _has_a_window(trial.function)):
            reports = covered.judge(*trial.arguments(trial.inputs(length, length), extra))
            unused = unused_fill(operations_of(lambda: trial.output(trial.inputs(length, length), extra)))
            found = _not_causal(what, reach, wanted)
            findings = [_located(replace(found, stack=code_lines(unused.frames)) if unused else found, reports)]
        return findings, "one token changed at a time"

    covered.run(what, look)


def cover_options(covered: Covered, subject: Subject, judge: Callable[..., Sequence[Report]]) -> None:
    """Build a class once more with each option of its constructor that it was not built with."""
    trial, known = covered.trial, {exercise.what for exercise in covered.exercises}
    hands_over = [p for p in parameters_of(trial.function) if p.name == trial.plan.mask_parameter and p.default]
    target: Any = type(subject.function)
    options = list(other_options(target))
    for name, value in options:
        more = any(CAUSAL.search(other) and other != name and other in name for other, _ in options)
        what, causal = f"{name}={value}", value is True and CAUSAL.search(name) and not more
        if what in known or DROPS.search(name) or (causal and (hands_over or not trial.plan.self_attention)):
            continue
        other = built_alike(target, subject, **{name: value})
        if other is None:
            covered.leave_out(what, f"it could be built with {getattr(trial.function, name, 'its default')} only")
            continue
        prepare(other, subject.dtype)
        covered.trial, covered.judge = replace(trial, function=other), partial(judge, other, module=other)
        if causal:
            _causal_switch(what, {}, covered)
        else:
            _option(what, covered, subject)
    covered.trial = trial
    for name in inner_widths(target):
        _other_width(name, covered, subject, judge)
    covered.trial = trial


def _other_width(name: str, covered: Covered, subject: Subject, judge: Callable[..., Sequence[Report]]) -> None:
    """Build a class with another width inside than outside: where both are alike, one may stand for the other."""
    width, trial = subject.sizes.num_heads * (subject.sizes.head_dim + 2), covered.trial
    with contextlib.suppress(CannotCheckError):
        ways = itertools.islice(build(type(subject.function), **{name: width}), MOST_BUILDS)
        other = next((made for made, sizes in ways if sizes.embed_dim == subject.sizes.embed_dim), None)
        if isinstance(other, nn.Module):
            prepare(other, subject.dtype)
            covered.trial, covered.judge = replace(trial, function=other), partial(judge, other, module=other)
            what = f"{name} = {width} beside {subject.sizes.embed_dim} features"
            covered.run(what, lambda: covered.judged(trial.inputs(), {}), lambda _, e: covered.leave_out(what, said(e)))


def built_alike(target: Any, subject: Subject, **given: Any) -> nn.Module | None:
    """Build a class with more arguments, as the subject was where that can be: what both have is of the same shape."""
    shapes = {name: x.shape for name, x in _held_tensors(subject).items()}
    made: list[nn.Module] = []
    with contextlib.suppress(CannotCheckError):
        for other, _ in itertools.islice(build(target, **given), MOST_BUILDS):
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
    """Those that no option asks for, and the names of the others."""
    asked = ", ".join(one.name for one in findings if not never_asked(one))
    return [replace(one, evidence=evidence) for one in findings if never_asked(one)], asked


def _option(what: str, covered: Covered, subject: Subject) -> None:
    """Only what no option asks for is a mistake then; batch_first is called in another layout."""
    module, plan = covered.trial.function, covered.trial.plan
    assert isinstance(module, nn.Module)

    def look() -> tuple[list[Finding], str]:
        others = (one for one in trials_of(module, subject.sizes, subject.dtype) if one.plan.roles == plan.roles)
        ways = itertools.chain([covered.trial], itertools.islice(others, MOST_BUILDS))
        trial = next((one for one in ways if one.keeps_samples_apart), None)
        if trial is None:
            raise CannotCheckError("with it other arguments are taken")
        covered.trial, inputs = trial, trial.inputs()
        before, known = trial.output(inputs), _held_tensors(subject)
        added = {name: x for name, x in module.named_parameters() if name not in known}
        for parameter in added.values():
            parameter.data *= 1 + torch.arange(parameter.numel()).view_as(parameter)
        if added and torch.equal(before, trial.output(inputs)):
            raise CannotCheckError(f"what it adds takes no part in the call: {', '.join(added)}")
        findings, _ = covered.judged(inputs, {})
        return _asked_for(findings, f"built with {what}")

    covered.run(what, look, lambda _, error: covered.leave_out(what, said(error)))


def _has_a_window(function: Callable[..., Any]) -> bool:
    """Whether a setting limits how far back a query sees."""
    return any(WINDOW.search(name) for name in _whole_numbers(_held(function)))


def _held(function: Callable[..., Any]) -> Mapping[str, Any]:
    """What an instance holds; nothing of a function."""
    return vars(function) if isinstance(function, nn.Module) else {}


def _located(finding: Finding, reports: Sequence[Report]) -> Finding:
    """Take over the line, the numbers and the proof of what is wrong with the mask in a call of this kind."""
    seen = (known for report in reports for known in report.findings if known.stage == "mask" and known.stack)
    found = next(seen, finding)
    return replace(finding, stack=found.stack, example=found.example, proof=found.proof)


def _causal_setting(covered: Covered) -> None:
    """What an instance holds as ``causal`` is true of its calls, unless whoever calls it hands the mask over."""
    trial = covered.trial
    held = _held(trial.function).items()
    names = [name for name, value in held if value is True and CAUSAL.search(name) and "mask" not in name]
    known = {exercise.what for exercise in covered.exercises}
    for name in names if trial.plan.self_attention and not trial.plan.mask_parameter else ():
        if f"{name}=True" not in known:
            _causal_switch(f"{name}=True", {}, covered)


def _not_causal(what: str, reach: Tensor, wanted: Tensor) -> Finding:
    output, token = (int(x) for x in (reach != wanted).nonzero()[0])
    seen = bool(reach[output, token])
    shown = "sees the future" if seen else "does not see the past"
    turned = torch.equal(reach, wanted.T)
    seen_keys = "the keys j >= i" if turned else "all keys" if bool(reach.all()) else "other keys"
    facts = {"what": what, "output": output, "shown": shown, "token": token, "seen": seen_keys}
    return told(
        named_mistake("causal_switch_wrong"),
        facts | {"effect": "changes" if seen else "does not change"},
        evidence=f"tokens changed one at a time, {len(wanted)} tokens",
    )


def _scale(name: str, covered: Covered) -> None:
    """A scale multiplies the scores: so does the same number on the queries, beside the default of 1 / sqrt(d)."""
    trial, what = covered.trial, f"{name}={OTHER_SCALE}"

    def look() -> tuple[list[Finding], str]:
        inputs = trial.inputs()
        scaled = replace(inputs, query=inputs.query * (OTHER_SCALE * inputs.query.size(-1) ** 0.5))
        have, want = trial.output(inputs, {name: OTHER_SCALE}), trial.output(scaled, {})
        facts = {"what": what, "number": OTHER_SCALE, "argument": name}
        evidence = f"called with {what}, and without it on scaled queries"
        wrong = told(named_mistake("scale_argument_wrong"), facts, evidence=evidence)
        return [] if near(have, want, MEASURED) else [wrong], "held against queries that are multiplied instead"

    covered.run(what, look)


def _context(name: str, covered: Covered) -> None:
    """A second tensor of another length: queries from the first, keys and values from it."""
    trial = covered.trial
    context = trial.inputs(trial.sizes.query_len + 2, seed=21).query
    if trial.plan.layout != "b l e":
        covered.leave_out(name, f"tensors are laid out as ({', '.join(trial.plan.layout.split())})")
        return

    def failed(what: str, error: Exception) -> None:  # it may want another width
        covered.leave_out(what, f"a tensor of {context.size(1)} tokens of width {context.size(2)}: {said(error)}")

    covered.run(name, lambda: covered.judged(trial.inputs(), {name: context}), failed)


def _long_lengths(covered: Covered) -> None:
    """Past every number that looks like a block or a window: what lies in a second one is new."""
    trial = covered.trial

    def ended(what: str, error: Exception) -> None:
        covered.add(what, [], f"it takes no more: {said(error)}")

    for name, limit in _limits(trial.function):
        what, length = f"lengths beyond {name} = {limit}", 2 * limit + 3
        if length > LONGEST:
            if not _as_tile(name, limit, covered):
                covered.leave_out(what, f"{length} tokens are more than {LONGEST}")
            continue
        failed = ended if trial.sizes.whole or _ends_at(trial.function, limit) else None
        ran = covered.run(what, partial(covered.judged, trial.inputs(length, length), {}), failed)
        if ran and LIMITED.search(name) and trial.plan.self_attention and _is_in_blocks(trial, limit, length):
            _tell_blocks(covered, name, limit)
            continue
        if ran and WINDOW.search(name) and trial.plan.self_attention:
            without = list(_without_effect(trial, name, limit, length))
            if without and not _is_read(trial, name) and bool(trial.reach(limit, {}).triu(1).any()):
                covered.leave_out(name, "its forward never reads it: whoever calls it may cut the windows, or not")
            else:
                covered.findings += without
        elif ran and not LIMITED.search(name) and _is_cut_off(trial, length):
            why = f"of {length} tokens the last no longer sees the first: only its author knows whether it is intended"
            covered.leave_out(what, why)


def _is_in_blocks(trial: Trial, limit: int, length: int) -> bool:
    """Whether the tokens on both sides of an edge between blocks are seen on their own side only."""
    reached = trial.reach(length, {}, [0, limit - 1, limit])
    across = reached[limit:, [0, limit - 1]].any() or reached[:limit, limit].any()
    return bool(reached[1:limit, 0].any()) and not bool(across)


def _tell_blocks(covered: Covered, name: str, limit: int) -> None:
    """Blocks side by side are intended where a setting has their width, unless a name says that they slide."""
    if any(SLIDES.search(one) for one in (name, type(covered.trial.function).__name__)):
        why = f"blocks of {limit} tokens side by side do not slide: only its author knows whether they are intended"
        covered.leave_out(name, why)
    else:
        covered.meant.append(told(named_mistake("own_mask"), meant=f"its blocks are as wide as {name} says ({limit})"))


def _is_read(trial: Trial, name: str) -> bool:
    """Whether a call needs what an instance holds by this name."""
    function = copy.deepcopy(trial.function) if isinstance(trial.function, nn.Module) else None
    held = [child for child in function.modules() if name in vars(child)] if function is not None else []
    for child in held:
        delattr(child, name)
    try:
        replace(trial, function=function or trial.function).output(trial.inputs())
    except AttributeError:
        return True
    return not held


def _is_cut_off(trial: Trial, length: int) -> bool:
    """Whether the last output depends on the first token of few, and not of many."""
    return trial.sees_the_first(trial.sizes.query_len) and not trial.sees_the_first(length)


def _ends_at(function: Callable[..., Any], limit: int) -> bool:
    """Whether a table of the code ends there, which makes the number its greatest length; a layer's weight is none."""
    children = function.modules() if isinstance(function, nn.Module) else ()
    own = [m for m in children if isinstance(m, nn.Embedding) or not type(m).__module__.startswith("torch.")]
    held = [x for m in own for x in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    return any(limit in tensor.shape for tensor in held)


def _limits(function: Callable[..., Any]) -> Iterator[tuple[str, int]]:
    """Whole numbers that an instance, its class or its file holds, or that are defaults of its forward."""
    found: dict[str, int] = {}
    code: Any = function.forward if isinstance(function, nn.Module) else function
    found |= _whole_numbers(getattr(code, "__globals__", {}))
    written = _numbers_in(code)
    for child in function.modules() if isinstance(function, nn.Module) else ():
        for owner in () if type(child).__module__.startswith("torch.") else reversed(type(child).__mro__):
            found |= _whole_numbers(vars(owner))
            methods = [x for name, x in vars(owner).items() if name != "__init__" and owner is not nn.Module]
            written |= {number for method in methods for number in _numbers_in(method)}
        found |= _whole_numbers(vars(child))
    found = {name: value for name, value in found.items() if LIMITED.search(name)}
    defaults = {p.name: p.default for p in parameters_of(function) if type(p.default) is int}
    found |= {name: x for name, x in defaults.items() if LIMITED.search(name) or x < LONGEST}  # a size in bytes is none
    yield from ((name, value) for name, value in sorted(found.items()) if value > 1)
    yield from (("a number in its code", x) for x in sorted(written - {*found.values()}) if x in TILES)


def _numbers_in(function: Any) -> set[int]:
    """The whole numbers that are written into a function, or are its defaults."""
    held = (
        *getattr(getattr(function, "__code__", None), "co_consts", ()),
        *(getattr(function, "__defaults__", ()) or ()),
    )
    return {x for x in held if type(x) is int}


def _whole_numbers(held: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in held.items() if type(value) is int}


def _without_effect(trial: Trial, name: str, limit: int, length: int) -> Iterator[Finding]:
    """A window hides what is further away than it is wide, and no more: the last query does not see the first key."""
    inputs = trial.inputs(length)
    args, kwargs = trial.arguments(inputs, {})
    seeds, _ = named_inputs(trial, inputs, None, args, kwargs)
    for judgement in examine(Call(trial.function, args, kwargs, seeds=seeds)).judgements:
        for part, model, hidden in zip(judgement.attention.parts, judgement.models, judgement.hidden, strict=False):
            query, key = part.table.query, part.table.key
            own = query.max(key) < inputs.query.size(0) * length  # what is padded, or made of several, comes behind
            if bool((own & ((query - key).abs() == length - 1) & ~hidden).any()):
                facts = {"limit": limit, "argument": name, "length": length}
                unseen = query[own & (query == key) & (hidden | model.dead[model.rows])].tolist()
                wrong = "window_hides_near_keys" if unseen else "window_without_effect"
                evidence = f"query {length - 1} of {length} tokens gives key 0 a weight"
                evidence = f"query {unseen[0]} of {length} tokens does not see its own" if unseen else evidence
                stack = code_lines(part.product.operation.frames)
                yield told(named_mistake(wrong), facts, evidence=evidence, stack=stack)
                return
