"""The committed measurements as charts that answer: at my size, what should I use?"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "SHOWN", "Answer", "Chart", "Line", "Single", "lacks", "speed_data"]

# The files alone are read: benchmarks stands on this package, never the other way round.
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 660, 380, 64, 128, 16, 36
FOOT = HEIGHT - BOTTOM
LABEL_HEIGHT = 17
AS_FAST = 1.05  # within this of the fastest, a difference is not worth a choice
WORDS = {
    "builtin": "torch.nn behind this project's checks",
    "scratch": "written out by hand",
    "scratch textbook": "written out by hand, with every score held in memory",
    "torch.nn": "torch.nn as it comes",
    "plain path": "torch.nn, or its function, kept off its fast path",
    "math": "F.scaled_dot_product_attention with its MATH backend",
    "flash": "F.scaled_dot_product_attention with its fused backend",
    "flex": "torch's flex_attention, compiled",
    "scratch recomputed": "by hand, without a cache",
    "naive": "attention as it is usually written, with every score held in memory",
}
SHOWN = "cpu"  # the machine whose figures the page shows, and README
LEFT_OUT = ("einsum", "chunked")  # other ways to write "naive": they stand in the benchmark's own report


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
        return " ".join(f"{point.x:.0f},{point.y:.0f}" for point in self.points)


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


@dataclass(frozen=True)
class Single:
    """What was measured at one length only."""

    title: str
    sizes: str
    answer: Answer


def lacks(results: Path = RESULTS) -> str:
    """Say why there is nothing to draw; "" if there is."""
    if (results / SHOWN / "results.jsonl").exists():
        return ""
    return "The measurements are part of the repository, and not of what is installed here."


def speed_data(results: Path = RESULTS) -> dict[str, Any]:
    """Read the committed measurements and draw them.

    Args:
        results: A folder with one folder for each machine, of which the page shows one.

    Returns:
        Charts of what was measured at several lengths, and what was at one; the words and the colours of the
        contenders; the frame.
    """
    groups = [*_groups(results / SHOWN / "results.jsonl")]
    named = list(zip(_titles([rows[0] for _, rows in groups]), groups, strict=True))
    charts = tuple(_chart(title, *group) for title, group in named if len(_lengths(group[1])) > 1)
    singles = tuple(_single(title, rows) for title, (_, rows) in named if len(_lengths(rows)) == 1)
    found = dict.fromkeys(row["contender"] for _, rows in groups for row in rows)
    drawn = {line.contender for chart in charts for line in chart.lines}
    order = [*(name for name in WORDS if name in found), *(name for name in found if name not in WORDS)]
    return {
        "charts": charts,
        "singles": singles,
        "words": {name: WORDS[name] for name in order if name in WORDS},
        "colours": {name: number for number, name in enumerate(name for name in order if name in drawn)},
        "frame": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "foot": FOOT},
    }


def _groups(file: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Read what was timed on a machine, in the order of the file: rows of one chart together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if row["status"] == "timed" and row["contender"] not in LEFT_OUT:
            groups.setdefault(_group(row), []).append(row)
    yield from ((file.parent.name, rows) for rows in groups.values())


def _group(row: dict[str, Any]) -> str:
    """Say what was measured, whatever the length."""
    case = {key: value for key, value in row["case"].items() if key not in ("query_len", "key_len")}
    return json.dumps(case, sort_keys=True)


def _lengths(rows: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({row["case"]["query_len"] for row in rows})


def _chart(title: str, machine: str, rows: Sequence[dict[str, Any]]) -> Chart:
    lengths = _lengths(rows)
    times = [row["median_us"] for row in rows]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))

    def x_of(length: int) -> float:
        share = math.log(length / lengths[0]) / math.log(lengths[-1] / lengths[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(microseconds: float) -> float:
        return TOP + math.log(high / microseconds) / math.log(high / low) * (HEIGHT - TOP - BOTTOM)

    points: dict[str, list[Point]] = {}
    for row in sorted(rows, key=lambda row: row["case"]["query_len"]):
        length, time = row["case"]["query_len"], row["median_us"]
        points.setdefault(row["contender"], []).append(Point(length, time, x_of(length), y_of(time)))
    answers = [_answer(x, x_of(x), [row for row in rows if row["case"]["query_len"] == x]) for x in lengths]
    decades = [10**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    return Chart(
        "-".join([machine, *re.findall(r"\w+", title)]),
        title,
        _sizes(rows[0]["case"]),
        _machine(rows[0]),
        _lines(points),
        tuple(answers),
        tuple(Tick(x_of(x), f"{x:,}") for x in lengths),
        tuple(Tick(y_of(x), duration(x)) for x in decades),
    )


def _single(title: str, rows: Sequence[dict[str, Any]]) -> Single:
    (length,) = _lengths(rows)
    return Single(title, f"{_sizes(rows[0]['case'])}. {_machine(rows[0])}", _answer(length, 0.0, rows))


def _sizes(case: dict[str, Any]) -> str:
    layers = f", {case['num_layers']} layers" if case["num_layers"] else ""
    return f"batch {case['batch']}, width {case['embed_dim']}, {case['num_heads']} heads{layers}, {case['dtype']}"


def _machine(row: dict[str, Any]) -> str:
    environment = row["environment"]
    threads = "" if environment["accelerator"] else f", {row['case']['threads']} threads"
    where = environment["accelerator"] or environment["processor"]
    torch_version = environment["torch"].partition("+")[0]
    return f"{where}{threads}, torch {torch_version}, {environment['measured_at'][:10]}"


def _titles(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Name what was measured; where two have one name, with those of the sizes and the device that differ."""
    plain, titles = [_title(row["case"]) for row in rows], []
    full = [[*_sizes(row["case"]).split(", "), row["case"]["device"]] for row in rows]
    for title, sizes in zip(plain, full, strict=True):
        shared = set[str].intersection(*(set(other) for name, other in zip(plain, full, strict=True) if name == title))
        titles.append(", ".join([title, *(one for one in sizes if one not in shared)]))
    return titles


def _title(case: dict[str, Any]) -> str:
    parts = [case["component"].replace("_", " "), case["mode"].replace("_", " ")]
    mask = case["mask"].replace("both", "causal and padding")
    parts += [f"{mask} mask"] if mask != "none" else []
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
    builtin = next((row["median_us"] for row in rows if row["contender"] == "builtin"), math.nan)
    return Answer(length, x, _sentence(length, ranked[0], builtin), tuple(_row(row, builtin) for row in ranked))


def _sentence(length: int, best: dict[str, Any], builtin: float) -> str:
    time, ratio = best["median_us"], builtin / best["median_us"]
    if ratio <= AS_FAST:
        return (
            f"At length {length:,}, the built-in: it takes {duration(builtin)}, and nothing measured is faster by "
            "more than 5%."
        )
    if math.isnan(builtin):
        return f"At length {length:,}, {best['contender']}: it takes {duration(time)}, and the built-in does not run."
    return (
        f"At length {length:,}, {best['contender']}: it takes {duration(time)}, the built-in {ratio:.2f} times as long."
    )


def _row(row: dict[str, Any], builtin: float) -> Row:
    memory = row["peak_memory_bytes"]
    ratio = "" if math.isnan(builtin) else f"{row['median_us'] / builtin:.2f}"
    return Row(
        row["contender"], duration(row["median_us"]), ratio, "" if memory is None else size(memory), row["unstable"]
    )


def duration(microseconds: float) -> str:
    """Print a time with three digits.

    >>> duration(117.7), duration(4321.0), duration(2_000_000)
    ('118 µs', '4.32 ms', '2 s')
    """
    return _in_units(microseconds, (("s", 1e6), ("ms", 1e3), ("µs", 1)))


def size(count: int) -> str:
    """Print a number of bytes with three digits.

    >>> size(199680), size(8_400_000), size(2**30 - 1), size(2**30)
    ('195 KiB', '8.01 MiB', '1024 MiB', '1 GiB')
    """
    return _in_units(count, (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)))


def _in_units(number: float, units: Sequence[tuple[str, float]]) -> str:
    """Print a number in the largest unit of which it has one, or else in the smallest."""
    unit, factor = next((x for x in units if number >= x[1]), units[-1])
    share = number / factor
    return f"{share:.3g} {unit}" if share < 999.5 else f"{share:.0f} {unit}"
