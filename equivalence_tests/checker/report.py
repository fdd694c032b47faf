"""What was found, as data, as a screenful of text, as JSON and as JUnit XML."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["CheckResult", "Finding", "Report"]

Outcome = Literal["passed", "failed", "skipped", "expected"]
Verdict = Literal["equal", "deviates", "unchecked"]


@dataclass(frozen=True)
class Finding:
    """A mistake that explains the numbers.

    Args:
        name: Its short identifier.
        sentence: What is wrong.
        have: The formula that the code computes.
        want: The formula that it should compute.
        fix: What would mend it.
        evidence: Why we are sure.
        line: "file.py:12: the guilty line" if it could be found; "" if not.
        choice: Which well-known models do this on purpose; "" if none does.
        alternatives: Other mistakes that give the same numbers.
        where: Path of the sub-module; "" for the checked object itself.
    """

    name: str
    sentence: str
    have: str = ""
    want: str = ""
    fix: str = ""
    evidence: str = ""
    line: str = ""
    choice: str = ""
    alternatives: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class CheckResult:
    """One small check and how it went."""

    name: str
    outcome: Outcome
    detail: str = ""


@dataclass
class Report:
    """The answer to ``verify``.

    Args:
        target: What was checked.
        kind: What it is: "multi-head attention", "LayerNorm", ...
        verdict: "equal", "deviates" or "unchecked".
        conventions: What was found out about the code: (what, as found, as torch.nn has it).
        checks: The small checks.
        findings: The diagnosis.
        notes: What else the user should know.
        reason: Why it could not be checked, or what does not hold where no finding says so; "" otherwise.
    """

    target: str
    kind: str = ""
    verdict: Verdict = "unchecked"
    conventions: list[tuple[str, str, str]] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def exit_status(self) -> int:
        """0 equal, 1 deviates, 2 could not be checked."""
        return {"equal": 0, "deviates": 1, "unchecked": 2}[self.verdict]

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The names of what was found."""
        return tuple(finding.name for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain data."""
        return asdict(self) | {"exit_status": self.exit_status}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Report":
        """Read what ``to_dict`` gave."""
        plain = {key: value for key, value in data.items() if key != "exit_status"}
        plain["conventions"] = [tuple(row) for row in plain["conventions"]]
        plain["checks"] = [CheckResult(**check) for check in plain["checks"]]
        plain["findings"] = [Finding(**f | {"alternatives": tuple(f["alternatives"])}) for f in plain["findings"]]
        return cls(**plain)

    def to_json(self) -> str:
        """Give everything as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_junit(self) -> str:
        """Give the checks as JUnit XML, one test case each, and the diagnosis with the failures."""
        failed = [c for c in self.checks if c.outcome == "failed"]
        unchecked = self.verdict == "unchecked"
        suite = ElementTree.Element(
            "testsuite",
            name=f"verify {self.target}",
            tests=str(len(self.checks) + unchecked),
            failures=str(len(failed)),
            errors=str(int(unchecked)),
        )
        diagnosis = "\n".join(f"{f.sentence} {f.evidence} {f.fix}" for f in self.findings)
        for check in self.checks:
            case = ElementTree.SubElement(suite, "testcase", classname=self.target, name=check.name)
            if check.outcome == "failed":
                ElementTree.SubElement(case, "failure", message=check.detail).text = diagnosis
            if check.outcome in ("skipped", "expected"):
                ElementTree.SubElement(case, "skipped", message=check.detail)
        if unchecked:
            case = ElementTree.SubElement(suite, "testcase", classname=self.target, name="could_be_checked")
            ElementTree.SubElement(case, "error", message=self.reason)
        return ElementTree.tostring(suite, encoding="unicode")

    def __str__(self) -> str:
        console = Console(width=110, color_system=None)
        with console.capture() as capture:
            console.print(self.__rich__())
        return capture.get()

    def __rich__(self) -> Group:
        """Lay the report out for a terminal."""
        parts: list[Any] = [self._headline()]
        if self.reason:
            parts.append(Padding(Text(self.reason), (0, 2)))
        if self.conventions:
            parts.append(self._conventions_table())
        parts += [Padding(self._finding_table(f), (1, 0, 0, 2)) for f in self.findings]
        if self.checks:
            parts.append(Padding(self._checks_table(), (1, 0, 0, 0)))
        parts += [Text(f"Note: {note}", style="dim") for note in self.notes]
        return Group(*parts)

    def _headline(self) -> Text:
        word, style = {
            "equal": ("EQUAL", "bold green"),
            "deviates": ("DEVIATES", "bold red"),
            "unchecked": ("COULD NOT BE CHECKED", "bold yellow"),
        }[self.verdict]
        return Text.assemble((word, style), f"  {self.target}", f" ({self.kind})" if self.kind else "")

    def _conventions_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for heading in ("what was found", "in this code", "in torch.nn"):
            table.add_column(heading)
        for row in self.conventions:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def _finding_table(self, finding: Finding) -> Group:
        sentence = (f"{finding.where}: " if finding.where else "") + finding.sentence
        rows = _grid()
        for label, value in (
            ("have", finding.have),
            ("want", finding.want),
            ("line", finding.line),
            ("mend", finding.fix),
            ("sure", finding.evidence),
            ("or", "; ".join(finding.alternatives)),
            ("choice", finding.choice),
        ):
            if value:
                rows.add_row(label, Text(value))
        return Group(Text(sentence, style="bold"), rows)

    def _checks_table(self) -> Group:
        passed = [c for c in self.checks if c.outcome == "passed"]
        rows = _grid()
        if self.kind == "layers" and passed:  # here the list says what the verdict is about
            rows.add_row("passed", ", ".join(c.name for c in passed))
        styles = {"failed": "red", "skipped": "dim", "expected": "yellow"}
        for check in self.checks:
            if check.outcome in ("failed", "expected"):
                style = styles[check.outcome]
                rows.add_row(Text(check.outcome, style), Text(f"{check.name}: {check.detail}", style))
        skipped = [c for c in self.checks if c.outcome == "skipped"]
        if skipped and (self.verdict == "unchecked" or self.kind == "layers"):  # there it could not be checked
            for check in skipped:
                rows.add_row(Text("skipped", "dim"), Text(f"{check.name}: {check.detail}", "dim"))
        elif skipped:
            names = ", ".join(c.name.removeprefix("check_") for c in skipped)
            rows.add_row(Text("skipped", "dim"), Text(f"what does not apply here: {names}", "dim"))
        return Group(Text(f"{len(passed)} of {len(self.checks)} checks passed"), Padding(rows, (0, 0, 0, 2)))


def _grid() -> Table:
    """Rows of a label and a text that is folded under itself."""
    grid = Table.grid(padding=(0, 2, 0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid
