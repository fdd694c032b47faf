"""verify: check anybody's attention against torch.nn, and name its bug."""

import functools
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import nn

from equivalence_tests.checker.equivalent.reading import SEVERAL
from equivalence_tests.checker.equivalent.subjects import examine_attention
from equivalence_tests.checker.intended import accepted, check_intended
from equivalence_tests.checker.layers.walking import examine_layers
from equivalence_tests.checker.mistakes import found_mistake
from equivalence_tests.checker.own_call import examine_call
from equivalence_tests.checker.parts.checking import examine_part
from equivalence_tests.checker.parts.kinds import guess_kind, kind_of, there_and_back
from equivalence_tests.checker.reach.absent import ABSENCES
from equivalence_tests.checker.reach.branches import RAN
from equivalence_tests.checker.reach.crashes import CRASHES
from equivalence_tests.checker.reach.devices import LEFT, on_cpu_where_a_gpu_is_asked_for
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.loading import check_forward, inside_wrappers, load, with_signature
from equivalence_tests.checker.reach.model_calls import taken_by_losses
from equivalence_tests.checker.reach.registering import REGISTERING, TENSOR
from equivalence_tests.checker.reach.state import outside_modes, preserved_global_state, seen_constructors, uncompiled
from equivalence_tests.checker.reach.subject import Adapter, subjects
from equivalence_tests.checker.reach.tried import TRIED
from equivalence_tests.checker.reporting.findings import KINDS, Exercise, Finding
from equivalence_tests.checker.reporting.lines import raised_at
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.template import template_of
from scratch.validation import check_choice

MANY = 4  # findings of one kind at one line, of which one is shown
FALLBACKS = ("feed_forward", "positional_encoding", "layers", "attention")


@overload
def verify(
    target: Any,
    inputs: None = None,
    *,
    kind: str | None = None,
    adapter: Adapter | None = None,
    progress: Callable[[str], None] = ...,
    intended: Mapping[str, str] | None = None,
    run_all: bool = False,
) -> Report: ...


@overload
def verify(
    target: Any,
    inputs: Any,
    *,
    kind: str | None = None,
    adapter: Adapter | None = None,
    progress: Callable[[str], None] = ...,
    intended: Mapping[str, str] | None = None,
    run_all: bool = False,
) -> list[Report]: ...


def verify(
    target: Any,
    inputs: Any = None,
    *,
    kind: str | None = None,
    adapter: Adapter | None = None,
    progress: Callable[[str], None] = lambda text: None,
    intended: Mapping[str, str] | None = None,
    run_all: bool = False,
) -> Report | list[Report]:
    """Check an attention (or another part of a Transformer) against the built-in, and name its mistakes.

    How the code is built and called, which parameter is which, and what its masks mean is found out by inspection
    and by trying. Weights are read out of the module and randomised in a copy; the module itself stays as it was.

    Args:
        target: "file.py:Name", "module.path:Name", a class, an instance, a function, or a factory without arguments.
        inputs: What the target, an instance or a function, is called with, where that is not to be worked out: a
            dictionary of arguments by name, a tuple or list of arguments, or one tensor.
        kind: One of ``KINDS``; inferred from the name if not given.
        adapter: What the checker could not find out by itself.
        progress: Receives a line of text now and then.
        intended: Which deviations are on purpose, and which checks may fail: the name -> the reason. They are reported
            and do not count against the code.
        run_all: Run every cell of a notebook, not only its imports and definitions.

    Returns:
        A ``Report``; print it. With ``inputs`` a list, one report for each attention that ran.

    Raises:
        ValueError: For an unknown kind, or a deviation without a reason or of no known name.

    In torch.nn: the built-in that it is compared with, ``nn.MultiheadAttention`` for an attention.

    >>> def attention(query, key, value):
    ...     return (query @ key.mT / query.size(-1) ** 0.5).softmax(-1) @ value
    >>> print(verify(attention).verdict)
    equal
    """
    if kind is not None:
        check_choice("kind", kind, KINDS)
    own = adapter.intended if adapter else {}
    given = check_intended({**own, **(intended or {})})
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)

    def checked() -> list[Report]:
        found, wrapped = inside_wrappers(with_signature(load(target, run_all)))
        TRIED.begin(found)
        # Whatever the caller, or the imported file, has set.
        with torch.inference_mode(False), torch.enable_grad(), uncompiled(), outside_modes(found) as mode:
            if inputs is not None:
                reports = examine_call(found, inputs, name, given)
            else:
                reports = [_verify(found, name, kind, replace(adapter or Adapter(), intended=given), progress)]
                reports[0].template = template_of(found, target, reports[0], kind) if adapter is None else ""
        TRIED.begin(None)  # or it would hold the user's model and inputs
        for report in reports:
            report.notes += without(wrapped)
            _add_mode(report, mode)
            if inputs is None:
                _add_unrun(report, found)
        return reports

    reports = [accepted(report, given) for report in _guarded(checked, name)]
    return reports if inputs is not None else reports[0]


def without(wrapped: Sequence[str]) -> list[str]:
    """Say that what was checked runs inside of something else."""
    return [f"run inside {name}, and checked without it" for name in wrapped]


def _add_mode(report: Report, mode: str) -> None:
    """Say that a forward gives no gradients, and that it was checked without the decorator that takes them."""
    if mode and report.verdict in ("equal", "partial"):
        said = f"forward runs under torch.{mode}, so that its weights get no gradients; it was compared without that"
        report.coverage.append(Exercise("training", False, said))
        report.verdict = "partial"


def _add_unrun(report: Report, found: Any) -> None:
    """List the ways of the code that no call that was compared has taken, and what would raise on a GPU."""
    if report.verdict in ("equal", "partial"):
        told = [*report.not_exercised, *(one for one in report.coverage if "=" in one.what)]
        listed = {re.split(r"\W", one.what)[0] for one in told}
        report.coverage += RAN.never(found, listed | taken_by_losses(found if isinstance(found, type) else type(found)))
        report.coverage += LEFT.listed()
        report.verdict = "partial" if report.not_exercised else report.verdict


def _guarded(checked: Callable[[], list[Report]], name: str) -> list[Report]:
    """Check with the global state preserved; whatever breaks off is a report too."""
    with preserved_global_state() as printed:
        torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other
        reports, asked = on_cpu_where_a_gpu_is_asked_for(lambda: _reports(checked, name))
    for report in reports:
        report.notes += [] if asked is None else [f"run on the CPU, though it names a GPU{raised_at(asked)}"]
        _add_crashes(report)
        _add_unregistered(report)
        _add_shared(report)
        report.findings = list(_each_once(report.findings))
        ABSENCES.tell(report)
        if printed.getvalue().strip():
            report.notes.append("the code prints while it runs; the output was kept out of this report")
    return reports


def _reports(checked: Callable[[], list[Report]], name: str) -> list[Report]:
    """Check, with nothing known from before."""
    for known in (ABSENCES, CRASHES, LEFT, RAN, REGISTERING):
        known.forget()
    try:
        return checked()
    except CannotCheckError as error:
        reason = str(error)
    except SystemExit as error:
        reason = f"It ends the process: exit({error.code}){raised_at(error)}."
    except Exception as error:  # code that changes torch under our feet can break anything of ours
        what, own = said(error), raised_at(error)
        why = f"this code itself raises {what}{own}" if own else f"{what}, in the checker, not in this code"
        reason = f"The check stopped: {why}"
    return [Report(name, reason=reason)]


def _add_crashes(report: Report) -> None:
    """Report what the code raised that no call avoids; of a file that was checked, not what importing it raised."""
    told, unchecked = {finding.line for finding in report.findings}, report.verdict == "unchecked"
    found, ran = CRASHES.found if unchecked else CRASHES.in_calls, bool(report.conventions)
    crashes = [one for one in found if one.stack[-1] not in told and not (ran and one.may_run)]
    if crashes:
        report.verdict, report.reason = "deviates", "" if unchecked else report.reason
    report.findings[:0] = [
        found_mistake("line_raises", {"said": x.said, "change": x.fix}, stack=x.stack, evidence=f"{x.why}.")
        for x in crashes
    ]


def _add_unregistered(report: Report) -> None:
    """Report the modules that were found in plain lists, and the tensors to be learnt that are no parameters."""
    for one in REGISTERING.found.values():
        what, held = ("tensor", "numbers") if one.kind == TENSOR else ("modules", "parameters")
        facts = {"what": f"self.{one.name}", "kind": one.kind, "to": f"nn.Module{one.kind.title()}"}
        facts["to"] = facts["to"].replace("Tuple", "List")
        evidence = f"parameters() and state_dict() name none of the {one.weights} {held} in it."
        report.findings.append(found_mistake(f"{what}_not_registered", facts, stack=one.stack, evidence=evidence))
        report.verdict, report.reason = "deviates", ""


def _add_shared(report: Report) -> None:
    """Note the modules that a class holds under two names, so that both have the same weights."""
    for (owner, name), first in REGISTERING.twice.items():
        report.notes.append(f"in {owner.__name__}, {first} and {name} are the same module and share their weights")


def _each_once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Give the first of what is named alike at one line of one part, and say how many there are."""
    for first, count in Counter((one.name, one.where, one.stack) for one in findings).items():
        alike = [one for one in findings if (one.name, one.where, one.stack) == first]
        more = f"{count - 1} more of this kind are found at this line."
        yield from alike if count < MANY else [replace(alike[0], evidence=f"{alike[0].evidence} {more}".strip())]


@seen_constructors()
def _verify(found: Any, name: str, kind: str | None, adapter: Adapter, progress: Callable[[str], None]) -> Report:
    """Check as the kind that is given, or that the name suggests; a name that misleads is seen through."""
    guess = kind or guess_kind(found)
    if adapter.call is None and guess != "layers":  # of a model the methods that build its masks are checked too
        check_forward(found)
    examined_as = functools.partial(_examined_as, found=found, name=name, adapter=adapter, progress=progress)
    makes_it = inspect.isroutine(found) and guess == "layers"  # what a factory makes says more than its own name
    as_named = guess in ("layers", "mask_builder") or (guess == "attention" and adapter.call is not None)
    if not kind and (makes_it or not as_named):
        guess = _kind_by_structure(found, name, adapter) or guess or "attention"
    others = () if kind else [one for one in FALLBACKS if one != guess]
    first = examined_as(guess)
    several = SEVERAL in first.unread
    holds_more = not kind and bool(first.unread) and guess == "attention" and (several or guess_kind(found) == "")
    if _says_enough(first, holds_more):
        return first
    if holds_more or (guess == guess_kind(found) == "attention" and first.conventions):
        others = others and ["layers"]  # what is called attention, and can be called as one, may hold more than that
    for other in others:
        try:
            report = examined_as(other, right=True)
        except Exception:  # taken for what it is not, it may fail in any way; the first report says why
            continue
        # What deviates from a part that its name does not speak of is most likely something else.
        in_part = report.verdict == "partial" and (holds_more or report.equivalent is not None)
        reads_more = report.verdict == "equal" or in_part
        is_layers = several and other == "layers"  # its name says attention, and it is made of several
        if reads_more or ((other == FALLBACKS[-1] or is_layers) and report.verdict == "deviates"):
            return report
    return first


def _says_enough(report: Report, holds_more: bool) -> bool:
    """Whether a report is of what the code is, so that it is not taken for something else."""
    if report.verdict != "unchecked" or CRASHES.in_calls or report.equivalent:
        return True
    return not holds_more and bool(report.unread or any(check.outcome == "passed" for check in report.checks))


def _examined_as(
    one: str, found: Any, name: str, adapter: Adapter, progress: Callable[[str], None], right: bool = False
) -> Report:
    """Check as one kind; with ``right``, of a part that may be something else, only whether it is a right one."""
    try:
        if one == "attention":
            return examine_attention(found, name, adapter, progress)
        if one == "layers":
            return examine_layers(found, name, adapter)
        return examine_part(found, name, one, adapter, right=right)
    except CannotCheckError as error:
        return Report(name, reason=str(error))


def _kind_by_structure(found: Any, name: str, adapter: Adapter) -> str:
    """Tell from its parts what something is whose name says nothing, or the wrong thing; "" if they do not either."""
    try:
        # Where an argument may mean two widths, the first guess can make all of them one.
        few = itertools.islice(subjects(found, name, adapter), 2)
        kinds = [_kind_of_parts(subject.module) for subject in few if subject.module is not None]
    except CannotCheckError:
        return ""
    return next((kind for kind in kinds if kind), "")


def _kind_of_parts(module: nn.Module) -> str:
    named = guess_kind(module)  # a factory says less than what it makes
    every = [kind_of(path, child) for path, child in module.named_modules() if path]
    kinds, embeds = {*every}, any(isinstance(m, nn.Embedding | nn.Conv2d) for m in module.modules())
    may_be_one = named == "attention" and every.count("attention") < 2  # which may norm inside
    around = {"feed_forward"} if may_be_one else {"layer_norm", "feed_forward"}
    is_model = not named and embeds and every.count("attention") > 1
    if kinds & {"attention", "layers"} and (kinds & around or is_model):
        return "layers"
    if named:
        return named
    return "feed_forward" if there_and_back(module) else ""
