"""The door to any call that runs: find its attentions, judge each where it stands."""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from equivalence_tests.checker.engine.codes import numbered
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.norming import norm_departures
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
from equivalence_tests.checker.engine.running import Call, Examination
from equivalence_tests.checker.equivalent.deciding import accuse_with_proof
from equivalence_tests.checker.equivalent.one_call import hold_call, show_by_program
from equivalence_tests.checker.reporting.findings import Proof
from equivalence_tests.checker.reporting.report import Report


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
    report.conventions, report.notes = _conventions(judgement), judgement.notes
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
