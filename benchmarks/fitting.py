"""The quick preset, fitted to the machine: sequences as long as it gets through in a fraction of a second."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.grids import Case, Grid, cases_of
from benchmarks.work import flops

__all__ = ["fitted"]

LONGEST_RUN_SECONDS = 0.02  # at the rate of a large matrix product, which attention does not reach
FACTORS = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25)


def fitted(grids: Sequence[Grid], flops_per_s: float, begun: Case | None = None) -> list[Grid]:
    """Make the sequences of grids longer or shorter, all by the same factor.

    Decoding is not made longer: its time is that of its many small steps.

    Args:
        grids: Values of each axis.
        flops_per_s: The rate of matrix products on this machine.
        begun: The first case of an earlier run, which is to be continued with the factor that it had.

    Returns:
        The grids with the largest factor, from a quarter to sixteen, at which no case takes long.

    >>> [grid.length for grid in fitted([Grid(("attention",), batch=(4,), length=(64, 256))], flops_per_s=1e12)]
    [(256, 1024)]
    """
    scaled = [[_scaled(grid, factor) for grid in grids] for factor in FACTORS]
    before = (found for found in scaled if begun is not None and _begins_with(found, begun))
    fitting = (found for found in scaled if _longest_seconds(found, flops_per_s) <= LONGEST_RUN_SECONDS)
    return next(before, None) or next(fitting, scaled[-1])


def _begins_with(grids: Sequence[Grid], case: Case) -> bool:
    return next((grid.length[0] for grid in grids if case.component in grid.component), 0) == case.query_len


def _scaled(grid: Grid, factor: float) -> Grid:
    factor = min(factor, 1.0) if grid.component == ("generate",) else factor
    return replace(grid, length=tuple(max(1, int(factor * length)) for length in grid.length))


def _longest_seconds(grids: Sequence[Grid], flops_per_s: float) -> float:
    return max(map(flops, cases_of(grids, [1], ["cpu"]))) / flops_per_s
