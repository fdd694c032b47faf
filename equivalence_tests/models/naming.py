"""Say what is wrong with an attention function, by the first of its calls that departs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.verify import verify
from equivalence_tests.kernels import formulas as kernels
from equivalence_tests.kernels.naming import UNKNOWN_CAUSE, explains, mistakes_in
from equivalence_tests.kernels.situations import Inputs
from equivalence_tests.models.calls import Call, apart, first_departure, rows
from equivalence_tests.models.formulas import Problem, mistakes
from equivalence_tests.models.judging import Ran, Runs
from equivalence_tests.models.library import Registration
from equivalence_tests.models.precision import in_float64

__all__ = ["Cause", "cause_of", "described", "read_in"]

NO_MASK = "the mask is None here: no mask function is registered for this name"
LEFT_TO_IT = "the mask is None here, by which the mask function means: causal, if module.is_causal is true"
LATER = "the same call gives a different output later: what its mask reads has changed"
UNHIDDEN = ("the mask is ignored", "the future is not hidden")
BLIND_NAN = "queries that see no key, those of left padding, get NaN, and their keys pass it on"
PARTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Cause:
    """What is wrong in one run.

    Args:
        names: Every mistake that would give these numbers.
        where: The layer and the sizes of the first call that departs, if one does.
        calls: That call with the model's own attention, and with the function.
    """

    names: tuple[str, ...] = ()
    where: str = ""
    calls: tuple[Call, Call] | None = None


def cause_of(runs: Runs, right: Ran, ran: Ran, registration: Registration) -> Cause:
    """Find the first call that departs and name what is wrong in it.

    Args:
        runs: Of the model.
        right: The run with its own attention.
        ran: The run that is judged.
        registration: Of the function.
    """
    number = first_departure(right.calls, ran.calls)
    if number is None:
        return _by_gradients(runs, right.calls, ran.calls) if "gradients" in right.parts else Cause()
    own, given = right.calls[number], ran.calls[number]
    with in_float64(), torch.no_grad():
        names = _names(own, given, registration)
    return Cause(tuple(dict.fromkeys(names)), described(runs, given, ran.calls), (own, given))


def described(runs: Runs, call: Call, calls: Sequence[Call]) -> str:
    """Name the layer that made a call, and the sizes of the call.

    Args:
        runs: Of the model.
        call: The call.
        calls: All calls of its run.
    """
    query, key, _ = call.inputs
    number = [one for one in calls if one.module is call.module].index(call) + 1
    queries = f"{query.shape[2]} {'query' if query.shape[2] == 1 else 'queries'}"
    sizes = f"{queries} on {key.shape[2]} keys, {query.shape[1]} heads on {key.shape[1]}"
    return f"{runs.path(call)}, call {number}: {sizes}, mask {_kind_of(call.mask)}"


def _kind_of(mask: object) -> str:
    if isinstance(mask, Tensor):
        return f"{str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
    return "None" if mask is None else type(mask).__name__


def _names(own: Call, given: Call, registration: Registration) -> list[str]:
    """Name what a call does wrong."""
    if given.writes:
        return ["it writes into its inputs"]
    if not isinstance(given.output, Tensor):
        return [f"it returns {type(given.output).__name__}, but must return its output and the weights"]
    problem = Problem(own, given)
    if given.mask is None and registration.mask is None and not problem.may.all():
        return [NO_MASK]
    found = _told(problem)
    if given.mask is None and any(name.startswith(UNHIDDEN) for name in found):
        return [LEFT_TO_IT]
    return found or _by_repeating(given)


def _told(p: Problem) -> list[str]:
    """Name the mistakes whose numbers these are, by the rows that count."""
    seeing, output = rows(p.own), p.given.output
    if apart(p.right, p.output().where(_counts(p), p.right)):
        return []  # the model's own attention is another formula
    if p.right.shape != output.shape:
        return [name for name, told in mistakes(p) if told.shape == output.shape and not apart(told, output)]
    if seeing is not None and output[~seeing].isnan().any():
        return [BLIND_NAN]
    return [name for name, told in mistakes(p) if told.shape == output.shape and _is(told, p)]


def _counts(p: Problem) -> Tensor:
    """Say which numbers of an output mean anything."""
    seeing = rows(p.own)
    seeing = p.may.any(-1)[:, 0] if seeing is None else seeing
    return seeing[..., None, None].expand_as(p.right)


def _is(told: Tensor, p: Problem) -> bool:
    """Say whether a mistake gives these numbers, where it gives any and they count."""
    kept = _counts(p) & ~told.isnan()
    given, told = (x.where(kept, p.right) for x in (p.given.output, told))
    return apart(p.right, given) and explains({"": told}, {"": given}, {"": p.right}, {""})


def _by_repeating(given: Call) -> list[str]:
    """Name chance, and masks that are another when the same call is made later."""
    first, second = (given.again(given.inputs).nan_to_num() for _ in range(2))
    if not torch.equal(first, second):
        return ["two equal calls give different outputs: it drops weights although dropout is 0"]
    if apart(given.output.nan_to_num(), first):
        return [LATER]
    return []


def _by_gradients(runs: Runs, own: Sequence[Call], given: Sequence[Call]) -> Cause:
    """Find the first call whose gradients depart, where no output does."""
    if len(own) != len(given):
        words = f"the model calls it {len(given)} times, and its own attention {len(own)} times"
        return Cause((words,))
    for right, call in zip(own, given, strict=True):
        with in_float64():
            expected, found = _gradients(right), _gradients(call)
            wrong = {name for name in PARTS if apart(expected[name], found.get(name))}
            if wrong and found:
                names = mistakes_in(found, expected, wrong, _as_kernel(right))
                told = names or [f"{' and '.join(sorted(wrong))} of this call: {UNKNOWN_CAUSE}"]
                return Cause(tuple(told), described(runs, call, given), (right, call))
            if wrong:
                return Cause(("its output has no gradient",), described(runs, call, given), (right, call))
    return Cause()


def _gradients(call: Call) -> dict[str, Tensor]:
    """Differentiate one call by its queries, keys and values; empty where nothing can be differentiated."""
    leaves = [x.clone().requires_grad_() for x in call.inputs]
    output = call.again(leaves)
    if not output.requires_grad:
        return {}
    found = torch.autograd.grad((output * _weights(output)).sum(), leaves, materialize_grads=True)
    return dict(zip(PARTS, found, strict=True))


def _weights(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel()).view_as(output)


def _as_kernel(own: Call) -> kernels.Problem:
    """Give a call in the form in which mistakes of kernels are named."""
    p = Problem(own, own)
    grad = _weights(p.right).transpose(1, 2)
    inputs = Inputs(p.q, p.key, p.value, p.may, False, p.scale, p.group > 1, grad)
    return kernels.Problem(inputs, inputs)


def read_in(own: Call, given: Call) -> str:
    """Say what the checker reads in the function, with the line: what it does not find in the model's own attention."""
    usual = {finding.name for finding in _findings(own)}
    for finding in _findings(given):
        if finding.name not in usual and finding.line is not None:
            return f"{finding.sentence}\n{finding.line}  {finding.line.text}"
    return ""


def _findings(call: Call) -> list[Finding]:
    """Watch one call; a function whose operations cannot be read gives nothing."""
    arguments = (call.module, *call.inputs, call.mask), call.options
    try:
        return [finding for report in verify(call.function, arguments) for finding in report.findings]
    except Exception:  # what a module holds beside tensors may resist being copied
        return []
