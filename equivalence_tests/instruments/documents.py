"""What the tests of README and of the guide share: the blocks of code in a document, and reports without rounding."""

import re
from pathlib import Path

__all__ = ["blocks", "without_rounding"]


def blocks(document: Path, language: str) -> list[str]:
    """Give the blocks of one language in a Markdown file."""
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def without_rounding(report: str) -> list[str]:
    """Give the lines without trailing blanks, and without rounding errors, which differ between machines."""
    lines = report.strip().splitlines()
    return [re.sub(r"\d+(\.\d+)?e-\d+|ratio \d+\.\d+", "#", line.rstrip()) for line in lines]
