"""What to use: one sentence for each shape."""

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.cases import Case
from benchmarks.contenders import BASELINE, CONTENDERS
from benchmarks.results import Row, in_turns
from benchmarks.summarising import Ratio, median_ratio, ratio_of_medians
from benchmarks.tables import bytes_in_words, time_in_words

__all__ = ["advice", "advice_by_case", "fastest"]

NOTICEABLE = 1.05  # what takes up to a twentieth longer is as good


def fastest(rows: Sequence[Row]) -> Row | None:
    """Choose among the contenders of one case.

    Args:
        rows: Of one case.

    Returns:
        The fastest; the built-in, or else scratch, if it takes at most a twentieth longer, or if it cannot be told
        whether it takes longer at all. None if nothing was timed.
    """
    timed = {row.contender: row for row in rows if row.median_us is not None}
    if not timed:
        return None
    best = min(timed.values(), key=_time)
    for name in (BASELINE, "scratch"):
        if name in timed and not _is_slower(_ratio(timed[name], best)):
            return timed[name]
    return best


def _ratio(row: Row, other: Row) -> Ratio:
    """Give the ratio of two times of one case, round by round where both were measured in the same rounds."""
    return (median_ratio if in_turns(row, other) else ratio_of_medians)(row.rounds_us, other.rounds_us)


def _is_slower(ratio: Ratio) -> bool:
    return ratio.low > 1 and ratio.value > NOTICEABLE


def advice(rows: Sequence[Row]) -> str:
    """Say in one sentence what to use.

    Args:
        rows: Of one case.

    Returns:
        The sentence.
    """
    best = fastest(rows)
    if best is None:
        return "Nothing could be timed."
    words = (
        f"Use {_in_full(best.contender)}: {time_in_words(_time(best))}, {bytes_in_words(best.peak_memory_bytes or 0)}"
    )
    others = [row for row in rows if row.contender in (BASELINE, "scratch") and row is not best]
    return "; ".join([words, *(_compared(row, best) for row in others)]) + "."


def advice_by_case(rows: Iterable[Row]) -> Iterator[tuple[Case, str]]:
    """Say for each case what to use.

    Args:
        rows: Results.

    Yields:
        The case and the sentence.
    """
    by_case: dict[Case, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    for case, found in by_case.items():
        yield case, advice(found)


def _in_full(contender: str) -> str:
    if contender in (BASELINE, "scratch") or contender not in CONTENDERS:
        return contender
    return f"{contender} ({CONTENDERS[contender].meaning})"


def _compared(row: Row, best: Row) -> str:
    if row.median_us is None:
        return f"{row.contender} is {row.status}"
    ratio, memory = _ratio(row, best), bytes_in_words(row.peak_memory_bytes or 0)
    if _is_slower(ratio):
        return f"{row.contender} takes {ratio.value:.3g} times as long, with {memory}"
    as_fast = "as fast" if ratio.value <= NOTICEABLE else "as fast, as far as the noise lets one tell"
    return f"{row.contender} is {as_fast}, with {memory}"


def _time(row: Row) -> float:
    assert row.median_us is not None
    return row.median_us
