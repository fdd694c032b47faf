"""What scratch aims for on the CPU: never slower than torch.nn, and near its kernels; and whether results show it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.grids import Case
from benchmarks.results import Row, ratio_between
from benchmarks.summarising import Ratio

__all__ = ["AIMS", "Aim", "Outcome", "compares", "outcomes"]

LONG = 1024
MODULES = ("self_attention", "cross_attention", "encoder_layer", "decoder_layer", "transformer")


@dataclass(frozen=True)
class Aim:
    """One thing to reach.

    Args:
        what: In words.
        against: What scratch is compared with.
        at_most: The greatest ratio.
        concerns: Whether it is about a case.
        of_memory: Whether the ratio is that of the memory, not that of the time.
    """

    what: str
    against: str
    at_most: float
    concerns: Callable[[Case], bool]
    of_memory: bool = False


def _is_long_eval(case: Case) -> bool:
    return case.component in MODULES and case.mode == "forward" and case.query_len >= LONG


def _is_function(case: Case, mode: str) -> bool:
    return case.component == "attention" and case.mode == mode and case.mask in ("none", "causal")


AIMS = (
    Aim("modules in eval from length 1024 on", "torch.nn", 1.0, _is_long_eval),
    Aim(
        "modules elsewhere, training included",
        "torch.nn",
        1.05,
        lambda case: case.component in MODULES and not _is_long_eval(case),
    ),
    Aim(
        "memory of modules from length 1024 on",
        "torch.nn",
        1.1,
        lambda case: case.component in MODULES and case.query_len >= LONG,
        of_memory=True,
    ),
    Aim(
        "the function from length 512 on, also causal",
        "flash",
        1.1,
        lambda case: _is_function(case, "forward") and case.query_len >= LONG // 2,
    ),
    Aim(
        "the function in training from length 1024 on, also causal",
        "flash",
        1.05,
        lambda case: _is_function(case, "backward") and case.query_len >= LONG,
    ),
    Aim(
        "the function in training at batch 32 and length 32",
        "naive",
        1.0,
        lambda case: _is_function(case, "backward") and (case.batch, case.query_len) == (32, 32),
    ),
    Aim(
        "the function with a window of 256 at length 4096",
        "torch.nn",
        0.3,
        lambda case: case.component == "attention" and (case.window, case.query_len) == (256, 4096),
    ),
    Aim(
        "decoding 256 tokens with the cache, at least 6 times as fast as without",
        "scratch recomputed",
        0.167,
        lambda case: case.component == "generate" and case.query_len == 256,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How an aim fares in some results.

    Args:
        aim: The aim.
        ratios: One for each case that it concerns and in which both were timed, by case; none if there is no such case.
    """

    aim: Aim
    ratios: dict[Case, Ratio]

    @property
    def worst(self) -> Case:
        """The case with the greatest ratio."""
        return max(self.ratios, key=lambda case: self.ratios[case].value)

    @property
    def missed(self) -> list[Case]:
        """The cases above the aim."""
        return [case for case, ratio in self.ratios.items() if ratio.value > self.aim.at_most]

    @property
    def verdict(self) -> str:
        """Say in words whether it is met."""
        return "not measured" if not self.ratios else "missed" if self.missed else "met"


def compares(case: Case, contender: str) -> bool:
    """Whether an aim about time concerns a case and compares this contender in it.

    >>> [compares(Case("attention", query_len=4096), name) for name in ("scratch", "flash", "math")]
    [True, True, False]
    """
    return any(contender in ("scratch", aim.against) and aim.concerns(case) for aim in AIMS if not aim.of_memory)


def outcomes(rows: Sequence[Row]) -> Iterator[Outcome]:
    """Hold results against the aims.

    Args:
        rows: Results of one machine.

    Yields:
        One entry for each aim; none without results from a CPU. On a GPU scratch is the textbook, unless its kernel is
        switched on.
    """
    rows = [row for row in rows if row.case.device == "cpu"]
    if not rows:
        return
    timed = {(row.case, row.contender): row for row in rows if row.status == "timed"}
    for aim in AIMS:
        pairs = ((row, timed.get((row.case, aim.against))) for row in _of_scratch(timed.values(), aim))
        yield Outcome(aim, {row.case: _ratio(aim, row, other) for row, other in pairs if other is not None})


def _of_scratch(rows: Iterable[Row], aim: Aim) -> Iterator[Row]:
    return (row for row in rows if row.contender == "scratch" and aim.concerns(row.case))


def _ratio(aim: Aim, row: Row, other: Row) -> Ratio:
    if not aim.of_memory:
        return ratio_between(row, other)
    ratio = (row.peak_memory_bytes or 0) / max(other.peak_memory_bytes or 0, 1)
    return Ratio(ratio, ratio, ratio)
