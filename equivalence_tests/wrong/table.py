"""What became of the versions: a table by operator and by verdict, and a file."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from equivalence_tests.wrong.asking import VERDICTS
from equivalence_tests.wrong.judging import NO_ANSWER, accused, called_equal, excused

__all__ = ["summary", "table", "written"]

COLUMNS = (*VERDICTS, NO_ANSWER)
HEADINGS = (
    "differ", "EQUAL", "intended", "as far", "deviates", "on line", "unchecked", "no answer", "same", "accused",
)  # fmt: skip
Rows = Sequence[dict[str, Any]]


def summary(rows: Rows) -> dict[str, Any]:
    """Count the versions that differ by verdict, and those that do not and are accused.

    >>> row = {"truth": "differs", "verdict": "equal", "on_the_line": False, "seconds": 0.5}
    >>> summary([row, {"dropped": "it crashed"}])["called_equal"]
    1
    """
    differ = [row for row in rows if row.get("truth") == "differs"]
    counts = Counter(row["verdict"] for row in differ)
    seconds = [row["seconds"] for row in rows if "verdict" in row] or [0.0]
    return {
        "differ": len(differ),
        "called_equal": sum(map(called_equal, rows)),
        "intended": sum(map(excused, rows)),
        "intended_without_a_part_of_its_own": sum(excused(row) and not row["adds"] for row in rows),
        "verdicts": {verdict: counts[verdict] for verdict in COLUMNS},
        "on_the_line": sum(row["on_the_line"] for row in differ),
        "do_not_differ": sum(row.get("truth") == "same" for row in rows),
        "accused": sum(map(accused, rows)),
        "dropped": sum("dropped" in row for row in rows),
        "median_seconds": round(statistics.median(seconds), 3),
        "most_seconds": round(max(seconds), 2),
    }


def table(rows: Rows) -> Table:
    """Lay out the versions that differ, an operator a row, and all together."""
    made = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("operator", *HEADINGS):
        made.add_column(heading, no_wrap=True, justify="left" if heading == "operator" else "right")
    for operator in sorted({row["operator"] for row in rows}):
        _add(made, operator, [row for row in rows if row["operator"] == operator])
    made.add_section()
    _add(made, "all", rows)
    return made


def _add(made: Table, name: str, rows: Rows) -> None:
    found = summary(rows)
    said = found["verdicts"]
    wrong = (found["differ"], found["called_equal"], found["intended"], said["partial"])
    seen = (said["deviates"], found["on_the_line"], said["unchecked"], said[NO_ANSWER])
    made.add_row(name, *map(str, (*wrong, *seen, found["do_not_differ"], found["accused"])))


def written(path: Path, facts: dict[str, Any], rows: Rows) -> None:
    """Write the figures and each version that has a truth; where one exists already, in one step."""
    kept = [_without_source(row) for row in rows if "truth" in row]
    content = {**facts, "summary": summary(rows), "versions": kept}
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _without_source(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is a piece of somebody's code."""
    return {name: value for name, value in row.items() if row.get("room") != "wild" or name not in ("diff", "reason")}
