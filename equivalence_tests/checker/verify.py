"""verify: check anybody's attention against torch.nn, and name its bug."""

import copy
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, overload

import torch
from torch import nn

from equivalence_tests.checker.attention import AttentionExamination, examine
from equivalence_tests.checker.blame import related_sources
from equivalence_tests.checker.causality import causal_claim
from equivalence_tests.checker.checks import Examined, attention_checks, run_check
from equivalence_tests.checker.construction import prepare
from equivalence_tests.checker.describe import confirm, conventions_of, findings_of, structural_finding
from equivalence_tests.checker.diagnosis import Effort, Match
from equivalence_tests.checker.engine.subjects import diagnose_subject
from equivalence_tests.checker.errors import CannotCheckError
from equivalence_tests.checker.findings import CheckResult, Finding
from equivalence_tests.checker.inner import words_of
from equivalence_tests.checker.kept_state import changed_by_calls
from equivalence_tests.checker.loading import load, with_signature
from equivalence_tests.checker.own_call import examine_call
from equivalence_tests.checker.parts import PART_KINDS, examine_part, guess_kind, there_and_back
from equivalence_tests.checker.report import Report
from equivalence_tests.checker.state import preserved_global_state
from equivalence_tests.checker.subject import Adapter, Subject, subjects
from equivalence_tests.checker.tracing import dropped_scores, modules_created
from equivalence_tests.checker.walking import kind_of
from scratch.validation import check_choice

__all__ = ["KINDS", "verify"]

KINDS = ("attention", *PART_KINDS)
FALLBACKS = ("feed_forward", "positional_encoding", "layers", "attention")
# How long something that can be called as the kind that its name tells is looked at as an attention, in seconds.
SECOND_LOOK = 2.0
# What these find is worth knowing and no proof of a wrong number.
NOT_JUDGED = ("check_every_parameter_gets_a_gradient", "check_fully_masked_rows")


@overload
def verify(
    target: Any,
    inputs: None = None,
    *,
    kind: str | None = None,
    adapter: Adapter | None = None,
    expected_failures: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = ...,
    seconds: float = 15.0,
    meant: Mapping[str, str] | None = None,
    run_all: bool = False,
) -> Report: ...


@overload
def verify(
    target: Any,
    inputs: Any,
    *,
    kind: str | None = None,
    adapter: Adapter | None = None,
    expected_failures: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = ...,
    seconds: float = 15.0,
    meant: Mapping[str, str] | None = None,
    run_all: bool = False,
) -> list[Report]: ...


def verify(
    target: Any,
    inputs: Any = None,
    *,
    kind: str | None = None,
    adapter: Adapter | None = None,
    expected_failures: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    seconds: float = 15.0,
    meant: Mapping[str, str] | None = None,
    run_all: bool = False,
) -> Report | list[Report]:
    """Check an attention (or another part of a Transformer) against the built-in, and name its mistakes.

    How the code is built and called, which parameter is which, and how masks are meant is found out by inspection
    and by trying. Weights are read out of the module and randomised in a copy; the module itself stays as it was.

    Args:
        target: "file.py:Name", "module.path:Name", a class, an instance, a function, or a factory without arguments.
        inputs: What the target, an instance or a function, is called with, where that is not to be worked out: a
            dictionary of arguments by name, a tuple or list of arguments, or one tensor.
        kind: One of ``KINDS``; told from the name if not given.
        adapter: What the checker could not find out by itself.
        expected_failures: Names of checks that may fail, each with the reason why that is right.
        progress: Receives a line of text now and then.
        seconds: How long the search for mistakes may take.
        meant: Which deviations are on purpose: the name of the finding -> the reason.
        run_all: Run every cell of a notebook, not only its imports and definitions.

    Returns:
        A ``Report``; print it. With ``inputs`` a list, one report for each attention that ran.

    Raises:
        ValueError: For an unknown kind, or an expected failure without a reason.

    In torch.nn: the built-in that it is compared with, ``nn.MultiheadAttention`` for an attention.

    >>> def attention(query, key, value):
    ...     return (query @ key.mT / query.size(-1) ** 0.5).softmax(-1) @ value
    >>> print(verify(attention).verdict)
    equal
    """
    if kind is not None:
        check_choice("kind", kind, KINDS)
    for check, reason in (expected_failures or {}).items():
        check_choice("expected_failures", bool(reason.strip()) or check, (True,))
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)

    def checked() -> list[Report]:
        found = with_signature(load(target, run_all))
        with torch.enable_grad():  # a file that is imported may switch gradients off
            if inputs is not None:
                return examine_call(found, inputs, name, meant or {})
            return [_verify(found, name, kind, adapter or Adapter(), progress, seconds)]

    reports = [_excuse(report, expected_failures or {}) for report in _guarded(checked, name)]
    return reports if inputs is not None else reports[0]


def _guarded(checked: Callable[[], list[Report]], name: str) -> list[Report]:
    """Check with the global state preserved; whatever breaks off is a report too."""
    threads = torch.get_num_threads()
    with preserved_global_state() as printed:
        try:
            torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other
            reports = checked()
        except CannotCheckError as error:
            reports = [Report(name, reason=str(error))]
        except SystemExit as error:
            reports = [Report(name, reason=f"It ends the process (SystemExit {error.code}).")]
        except Exception as error:  # code that changes torch under our feet can break anything of ours
            reports = [Report(name, reason=f"The check broke off with {type(error).__name__}: {error}")]
        finally:
            torch.set_num_threads(threads)
    if printed.getvalue().strip():
        for report in reports:
            report.notes.append("the code prints while it runs; the output was kept out of this report")
    return reports


def _verify(
    found: Any, name: str, kind: str | None, adapter: Adapter, progress: Callable[[str], None], seconds: float
) -> Report:
    """Check as the kind that is given, or that the name suggests; a name that misleads is seen through."""

    def examined_as(one: str) -> Report:
        if one == "attention":
            return verify_found(found, name, adapter, progress, time)
        return examine_part(found, name, one, adapter)

    guess = kind or guess_kind(found)
    if not kind and (guess not in ("attention", "layers", "mask_builder") or _makes_something(found, guess)):
        guess = _kind_by_structure(found, name, adapter) or guess or "attention"
    others = () if kind else [one for one in FALLBACKS if one != guess]
    time = seconds
    first = _or_unchecked(examined_as, guess, name)
    time = min(seconds, SECOND_LOOK) if first.kind else seconds  # what cannot be called so has a misleading name
    if first.verdict != "unchecked" or any(check.outcome == "passed" for check in first.checks):
        return first
    if guess == guess_kind(found) == "attention" and first.conventions:
        others = others and ["layers"]  # what is called attention, and can be called as one, may hold more than that
    for other in others:
        report = _or_unchecked(examined_as, other, name)
        # What deviates from a part that its name does not speak of is most likely something else.
        if report.verdict == "equal" or (other == FALLBACKS[-1] and report.verdict == "deviates"):
            return report
    return first


def _makes_something(found: Any, guess: str) -> bool:
    """Whether it is a factory: what it makes says more than its own name."""
    return inspect.isroutine(found) and guess == "layers"


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
    kinds = {kind_of(path, child) for path, child in module.named_modules() if path}
    if named != "attention" and "attention" in kinds and kinds & {"layer_norm", "feed_forward"}:
        return "layers"
    if named:
        return named
    return "feed_forward" if there_and_back(module) else ""


def _or_unchecked(examined_as: Callable[[str], Report], kind: str, name: str) -> Report:
    try:
        return examined_as(kind)
    except CannotCheckError as error:
        return Report(name, reason=str(error))


def verify_found(
    found: Any,
    name: str,
    adapter: Adapter | None = None,
    progress: Callable[[str], None] = lambda text: None,
    seconds: float = 20.0,
) -> Report:
    """Check an attention that has been imported already; the caller preserves the global state."""
    errors: list[str] = []
    watched: Report | None = None
    for subject in subjects(found, name, adapter or Adapter()):
        progress(f"built {name} with {subject.sizes.num_heads} heads of {subject.sizes.head_dim}")
        watched = _watched(subject, errors)
        if watched is not None:
            break  # what can be built and called at these sizes is not to be excused at easier ones
    if watched is not None and _is_proven(watched) and all(f.fix for f in watched.findings):
        return watched
    searched = _searched(found, name, adapter, progress, seconds)
    if watched is None or searched.verdict == "deviates":
        return searched
    if _is_proven(watched):
        return watched
    return _with_coverage(searched, watched) if searched.verdict == "equal" else searched


def _is_proven(watched: Report) -> bool:
    """Whether every finding was put right, and each was needed for the output to be torch's."""
    return bool(watched.findings) and all(f.proof is not None and f.proof.holds for f in watched.findings)


def _with_coverage(searched: Report, watched: Report) -> Report:
    """Say of what is equal what was not run."""
    told = " ".join(["the output", *(f"{what} {found}" for what, found, _ in searched.conventions)])
    searched.coverage = [x for x in watched.coverage if x.exercised or not re.search(rf"\b{re.escape(x.what)}\b", told)]
    if searched.not_exercised:
        searched.verdict = "partial"
    return searched


def _searched(
    found: Any,
    name: str,
    adapter: Adapter | None,
    progress: Callable[[str], None],
    seconds: float,
) -> Report:
    """Search for known mistakes that reproduce the output, where watching proved nothing."""
    errors: list[str] = []
    best: AttentionExamination | None = None
    effort = Effort(seconds, progress)
    for subject in subjects(found, name, adapter or Adapter()):
        if best is not None and effort.exhausted:
            break
        progress(f"built {name} with {subject.sizes.num_heads} heads of {subject.sizes.head_dim}")
        examination = _examine(subject, effort, errors)
        if examination is None or (best is not None and not _believed(examination, best)):
            continue
        best = examination
        effort.most = 1  # what nothing explained at one size may still be read at another
        if examination.matches:
            break
    if best is None:
        raise CannotCheckError(_cannot_call(errors))
    return _report(best, name)


def _watched(subject: Subject, errors: list[str]) -> Report | None:
    """Watch one built subject run, in float64; in float32 where float64 cannot be called."""
    subject.function = _copy(subject.function)
    for dtype in (torch.float64, torch.float32):
        subject.dtype = dtype
        torch.set_default_dtype(dtype)
        if subject.module is not None:
            prepare(subject.module, dtype)
        report = diagnose_subject(subject, errors)
        if report is not None:
            return report
    return None


def _believed(later: AttentionExamination, earlier: AttentionExamination) -> bool:
    """Whether a match is believed after other sizes stayed unexplained: no scale that fits these sizes by chance."""
    scaled = any(mistake.slot == "scale" for match in later.matches for mistake in match.mistakes)
    return bool(later.matches) and not (scaled and later.subject.sizes != earlier.subject.sizes)


def _examine(subject: Subject, effort: Effort, errors: list[str]) -> AttentionExamination | None:
    """Examine in float64; in float32 where float64 cannot be called."""
    subject.function = _copy(subject.function)
    for dtype in (torch.float64, torch.float32):
        subject.dtype = dtype
        torch.set_default_dtype(dtype)
        if subject.module is not None:
            prepare(subject.module, dtype)
        examination = examine(subject, effort, errors)
        if examination is not None:
            return examination
    return None


def _copy(function: Any) -> Any:
    """Leave the user's own instance alone."""
    if not isinstance(function, nn.Module):
        return function
    try:
        return copy.deepcopy(function)
    except Exception:  # some modules cannot be copied; their weights are put back by nobody
        raise CannotCheckError("the instance cannot be deep-copied; pass its class or a factory instead") from None


def _cannot_call(errors: list[str]) -> str:
    shown = "\n".join(f"  {text}" for text in list(dict.fromkeys(errors))[:4])
    answered = f"Its forward answered:\n{shown}\n" if shown else "Its forward names no argument to pass tensors to. "
    return (
        f"No way to call it as an attention was found. {answered}"
        "Give Adapter(call=lambda module, query, key, value, may_attend: ...), or --kind if it is something else."
    )


def _report(examination: AttentionExamination, name: str) -> Report:
    report = Report(name, _kind_words(examination), conventions=conventions_of(examination))
    report.findings = _behaviour_findings(examination)
    examination.matches = list(_confirmed(examination))
    if examination.match is None:
        return _unexplained(report, examination)
    examined = Examined(examination, examination.match)
    report.findings += findings_of(examination)
    report.findings += _cross_findings(examination, report)
    report.findings += _causal_findings(examination)
    report.checks = [run_check(check, examined) for check in attention_checks()]
    report.findings += _check_findings(examination, report)
    report.notes += _notes(examination, report)
    failed = [c for c in report.checks if c.outcome == "failed" and c.name not in NOT_JUDGED]
    report.verdict = "deviates" if failed or report.findings else "equal"
    if failed and not report.findings:
        report.reason = _what_does_not_hold(failed)
    return report


def _confirmed(examination: AttentionExamination) -> Iterator[Match]:
    """Keep the mistakes that reproduce the output on fresh inputs and other weights too."""
    for match in examination.matches:
        error, _, count = confirm(examination, match) if match.mistakes else (0.0, 0.0, 0)
        if not count or error <= (1e-4 if match.float32_inside else 1e-7):
            yield match


def _what_does_not_hold(failed: list[CheckResult]) -> str:
    """Say in words what a verdict without a finding rests on."""
    said = {check.__name__: (check.__doc__ or "").partition("\n")[0].rstrip(".") for check in attention_checks()}
    return "No known mistake explains it. What does not hold: " + "; ".join(said[c.name] for c in failed) + "."


def _kind_words(examination: AttentionExamination) -> str:
    has_weights = examination.subject.module is not None and any(True for _ in examination.subject.module.parameters())
    return "multi-head attention" if has_weights else "attention function"


def _behaviour_findings(examination: AttentionExamination) -> list[Finding]:
    """What the calls show before any number is compared."""
    findings = []
    if examination.subject.quiet_dropout:
        findings.append(
            _structural(
                "dropout_in_eval",
                "two calls in eval differ, and are equal with dropout held back",
                examination,
            )
        )
    plan = examination.match.reading.plan if examination.match else examination.plans[0]
    inputs = examination.inputs(plan)
    with modules_created() as created, torch.no_grad():
        examination.caller.returned(plan, inputs)
    trained = [made for made in created if made in ("Linear", "LayerNorm", "Embedding", "Conv1d")]
    if trained:
        evidence = f"each call constructs {', '.join(trained)}"
        findings.append(_structural("layer_made_in_forward", evidence, examination))
    module = examination.subject.module
    if module is not None and dropped_scores(
        module, lambda: examination.caller.returned(plan, inputs), (inputs.query.size(1), inputs.key.size(1))
    ):
        evidence = "in training, what goes into dropout is (query, key) large and its rows do not sum to one"
        findings.append(_structural("dropout_on_scores", evidence, examination))
    return findings


def _cross_findings(examination: AttentionExamination, report: Report) -> list[Finding]:
    """What is wrong only where the second tensor is given."""
    cross = examination.cross
    if cross is None or cross.match is None:
        return []
    where = f"with {', '.join(name for name, role in cross.plans[0].roles if role in ('memory', 'key', 'value'))}"
    found = findings_of(cross)
    return [replace(finding, where=where) for finding in found if finding.name not in report.mistakes]


def _causal_findings(examination: AttentionExamination) -> list[Finding]:
    """A causal mask that the code speaks of, where every token sees the future."""
    match, module = examination.match, examination.subject.module
    if match is None or module is None or not match.reading.plan.self_attention:
        return []
    if match.choices.get("causal", "no") != "no" or "attend_over" in match.choices:
        return []
    plan = match.reading.plan
    with torch.no_grad():
        claim = causal_claim(module, lambda: examination.caller.returned(plan, examination.inputs(plan)))
    evidence = f"{claim}; changing the last token changes what comes before it"
    return [_structural("causal_mask_never_used", evidence, examination)] if claim else []


def _check_findings(examination: AttentionExamination, report: Report) -> list[Finding]:
    """Name what a failed check alone shows."""
    failed = {c.name: c.detail for c in report.checks if c.outcome == "failed"}
    findings = []
    known = {f.name for f in report.findings}
    if "check_returned_weights" in failed and not known:
        findings.append(_structural("weights_not_those_used", failed["check_returned_weights"], examination))
    if "check_dropout_in_training" in failed and "mean" in failed["check_dropout_in_training"] and not known:
        evidence = "the mean of 200 outputs in training is not the output in eval"
        findings.append(_structural("dropout_not_rescaled", evidence, examination))
    return findings


def _structural(name: str, evidence: str, examination: AttentionExamination) -> Finding:
    return structural_finding(name, evidence, related_sources(examination.subject.function, examination.subject.source))


def _notes(examination: AttentionExamination, report: Report) -> list[str]:
    match = examination.match
    assert match is not None  # called only with one
    notes = [*_reading_notes(examination, match), *_mask_notes(examination), *_other_mask_notes(examination)]
    return notes + [f"{c.name}: {c.detail}" for c in report.checks if c.name in NOT_JUDGED and c.outcome == "failed"]


def _reading_notes(examination: AttentionExamination, match: Match) -> Iterator[str]:
    """Say what the code has that torch.nn has not, and what it has not."""
    if match.float32_inside:
        yield "a part is computed in float32 whatever the input is; float32 and its error ratio decide"
    if words := words_of(dict(match.reading.conventions)):
        yield f"torch.nn leaves queries and keys as they are; compared with attention in which they are {words}"
    if match.reading.own_bias is not None:
        yield "the bias that it adds to the scores by position is taken as it is; torch.nn has none"
    if changed := changed_by_calls(examination.caller.function):
        yield f"a call changes {', '.join(changed)}; that was put back each time, so that no call saw another's"
    projections = match.reading.projections
    if projections is not None and projections.output is None and "output_projection_skipped" not in match.names:
        yield "there is no output projection: right where another class holds it (BERT), else it is missing"
    if projections is not None and not projections.leaves:
        yield "there are no projections of the inputs: right where the caller projects, else they are missing"


def _mask_notes(examination: AttentionExamination) -> Iterator[str]:
    for masks in (examination.masks, *examination.other_masks):
        if masks.form is not None and masks.form.encoding == "additive" and not masks.mistakes:
            yield f"{masks.parameter or 'the mask'} is added to the scores: a bool or 0/1 mask would hide nothing"
    if examination.cross is not None and examination.cross.match is None:
        names = ", ".join(name for name, role in examination.cross.plans[0].roles if role != "query")
        yield f"with {names} given, no known form reproduces the output: the verdict covers only calls without"
    if examination.masks.replaces_causal:
        yield "a mask that you pass replaces the built-in causal mask"
    if examination.masks.square:
        yield "the mask was read with as many queries as keys; with other lengths the call raises"
    if examination.masks.form is not None and len(examination.masks.understood) > 1:
        yield f"{len(examination.masks.understood)} forms of mask work here; the one above is an example"


def _other_mask_notes(examination: AttentionExamination) -> list[str]:
    """Say which of several masks no verdict is about."""
    first = examination.masks
    notes = [f"{first.parameter} has no effect: {first.switched_off} is False"] if first.switched_off else []
    if first.parameter and first.form is None and not first.accepted:
        notes.append(f"{first.parameter} was not read: every form raised, {first.said or 'or gave only NaN'}")
    for masks in examination.other_masks:
        if masks.form is None and masks.accepted:
            notes.append(
                f"{masks.parameter} was not read: {len(masks.accepted)} forms are taken, none hides what it says"
            )
        elif masks.form is None:
            notes.append(f"{masks.parameter} was not read: every form raised, {masks.said or 'or gave only NaN'}")
        elif any(m.option == "ignored" for m in masks.mistakes) and examination.memory_may_be_given:
            notes.append(f"{masks.parameter} has no effect where no second tensor is given")
    return notes


def _unexplained(report: Report, examination: AttentionExamination) -> Report:
    """Nothing fits: say what was tried and what is known, and name no mistake."""
    report.verdict = "deviates" if report.findings else "unchecked"
    module = examination.subject.module
    names = [] if module is None else [name for name, _ in module.named_parameters()]
    report.reason = (
        f"No known form of attention reproduces its output. Tried: {examination.tried}. "
        + (f"Seen inside: {'; '.join(examination.seen)}. " if examination.seen else "")
        + "This is not a verdict: the code may be right in a way that the checker does not know. It helps to name the "
        "projections with Adapter(weights={...})" + (f"; the parameters are {', '.join(names[:8])}." if names else ".")
    )
    return report


def _excuse(report: Report, expected: Mapping[str, str]) -> Report:
    """Turn failures that are expected into such, with their reason."""
    report.checks = [
        CheckResult(c.name, "expected", expected[c.name]) if c.outcome == "failed" and c.name in expected else c
        for c in report.checks
    ]
    for check in set(expected) - {c.name for c in report.checks if c.outcome == "expected"}:
        report.notes.append(f"{check} was expected to fail and did not")
    failed = [c for c in report.checks if c.outcome == "failed" and c.name not in NOT_JUDGED]
    if report.verdict == "deviates" and expected and not failed:
        report.verdict, report.reason = "equal", ""
    return report
