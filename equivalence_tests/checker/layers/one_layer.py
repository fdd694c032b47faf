"""Check one layer: how its parts are wired, what becomes of its masks, and of its other arguments."""

import itertools
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from equivalence_tests.checker.engine.caches import exercised_cache
from equivalence_tests.checker.engine.coverage import numbers_exercised
from equivalence_tests.checker.engine.mask_trials import HIDES_NOTHING, WIDENS, has_nothing_to_hide
from equivalence_tests.checker.engine.naming import finding_of
from equivalence_tests.checker.engine.probing import made_in_forward
from equivalence_tests.checker.engine.ran import SEEDS, drawing_line
from equivalence_tests.checker.engine.reading import LENGTH_FIRST, in_words
from equivalence_tests.checker.engine.same import identical
from equivalence_tests.checker.engine.taking_part import NEVER_READ
from equivalence_tests.checker.layers.masks import Masks
from equivalence_tests.checker.layers.models import length_first_built
from equivalence_tests.checker.layers.walk import Walk, masks_of
from equivalence_tests.checker.layers.wiring import Wiring, read_wiring
from equivalence_tests.checker.parts.kinds import atoms_of
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.callers import made_by_callers
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.construction import MOST_BUILDS, built
from equivalence_tests.checker.reach.model_calls import OF_SOURCE, TARGET, run_layer, run_model
from equivalence_tests.checker.reach.passed_masks import call_that_passes
from equivalence_tests.checker.reach.plans import Errors, crossed, positioned, trials_of
from equivalence_tests.checker.reach.proposing import parameters_of, unread_arguments
from equivalence_tests.checker.reach.state import prepare
from equivalence_tests.checker.reach.subject import Adapter, sizes_of
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reach.tried import furthest_first
from equivalence_tests.checker.reporting.findings import Exercise, some_of
from equivalence_tests.checker.reporting.lines import Frames, source_of

MIXES = {"samples_mixed", "input_never_read"}
OF_QUERIES = re.compile(rf"{TARGET.pattern}|self|causal|look_?ahead|future")
WIRED = "read off one forward pass: what goes into each sub-module is a sum of earlier tensors, to rounding"


def add_layer(walk: Walk, path: str, layer: nn.Module) -> None:
    """Follow the wiring of one layer, and try its masks and the maps it returns."""
    label, sizes = path or "layer", sizes_of(layer, walk.sizes, Adapter())
    errors = Errors()
    ways = ways_to_call(layer, sizes, errors)
    if not ways:
        said = "".join(f": {text}" for text in furthest_first(errors)[:1])
        walk.skip(f"{label} (wiring)", f"no way to call it was found{said}")
        return
    roles = sorted(role for _, role in ways[0].plan.roles)
    walk.report.conventions.append((f"{label}: layout", in_words(ways[0].plan.layout), LENGTH_FIRST))
    _add_samples(walk, label, path, ways[0])
    alike = [way for way in ways if sorted(role for _, role in way.plan.roles) == roles]
    trial, wiring = _followed(walk, alike, layer, walk.busy_in(path))
    _add_fresh_parts(walk, path, trial)
    if (drew := drawing_line(lambda: trial.output(trial.inputs()))) is not None:
        walk.check(f"{label} (two calls)", {"random_in_eval": drew}, path, f"seen in {SEEDS} calls with one input")
    if wiring.mistakes or not wiring.unread:
        facts = {"norms": ", ".join(wiring.idle_norms)}
        walk.check(f"{label} (wiring)", wiring.mistakes, path, WIRED, wiring.reason, **facts)
        walk.repairs |= {(name, path): repair for name, repair in wiring.repairs.items() if not wiring.reason}
    else:
        walk.skip(f"{label} (wiring)", some_of(wiring.unread))
    if wiring.order and not wiring.mistakes:
        walk.report.conventions.append((f"{label}: wiring", wiring.order, "post-norm unless norm_first"))
    _add_layer_masks(walk, label, path, trial, wiring)
    _add_maps(walk, label, path, trial)


def _add_samples(walk: Walk, label: str, path: str, trial: Trial) -> None:
    """Say where a layer attends along the samples: in every call, or in a model that builds it."""
    assert isinstance(trial.function, nn.Module)  # layers are modules
    if trial.plan.layout == "l b e" and _is_batch_first_elsewhere(trial.function):
        said = "it attends along the first axis, though others in its file are built with batch_first=True"
        walk.report.coverage.append(Exercise(f"{label}: (batch, len, features)", False, said))
    elif not trial.keeps_samples_apart:
        evidence = "seen when one sample is changed, in every way in which it runs"
        walk.check(f"{label} (samples)", {"samples_mixed": length_first_built(trial.function)}, path, evidence)
    elif trial.plan.layout == "l b e" and not path:
        for mistake, caller in itertools.islice(_mixing_callers(trial.function, trial.sizes), 1):
            evidence = f"seen in {caller}, which builds this layer, when one sample is changed"
            walk.check(f"{label} (samples)", {mistake: length_first_built(trial.function)}, path, evidence)


def _is_batch_first_elsewhere(layer: nn.Module) -> bool:
    """Whether torch's modules in a layer take the length first, and others in its file the samples."""
    file = sys.modules.get(type(layer).__module__)
    length_first = any(getattr(m, "batch_first", None) is False for m in layer.modules())
    return length_first and file is not None and "batch_first=True" in source_of(file).replace(" ", "")


def _mixing_callers(layer: nn.Module, sizes: Sizes) -> Iterator[tuple[str, str]]:
    """Name the models of the user's that construct a layer and mix batch and length up, with the mistake that shows."""
    for whole in made_by_callers(type(layer), lambda caller: built(caller, sizes, MOST_BUILDS)):
        mistakes = list[str]()
        if run_model(prepare(whole), sizes, [], mistakes) is None and MIXES & {*mistakes[:1]}:
            yield mistakes[0], type(whole).__name__


def ways_to_call(layer: nn.Module, sizes: Sizes, errors: Errors) -> list[Trial]:
    """The ways to call a layer, first the one that keeps samples apart."""
    ways = list(trials_of(layer, sizes, torch.float64, errors))
    first = next((way for way in ways if way.keeps_samples_apart), None)
    return ways if first is None else [first, *(way for way in ways if way is not first)]


def _followed(walk: Walk, ways: list[Trial], layer: nn.Module, busy: Collection[str] = ()) -> tuple[Trial, Wiring]:
    """Read the wiring; where it is not right, which of two tensors is the memory may have been taken wrongly."""
    read = list[tuple[Trial, Wiring]]()
    atoms = atoms_of(layer)
    contained = {path: walk.adds_residual(layer.get_submodule(path)) for path in atoms}
    for way in ways:
        read.append((way, read_wiring(way, atoms, contained, busy)))
        if not (read[-1][1].mistakes or read[-1][1].unread):
            break
    return min(read, key=lambda item: _doubts(item[1]))


def _doubts(wiring: Wiring) -> tuple[int, bool]:
    """Count what is wrong or unread under one reading; a memory that is read first may be no memory."""
    return len(wiring.mistakes) + len(wiring.unread), "sublayers_in_another_order" in wiring.mistakes


def with_more(walk: Walk, layer: nn.Module) -> Iterator[Trial]:
    """Call a layer with a memory that may be left out, if it is wired rightly then, and with such positions."""
    for trial in ways_to_call(layer, walk.sizes, Errors())[:1]:
        memory = crossed(trial)
        wiring = None if memory is None else _followed(walk, [memory], layer)[1]
        if memory is not None and wiring is not None and not (wiring.mistakes or wiring.unread):
            yield memory
        yield from filter(None, [positioned(trial)])


def _add_fresh_parts(walk: Walk, path: str, trial: Trial) -> None:
    if not any(finding.name.endswith("in_forward") for finding in walk.report.findings):
        walk.report.findings += [replace(finding_of(one), where=path) for one in made_in_forward(trial)]


def _add_layer_masks(walk: Walk, label: str, path: str, trial: Trial, wiring: Wiring) -> None:
    run = run_layer(trial)
    read = masks_of(walk, path, run, trial.sizes.num_heads)
    called = [step.frames for step in wiring.steps.values() if step.kind == "attention"] or [()]
    unread = unread_arguments(trial.function) if any(mask.used for mask in read.masks) else set()
    idle = [mask.name for mask in read.masks if not mask.used]
    passed = _passed_in_vain(trial, [name for name in idle if name in unread], read)
    unread -= passed.keys()
    whys = {name: HIDES_NOTHING if name in unread else has_nothing_to_hide(name, trial) for name in idle}
    walk.report.coverage += [Exercise(name, False, why) for name, why in whys.items() if why]
    read = replace(read, masks=[mask for mask in read.masks if not whys.get(mask.name)])
    found = list(read.mistakes())
    wrong = {name: _attention_of(mask.lower(), name, called) for name, mask, _ in found}
    unused = "".join(f" {mask}" for name, mask, _ in found if name == "mask_never_used")
    evidence = "a mask that hides one token was given in every form"
    evidence += "".join(f"; {call} passes it" for call in passed.values())
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
            if mask.widens and "batch" not in mask.form.shape:
                what = f"{mask.name} for each sample"
                walk.report.coverage.append(Exercise(what, False, f"it raises{WIDENS}, in every shape that was tried"))
    add_idle_arguments(walk, label, path, trial, run.masks)


def _passed_in_vain(trial: Trial, unread: Collection[str], read: Masks) -> dict[str, str]:
    """Give the masks of a memory that is attended to which no line reads, though calls pass them, with such a call."""
    crosses = any(site.reads == "memory" for site in read.sites)
    of_memory = (name for name in unread if crosses and OF_SOURCE.search(name.lower()))
    return {name: call for name in of_memory if (call := call_that_passes(trial.function, name))}


def _attention_of(mask: str, mistake: str, called: Sequence[Frames]) -> Frames:
    """The call of the attention that a mask belongs to; none where it could belong to any of several."""
    idle = mistake == "mask_never_used" and not (OF_SOURCE.search(mask) or OF_QUERIES.search(mask))
    return () if idle and len(set(called)) > 1 else called[-1 if OF_SOURCE.search(mask) else 0]


def add_idle_arguments(walk: Walk, label: str, path: str, trial: Trial, masks: Sequence[str]) -> None:
    """Decode with the cache that a layer takes, and list the other arguments that no call has given."""
    exercises, findings = exercised_cache(trial)
    walk.report.coverage += [replace(one, what=f"{one.what} of {label}" if path else one.what) for one in exercises]
    known = {one.name for one in walk.report.findings if one.where.startswith(path)}  # a part decodes with it too
    walk.report.findings += [replace(one, where=path) for one in findings if one.name not in known]
    given = {name for name, role in trial.plan.roles if not role.startswith("=")} | set(masks)
    given |= {exercise.what for exercise in exercises}
    for parameter in parameters_of(trial.function):
        default = parameter.default
        if parameter.name not in given and not isinstance(default, bool) and default is not parameter.empty:
            what = f"{parameter.name} of {label}" if label != "layer" else parameter.name
            idle = parameter.name in unread_arguments(trial.function)
            said = Exercise(what, idle, NEVER_READ if idle else "its name does not say what it does")
            numbered = None if idle else numbers_exercised(trial, parameter.name)
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
        twice = not crossed and any(identical(x, y) for i, x in enumerate(own) for y in own[:i])
        mistakes: dict[str, Frames] = {"cross_maps_are_self_maps": ()} if twice else {}
        walk.check(f"{label} (attention maps)", mistakes, path, "the same map comes back twice")
