"""Plots of results: time, ratio and memory against the length, and how fast tokens are decoded."""

import importlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.contenders import BASELINE, CONTENDERS
from benchmarks.growth import series_by_length
from benchmarks.results import Row
from scratch.plotting import save_figure
from scratch.validation import import_matplotlib_figure

__all__ = ["Picture", "pictures", "save_pictures", "svg_of"]

FEWEST_LENGTHS = 3
# Told apart by those who do not see all colours: Okabe and Ito's, and a few more. A contender keeps its own everywhere.
COLOURS = (
    "#000000",
    "#D55E00",
    "#E69F00",
    "#7F7F7F",
    "#CC79A7",
    "#0072B2",
    "#56B4E9",
    "#8C564B",
    "#009E73",
    "#17BECF",
    "#9467BD",
)
MARKERS = "osD^v<>PX*p"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}


@dataclass(frozen=True)
class Picture:
    """One figure.

    Args:
        name: Of its files, without suffix.
        title: What was measured.
        figure: A matplotlib figure.
    """

    name: str
    title: str
    figure: Any


@dataclass(frozen=True)
class Quantity:
    """What is drawn against the length."""

    label: str
    value: Callable[[Row], float | None]


TIME = Quantity("time, ms", lambda row: None if row.median_us is None else row.median_us / 1e3)
RATE = Quantity("tokens per second", lambda row: row.tokens_per_s)
RATIO = Quantity("time / time of builtin", lambda row: row.ratio_to_builtin)
MEMORY = Quantity("peak memory, MiB", lambda row: row.peak_memory_bytes / 2**20 if row.peak_memory_bytes else None)


def pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    """Draw a figure for each combination of settings that was measured at three lengths or more.

    Args:
        rows: Results.

    Yields:
        Figures with three panels, all logarithmic; a line for each contender.

    Raises:
        ValueError: If matplotlib is missing.
    """
    by_settings: dict[Case, list[list[Row]]] = {}
    for series in series_by_length(rows):
        if len(series) >= FEWEST_LENGTHS:
            by_settings.setdefault(_without_length(series[0].case), []).append(series)
    for settings, lines in by_settings.items():
        title = re.sub(r" length [0-9×]+,", "", str(settings))
        yield Picture(_file_name(title), title, _figure(title, lines))


def save_pictures(drawn: Sequence[Picture], folder: Path) -> None:
    """Write each figure as SVG and as PNG.

    Args:
        drawn: Figures.
        folder: Where; it is made.
    """
    folder.mkdir(exist_ok=True)
    for picture in drawn:
        for suffix in (".svg", ".png"):
            with importlib.import_module("matplotlib").rc_context(STYLE):
                save_figure(picture.figure, folder / f"{picture.name}{suffix}")


def svg_of(picture: Picture) -> str:
    """Draw a figure as the text of an SVG element.

    Args:
        picture: A figure.

    Returns:
        What can be put into a page.
    """
    file = io.StringIO()
    with importlib.import_module("matplotlib").rc_context(STYLE):
        picture.figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _without_length(case: Case) -> Case:
    return replace(case, query_len=0, key_len=0 if case.key_len == case.query_len else case.key_len)


def _file_name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _figure(title: str, lines: Sequence[Sequence[Row]]) -> Any:
    first = TIME if lines[0][0].case.component != "generate" else RATE
    with_names = sorted(lines, key=lambda series: _place(series[0].contender))
    with importlib.import_module("matplotlib").rc_context(STYLE):
        figure = import_matplotlib_figure().Figure(figsize=(11, 3.6), layout="constrained")
        for axes, quantity in zip(figure.subplots(1, 3), (first, RATIO, MEMORY), strict=True):
            _draw(axes, quantity, with_names)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.suptitle(title)
    return figure


def _draw(axes: Any, quantity: Quantity, lines: Sequence[Sequence[Row]]) -> None:
    for series in lines:
        points = [(row.case.query_len, value) for row in series if (value := quantity.value(row)) is not None]
        name = series[0].contender
        colour, marker = COLOURS[_place(name)], MARKERS[_place(name)]
        # The built-in lies broad and pale below those that take as long; markers are hollow for the same reason.
        line = {"linewidth": 4, "alpha": 0.35} if name == BASELINE else {"linewidth": 1.2}
        axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, markerfacecolor="none", **line)
        if quantity is RATIO:
            low, high = [row.ratio_low for row in series], [row.ratio_high for row in series]
            axes.fill_between([row.case.query_len for row in series], low, high, color=colour, linewidth=0, alpha=0.15)
    lengths = sorted({row.case.query_len for series in lines for row in series})
    axes.set(xscale="log", yscale="log", xlabel="length", ylabel=quantity.label)
    axes.set_xticks(lengths, [str(x) for x in lengths])
    axes.set_xticks([], minor=True)
    _plain_numbers(axes.yaxis, (1, 1.5, 2, 3, 5, 7) if quantity is RATIO else (1, 2, 5))


def _plain_numbers(axis: Any, steps: Sequence[float]) -> None:
    """Write 0.5, 1 and 200 on a logarithmic axis instead of powers of ten."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(base=10, subs=steps, numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _place(contender: str) -> int:
    """Number the contenders, so that each has its colour; the user's own is the last."""
    return list(CONTENDERS).index(contender) if contender in CONTENDERS else len(COLOURS) - 1
