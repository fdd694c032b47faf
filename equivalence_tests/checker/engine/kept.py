"""What a call leaves behind: what it keeps has to fit a later call, and its arguments have to stay as they are."""

import ast
import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.ran import operations_of
from equivalence_tests.checker.engine.situations import Situation
from equivalence_tests.checker.engine.watching import storage_of
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.calling import Inputs, Trial
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.masking import MaskForm, draw_masks
from equivalence_tests.checker.reach.state import ask, attempt, changed_by_calls, held_by, keeping_state
from equivalence_tests.checker.reach.syntax import function_at
from equivalence_tests.checker.reach.tracing import tensors_of
from equivalence_tests.checker.reporting.lines import Frames, is_users

Called = tuple[Tensor, list[Tensor]]  # the output, and what is kept


def kept_of_other_sizes(situation: Situation) -> list[Departure]:
    """Name what one call keeps, whatever its tokens are, and a call with more samples does not fit."""
    trial, module = situation.trial, situation.subject.module
    names = changed_by_calls(module)
    if module is None or not names or situation.subject.adapter.call is not None or trial.plan.layout == "l e":
        return []
    one, other = (attempt(partial(_in_turn, trial, names, (trial.sizes,), seed)) for seed in (1, 2))
    if one is None or other is None or not _alike(one[1], other[1]):
        return []  # it remembers tokens, as a cache does
    more = replace(trial.sizes, batch=trial.sizes.batch + 1)
    longer = replace(more, query_len=more.query_len + 1, key_len=more.key_len + 1)
    after, fresh = (ask(partial(_in_turn, trial, names, (first, more), 3)) for first in (trial.sizes, longer))
    if fresh.value is None or (after.value is not None and _alike(after.value[:1], fresh.value[:1])):
        return []
    what = "returns other numbers than without the first" if after.error is None else f"raises {said(after.error)}"
    claim = f"After a call with {trial.sizes.batch} samples, one with {more.batch} samples of the same lengths {what}."
    facts = {"what": " and ".join(names), "claim": claim}
    return [Departure("kept_of_other_sizes", "call", None, facts, frames=_keeping(module, names))]


def kept_masks(situation: Situation) -> list[Departure]:
    """Name what keeps the mask of one call, and hides by it in a later one that is given another."""
    trial, module, form = situation.trial, situation.subject.module, situation.understood
    names = changed_by_calls(module)
    if module is None or not names or form is None or situation.subject.adapter.call is not None:
        return []
    inputs = trial.inputs(seed=167)
    batch, queries = inputs.query.shape[:2]
    first, second = (draw_masks(form.pattern, batch, queries, inputs.key.size(1), seed) for seed in (5, 6))
    turns = ((second,), (second, second), (first, second))
    fresh, same, after = (ask(partial(_masked_in_turn, trial, form, inputs, masks)).value for masks in turns)
    if fresh is None or same is None or after is None or not torch.equal(same, fresh) or torch.equal(after, fresh):
        return []
    claim = "After a call with one mask, a call with another returns other numbers than without the first."
    return [Departure("kept_mask", "call", None, {"claim": claim}, frames=_keeping(module, names))]


@torch.no_grad()
def _masked_in_turn(trial: Trial, form: MaskForm, inputs: Inputs, masks: Sequence[Tensor]) -> Tensor:
    """Call a copy with each of some masks, and give the last output."""
    one = replace(trial, function=copy.deepcopy(trial.function))
    calls = (one.returned(replace(inputs, may_attend=may), mask=form, changing=True) for may in masks)
    return [one.output_in(returned) for returned in calls][-1]


def written_arguments(situation: Situation) -> list[Departure]:
    """Name the operations that write into a tensor of the caller's, without a mask and with the one that is read."""
    trial, found = situation.trial, list[Departure]()
    inputs = trial.inputs(seed=161)
    may = torch.ones(len(inputs.query), inputs.query.size(1), inputs.key.size(1), dtype=torch.bool)
    may[..., -1] = inputs.key.size(1) == 1
    inputs = replace(inputs, may_attend=may)
    for form in dict.fromkeys((None, situation.understood)) if situation.subject.adapter.call is None else ():
        args, kwargs = trial.arguments(inputs, mask=form)
        given = dict(zip((name for name, _ in trial.plan.roles), args, strict=False)) | kwargs
        theirs = {storage_of(x): (name, x, x.clone()) for name, one in given.items() for x in tensors_of(one)}
        with keeping_state(trial.function):
            ran = operations_of(partial(trial.function, *args, **kwargs))
        for operation in ran:
            name, now, before = theirs.get(storage_of(operation.inputs[0].tensor), ("", None, None))
            if operation.inplace and now is not None and before is not None and not torch.equal(now, before):
                claim = f"After the call, the tensor that was passed as {name} holds other numbers."
                found.append(Departure("argument_written_into", "call", operation, {"what": name, "claim": claim}))
    return found[:1]


@torch.no_grad()
def _in_turn(trial: Trial, names: Collection[str], sizes: Sequence[Sizes], seed: int) -> Called:
    """Call a copy with each of some sizes, and give the last output and what is kept under these names."""
    one = replace(trial, function=copy.deepcopy(trial.function))
    calls = [replace(one, sizes=size) for size in sizes]
    outputs = [call.output_in(call.returned(call.inputs(seed=seed), changing=True)) for call in calls]
    held = held_by(one.function).items()
    return outputs[-1], [x for path, x in held if isinstance(x, Tensor) and path.rpartition(".")[2] in names]


def _alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _keeping(module: nn.Module, names: Collection[str]) -> Frames:
    """The line that asks whether one of these is to be made anew, or else the one that keeps it."""
    methods = [x for child in module.modules() for x in vars(type(child)).values() if inspect.isfunction(x)]
    for code in dict.fromkeys(x.__code__ for x in methods if is_users(x.__code__.co_filename)):
        function = function_at(code.co_filename, code.co_name, code.co_firstlineno)
        nodes = [*ast.walk(function)] if function is not None and code.co_name != "__init__" else []
        stored = [x for x in nodes if isinstance(x, ast.Attribute) and x.attr in names and isinstance(x.ctx, ast.Store)]
        asking = (x for x in nodes if isinstance(x, ast.If) and any(one in ast.walk(x) for one in stored))
        asked = [x.lineno for x in asking if any(name in ast.unparse(x.test) for name in names)]
        if lines := [*asked, *(x.lineno for x in stored)]:
            return ((code.co_filename, lines[0], code.co_name),)
    return ()
