"""What to use, for all cases at once: one table, for the terminal and for the page."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from benchmarks.advice import Advice, advice_by_case
from benchmarks.contenders import BASELINE
from benchmarks.grids import LENGTHS, SETTINGS, Case, label_of
from benchmarks.results import Row, ratio_between
from benchmarks.tables import NO_RESULT, bytes_in_words, shared_settings, short_names, time_in_words, varying_settings
from equivalence_tests.checker.reporting.rendering import table

__all__ = ["AdviceTable", "Entry", "advice_table", "in_sentences", "summary"]

BESIDE = " / best"
UNDECIDED, NOTHING = "undecided", "nothing could be timed"
WHY = {
    UNDECIDED: "the times vary too much to choose; measure again when nothing else runs",
    NO_RESULT: "nothing to compare",
}


@dataclass(frozen=True)
class Entry:
    """One cell of the table of advice: its text, and the number by which it is sorted, if it is one."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class AdviceTable:
    """What to use in each case.

    Args:
        headings: Those of the case's settings, then of what to use and what it costs.
        cases: One for each line.
        lines: The cells.
    """

    headings: Sequence[str]
    cases: Sequence[Case]
    lines: Sequence[Sequence[Entry]]


CASE_HEADINGS = ("component", "mode", "length", "settings")


def advice_table(rows: Sequence[Row]) -> AdviceTable:
    """Put the advice of all cases into one table.

    Args:
        rows: Results.
    """
    found = list(advice_by_case(rows))
    beside = [*dict.fromkeys(row.contender for advice in found for row in advice.own), "scratch", BASELINE]
    names, by_cell = short_names(beside), {(row.case, row.contender): row for row in rows}
    lines = [
        [*_what(x.case), *_best(x), *(_ratio(by_cell.get((x.case, name)), x.best) for name in beside)] for x in found
    ]
    headings = [*CASE_HEADINGS, "use", "time", "memory", *(names[x] + BESIDE for x in beside)]
    return AdviceTable(headings, [x.case for x in found], lines)


def summary(rows: Sequence[Row]) -> RenderableType:
    """Show that table on a terminal, and below it what a cell without a number means.

    Args:
        rows: Results.
    """
    found, after = advice_table(rows), len(CASE_HEADINGS)
    varying = varying_settings(found.cases)
    names = [", ".join((*_kind(case), label_of(case, varying, usual=False))).strip(", ") for case in found.cases]
    lines = [[name, *(x.text for x in line[after:])] for name, line in zip(names, found.lines, strict=True)]
    shown = {text for line in lines for text in line}
    headings = ["", *(x.removesuffix(BESIDE) for x in found.headings[after:])]
    notes = [f"{', '.join(headings[4:])}: time over that of the one to use."]
    notes += [f"{word}: {why}." for word, why in WHY.items() if word in shown]
    title = Text.assemble(("What to use", "bold"), f": {shared_settings(rows)}")
    return Group(title, table(headings, lines), *(Text(note, style="dim") for note in notes))


def in_sentences(advices: Iterable[Advice]) -> Group:
    """Show the advice of each case in words, indented below its name."""
    pairs = ((Text(str(x.case), "bold"), Padding(Text(str(x)), (0, 0, 0, 2))) for x in advices)
    return Group(*(part for pair in pairs for part in pair))


def _kind(case: Case) -> tuple[str, str]:
    return case.component.replace("_", " "), case.mode.replace("_", " ")


def _what(case: Case) -> Iterator[Entry]:
    others = [name for name in SETTINGS if name not in LENGTHS]
    yield from map(Entry, _kind(case))
    yield Entry(label_of(case, LENGTHS).removeprefix("length "), case.query_len)
    yield Entry(label_of(case, others, usual=False))


def _best(advice: Advice) -> Iterator[Entry]:
    best = advice.best
    if best is None or best.median_us is None:
        yield from (Entry(NOTHING), Entry(NO_RESULT), Entry(NO_RESULT))
        return
    memory = best.peak_memory_bytes or 0
    yield Entry(UNDECIDED if advice.undecided is not None else best.contender)
    yield Entry(time_in_words(best.median_us), best.median_us)
    yield Entry(bytes_in_words(memory), memory)


def _ratio(row: Row | None, best: Row | None) -> Entry:
    """Compare a contender with the best."""
    if row is None or best is None:
        return Entry(NO_RESULT)
    if row.median_us is None:
        return Entry(row.status)
    ratio = ratio_between(row, best).value
    return Entry(f"{ratio:.2f}", ratio)
