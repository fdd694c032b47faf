"""What the property tests share: everything that a case gives, the verdict with its report, and the tally."""

import copy
import inspect
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from equivalence_tests.instruments.differences import (
    FLOAT64_BOUND,
    Comparison,
    ErrorRatio,
    compare_errors,
    compare_group,
    first_stage_that_parts,
    largest_value,
)
from equivalence_tests.instruments.inputs import Case, Mask
from equivalence_tests.instruments.side_by_side import fast_path, random_tensor
from scratch.attention import MultiheadAttention
from scratch.recording import trace_attention

__all__ = ["Everything", "Ledger", "Tally", "assert_ratios", "assert_same", "everything", "report_of"]

Everything = dict[str, Tensor | None]
# How many sets of parameters close by say how much rounding either has, where one set does not.
NEIGHBOURS = 25
# How many tensors a report lists: where one parts, its gradients do too.
LISTED = 5


def stops_the_fast_path(case: Case) -> bool:
    """Whether a whole batch is padding to torch's fast path, which cannot come back from nested tensors then.

    It takes every number but 0 for padding: the trap float_bias_becomes_mask.
    """
    padding = case.arguments.get("src_key_padding_mask")
    return isinstance(padding, Mask) and (padding.form == "bias" or all(padding.hidden))


def moves_on_the_fast_path(case: Case) -> bool:
    """Whether torch's fast path moves tokens to the front of padding: the trap mask_check_off."""
    padding = case.arguments.get("src_key_padding_mask")
    if case.part.arguments.get("mask_check") is not False or not isinstance(padding, Mask):
        return False
    length = padding.shape[-1]
    rows = (padding.hidden[start : start + length] for start in range(0, len(padding.hidden), length))
    return any(list(row) != sorted(row) for row in rows)


def everything(case: Case, call: Any, *, dtype: torch.dtype | None = None, gradients: bool = True) -> Everything:
    """Call a module or function with the inputs of a case, and give all that comes out by name.

    Args:
        case: Where the inputs and the seed of dropout come from.
        call: What ``case.construct`` gave.
        dtype: Another dtype than that of the case.
        gradients: Go backward from random gradients too; False calls under ``no_grad``, where torch.nn may take its
            fast path.

    Returns:
        The outputs, the gradients that went in there, and those of every input, float mask and parameter.
    """
    inputs = case.inputs(dtype=dtype, requires_grad=gradients)
    torch.manual_seed(case.seed)
    with torch.set_grad_enabled(gradients):
        results = call(**inputs)
    found: Everything = {
        f"output {i}": x for i, x in enumerate(results if isinstance(results, tuple) else (results,)) if x is not None
    }
    if not gradients:
        return found
    outputs = [x for x in found.values() if x is not None]
    incoming = [random_tensor(*x.shape, seed=2, dtype=x.dtype) for x in outputs]
    torch.autograd.backward(outputs, incoming)
    # Where every gradient is 0 but for rounding, as behind a LayerNorm of width 1, these tell how much is little.
    found |= {f"gradient into {name}": x for name, x in zip(list(found), incoming, strict=True)}
    leaves = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    parameters = dict(call.named_parameters()) if isinstance(call, nn.Module) else {}
    return found | {f"gradient of {name}": x.grad for name, x in {**leaves, **parameters}.items()}


class Tally(NamedTuple):
    """What was seen of one property of one component.

    Args:
        examples: Number of cases.
        compared: Number of tensors compared.
        identical: Number of those that were equal to the last bit.
        worst_ratio: The greatest error, over the built-in's own error against float64, where that was measured.
    """

    examples: int = 0
    compared: int = 0
    identical: int = 0
    worst_ratio: float = 0.0

    def plus(self, other: "Tally") -> "Tally":
        """Add another one up."""
        return Tally(
            self.examples + other.examples,
            self.compared + other.compared,
            self.identical + other.identical,
            max(self.worst_ratio, other.worst_ratio),
        )


class Ledger:
    """Tallies by component and property.

    >>> ledger = Ledger()
    >>> ledger.add("Transformer", "float64", Tally(examples=1, compared=4, identical=3))
    >>> ledger.add("Transformer", "float64", Tally(examples=1, compared=4, identical=4))
    >>> ledger.tallies["Transformer", "float64"].identical
    7
    """

    def __init__(self) -> None:
        self.tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)

    def add(self, component: str, name: str, tally: Tally) -> None:
        """Count one example, or what another process counted."""
        self.tallies[component, name] = self.tallies[component, name].plus(tally)

    def table(self) -> Table:
        """Draw one row for each property, under its component."""
        table = Table(
            box=box.SIMPLE_HEAD,
            title="Properties",
            title_justify="left",
            caption="ratio: the worst error, over torch.nn's own, against float64\n"
            "identical: the share of tensors that are equal to the last bit",
            caption_justify="left",
        )
        table.add_column("component and property")
        for heading in ("examples", "ratio", "identical"):
            table.add_column(heading, justify="right")
        component = ""
        for (name, title), tally in sorted(self.tallies.items()):
            if name != component:
                table.add_row(component := name)
            ratio = f"{tally.worst_ratio:.2f}" if tally.worst_ratio else "-"
            share = f"{100 * tally.identical / tally.compared:.1f} %" if tally.compared else "-"
            table.add_row(f"  {title}", str(tally.examples), ratio, share)
        return table


def assert_same(case: Case, actual: Everything, expected: Everything, relative_bound: float = FLOAT64_BOUND) -> Tally:
    """Require that outputs and gradients agree relative to the largest of their group; a bound of 0 means every bit.

    Returns:
        The tally of the example.
    """
    comparisons: list[Comparison] = []
    for kind in ("output", "gradient"):
        groups = [{name: x for name, x in side.items() if name.startswith(kind)} for side in (actual, expected)]
        comparisons += compare_group(*groups, relative_bound=relative_bound)
    comparisons = [x for x in comparisons if not x.name.startswith("gradient into")]
    failed = [x for x in comparisons if not x.passed]
    assert not failed, report_of(case, failed)
    return Tally(1, len(comparisons), sum(x.identical for x in comparisons))


def assert_ratios(case: Case, module: nn.Module, theirs: nn.Module, autocast: torch.dtype | None = None) -> Tally:
    """Require that no error is more than twice the built-in's plus a few units in the last place of the largest value.

    Few numbers may come out well by chance, and the next layer may make much of what is left: a LayerNorm of three
    equal numbers divides by next to nothing. What fails is judged again by the median of either's errors on parameters
    that differ in their last place.

    Args:
        case: What is called. Dropout is off: it draws other entries in float64.
        module: The candidate, in the dtype of the case.
        theirs: torch.nn's, with the same weights.
        autocast: Run both under autocast to this dtype, whose units count then.

    Returns:
        The tally of the example.
    """
    actual, builtin = (_lower_precision(case, x, autocast) for x in (module, theirs))
    ratios = _error_ratios(case, module, theirs, autocast)
    if not all(x.passed for x in ratios):
        ratios = _typical_ratios(case, module, theirs, autocast)
    failed = [x for x in ratios if not x.passed]
    assert not failed, report_of(case, failed)
    ratios = [x for x in ratios if not x.name.startswith("gradient into")]
    identical = sum(_identical(actual[x.name], builtin[x.name]) for x in ratios)
    # A ratio of two errors below the floor tells nothing.
    worst = max((x.ratio for x in ratios if x.candidate_error > x.floor), default=0.0)
    return Tally(1, len(ratios), identical, worst)


def _lower_precision(case: Case, module: nn.Module, autocast: torch.dtype | None) -> Everything:
    with fast_path(False), torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        return everything(case, module.eval())


def _jittered(module: nn.Module, dtype: torch.dtype, seed: int) -> nn.Module:
    """Copy a module and move its parameters by up to a unit in the last place of a dtype."""
    jittered = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in jittered.parameters():
            shift = 2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1
            parameter.copy_(parameter.double() * (1 + torch.finfo(dtype).eps * shift))
    return jittered


def _typical_ratios(case: Case, module: nn.Module, theirs: nn.Module, autocast: torch.dtype | None) -> list[ErrorRatio]:
    """Judge the medians of both errors over parameters close by."""
    nearby: defaultdict[str, list[ErrorRatio]] = defaultdict(list)
    for seed in range(NEIGHBOURS):
        moved = _jittered(theirs, autocast or case.dtype, seed)
        ours = copy.deepcopy(module)
        ours.load_state_dict(moved.state_dict())
        for x in _error_ratios(case, ours, moved, autocast):
            nearby[x.name].append(x)
    return [
        replace(
            some[0],
            candidate_error=statistics.median(x.candidate_error for x in some),
            builtin_error=statistics.median(x.builtin_error for x in some),
        )
        for some in nearby.values()
    ]


def _error_ratios(case: Case, module: nn.Module, theirs: nn.Module, autocast: torch.dtype | None) -> list[ErrorRatio]:
    actual, builtin = (_lower_precision(case, x, autocast) for x in (module, theirs))
    exact = case.construct(nn, weights_of=theirs, dtype=torch.float64).eval()
    with fast_path(False):
        reference = everything(case, exact, dtype=torch.float64)
    ratios: list[ErrorRatio] = []
    for kind in ("output", "gradient"):
        names = [name for name in builtin if name.startswith(kind)]
        largest = largest_value(x for name in names if (x := reference[name]) is not None)
        ratios += [
            compare_errors(
                actual.get(x), builtin[x], reference[x], name=x, largest=largest, rounded_to=autocast or case.dtype
            )
            for x in names
        ]
    return ratios


def _identical(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        return actual is expected
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


@dataclass(frozen=True)
class _Call:
    """One call of a module: where it stands, what it got and what it gave."""

    path: str
    module: nn.Module
    arguments: Mapping[str, Any]
    output: Tensor


def report_of(case: Case, failed: list[Any]) -> str:
    """Write what parted, the snippet that shows it, and the first place inside at which it does."""
    lines = [f"{len(failed)} of the tensors part:", *map(str, failed[:LISTED])]
    lines += [f"... and {len(failed) - LISTED} more"] if len(failed) > LISTED else []
    lines += ["", repr(case)]
    if not case.is_function and hasattr(nn, case.part.class_name):
        lines += ["", _where_they_part(case)]
    return "\n".join(lines)


def _where_they_part(case: Case) -> str:
    """Name the first module, in the order in which they finish, whose output parts, and the stage of an attention."""
    import scratch

    theirs = case.construct(nn, dtype=torch.float64)
    sides = []
    for module in (case.construct(scratch, weights_of=theirs, dtype=torch.float64), theirs):
        with fast_path(False), _calls_of(module) as calls:
            everything(case, module, dtype=torch.float64, gradients=False)
        sides.append({(call.path, number): call for number, call in _numbered(calls)})
    for (path, number), call in sides[1].items():
        ours = sides[0].get((path, number))
        parts = ours and first_stage_that_parts({"output": ours.output}, {"output": call.output})
        if ours and parts:
            return f"first module to part: {path or 'the module itself'}, {parts}{_stage_of(ours, call)}"
    return "forwards, off the fast path and in float64, the modules agree"


def _numbered(calls: list[_Call]) -> Iterator[tuple[int, _Call]]:
    seen: defaultdict[str, int] = defaultdict(int)
    for call in calls:
        yield seen[call.path], call
        seen[call.path] += 1


@contextmanager
def _calls_of(model: nn.Module) -> Iterator[list[_Call]]:
    calls: list[_Call] = []
    paths = {module: path for path, module in model.named_modules()}

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        first = output[0] if isinstance(output, tuple) else output
        calls.append(_Call(paths[module], module, arguments, first.detach()))

    handles = [module.register_forward_hook(watch, with_kwargs=True) for module in paths]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _stage_of(ours: _Call, theirs: _Call) -> str:
    """Name the stage at which two attentions part; torch.nn's last stages are what it gave itself."""
    if not isinstance(ours.module, MultiheadAttention):
        return ""
    names = ("query", "key", "value", "key_padding_mask", "attn_mask", "is_causal", "need_weights")
    traces = [
        trace_attention(call.module, **{name: x for name, x in call.arguments.items() if name in names})  # type: ignore[arg-type]
        for call in (ours, theirs)
    ]
    with torch.no_grad():
        traces[0]["output"] = ours.output
        traces[1]["output"] = theirs.output
        if theirs.arguments.get("need_weights", True) and not theirs.module.training:
            traces[1]["weights"] = theirs.module(**{**theirs.arguments, "average_attn_weights": False})[1]
    parts = first_stage_that_parts(*traces)
    return f"\nfirst stage to part there: {parts}" if parts else ""
