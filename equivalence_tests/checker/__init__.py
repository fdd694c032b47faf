"""The checker for anybody's attention: read it, compare it with the built-in, and name its mistake."""

from equivalence_tests.checker.divergence import Divergence, first_divergence
from equivalence_tests.checker.errors import CannotCheckError
from equivalence_tests.checker.pytest_checks import parametrize_with_checks
from equivalence_tests.checker.report import CheckResult, Finding, Report
from equivalence_tests.checker.subject import Adapter
from equivalence_tests.checker.verify import KINDS, verify

__all__ = [
    "KINDS",
    "Adapter",
    "CannotCheckError",
    "CheckResult",
    "Divergence",
    "Finding",
    "Report",
    "first_divergence",
    "parametrize_with_checks",
    "verify",
]
