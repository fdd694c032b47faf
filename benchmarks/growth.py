"""How cost grows with the length, where enough lengths were measured."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from benchmarks.grids import Case
from benchmarks.results import Row
from benchmarks.summarising import growth_exponent

__all__ = ["Growth", "growths", "series_by_length"]

FEWEST_LENGTHS = 3  # two points lie on any line


@dataclass(frozen=True)
class Growth:
    """The exponents of one contender: cost = c * length^exponent.

    Args:
        case: The settings, at the greatest length.
        contender: Who.
        lengths: What was measured.
        time: Exponent of the time.
        memory: Exponent of the peak memory.
    """

    case: Case
    contender: str
    lengths: tuple[int, ...]
    time: float
    memory: float | None


def series_by_length(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Put together the timed rows that differ in nothing but their length, in its order.

    Args:
        rows: Results.

    Yields:
        One list for each contender and each combination of the other settings.
    """
    series: dict[tuple[Case, str], list[Row]] = {}
    for row in rows:
        if row.status == "timed":
            same_length = row.case.key_len == row.case.query_len
            elsewhere = replace(row.case, query_len=0, key_len=0 if same_length else row.case.key_len)
            series.setdefault((elsewhere, row.contender), []).append(row)
    for found in series.values():
        yield sorted(found, key=lambda row: row.case.query_len)


def growths(rows: Iterable[Row]) -> list[Growth]:
    """Fit the exponents of time and memory wherever at least three lengths were measured.

    Args:
        rows: Results.

    Returns:
        One entry for each contender and each combination of the other settings.
    """
    return [_growth(series) for series in series_by_length(rows) if len(series) >= FEWEST_LENGTHS]


def _growth(series: list[Row]) -> Growth:
    lengths = [row.case.query_len for row in series]
    times = [row.median_us for row in series if row.median_us is not None]
    memory = [row.peak_memory_bytes for row in series if row.peak_memory_bytes]
    return Growth(
        series[-1].case,
        series[-1].contender,
        tuple(lengths),
        growth_exponent(lengths, times),
        growth_exponent(lengths, memory) if len(memory) == len(lengths) else None,
    )
