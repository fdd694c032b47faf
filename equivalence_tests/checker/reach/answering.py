"""Call code in one way, and find its output in what comes back."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from equivalence_tests.checker.reach.calling import STEPS, Inputs, Trial, is_output, like_weights
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.tried import NO_OUTPUT, TRIED


def answered(trial: Trial, errors: list[str]) -> Trial | None:
    """Give the way to call it, with the place of the output in what comes back; None where it does not run."""
    inputs = trial.inputs(seed=1)
    tensors = attempt(lambda: trial.tensors(inputs), errors)
    laid = [replace(trial, plan=replace(trial.plan, returned=x)) for x in (STEPS if trial.plan.step else ("",))]
    read = () if tensors is None else (_with_output(one, inputs, tensors) for one in laid)
    working = next((one for one in read if one is not None), None)
    if tensors is not None and working is None:
        errors.append(f"{NO_OUTPUT}, but {[tuple(x.shape) for x in tensors]}")
    TRIED.called(trial.function, lambda: trial.arguments(inputs), "" if working else errors[-1])
    return working


def _with_output(trial: Trial, inputs: Inputs, tensors: Sequence[Tensor]) -> Trial | None:
    """Find what has the batch and the length of what is handed over, at other sizes, too, if these are taken."""
    found = [index for index, x in enumerate(tensors) if is_output(x, trial, inputs)]
    if not found and not (trial.plan.self_attention and trial.plan.layout == "b l e"):
        return None
    other = replace(trial, sizes=replace(trial.sizes, batch=trial.sizes.batch + 1))
    longer = other.inputs(trial.sizes.query_len + 2, trial.sizes.key_len + 2, seed=2)
    again = attempt(lambda: other.tensors(longer))
    if again is not None:
        found = [index for index in found if index < len(again) and is_output(again[index], other, longer)]
    if not found:
        return _with_learnt_queries(trial, tensors, again or [])
    output = min(found, key=lambda index: like_weights(tensors[index], inputs))
    return replace(trial, plan=replace(trial.plan, output=output))


def _with_learnt_queries(trial: Trial, tensors: Sequence[Tensor], longer: Sequence[Tensor]) -> Trial | None:
    """Give the call of a module whose queries are parameters: what comes back is as long, whatever is handed over."""
    if trial.plan.layout != "b l e" or not trial.plan.self_attention:
        return None
    roles = tuple((name, role.replace("input", "memory")) for name, role in trial.plan.roles)
    for index, (x, y) in enumerate(zip(tensors, longer, strict=False)):
        if x.dim() == 3 and len(x) == trial.sizes.batch and y.shape == (len(x) + 1, *x.shape[1:]):
            sizes = replace(trial.sizes, query_len=x.size(1))
            return replace(trial, plan=replace(trial.plan, roles=roles, output=index), sizes=sizes)
    return None
