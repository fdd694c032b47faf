"""Anybody's own kernel, judged like torch's, and its mistakes named."""

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.loading import load
from equivalence_tests.kernels.faults import Fault, Request
from equivalence_tests.kernels.formulas import Problem
from equivalence_tests.kernels.judging import Cell, Judge, log_sum_exp, run
from equivalence_tests.kernels.kernels import Kernel
from equivalence_tests.kernels.known import Advice
from equivalence_tests.kernels.naming import UNKNOWN_CAUSE, is_unwritten, mistakes_in
from equivalence_tests.kernels.reporting import Report
from equivalence_tests.kernels.running import judged
from equivalence_tests.kernels.situations import Inputs, Situation, listed_situations
from scratch.validation import ArgumentValueError

__all__ = ["by_mistake", "judge_own", "own_kernel"]

# What people call what torch's function calls so.
NAMES = {
    "attn_mask": ("attn_mask", "mask", "attention_mask", "attn_bias", "bias"),
    "is_causal": ("is_causal", "causal"),
    "scale": ("scale", "sm_scale", "softmax_scale", "scaling"),
    "enable_gqa": ("enable_gqa", "gqa"),
}


def own_kernel(target: Any, name: str = "") -> Kernel:
    """Make a kernel of a function.

    Args:
        target: A callable, or "file.py:name" or "module:name" of one.
        name: What the table calls it.

    Returns:
        A kernel that is asked only for what the function takes.

    Raises:
        ArgumentValueError: If there is no such function, or if it does not take three tensors.
    """
    try:
        function = load(target)
    except CannotCheckError as error:
        raise ArgumentValueError(str(error)) from error
    takes = _takes(function, str(target))

    beside: list[Any] = []  # what the last call returned beside its output

    def call(inputs: Inputs) -> Tensor:
        out = function(inputs.q, inputs.k, inputs.v, **_arguments(takes, inputs))
        out, *beside[:] = out if isinstance(out, tuple) else (out,)
        return out

    asked = partial(_asked, takes)
    return Kernel(name or str(target), "own", (), asked, call=call, lse=lambda x: _log_sum_exp(x, beside))


def _log_sum_exp(inputs: Inputs, beside: Sequence[Any]) -> Tensor | None:
    """Find in what is returned beside the output a number for each query, with or without an axis for it."""
    for x in beside[:1]:
        if isinstance(x, Tensor) and x.is_floating_point() and x.shape[:3] == inputs.q.shape[:3]:
            return x if x.dim() == 3 else x.squeeze(-1) if x.shape[3:] == (1,) and inputs.k.shape[2] != 1 else None
    return None


def _takes(function: Any, target: str) -> dict[str, str]:
    """Find by which names a function takes what torch's function takes."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3 and not any(x.kind is x.VAR_POSITIONAL for x in parameters):
        raise ArgumentValueError(f"{target} must be a function of three tensors (query, key, value)")
    there = {x.name for x in parameters[3:]}
    found = {ours: next((x for x in names if x in there), "") for ours, names in NAMES.items()}
    needed = [
        x.name for x in parameters[3:] if x.default is x.empty and x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)
    ]
    unknown = [x for x in needed if x not in found.values()]
    if unknown:
        raise ArgumentValueError(f"{target} needs {', '.join(unknown)}, which cannot be guessed: give it a default")
    return {ours: theirs for ours, theirs in found.items() if theirs}


def _arguments(takes: dict[str, str], inputs: Inputs) -> dict[str, Any]:
    given = inputs.arguments()
    if "scale" in takes and given["scale"] is None:
        given["scale"] = inputs.q.shape[-1] ** -0.5
    return {theirs: given[ours] for ours, theirs in takes.items()}


def _asked(takes: dict[str, str], s: Situation) -> bool:
    needs = {
        "attn_mask": bool(s.mask),
        "is_causal": s.is_causal,
        "scale": s.scale is not None,
        "enable_gqa": s.key_heads != s.heads,
    }
    if s.is_causal and s.query_len != s.key_len and takes.get("is_causal") == "causal":
        return False  # which corner it aligns with is the function's own affair
    return all(ours in takes for ours, needed in needs.items() if needed)


def judge_own(kernel: Kernel, request: Request, situations: Sequence[Situation] | None = None, **told: Any) -> Report:
    """Judge a kernel and name what is wrong in it."""
    listed = listed_situations(request.quick) if situations is None else list(situations)
    with memory_is_poisoned():
        report = judged(request, [kernel], listed, **told)
    judge = Judge(request.device, request.seed)
    by_name = {situation.name: situation for situation in listed}
    wrong = [cell for cell in report.cells if cell.state in ("wrong", "worse")]
    lost = any(cell.lost for cell in wrong)  # then nothing can be run again to find out more
    names = {id(x): [x.words] * bool(x.words) if lost else _name(kernel, judge, by_name[x.situation], x) for x in wrong}
    return replace(report, faults=list(by_mistake(wrong, names)))


@contextmanager
def memory_is_poisoned() -> Iterator[None]:
    """Let torch fill all memory that it hands out with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _name(kernel: Kernel, judge: Judge, situation: Situation, cell: Cell) -> list[str]:
    if not cell.wrong_parts or "writes into" in cell.words:
        return [cell.words] if cell.words else []
    inputs, right, _ = judge.expected(situation, cell.dtype)
    right = {name: x.cpu() for name, x in (right | {"lse": log_sum_exp(inputs)}).items()}
    clean = run(kernel, inputs)
    with memory_is_poisoned():
        dirty = run(kernel, inputs)
    wrong = {error.name for error in cell.wrong_parts}
    unwritten = [x for x in sorted(wrong) if x in clean.parts and is_unwritten(dirty.parts[x], clean.parts[x])]
    if unwritten:
        return ["not all of the memory that it returns is written"]
    problem = Problem(inputs.in_plain_memory(torch.float64).on_cpu(), inputs)
    return mistakes_in(dirty.parts, right, wrong, problem)


def by_mistake(wrong: Sequence[Cell], names: dict[int, list[str]]) -> Iterator[Fault]:
    """Tell each mistake once, that first which explains the most; what no mistake explains by its column."""
    left = sorted(wrong, key=lambda cell: cell.size)
    named = False
    while count := Counter(name for cell in left for name in names[id(cell)]):
        name, _ = count.most_common(1)[0]
        first, *others = [cell for cell in left if name in names[id(cell)]]
        left = [cell for cell in left if name not in names[id(cell)]]
        named = True
        yield Fault(first, Advice("", ""), "", tuple(others), name)
    groups: dict[str, list[Cell]] = {}
    for cell in left:
        groups.setdefault("" if named else cell.group, []).append(cell)
    for first, *others in groups.values():
        yield Fault(first, Advice("", ""), "", tuple(others), UNKNOWN_CAUSE)
