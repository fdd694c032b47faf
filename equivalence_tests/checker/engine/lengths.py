"""Lengths beyond every number that looks like a block or a window, and tiles that are shorter than they are."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from equivalence_tests.checker.engine.covered import Covered
from equivalence_tests.checker.engine.judging import examine
from equivalence_tests.checker.engine.ran import operations_of
from equivalence_tests.checker.engine.same import MEASURED, near
from equivalence_tests.checker.engine.situations import call_of
from equivalence_tests.checker.engine.visibility import probed, seen_in
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.reach.proposing import parameters_of
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reporting.lines import code_lines

LONGEST = 300
NUMBERS, PAST = range(8, 1100), 7  # a number like these may be one of tokens; and how many are past it
LIMITED = re.compile(r"block|tile|chunk|window|span|segment|bucket|local|sliding", re.IGNORECASE)
WINDOW = re.compile(r"window|sliding|local_?(size|span|attention)?$", re.IGNORECASE)
SLIDES = re.compile(r"slid", re.IGNORECASE)


def is_tile(name: str, default: int, covered: Covered) -> bool:
    """Say whether a number is the length of tiles: with less of it more is run, and the same comes out."""
    trial, length = covered.trial, covered.trial.sizes.query_len
    inputs = trial.inputs(length, length)

    def ran(given: dict[str, int]) -> tuple[Tensor, int]:
        return trial.output(inputs, given), len(operations_of(partial(trial.output, inputs, given)))

    whole = attempt(partial(ran, {}))
    if whole is None:
        return False
    smaller = [default >> shift for shift in range(1, default.bit_length())]
    runs = ((number, attempt(partial(ran, {name: number}))) for number in smaller)
    more = [(number, run[0]) for number, run in runs if run is not None and run[1] > whole[1]]
    wrong = next((number for number, output in more if not near(output, whole[0], MEASURED)), None)
    if wrong is None and more:
        covered.add(name, (), f"down to {more[-1][0]}: more operations run, and the output is the same")
    judged = attempt(partial(covered.judged, inputs, {name: wrong})) if wrong is not None else None
    findings = [one for one in judged[0] if one.name == "tiles_do_not_add_up"] if judged is not None else []
    if findings:
        covered.add(f"{name}={wrong}", findings)
    return bool(findings) or (wrong is None and bool(more))


def cover_lengths(covered: Covered) -> None:
    """Run it past every number that looks like a block or a window: what lies in a second one is new."""
    trial = covered.trial

    def ended(what: str, said: str) -> None:
        covered.add(what, (), f"it accepts no more: {said}")

    for name, limit in _limits(trial.function):
        what, length = f"lengths beyond {name} = {limit}", 2 * limit + 3
        if length > LONGEST:
            if not is_tile(name, limit, covered):
                covered.leave_out(what, f"{length} tokens are more than {LONGEST}")
            continue
        failed = ended if trial.sizes.whole or _ends_at(trial.function, limit) else None
        if covered.run(what, partial(covered.judged, trial.inputs(length, length), {}), failed):
            _look_beyond(covered, name, limit, what)


def _look_beyond(covered: Covered, name: str, limit: int, what: str) -> None:
    """Say what a number hides of the keys that are further away than it is large."""
    trial, length = covered.trial, 2 * limit + 3
    named, window = bool(LIMITED.search(name)), bool(WINDOW.search(name))
    if named and not trial.plan.self_attention:
        return
    seen = probed(trial, length, tokens=[0, limit - 1, limit] if named else [0]).any(0)
    across = seen[limit:, [0, limit - 1]].any() or seen[:limit, limit].any()
    if named and bool(seen[1:limit, 0].any()) and not across:
        _note_blocks(covered, name, limit)
    elif window:
        _judge_window(covered, name, limit)
    elif not named and not seen[-1, 0] and bool(probed(trial, trial.sizes.query_len, tokens=[0])[:, -1, 0].any()):
        why = f"of {length} tokens the last no longer sees the first: only its author knows whether that is intended"
        covered.leave_out(what, why)


def _note_blocks(covered: Covered, name: str, limit: int) -> None:
    """Blocks side by side are intended where a setting has their width, unless a name says that they slide."""
    if any(SLIDES.search(one) for one in (name, type(covered.trial.function).__name__)):
        why = f"blocks of {limit} tokens side by side do not slide: only its author knows whether they are intended"
        covered.leave_out(name, why)
    else:
        covered.intended.append(found_mistake("own_mask", reason=f"its blocks are as wide as {name} says ({limit})"))


def _judge_window(covered: Covered, name: str, limit: int) -> None:
    """A window hides what is further away than it is wide, and no more: the last query does not see the first key."""
    trial, length = covered.trial, 2 * limit + 3
    for judgement in examine(call_of(trial, trial.inputs(length))[0]).judgements:
        seen = seen_in(judgement, length)  # of the first sample
        if bool(seen.any()) and not seen[-1, 0]:
            continue
        codes = [code for function in _functions(trial.function) if (code := getattr(function, "__code__", None))]
        if not any(name in code.co_names for code in codes):
            covered.leave_out(name, "its forward never reads it: its caller may or may not cut the windows")
            return
        unseen = (~seen.diagonal()).nonzero().flatten().tolist()
        wrong = "window_hides_near_keys" if unseen else "window_without_effect"
        near = f"query {unseen[0]} of {length} tokens does not see its own" if unseen else ""
        evidence = near or f"query {length - 1} gives key 0 a weight"
        facts, lines = {"limit": limit, "argument": name, "length": length}, judgement.attention.first.frames
        covered.findings.append(found_mistake(wrong, facts, evidence=evidence, stack=code_lines(lines)))
        return


def _ends_at(function: Callable[..., Any], limit: int) -> bool:
    """Whether a table of the code ends there, which makes the number its greatest length; a layer's weight is none."""
    children = function.modules() if isinstance(function, nn.Module) else ()
    own = (*_own_modules(function), *(child for child in children if isinstance(child, nn.Embedding)))
    held = [x for m in own for x in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    return any(limit in tensor.shape for tensor in held)


def _limits(function: Callable[..., Any]) -> Iterator[tuple[str, int]]:
    """Whole numbers that an instance, its class or its file holds, or that are defaults of its forward."""
    forward: Any = function.forward if isinstance(function, nn.Module) else function
    owners = [vars(owner) for child in _own_modules(function) for owner in (*reversed(type(child).__mro__), child)]
    held = [(name, x) for owner in (getattr(forward, "__globals__", {}), *owners) for name, x in owner.items()]
    found = {name: x for name, x in held if type(x) is int and LIMITED.search(name)}
    defaults = {p.name: p.default for p in parameters_of(function) if type(p.default) is int}
    found |= {name: x for name, x in defaults.items() if LIMITED.search(name) or x < LONGEST}  # a size in bytes is none
    yield from ((name, value) for name, value in sorted(found.items()) if value > 1)


def telling_lengths(function: Callable[..., Any]) -> dict[int, str]:
    """Give lengths of which shorter ones say nothing: past each number in the code, and as long as its masks."""
    buffers = [x for child in _own_modules(function) for x in child.buffers(recurse=False) if x.dim() > 1]
    masks = {x.size(-1) for x in buffers if x.size(-1) == x.size(-2) and x.size(-1) in NUMBERS}
    past = {number + PAST: f"lengths beyond {number}" for number in _numbers_in(function)}
    return dict(sorted((past | {length: f"{length} tokens" for length in masks}).items()))


def _numbers_in(function: Callable[..., Any]) -> list[int]:
    """List the whole numbers in the code of a call, and those that it reads from an instance."""
    codes = [code for one in _functions(function) if (code := getattr(one, "__code__", None))]
    read = {name for code in codes for name in code.co_names}
    held = [x for child in _own_modules(function) for name, x in vars(child).items() if name in read]
    defaults = [x for one in _functions(function) for x in getattr(one, "__defaults__", None) or ()]
    every = [*held, *defaults, *(x for code in codes for x in code.co_consts)]
    return sorted({x for x in every if type(x) is int and x in NUMBERS})


def _own_modules(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules in it that are none of torch's."""
    children = function.modules() if isinstance(function, nn.Module) else ()
    return [child for child in children if not type(child).__module__.startswith("torch.")]


def _functions(function: Callable[..., Any]) -> Iterator[Any]:
    """What may run in a call: the function, or the methods of its classes."""
    if not isinstance(function, nn.Module):
        yield function
    for child in _own_modules(function):
        for owner in (one for one in type(child).__mro__ if one is not nn.Module):
            yield from (method for name, method in vars(owner).items() if name != "__init__")
