"""Plots of results against the length: time, ratio and memory of every contender, and scratch at a glance.

Each is an SVG that follows the reader's colour scheme: its colours are those of the light one, and a style sheet in it
replaces them in the dark one.
"""

import importlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import BASELINE, CONTENDERS
from benchmarks.grids import LENGTHS, SETTINGS, TOKEN_LEVEL, Case, label_of
from benchmarks.growth import series_by_length
from benchmarks.results import Row, ratio_between
from benchmarks.tables import short_names, varying_settings
from scratch.validation import import_matplotlib_figure

__all__ = [
    "COLOURS",
    "at_a_glance",
    "combination_of",
    "dark_rules",
    "is_plain",
    "ratio_plot",
    "save_pictures",
    "title_of",
]

FEWEST_LENGTHS = 3
# Told apart by those who do not see all colours: Okabe and Ito's, and a few more. In the light scheme, and in the dark.
COLOURS = (
    ("#1a1a1a", "#f0f0f0"),
    ("#7f7f7f", "#a0a0a0"),
    ("#d55e00", "#ff8a3d"),
    ("#e69f00", "#f5c04a"),
    ("#b8860b", "#d8b13a"),
    ("#cc79a7", "#e7a3c8"),
    ("#0072b2", "#5cb3ea"),
    ("#56b4e9", "#9bd6f7"),
    ("#8c564b", "#c8958a"),
    ("#009e73", "#3ccfa5"),
    ("#17becf", "#6be3ef"),
    ("#9467bd", "#c4a1e6"),
    ("#7030a0", "#a97fe0"),
    ("#a0307f", "#e07fc0"),
    ("#30507f", "#8fb0e0"),
    ("#5f7a1e", "#a9c75c"),
    ("#8a2be2", "#c08bf5"),
    ("#00695c", "#5fb8a8"),
)
GLANCE_PLACES = (2, 6, 9, 5, 3, 10, 8, 11, 1)  # neighbours among the lines differ most
MARKERS = "osD^v<>PX*pdh8H+x1"
INK, PAPER, LINES = ("#222222", "#e4e4e4"), ("#fefefe", "#14171a"), ("#cccccc", "#3c4146")
STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": LINES[0],
    "axes.edgecolor": LINES[0],
    "axes.facecolor": PAPER[0],
    "figure.facecolor": PAPER[0],
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK[0]),
}


@dataclass(frozen=True)
class Quantity:
    """What is drawn against the length."""

    label: str
    value: Callable[[Row], float | None]


TIME = Quantity("time, ms", lambda row: None if row.median_us is None else row.median_us / 1e3)
RATE = Quantity("tokens per second", lambda row: row.tokens_per_s)
RATIO = Quantity("time / time of builtin", lambda row: row.ratio_to_builtin)
MEMORY = Quantity("peak memory, MiB", lambda row: row.peak_memory_bytes / 2**20 if row.peak_memory_bytes else None)


def combination_of(case: Case) -> Case:
    """Give what all lengths of a series share: the case without its length, and without its number of keys if equal."""
    return replace(case, query_len=0, key_len=0 if case.key_len == case.query_len else case.key_len)


def save_pictures(rows: Sequence[Row], folder: Path) -> int:
    """Draw time, ratio and memory for each combination of settings that was measured at three lengths or more.

    Args:
        rows: Results.
        folder: Where to write the SVGs; made if there are any. What an earlier run has drawn is removed.

    Returns:
        How many were drawn.

    Raises:
        ValueError: If matplotlib is missing.
        OSError: If they cannot be written.
    """
    drawn = dict(_pictures(rows))
    if drawn:
        folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, svg in drawn.items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    return len(drawn)


def _pictures(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Give name and SVG of each figure."""
    names = short_names(row.contender for row in rows)
    by_settings: dict[Case, list[list[Row]]] = {}
    for series in series_by_length(rows):
        if len(series) >= FEWEST_LENGTHS:
            by_settings.setdefault(combination_of(series[0].case), []).append(series)
    for settings, lines in by_settings.items():
        title = title_of(settings)
        first = TIME if settings.component != "generate" else RATE
        panels, name = (first, RATIO, MEMORY), _file_name(title)
        yield name, _svg(partial(_plot, title, lines, panels, (11, 3.6), names), name, DARK_STYLE)


def title_of(settings: Case) -> str:
    """Name a combination: what ``combination_of`` gives, without its length."""
    left_out = LENGTHS if settings.key_len == settings.query_len else ("query_len",)
    return f"{_kind(settings)}, {label_of(settings, [name for name in SETTINGS if name not in left_out], usual=False)}"


def _file_name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def ratio_plot(series: Sequence[Sequence[Row]], names: Mapping[str, str]) -> str:
    """Draw the ratio to the built-in's time against the length, small enough for a telephone.

    Args:
        series: The rows of each contender, by length.
        names: How the contenders are called.

    Returns:
        An SVG element for a page, without the style sheet: ``dark_rules`` gives the page its own.

    Raises:
        ValueError: If matplotlib is missing.
    """
    salt = _file_name(title_of(combination_of(series[0][0].case)))
    return _svg(lambda: _plot("", series, (RATIO,), (4.0, 3.4), names), salt)


def at_a_glance(rows: Sequence[Row]) -> str:
    """Draw how long scratch takes beside torch.nn, a line for each plain combination of settings with three lengths.

    Args:
        rows: Results of one machine.

    Returns:
        An SVG; "" if there is nothing to draw.

    Raises:
        ValueError: If matplotlib is missing.
    """
    beside = {row.case: row for row in rows if row.contender == "torch.nn" and row.status == "timed"}
    lines: dict[Case, list[tuple[int, float]]] = {}
    for series in series_by_length(row for row in rows if row.contender == "scratch" and is_plain(row.case)):
        points = [(x.case.query_len, ratio_between(x, beside[x.case]).value) for x in series if x.case in beside]
        if len(points) >= FEWEST_LENGTHS:
            lines[combination_of(series[0].case)] = points
    return _svg(lambda: _glance(lines), "glance", DARK_STYLE) if lines else ""


def is_plain(case: Case) -> bool:
    """Whether a case is in float32, eager, without weights, and with no mask but the one that belongs to it."""
    mask = "causal" if case.component in (*TOKEN_LEVEL, "transformer") else "none"
    return case.dtype == "float32" and case.mask == mask and not case.need_weights and not case.compiled


def dark_rules() -> str:
    """Give the rules of a style sheet that turn the colours of plots into those of the dark scheme.

    They name no ancestor: a marker is a copy that ``use`` makes, and copies have none.
    """
    return "\n".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important; }}'
        for light, dark in (*COLOURS, INK, PAPER, LINES)
        for kind in ("fill", "stroke")
    )


DARK_STYLE = f"<style>@media (prefers-color-scheme: dark) {{\n{dark_rules()}\n}}</style>"


def _plot(
    title: str,
    lines: Sequence[Sequence[Row]],
    quantities: Sequence[Quantity],
    size: tuple[float, float],
    names: Mapping[str, str],
) -> Any:
    """Draw a panel for each quantity, all logarithmic, with a line for each contender."""
    places = _places(names)
    figure = import_matplotlib_figure().Figure(figsize=size, layout="constrained")
    for axes, quantity in zip(figure.subplots(1, len(quantities), squeeze=False)[0], quantities, strict=True):
        for series in sorted(lines, key=lambda series: places[series[0].contender]):
            _draw(axes, quantity, series, places[series[0].contender], names[series[0].contender])
        _logarithmic(axes, [row.case.query_len for series in lines for row in series], quantity.label)
        if quantity is RATIO:
            _ratio_axis(axes)
        else:
            _plain_numbers(axes.yaxis, (1, 2, 5))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    where = {"loc": "outside right center"} if len(quantities) > 1 else {"loc": "outside lower center", "ncols": 3}
    figure.legend(handles, labels, frameon=False, **where)
    figure.suptitle(title)
    return figure


def _draw(axes: Any, quantity: Quantity, series: Sequence[Row], place: int, name: str) -> None:
    points = [(row.case.query_len, value) for row in series if (value := quantity.value(row)) is not None]
    colour, marker = COLOURS[place][0], MARKERS[place]
    # The built-in lies broad and pale below those that take as long; markers are hollow for the same reason.
    line = {"linewidth": 4, "alpha": 0.35} if series[0].contender == BASELINE else {"linewidth": 1.2}
    axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, markerfacecolor="none", **line)
    if quantity is RATIO:
        low, high = [row.ratio_low for row in series], [row.ratio_high for row in series]
        axes.fill_between([row.case.query_len for row in series], low, high, color=colour, linewidth=0, alpha=0.15)


def _glance(lines: Mapping[Case, Sequence[tuple[int, float]]]) -> Any:
    figure = import_matplotlib_figure().Figure(figsize=(7.0, 3.8), layout="constrained")
    axes = figure.subplots()
    varying = [name for name in varying_settings(lines) if name not in LENGTHS]
    for number, (settings, points) in enumerate(lines.items()):
        place = GLANCE_PLACES[number % len(GLANCE_PLACES)]
        label = ", ".join([_kind(settings), *filter(None, [label_of(settings, varying, usual=False)])])
        colour, marker = COLOURS[place][0], MARKERS[place]
        axes.plot(*zip(*points, strict=True), label=label, color=colour, marker=marker, markerfacecolor="none")
    axes.axhline(1.0, color=INK[0], linewidth=1.0)
    lengths = [length for points in lines.values() for length, _ in points]
    _logarithmic(axes, lengths, "time of scratch / time of torch.nn")
    _ratio_axis(axes)
    figure.legend(loc="outside right center", frameon=False)
    shared = [name for name in SETTINGS if name not in (*LENGTHS, *varying)]
    figure.suptitle(label_of(next(iter(lines)), shared, usual=False))
    return figure


def _kind(case: Case) -> str:
    return f"{case.component}, {case.mode}".replace("_", " ")


def _logarithmic(axes: Any, lengths: Sequence[int], label: str) -> None:
    ticks = sorted(set(lengths))
    axes.set(xscale="log", yscale="log", xlabel="length", ylabel=label)
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.set_xticks([], minor=True)


def _ratio_axis(axes: Any) -> None:
    """Show at least a fifth to either side of 1: a difference of a hundredth shall look like one."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), max(high, 1.25))
    narrow = high < 3 * low
    _plain_numbers(axes.yaxis, (1, 1.1, 1.25, 1.5, 2, 3, 4, 5, 6, 7, 8, 9) if narrow else (1, 1.5, 2, 3, 5, 7))


def _plain_numbers(axis: Any, steps: Sequence[float]) -> None:
    """Write 0.5, 1 and 200 on a logarithmic axis instead of powers of ten."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(base=10, subs=steps, numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _places(contenders: Iterable[str]) -> dict[str, int]:
    """Number the contenders, so that each has its colour everywhere; the user's own have the last ones."""
    known, first_own = list(CONTENDERS), len(CONTENDERS)
    own = [name for name in contenders if name not in CONTENDERS]
    turns = {name: first_own + number % (len(COLOURS) - first_own) for number, name in enumerate(own)}
    return {name: known.index(name) if name in CONTENDERS else turns[name] for name in contenders}


def _svg(draw: Callable[[], Any], salt: str, style: str = "") -> str:
    """Write a figure as an SVG element; the salt keeps its names apart from those of other figures of a page."""
    import_matplotlib_figure()  # or says how to get it
    file = io.StringIO()
    with importlib.import_module("matplotlib").rc_context(STYLE | {"svg.hashsalt": salt}):
        draw().savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    opening, bracket, rest = text[text.index("<svg") :].partition(">")
    return f"{opening}{bracket}{style}{rest}"
