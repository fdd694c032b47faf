"""Hold one kernel against ``scratch`` in float64, in one situation, forward and backward."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import scratch
from equivalence_tests.instruments.differences import FLOAT64_BOUND, ErrorRatio, compare_errors, largest_value
from equivalence_tests.kernels.formulas import Problem
from equivalence_tests.kernels.kernels import Kernel
from equivalence_tests.kernels.situations import DTYPES, Inputs, Situation, make_inputs
from scratch import functional

__all__ = ["REFUSALS", "Cell", "Judge", "State", "log_sum_exp", "lost"]

State = Literal["right", "worse", "wrong", "refuses", "falls back", "needs mask"]

# Beyond these an error is no rounding that came out worse than the rule allows, but a wrong number.
WRONG_FACTOR, WRONG_ULPS = 32.0, 64.0
# The unit of float64 over that of float32.
IN_FLOAT64 = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
PARTS = ("output", "dq", "dk", "dv")
# What a kernel says when it does not take a call; the compiler's own failures are no such refusal.
REFUSALS = (
    "no viable backend",
    "no available kernel",
    "not support",
    "unsupported",
    "could not run",
    "not implemented",
)


@dataclass(frozen=True)
class Cell:
    """What one kernel does in one situation.

    Args:
        kernel: Its name.
        situation: Its name.
        group: The column of the situation.
        dtype: In which precision.
        state: The verdict.
        errors: The errors of every part that was judged.
        words: What it said when it refused, or what else is to be told.
        size: Of the situation.
        lost: Whether no program that ran it can use the device afterwards.
    """

    kernel: str
    backend: str
    situation: str
    group: str
    dtype: str
    state: State
    size: int
    errors: tuple[ErrorRatio, ...] = ()
    words: str = ""
    lost: bool = False

    @property
    def wrong_parts(self) -> list[ErrorRatio]:
        """The parts that break the rule, in the order in which they are computed."""
        return [error for error in self.errors if not error.passed]

    @property
    def ratio(self) -> float:
        """The worst error over the textbook's, of those above the floor."""
        return max((x.ratio for x in self.errors if x.candidate_error > x.floor), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Give plain data."""
        found = {
            x.name: {"error": x.candidate_error, "textbook": x.builtin_error, "misfit": x.misfit} for x in self.errors
        }
        return {name: getattr(self, name) for name in ("kernel", "situation", "dtype", "state", "words")} | {
            "parts": found
        }


@dataclass
class Ran:
    """What came out of a kernel."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    ops: set[str] = field(default_factory=set)
    failure: str = ""
    no_backward: str = ""
    remarks: list[str] = field(default_factory=list)
    lost: bool = False


class _Ops(TorchDispatchMode):
    """Note the name of every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class Judge:
    """Judges kernels on one device with one seed; what is right is computed once for each situation."""

    def __init__(self, device: str = "cpu", seed: int = 0) -> None:
        self.device, self.seed = device, seed
        self._right: dict[tuple[Situation, str], tuple[Inputs, dict[str, Tensor], dict[str, Tensor]]] = {}

    def judge(self, kernel: Kernel, situation: Situation, dtype: str) -> Cell:
        """Run a kernel and say what it is worth."""
        inputs, right, textbook = self.expected(situation, dtype)
        rounding = _rounding_of_scores(inputs)
        ran = run(kernel, inputs)
        told = (kernel.name, kernel.backend, situation.name, situation.group, dtype)
        if ran.lost:
            return lost(kernel, situation, dtype, f"which the program cannot use afterwards: {ran.failure}")
        if ran.failure:
            refused = not kernel.compiled or any(sign in ran.failure.lower() for sign in REFUSALS)
            return Cell(*told, "refuses" if refused else "wrong", situation.size, words=ran.failure)
        if kernel.right:
            try:
                right, textbook = ({"output": x} for x in kernel.against(inputs))
            except Exception as error:  # of the lines that are no kernel's
                words = f"what is right could not be computed: {_said(error, [])}"
                return Cell(*told, "refuses", situation.size, words=words)
        if "lse" in ran.parts:
            right, textbook = right | {"lse": log_sum_exp(inputs)}, textbook | {"lse": _rounded(inputs, ran.parts)}
        errors = compared(ran.parts, right, textbook, situation.nan_in_hidden_key, rounding)
        state = _state(errors)
        if ran.remarks:
            state = "wrong"
        fell_back = kernel.own_ops and not any(own in op for own in kernel.own_ops for op in ran.ops)
        if fell_back and state == "right" and situation.size:
            state = "falls back"
        words = "; ".join([*ran.remarks, *([f"no backward: {ran.no_backward}"] if ran.no_backward else [])])
        return Cell(*told, state, situation.size, tuple(errors), words)

    def expected(self, situation: Situation, dtype: str) -> tuple[Inputs, dict[str, Tensor], dict[str, Tensor]]:
        """Give the inputs, what is right in float64, and what the textbook gives in this precision."""
        key = situation, dtype
        if key not in self._right:
            inputs = make_inputs(situation, self.seed, self.device, dtype)
            clean = inputs.in_plain_memory(torch.float64)
            clean.k = clean.k.nan_to_num(nan=0.5)
            self._right[key] = inputs, by_scratch(clean), by_textbook(clean, DTYPES[dtype])
        return self._right[key]


def lost(kernel: Kernel, situation: Situation, dtype: str, how: str) -> Cell:
    """Blame a kernel for the device or the program that it took away."""
    words = f"it fails on the device, {how}"
    return Cell(
        kernel.name, kernel.backend, situation.name, situation.group, dtype, "wrong", situation.size, (), words, True
    )


def log_sum_exp(inputs: Inputs) -> Tensor:
    """Compute the log of the sum of the exponentials of each row of scores, in float64."""
    clean = inputs.in_plain_memory(torch.float64).on_cpu()
    problem = Problem(replace(clean, k=clean.k.nan_to_num(nan=0.5)), inputs)
    return (problem.scores + problem.bias).logsumexp(-1).to(inputs.q.device)


def _rounded(inputs: Inputs, parts: dict[str, Tensor]) -> Tensor:
    """Compute it in the precision of the inputs; queries that see no key are left out, since kernels differ there."""
    problem = Problem(inputs.in_plain_memory(inputs.q.dtype).on_cpu(), inputs)
    found = (problem.scores + problem.bias.to(problem.scores)).logsumexp(-1).to(parts["lse"])
    parts["lse"] = parts["lse"].where(found.isfinite(), found)
    return found


def by_scratch(inputs: Inputs) -> dict[str, Tensor]:
    """Compute what is right, in float64."""
    leaves = inputs.with_leaves(requires_grad=True)
    out = scratch.scaled_dot_product_attention(leaves.q, leaves.k, leaves.v, **leaves.arguments())
    return _with_gradients(out, leaves)


def by_textbook(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute what the plain formula gives in the kernel's own precision: how much rounding the operation has."""
    leaves = inputs.in_plain_memory(dtype).with_leaves(requires_grad=True)
    scale = leaves.q.shape[-1] ** -0.5 if leaves.scale is None else leaves.scale
    k, v = (x.repeat_interleave(leaves.q.shape[1] // x.shape[1], 1) for x in (leaves.k, leaves.v))
    bias = leaves.mask
    if leaves.causal:
        bias = torch.ones(leaves.q.shape[2], k.shape[2], device=k.device).tril().bool()
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.where(bias, 0.0, -math.inf).to(dtype)
    if bias is None:
        return _with_gradients(functional.attention(leaves.q * scale, k, v)[0], leaves)
    blind = (bias == -math.inf).all(-1, keepdim=True)
    out, _ = functional.attention(leaves.q * scale, k, v, bias.masked_fill(blind, 0.0))
    return _with_gradients(out.masked_fill(blind, 0.0), leaves)


def _with_gradients(out: Tensor, leaves: Inputs) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, [leaves.q, leaves.k, leaves.v], leaves.grad.to(out.dtype), materialize_grads=True)
    return dict(zip(PARTS, (out.detach(), *found), strict=True))


def run(kernel: Kernel, inputs: Inputs) -> Ran:
    """Call a kernel, go backward, call it again, and look whether it left its inputs alone."""
    ran, leaves = Ran(), inputs.with_leaves(kernel.gradients)
    before = [_memory(x).clone() for x in (leaves.q, leaves.k, leaves.v)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            ran.parts = _forward_and_back(kernel, leaves, ran)
            again = _called(kernel, leaves, Ran()) if not kernel.compiled else ran.parts["output"]
            _wait_for(leaves.q.device)
        except Exception as error:  # a kernel fails in any way
            ran.failure = _said(error, [str(one.message) for one in warned])
            ran.lost = _is_lost(leaves.q.device)
            if ran.lost:
                return ran
            if "modified by an inplace operation" in ran.failure:
                ran.remarks.append("it writes into what its backward needs: its inputs")
                ran.failure = ""
                return ran
            if kernel.gradients and "backward" in ran.failure:
                forward_only = run(replace(kernel, gradients=False), inputs)
                return replace(forward_only, no_backward=ran.failure)
            return ran
    lse = kernel.lse(leaves)
    if lse is not None and not leaves.k.isnan().any():
        ran.parts["lse"] = lse.detach()
    if not _same(again.detach(), ran.parts["output"]):
        ran.remarks.append("two equal calls give different outputs")
    if not all(_same(_memory(x), y) for x, y in zip((leaves.q, leaves.k, leaves.v), before, strict=True)):
        ran.remarks.append("it writes into its inputs")
    return ran


def _wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked for: only then it says whether it failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_lost(device: torch.device) -> bool:
    try:
        _wait_for(device)
    except RuntimeError:
        return True
    return False


def _forward_and_back(kernel: Kernel, leaves: Inputs, ran: Ran) -> dict[str, Tensor]:
    out = _called(kernel, leaves, ran)
    if not kernel.gradients:
        return {"output": out.detach()}
    if not out.requires_grad:
        ran.no_backward = "its output has no gradient"
        return {"output": out.detach()}
    return _with_gradients(out, leaves)


def _called(kernel: Kernel, leaves: Inputs, ran: Ran) -> Tensor:
    with torch.set_grad_enabled(kernel.gradients):
        if kernel.compiled or not kernel.own_ops:
            torch._dynamo.reset() if kernel.compiled else None
            return kernel(leaves)
        with _Ops() as ops:
            out = kernel(leaves)
        ran.ops |= ops.names
        return out


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.nan_to_num(), y.nan_to_num())


def _memory(x: Tensor) -> Tensor:
    """All that lies in the memory of a tensor, also beside what it shows."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach().untyped_storage())


def _said(error: Exception, warned: list[str]) -> str:
    """Give torch's words in one line: of its warnings those that give a reason, then the error."""
    first = next((line.strip() for line in str(error).splitlines()[1:] if "Error: " in line), "")
    line = first or next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    reasons = [text.splitlines()[0].split(" (Triggered")[0] for text in warned]
    reasons = [text for text in reasons if not text.rstrip().endswith("because:")]
    return "; ".join([line[:200], *dict.fromkeys(reasons)][:2])


def _rounding_of_scores(inputs: Inputs) -> float:
    """Give what a weight is off by if its score is rounded once, as where it is computed from the log-sum-exp."""
    sizes = [x.detach().double().nan_to_num().norm(dim=-1).max() for x in (inputs.q, inputs.k) if x.numel()]
    scale = inputs.q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale
    score = float(sizes[0] * sizes[1]) * scale if len(sizes) == 2 else 0.0
    if inputs.mask is not None and inputs.mask.is_floating_point():
        score += float(inputs.mask[inputs.mask.isfinite()].abs().max())
    return score * torch.finfo(torch.float32).eps


def compared(
    parts: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
    textbook: Mapping[str, Tensor],
    excused: bool = False,
    rounding: float = 0.0,
) -> list[ErrorRatio]:
    """Compare every part by the rule; a NaN that was put in may come out, where it is excused."""
    found = []
    for name, value in parts.items():
        if excused and value.shape == right[name].shape:
            value = torch.where(value.isnan() & _second_sample(value), right[name].to(value), value)
        largest = max(largest_value([right[name]]), _summed_from(name, right))
        error = compare_errors(value, textbook[name], right[name], name=name, largest=largest)
        least = max(FLOAT64_BOUND, rounding * IN_FLOAT64) if value.dtype == torch.float64 else rounding
        found.append(replace(error, floor=max(error.floor, least * largest)))
    return found


def _second_sample(value: Tensor) -> Tensor:
    """Where the NaN was put in: kernels that add their mask, as documented, hand it on there, and only there."""
    place = torch.zeros_like(value, dtype=torch.bool)
    place[1] = True
    return place


def _summed_from(name: str, right: Mapping[str, Tensor]) -> float:
    """Gradients of queries and keys that cancel are rounded like the terms they are summed from."""
    return largest_value([right["dv"]]) if name in ("dq", "dk") and "dv" in right else 0.0


def _state(errors: list[ErrorRatio]) -> State:
    if all(error.passed for error in errors):
        return "right"
    if any(error.misfit or error.candidate_error > _far(error) for error in errors):
        return "wrong"
    return "worse"


def _far(error: ErrorRatio) -> float:
    return WRONG_FACTOR * error.builtin_error + WRONG_ULPS / 4 * error.floor
