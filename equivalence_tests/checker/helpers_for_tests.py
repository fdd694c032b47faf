"""What several tests of the checker use, and those of the documents that show its reports."""

import re
from pathlib import Path
from typing import Any, TypeVar

from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify

Kind = TypeVar("Kind")


def changed(kind: type[Kind], **attributes: Any) -> type[Kind]:
    """Make a class of the same file that is like another but for these attributes; it has no text of its own."""
    made: type[Kind] = type(f"Changed{kind.__name__}", (kind,), {"__module__": kind.__module__, **attributes})
    return made


def saved(folder: Path, text: str, name: str) -> str:
    """Write somebody's file, and name what is to be verified in it."""
    (folder / "mine.py").write_text(text, encoding="utf-8")
    return f"{folder / 'mine.py'}:{name}"


def report_on(text: str, name: str, folder: Path) -> str:
    """Say what is found in somebody's file, in one line that begins with the verdict."""
    report = verify(saved(folder, text, name))
    return f"{report.verdict}: {' '.join(str(report).split())}"


def line_of(finding: Finding) -> str:
    """Give the code on the line of a finding; "" if it has none."""
    return "" if finding.line is None else finding.line.text


def proof_holds(finding: Finding) -> bool:
    """Say whether a finding has a proof, and that holds."""
    return finding.proof is not None and finding.proof.holds


def program_of(report: Report) -> str:
    """Give the program in torch's own parts; "" if there is none."""
    return "" if report.equivalent is None else report.equivalent.source


def blocks(document: Path, language: str) -> list[str]:
    """Give the blocks of one language in a Markdown file."""
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def without_rounding(report: str) -> list[str]:
    """Give the lines without trailing blanks, and without rounding errors, which differ between machines."""
    lines = report.strip().splitlines()
    return [re.sub(r"\d+(\.\d+)?e-\d+|ratio \d+\.\d+", "#", line.rstrip()) for line in lines]
