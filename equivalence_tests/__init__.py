"""Show that two implementations of attention compute the same, or where they part."""

from typing import TYPE_CHECKING

from equivalence_tests.lazily import from_homes

if TYPE_CHECKING:
    from equivalence_tests.checker.divergence import first_divergence
    from equivalence_tests.checker.doors.pytest_checks import parametrize_with_checks
    from equivalence_tests.checker.doors.watch import watch
    from equivalence_tests.checker.reach.loading import load
    from equivalence_tests.checker.reach.subject import Adapter
    from equivalence_tests.checker.verify import verify
    from equivalence_tests.instruments.differences import (
        Comparison,
        ErrorRatio,
        compare_errors,
        compare_group,
        compare_tensors,
        first_stage_that_parts,
        ulp_distance,
    )
    from equivalence_tests.instruments.weights import (
        CopiedWeights,
        WeightsDoNotMatchError,
        copy_weights,
        randomize_parameters,
    )

__all__ = [
    "Adapter",
    "Comparison",
    "CopiedWeights",
    "ErrorRatio",
    "WeightsDoNotMatchError",
    "compare_errors",
    "compare_group",
    "compare_tensors",
    "copy_weights",
    "first_divergence",
    "first_stage_that_parts",
    "load",
    "parametrize_with_checks",
    "randomize_parameters",
    "ulp_distance",
    "verify",
    "watch",
]

CHECKER = {
    "Adapter": "reach.subject",
    "first_divergence": "divergence",
    "load": "reach.loading",
    "parametrize_with_checks": "doors.pytest_checks",
    "verify": "verify",
    "watch": "doors.watch",
}
WEIGHTS = ("CopiedWeights", "WeightsDoNotMatchError", "copy_weights", "randomize_parameters")
DIFFERENCES = [name for name in __all__ if name not in CHECKER and name not in WEIGHTS]

__getattr__ = from_homes(
    __name__,
    {name: f"equivalence_tests.checker.{home}" for name, home in CHECKER.items()}
    | dict.fromkeys(WEIGHTS, "equivalence_tests.instruments.weights")
    | dict.fromkeys(DIFFERENCES, "equivalence_tests.instruments.differences"),
)
