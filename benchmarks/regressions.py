"""Two runs compared: what became faster or slower beyond noise."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table

from benchmarks.contenders import BASELINE
from benchmarks.grids import Case
from benchmarks.results import Row, in_turns
from benchmarks.summarising import Ratio, ratio_of_medians
from benchmarks.tables import bytes_in_words, time_in_words
from scratch.validation import ArgumentValueError

__all__ = ["Change", "change_table", "changes_between"]

Verdict = Literal["same", "faster", "slower", "more memory", "less memory", "lost", "gained"]
Cell = tuple[Case, str]
WORSE = ("slower", "more memory", "lost")


@dataclass(frozen=True)
class Change:
    """One contender in one case, before and after.

    Args:
        old: Before.
        new: After.
        verdict: "lost" was timed before and is not now; "gained" the other way round.
        ratio: New time over old time; None if one of them is missing.
    """

    old: Row
    new: Row
    verdict: Verdict
    ratio: Ratio | None

    @property
    def is_regression(self) -> bool:
        """Whether it became worse."""
        return self.verdict in WORSE


def changes_between(old: Sequence[Row], new: Sequence[Row], threshold: float) -> list[Change]:
    """Compare the cells that two runs share.

    Args:
        old: Rows of the earlier run.
        new: Rows of the later one.
        threshold: Relative change that counts, if the interval of the ratio excludes 1 too. Where others ran in the
            same rounds, it must count beside theirs, too: what slows all of them alike is the machine.

    Returns:
        One entry for each cell of both runs.

    Raises:
        ValueError: If they share none.
    """
    before, after = ({(row.case, row.contender): row for row in rows} for rows in (old, new))
    shared = [cell for cell in after if cell in before]
    if not shared:
        raise ArgumentValueError("the two results must share a cell of equal settings, threads and device, got none")
    changes = []
    for case, contender in shared:
        other = (case, "scratch" if contender == BASELINE else BASELINE)
        beside = _rounds_beside(before, (case, contender), other), _rounds_beside(after, (case, contender), other)
        changes.append(_change(before[case, contender], after[case, contender], threshold, *beside))
    return changes


def _rounds_beside(rows: Mapping[Cell, Row], cell: Cell, other: Cell) -> list[float]:
    """Give the ratios of a cell's rounds to those of another; none where they were not measured in turns."""
    row, companion = rows[cell], rows.get(other)
    if companion is None or not in_turns(row, companion):
        return []
    return [x / y for x, y in zip(row.rounds_us, companion.rounds_us, strict=True)]


def _change(old: Row, new: Row, threshold: float, old_beside: Sequence[float], new_beside: Sequence[float]) -> Change:
    if old.status != "timed" or new.status != "timed":
        verdict: Verdict = "lost" if old.status == "timed" else "gained" if new.status == "timed" else "same"
        return Change(old, new, verdict, None)
    ratio = ratio_of_medians(new.rounds_us, old.rounds_us)
    ratios = [ratio, ratio_of_medians(new_beside, old_beside)] if old_beside and new_beside else [ratio]
    old_bytes, new_bytes = (row.peak_memory_bytes or 0 for row in (old, new))
    if all(x.low > 1 and x.value > 1 + threshold for x in ratios):
        return Change(old, new, "slower", ratio)
    if new_bytes > (1 + threshold) * old_bytes:
        return Change(old, new, "more memory", ratio)
    if all(x.high < 1 and x.value < 1 / (1 + threshold) for x in ratios):
        return Change(old, new, "faster", ratio)
    return Change(old, new, "less memory" if old_bytes > (1 + threshold) * new_bytes else "same", ratio)


def change_table(changes: Sequence[Change]) -> Table:
    """Show what changed, the worst first.

    Args:
        changes: Any; those that are the same are left out.

    Returns:
        A table for the terminal.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("case")
    for name in ("contender", "old", "new", "ratio", ""):
        table.add_column(name, justify="left" if name == "contender" else "right", no_wrap=True)
    changed = [change for change in changes if change.verdict != "same"]
    for change in sorted(changed, key=lambda x: (not x.is_regression, -(x.ratio.value if x.ratio else 0))):
        table.add_row(*_cells(change))
    return table


def _cells(change: Change) -> Iterator[str]:
    yield str(change.new.case)
    yield change.new.contender
    yield _measured(change.old)
    yield _measured(change.new)
    ratio = change.ratio
    yield "" if ratio is None else f"{ratio.value:.2f}\n{ratio.low:.2f}–{ratio.high:.2f}"
    yield f"[{'red' if change.is_regression else 'green'}]{change.verdict}[/]"


def _measured(row: Row) -> str:
    if row.median_us is None:
        return row.status
    return f"{time_in_words(row.median_us)}\n{bytes_in_words(row.peak_memory_bytes or 0)}"
