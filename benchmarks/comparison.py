"""Two runs compared: what became faster or slower beyond noise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table

from benchmarks.results import Row
from benchmarks.summarising import Ratio, ratio_of_medians
from benchmarks.tables import bytes_in_words, time_in_words
from scratch.validation import ArgumentValueError

__all__ = ["Change", "change_table", "changes_between"]

Verdict = Literal["same", "faster", "slower", "more memory", "less memory", "lost", "gained"]
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
        threshold: Relative change that counts, if the interval of the ratio excludes 1 too.

    Returns:
        One entry for each cell of both runs.

    Raises:
        ValueError: If they share none.
    """
    before = {(row.case, row.contender): row for row in old}
    pairs = [(before[row.case, row.contender], row) for row in new if (row.case, row.contender) in before]
    if not pairs:
        raise ArgumentValueError("the two results must share a cell of equal settings, threads and device, got none")
    return [_change(first, second, threshold) for first, second in pairs]


def _change(old: Row, new: Row, threshold: float) -> Change:
    if old.status != "timed" or new.status != "timed":
        verdict: Verdict = "lost" if old.status == "timed" else "gained" if new.status == "timed" else "same"
        return Change(old, new, verdict, None)
    ratio = ratio_of_medians(new.rounds_us, old.rounds_us)
    if ratio.low > 1 and ratio.value > 1 + threshold:
        return Change(old, new, "slower", ratio)
    if (new.peak_memory_bytes or 0) > (1 + threshold) * (old.peak_memory_bytes or 0):
        return Change(old, new, "more memory", ratio)
    if ratio.high < 1 and ratio.value < 1 / (1 + threshold):
        return Change(old, new, "faster", ratio)
    if (old.peak_memory_bytes or 0) > (1 + threshold) * (new.peak_memory_bytes or 0):
        return Change(old, new, "less memory", ratio)
    return Change(old, new, "same", ratio)


def change_table(changes: Sequence[Change]) -> Table:
    """Show what changed, the worst first.

    Args:
        changes: Any; those that are the same are left out.

    Returns:
        A table for the terminal.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("case")
    for name in ("contender", "before", "after", "ratio", ""):
        table.add_column(name, justify="left" if name == "contender" else "right")
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
