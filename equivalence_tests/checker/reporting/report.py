"""The report of ``verify``, as data and on the screen."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from equivalence_tests.checker.reporting.equivalents import Equivalent
from equivalence_tests.checker.reporting.findings import VERDICTS, CheckResult, Exercise, Finding, Verdict
from equivalence_tests.checker.reporting.rendering import (
    Shown,
    checks_view,
    coverage_view,
    findings_view,
    headline,
    intended_view,
    reading_view,
)


@dataclass(repr=False)
class Report(Shown):
    """The report of ``verify`` on one attention, layer, part or model.

    Args:
        target: What was checked.
        kind: What it is: "multi-head attention", "decoder layer", ...
        verdict: "equal" (except where ``intended``), "partial" (equal as far as it ran), "deviates" or "unchecked".
        findings: What is wrong.
        suspected: What may be wrong though no number shows it; no line is blamed for it.
        intended: What deviates from torch's formula on purpose.
        coverage: What the code offers, exercised or not.
        conventions: What was found out about the code: (what, as found, as torch.nn has it).
        checks: The results of the small checks, such as that two calls agree.
        notes: Anything else that the user should know.
        reason: Why it could not be checked, or what differs where no finding says so; "" otherwise.
        place: Path of the module that runs it, where it is one of several in a call; "" otherwise.
        equivalent: Torch's own program with the user's weights, where one was made.
        unread: Why none could be made; "" otherwise.
        template: The call that ran, or else the one that got furthest, as a script; "" where none was tried.
        seconds: CPU time that it took.
    """

    target: str
    kind: str = ""
    verdict: Verdict = "unchecked"
    findings: list[Finding] = field(default_factory=list)
    suspected: list[Finding] = field(default_factory=list)
    intended: list[Finding] = field(default_factory=list)
    coverage: list[Exercise] = field(default_factory=list)
    conventions: list[tuple[str, str, str]] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""
    place: str = ""
    equivalent: Equivalent | None = None
    unread: str = ""
    template: str = ""
    seconds: float = 0.0

    def __bool__(self) -> bool:
        """True if it is equal to torch, except where intended."""
        return self.verdict == "equal"

    @property
    def title(self) -> str:
        """What was checked, and where in it."""
        return f"{self.target}: {self.place}" if self.place else self.target

    @property
    def exit_status(self) -> int:
        """0 equal, 1 deviates, 2 could not be checked, 3 equal as far as it ran."""
        return VERDICTS[self.verdict]

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The names of what is wrong; where nothing is proven, of what is suspected."""
        return tuple(finding.name for finding in self.findings or self.suspected)

    @property
    def not_exercised(self) -> list[Exercise]:
        """What the verdict says nothing about."""
        return [exercise for exercise in self.coverage if not exercise.exercised]

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain data."""
        return asdict(self) | {"exit_status": self.exit_status}

    def __rich__(self) -> Group:
        """Lay the report out for a terminal: what is wrong first, and how the code was read after it."""
        head = [headline(self.verdict, self.title, self.kind, self.intended)]
        reason = [Padding(Text(self.reason), (0, 2))] if self.reason else []
        if self.template and self.verdict == "unchecked":
            named = f"sidebyside verify {self.target} --template" if ":" in self.target else "report.template"
            reason.append(Padding(Text(f"{named} gives this call as a script to edit."), (0, 2)))
        return Group(*head, *reason, *(Padding(part, (1, 0, 0, 2)) for part in self._parts()))

    def _parts(self) -> Iterator[RenderableType]:
        yield from findings_view(self.findings)
        if self.intended:
            yield intended_view(self.intended)
        if self.not_exercised:
            yield coverage_view(self.not_exercised)
        right = self.verdict in ("equal", "partial")  # then only what was taken for granted is worth a look
        assumed = (row for row in self.conventions if "mask" in f"{row[0]} {row[2]}" or row[1].startswith("(len, "))
        if rows := [*assumed] if right else self.conventions:
            yield reading_view(rows)
        if self.equivalent is not None:
            yield self.equivalent.in_short(self.intended)
        if not self.findings and any(check.outcome in ("failed", "expected") for check in self.checks):
            yield checks_view(self.checks)  # what fails beside a finding follows from it
        if self.notes:
            yield Group(*(Text(f"Note: {note}", style="dim") for note in self.notes))
