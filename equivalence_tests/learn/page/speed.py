"""The committed measurements as charts that answer: at my size, what should I use?"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Answer", "Chart", "Line", "lacks", "speed_data"]

# The files alone are read: benchmarks stands on this package, never the other way round.
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 660, 380, 64, 128, 16, 36
FOOT = HEIGHT - BOTTOM
LABEL_HEIGHT = 17
AS_FAST = 1.05  # within this of the fastest, a difference is not worth a choice
WORDS = {
    "builtin": "builtin: torch.nn behind the checks of this project",
    "scratch": "written out by hand",
    "torch.nn": "torch.nn as it comes",
    "plain path": "torch.nn or its function, held to the plain path",
    "math": "F.scaled_dot_product_attention held to its MATH backend",
    "flash": "F.scaled_dot_product_attention held to its fused backend",
    "flex": "torch's flex_attention, compiled",
    "scratch recomputed": "by hand, without a cache",
}


@dataclass(frozen=True)
class Point:
    """One measurement: the length, the median time and where it lies in the chart."""

    length: int
    microseconds: float
    x: float
    y: float


@dataclass(frozen=True)
class Line:
    """One contender: its measurements, and where its label stands."""

    contender: str
    points: tuple[Point, ...]
    label_y: float

    @property
    def path(self) -> str:
        """The line of the chart."""
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True)
class Row:
    """One contender at one length, as it is printed."""

    contender: str
    time: str
    ratio: str
    memory: str
    unstable: str


@dataclass(frozen=True)
class Answer:
    """What to use at a length, and all that was measured there."""

    length: int
    x: float
    sentence: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Tick:
    """A mark of an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    """All measurements of one thing over the lengths."""

    name: str
    title: str
    sizes: str
    machine: str
    lines: tuple[Line, ...]
    answers: tuple[Answer, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def lacks(results: Path = RESULTS) -> str:
    """Say why there is nothing to draw; "" if there is."""
    if any(results.glob("*/results.jsonl")):
        return ""
    return "The measurements are part of the repository, and not of what is installed here."


def speed_data(results: Path = RESULTS) -> dict[str, Any]:
    """Read the committed measurements and draw them.

    Args:
        results: A folder with one folder for each machine.

    Returns:
        Charts of what was measured at several lengths; the words and the colours of the contenders; the frame.
    """
    charts = tuple(chart for file in sorted(results.glob("*/results.jsonl")) for chart in _charts(file))
    found = dict.fromkeys(line.contender for chart in charts for line in chart.lines)
    order = [*(name for name in WORDS if name in found), *(name for name in found if name not in WORDS)]
    return {
        "charts": charts,
        "words": {name: WORDS[name] for name in order if name in WORDS},
        "colours": {name: number for number, name in enumerate(order)},
        "frame": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "foot": FOOT},
    }


def _charts(file: Path) -> list[Chart]:
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["status"] == "timed"]
    rows.sort(key=lambda row: (_group(row), row["case"]["query_len"]))
    groups = [list(group) for _, group in groupby(rows, key=_group)]
    several = [group for group in groups if len({row["case"]["query_len"] for row in group}) > 1]
    return [_chart(file.parent.name, group) for group in several]


def _group(row: dict[str, Any]) -> str:
    """Say what was measured, whatever the length: rows of one chart have it in common."""
    case = {key: value for key, value in row["case"].items() if key not in ("query_len", "key_len")}
    return json.dumps(case, sort_keys=True)


def _chart(machine: str, rows: Sequence[dict[str, Any]]) -> Chart:
    case, environment = rows[0]["case"], rows[0]["environment"]
    lengths = sorted({row["case"]["query_len"] for row in rows})
    times = [row["median_us"] for row in rows]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))

    def x_of(length: int) -> float:
        share = math.log(length / lengths[0]) / math.log(lengths[-1] / lengths[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(microseconds: float) -> float:
        return TOP + math.log(high / microseconds) / math.log(high / low) * (HEIGHT - TOP - BOTTOM)

    points: dict[str, list[Point]] = {}
    for row in rows:
        length, time = row["case"]["query_len"], row["median_us"]
        points.setdefault(row["contender"], []).append(Point(length, time, x_of(length), y_of(time)))
    answers = [_answer(x, x_of(x), [row for row in rows if row["case"]["query_len"] == x]) for x in lengths]
    decades = [10**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    where = f"{environment['processor']}, {case['threads']} threads, torch {environment['torch'].partition('+')[0]}"
    return Chart(
        "-".join([machine, *_title(case).replace(",", "").split()]),
        _title(case),
        f"batch {case['batch']}, width {case['embed_dim']}, {case['num_heads']} heads, {case['dtype']}",
        f"{environment['accelerator'] or where}, {environment['measured_at'][:10]}",
        _lines(points),
        tuple(answers),
        tuple(Tick(x_of(x), f"{x:,}") for x in lengths),
        tuple(Tick(y_of(x), duration(x)) for x in decades),
    )


def _title(case: dict[str, Any]) -> str:
    parts = [case["component"].replace("_", " "), case["mode"].replace("_", " ")]
    parts += [f"{case['mask']} mask"] if case["mask"] != "none" else []
    parts += ["with weights"] if case["need_weights"] else []
    parts += [case["dtype"]] if case["dtype"] != "float32" else []
    parts += ["compiled"] if case["compiled"] else []
    return ", ".join(parts)


def _lines(points: dict[str, list[Point]]) -> tuple[Line, ...]:
    """Put the labels at the ends of the lines, pushed apart where they would cover each other."""
    lines, at = [], -math.inf
    for contender, found in sorted(points.items(), key=lambda item: item[1][-1].y):
        at = max(at + LABEL_HEIGHT, found[-1].y)
        lines.append(Line(contender, tuple(found), at))
    return tuple(lines)


def _answer(length: int, x: float, rows: Sequence[dict[str, Any]]) -> Answer:
    ranked = sorted(rows, key=lambda row: row["median_us"])
    best, builtin = ranked[0], next(row for row in rows if row["contender"] == "builtin")
    time = duration(best["median_us"])
    if builtin["median_us"] <= AS_FAST * best["median_us"]:
        sentence = f"At {length:,}, the built-in: nothing measured is faster by more than a twentieth. It takes {time}."
    else:
        ratio = builtin["median_us"] / best["median_us"]
        sentence = f"At {length:,}, {best['contender']}: {time}, and the built-in takes {ratio:.1f} times as long."
    return Answer(length, x, sentence, tuple(_row(row, builtin["median_us"]) for row in ranked))


def _row(row: dict[str, Any], builtin: float) -> Row:
    memory = row["peak_memory_bytes"]
    ratio = f"{row['median_us'] / builtin:.2f}"
    return Row(
        row["contender"], duration(row["median_us"]), ratio, "" if memory is None else size(memory), row["unstable"]
    )


def duration(microseconds: float) -> str:
    """Print a time with three digits.

    >>> duration(117.7), duration(4321.0), duration(2_000_000)
    ('118 µs', '4.32 ms', '2 s')
    """
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= factor:
            return f"{microseconds / factor:.3g} {unit}"
    return f"{microseconds:.3g} µs"


def size(count: int) -> str:
    """Print a number of bytes with three digits.

    >>> size(199680), size(8_400_000)
    ('195 KiB', '8.01 MiB')
    """
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"
