"""Show that two implementations of attention compute the same, or where they part."""

from equivalence_tests.checker.divergence import first_divergence
from equivalence_tests.checker.pytest_checks import parametrize_with_checks
from equivalence_tests.checker.subject import Adapter
from equivalence_tests.checker.verify import verify
from equivalence_tests.comparing import (
    Comparison,
    ErrorRatio,
    compare_errors,
    compare_group,
    compare_tensors,
    first_stage_that_parts,
    ulp_distance,
)
from equivalence_tests.weights import CopiedWeights, WeightsDoNotMatchError, copy_weights, randomize_parameters

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
    "parametrize_with_checks",
    "randomize_parameters",
    "ulp_distance",
    "verify",
]
