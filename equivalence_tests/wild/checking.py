"""One model of the wild: build it, count its attentions, and let the checker judge each."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal

from torch import nn

from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.wild.counting import Call, attentions_of, captured_calls, variant_of
from equivalence_tests.wild.models import WildModel, runnable

__all__ = ["Attention", "Judged", "Part", "attentions_in", "described", "judged_attentions", "part_of", "verdict_of"]

Part = Literal["development", "held out"]


@dataclass(frozen=True)
class Attention:
    """An attention that ran in a model, with a copy of what it was called with."""

    library: str
    model: str
    path: str
    implementation: str
    variant: str
    module: nn.Module
    call: Call

    @property
    def name(self) -> str:
        """Its class, with the module that holds it."""
        return f"{type(self.module).__module__}.{type(self.module).__qualname__}"

    @property
    def key(self) -> str:
        """What distinguishes it from all others, however often a library has it."""
        return f"{self.name}; {self.variant}"


@dataclass(frozen=True)
class Judged:
    """What the checker said about one attention.

    Args:
        library: Where it comes from.
        model: The model that it ran in.
        name: Its class.
        path: Its place in the model.
        implementation: "eager" or "sdpa" where a library has both; "own" elsewhere.
        key: What distinguishes it from all others.
        verdict: "equal", "intended", "partial", "deviates" or "not read".
        findings: What deviates: name, line and sentence of each.
        not_exercised: What a partial verdict says nothing about.
        reason: Why it was not read.
        seconds: CPU time that it took.
    """

    library: str
    model: str
    name: str
    path: str
    implementation: str
    key: str
    verdict: str
    findings: list[str]
    not_exercised: list[str]
    reason: str
    seconds: float


def part_of(name: str) -> Part:
    """Say whether a class serves for development or is kept until the end, seven to three, by its name alone.

    >>> part_of("transformers.models.bert.modeling_bert.BertSelfAttention")
    'development'
    """
    return "development" if int(sha256(name.encode()).hexdigest(), 16) % 10 < 7 else "held out"


def attentions_in(wild: WildModel, known: Collection[str] = ()) -> Iterator[Attention]:
    """Give every attention that runs in a model and is not known yet.

    Args:
        wild: The model.
        known: Keys of attentions that were seen elsewhere.

    Raises:
        RuntimeError: If the model could not be built or run.
    """
    ready = runnable(wild)
    seen = set(known)
    for implementation in wild.implementations(ready.model):
        executed = attentions_of(ready.model, ready)
        calls = captured_calls(ready, [one.module for one in executed])
        for one in executed:
            call = calls[one.module]
            variant = variant_of(one.module, call, one.kind)
            found = Attention(wild.library, wild.name, one.path, implementation, variant, one.module, call)
            if found.key not in seen:
                seen.add(found.key)
                yield found


def judged_attentions(
    wild: WildModel, known: Collection[str], part: Part | None, judge: Callable[[Attention], Report]
) -> Iterator[dict[str, Any]]:
    """Judge every attention of a model that is not known yet; as plain data, since it comes from a child."""
    for attention in attentions_in(wild, known):
        if part in (None, part_of(attention.name)):
            yield asdict(_judged(attention, judge))


def _judged(attention: Attention, judge: Callable[[Attention], Report]) -> Judged:
    started = time.process_time()
    try:
        report = judge(attention)
    except Exception as error:  # whatever the checker does on foreign code is counted as not read, with the reason
        report = Report(attention.name, reason=f"the checker raised {type(error).__name__}: {error}")
    return Judged(
        attention.library,
        attention.model,
        attention.name,
        attention.path,
        attention.implementation,
        attention.key,
        verdict=verdict_of(report),
        findings=[described(finding) for finding in (*report.findings, *report.intended)],
        not_exercised=[exercise.what for exercise in report.not_exercised],
        reason=report.reason,
        seconds=time.process_time() - started,
    )


def verdict_of(report: Report) -> str:
    """Give the column of the table that a report belongs to.

    >>> verdict_of(Report("x", verdict="equal")), verdict_of(Report("x"))
    ('equal', 'not read')
    """
    if report.verdict == "equal" and report.intended:
        return "intended"
    return "not read" if report.verdict == "unchecked" else report.verdict


def described(finding: Finding) -> str:
    """Say in one line what a finding is, and where."""
    line = finding.line
    place = f" at {line.path.rpartition('site-packages/')[2]}:{line.number} `{line.text}`" if line else ""
    reason = f" (intended: {finding.reason})" if finding.reason else ""
    known = f" (on purpose in: {finding.on_purpose_in})" if finding.on_purpose_in and not reason else ""
    return f"{finding.name}{place}: {finding.sentence}{reason}{known}"
