"""What several tests of the checker use, and those of the documents that show its reports."""

import re
from pathlib import Path

from equivalence_tests.checker.reporting.findings import Finding


def line_of(finding: Finding) -> str:
    """Write the line of a finding: "file.py:12: code"; "" if it has none."""
    return "" if finding.line is None else f"{finding.line.path}:{finding.line.number}: {finding.line.text}"


def blocks(document: Path, language: str) -> list[str]:
    """Give the blocks of one language in a Markdown file."""
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def without_rounding(report: str) -> list[str]:
    """Give the lines without trailing blanks, and without rounding errors, which differ between machines."""
    lines = report.strip().splitlines()
    return [re.sub(r"\d+(\.\d+)?e-\d+|ratio \d+\.\d+", "#", line.rstrip()) for line in lines]
