"""What to use: the best contender of each case, and a sentence or two about it."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contenders import BASELINE, CONTENDERS, call_of
from benchmarks.grids import Case
from benchmarks.own import code_of, in_torch, is_in_torch, is_own
from benchmarks.results import Row, Status, ratio_between
from benchmarks.summarising import Ratio
from benchmarks.tables import bytes_in_words, cost_in_words, short_names, time_in_words

__all__ = ["Advice", "advice_by_case", "fastest"]

NOTICEABLE = 1.05  # nobody changes code for less than a twentieth
TELLING = 1.25  # where another may be faster by more than this, or no faster, the times do not say what to use
PREFERRED = ("torch.nn", BASELINE, "scratch")
NOT_TIMED: dict[Status, str] = {
    "unequal": "was not timed, because its numbers differ",
    "out of memory": "ran out of memory, or was ended by the system",
    "unavailable": "does not run here",
}


@dataclass(frozen=True)
class Advice:
    """What the rows of one case come to.

    Args:
        case: The case.
        best: The contender to use, of those that come with the project; None if none of them was timed.
        own: The user's.
        in_torch: The equivalents of these, by the names of the user's.
        compared: builtin and scratch, where they are not the best themselves.
        names: How the user's are called.
        undecided: Another that may be much faster than the best or no faster, as far as the spread tells.
    """

    case: Case
    best: Row | None
    own: tuple[Row, ...]
    in_torch: Mapping[str, Row]
    compared: tuple[Row, ...]
    names: Mapping[str, str]
    undecided: Row | None = None

    def __str__(self) -> str:
        """Say what to use; the user's own comes first."""
        if self.best is None and not self.own:
            return "Nothing could be timed."
        sentences = [f"{self.names[row.contender]} {_against(row, self.best)}." for row in self.own]
        sentences += [
            f"{in_torch(self.names[row.contender])} {_migrating(row, self.in_torch[row.contender])}."
            for row in self.own
            if row.contender in self.in_torch
        ]
        if self.best is not None and self.undecided is not None and not self.own:
            return _no_telling(self.best, self.undecided)
        if self.best is not None and not self.own:
            call = call_of(self.best.contender, self.case)
            sentences.append(f"Use {_in_full(self.best)}: {cost_in_words(self.best)}. The call: `{call}`.")
        if self.best is not None and self.compared:
            others = ", ".join(f"{row.contender} {_beside(row, self.best)}" for row in self.compared)
            sentences.append(f"{f'Against {self.best.contender}' if self.own else 'By comparison'}, {others}.")
        return " ".join(sentences)


def advice_by_case(rows: Iterable[Row]) -> Iterator[Advice]:
    """Say for each case what to use.

    Args:
        rows: Results.

    Yields:
        One entry for each case.
    """
    by_case: dict[Case, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    names = short_names(row.contender for found in by_case.values() for row in found if is_own(row.contender))
    for case, found in by_case.items():
        known = [row for row in found if not is_own(row.contender)]
        own = [row for row in found if is_own(row.contender) and not is_in_torch(row.contender)]
        equivalents = {code_of(row.contender): row for row in found if is_in_torch(row.contender)}
        best = fastest(known)
        compared = [row for row in known if row.contender in (BASELINE, "scratch") and row is not best]
        yield Advice(case, best, tuple(own), equivalents, tuple(compared), names, best and _undecided(best, known))


def fastest(rows: Sequence[Row]) -> Row | None:
    """Choose among the contenders of one case.

    Args:
        rows: Of one case.

    Returns:
        The fastest; but torch.nn, builtin or scratch if what the fastest saves is less than a twentieth, or may be
        noise. None if nothing was timed.
    """
    timed = [row for row in rows if row.median_us is not None]
    if not timed:
        return None
    best = min(timed, key=_time)
    kept = [row for row in timed if row.contender in PREFERRED and not _is_slower(ratio_between(row, best))] or [best]
    good = [row for row in kept if _time(row) <= NOTICEABLE * min(map(_time, kept))]
    return min(good, key=lambda row: PREFERRED.index(row.contender) if row.contender in PREFERRED else 0)


def _undecided(best: Row, rows: Sequence[Row]) -> Row | None:
    """Find who may be much faster than the best or no faster, for the spread of the times; of several the fastest."""
    others = [(ratio_between(row, best), row) for row in rows if row is not best and row.median_us is not None]
    unclear = [(ratio.low, row) for ratio, row in others if ratio.low < 1 / TELLING and ratio.high >= 1]
    return min(unclear, key=lambda found: found[0], default=(0.0, None))[1]


def _no_telling(best: Row, other: Row) -> str:
    ratio = ratio_between(other, best)
    return (
        f"No recommendation: {other.contender} takes {ratio.low:.2f} to {ratio.high:.2f} times as long as "
        f"{best.contender} ({time_in_words(_time(best))}), so the times vary too much to choose. "
        f"Measure this case again when nothing else runs."
    )


def _time(row: Row) -> float:
    assert row.median_us is not None
    return row.median_us


def _is_slower(ratio: Ratio) -> bool:
    return ratio.low > 1 and ratio.value > NOTICEABLE


def _in_full(row: Row) -> str:
    if row.contender in PREFERRED or row.contender not in CONTENDERS:
        return row.contender
    return f"{CONTENDERS[row.contender].meaning} ({row.contender})"


def _against(own: Row, best: Row | None) -> str:
    """Compare the user's own with the best of the others."""
    if own.median_us is None:
        use = "" if best is None else f"; {best.contender} takes {cost_in_words(best)}"
        return NOT_TIMED[own.status] + use
    if best is None:
        return f"takes {cost_in_words(own)}"
    ratio = ratio_between(own, best)
    speed = f"{ratio.value:.2f}× the time of" if ratio.is_clear else "within the noise as fast as"
    return f"takes {cost_in_words(own)}: {speed} {best.contender}, the best of the others ({cost_in_words(best)})"


def _migrating(own: Row, equivalent: Row) -> str:
    """Say what the equivalent of the user's own would gain."""
    if equivalent.status == "unavailable":
        return f"was not timed: {equivalent.detail}"
    if equivalent.median_us is None:
        return NOT_TIMED[equivalent.status]
    if own.median_us is None:
        return f"takes {cost_in_words(equivalent)}"
    ratio = ratio_between(own, equivalent)
    speed = "is as fast" if ratio.is_clear else "is as fast within the noise"
    if ratio.is_clear and not 1 / NOTICEABLE <= ratio.value <= NOTICEABLE:
        speed = f"is {ratio.value:.1f} times as fast" if ratio.value > 1 else f"takes {1 / ratio.value:.2f}× the time"
    command = f"sidebyside verify {shlex.quote(own.contender)} --equivalent"
    return f"{speed} at length {own.case.query_len}, with the same numbers; print it with {command}"


def _beside(row: Row, best: Row) -> str:
    if row.median_us is None:
        return NOT_TIMED[row.status]
    ratio, memory = ratio_between(row, best), bytes_in_words(row.peak_memory_bytes or 0)
    if _is_slower(ratio):
        return f"takes {ratio.value:.2f}× the time ({memory})"
    return f"is as fast ({memory})" if ratio.value <= NOTICEABLE else f"is as fast within the noise ({memory})"
