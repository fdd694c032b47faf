"""Find the line that keeps a layer or a model from being made of torch's parts: without one expression, it is."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from equivalence_tests.checker.engine.leaving_out import Repair, Without
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.doubting import Doubt
from equivalence_tests.checker.equivalent.locating import (
    MOST_OPERATIONS,
    first_left_out,
    gap_of,
    name_of,
    named_around,
    say,
)
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import WrittenPart, joined_output
from equivalence_tests.checker.equivalent.proving import proven
from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.layers.wholes import Whole
from equivalence_tests.checker.reach.state import attempt, keeping_state
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import Proof
from equivalence_tests.checker.reporting.report import Report

WORDS = "a Transformer of torch's parts", "one"


def locate_in_whole(report: Report, whole: Whole) -> None:
    """Look for an expression without which a whole is made of torch's parts.

    Args:
        report: Could not be checked; receives the finding with its proof, or the line in its reason.
        whole: What was followed.
    """
    module = whole.module
    call = whole.calls.drawn(whole.calls.sizes[0], 21)
    watched = Without(named_around(module, (), call.kwargs))
    returned = attempt(partial(watched.run, module, **call.kwargs))
    if returned is None or len(watched.operations) > MOST_OPERATIONS:
        return
    parts = {id(inside) for path in whole.kinds for inside in module.get_submodule(path).modules()}
    ours = [one for one in watched.repairs(returned) if id(watched.holders[one.operation.index]) not in parts]
    smallest_first = sorted(ours, key=lambda one: len(one.parts))
    found = first_left_out(smallest_first, partial(_output, module, call), partial(_without, report, whole))
    if found is not None:
        repair, (written, proof) = found
        doubt = whole.intended.get(name_of(repair), "") or Doubt(watched, repair, module, behind=True).said()
        say(report, repair, written, proof, doubt, WORDS)


@contextmanager
def _left_out(module: nn.Module, repair: Repair) -> Iterator[None]:
    """Let a module run without an expression."""
    own, forward = vars(module).get("forward"), module.forward

    @wraps(forward)
    def repaired(*args: Any, **kwargs: Any) -> Any:
        return repair.run(forward, *args, **kwargs)

    vars(module)["forward"] = repaired
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


def _output(module: nn.Module, call: Call, repair: Repair | None) -> Tensor | None:
    """What comes back without an expression, or as it is; None if the call fails."""
    with keeping_state(module), nullcontext() if repair is None else _left_out(module, repair):
        return attempt(lambda: joined_output(module(**call.fresh()[1])))


def _without(report: Report, whole: Whole, repair: Repair) -> tuple[Equivalent, Proof] | None:
    """Give the program of a whole without an expression, and the proof; None where there is none."""
    other = replace(whole, steps=(), runs={}, why="")
    try:
        with _left_out(whole.module, repair):
            if not other.is_explained(report):
                return None
            found = other.equivalent()
            if not (found.agrees and other.is_explained(report)):
                return None
    except UnreadError:
        return None
    proof = proven(whole.module, partial(_gaps, whole, found, repair))
    return None if proof is None else (found, proof)


def _gaps(whole: Whole, found: Equivalent, repair: Repair, seed: int) -> tuple[float, float]:
    """How far the code is from a program without an expression, and with it."""
    module, call = whole.module, whole.calls.drawn(whole.calls.sizes[seed % 2], 40 + seed)
    want = WrittenPart(found).on(call, joined_output)({}, module, Parameters.of(module), None)
    return gap_of(want, _output(module, call, repair)), gap_of(want, _output(module, call, None))
