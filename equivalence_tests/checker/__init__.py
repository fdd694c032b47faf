"""The checker for anybody's attention: watch it run, compare it with the built-in, and name its mistake."""

from typing import TYPE_CHECKING

from equivalence_tests.lazily import from_homes

if TYPE_CHECKING:
    from equivalence_tests.checker.divergence import Divergence, first_divergence
    from equivalence_tests.checker.doors.pytest_checks import parametrize_with_checks
    from equivalence_tests.checker.doors.watch import watch
    from equivalence_tests.checker.reach.errors import CannotCheckError
    from equivalence_tests.checker.reach.subject import Adapter
    from equivalence_tests.checker.reporting.findings import KINDS, CheckResult, Finding
    from equivalence_tests.checker.reporting.report import Report
    from equivalence_tests.checker.verify import verify

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
    "watch",
]

HOMES = {
    "KINDS": "reporting.findings",
    "Adapter": "reach.subject",
    "CannotCheckError": "reach.errors",
    "CheckResult": "reporting.findings",
    "Divergence": "divergence",
    "Finding": "reporting.findings",
    "Report": "reporting.report",
    "first_divergence": "divergence",
    "parametrize_with_checks": "doors.pytest_checks",
    "verify": "verify",
    "watch": "doors.watch",
}
__getattr__ = from_homes(__name__, {name: f"{__name__}.{home}" for name, home in HOMES.items()})
