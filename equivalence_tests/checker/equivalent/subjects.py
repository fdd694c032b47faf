"""Check one attention: build the class or function, call it in every way it offers, and compare it with torch."""

import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from equivalence_tests.checker.engine.additive import additive, over_channels
from equivalence_tests.checker.engine.agreeing import (
    calls_of,
    differing_in_training,
    output_with,
    outputs_of,
    without_an_axis,
)
from equivalence_tests.checker.engine.caches import exercised_cache
from equivalence_tests.checker.engine.checks import (
    Check,
    check_eval_is_deterministic,
    check_float32_error,
    in_half_precision,
    judge_checks,
    run_check,
)
from equivalence_tests.checker.engine.codes import sources_in
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.coverage import built_alike, cover, cover_fewer_masks, cover_options
from equivalence_tests.checker.engine.covered import Covered
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.kept import kept_masks, kept_of_other_sizes, written_arguments
from equivalence_tests.checker.engine.mask_pairs import hidden_together
from equivalence_tests.checker.engine.mask_trials import NO_MASK, of_all_masks
from equivalence_tests.checker.engine.meaning import Evidence
from equivalence_tests.checker.engine.names import Identities
from equivalence_tests.checker.engine.probing import (
    crossing,
    in_training,
    loud,
    made_in_forward,
    missing_keys,
    never_causal,
    other_length_departures,
    overflowing,
    query_by_query,
)
from equivalence_tests.checker.engine.ran import drawn_in, never_hid
from equivalence_tests.checker.engine.reading import counted_heads, notes_of, reading_of
from equivalence_tests.checker.engine.relative_terms import of_other_queries
from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.engine.situations import Situation, likeliest, new_departures, trials_for
from equivalence_tests.checker.engine.taking_part import NEVER_READ
from equivalence_tests.checker.engine.training import add_untrained
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.equivalent.additive import ALONE, averaging, hold_additive, hold_option
from equivalence_tests.checker.equivalent.calls import conclude, diagnose_call
from equivalence_tests.checker.equivalent.holding import accuse, compare_output, hold
from equivalence_tests.checker.equivalent.locating import locate
from equivalence_tests.checker.equivalent.search import look_closer
from equivalence_tests.checker.mistakes.scores import SCALES
from equivalence_tests.checker.reach.arguments import Sizes, value_for
from equivalence_tests.checker.reach.configs import made_up_for
from equivalence_tests.checker.reach.construction import asks_for_groups
from equivalence_tests.checker.reach.crashes import CRASHES
from equivalence_tests.checker.reach.errors import CannotCheckError, said
from equivalence_tests.checker.reach.plans import ATTENDS, MOST_FAILED, Errors, other_masks
from equivalence_tests.checker.reach.proposing import parameters_of, used_as
from equivalence_tests.checker.reach.state import attempt, default_dtype, prepare
from equivalence_tests.checker.reach.subject import Adapter, Subject, subjects
from equivalence_tests.checker.reach.tried import TRIED, furthest_first
from equivalence_tests.checker.reporting.findings import NOT_JUDGED, Exercise
from equivalence_tests.checker.reporting.lines import code_lines, frames_of, raised_at
from equivalence_tests.checker.reporting.report import Report

MOST_SIZES = 3  # code that could be read at none of so many sizes is not tried at others
NO_ATTENTION = "No attention runs in it"
OF_PRODUCTS = {f"changed_by_{name}" for name in CONTRACTIONS}  # what a product takes is wrong, and not the product


def examine_attention(
    found: Any, name: str, adapter: Adapter | None = None, progress: Callable[[str], None] = lambda text: None
) -> Report:
    """Check an attention that has been imported already; the caller preserves the global state.

    The report is on the first sizes at which it could be read; no others are tried for a kinder verdict.

    Raises:
        CannotCheckError: If it cannot be built, or called as an attention.
    """
    errors = Errors()
    unread: list[Report] = []
    for subject in subjects(found, name, adapter or Adapter()):
        progress(f"built {name} with {subject.sizes.num_heads} heads of {subject.sizes.head_dim}")
        report = _watched(subject, errors)
        if report is not None and (report.verdict != "unchecked" or report.equivalent or report.unread):
            return report
        weighing = _weighing(subject) if report is None or report.reason.startswith(NO_ATTENTION) else None
        if weighing is not None:
            return weighing
        unread += [report] if report is not None else []
        absent = [text for text in errors if text.startswith("ModuleNotFoundError")]
        if (absent or CRASHES.in_calls) and not unread:
            raise CannotCheckError(_cannot_call(Errors(absent) if absent else errors))
        if len(unread) == MOST_SIZES:
            break
    if not unread:
        raise CannotCheckError(_cannot_call(errors))
    return unread[0]


def _weighing(subject: Subject) -> Report | None:
    """Check code that returns the weights of an attention alone; None if it is none that can be read.

    What is not called an attention may be another match of two sequences, which is not held against it.
    """
    averages, named = averaging(subject), getattr(subject.function, "__name__", type(subject.function).__name__)
    report = None if averages is None else _watched(averages, Errors())
    if report is None or report.reason.startswith(NO_ATTENTION):
        return None
    if report.verdict == "deviates" and not ATTENDS.search(named):
        return None
    report.notes.append(ALONE)
    if report.equivalent is not None:
        report.equivalent = replace(report.equivalent, source="", unwritten=ALONE)
    return report


def _watched(subject: Subject, errors: Errors) -> Report | None:
    """Check one built subject in float64, or in float32 if it cannot be called in float64."""
    subject.function = subject.copied()
    if subject.module is not None:
        subject.initial = {name: x.detach().clone() for name, x in subject.module.named_parameters()}
    for dtype in (torch.float64, torch.float32):
        subject.dtype = dtype
        if subject.module is not None:
            prepare(subject.module, dtype)
        with default_dtype(dtype):  # a mask made inside is then of the scores' dtype
            report = diagnose_subject(subject, errors)
        if report is not None:
            return report
    return None


def _cannot_call(errors: Errors) -> str:
    """List what the calls raised, that of the call that came closest to fitting first."""
    if errors.own:
        return f"It runs, but could not be followed: the checker, not this code, raised {errors.own[0]}."
    shown = "\n".join(f"  {text}" for text in furthest_first(errors)[:4])
    answered = f"Its forward answered:\n{shown}\n" if shown else "Its forward names no argument to pass tensors to. "
    ended = f"The search ended after {MOST_FAILED:,} calls that failed. " if len(errors) > MOST_FAILED else ""
    return (
        f"No way to call it as an attention was found. {answered}{ended}"
        "Give Adapter(call=lambda module, query, key, value, may_attend: ...), or --kind if it is something else."
    )


def diagnose_subject(subject: Subject, errors: Errors | None = None) -> Report | None:
    """Check one built class or function; None if it cannot be called as an attention."""
    started = time.process_time()
    errors = Errors() if errors is None else errors
    trials = trials_for(subject, errors)
    if not trials:
        return None
    try:
        situation = likeliest(subject, trials)
    except RuntimeError as error:  # torch's fused attention runs on no heads of keys at all; its formula does not
        (errors if frames_of(error) else errors.own).append(f"{said(error)}{raised_at(error)}")
        return None
    scales = _callers_scales(situation)
    other = _scaled_as_torch(situation, scales) if scales else subject.function
    if other is not None and other is not subject.function:
        return diagnose_subject(replace(subject, function=other), errors)
    report = _judged(situation, {} if other is None else scales)
    if subject.module is not None:
        trial = situation.trial
        add_untrained(report, situation.found.run, subject.module, lambda: trial.output(trial.inputs()))
    made_up = [*made_up_for(subject.function)]
    report.coverage += made_up
    report.verdict = "partial" if report.verdict == "equal" and made_up else report.verdict
    if made_up and any(one.stage == "scale" and re.search(r"\d", one.have) for one in report.findings):  # of no size
        report.findings, report.verdict = [], "unchecked"
        report.reason = f"Nothing says what {made_up[0].what} is, and the scale may depend on it."
    report.seconds = time.process_time() - started
    return report


def _scaled_as_torch(situation: Situation, scales: Mapping[str, float]) -> Callable[..., Any] | None:
    """Give the module with the scale of torch's formula, where its caller chooses that; None where that fails."""
    subject = situation.subject
    made = TRIED.construction_of(subject.function)
    wanted = {name: subject.sizes.head_dim**power for name, power in scales.items()}
    if made is not None and wanted.items() <= made.kwargs.items():
        return subject.function
    other = None if made is None else built_alike(made.function, subject, **wanted)
    return None if other is None else prepare(other, subject.dtype)


def _judged(situation: Situation, scales: Mapping[str, float]) -> Report:
    """Judge one call, and what other calls of the same code show."""
    subject, sizes = situation.subject, situation.trial.sizes
    values = {0.5: "sqrt(head_dim)", -0.5: "1 / sqrt(head_dim)", 0.0: "1"}
    given = ", ".join(f"{name} = {values[power]}" for name, power in scales.items())
    chosen = f"the caller chooses the scale; it was built with {given}" if scales else ""
    intended = {row.name: chosen for row in SCALES if chosen and row.chosen} | dict(subject.adapter.intended)
    subject.adapter = replace(subject.adapter, intended=intended)
    report = Report(subject.name, "multi-head attention" if subject.module is not None else "attention function")
    if sizes.memory_dim:
        said = f"tokens of the memory have {sizes.memory_dim} features beside {sizes.embed_dim} of the queries"
        report.notes.append(f"{said}: with as many it fails")
    report.reason = additive(situation.found.run, bool(situation.found.judgements))
    if report.reason:
        hold_additive(report, situation)
        return report
    departures = _departures(situation, report)
    guessed = [one.what for one in report.coverage if one.detail == NO_MASK]
    if guessed and departures:  # what it was given in its place may be why it deviates
        report.reason = (
            f"Nothing says what {guessed[0]} takes: {NO_MASK}, and what it was given may be why it deviates."
        )
        return report
    if not situation.found.judgements:
        report.reason = f"{NO_ATTENTION}: {_what_is_missing(situation)}"
        compare_output(report, situation)
    else:
        conclude(report, situation.found, 0, departures, subject.adapter.intended)
    report.conventions = [*reading_of(situation, report), *report.conventions]
    report.notes += [*notes_of(situation), *([chosen] if chosen and not report.intended else [])]
    _beyond_the_call(report, situation)
    return report


def _departures(situation: Situation, report: Report) -> list[Departure]:
    """List what departs in the first call, and what only others show."""
    departures = list(situation.departures)
    if not situation.blocked:
        departures += _beyond(situation, departures, report)
    if any(departure.name == "norm_fresh_in_forward" for departure in departures):
        departures = [departure for departure in departures if departure.name != "norm_never_used"]  # that is why
    return _in_one_call(departures)


def _in_one_call(departures: list[Departure]) -> list[Departure]:
    """Give what departs as it was seen in the call in which a bias can be put right: elsewhere this hides the proof."""
    seen = next((one.seen_in for one in departures if one.stage == "bias" and one.patches), None)
    there = [] if seen is None else seen[0].departures[seen[1]]
    known = {(one.name, one.lines): one for one in there}
    return [known.get((one.name, one.lines), one) for one in departures]


def _beyond_the_call(report: Report, situation: Situation) -> None:
    """Go on after the first call: other inputs, then the comparison of the whole with its equivalent."""
    called_plainly, judged = situation.subject.adapter.call is None, bool(situation.found.judgements)
    if report.verdict == "equal":
        _cover(report, situation)
    elif report.verdict == "deviates" and not situation.blocked and called_plainly:
        report.findings += exercised_cache(situation.trial)[1]  # held against its own full pass, right or wrong
    if report.verdict in ("equal", "partial") and judged:
        _check(report, situation, check_eval_is_deterministic)
    if report.verdict in ("equal", "partial") and judged:
        hold(report, situation)
        _check(report, situation, check_float32_error)
        report.notes += in_half_precision(situation, report)
    if report.verdict == "deviates" and judged and called_plainly:
        accuse(report, situation)
        if report.findings and all(one.name in OF_PRODUCTS for one in report.findings):
            look_closer(report, partial(locate, situation=situation))
    if report.verdict == "unchecked" and called_plainly:
        locate(report, situation)


def _callers_scales(situation: Situation) -> dict[str, float]:
    """Name the numbers that the module was built with and scales its scores by, as only a caller knows them.

    Each has a power of the width of a head in torch's formula: 0.5 for what divides.
    """
    subject = situation.subject
    read = ((j.models[0], j.first_operands) for j in situation.found.judgements if j.models and j.operands)
    factors = [model.factor * operands[0].factor * operands[1].factor for model, operands in read]
    made = TRIED.construction_of(subject.function) if subject.built else None
    if made is None or not factors:
        return {}
    known = {p.name: value_for(p.name, Sizes())[1] for p in parameters_of(made.function) if p.default is p.empty}
    free = [name for name, value in known.items() if value is None or isinstance(value, bool)]
    given = [(name, made.kwargs[name]) for name in free if not used_as(made.function).get(name)]
    numbers = [(name, x) for name, x in given if type(x) in (int, float) and x > 0]
    beside = subject.sizes.head_dim**-0.5  # torch's own scale, which a further number multiplies
    ways = [(name, power, x ** (-2 * power)) for name, x in numbers for power in (-0.5, 0.5)]
    ways += [(name, 0.0, x * beside) for name, x in numbers]
    found = {name: power for name, power, factor in ways if all(math.isclose(factor, one) for one in factors)}
    return found if len(found) < 2 else {name: power for name, power in found.items() if _is_no_size(subject, name)}


def _is_no_size(subject: Subject, name: str) -> bool:
    """Whether a module that was built with another number under a name has parameters of the same shapes."""
    made = TRIED.construction_of(subject.function)
    other = None if made is None else built_alike(made.function, subject, **{name: 0.5})
    both = [{path: x.shape for path, x in one.named_parameters()} for one in (subject.module, other) if one is not None]
    return len(both) == 2 and both[0] == both[1]


def _beyond(situation: Situation, found: list[Departure], report: Report) -> list[Departure]:
    """List the departures that only other calls than the first show."""
    more: list[Departure] = []

    def add(others: list[Departure]) -> None:
        more.extend(new_departures([*found, *more], others))

    if not any(departure.stage == "project" for departure in found):
        causal = query_by_query(situation)
        add(missing_keys(situation) if causal is None else causal)
    if not found and not more:
        add(other_length_departures(situation))
    add(loud(situation))
    add(overflowing(situation))
    add(in_training(situation, report))
    add(made_in_forward(situation.trial))
    add(kept_of_other_sizes(situation))
    if not any(departure.stage in ("mask", "softmax") for departure in [*found, *more]):
        add(never_causal(situation))
    add(crossing(situation))
    situation.other_masks = [replace(situation, trial=trial) for trial in other_masks(situation.trial)]
    masked = [situation, *situation.other_masks]
    add(of_all_masks(masked, report))
    for each in masked:
        add(kept_masks(each))
    add(of_other_queries(situation))
    if not more:
        add(hidden_together(masked))
    if all(one.evidence for one in (*found, *more)):
        add(_disagreeing(situation))
        add([one for each in masked for one in attempt(partial(written_arguments, each)) or ()][:1])
    return more


def _disagreeing(situation: Situation) -> list[Departure]:
    """Find where training computes something other than eval, or one sample or token loses an axis."""
    module, calls = situation.subject.module, calls_of([situation, *situation.other_masks])
    trained = None if module is None else differing_in_training(module, (partial(output_with, *one) for one in calls))
    alone = (without_an_axis(what, outputs_of(situation, what)) for what in ("sample", "token"))
    return [one for one in (trained, *alone) if one is not None][:1]


def _check(report: Report, situation: Situation, check: Check) -> None:
    """Run a small check: what neither the stages nor the comparison with torch's program cover."""
    found = run_check(check, situation, report)
    report.checks.append(found)
    report.notes += [f"{found.name}: {found.detail}"] if found.outcome == "failed" and found.name in NOT_JUDGED else []
    judge_checks(report)


def _cover(report: Report, situation: Situation) -> None:
    """Run what the code offers beyond the calls that were judged; what cannot be run makes the verdict partial."""
    function = situation.subject.function
    forward = type(function).forward if isinstance(function, torch.nn.Module) else function
    if situation.subject.adapter.call is not None or str(getattr(forward, "__module__", "")).startswith("torch"):
        return
    covered = _covered(situation, [exercise.what for exercise in report.coverage])
    exercises = [hold_option(one, report, situation) for one in covered.exercises]
    run = situation.found.run
    report.coverage += [*drawn_in(run.operations), *never_hid(run.recorder, _besides_masks(situation)), *exercises]
    report.notes += [f"{x.what}: {NEVER_READ}" for x in covered.exercises if x.detail == NEVER_READ]
    if situation.judgement is not None:
        report.coverage += Evidence(situation.judgement, situation.subject.module).not_judged()
        report.coverage += _ungrouped(situation.subject, situation.judgement)
    report.findings += covered.findings
    report.intended += covered.intended
    if report.findings:
        report.verdict = "deviates"
    elif report.not_exercised:
        report.verdict = "partial"


def _covered(situation: Situation, exercised: Collection[str]) -> Covered:
    """Call the code in all ways that it offers, but for those that have been exercised."""
    subject, last = situation.subject, not situation.plan.layout.startswith("b e")

    def judge(one: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Report]:
        module = one if isinstance(one, torch.nn.Module) else subject.module
        intended = subject.adapter.intended
        return diagnose_call(Call(one, args, kwargs, module), intended=intended, proofs=False, features_last=last)

    covered = Covered(situation.trial, [*calls_of([situation, *situation.other_masks])], judge)
    cover(covered, exercised)
    cover_fewer_masks(covered, situation.understood)
    if subject.built and subject.module is not None:
        cover_options(covered, subject)
    return covered


def _besides_masks(situation: Situation) -> set[str]:
    """Name the arguments that are no mask, as a recording knows them."""
    guessed = {name for name, role in situation.plan.roles if role.startswith("=")}
    given = {name for name, _ in situation.call.tensors}
    return {f"arg:{name}" for name in (guessed | given) - {situation.plan.mask_parameter}}


def _what_is_missing(situation: Situation) -> str:
    """Say what it lacks to be an attention."""
    names = situation.found.run.names
    if channels := next(over_channels(situation.found.run), None):
        return channels[1]
    products = [*names.products, *names.across]
    if not products:
        return "no product of queries and keys weighs values."
    line = code_lines(products[0].operation.frames)[-1]
    product = f"line {line.number}, `{line.text}`, multiplies two tensors made from the input"
    lost = next((op for op in names.operations[products[0].operation.index + 1 :] if _loses(op, names)), None)
    if lost is None or not lost.frames:
        return f"{product}, but no weights that sum to one over the tokens are made from that and multiplied by values."
    mixing = code_lines(lost.frames)[-1]
    return f"{product}; line {mixing.number}, `{mixing.text}`, mixes these scores, as torch's formula does not."


def _loses(operation: Operation, names: Identities) -> bool:
    """Whether scores are multiplied by a parameter, so that none is known behind that."""
    made = [source for _, codes in names.taken(operation) for source in sources_in(codes)]
    scores = any(names.sources[number].kind == "score" for number in made)
    return operation.name in CONTRACTIONS and scores and len(operation.inputs) > 1


def _ungrouped(subject: Subject, judgement: Judgement) -> Iterator[Exercise]:
    """List grouped heads as not run if the class offers them and ran only with as many key heads as query heads."""
    heads, keys = counted_heads(judgement)
    if subject.built and heads == keys and asks_for_groups(type(subject.function)):
        yield Exercise("heads that share keys", False, "it was run only with as many key heads as query heads")
