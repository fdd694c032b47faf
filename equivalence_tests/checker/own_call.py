"""Check every attention that runs in a model when it is called with the user's own inputs."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.running import Call, in_dtype, inputs_of
from equivalence_tests.checker.equivalent.calls import diagnose_call
from equivalence_tests.checker.equivalent.comparing import Case
from equivalence_tests.checker.equivalent.locating import locate_in_call
from equivalence_tests.checker.equivalent.part_holding import EXACT, SINGLE, WrittenPart, hold_part
from equivalence_tests.checker.equivalent.subjects import examine_attention
from equivalence_tests.checker.layers.walk import mark_of
from equivalence_tests.checker.parts.checking import examine_part
from equivalence_tests.checker.parts.kinds import guess_kind, is_attention_alone, is_torchs, kind_of
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.subject import Adapter
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import PARTS, Finding
from equivalence_tests.checker.reporting.lines import raised_at
from equivalence_tests.checker.reporting.report import Report

NO_ATTENTION = "No attention runs in"


def examine_call(function: Any, inputs: Any, name: str, intended: Mapping[str, str]) -> list[Report]:
    """Run a call once, watched, and judge every attention in it, in their order.

    A module is copied, put into eval mode and into float64, or left in its own precision if it does not run in float64.
    The inputs are a dictionary of arguments by name, a tuple or list of arguments, both as (args, kwargs), one tensor,
    or a function that gives any of these.
    """
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise CannotCheckError(
            f"{name} is a class. Inputs are for an instance: name one, built as model = {function.__name__}(...)."
        )
    args, kwargs = _as_call(inputs() if callable(inputs) and not isinstance(inputs, Tensor) else inputs)
    last = ""
    for dtype in (torch.float64, None):
        ready, given_args, given_kwargs = _prepared(function, args, kwargs, dtype)
        try:
            output = Call(ready, given_args, given_kwargs).run(read=False).output
            if dtype is not None and any(bool(x.isnan().any()) for x in tensors_in((output,))):
                continue  # a mask filled with the lowest float64 overflows in code that casts it to float32: NaN
        except Exception as error:  # the user's code may raise anything
            last = said(error) + raised_at(error)
            continue
        return _judged(ready, given_args, given_kwargs, name, intended)
    raise CannotCheckError(f"The call of {name} with these inputs failed: {last}")


def _judged(
    ready: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, intended: Mapping[str, str]
) -> list[Report]:
    """Judge the attentions of a call that runs, those in TorchScript by what comes back; else a part that it may be."""
    module = getattr(ready, "__self__", None)  # of a method
    module = module if isinstance(module, nn.Module) else None
    alike, call = dict[Any, Report | None](), Call(ready, args, kwargs, module)
    found = diagnose_call(call, name=name, intended=dict(intended))
    found = [_looked_at_closely(report, call, intended, alike) for report in found]
    scripted = dict(_scripted(module or ready))
    compared = list(_compared(scripted, name, intended))
    found += [report for report in compared if report.verdict == "partial"] if found else compared
    if not found and scripted:
        raise CannotCheckError(f"TorchScript runs in {name}, which hides its operations.")
    if not found and guess_kind(ready) in PARTS and not is_torchs(ready):
        found = [_part(ready, args, kwargs, name, intended)]
    if not found:
        raise CannotCheckError(f"{NO_ATTENTION} {name}: no product of queries and keys weighs values there.")
    unread = ", ".join(sorted(scripted.keys() - {report.place for report in found}))
    found[0].notes += [f"TorchScript hides what runs in {unread}"] if unread else []
    return found


def _looked_at_closely(
    report: Report, call: Call, intended: Mapping[str, str], alike: dict[Any, Report | None]
) -> Report:
    """Where one call does not say what is wrong, look closely at what holds the attention; of parts alike, at one.

    It is run without one of its expressions, and called in other ways too. What is no more than seen there, as that a
    mask is ignored, says nothing of this call.
    """
    owner = call.module or call.function
    around = [report.place, report.place.rpartition(".")[0]] if isinstance(owner, nn.Module) else [""]
    was_read = bool(report.conventions)  # else what was handed over holds NaN
    for path in dict.fromkeys(around) if report.verdict == "unchecked" and was_read else ():
        part = owner.get_submodule(path) if isinstance(owner, nn.Module) and path else owner
        mark = mark_of(part) if isinstance(part, nn.Module) else part
        if mark not in alike:
            alike[mark] = _closer(report, call, path, part, intended) if _is_an_attention(part) else None
        other = alike[mark]
        if other is not None:
            return replace(other, place=report.place)
    return report


def _closer(report: Report, call: Call, path: str, part: Any, intended: Mapping[str, str]) -> Report | None:
    """Give a report with a proof on what holds an attention; None where there is none."""
    calls = inputs_of({path: part}, call.returned) if isinstance(part, nn.Module) else []
    for _, args, kwargs in calls[:1]:
        locate_in_call(own := replace(report), Call(part, args, kwargs), intended)
        if own.findings:
            return own
    norms = list(_norms_of(report, part, intended)) if isinstance(part, nn.Module) else []
    if norms:
        return replace(report, verdict="deviates", reason="", findings=norms, suspected=[])
    other = _in_other_calls(part, report.target, intended)
    proven = other is not None and any(one.proof is not None and one.proof.holds for one in other.findings)
    return other if proven else None


def _norms_of(report: Report, part: nn.Module, intended: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the norms inside of an attention, where one of them seems not to normalise."""
    suspected = any(one.name == "norm_leaves_different_sizes" for one in report.suspected)
    norms = {path: x for path, x in part.named_modules() if kind_of(path, x) == "layer_norm" and not is_torchs(x)}
    for path, norm in norms.items() if suspected else ():
        with contextlib.suppress(CannotCheckError):
            found = examine_part(norm, report.target, "layer_norm", Adapter(intended=intended), where=path)
            yield from (one for one in found.findings if found.verdict == "deviates" and one.is_proven)


def _is_an_attention(part: Any) -> bool:
    """Whether the user's own code is an attention and no more."""
    if not isinstance(part, nn.Module):
        return True
    return not is_torchs(part) and (guess_kind(part) == "attention" or is_attention_alone(part))


def _in_other_calls(part: Any, name: str, intended: Mapping[str, str]) -> Report | None:
    """Check an attention in calls of the checker's own; None where it cannot be called."""
    with contextlib.suppress(CannotCheckError):
        return examine_attention(part, name, Adapter(intended=intended))
    return None


def _part(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, intended: Mapping[str, str]
) -> Report:
    """Check a norm, a feed-forward or an encoding of positions, and compare what it gives for the user's own inputs."""
    report = examine_part(module, name, guess_kind(module), Adapter(intended=intended))
    known = report.equivalent
    if report.verdict != "equal" or known is None:
        return report
    case = Case(Call(module, *in_dtype((args, kwargs), None)), None, "your own inputs")
    exact = any(x.dtype == torch.float64 for x in tensors_in((args, kwargs)))
    hold_part(report, WrittenPart(known), [case], tolerance=max(EXACT if exact else SINGLE, known.difference))
    if report.equivalent is not None:
        report.equivalent = replace(report.equivalent, compared=(*known.compared, *report.equivalent.compared))
    return report


def _scripted(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost parts that run as TorchScript, with their paths."""
    if isinstance(getattr(part, "__wrapped__", part), torch.jit.ScriptModule | torch.jit.ScriptFunction):
        yield path, part
    elif isinstance(part, nn.Module):
        for name, child in part.named_children():
            yield from _scripted(child, f"{path}.{name}" if path else name)


def _compared(scripted: Mapping[str, Any], name: str, intended: Mapping[str, str]) -> Iterator[Report]:
    """Compare the outputs of scripted parts, which cannot be watched, if they can be called as attentions."""
    for path, part in scripted.items():
        report = _in_other_calls(part, name, intended)
        if report is not None:
            yield replace(report, place=path)


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return inputs[0], inputs[1]
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _prepared(function: Any, args: Any, kwargs: Any, dtype: torch.dtype | None) -> tuple[Any, Any, Any]:
    """Copy a module and its inputs, in eval and in this precision; of a method, the module that it belongs to."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        try:
            copied = copy.deepcopy(owner)
        except Exception as error:
            raise CannotCheckError(f"The model cannot be deep-copied: {type(error).__name__}: {error}") from error
        copied.eval()  # not chained: a user's own train() may return None
        copied = copied if dtype is None else copied.to(dtype)
        function = copied if owner is function else MethodType(function.__func__, copied)
    return function, *in_dtype((args, kwargs), dtype)
