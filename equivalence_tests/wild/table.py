"""What became of the attentions of the wild, as a table and as a file."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

__all__ = ["VERDICTS", "summary", "table", "written"]

VERDICTS = ("equal", "intended", "partial", "deviates", "not read")


def table(judged: Sequence[dict[str, Any]]) -> Table:
    """Make the table, a library a row, and all together."""
    made = Table("library", "attentions", *VERDICTS, "with a verdict", "median s", "most s", box=box.SIMPLE)
    libraries = sorted({one["library"] for one in judged})
    for name, rows in [(name, [x for x in judged if x["library"] == name]) for name in libraries] + [("all", judged)]:
        figures = summary(rows)
        counts = [str(figures["verdicts"][verdict]) for verdict in VERDICTS]
        share = f"{figures['with_verdict_percent']:.1f} %"
        made.add_row(
            name, str(len(rows)), *counts, share, f"{figures['median_seconds']:.2f}", f"{figures['most_seconds']:.1f}"
        )
    return made


def summary(judged: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Give the figures.

    >>> summary([{"verdict": "equal", "seconds": 1.0}, {"verdict": "not read", "seconds": 3.0}])["with_verdict_percent"]
    50.0
    """
    counts = Counter(one["verdict"] for one in judged)
    seconds = [one["seconds"] for one in judged] or [0.0]
    read = len(judged) - counts["not read"]
    return {
        "attentions": len(judged),
        "verdicts": {verdict: counts[verdict] for verdict in VERDICTS},
        "with_verdict_percent": round(100 * read / max(len(judged), 1), 1),
        "partial_percent_of_read": round(100 * counts["partial"] / max(read, 1), 1),
        "median_seconds": round(statistics.median(seconds), 3),
        "most_seconds": round(max(seconds), 2),
    }


def written(path: Path, what: dict[str, Any], judged: Sequence[dict[str, Any]], not_built: dict[str, str]) -> None:
    """Write the committed result: the figures, each attention, and the models that could not be built or run."""
    rows = [_without_source(one) for one in judged]
    rows.sort(key=lambda one: (one["library"], one["name"], one["path"], one["implementation"]))
    content = {**what, "attentions": rows, "not_built": dict(sorted(not_built.items()))}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_source(one: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is a piece of somebody's code: lines and expressions.

    >>> _without_source({"key": "x", "before": "q * s", "findings": ["scale at a.py:3 `q * s`: It is wrong."]})
    {'findings': ['scale at a.py:3: It is wrong.']}
    """
    kept = {name: value for name, value in one.items() if name not in ("key", "before", "after")}
    return kept | {"findings": [re.sub(r"(:\d+) `.*?`(?=: )", r"\1", said) for said in one["findings"]]}
