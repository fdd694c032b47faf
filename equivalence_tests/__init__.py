"""Show that two implementations of attention compute the same, or where they part."""

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
    "Comparison",
    "CopiedWeights",
    "ErrorRatio",
    "WeightsDoNotMatchError",
    "compare_errors",
    "compare_group",
    "compare_tensors",
    "copy_weights",
    "first_stage_that_parts",
    "randomize_parameters",
    "ulp_distance",
]
