"""Results as tables for the terminal: a row for each case, a column for each contender."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.contenders import BASELINE, CONTENDERS, absence
from benchmarks.grids import LENGTHS, SETTINGS, Case, label_of
from benchmarks.growth import Growth, growths
from benchmarks.results import Row
from benchmarks.summarising import Ratio
from equivalence_tests.checker.reporting.rendering import Cell

__all__ = [
    "NO_RESULT",
    "bytes_in_words",
    "contenders_in",
    "cost_in_words",
    "groups_of",
    "result_tables",
    "shared_settings",
    "short_names",
    "time_in_words",
    "varying_label",
    "varying_settings",
]

NO_RESULT = "–"
WORDS = {"out of memory": "no memory", "unavailable": "not here", "unequal": "UNEQUAL"}


def result_tables(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Show all rows, a table for each component and mode.

    Args:
        rows: Results.

    Yields:
        Tables, each followed by the growth of its costs, what could not be timed or is unstable, and why a cell has no
        result.
    """
    for (component, mode), group in groups_of(rows).items():
        title = f"[bold]{component.replace('_', ' ')}, {mode.replace('_', ' ')}[/]: {shared_settings(group)}"
        yield Group(title, _table(group), *_growth_lines(group), *_problem_lines(group), *_absence_lines(group))


def groups_of(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Sort rows by component and mode."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case.component, row.case.mode), []).append(row)
    return groups


def varying_settings(cases: Iterable[Case]) -> tuple[str, ...]:
    """Name the settings in which cases differ, besides component and mode.

    >>> varying_settings([Case("attention", query_len=64), Case("attention", query_len=128)])
    ('query_len',)
    """
    found = list(cases)
    return tuple(name for name in SETTINGS if len({getattr(case, name) for case in found}) > 1)


def time_in_words(microseconds: float) -> str:
    """Write a time with three digits.

    >>> time_in_words(12.345), time_in_words(123456), time_in_words(2.5e6)
    ('12.3 µs', '123 ms', '2.5 s')
    """
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} µs"


def bytes_in_words(count: int) -> str:
    """Write a number of bytes.

    >>> bytes_in_words(1536), bytes_in_words(20 * 2**20)
    ('1.5 KiB', '20 MiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.{0 if count >= 10 * size else 1}f} {unit}"
    return f"{count} B"


def cost_in_words(row: Row) -> str:
    """Write median time and peak memory of a row that was timed."""
    assert row.median_us is not None
    return f"{time_in_words(row.median_us)}, {bytes_in_words(row.peak_memory_bytes or 0)}"


def short_names(contenders: Iterable[str]) -> dict[str, str]:
    """Leave the folders of users' files out, as far as no two names become one.

    >>> short_names(["scratch", "/home/me/a.py:Mine", "old/b.py:Mine", "new/b.py:Mine"])["/home/me/a.py:Mine"]
    'a.py:Mine'
    >>> list(short_names(["old/b.py:Mine", "new/b.py:Mine"]).values())
    ['old/b.py:Mine', 'new/b.py:Mine']
    """
    names = list(dict.fromkeys(contenders))
    return {name: _shortest(name, [other for other in names if other != name]) for name in names}


def _shortest(name: str, others: Sequence[str]) -> str:
    parts = name.replace("\\", "/").split("/")
    tails = ("/".join(parts[-count:]) for count in range(1, len(parts)))
    return next((tail for tail in tails if not any(f"/{other}".endswith(f"/{tail}") for other in others)), name)


def shared_settings(rows: Sequence[Row]) -> str:
    """Write the settings that all rows of a table have."""
    varying = varying_settings(row.case for row in rows)
    return label_of(rows[0].case, [name for name in SETTINGS if name not in varying], usual=False)


def _table(rows: Sequence[Row]) -> Table:
    cases = list(dict.fromkeys(row.case for row in rows))
    by_cell = {(row.case, row.contender): row for row in rows}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    names = contenders_in(rows)
    for heading in short_names(names).values():
        table.add_column(Cell(heading), justify="right", overflow="fold")
    for case in cases:
        cells = [_cell(by_cell.get((case, name))) for name in names]
        table.add_row(varying_label(case, rows), *cells, end_section=len(cases) > 1)
    return table


def varying_label(case: Case, rows: Sequence[Row]) -> str:
    """Write the settings in which a case differs from others of its table."""
    return label_of(case, varying_settings(row.case for row in rows))


def contenders_in(rows: Sequence[Row]) -> list[str]:
    """Name the contenders of some rows: the built-in, with which all are compared, the user's own, and the others."""
    present = {row.contender for row in rows}
    known = [name for name in CONTENDERS if name in present]
    first = [BASELINE] if BASELINE in present else []
    return [*first, *sorted(present - set(CONTENDERS)), *(name for name in known if name not in first)]


def _cell(row: Row | None) -> Text:
    """Give time, ratio to the built-in and memory, one below the other."""
    if row is None:
        return Text(NO_RESULT, style="dim")
    if row.status != "timed" or row.median_us is None:
        return Text(WORDS[row.status], style="bold red" if row.status == "unequal" else "dim")
    lines = Text(time_in_words(row.median_us))
    if row.contender != BASELINE and row.ratio_to_builtin is not None:
        lines.append(f"\n× {row.ratio_to_builtin:.2f}", style=_colour(row))
    if row.unstable:
        lines.append("\nunstable", style="yellow")
    if row.peak_memory_bytes is not None:
        lines.append(f"\n{bytes_in_words(row.peak_memory_bytes)}", style="dim")
    return lines


def _colour(row: Row) -> str:
    assert row.ratio_to_builtin is not None
    assert row.ratio_low is not None
    assert row.ratio_high is not None
    ratio = Ratio(row.ratio_to_builtin, row.ratio_low, row.ratio_high)
    return "yellow" if not ratio.is_clear else "red" if ratio.value > 1 else "green"


def _growth_lines(rows: Sequence[Row]) -> Iterator[Text]:
    by_settings: dict[str, list[Growth]] = {}
    found, names = growths(rows), short_names(row.contender for row in rows)
    settings = [name for name in varying_settings(row.case for row in rows) if name not in LENGTHS]
    for growth in found:
        by_settings.setdefault(label_of(growth.case, settings), []).append(growth)
    for label, group in by_settings.items():
        prefix = f"{label}: " if label else ""
        times = ", ".join(f"{names[x.contender]} {x.time:.2f}" for x in group)
        memory = ", ".join(f"{names[x.contender]} {x.memory:.2f}" for x in group if x.memory is not None)
        yield Text(f"  {prefix}time grows as length to the power of: {times}; memory: {memory}", style="cyan")


def _absence_lines(rows: Sequence[Row]) -> Iterator[Text]:
    """Say why there are cells without a result."""
    names, cases = short_names(row.contender for row in rows), list(dict.fromkeys(row.case for row in rows))
    have, found = {(row.case, row.contender) for row in rows}, dict[str, dict[str, None]]()
    for case, contender in itertools.product(cases, names):
        if (case, contender) not in have:
            found.setdefault(absence(contender, case), {})[names[contender]] = None
    for why, absent in found.items():
        yield Text(f"  {NO_RESULT} {', '.join(absent)}: {why}", style="dim")


def _problem_lines(rows: Sequence[Row]) -> Iterator[Text]:
    """Say what could not be timed, why, and where, unless that is everywhere; then what is unstable, case by case."""
    names, cases = short_names(row.contender for row in rows), {row.case for row in rows}
    found: dict[tuple[str, str, str], list[Case]] = {}
    unstable: dict[str, list[str]] = {}
    for row in rows:
        if row.status != "timed":
            found.setdefault((names[row.contender], row.status, row.detail), []).append(row.case)
        elif row.unstable:
            unstable.setdefault(varying_label(row.case, rows), []).append(f"{names[row.contender]} ({row.unstable})")
    for (name, status, why), where in found.items():
        labels = "; ".join(varying_label(case, rows) for case in where) if len(where) < len(cases) else ""
        yield Text(f"  {name}{labels and f', {labels}'}, {status}: {why}", style="red")
    for label, who in unstable.items():
        yield Text(f"  unstable{label and f', {label}'}: {', '.join(who)}", style="yellow")
