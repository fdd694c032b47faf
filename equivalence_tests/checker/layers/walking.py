"""Check a layer, a stack or a model: its parts one by one, then how they are wired.

Every sub-module of a known kind is examined by itself, so that errors do not add up. The wiring of each kind of layer
is followed from the input to the output (``wiring``), its masks are tried (``masks``), and a model is run on token ids
(``models``). What could not be looked at is said, and nothing is called equal on its account.
"""

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.caches import exercised_cache
from equivalence_tests.checker.engine.coverage import built_alike, never_asked
from equivalence_tests.checker.engine.mask_trials import has_nothing_to_hide
from equivalence_tests.checker.engine.meaning import HIDDEN
from equivalence_tests.checker.engine.ran import frames_where
from equivalence_tests.checker.engine.reading import LAYOUTS, LENGTH_FIRST
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.surroundings import modules_around
from equivalence_tests.checker.engine.token_numbers import numbers_exercised
from equivalence_tests.checker.equivalent.calls import diagnose_call
from equivalence_tests.checker.equivalent.one_call import WHOLE
from equivalence_tests.checker.equivalent.subjects import examine_attention
from equivalence_tests.checker.layers.masks import Mask, Masks, read_masks
from equivalence_tests.checker.layers.models import judge_model, reads_later_tokens
from equivalence_tests.checker.layers.wholes import Whole, hold_whole
from equivalence_tests.checker.layers.wiring import Wiring, read_wiring
from equivalence_tests.checker.mistakes import found_mistake, named_mistake
from equivalence_tests.checker.parts.checking import examine_part
from equivalence_tests.checker.parts.kinds import BY_DATA_FLOW, EXAMINED, atoms_of, guess_kind, is_torchs, kind_of, runs
from equivalence_tests.checker.parts.mask_builders import examine_mask_builder, mask_methods
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.construction import Sizes, prepare
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.model_calls import OF_SOURCE, TARGET, ModelRun, run_layer, run_model
from equivalence_tests.checker.reach.plans import Errors, trials_of
from equivalence_tests.checker.reach.proposing import other_options, parameters_of
from equivalence_tests.checker.reach.subject import Adapter, Subject, sizes_of, subjects
from equivalence_tests.checker.reach.tracing import ModuleCall, layers_made, tensors_in, trace
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import CheckResult, Exercise, Verdict
from equivalence_tests.checker.reporting.lines import Frames, code_lines
from equivalence_tests.checker.reporting.report import Report

MOST_SIZES = 2
NEEDED = ("(attention)", "(multi-head attention)", "(wiring)", "wiring", "the whole model")
FROM_BEST: tuple[Verdict, ...] = ("equal", "partial", "unchecked", "deviates")
MOST_PROJECTIONS = 4
OF_QUERIES = re.compile(rf"{TARGET.pattern}|self|causal|look_?ahead|future")
CROSS = re.compile(r"cross|memory|context|encoder")
NO_MEMORY = "cross_attention_from_decoder"
WIRED = "read off one forward pass: what goes into each sub-module is a sum of earlier tensors, to rounding"


@dataclass
class Walk:
    """What is known while a model is walked through.

    Args:
        report: Receives what is found.
        module: The model, prepared.
        sizes: Of the tensors.
        contained: For each part that was examined, whether it adds its own residual; None if that is not known.
        meant: Which deviations are on purpose.
        watched: What was found where it stands, in a run of the whole: path -> report on the attention there.
        calls: The calls of its sub-modules in that run.
        of_one: Paths of the sub-modules to which that run gives one tensor of tokens in all their arguments.
        equivalents: The same in torch, for each part that was examined.
        masks: The masks that the whole was seen to take.
        heads: How many heads these may be repeated for.
        inline: Whether an attention has no module of its own, so that what stands around it cannot be told from it.
    """

    report: Report
    module: nn.Module
    sizes: Sizes
    contained: dict[tuple[Any, ...], bool | None] = field(default_factory=dict)
    watched: dict[str, Report] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    of_one: set[str] = field(default_factory=set)
    equivalents: dict[tuple[Any, ...], Equivalent] = field(default_factory=dict)
    masks: list[Mask] = field(default_factory=list)
    heads: int = 1
    inline: bool = False
    meant: Mapping[str, str] = field(default_factory=dict)

    def check(self, name: str, mistakes: Mapping[str, Frames], place: str, evidence: str, **facts: Any) -> None:
        """Add a row, and a finding for each mistake, with its lines and the facts of its words."""
        owners = [type(module).__name__ for module in modules_around(self.module, place)]
        meant = {mistake: named_mistake(mistake).as_named(owners) for mistake in mistakes}
        wrong = [mistake for mistake in mistakes if not meant[mistake]]
        self.report.checks.append(CheckResult(name, "failed" if wrong else "passed", ", ".join(wrong)))
        for mistake, frames in mistakes.items():
            kept = self.report.meant if meant[mistake] else self.report.findings
            if (mistake, place) not in [(f.name, f.where) for f in kept]:
                shown = {"stack": code_lines(frames), "evidence": evidence, "where": place, "meant": meant[mistake]}
                kept.append(found_mistake(mistake, facts, **shown))

    def skip(self, name: str, reason: str) -> None:
        """Say what could not be looked at."""
        self.report.checks.append(CheckResult(name, "skipped", reason))


def examine_layers(found: Any, name: str, adapter: Adapter) -> Report:
    """Check a layer or a model.

    Returns:
        One report for all sub-modules and the wiring.

    Raises:
        CannotCheckError: If it cannot be built, or holds nothing that is known.
    """
    tried: dict[Sizes, Report] = {}
    for subject in subjects(found, name, adapter):
        if subject.sizes not in tried and len(tried) == MOST_SIZES:
            break
        if subject.sizes not in tried:
            tried[subject.sizes] = report = _examine_subject(subject, name)
            # Some classes take only heads of even width, and no other sizes tell more.
            if all(check.outcome != "skipped" for check in report.checks):
                return _with_options(_with_memory(report, subject), subject)
    return min(tried.values(), key=lambda report: sum(check.outcome == "skipped" for check in report.checks))


def _with_memory(report: Report, subject: Subject) -> Report:
    """Check a class that takes no keys from its memory once more with the option that asks for them."""
    target: Any = type(subject.function)
    options = other_options(target) if subject.built and NO_MEMORY in {one.name for one in report.findings} else ()
    for name in (name for name, value in options if value is True and CROSS.search(name)):
        other = built_alike(target, subject, **{name: True})
        found = _examine_subject(replace(subject, function=other), report.target) if other is not None else report
        if NO_MEMORY not in {one.name for one in found.findings}:
            return found
    return report


def _with_options(report: Report, subject: Subject) -> Report:
    """Check a class that is right once more with each other string that its constructor takes."""
    target: Any = type(subject.function)
    texts = [item for item in other_options(target) if isinstance(item[1], str) and subject.built]
    for name, value in texts if report.verdict in ("equal", "partial") else ():
        what, other = f"{name}={value}", built_alike(target, subject, **{name: value})
        if other is None:
            report.coverage.append(Exercise(what, False, "no way to build it with that was found"))
            continue
        found = _examine_subject(replace(subject, function=other), report.target)
        report.findings += [replace(one, evidence=f"built with {what}") for one in found.findings if never_asked(one)]
        unread = [Exercise(what, False, found.reason)] if found.verdict == "unchecked" else found.not_exercised
        report.coverage += [replace(one, what=what if one.what == what else f"{one.what}, {what}") for one in unread]
    if report.findings:
        report.verdict = "deviates"
    elif report.not_exercised:
        report.verdict = "partial"
    return report


def _examine_subject(subject: Subject, name: str) -> Report:
    if subject.module is None:
        raise CannotCheckError(f"{name} is no module")
    if any(isinstance(inside, torch.jit.ScriptModule) for inside in subject.module.modules()):
        raise CannotCheckError("TorchScript runs in it, which hides its operations: check the class that was scripted.")
    module = subject.copied()
    torch.set_default_dtype(torch.float64)
    prepare(module)
    walk = Walk(Report(name, "layers"), module, subject.sizes, meant=subject.adapter.meant)
    errors, mistakes = list[str](), list[str]()
    run = run_model(module, walk.sizes, errors, mistakes)
    if run is not None:
        _watch(walk, run)
    for path, child in _one_of_each(_examined_children(module)):
        _add_child(walk, path, child)
    _add_inline(walk)
    _add_masks_made_inside(walk)
    layers = _layers(module)
    for path, layer in layers:
        _add_layer(walk, path, layer)
    if not layers and not walk.watched and not set(atoms_of(module).values()) & {"attention", "layers"}:
        walk.skip("wiring", "it holds no attention; if parts are handed to its constructor, pass an instance")
    _add_mask_methods(walk)
    if kind_of("model", module) not in EXAMINED and module not in [layer for _, layer in layers]:
        if run is None:
            _say_that_it_does_not_run(walk, errors, mistakes)
        else:
            _add_model(walk, run)
    report = _concluded(walk.report, subject)
    if run is not None and not walk.inline and _may_be_equal(report):
        _hold(walk, run, subject)
    return report


def _may_be_equal(report: Report) -> bool:
    """Whether nothing is wrong, and nothing else than the wiring is left open."""
    left = [check.name for check in report.checks if check.outcome == "skipped" and check.name.endswith(NEEDED)]
    failed = report.findings or any(check.outcome == "failed" for check in report.checks)
    return not failed and all(name.endswith("wiring)") for name in left)


def _hold(walk: Walk, run: ModelRun, subject: Subject) -> None:
    """Hold the whole against a program of torch's parts; what the stages could not follow in it is followed there."""
    module, report = walk.module, walk.report
    kinds = {path: _kind_in_whole(walk, path, kind) for path, kind in atoms_of(module).items() if kind}
    marks = {path: walk.equivalents.get(_mark(module.get_submodule(path))) for path in kinds}
    parts = {path: found for path, found in marks.items() if found is not None}
    whole = Whole(report.target, subject.function, module, run, kinds, parts, walk.heads, walk.masks, walk.meant)
    if hold_whole(report, whole) and report.verdict == "unchecked":
        report.checks = [
            replace(check, outcome="passed", detail="") if check.outcome == "skipped" else check
            for check in report.checks
        ]
        report.reason = ""
    if report.verdict in ("equal", "unchecked") and not report.reason:
        report.verdict = "partial" if report.not_exercised else "equal"


def _kind_in_whole(walk: Walk, path: str, kind: str) -> str:
    """Say what a part is in a whole: one that adds its own residual is a layer."""
    own = walk.contained.get(_mark(walk.module.get_submodule(path)), False)
    return "layer" if own or kind == "layers" else kind


def _watch(walk: Walk, run: ModelRun) -> None:
    """Run the whole once, and find its attentions by their data flow, whatever their names."""
    module = walk.module
    with torch.no_grad():
        walk.calls = trace(module, lambda: run.call(run.source, run.target))
    given = [(call.path, [x for x in tensors_in((call.args, call.kwargs)) if x.dim() > 2]) for call in walk.calls]
    several = {path for path, tensors in given if not all(_same(x, tensors[0]) for x in tensors)}
    walk.of_one = {path for path, _ in given} - several
    try:
        for report in diagnose_call(run.call, (run.source, run.target), module=module, name=walk.report.target):
            known = walk.watched.get(report.place)
            walk.watched[report.place] = report if known is None else joined(known, report)
    except Exception as error:  # its parts are looked at one by one all the same
        said = f"watching the whole run raised {type(error).__name__}: {error}"
        walk.report.coverage.append(Exercise("attentions where they stand", False, said))
    for path in walk.watched:
        child = module.get_submodule(path)
        if path and not kind_of(path, child) and not any(kind_of(path, m) == "attention" for m in child.modules()):
            vars(child)[BY_DATA_FLOW] = "attention"


def joined(known: Report, report: Report) -> Report:
    """Give one report on all the attentions of one call, each mistake reported once."""
    worse = max(known.verdict, report.verdict, key=FROM_BEST.index)
    told = {(finding.name, finding.line) for finding in known.findings}
    new = [finding for finding in report.findings if (finding.name, finding.line) not in told]
    return replace(known, findings=[*known.findings, *new], verdict=worse)


def _add_masks_made_inside(walk: Walk) -> None:
    """Tell of a mask that a layer makes wrongly and hands to an attention that is right by itself."""
    known = {(finding.name, finding.line) for finding in walk.report.findings}
    told = {finding.where for finding in walk.report.findings if finding.stage == "mask"}
    made = [(path, finding) for path, report in walk.watched.items() if path not in told for finding in report.findings]
    for path, finding in made:
        if finding.stage == "mask" and (finding.name, finding.line) not in known:
            known.add((finding.name, finding.line))
            walk.report.findings.append(replace(finding, where=path))
            walk.report.checks.append(CheckResult(f"{path or 'it'} (mask made inside)", "failed", finding.name))
    hidden = [exercise for report in walk.watched.values() for exercise in report.coverage if exercise.what == HIDDEN]
    walk.report.coverage += dict.fromkeys(hidden)


def _add_inline(walk: Walk) -> None:
    """Tell of an attention that a layer computes in its own forward, where no module of its own holds it."""
    attentions = [path for path, kind in atoms_of(walk.module).items() if kind in ("attention", "layers")]
    seen: set[type[nn.Module]] = set()
    for path, report in walk.watched.items():
        child = walk.module.get_submodule(path)
        held = any(path == one or _is_inside(path, one) or _is_inside(one, path) for one in attentions)
        if not path and _is_attention_alone(child):  # it is one, whatever it is called, and was held as one
            walk.inline = True
            _add_part(walk, path, report)
            walk.report.coverage += [one for one in report.not_exercised if one.what == WHOLE]
            return
        if type(child) not in seen and not held:
            seen.add(type(child))
            walk.inline = True
            _add_part(walk, path, report)
            around = f"residuals and norms around the attention{f' of {path}' if path else ''}"
            walk.report.coverage.append(
                Exercise(around, False, "it has no module of its own, so they were not followed")
            )
            for trial in _ways_to_call(child, walk.sizes, Errors())[:1]:
                _add_idle_arguments(walk, path or "layer", path, trial, ())


def _is_attention_alone(module: nn.Module) -> bool:
    """Whether nothing but projections has parameters: then there is nothing around the attention."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    return len(matrices) <= MOST_PROJECTIONS and not any(guess_kind(m) == "layer_norm" for m in module.modules())


def _concluded(report: Report, subject: Subject) -> Report:
    if not report.checks and type(subject.module).__module__.startswith("torch."):
        report.checks.append(CheckResult("torch.nn's own modules", "passed", "what others are compared with"))
    if not report.checks:
        raise CannotCheckError(
            f"{report.target} holds no attention, LayerNorm, feed-forward or positional encoding of its own to check"
        )
    unchecked = [c for c in report.checks if c.outcome == "skipped"]
    failed = [c for c in report.checks if c.outcome == "failed"]
    if any(c.outcome == "passed" for c in report.checks) and not any(c.name.endswith(NEEDED) for c in unchecked):
        report.coverage += [Exercise(c.name, False, c.detail) for c in unchecked]
        unchecked = []
    least: Verdict = "partial" if report.not_exercised else "equal"
    report.verdict = "deviates" if failed or report.findings else "unchecked" if unchecked else least
    if report.verdict == "unchecked":
        report.reason = "; ".join(f"{c.name}: {c.detail}" for c in unchecked)
    return report


def _mark(child: nn.Module) -> tuple[Any, ...]:
    """What two modules share that need not be examined twice."""
    source = str(child) if isinstance(child, nn.Sequential) else ""  # what stands in no class of its own
    return (type(child), tuple(p.shape for p in child.parameters()), source)


def _one_of_each(found: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Keep the first module of each class and shape."""
    first: dict[tuple[Any, ...], tuple[str, nn.Module]] = {}
    for path, child in found:
        first.setdefault(_mark(child), (path, child))
    return list(first.values())


def _examined_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List the outermost sub-modules of a known kind; torch's own are right."""
    for path, kind in atoms_of(module).items():
        child = module.get_submodule(path)
        if kind in EXAMINED and not is_torchs(child):
            yield path, child


def _add_child(walk: Walk, path: str, child: nn.Module) -> None:
    kind = kind_of(path, child)
    width = walk.sizes.embed_dim  # that of a model may be that of its input only
    own = {"other_lengths_crash": "it gets one tensor here"} if path in walk.of_one else {}
    meant = {**own, **walk.meant}
    adapter = Adapter(embed_dim=width if any(width in p.shape for p in child.parameters()) else None, meant=meant)
    try:
        part = (
            examine_attention(child, path, adapter)
            if kind == "attention"
            else examine_part(child, path, kind, adapter, path)
        )
    except CannotCheckError as error:
        part = Report(path, reason=str(error))
    if kind == "attention" and part.verdict == "unchecked":
        part = walk.watched.get(path, part)  # what cannot be called alone was run where it stands
    elif kind == "attention":
        part = _as_called_here(walk, path, child, part)
    walk.contained[_mark(child)] = _adds_residual(part)
    if part.equivalent is not None and part.equivalent.source and part.verdict in ("equal", "partial"):
        walk.equivalents[_mark(child)] = part.equivalent
    _add_part(walk, path, part)
    torch.set_default_dtype(torch.float64)


def _as_called_here(walk: Walk, path: str, child: nn.Module, alone: Report) -> Report:
    """Add what goes wrong only with what the whole hands over: a context that is the input, angles of other pairs."""
    for call in [call for call in walk.calls if call.path == path][:1]:
        found = diagnose_call(child, call.args, call.kwargs, module=child, meant=walk.meant, features_last=True)
        for finding in (finding for report in found for finding in report.findings):
            if finding.stage in ("project", "rotary") and finding.name not in alone.mistakes:
                alone = replace(alone, verdict="deviates", findings=[*alone.findings, finding])
    return alone


def _add_part(walk: Walk, path: str, part: Report) -> None:
    """Take over what was found out about a part."""
    outcome = {"equal": "passed", "partial": "passed", "deviates": "failed", "unchecked": "skipped"}[part.verdict]
    failed = [c.name for c in part.checks if c.outcome == "failed"]
    detail = "" if part.verdict == "equal" else ", ".join(part.mistakes or failed) or " ".join(part.reason.split())
    kind = part.kind or kind_of(path, walk.module.get_submodule(path))
    walk.report.checks.append(CheckResult(f"{path or 'it'} ({kind})", outcome, detail))  # type: ignore[arg-type]
    walk.report.findings += [replace(f, where=path) for f in part.findings]
    walk.report.meant += [replace(f, where=path) for f in part.meant]
    told = part.conventions[:1]
    walk.report.conventions += [(f"{path}: {what}" if path else what, here, there) for what, here, there in told]


def _adds_residual(part: Report) -> bool | None:
    """Read in a report whether a part includes the residual; None where the part was not understood."""
    words = " ".join(here for what, here, _ in part.conventions if what == "includes")
    fresh = "layer_made_in_forward" in part.mistakes and "residual" not in words
    if part.verdict == "unchecked" or fresh:
        return None
    return "residual" in words or any(name.startswith(("residual", "norm_fresh")) for name in part.mistakes)


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List one of each kind of layer: the innermost modules that hold an attention and a feed-forward.

    Where there is no feed-forward at all, an attention with a norm or with another attention is a layer.
    """
    found = list(_holding(module, lambda kinds: "attention" in kinds and _has_feed_forward(kinds)))
    found = found or list(
        _holding(module, lambda kinds: kinds.count("attention") > 1 or set(kinds) >= {"attention", "layer_norm"})
    )
    outer = {path for path, _ in found for other, _ in found if _is_inside(other, path)}
    return _one_of_each(item for item in found if item[0] not in outer)


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _has_feed_forward(kinds: list[str]) -> bool:
    return "feed_forward" in kinds or kinds.count("") > 1


def _holding(module: nn.Module, wanted: Any) -> Iterator[tuple[str, nn.Module]]:
    for path, child in module.named_modules():
        named = path and kind_of(path, child) in EXAMINED  # the whole is read as a layer, whatever its name says
        if named or not runs(child) or isinstance(child, nn.Sequential) or is_torchs(child):
            continue
        kinds = list(atoms_of(child).values())
        if wanted(kinds):
            yield path, child


def _add_layer(walk: Walk, path: str, layer: nn.Module) -> None:
    """Follow the wiring of one layer, and try its masks and the maps it returns."""
    label, sizes = path or "layer", sizes_of(layer, walk.sizes, Adapter())
    errors = Errors()
    ways = _ways_to_call(layer, sizes, errors)
    if not ways:
        said = f": {errors[0]}" if errors else ""
        walk.skip(f"{label} (wiring)", f"no way to call it was found{said}")
        return
    roles = sorted(role for _, role in ways[0].plan.roles)
    walk.report.conventions.append((f"{label}: layout", LAYOUTS[ways[0].plan.layout], LENGTH_FIRST))
    trial, wiring = _followed(walk, [way for way in ways if sorted(role for _, role in way.plan.roles) == roles], layer)
    _add_fresh_parts(walk, path, trial)
    if wiring.mistakes or not wiring.unread:
        walk.check(f"{label} (wiring)", wiring.mistakes, path, WIRED, norms=", ".join(wiring.idle_norms))
    else:
        walk.skip(f"{label} (wiring)", "; ".join(wiring.unread))
    if wiring.order and not wiring.mistakes:
        walk.report.conventions.append((f"{label}: wiring", wiring.order, "post-norm unless norm_first"))
    _add_layer_masks(walk, label, path, trial, wiring)
    _add_maps(walk, label, path, trial)


def _ways_to_call(layer: nn.Module, sizes: Sizes, errors: Errors) -> list[Trial]:
    """The ways to call a layer, first the one that keeps samples apart."""
    ways = list(trials_of(layer, sizes, torch.float64, errors))
    first = next((way for way in ways if way.keeps_samples_apart), None)
    return ways if first is None else [first, *(way for way in ways if way is not first)]


def _followed(walk: Walk, ways: list[Trial], layer: nn.Module) -> tuple[Trial, Wiring]:
    """Read the wiring; where it is not right, which of two tensors is the memory may have been taken wrongly."""
    read = list[tuple[Trial, Wiring]]()
    atoms = atoms_of(layer)
    contained = {path: walk.contained.get(_mark(layer.get_submodule(path)), False) for path in atoms}
    for way in ways:
        read.append((way, read_wiring(way, atoms, contained)))
        if not (read[-1][1].mistakes or read[-1][1].unread):
            break
    return min(read, key=lambda item: _doubts(item[1]))


def _doubts(wiring: Wiring) -> tuple[int, bool]:
    """Count what is wrong or unread under one reading; a memory that is read first may be no memory."""
    return len(wiring.mistakes) + len(wiring.unread), "sublayers_in_another_order" in wiring.mistakes


def _add_fresh_parts(walk: Walk, path: str, trial: Trial) -> None:
    made = layers_made(lambda: trial.returned(trial.inputs()))
    if made and not any(finding.name.endswith("in_forward") for finding in walk.report.findings):
        stack, evidence = code_lines(next(iter(made.values()))), f"each call constructs {', '.join(sorted(made))}"
        found = found_mistake("layer_made_in_forward", stack=stack, evidence=evidence, where=path)
        walk.report.findings.append(found)


def _read_masks(walk: Walk, path: str, run: ModelRun, heads: int = 1) -> Masks:
    """Try the masks of a layer or a model; none where one goes wrong inside, which hides what becomes of it outside."""
    inside = [f for f in walk.report.findings if f.where.startswith(f"{path}." if path else "")]
    if any(f.stage in ("softmax", "mask") or "mask" in f.name for f in inside):
        return Masks([], [])
    read = read_masks(walk.module.get_submodule(path), run, heads)
    if not path:
        walk.masks, walk.heads = read.masks, heads
    if any(f.name.startswith("cross_") or f.name == "sublayer_unused" for f in walk.report.findings):
        read = replace(read, masks=[mask for mask in read.masks if mask.reached])  # others may have nothing to hide
    return read


def _add_layer_masks(walk: Walk, label: str, path: str, trial: Trial, wiring: Wiring) -> None:
    run = run_layer(trial)
    read = _read_masks(walk, path, run, trial.sizes.num_heads)
    called = [step.frames for step in wiring.steps if step.kind == "attention"] or [()]
    whys = {mask.name: has_nothing_to_hide(mask.name, trial) for mask in read.masks if not mask.used}
    walk.report.coverage += [Exercise(name, False, why) for name, why in whys.items() if why]
    read = replace(read, masks=[mask for mask in read.masks if not whys.get(mask.name)])
    found = list(read.mistakes())
    wrong = {name: _attention_of(mask.lower(), name, called) for name, mask, _ in found}
    unused = "".join(f" {mask}" for name, mask, _ in found if name == "mask_never_used")
    evidence = "a mask that hides one token was given in every form"
    if read.opposite:
        said = {"look": "may look", "block": "may not look"}
        evidence = "; ".join(f"{mask.name}: True = {said[mask.meaning]}" for mask in read.opposite)
        wrong["masks_of_opposite_meaning"] = called[-1]
    if read.masks:
        walk.check(f"{label} (masks)", wrong, path, evidence, argument=unused)
    for mask in read.masks:
        if mask.form is not None:
            row = (f"{label}: {mask.name}", f"hides {mask.hides}: {mask.form}", "True = may not look, or added")
            walk.report.conventions.append(row)
    _add_idle_arguments(walk, label, path, trial, run.masks)


def _attention_of(mask: str, mistake: str, called: Sequence[Frames]) -> Frames:
    """The call of the attention that a mask belongs to; none where nothing tells which of several it was meant for."""
    idle = mistake == "mask_never_used" and not (OF_SOURCE.search(mask) or OF_QUERIES.search(mask))
    return () if idle and len(set(called)) > 1 else called[-1 if OF_SOURCE.search(mask) else 0]


def _add_idle_arguments(walk: Walk, label: str, path: str, trial: Trial, masks: Sequence[str]) -> None:
    """Decode with the cache that a layer takes, and list the other arguments that no call has given."""
    exercises, findings = exercised_cache(trial)
    walk.report.coverage += [replace(one, what=f"{one.what} of {label}" if path else one.what) for one in exercises]
    walk.report.findings += [replace(one, where=path) for one in findings]
    given = {name for name, role in trial.plan.roles if not role.startswith("=")} | set(masks)
    given |= {exercise.what for exercise in exercises}
    for parameter in parameters_of(trial.function):
        default = parameter.default
        if parameter.name not in given and not isinstance(default, bool) and default is not parameter.empty:
            what = f"{parameter.name} of {label}" if label != "layer" else parameter.name
            said = Exercise(what, False, "its name does not say what it does")
            numbered = numbers_exercised(trial, parameter.name)
            walk.report.coverage.append(said if numbered is None else replace(numbered, what=what))


def _add_maps(walk: Walk, label: str, path: str, trial: Trial) -> None:
    """A layer that returns the maps of its self-attention twice forgets those of the cross-attention."""
    queries, keys = trial.sizes.query_len, trial.sizes.key_len
    if trial.plan.self_attention or queries == keys:
        return
    returned = tensors_in((trial.returned(trial.inputs()),))
    maps = [x for x in returned if x.dim() >= 3 and x.size(-2) == queries]
    own, crossed = ([x for x in maps if x.size(-1) == length] for length in (queries, keys))
    if own or crossed:
        twice = not crossed and any(_same(x, y) for i, x in enumerate(own) for y in own[:i])
        mistakes: dict[str, Frames] = {"cross_maps_are_self_maps": ()} if twice else {}
        walk.check(f"{label} (attention maps)", mistakes, path, "the same map comes back twice")


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def _add_mask_methods(walk: Walk) -> None:
    """Check the methods that build masks, as far as they can be read."""
    for name, method in mask_methods(walk.module):
        with contextlib.suppress(CannotCheckError):
            part = examine_mask_builder(method, name, walk.meant)
            if part.verdict != "unchecked":
                _add_part(walk, name, part)


def _add_model(walk: Walk, run: ModelRun) -> None:
    """Run a whole model, or a stack, and look at how it is wired."""
    evidence = "seen when the model is run, and run again with one or two of its tokens changed"
    called = {call.path: call.frames for call in reversed(walk.calls)}
    judged = itertools.chain(judge_model(walk.module, run), _judged_masks(walk, run))
    try:
        for what, mistake, where in judged:
            follows = named_mistake(mistake).follows if mistake else ()
            if any(finding.name.startswith(follows) for finding in walk.report.findings):
                continue
            lines = _called_at(called, mistake, where) or _ran_at(walk, run, mistake, where) if mistake else ()
            mistakes = {mistake: lines} if mistake else {}
            walk.check(f"{what}{f' ({where})' if where else ''}", mistakes, where, evidence)
    except Exception as error:  # the user's code may refuse other tokens than those it ran on
        walk.skip("the whole model", f"on other tokens it raised {type(error).__name__}: {error}")
    walk.report.conventions += list(_model_rows(run))


def _judged_masks(walk: Walk, run: ModelRun) -> Iterator[tuple[str, str, str]]:
    """Say which masks do not reach the layers of a model."""
    read = _read_masks(walk, "", run)
    wrong = list(read.mistakes())
    for name, mask, path in wrong or [("", "", "")] * bool(read.masks):
        yield "masks of the model", name, _layer_around(path) or mask * (name == "mask_never_used")


def _layer_around(path: str) -> str:
    """The first module of a list that an attention stands in, or else the module around it."""
    numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", path)
    return numbered.group() if numbered else path.rpartition(".")[0]


def _called_at(called: Mapping[str, Frames], mistake: str, where: str) -> Frames:
    """The lines that call a sub-module, or the first layer of a stack, where a mistake shows in the call."""
    return called.get(where, called.get(f"{where}.0", ())) if named_mistake(mistake).ran == "call" else ()


def _ran_at(walk: Walk, run: ModelRun, mistake: str, where: str) -> Frames:
    """The lines of a sub-module at which what shows a mistake ran."""
    if named_mistake(mistake).ran in ("", "call"):
        return ()
    ran = Call(run.call, (run.source, run.target), module=walk.module).run(read=False).operations
    return frames_where(named_mistake(mistake).ran, [op for op in ran if op.frames and op.place == where])


def _say_that_it_does_not_run(walk: Walk, errors: Sequence[str], mistakes: Sequence[str]) -> None:
    if mistakes:
        seen = "it is called twice" if mistakes[0] == "random_in_eval" else "one sample of the batch is changed"
        evidence = f"seen when {seen}, in every way in which the model runs"
        walk.check("samples are independent", {mistakes[0]: ()}, "", evidence)
        return
    said = f"; it said {errors[0]}" if errors else ""
    if not walk.report.checks:
        raise CannotCheckError(f"No way to run it was found{said}. Pass an instance and a call: verify(model, inputs).")
    why = f"no way to run it was found: its parts and layers were checked, not their order{said}"
    walk.report.coverage.append(Exercise("the whole model", False, why))


def _model_rows(run: ModelRun) -> Iterator[tuple[str, str, str]]:
    """Say what a model reads: what is right for one that classifies is wrong for one that predicts the next token."""
    if run.turned:
        yield "the model: layout", "(len, batch)", "(len, batch) unless batch_first"
    later = reads_later_tokens(run) if run.kind != "stack" else None
    if later is not None and not run.masked:
        words = "every token, later ones too (BERT)" if later else "no later token (GPT)"
        yield "the model: an output reads", words, ""
