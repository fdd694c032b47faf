"""Lengths beyond every number that looks like a block or a window, and tiles that are shorter than they are."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from equivalence_tests.checker.engine.covered import Covered
from equivalence_tests.checker.engine.judging import examine
from equivalence_tests.checker.engine.ran import operations_of
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.engine.situations import named_inputs
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.lines import code_lines

LONGEST = 300
TILES = range(8, LONGEST // 2 - 1)  # a number like these may be the length of a tile
LIMITED = re.compile(r"block|tile|chunk|window|span|segment|bucket|local|sliding", re.IGNORECASE)
WINDOW = re.compile(r"window|sliding|local_?(size|span|attention)?$", re.IGNORECASE)
SLIDES = re.compile(r"slid", re.IGNORECASE)


def is_tile(name: str, default: int, covered: Covered) -> bool:
    """Say whether a number is the length of tiles: with less of it more is run, and the same comes out."""
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


def cover_lengths(covered: Covered) -> None:
    """Run it past every number that looks like a block or a window: what lies in a second one is new."""
    trial = covered.trial

    def ended(what: str, error: Exception) -> None:
        covered.add(what, [], f"it takes no more: {said(error)}")

    for name, limit in _limits(trial.function):
        what, length = f"lengths beyond {name} = {limit}", 2 * limit + 3
        if length > LONGEST:
            if not is_tile(name, limit, covered):
                covered.leave_out(what, f"{length} tokens are more than {LONGEST}")
            continue
        failed = ended if trial.sizes.whole or _ends_at(trial.function, limit) else None
        ran = covered.run(what, partial(covered.judged, trial.inputs(length, length), {}), failed)
        if ran and LIMITED.search(name) and trial.plan.self_attention and _is_in_blocks(trial, limit, length):
            _note_blocks(covered, name, limit)
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


def _note_blocks(covered: Covered, name: str, limit: int) -> None:
    """Blocks side by side are intended where a setting has their width, unless a name says that they slide."""
    if any(SLIDES.search(one) for one in (name, type(covered.trial.function).__name__)):
        why = f"blocks of {limit} tokens side by side do not slide: only its author knows whether they are intended"
        covered.leave_out(name, why)
    else:
        covered.meant.append(found_mistake("own_mask", meant=f"its blocks are as wide as {name} says ({limit})"))


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
    found |= whole_numbers(getattr(code, "__globals__", {}))
    written = _numbers_in(code)
    for child in function.modules() if isinstance(function, nn.Module) else ():
        for owner in () if type(child).__module__.startswith("torch.") else reversed(type(child).__mro__):
            found |= whole_numbers(vars(owner))
            methods = [x for name, x in vars(owner).items() if name != "__init__" and owner is not nn.Module]
            written |= {number for method in methods for number in _numbers_in(method)}
        found |= whole_numbers(vars(child))
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


def whole_numbers(held: Mapping[str, Any]) -> dict[str, int]:
    """Give those values that are whole numbers."""
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
                yield found_mistake(wrong, facts, evidence=evidence, stack=stack)
                return
