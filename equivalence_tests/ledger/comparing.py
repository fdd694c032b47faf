"""What two runs of the ledger say differently."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Row", "changes", "kept", "read", "summary", "written"]

Row = Mapping[str, Any]


def read(path: Path) -> dict[str, Row]:
    """Read the rows of a file, by their targets; none if there is no such file."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["target"]: row for row in rows}


def written(path: Path, rows: Mapping[str, Row]) -> None:
    """Write a row a line, in the order of the targets."""
    lines = (json.dumps(rows[target], ensure_ascii=False) + "\n" for target in sorted(rows))
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def changes(before: Mapping[str, Row], after: Mapping[str, Row]) -> Iterator[str]:
    """Say what became of each target that is not as it was; seconds do not count.

    >>> one = {"verdict": "equal", "found": [], "seconds": 0.5}
    >>> other = {"verdict": "deviates", "found": ["scale_missing"], "seconds": 0.9}
    >>> [*changes({"a": one, "b": one}, {"a": {**one, "seconds": 0.7}, "b": other})]
    ["b: verdict 'equal' -> 'deviates', found [] -> ['scale_missing']"]
    """
    for target in sorted({*before, *after}):
        if target not in after:
            yield f"{target}: gone, was {before[target]['verdict']!r}"
        elif target not in before:
            yield f"{target}: new, is {after[target]['verdict']!r} {after[target]['found']}"
        elif differing := _differing(before[target], after[target]):
            yield f"{target}: {', '.join(differing)}"


def _differing(old: Row, new: Row) -> list[str]:
    names = [name for name in {**old, **new} if name not in ("target", "seconds")]
    return [f"{name} {old.get(name)!r} -> {new.get(name)!r}" for name in names if old.get(name) != new.get(name)]


def kept(before: Mapping[str, Row], after: Mapping[str, Row]) -> dict[str, Row]:
    """Give the new rows, and the old ones where nothing changed but the seconds, and those by less than a half.

    >>> old = {"a": {"verdict": "equal", "seconds": 0.5}}
    >>> kept(old, {"a": {"verdict": "equal", "seconds": 0.6}}) == old
    True
    """
    return {target: before[target] if _as_before(before.get(target), row) else row for target, row in after.items()}


def _as_before(old: Row | None, new: Row) -> bool:
    return old is not None and not _differing(old, new) and old["seconds"] / 2 <= new["seconds"] <= 1.5 * old["seconds"]


def summary(rows: Sequence[Row]) -> str:
    """Count the verdicts, and say what they took.

    >>> summary([{"verdict": "equal", "seconds": 0.5}, {"verdict": "equal", "seconds": 0.7}])
    '2 targets: 2 equal; 1 CPU seconds, median 0.60'
    """
    verdicts = [row["verdict"] for row in rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted({*verdicts}))
    seconds = [row["seconds"] for row in rows] or [0.0]
    return f"{len(rows)} targets: {counts}; {sum(seconds):.0f} CPU seconds, median {statistics.median(seconds):.2f}"
