"""Check a layer, a stack or a model: its parts one by one, then how they are wired.

Every sub-module of a known kind is examined by itself, so that errors do not add up. The wiring of each kind of layer
is followed from the input to the output (``wiring``), its masks are tried (``masks``), and a model is run on token ids
(``models``). What could not be looked at is said, and nothing is called equal on its account.
"""

import contextlib
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from equivalence_tests.checker.engine.meaning import HIDDEN
from equivalence_tests.checker.engine.ran import drawn_in, never_cut, never_hid
from equivalence_tests.checker.engine.running import Call, is_data
from equivalence_tests.checker.engine.same import identical
from equivalence_tests.checker.engine.training import add_untrained
from equivalence_tests.checker.equivalent.calls import WHOLE, diagnose_call
from equivalence_tests.checker.equivalent.deciding import NOT_TORCHS, accuse_with_proof
from equivalence_tests.checker.equivalent.steps import RESIDUAL
from equivalence_tests.checker.equivalent.subjects import examine_attention
from equivalence_tests.checker.layers.models import WHOLE_MODEL, add_model, say_that_it_does_not_run
from equivalence_tests.checker.layers.one_layer import (
    add_idle_arguments,
    add_layer,
    ways_to_call,
    with_more,
)
from equivalence_tests.checker.layers.options import with_memory, with_options
from equivalence_tests.checker.layers.walk import (
    REPORTED,
    Walk,
    add_apart_from,
    is_inside,
    layers_of,
    mark_of,
    one_of_each,
    recorded,
)
from equivalence_tests.checker.layers.wholes import Whole, disagreeing, hold_whole, locate_in_whole, prove_wiring
from equivalence_tests.checker.parts.checking import examine_part
from equivalence_tests.checker.parts.kinds import (
    BY_DATA_FLOW,
    EXAMINED,
    atoms_of,
    is_attention_alone,
    is_torchs,
    kind_of,
)
from equivalence_tests.checker.parts.mask_builders import examine_mask_builder, mask_methods
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.configs import made_up_for
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.model_calls import TIME, ModelRun, run_model
from equivalence_tests.checker.reach.plans import Errors
from equivalence_tests.checker.reach.proposing import called_arguments
from equivalence_tests.checker.reach.state import InDouble, prepare
from equivalence_tests.checker.reach.subject import Adapter, Subject, subjects
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import CheckResult, Exercise, Verdict
from equivalence_tests.checker.reporting.report import Report

MOST_SIZES = 2
NEEDED = ("(attention)", "(multi-head attention)", "(wiring)", "wiring", WHOLE_MODEL)
FROM_BEST: tuple[Verdict, ...] = ("equal", "partial", "unchecked", "deviates")
MIXED = re.compile(r"same dtype|scalar type (Double|Float)|type \((float|double)\)")  # two precisions
AS_WRITTEN = {"residual_missing", "residual_from_normalised"}  # in the program, too
PARTS_ALONE = "Its parts are right, but it was not compared as a whole."
OF_TIME = "it embeds time steps, which diffusion models do with these frequencies"
OF_LAYER = "the layer that holds it may leave the residual to it"  # where that adds one, too, its wiring says so


def examine_layers(found: Any, name: str, adapter: Adapter) -> Report:
    """Check a layer or a model, in one report; raise if it cannot be built or holds nothing that is known."""
    report = _examine_in_sizes(found, name, adapter)
    if report.findings and all(one.stage == "norm" and one.on_purpose_in for one in report.findings):
        known = {one.name: REPORTED for one in report.findings}
        add_apart_from(report, _examine_in_sizes(found, name, replace(adapter, intended=known | {**adapter.intended})))
    return report


def _examine_in_sizes(found: Any, name: str, adapter: Adapter) -> Report:
    tried: dict[Sizes, Report] = {}
    refused: dict[Sizes, CannotCheckError] = {}
    for subject in subjects(found, name, adapter):
        if subject.sizes in (*tried, *refused):
            continue
        if len(tried) + len(refused) == MOST_SIZES:
            break
        try:
            tried[subject.sizes] = report = _examine_subject(subject, name)
        except CannotCheckError as error:
            refused[subject.sizes] = error
            continue
        # The next size is for what this one left unchecked: some classes need an even head_dim.
        if not _left_open(report):
            return with_options(with_memory(report, subject, _examine_subject), subject, _examine_subject)
    if not tried:
        raise next(iter(refused.values()))
    return min(tried.values(), key=_left_open)


def _left_open(report: Report) -> int:
    """Count what was not looked at: the whole, where it did not run, and parts and wirings."""
    skipped = sum(check.outcome == "skipped" for check in report.checks)
    return skipped + sum(one.what == WHOLE_MODEL and not one.exercised for one in report.coverage)


def _examine_subject(subject: Subject, name: str, casting: bool = True) -> Report:
    if subject.module is None:
        raise CannotCheckError(f"{name} is not an nn.Module, so it is not read as a layer: name its attention")
    if any(isinstance(inside, torch.jit.ScriptModule) for inside in subject.module.modules()):
        raise CannotCheckError("TorchScript runs in it, which hides its operations: check the class that was scripted.")
    module = subject.copied()
    torch.set_default_dtype(torch.float64)
    prepare(module)
    report = Report(name, "layers", coverage=[*made_up_for(subject.function)])
    walk = Walk(report, module, subject.sizes, intended=subject.adapter.intended)
    errors, mistakes = list[str](), list[str]()
    run = run_model(module, walk.sizes, errors, mistakes)
    if run is None and casting and any(map(MIXED.search, errors)):
        with InDouble():  # it names float32 itself
            return _examine_subject(subject, name, casting=False)
    if run is not None:
        _watch(walk, run)
    layers = _add_all_parts(walk)
    of_ids = run is not None and run.kind == "ids"  # whatever it holds its attentions and feed-forwards in
    of_model = kind_of("model", module) not in EXAMINED and (of_ids or module not in layers)
    if run is None and (of_model or (mistakes and _is_lost(walk))):
        say_that_it_does_not_run(walk, errors, mistakes)
    elif run is not None and of_model:
        add_model(walk, run)
    report = _judged_as_a_whole(walk, run, subject)
    if run is not None and walk.ran is not None:
        add_untrained(report, walk.ran, module, lambda: run.call(run.source, run.target))
    return report


def _add_all_parts(walk: Walk) -> list[nn.Module]:
    """Check the parts, one by one, and the wiring of the layers; give these."""
    module = walk.module
    known = ((path, module.get_submodule(path)) for path, kind in atoms_of(module).items() if kind in EXAMINED)
    for path, child in one_of_each(item for item in known if not is_torchs(item[1])):  # torch's own are right
        _add_child(walk, path, child)
    _add_inline(walk)
    _add_masks_made_inside(walk)
    layers = layers_of(module)
    for path, layer in layers:
        add_layer(walk, path, layer)
    if not layers and not walk.watched and not set(atoms_of(module).values()) & {"attention", "layers"}:
        walk.skip("wiring", "it holds no attention; if parts are passed to its constructor, pass an instance")
    _add_mask_methods(walk)
    return [layer for _, layer in layers]


def _judged_as_a_whole(walk: Walk, run: ModelRun | None, subject: Subject) -> Report:
    """Prove what is wrong with the wiring; where nothing is, compare the whole with a program of torch's parts."""
    report = _concluded(walk, subject)
    whole = None if run is None or "" in walk.inlined else _whole(walk, run, subject)
    if walk.repairs:
        prove_wiring(report, whole, walk.repairs)
    if whole is not None and _may_be_equal(report):
        _hold(report, whole)
        for other in whole.handed(report, with_more(walk, walk.module)) if report.verdict == "partial" else ():
            _hold(report, other)
    if report.verdict == "equal" and report.equivalent is None:
        report.verdict, report.reason = "unchecked", PARTS_ALONE
    return report


def _is_lost(walk: Walk) -> bool:
    """Whether the wiring could not be followed."""
    return any(check.outcome == "skipped" and check.name.endswith("(wiring)") for check in walk.report.checks)


def _may_be_equal(report: Report) -> bool:
    """Whether nothing is wrong, and nothing else than the wiring is left open."""
    left = [check.name for check in report.checks if check.outcome == "skipped" and check.name.endswith(NEEDED)]
    failed = report.findings or any(check.outcome == "failed" for check in report.checks)
    return not failed and all(name.endswith("wiring)") for name in left)


def _whole(walk: Walk, run: ModelRun, subject: Subject) -> Whole:
    """Give the whole, with what is known of its parts."""
    module = walk.module
    kinds = {path: kind for path, kind in atoms_of(module).items() if kind}
    layers = [
        path for path, kind in kinds.items() if kind == "layers" or walk.adds_residual(module.get_submodule(path))
    ]
    kinds |= dict.fromkeys(layers, "layer")
    kinds = {path: kind for path, kind in kinds.items() if not any(is_inside(path, one) for one in walk.inlined)}
    kinds |= dict.fromkeys(walk.inlined, "layer")  # each is held as a whole
    reports = {path: walk.parts.get(mark_of(module.get_submodule(path))) for path in kinds}
    known = {path: report for path, report in reports.items() if report is not None}
    kinds = {path: kind for path, kind in kinds.items() if path not in known or known[path].verdict != "unchecked"}
    given = kinds, known, walk.heads, walk.masks, walk.intended
    return Whole(walk.report.target, subject.function, module, run, *given)


def _hold(report: Report, whole: Whole) -> None:
    """Hold a whole against a program of torch's parts; what the stages could not follow in it is followed there."""
    holds = hold_whole(report, whole)
    if not holds and not report.findings:
        locate_in_whole(report, whole)
    names = {one.name for one in report.suspected}
    if holds and report.verdict == "unchecked" and not (names and names <= AS_WRITTEN):
        report.checks = [
            replace(check, outcome="passed", detail="") if check.outcome == "skipped" else check
            for check in report.checks
        ]
        report.reason, report.suspected = "", []
    report.findings += disagreeing(whole) if holds and not report.reason else ()
    if report.findings:
        report.verdict = "deviates"
    elif not report.reason:
        report.verdict = "partial" if report.not_exercised else "equal"


def _watch(walk: Walk, run: ModelRun) -> None:
    """Run the whole once, and find its attentions by their data flow, whatever their names."""
    module = walk.module
    walk.ran = recorded(module, run, run.source, run.target)
    ran = walk.ran.recorder.operations
    features = {f"arg:{place}" for place, x in enumerate((run.source, run.target)) if x is not None and is_data(x)}
    walk.report.coverage += [*drawn_in(ran), *never_cut(ran), *never_hid(walk.ran.recorder, features)]
    given = [(call.path, [x for x in tensors_in((call.args, call.kwargs)) if x.dim() > 2]) for call in walk.calls]
    several = {path for path, tensors in given if not all(identical(x, tensors[0]) for x in tensors)}
    walk.of_one = {path for path, _ in given} - several
    try:
        walk.watched = _attentions(walk, run, held=False)
    except Exception as error:  # its parts are looked at one by one all the same
        said = f"watching the whole run raised {type(error).__name__}: {error}"
        walk.report.coverage.append(Exercise("attentions where they stand", False, said))
    walk.held = cache(partial(_attentions, walk, run, held=True))
    for path in walk.watched:
        child = module.get_submodule(path)
        own = path and not called_arguments(child)  # else it runs what it is handed
        if own and not kind_of(path, child) and not any(kind_of(path, m) == "attention" for m in child.modules()):
            vars(child)[BY_DATA_FLOW] = "attention"


def _attentions(walk: Walk, run: ModelRun, held: bool) -> dict[str, Report]:
    """Judge the attentions of one run, by the path at which they stand; held against torch, with proofs, if asked."""
    found: dict[str, Report] = {}
    call = Call(run.call, (run.source, run.target), module=walk.module)
    for report in diagnose_call(call, name=walk.report.target, held=held, proofs=held):
        found[report.place] = joined(found[report.place], report) if report.place in found else report
    return found


def _held(walk: Walk, path: str) -> Report:
    """Give the report on an attention where it stands, compared with torch's program."""
    try:
        return walk.held()[path]
    except Exception as error:  # the user's code may take no fresh inputs
        return Report(path, reason=f"comparing it where it stands raised {type(error).__name__}: {error}")


def joined(known: Report, report: Report) -> Report:
    """Give one report on all the attentions of one call, each mistake reported once."""
    worse = max(known.verdict, report.verdict, key=FROM_BEST.index)
    listed = {(finding.name, finding.line) for finding in known.findings}
    new = [finding for finding in report.findings if (finding.name, finding.line) not in listed]
    return replace(known, findings=[*known.findings, *new], verdict=worse)


def _add_masks_made_inside(walk: Walk) -> None:
    """Report a mask that a layer makes wrongly and hands to an attention that is right by itself."""
    known = {(finding.name, finding.line) for finding in walk.report.findings}
    seen = {finding.where for finding in walk.report.findings if finding.stage == "mask"}
    strange = [path for path, report in walk.watched.items() if any(one.stage == "mask" for one in report.findings)]
    made = [(path, finding) for path in strange if path not in seen for finding in _held(walk, path).findings]
    for path, finding in made:
        if finding.stage == "mask" and finding.is_proven and (finding.name, finding.line) not in known:
            known.add((finding.name, finding.line))
            walk.report.findings.append(replace(finding, where=path))
            walk.report.checks.append(CheckResult(f"{path or 'it'} (mask made inside)", "failed", finding.name))
    hidden = [exercise for report in walk.watched.values() for exercise in report.coverage if exercise.what == HIDDEN]
    walk.report.coverage += dict.fromkeys(hidden)


def _add_inline(walk: Walk) -> None:
    """Tell of an attention that a layer computes in its own forward, where no module of its own holds it."""
    attentions = [path for path, kind in atoms_of(walk.module).items() if kind in ("attention", "layers")]
    seen: set[type[nn.Module]] = set()
    for path in walk.watched:
        child = walk.module.get_submodule(path)
        held = any(path == one or is_inside(path, one) or is_inside(one, path) for one in attentions)
        if not path and is_attention_alone(child):  # it is one, whatever it is called, and was held as one
            walk.inlined |= {path}
            report = _held(walk, path)
            _add_part(walk, path, report)
            walk.report.coverage += [one for one in report.not_exercised if one.what == WHOLE]
            walk.report.coverage.append(Exercise("other calls", False, "it is an attention; compared in one call"))
            return
        if not held:
            walk.inlined |= {path}
        if type(child) not in seen and not held:
            seen.add(type(child))
            part = _with_all_around(walk, path, child)
            _add_part(walk, path, part)
            walk.report.equivalent = walk.report.equivalent if path else part.equivalent
            for trial in ways_to_call(child, walk.sizes, Errors())[:1]:
                add_idle_arguments(walk, path or "layer", path, trial, ())


def _with_all_around(walk: Walk, path: str, layer: nn.Module) -> Report:
    """Examine a layer that computes its attention itself: where it stands, and if it is right there in other calls."""
    held = _held(walk, path)
    if held.verdict not in ("equal", "partial"):
        return held
    try:
        found = examine_attention(layer, path, walk.adapter_of(layer, walk.intended))
    except CannotCheckError:
        found = held
    torch.set_default_dtype(torch.float64)
    return held if found.verdict == "unchecked" else found


def _concluded(walk: Walk, subject: Subject) -> Report:
    report = walk.report
    if not report.checks and type(subject.module).__module__.startswith("torch."):
        report.checks.append(CheckResult("torch.nn's own modules", "passed", "what others are compared with"))
    if not report.checks:
        raise CannotCheckError(
            f"{report.target} holds no attention, LayerNorm, feed-forward or positional encoding of its own to check"
        )
    unchecked = [c for c in report.checks if c.outcome == "skipped"]
    failed = [c for c in report.checks if c.outcome == "failed"]
    unread = any(part.verdict == "unchecked" for part in walk.parts.values())
    needed = unread or any(c.name.endswith(NEEDED) for c in unchecked)
    if any(c.outcome == "passed" for c in report.checks) and not needed:
        report.coverage += [Exercise(c.name, False, c.detail) for c in unchecked]
        unchecked = []
    least: Verdict = "partial" if report.not_exercised else "equal"
    report.verdict = "deviates" if failed or report.findings else "unchecked" if unchecked else least
    if report.verdict == "unchecked":
        report.reason = "\n".join(f"{c.name}: {c.detail}" for c in unchecked)
    return report


def _add_child(walk: Walk, path: str, child: nn.Module) -> None:
    kind = kind_of(path, child)
    own = {"other_lengths_crash": "it gets one tensor here"} if path in walk.of_one else {}
    normed = walk.with_norms(path)
    own |= {"norm_never_used": normed} if normed else {}
    own |= {RESIDUAL: OF_LAYER} if is_attention_alone(child) and not walk.is_normed(path) else {}
    own |= {"position_timescale_of_tensor2tensor": OF_TIME} if TIME.search(path) else {}
    adapter = walk.adapter_of(child, {**own, **walk.intended})
    try:
        part = (
            examine_attention(child, path, adapter)
            if kind == "attention"
            else examine_part(child, path, kind, adapter, path)
        )
    except CannotCheckError as error:
        part = Report(path, reason=str(error))
    if kind == "attention" and part.verdict == "unchecked":  # what cannot be called alone was run where it stands
        part = _held(walk, path) if path in walk.watched and not part.suspected else part
    elif kind == "attention":
        part = _as_called_here(walk, path, child, part)
    part.intended = [one for one in part.intended if not normed or one.reason != normed]  # nothing is amiss
    walk.parts[mark_of(child)] = part
    _add_part(walk, path, part)
    torch.set_default_dtype(torch.float64)


def _as_called_here(walk: Walk, path: str, child: nn.Module, alone: Report) -> Report:
    """Add what goes wrong only with what the whole hands over: a context that is the input, angles of other pairs."""
    for call in [call for call in walk.calls if call.path == path][:1]:
        own = Call(child, call.args, call.kwargs)
        for held in (False, True):  # most often nothing is found, which is quickly said
            asked = diagnose_call(own, intended=walk.intended, proofs=held, features_last=True, held=held)
            found = [finding for report in asked for finding in (*report.findings, *report.suspected)]
            found = [one for one in found if one.stage in ("project", "rotary") and one.name not in alone.mistakes]
            if not found:
                return alone
        alone = replace(alone, verdict="deviates", findings=[*alone.findings, *found])
        accuse_with_proof(alone)
    return alone


def _add_part(walk: Walk, path: str, part: Report) -> None:
    """Take over what was found out about a part."""
    outcome = {"equal": "passed", "partial": "passed", "deviates": "failed", "unchecked": "skipped"}[part.verdict]
    failed = [c.name for c in part.checks if c.outcome == "failed"]
    known = ", ".join(part.mistakes or failed) if outcome == "failed" else ""
    detail = known or " ".join(part.reason.split())
    kind = part.kind or kind_of(path, walk.module.get_submodule(path))
    walk.report.checks.append(CheckResult(f"{path or 'it'} ({kind})", outcome, detail))  # type: ignore[arg-type]
    walk.report.findings += [replace(f, where=path) for f in part.findings]
    walk.report.suspected += [replace(f, where=path) for f in part.suspected]
    walk.report.intended += [replace(f, where=path) for f in part.intended]
    walk.report.coverage += [one for one in part.not_exercised if one.detail == NOT_TORCHS and not path]
    first = part.conventions[:1]
    walk.report.conventions += [(f"{path}: {what}" if path else what, here, there) for what, here, there in first]


def _add_mask_methods(walk: Walk) -> None:
    """Check the methods that build masks, as far as they can be read."""
    for name, method in mask_methods(walk.module):
        with contextlib.suppress(CannotCheckError):
            part = examine_mask_builder(method, name, walk.intended)
            if part.verdict != "unchecked":
                _add_part(walk, name, part)
                walk.report.coverage += [replace(one, what=f"{one.what} in {name}") for one in part.not_exercised]
