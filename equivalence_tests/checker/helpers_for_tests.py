"""What several tests of the checker use."""

from equivalence_tests.checker.findings import Finding


def line_of(finding: Finding) -> str:
    """Write the line of a finding: "file.py:12: code"; "" if it has none."""
    return "" if finding.line is None else f"{finding.line.path}:{finding.line.number}: {finding.line.text}"
