"""Each version in a child of its own: the number first, then what the checker says."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from equivalence_tests.wild.children import Limits, in_children
from equivalence_tests.wrong.asking import EQUAL, INTENDED, asked
from equivalence_tests.wrong.drawing import drawn
from equivalence_tests.wrong.editing import Version
from equivalence_tests.wrong.operators import Operator
from equivalence_tests.wrong.sources import Right
from equivalence_tests.wrong.truth import Dropped, truth_of

__all__ = ["NO_ANSWER", "accused", "called_equal", "edited_here", "excused", "judged", "judged_here", "row_of"]

NO_ANSWER = "no answer"
TRIES = 4  # for each version that differs
LIMITS = Limits(cpu_seconds=60, wall_seconds=600.0)
Row = dict[str, Any]


def judged(versions: Sequence[Version], jobs: int) -> Iterator[Row]:
    """Judge versions in children and give a row for each that has a truth.

    Args:
        versions: What to judge.
        jobs: How many children at a time.
    """
    for version, found, why in in_children(versions, judged_here, limits=LIMITS, jobs=jobs):
        yield row_of(version, found, why)


def row_of(version: Version, found: Iterable[Row], why: str = "") -> Row:
    """Put together what was found out about a version.

    Args:
        version: The version.
        found: What ``judged_here`` said.
        why: Why it ended early; "" if it did not.
    """
    row = _told(version)
    for one in found:
        row |= one
    if "truth" not in row:
        row["dropped"] = row.get("dropped", why)
    elif "verdict" not in row:
        row |= {"verdict": NO_ANSWER, "reason": why, "names": [], "intended": [], "seconds": 0.0, "lines": []}
    if "verdict" in row:
        row["on_the_line"] = bool(set(row["lines"]) & set(version.lines))
    return row


def _told(version: Version) -> Row:
    right = version.right
    return {
        "room": right.room,
        "class": right.name,
        "operator": version.operator,
        "adds": version.adds,
        "diff": version.diff,
    }


def judged_here(version: Version) -> Iterator[Row]:
    """Find out the truth about one version and ask the checker, in this process."""
    right = version.right
    with tempfile.TemporaryDirectory() as folder:
        try:
            _, whole = right.imported(right.text, Path(folder), "right")
            path, module = right.imported(version.text, Path(folder))
            truth = truth_of(right, right.built(whole), right.built(module))
        except (Dropped, Exception) as error:  # a file with an edit may fail at import too
            yield {"dropped": f"{type(error).__name__}: {error}"[:200]}
            return
        if truth.kind == "neither":
            yield {"dropped": "neither the same nor another output"}
            return
        yield {"truth": truth.kind, "difference": truth.difference}
        yield asdict(asked(path, *right.asked(path, right.built(module))))


def edited_here(right: Right, operators: Sequence[Operator], seed: int, each: int) -> Iterator[Row]:
    """Judge versions of a right attention in this process, until enough of them differ.

    Args:
        right: What is edited.
        operators: The edits.
        seed: Of the draw.
        each: How many versions that differ, at most.
    """
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        for version in islice(drawn([right], operators, seed, Path(folder)), TRIES * each):
            if differ == each:
                return
            row = row_of(version, judged_here(version))
            differ += row.get("truth") == "differs"
            yield row


def called_equal(row: Row) -> bool:
    """Whether a version that differs is EQUAL, and nothing is named as intended that the right one does not have."""
    named = row.get("intended_anew", row.get("intended"))
    return row.get("truth") == "differs" and row["verdict"] in (EQUAL, INTENDED) and not named


def excused(row: Row) -> bool:
    """Whether a version that differs is EQUAL with something of its own that is taken for intended: to be judged."""
    return row.get("truth") == "differs" and row["verdict"] in (EQUAL, INTENDED) and not called_equal(row)


def accused(row: Row) -> bool:
    """Whether a version that does not differ is DEVIATES."""
    return row.get("truth") == "same" and row["verdict"] == "deviates"
