"""Rows of results, and the file that keeps them: one line of JSON for each, written as soon as it is known."""

import csv
import dataclasses
import errno
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from benchmarks.environment import Environment
from benchmarks.grids import Case
from benchmarks.profiling import Profile
from benchmarks.summarising import Ratio, ratio_in_turns, ratio_of_medians
from scratch.validation import ArgumentValueError

__all__ = [
    "SCHEMA_VERSION",
    "Row",
    "Status",
    "append_rows",
    "in_turns",
    "ratio_between",
    "read_rows",
    "without_cut_line",
    "write_csv",
]

SCHEMA_VERSION = 2
Status = Literal["timed", "unequal", "out of memory", "unavailable"]


@dataclass(frozen=True)
class Row:
    """One contender in one case.

    Args:
        case: What was computed.
        contender: By whom.
        status: "timed"; "unequal": its numbers differ, it was not timed; "out of memory"; "unavailable": it does not
            run here, or not at these sizes.
        environment: Where and with what.
        detail: Why it was not timed.
        compared_query_len: Length at which its numbers were compared with the built-in's; shorter than the case's
            where that is very long.
        rounds_us: Time of one run in each round, in microseconds.
        median_us: Their median.
        iqr_us: The range of their middle half.
        unstable: Why its times cannot be relied on; "" if they can.
        ratio_to_builtin: Its median over the built-in's.
        ratio_low: Where the 95% interval of a bootstrap begins.
        ratio_high: Where it ends.
        peak_memory_bytes: The most that one run held beyond weights and inputs.
        flops: Floating-point operations of one run, by formula.
        flops_per_s: Those over the median time.
        share_of_matmul_rate: That over the rate of a large matrix product on this machine.
        bytes_moved: The least that has to be read and written.
        roofline_us: The least time that the machine allows.
        tokens_per_s: Tokens decoded, of "generate".
        profile: What a run is spent on, where an aim compares this contender on the CPU.
        schema_version: Of this row.
    """

    case: Case
    contender: str
    status: Status
    environment: Environment
    detail: str = ""
    compared_query_len: int = 0
    rounds_us: tuple[float, ...] = ()
    median_us: float | None = None
    iqr_us: float | None = None
    unstable: str = ""
    ratio_to_builtin: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    peak_memory_bytes: int | None = None
    flops: int = 0
    flops_per_s: float | None = None
    share_of_matmul_rate: float | None = None
    bytes_moved: int | None = None
    roofline_us: float | None = None
    tokens_per_s: float | None = None
    profile: Profile | None = None
    schema_version: int = SCHEMA_VERSION


def in_turns(row: Row, other: Row) -> bool:
    """Whether two rows of a case were timed in the same rounds: one environment is noted for all who were."""
    return row.environment == other.environment and len(row.rounds_us) == len(other.rounds_us)


def ratio_between(row: Row, other: Row) -> Ratio:
    """Give the ratio of the times of two rows, by the rounds of both where those belong together."""
    return (ratio_in_turns if in_turns(row, other) else ratio_of_medians)(row.rounds_us, other.rounds_us)


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file, and wait until they are on the disk.

    Args:
        path: A file that may not exist yet.
        rows: What is added: all of them or, if the disk is full, none.

    Raises:
        OSError: If they cannot be written.
    """
    text = "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            written = file.write(text.encode())
            if written < len(text.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # what is no regular file cannot be cut
                file.truncate(before)
            raise


def read_rows(path: Path) -> list[Row]:
    """Read what ``append_rows`` has written.

    Args:
        path: A file of results.

    Returns:
        Its rows.

    Raises:
        ValueError: If there is no such file, if it is empty, if a line is cut short or is no row, or if it is of
            another version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentValueError(f"results must be a file written by this command, got {path}: {error}") from error
    if not text:
        raise ArgumentValueError(f"{path} must have at least one row of results, got an empty file")
    if not text.endswith("\n"):
        raise ArgumentValueError(
            f"{path}, line {text.count(chr(10)) + 1}, is cut short; --resume goes on with the whole lines before it"
        )
    return [_row(line, f"{path}, line {number}") for number, line in enumerate(text.splitlines(), 1)]


def without_cut_line(path: Path) -> None:
    """Take an unfinished last line off a file, so that its cell is measured again.

    Args:
        path: A file of results.
    """
    written = path.read_bytes()
    if written and not written.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(written.rfind(b"\n") + 1)


def _row(line: str, place: str) -> Row:
    try:
        found: dict[str, Any] = json.loads(line)
        version = found["schema_version"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ArgumentValueError(f"{place}, must be a row of results, got {line[:60]!r}") from error
    if version != SCHEMA_VERSION:
        raise ArgumentValueError(f"{place}, must be of version {SCHEMA_VERSION}, got version {version}")
    try:
        parts = {
            "case": Case(**found["case"]),
            "environment": Environment(**found["environment"]),
            "rounds_us": tuple(found["rounds_us"]),
            "profile": Profile(**found["profile"]) if found.get("profile") else None,
        }
        return Row(**(found | parts))
    except (KeyError, TypeError) as error:
        raise ArgumentValueError(f"{place}, must be a row of results with all its fields: {error}") from error


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a table, a column for each setting and each result, without the single rounds and the profile.

    Args:
        path: The file.
        rows: What is written.
    """
    results = [x.name for x in fields(Row) if x.name not in ("case", "environment", "rounds_us", "profile")]
    names = [x.name for x in fields(Case)] + results + [x.name for x in fields(Environment)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            values = dataclasses.asdict(row)
            writer.writerow(values | values["case"] | values["environment"])
