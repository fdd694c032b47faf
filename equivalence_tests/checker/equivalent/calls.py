"""The door to any call that runs: find its attentions, judge each where it stands, and hold it against torch."""

import contextlib
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.additive import over_channels
from equivalence_tests.checker.engine.codes import numbered, sources_in, token_of
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.ending import norm_departures
from equivalence_tests.checker.engine.contracts.projecting import (
    idle_departures,
    projection_departures,
    unused_departures,
)
from equivalence_tests.checker.engine.given_masks import GivenMasks
from equivalence_tests.checker.engine.intervening import prove
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.judging import examine
from equivalence_tests.checker.engine.meaning import Evidence
from equivalence_tests.checker.engine.naming import finding_of
from equivalence_tests.checker.engine.running import Call, Examination, inputs_of, is_data
from equivalence_tests.checker.engine.visibility import Windows
from equivalence_tests.checker.engine.watching import ModuleCall
from equivalence_tests.checker.equivalent.comparing import Case, compare, kept_parameters
from equivalence_tests.checker.equivalent.deciding import (
    Holding,
    accuse_with_proof,
    decide,
    left_over,
    shown_as_step,
    unread,
)
from equivalence_tests.checker.equivalent.expressions import Given, of_kind
from equivalence_tests.checker.equivalent.parameters import Parameters
from equivalence_tests.checker.equivalent.part_holding import first_output
from equivalence_tests.checker.equivalent.program import Program
from equivalence_tests.checker.equivalent.reading import read
from equivalence_tests.checker.equivalent.steps import UnreadError, not_called_again
from equivalence_tests.checker.equivalent.watched import Layout
from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import Exercise, Finding, Proof
from equivalence_tests.checker.reporting.report import Report

WHOLE = "the whole, beside torch's own program"


def diagnose_call(
    call: Call,
    *,
    name: str = "",
    intended: Mapping[str, str] | None = None,
    proofs: bool = True,
    features_last: bool = False,
    held: bool = True,
) -> list[Report]:
    """Run a call once, watched, and judge every attention in it against torch's formula, in the order of the run.

    Proofs show by further runs that what was found is all, and needed. Where it is held, there is no verdict without
    numbers: what deviates is proven or suspected, and an attention of which nothing does is compared with torch's own
    program. Where features are last, the last axis of all arguments is known to hold the features of tokens.
    """
    started = time.process_time()
    broken = next((name for name, x in call.tensors if x.is_floating_point() and bool(x.isnan().any())), "")
    if broken:
        why = f"The argument {broken} holds NaN, and so does all that is computed from it: pass numbers."
        return [Report(name or "attention 1", "multi-head attention", reason=why)]
    if features_last or call.module is None or next(call.module.parameters(), None) is None:
        # Where nothing is projected, what is given are queries, keys and values: the last axis holds their features.
        call.seeds = {id(x): numbered(x.shape) for _, x in call.tensors if x.is_floating_point() and x.dim() >= 3}
    found = examine(call, GivenMasks(call))
    diagnoses = [_diagnosis(found, place, name, proofs, dict(intended or {})) for place in range(len(found.judgements))]
    for place, report in enumerate(diagnoses if held else ()):
        if report.verdict in ("equal", "partial"):
            hold_call(report, found, found.judgements[place], intended or {})
            if report.unread and not proofs:  # one option of code that is held as a whole elsewhere
                report.verdict, report.reason = "partial", ""
        elif proofs:
            if not all(finding.is_proven for finding in report.findings):
                show_by_program(report, found, found.judgements[place])
            accuse_with_proof(report)
    for path, said in over_channels(found.run) if held else ():
        kind = "attention over channels"
        diagnoses.append(Report(name or kind, kind, reason=said[0].upper() + said[1:], place=path))
    for diagnosis in diagnoses:
        diagnosis.seconds = (time.process_time() - started) / len(diagnoses)
    return diagnoses


def _diagnosis(found: Examination, place: int, name: str, proofs: bool, intended: dict[str, str]) -> Report:
    judgement = found.judgements[place]
    add_departures_of_weights(found, place)
    report = Report(name or f"attention {place + 1}", "multi-head attention")
    conclude(report, found, place, found.departures[place], intended, proofs)
    report.coverage = list(Evidence(judgement, found.call.module).not_judged())
    if report.coverage and report.verdict == "equal":
        report.verdict = "partial"
    report.conventions = _conventions(judgement)
    report.place = judgement.attention.first.place
    return report


def add_departures_of_weights(found: Examination, place: int) -> None:
    """Add what only the module that is called shows to what departs in one of its attentions."""
    judgement = found.judgements[place]
    if len(found.judgements) == 1:  # of several, none says which weights are its own
        found.departures[place] += _of_weights(judgement, found.call.module, found.departures[place])
        found.departures[place] += idle_departures(judgement.attention, found.call.function)
    if any(departure.mistake.roles for departure in found.departures[place]):  # rotations of other roles follow
        found.departures[place] = [one for one in found.departures[place] if one.stage != "rotary"]


def conclude(
    report: Report,
    found: Examination,
    place: int,
    departures: list[Departure],
    intended: Mapping[str, str],
    proofs: bool = True,
) -> None:
    """Write into a report what departs: the mistakes, with their proofs, and what is intended."""
    departures = Evidence(found.judgements[place], found.call.module).added_to(departures)
    departures = [one if one.evidence else replace(one, evidence=intended.get(one.name, "")) for one in departures]
    wrong = [departure for departure in departures if not departure.evidence]
    kept = {departure.name for departure in departures if departure.evidence}
    wrong, proven = _needed(wrong, found, place, kept) if proofs else (wrong, {})
    report.findings = [finding_of(one, proven.get(id(one)), found.call.module) for one in wrong]
    report.intended = [finding_of(departure) for departure in departures if departure.evidence]
    report.verdict = "deviates" if wrong else "equal"


def _needed(
    wrong: list[Departure], found: Examination, place: int, kept: Collection[str] = ()
) -> tuple[list[Departure], dict[int, Proof | None]]:
    """Prove each departure, beside those of the names that are intended, and leave those out that change nothing.

    Where the others do not account for the difference without them, what was read is not what departs: nothing is
    proven then.
    """
    proven = _proven(wrong, found, place, kept)
    needed = [one for one in wrong if not _changes_nothing(proven[id(one)])]
    if len(needed) in (0, len(wrong)):
        return wrong, proven
    again = _proven(needed, found, place, kept)
    proofs = [proof for proof in again.values() if proof is not None]
    accounted = bool(proofs) and all(proof.holds for proof in proofs)
    return (needed, again) if accounted else (wrong, dict.fromkeys(proven))


def _changes_nothing(proof: Proof | None) -> bool:
    """Whether torch's numbers come out with it put right and without."""
    return proof is not None and max(proof.error, proof.without) < proof.rounding


def _proven(wrong: list[Departure], found: Examination, place: int, kept: Collection[str]) -> dict[int, Proof | None]:
    """Prove each departure in the call in which it was seen, beside all others that were seen there.

    What is intended is put right for the proof, too: torch's formula has none of it.
    """
    proofs: dict[int, Proof | None] = {}
    seen = [one.seen_in or (found, place) for one in wrong]
    for examination, at in {(id(x), at): (x, at) for x, at in seen}.values():
        own = [one for one, call in zip(wrong, seen, strict=True) if call[0] is examination and call[1] == at]
        beside = [one for one in examination.departures[at] if one.name in kept]
        examination.departures[at] = [*own, *beside]
        proofs |= dict(zip(map(id, own), prove(examination, at), strict=False))
    return proofs


def _of_weights(judgement: Judgement, module: nn.Module | None, known: list[Departure]) -> list[Departure]:
    """Weights that stand for another role than their names say or take no part."""
    attention, operands = judgement.attention, judgement.first_operands
    found = list(projection_departures(attention, operands, {}, module)) if len(operands) == 3 else []
    found += norm_departures(attention, module)
    idle = unused_departures(attention, module, [*known, *found])
    return found + [departure for departure in idle if departure.lines]  # one call may not reach all norms


def _conventions(judgement: Judgement) -> list[tuple[str, str, str]]:
    part = judgement.attention.parts[0]
    rows = [("heads", str(len(part.table.heads)), ""), ("width of a head", str(part.product.left.size(-1)), "")]
    for operand in judgement.first_operands:
        if operand.change:
            rows.append((operand.role, operand.change, "as projected"))
    return rows


def hold_call(report: Report, found: Examination, judgement: Judgement, intended: Mapping[str, str]) -> None:
    """Hold the verdict on an attention in a call against torch's own program; where none can be made, say why."""
    try:
        holding = holding_of(*apart(found, judgement))
    except UnreadError as error:
        report.coverage.append(Exercise(WHOLE, False, f"not compared: {error}"))
        unread(report, str(error))
        return
    decide(report, holding, intended)
    report.equivalent = unwritten(holding, report)


def unwritten(holding: Holding, report: Report) -> Equivalent:
    """Say how a program compares that has no text."""
    why = "only a class or function can be written down, and this is one call"  # which gives no signature
    return holding.comparison.of(Equivalent("", why, "", (), holding.described(report.intended)))


def show_by_program(report: Report, found: Examination, judgement: Judgement) -> None:
    """Show what nothing proves by the program of an attention in a call, where that gives the same numbers."""
    with contextlib.suppress(UnreadError):
        alone, layout = apart(found, judgement)
        holding = holding_of(alone, layout)
        if holding.comparison.agrees:
            report.findings = [_shown(one, alone.call, layout, holding) for one in report.findings]


def _shown(finding: Finding, call: Call, layout: Layout, holding: Holding) -> Finding:
    steps = [step for step in holding.unexplained if step.is_named_by(finding)]
    if finding.is_proven or not steps:
        return finding
    plain = holding.program.without(steps[0].stage)
    with kept_parameters(call.module):
        compared = compare(lambda _: plain, _cases(call, plain), layout, holding.comparison.tolerance)
    return shown_as_step(finding, steps, compared.worst.size)


def apart(found: Examination, judgement: Judgement) -> tuple[Examination, Layout]:
    """Call the sub-module that holds an attention with its projections again, on a copy of it."""
    call, inside = found.call, _call_around(found, judgement)
    if inside is not None and (inside.path or not _is_own(call)):
        call = _called_inside(call, inside, found.run.recorder.calls)
    call = _callable_again(call)
    tokens = [x for _, x in call.tensors if is_data(x)]
    tokens = [x for x in tokens if x.dim() >= 3] or [x for x in tokens if x.dim() == 2][:1]
    call.seeds = {id(x): numbered(x.shape) for x in tokens}
    if all(x.dim() == 4 for x in tokens) and _convolves(call.module, tokens):
        call.seeds = {id(x): numbered(x.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2) for x in tokens}
        return examined_alone(call), Layout(_features_last, _features_last, first_output)
    named_alike = found.call.seeds.keys() == call.seeds.keys() and found.call.function is call.function
    alone = found if named_alike and len(found.judgements) == 1 else examined_alone(call)
    if _holds_samples_first(alone.judgements[0], call, _samples_first):
        return alone, Layout(_samples_first, _samples_first, first_output)
    if any(x.dim() != 3 for x in tokens):
        raise UnreadError("its first axis does not hold the samples")
    call.seeds = {id(x): numbered(x.transpose(0, 1).shape).transpose(0, 1) for x in tokens}
    alone = examined_alone(call)
    if not _holds_samples_first(alone.judgements[0], call, _exchanged):
        raise UnreadError("neither its first axis nor its second holds the samples")
    return alone, Layout(_exchanged, _exchanged, first_output)


def examined_alone(call: Call) -> Examination:
    """Examine the one attention of a call."""
    found = examine(call, GivenMasks(call))
    if len(found.judgements) != 1:
        raise UnreadError("more than one attention runs in one forward")
    return found


def _convolves(module: nn.Module | None, tokens: Sequence[Tensor]) -> bool:
    """Whether a convolution takes the second axis of what is handed over for its features."""
    made = () if module is None else module.modules()
    return any(isinstance(x, nn.Conv2d) and x.in_channels == tokens[0].size(1) for x in made)


def _samples_first(x: Tensor) -> Tensor:
    """From (batch, ..., features), where all other axes hold tokens, to (batch, tokens, features)."""
    return x.flatten(1, -2) if x.dim() > 3 else x[None] if x.dim() == 2 else x


def _features_last(x: Tensor) -> Tensor:
    """From (batch, features, rows, columns) to (batch, tokens, features)."""
    return x.flatten(2).mT if x.dim() == 4 else x


def _exchanged(x: Tensor) -> Tensor:
    """From (tokens, batch, features) to (batch, tokens, features), and back."""
    return x.transpose(0, 1) if x.dim() == 3 else x


def _called_inside(call: Call, inside: ModuleCall, calls: Sequence[ModuleCall]) -> Call:
    """The call of a sub-module, with its arguments as they were when it began: a cache is written into later."""
    assert call.module is not None  # it has sub-modules
    child = call.module.get_submodule(inside.path)
    number = [one for one in calls if one.path == inside.path].index(inside)
    _, args, kwargs = inputs_of({inside.path: child}, lambda: call.run(read=False))[number]
    return Call(child, args, kwargs)


def _callable_again(call: Call) -> Call:
    """The same call, which may be given other names, if its function may be called with other parameters."""
    modules = [] if call.module is None else [*call.module.modules()]
    if any(isinstance(x, nn.Dropout) and x.p and x.training for x in modules):
        raise UnreadError("dropout is on")
    if modules and not _is_own(call):
        raise UnreadError("what is called is neither a module nor a method of it")
    return replace(call)


def _is_own(call: Call) -> bool:
    """Whether what is called is the module, or a method of it."""
    function = call.function
    return function is call.module or (inspect.ismethod(function) and function.__self__ is call.module)


def _call_around(found: Examination, judgement: Judgement) -> Any:
    """The innermost call of a sub-module that holds an attention and its projections; None for the whole."""
    names, attention = found.run.names, judgement.attention
    sides = [codes for part in attention.parts for codes, _ in part.sides.values()]
    made = [names.sources[number].operation for codes in sides for number in sources_in(codes)]
    first = min([attention.first.index, *(op.index for op in made if op is not None)])
    around = [x for x in found.run.recorder.calls if x.first <= first <= attention.end.index < x.end]
    return around[-1] if around else None


def _holds_samples_first(judgement: Judgement, call: Call, laid: Callable[[Tensor], Tensor]) -> bool:
    """Whether the tokens of one slice lie in one sample, where rows are numbered sample after sample as laid out."""
    lengths = [laid(x).size(1) for _, x in call.tensors if id(x) in call.seeds]
    tokens = token_of(judgement.attention.parts[0].product.left[0][:, 0])
    return bool(lengths) and bool((tokens // lengths[0] == tokens[0] // lengths[0]).all())


def holding_of(found: Examination, layout: Layout) -> Holding:
    """Read the program of the one attention of a call, and compare it."""
    call = found.call
    with kept_parameters(call.module):
        program, tolerance = read(found, layout)
        comparison = compare(lambda _: program, _cases(call, program), layout, tolerance)
        for _, error in comparison.left_out:
            raise not_called_again(error)
        parameters = Parameters.of(call.module)
        steps = tuple(program.hiding_by(_cut_by(call, program)).steps(parameters))
        return Holding(program, parameters, steps, comparison, left_over(program, call, layout, comparison))


def _cut_by(call: Call, program: Program) -> str:
    """Windows of tokens are intended where an argument holds where each begins."""
    windows = program.bias.visible.windows
    starts = {name: x for name, x in call.tensors if not x.is_floating_point() and x.dim() == 1 and len(x) > 1}
    named = (name for name, x in starts.items() if int(x[0]) == 0 and windows == Windows(int(x.diff()[0])))
    return next((f"the argument {name} says where each begins" for name in named), "")


def _cases(call: Call, program: Program) -> Iterator[Case]:
    """Other tokens in the place of those that are projected, and other parameters."""
    used = {x.name for x in of_kind(Given, program.output.around, *(one.tokens for _, one in program.roles))}
    tokens = [x for name, x in call.tensors if name in used]
    for seed, words in ((7, "fresh inputs"), (8, "parameters drawn anew")):
        yield Case(redrawn(call, tokens, seed), None, words, seed)


def redrawn(call: Call, tokens: Sequence[Tensor], seed: int) -> Call:
    """The same call with other numbers for some of its arguments."""
    generator = torch.Generator().manual_seed(seed)
    distinct = {id(x): x for x in tokens}
    drawn = {key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in distinct.items()}
    args, kwargs, replaced = call.fresh(leaves=drawn)
    seeds = {id(replaced[key]): numbered(x.shape) for key, x in drawn.items()}
    return Call(call.function, args, kwargs, call.module, seeds)
