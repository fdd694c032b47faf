"""Results as one page of HTML that needs nothing else: ratio against length, what to use, and how it was measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jinja2

from benchmarks.advice import advice_by_case
from benchmarks.contenders import BASELINE, CONTENDERS, absence
from benchmarks.grids import LENGTHS, SETTINGS, Case, label_of
from benchmarks.growth import growths, series_by_length
from benchmarks.plots import combination_of, dark_rules, ratio_plot, title_of
from benchmarks.results import Row
from benchmarks.summary import advice_table
from benchmarks.tables import (
    bytes_in_words,
    contenders_in,
    short_names,
    time_in_words,
    varying_settings,
)
from scratch.validation import ArgumentValueError

__all__ = ["html_page"]

# What there is a choice for even where it does not vary; anything else that varies joins them.
FILTERED = ("dtype", "mask")
FEWEST_LENGTHS = 2
TITLES = {
    "embed_dim": "width",
    "num_heads": "heads",
    "num_layers": "layers",
    "need_weights": "weights",
    "key_heads": "key heads",
    "bias": "biases",
}


@dataclass(frozen=True)
class Filter:
    """One menu above the plots."""

    name: str
    title: str
    choices: Sequence[str]


@dataclass(frozen=True)
class Part:
    """What was measured with the same settings, at one length or more: a plot, and a table below it.

    Args:
        title: The settings in words.
        settings: Those that can be chosen, by the names of the menus.
        advice: What to use at the greatest length.
        plot: An SVG; "" where there is a single length.
        contenders: The headings of the table.
        lines: Its lines: a length, and for each contender its results, or why it has none.
    """

    title: str
    settings: dict[str, str]
    advice: str
    plot: str
    contenders: Sequence[str]
    lines: Sequence[tuple[str, Sequence[Row | str]]]


def html_page(rows: Sequence[Row]) -> str:
    """Write the page.

    Args:
        rows: Results.

    Returns:
        HTML; without plots where matplotlib is missing.
    """
    no_plots, filtered = "", _filtered(rows)
    try:
        parts = [_part(group, rows, filtered, with_plot=True) for group in _combinations(rows)]
    except ArgumentValueError as error:
        no_plots, parts = str(error), [_part(group, rows, filtered, with_plot=False) for group in _combinations(rows)]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("benchmarks"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"time": time_in_words, "small_print": _small_print}
    return environment.get_template("page.html").render(
        dark_rules=dark_rules(),
        grounds=_grounds(rows),
        filters=[_menu(name, parts) for name in ("component", "mode", *filtered)],
        parts=parts,
        no_plots=no_plots,
        advice=advice_table(rows),
        growths=list(_growth_lines(rows, short_names(row.contender for row in rows))),
        contenders=[(name, _meaning(name)) for name in contenders_in(rows)],
    )


def _grounds(rows: Sequence[Row]) -> Iterator[str]:
    """Say where, when and with what the rows were measured."""
    yield from dict.fromkeys(f"{row.environment}; {label_of(row.case, ['threads'])}" for row in rows)
    yield from dict.fromkeys(row.environment.gpu_state for row in rows if row.environment.gpu_state)
    commits = dict.fromkeys(row.environment.commit for row in rows if row.environment.commit)
    yield f"Measured {rows[0].environment.measured_at}, commit {', '.join(commits) or 'unknown'}."


def _filtered(rows: Sequence[Row]) -> list[str]:
    """Name the settings, beside component and mode, that can be chosen on the page: those that leave a choice."""
    cases: dict[tuple[str, str], list[Case]] = {}
    for row in rows:
        cases.setdefault((row.case.component, row.case.mode), []).append(row.case)
    varying = {name for found in cases.values() for name in varying_settings(found)}
    return [name for name in SETTINGS if name in FILTERED or (name in varying and name not in (*LENGTHS, "window"))]


def _menu(name: str, parts: Sequence[Part]) -> Filter:
    choices = list(dict.fromkeys(part.settings[name] for part in parts))
    return Filter(name, TITLES.get(name, name), choices)


def _combinations(rows: Sequence[Row]) -> list[list[Row]]:
    """Put together what differs in nothing but length and contender, the most telling first."""
    found: dict[Case, list[Row]] = {}
    for row in rows:
        found.setdefault(combination_of(row.case), []).append(row)

    def weight(group: Sequence[Row]) -> tuple[int, bool]:
        return len({row.case for row in group}), group[0].case.component == "self_attention"

    first = max(found.values(), key=weight)
    return [first, *(group for group in found.values() if group is not first)]


def _part(group: Sequence[Row], rows: Sequence[Row], filtered: Sequence[str], *, with_plot: bool) -> Part:
    combination = combination_of(group[0].case)
    cases = sorted({row.case for row in group}, key=lambda case: case.query_len)
    names, by_cell = contenders_in(group), {(row.case, row.contender): row for row in group}
    in_full = short_names(row.contender for row in rows)
    (advice,) = advice_by_case(row for row in group if row.case == cases[-1])
    series = [x for x in series_by_length(group) if len(x) >= FEWEST_LENGTHS] if with_plot else []
    return Part(
        title_of(combination),
        {"component": _spaced(combination.component), "mode": _spaced(combination.mode)}
        | {name: _choice(combination, name) for name in filtered},
        f"At length {cases[-1].query_len}: {advice}" if len(cases) > 1 else str(advice),
        ratio_plot(series, in_full) if series else "",
        [in_full[name] for name in names],
        [(str(case.query_len), [by_cell.get((case, name)) or absence(name, case) for name in names]) for case in cases],
    )


def _choice(combination: Case, name: str) -> str:
    """Write a setting as a choice of its menu."""
    if name == "mask":
        return label_of(combination, ("mask", "window"))
    value = getattr(combination, name)
    if name == "key_heads" and value == 0:
        return "as many as queries"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _small_print(row: Row) -> Iterator[tuple[str, str]]:
    """Give what stands below the time in a cell, with the class of each line."""
    if row.contender != BASELINE and row.ratio_low is not None and row.ratio_high is not None:
        kind = "slower" if row.ratio_low > 1 else "faster" if row.ratio_high < 1 else "same"
        yield kind, f"× {row.ratio_to_builtin:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f})"
    if row.unstable:
        yield "unstable", f"unstable: {row.unstable}"
    yield "memory", bytes_in_words(row.peak_memory_bytes or 0)
    if row.flops_per_s is not None and row.share_of_matmul_rate is not None:
        yield "rate", f"{row.flops_per_s / 1e9:.3g} GFLOP/s, {row.share_of_matmul_rate:.0%}"
    if row.tokens_per_s is not None:
        yield "rate", f"{row.tokens_per_s:.0f} tokens/s"
    if row.roofline_us is not None:
        yield "bound", f"at least {time_in_words(row.roofline_us)}"


def _growth_lines(rows: Sequence[Row], names: Mapping[str, str]) -> Iterator[Sequence[str]]:
    for growth in growths(rows):
        lengths = f"{growth.lengths[0]} to {growth.lengths[-1]}"
        memory = "" if growth.memory is None else f"{growth.memory:.2f}"
        yield title_of(combination_of(growth.case)), names[growth.contender], lengths, f"{growth.time:.2f}", memory


def _meaning(name: str) -> str:
    return CONTENDERS[name].meaning if name in CONTENDERS else "your own"
